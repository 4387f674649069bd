"""Tied tensors are known under the names of the folder, of every class: in findings, and where a base could undo the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.hub.classes.expected_tensors import Expected
from ckpt_cli.hub.classes.fit import KnownClass, known_class
from ckpt_cli.hub.config_text import read_config
from tests.architectures import MODELS, answered_here, build
from tests.tensors import load
from tests.test_claims import notes

NESTED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3, images", "llava", "llava_next", "internvl", "idefics3")
NESTED += ("mistral3", "paligemma")
TIED = (*NESTED, "qwen2", "gpt_neox", "gpt2", "mamba", "t5", "bart", "whisper")


@pytest.fixture(autouse=True)
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


def saved(folder: Path, name: str) -> tuple[Path, dict[str, str]]:
    """A model that ties, as `save_pretrained` writes it, and which names are tied to which."""
    kind, model_type, options = MODELS[name]
    build(kind, model_type, {**options, "tie_word_embeddings": True}).save_pretrained(folder)
    config = read_config(folder / "config.json")
    known = known_class(config, {name: tuple(tensor.shape) for name, tensor in load(folder).items()})
    assert isinstance(known, KnownClass)
    assert isinstance(known.known, Expected)
    assert known.known.hub_tied
    return folder, dict(known.known.hub_tied)


def rewritten(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", TIED)
class TestAClassThatTies:
    def test_has_findings_under_the_names_of_the_folder(self, tmp_path: Path, name: str) -> None:
        folder, tied = saved(tmp_path / "saved", name)
        held = load(folder)
        assert set(tied.values()) <= held.keys()
        rewritten(folder, {**held, **{head: held[owner] + 1 for head, owner in tied.items()}})
        found = ckpt_cli.verify(folder, full=True).findings
        assert {item.tensor for item in found if item.code == "tied-stored"} == set(tied)
        differing = {item.tensor: item.message for item in found if item.code == "tied-differ"}
        assert differing == {head: f"{owner} has other values" for head, owner in tied.items()}
        assert not {"extra-tensor", "mixed-names", "missing-tensor"} & {item.code for item in found}

    def test_takes_nothing_from_a_base_that_is_tied_to_what_was_trained(self, tmp_path: Path, name: str) -> None:
        base, tied = saved(tmp_path / "base", name)
        trained, _ = saved(tmp_path / "trained", name)
        held = load(trained)
        head, owner = next((head, owner) for head, owner in reversed(tied.items()))
        rewritten(trained, {(head if key == owner else key): tensor + 1 for key, tensor in held.items()})
        result = ckpt_cli.merge(trained, tmp_path / "out", base=base, carry_from_base=owner)
        told = notes(result)
        assert f"{owner} is not taken from the base: config.json ties it to {head}, which was trained" in told["tied-head"]
        assert head in told["tied-alone"]
        assert "unused-pattern" not in told
        written = load(tmp_path / "out")
        assert owner not in written
        assert torch.equal(written[head], held[owner] + 1)
        found = ckpt_cli.verify(tmp_path / "out", full=True).findings
        assert [item.tensor for item in found if item.code == "tied-alone"] == [head]

    def test_has_a_name_for_a_tied_tensor_alone(self, tmp_path: Path, name: str) -> None:
        folder, tied = saved(tmp_path / "saved", name)
        held = load(folder)
        head, owner = next(iter(tied.items()))
        rewritten(folder, {**held, head: held[owner] + 1})
        ckpt_cli.merge(folder, tmp_path / "out", include=head)
        assert load(tmp_path / "out").keys() == {head}
        assert {item.code for item in ckpt_cli.verify(tmp_path / "out").findings if item.severity != "info"} == {"tied-alone"}

    def test_follows_the_rule_of_the_hint(self, tmp_path: Path, name: str) -> None:
        trained, tied = saved(tmp_path / "trained", name)
        held = load(trained)
        head, owner = next(iter(tied.items()))
        rewritten(trained, {(head if key == owner else key): tensor for key, tensor in held.items()})
        hint = notes(ckpt_cli.merge(trained, tmp_path / "out"))["tied-alone"]
        ckpt_cli.merge(trained, tmp_path / "renamed", key_map=hint.partition("--key-map '")[2].rstrip("'"))
        assert load(tmp_path / "renamed").keys() == held.keys()
        assert all(torch.equal(tensor, held[key]) for key, tensor in load(tmp_path / "renamed").items())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3, images", "t5", "gpt_neox"])
@pytest.mark.parametrize("options", [{"carry_from_base": "*"}, {"match_base": True, "fill_missing_from_base": True, "drop_extra": True}])
def test_the_loaded_model_has_what_was_trained(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    base, tied = saved(tmp_path / "base", name)
    trained, _ = saved(tmp_path / "trained", name)
    held = load(trained)
    head, owner = list(tied.items())[-1]
    rewritten(trained, {(head if key == owner else key): tensor + 1 for key, tensor in held.items()})
    ckpt_cli.merge(trained, tmp_path / "out", base=base, **options)
    model = getattr(transformers, MODELS[name][0]).from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(model.get_input_embeddings().weight, held[owner] + 1)
    assert torch.equal(model.get_output_embeddings().weight, held[owner] + 1)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3, images", "qwen2"])
def test_without_transformers_a_base_undoes_nothing_either(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, tied = saved(tmp_path / "base", name)
    trained, _ = saved(tmp_path / "trained", name)
    for module in ("expected_tensors", "rules", "transformers_child"):
        monkeypatch.setattr(f"ckpt_cli.hub.classes.{module}.installed_version", lambda: None)
    (head, owner), held = next(iter(tied.items())), load(trained)
    rewritten(trained, {(head if key == owner else key): tensor + 1 for key, tensor in held.items()})
    result = ckpt_cli.merge(trained, tmp_path / "out", base=base, carry_from_base=owner)
    assert owner not in load(tmp_path / "out")
    assert "tied-head" in notes(result)
