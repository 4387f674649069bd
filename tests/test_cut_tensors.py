"""A tensor that is not whole is told from a config.json of another model: the first is refused, of the second everything deviates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckpt_cli
from ckpt_cli.boxes import Shape
from ckpt_cli.errors import Inconsistent
from ckpt_cli.hub.classes.expected_tensors import Expected, expected_tensors
from ckpt_cli.hub.classes.shapes.config_numbers import Number, config_numbers
from ckpt_cli.hub.classes.shapes.cut_tensors import Fitting, cut_tensors
from ckpt_cli.name_patterns import pattern_of
from tests.architectures import MODELS, answered_here, build
from tests.tensors import Tensors, differences, load

UP = "model.layers.1.mlp.up_proj.weight"

Write = Callable[[Path, Tensors], Path]


@pytest.fixture(autouse=True)
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers answers in this process, which has it already."""
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


def saved(folder: Path, name: str = "qwen2", **options: Any) -> Tensors:
    """A model's config.json in a folder, and its tensors."""
    kind, model_type, given = MODELS[name]
    model = build(kind, model_type, {**given, **options})
    model.save_pretrained(folder)
    return load(folder)


def as_hub(folder: Path, tensors: Tensors) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def as_dcp(folder: Path, tensors: Tensors) -> Path:
    (folder / "model.safetensors").unlink()
    save_dcp({"model": tensors}, checkpoint_id=folder, no_dist=True)
    return folder


def as_ranks(folder: Path, tensors: Tensors) -> Path:
    (folder / "model.safetensors").unlink()
    for rank in range(2):
        torch.save(tensors, folder / f"model_world_size_2_rank_{rank}.pt")
    return folder


def notes(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes}


CUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "rows of one matrix": lambda t: {UP: t[UP][: len(t[UP]) // 2].clone()},
    "columns of one matrix": lambda t: {UP: t[UP][:, :5].clone()},
    "one dimension less": lambda t: {UP: t[UP][0].clone()},
    "one matrix of every layer": lambda t: {name: x[: len(x) // 2].clone() for name, x in t.items() if "up_proj" in name},
    "one bias of every layer": lambda t: {name: x[: len(x) // 2].clone() for name, x in t.items() if "q_proj.bias" in name},
    "all of one layer's heads": lambda t: {n: x[: len(x) // 2].clone() for n, x in t.items() if "layers.0.self_attn.q_proj" in n},
    "two of three layers": lambda t: {
        name: x[: len(x) // 2].clone() for name, x in t.items() if "down_proj" in name and "layers.1" not in name
    },
    "the last norm": lambda t: {"model.norm.weight": t["model.norm.weight"][:7].clone()},
    "columns of the head": lambda t: {"lm_head.weight": t["lm_head.weight"][:, :7].clone()},
    "rows of the head, whose vocabulary the embedding proves": lambda t: {"lm_head.weight": t["lm_head.weight"][:20].clone()},
    "rows of the embedding, whose vocabulary the head proves": lambda t: {
        "model.embed_tokens.weight": t["model.embed_tokens.weight"][:20].clone()
    },
    "all norms alike": lambda t: {name: x[: len(x) // 2].clone() for name, x in t.items() if "norm" in name},
    "the queries of all layers": lambda t: {name: x[: len(x) // 2].clone() for name, x in t.items() if "q_proj" in name},
    "head and embedding, differently": lambda t: {
        "lm_head.weight": t["lm_head.weight"][:20].clone(),
        "model.embed_tokens.weight": t["model.embed_tokens.weight"][:30].clone(),
    },
    "different parts of two layers": lambda t: {
        f"model.layers.{i}.mlp.up_proj.weight": t[f"model.layers.{i}.mlp.up_proj.weight"][: 8 + i].clone() for i in range(2)
    },
}


@pytest.mark.parametrize("cut", CUTS)
class TestACutTensor:
    @pytest.mark.parametrize("write", [as_hub, as_dcp, as_ranks], ids=lambda write: write.__name__)
    def test_is_refused_with_what_it_should_be(self, tmp_path: Path, write: Write, cut: str) -> None:
        tensors = saved(tmp_path / "run", num_hidden_layers=3)
        changed = CUTS[cut](tensors)
        path = write(tmp_path / "run", {**tensors, **changed})
        with pytest.raises(Inconsistent, match="not whole") as caught:
            ckpt_cli.merge(path, tmp_path / "out")
        assert caught.value.tensor in changed
        assert " x ".join(map(str, tensors[caught.value.tensor].shape)) in (caught.value.expected or "")
        assert caught.value.exit_code == 4
        assert not (tmp_path / "out").exists()

    def test_is_left_out_as_the_hint_says(self, tmp_path: Path, cut: str) -> None:
        tensors = saved(tmp_path / "run", num_hidden_layers=3)
        changed = CUTS[cut](tensors)
        path = as_hub(tmp_path / "run", {**tensors, **changed})
        with pytest.raises(Inconsistent) as caught:
            ckpt_cli.merge(path, tmp_path / "out")
        globs = (caught.value.hint or "").split("'")[1::2]
        ckpt_cli.merge(path, tmp_path / "out", exclude=globs)
        assert differences(load(tmp_path / "out"), {name: tensor for name, tensor in tensors.items() if name not in changed}) == []

    def test_is_found_by_verify_which_does_not_blame_the_config(self, tmp_path: Path, cut: str) -> None:
        tensors = saved(tmp_path / "run", num_hidden_layers=3)
        changed = CUTS[cut](tensors)
        found = ckpt_cli.verify(as_hub(tmp_path / "run", {**tensors, **changed}))
        assert {item.tensor for item in found.findings if item.code == "cut-tensor"} == changed.keys()
        assert "wrong-shape" not in {item.code for item in found.findings}
        assert found.exit_code == 1
        assert not found.loads


class TestWhatIsNoCut:
    def test_a_base_of_the_same_shapes(self, tmp_path: Path) -> None:
        """A base that was pruned has matrices that its class does not build."""
        tensors = saved(tmp_path / "run")
        pruned = {**tensors, **CUTS["rows of one matrix"](tensors)}
        as_hub(tmp_path / "run", pruned)
        saved(tmp_path / "base")
        as_hub(tmp_path / "base", pruned)
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=tmp_path / "base")
        assert "other-shapes" in notes(result)
        assert differences(load(tmp_path / "out"), pruned) == []

    def test_resized_vocabularies_and_heads(self, tmp_path: Path) -> None:
        tensors = saved(tmp_path / "run")
        rows = {name: torch.cat([tensors[name], tensors[name][:3]]) for name in ("model.embed_tokens.weight", "lm_head.weight")}
        result = ckpt_cli.merge(as_hub(tmp_path / "run", {**tensors, **rows}), tmp_path / "out")
        assert "other-shapes" in notes(result)
        assert "wrong-shape" in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}

    @pytest.mark.parametrize(
        ("name", "resized"),
        [
            ("qwen3, tied", r"embed_tokens"),
            ("qwen2, sequence classification", r"score"),
            ("qwen2, sequence classification", r"embed_tokens"),
            ("bert", r"word_embeddings|predictions\.bias|predictions\.decoder"),
            ("bert", r"position_embeddings"),
            ("whisper", r"decoder\.embed_positions"),
            ("mixtral", r"gate\.weight|experts\.[4-7]"),
        ],
    )
    def test_what_one_number_decides_alone(self, tmp_path: Path, name: str, resized: str) -> None:
        """Rows of a tied or bare embedding, labels, positions: another config.json would fit."""
        tensors = saved(tmp_path / "run", name)
        changed = {n: torch.cat([x, x[:1]]) for n, x in tensors.items() if re.search(resized, n)}
        extra = {n.replace("experts.3", "experts.4"): x.clone() for n, x in tensors.items() if "experts.3" in n and name == "mixtral"}
        result = ckpt_cli.merge(as_hub(tmp_path / "run", {**tensors, **changed, **extra}), tmp_path / "out")
        assert "other-shapes" in notes(result)
        assert "cut-tensor" not in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}

    @pytest.mark.parametrize("name", ["llama", "gemma3, images", "bart", "t5", "qwen2_5_vl", "deepseek_v3", "llama, tied"])
    def test_embeddings_that_transformers_resized(self, tmp_path: Path, name: str) -> None:
        """The model is saved with its config.json of before."""
        kind, model_type, options = MODELS[name]
        model = build(kind, model_type, options)
        model.save_pretrained(tmp_path / "before")
        model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + 7, pad_to_multiple_of=16)
        model.save_pretrained(tmp_path / "run")
        (tmp_path / "run" / "config.json").write_bytes((tmp_path / "before" / "config.json").read_bytes())
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert "other-shapes" in notes(result)
        assert differences(load(tmp_path / "out"), load(tmp_path / "run")) == []

    def test_a_vocabulary_that_was_resized_does_not_excuse_a_cut_matrix(self, tmp_path: Path) -> None:
        tensors = saved(tmp_path / "run")
        rows = {"model.embed_tokens.weight": torch.cat([tensors["model.embed_tokens.weight"]] * 2)}
        path = as_hub(tmp_path / "run", {**tensors, **rows, **CUTS["one matrix of every layer"](tensors)})
        with pytest.raises(Inconsistent, match="unlike the others"):
            ckpt_cli.merge(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("qwen3_moe", r"mlp\.gate\.weight"),
        ("mixtral", r"(gate|router)\.weight"),
        ("gpt_oss", r"router\.(weight|bias)"),
        ("deepseek_v3", r"e_score_correction_bias"),
        ("deepseek_v3", r"kv_a_layernorm"),
        ("gemma3", r"(q|k)_norm"),
        ("bert", r"predictions\.bias"),
        ("bart", r"encoder\.embed_positions"),
        ("mamba", r"conv1d\.weight"),
        ("qwen2_5_vl", r"visual\.merger\.mlp\.0"),
    ],
)
def test_what_others_prove_is_cut_in_many_classes(tmp_path: Path, name: str, cut: str) -> None:
    """Experts are counted by their names, vocabularies by what is beside the bias, towers by their layers."""
    tensors = saved(tmp_path / "run", name)
    changed = {n: x[: len(x) // 2].clone() for n, x in tensors.items() if re.search(cut, n) and len(x) > 1}
    assert changed
    with pytest.raises(Inconsistent, match="not whole") as caught:
        ckpt_cli.merge(as_hub(tmp_path / "run", {**tensors, **changed}), tmp_path / "out")
    assert caught.value.tensor in changed
    assert {item.tensor for item in ckpt_cli.verify(tmp_path / "run").findings if item.code == "cut-tensor"} == changed.keys()


@pytest.mark.parametrize("rows", [20, 80])
def test_a_tied_head_that_is_stored_has_the_shape_of_its_embedding(tmp_path: Path, rows: int) -> None:
    """transformers refuses another one; both resized alike are another vocabulary."""
    tensors = saved(tmp_path / "run", "llama, tied")
    head = torch.ones(rows, 32)
    path = as_hub(tmp_path / "run", {**tensors, "lm_head.weight": head})
    with pytest.raises(Inconsistent, match="not whole" if rows == 20 else "unlike the others") as caught:
        ckpt_cli.merge(path, tmp_path / "out")
    assert caught.value.tensor == "lm_head.weight"
    assert {item.tensor for item in ckpt_cli.verify(path).findings if item.code == "cut-tensor"} == {"lm_head.weight"}
    as_hub(path, {**tensors, "lm_head.weight": head, "model.embed_tokens.weight": head.clone()})
    assert "other-shapes" in notes(ckpt_cli.merge(path, tmp_path / "out"))


def test_a_tied_head_that_stands_for_its_embedding_proves_the_vocabulary(tmp_path: Path) -> None:
    tensors = saved(tmp_path / "run", "bert")
    name = "cls.predictions.bias"
    held = {n: x for n, x in tensors.items() if not n.endswith("word_embeddings.weight")}
    held |= {"cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"], name: tensors[name][:9].clone()}
    found = ckpt_cli.verify(as_hub(tmp_path / "run", held))
    assert {item.tensor for item in found.findings if item.code == "cut-tensor"} == {name}


def numbers(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from numbers(value, (*path, key))
        elif type(value) is int and value > 1 and not key.endswith("_id") and "layers" not in key:
            yield (*path, key), value


@pytest.mark.parametrize("name", MODELS)
def test_no_wrong_number_of_any_config_makes_tensors_look_cut(name: str) -> None:
    """The true config is compared with tensors of models with another number, one for each number of the config."""
    kind, model_type, options = MODELS[name]
    config = {"architectures": [kind], "model_type": model_type, **json.loads(json.dumps(options))}
    true, decided = expected_tensors(config), config_numbers(config)
    assert isinstance(true, Expected)
    assert decided
    for path, value in numbers(config):
        other = json.loads(json.dumps(config))
        level = other
        for key in path[:-1]:
            level = level[key]
        level[path[-1]] = 2 * value
        trained = expected_tensors(other)
        if not isinstance(trained, Expected):
            continue
        reshaped: dict[str, tuple[Shape, Shape]] = {
            name: (shape, trained.hub[name]) for name, shape in true.hub.items() if name in trained.hub and trained.hub[name] != shape
        }
        fitting = {(pattern_of(name)[0], shape) for name, shape in true.hub.items() if trained.hub.get(name) == shape}
        counted = {pattern_of(name)[0] for name in true.hub} - {pattern_of(name)[0] for name in true.hub.keys() ^ trained.hub.keys()}
        if len(reshaped) <= len(fitting):
            assert cut_tensors(reshaped, Fitting(frozenset(fitting), frozenset(counted)), decided) == (), path


def test_experts_of_one_rank_are_not_explained_by_one_another() -> None:
    """A router that still counts all of them shows that some are missing."""
    experts = {f"layers.{i}.mlp.experts.{part}": ((8, 4, 6), (4, 4, 6)) for i in range(2) for part in ("gate_up_proj", "down_proj")}
    router = {f"layers.{i}.mlp.gate.weight": ((8, 6), (4, 6)) for i in range(2)}
    shapes = {(pattern_of(name)[0], wanted): (16, *wanted[1:]) for name, (wanted, _) in {**experts, **router}.items()}
    number = Number("num_experts", shapes, frozenset())
    proofs = Fitting(frozenset({("layers.{}.mlp.gate.weight", (8, 6))}))
    assert set(cut_tensors(experts, proofs, [number])) == experts.keys()
    assert cut_tensors({**experts, **router}, Fitting(), [number]) == ()
