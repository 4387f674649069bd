"""Heads that the version which wrote config.json did not tie, and today's class does: kept where they are, told where they are lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.hub.classes import compile, expected_tensors, rules
from ckpt_cli.hub.classes.installed import of_version_4
from ckpt_cli.hub.classes.tying import lost_head, own_head
from tests.tensors import load

transformers = pytest.importorskip("transformers")

T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "tie_word_embeddings": False,
    "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 24,
}  # fmt: skip
MAMBA = {
    "model_type": "mamba", "architectures": ["MambaForCausalLM"],
    "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 24, "state_size": 4,
}  # fmt: skip
MISTRAL3 = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
HEAD = "lm_head.weight"


@pytest.fixture(autouse=True)
def _answers(asked_here: None) -> None:
    pass


def saved(folder: Path, config: dict[str, Any], *, head: bool, equal: bool = False) -> Path:
    names = compile.tensors_of(config)
    state = {name: torch.randn(shape) for name, shape in names["native"].items() if name not in names["tied"] or name == HEAD}
    if equal:
        state[HEAD] = state[names["tied"][HEAD]].clone()
    if not head:
        del state[HEAD]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def codes(items: Any) -> set[str]:
    return {item.code for item in items}


@pytest.mark.parametrize("asked", [True, False], ids=["with transformers", "without"])
@pytest.mark.parametrize("config", [T5, {**MAMBA, "transformers_version": "5.0.0"}], ids=["said", "by an older default"])
def test_a_head_of_its_own(config: dict[str, Any], asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, lost = (saved(tmp_path / str(head), config, head=head) for head in (True, False))
    if not asked:
        for module in (expected_tensors, rules):
            monkeypatch.setattr(module, "installed_version", lambda: None)
    notes = ckpt_cli.merge(there, tmp_path / "a").outputs[0].notes
    assert not codes(notes) & {"tied-heads-differ", "lost-head", "unknown-names"}
    assert HEAD in load(tmp_path / "a")
    (note,) = [note for note in ckpt_cli.merge(lost, tmp_path / "b").outputs[0].notes if note.code == "lost-head"]
    assert note.level == "warning"
    assert "lost-head" in codes(ckpt_cli.verify(lost).findings)
    assert "lost-head" not in codes(ckpt_cli.verify(there).findings)
    if asked:
        kind = getattr(transformers, config["architectures"][0])
        assert torch.equal(kind.from_pretrained(tmp_path / "a").state_dict()[HEAD], load(there)[HEAD])


def test_a_head_of_an_average_is_not_left_out(tmp_path: Path) -> None:
    state = load(saved(tmp_path / "model", T5, head=True))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(T5))
    torch.save({"ema": state}, run / "ema.pt")
    ckpt_cli.merge(run, tmp_path / "out", type="ema")
    assert HEAD in load(tmp_path / "out")


@pytest.mark.parametrize("version", [None, "4.57.6", "5.24.0"])
def test_a_tied_head_is_not_looked_for(version: str | None, tmp_path: Path) -> None:
    config = {**MAMBA, **({"transformers_version": version} if version else {})}
    found = ckpt_cli.verify(saved(tmp_path / "run", config, head=False)).findings
    assert "lost-head" not in codes(found)


def test_what_the_class_ties_by_default_is_not_said_to_be_in_the_config(tmp_path: Path) -> None:
    for place, config, who in (("a", MAMBA, "the class, by default,"), ("b", {**MAMBA, "tie_word_embeddings": True}, "config.json")):
        notes = ckpt_cli.merge(saved(tmp_path / place, config, head=True), tmp_path / f"{place}-out").outputs[0].notes
        (text,) = [note.text for note in notes if note.code == "tied-heads-differ"]
        assert text.startswith(f"{who} ties {HEAD}")


@pytest.mark.parametrize(
    ("text", "version", "own"),
    [
        ({"model_type": "mistral"}, "4.51.3", True),
        ({"model_type": "mistral", "tie_word_embeddings": True}, "4.51.3", False),
        ({"model_type": "gemma2"}, "4.51.3", False),
        ({"model_type": "unheard"}, "4.51.3", False),
        ({"model_type": "mistral"}, "5.24.0", False),
        ({"model_type": "mistral"}, None, False),
        ({"model_type": "mistral", "tie_word_embeddings": False}, None, True),
    ],
)
def test_version_4_asked_the_language_model(text: dict[str, Any], version: str | None, own: bool) -> None:
    config = {**MISTRAL3, "text_config": text, "transformers_version": version}
    assert (own_head(config) is not None) == own
    names = ["language_model.model.embed_tokens.weight", "language_model.model.norm.weight"]
    assert (lost_head(config, names) is not None) == own
    assert lost_head(config, [*names, "language_model.lm_head.weight"]) is None
    assert lost_head(config, ["language_model.model.norm.weight"]) is None


def test_an_expression_of_a_class_that_is_none_is_passed_over() -> None:
    assert of_version_4.expressions(["b.*", "*position", "a"]) == ["a", "b.*"]


def test_names_in_memory_without_rules_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside transformers 4, where nothing is compiled."""
    from tests.test_transformers_versions import folders, table

    monkeypatch.setattr(rules, "asked_child", lambda *_: None)
    _, trained = folders(tmp_path, table()["4.57.6"]["llava, tied"])
    result = ckpt_cli.merge(trained, tmp_path / "out").outputs[0]
    assert result.naming.startswith("as the training named them: ")
    assert all(name.startswith("model.") for name in load(tmp_path / "out"))


def test_a_model_that_is_not_tied_until_it_is_loaded_is_saved_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by transformers 5.0."""
    tie, calls = transformers.MambaForCausalLM.tie_weights, []

    def only_later(model: Any, *_: Any, **__: Any) -> None:
        calls.append(model)
        if len(calls) > 1:
            tie(model)

    monkeypatch.setattr(transformers.MambaForCausalLM, "tie_weights", only_later)
    assert HEAD in compile.tensors_of({**MAMBA, "tie_word_embeddings": True})["tied"]


def test_tensors_are_found_without_a_method_for_them() -> None:
    """Models of transformers 4.45 are torch's modules alone."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    assert of_version_4.tensor_of(model, "0.weight") is model[0].weight
    assert of_version_4.tensor_of(model, "0.running_mean") is model[0].running_mean
