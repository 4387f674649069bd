"""LoRA as parametrizations of torch: the tensors of a model's own class, whatever they are called; nothing of PEFT's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize

import ckpt_cli
from ckpt_cli.errors import Inconsistent, MissingTensors, Unsupported, UsageError
from ckpt_cli.hub.adapters.parametrized import parametrized_factors
from ckpt_cli.hub.peft_names import has_adapters
from tests.architectures import MODELS, build

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")]

RANK = 4


class LowRank(nn.Module):
    """Factors beside a weight; of several tasks one stack each, which the weight itself is without, as jina-embeddings-v3 has them."""

    def __init__(self, rows: int, columns: int, tasks: int = 0) -> None:
        super().__init__()
        lead = (tasks,) if tasks else ()
        self.tasks = tasks
        self.lora_A = nn.Parameter(torch.randn(*lead, RANK, columns))
        self.lora_B = nn.Parameter(torch.randn(*lead, rows, RANK))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if self.tasks else weight + self.lora_B @ self.lora_A


class OfRows(nn.Module):
    """The factors of an embedding, whose rows are those of A."""

    def __init__(self, rows: int, columns: int, tasks: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.randn(tasks, rows, RANK))
        self.lora_B = nn.Parameter(torch.randn(tasks, RANK, columns))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


class Embedder(nn.Module):
    def __init__(self, tasks: int = 5) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(24, 8)
        self.Wqkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        parametrize.register_parametrization(self.word_embeddings, "weight", OfRows(24, 8, tasks))
        parametrize.register_parametrization(self.Wqkv, "weight", LowRank(24, 8, tasks))


CODE = {
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
    "lora_rank": RANK,
    "lora_alpha": 1,
}


def saved(folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("tasks", [1, 2, 5])
@pytest.mark.parametrize("lora", [None, "fuse", "keep"])
def test_of_a_class_of_its_own_is_written_as_it_is(tasks: int, lora: Any, tmp_path: Path) -> None:
    model = Embedder(tasks)
    run = saved(tmp_path / "run", model.state_dict(), CODE)
    done = ckpt_cli.merge(run, tmp_path / "out", lora=lora)
    assert done.outputs[0].lora is None
    assert "unfused-adapters" not in {note.code for note in done.outputs[0].notes}
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())
    for checked in (ckpt_cli.verify(run), ckpt_cli.verify(tmp_path / "out", against=run)):
        assert not checked.of_severity("error")
        assert not {item.code for item in checked.findings} & {"damaged-adapter", "unfused-adapters"}
    fresh = Embedder(tasks)
    ckpt_cli.load_into(fresh, tmp_path / "out")
    assert torch.equal(fresh.Wqkv.parametrizations["weight"][0].lora_A, model.Wqkv.parametrizations["weight"][0].lora_A)


@pytest.mark.parametrize("options", [{"lora": "export"}, {"lora_alpha": 2.0}])
def test_is_no_adapter_that_could_be_exported_or_scaled(options: dict[str, Any], tmp_path: Path) -> None:
    run = saved(tmp_path / "run", Embedder().state_dict(), CODE)
    with pytest.raises(UsageError, match="no LoRA adapters"):
        ckpt_cli.merge(run, tmp_path / "out", **options)


@pytest.mark.parametrize("word", ["lora_A", "lora_a"])
def test_is_told_where_no_code_has_a_place_for_it(word: str, tmp_path: Path) -> None:
    state = {name.replace("lora_A", word): tensor for name, tensor in Embedder().state_dict().items()}
    done = ckpt_cli.merge(saved(tmp_path / "run", state), tmp_path / "out")
    (told,) = [note.text for note in done.outputs[0].notes if note.code == "unfused-adapters"]
    assert ".parametrizations.weight.0.lora_" in told
    assert "not fused" in told
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()


def test_of_a_class_of_transformers_is_made_one_tensor_where_it_was_trained(tmp_path: Path) -> None:
    """As minLoRA does it."""
    model = build(*MODELS["llama"])
    modules = [layer.mlp.down_proj for layer in model.model.layers]
    for module in modules:
        parametrize.register_parametrization(module, "weight", LowRank(*module.weight.shape))
    run = saved(tmp_path / "run", model.state_dict(), model.config.to_dict())
    with pytest.raises(MissingTensors, match="missing") as caught:
        ckpt_cli.merge(run, tmp_path / "out")
    assert "remove_parametrizations" in str(caught.value.hint)
    for module in modules:
        parametrize.remove_parametrizations(module, "weight")
    ckpt_cli.merge(saved(tmp_path / "one", model.state_dict(), model.config.to_dict()), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())


def test_is_not_averaged(tmp_path: Path) -> None:
    runs = [saved(tmp_path / name, Embedder().state_dict(), CODE) for name in ("first", "second")]
    with pytest.raises(Unsupported, match="cannot be averaged") as caught:
        ckpt_cli.average(runs, tmp_path / "out")
    assert str(caught.value.tensor).endswith((".0.lora_A", ".0.lora_B"))


@pytest.mark.parametrize("lead", ["", "base_model.model."])
def test_under_an_adapter_of_peft_is_the_models(lead: str, tmp_path: Path) -> None:
    module = nn.ModuleDict({"Wqkv": Embedder().Wqkv})
    wrapped = {f"{lead}{name.replace('Wqkv.', 'Wqkv.base_layer.')}": tensor for name, tensor in module.state_dict().items()}
    factors = {f"{lead}Wqkv.lora_A.default.weight": torch.randn(2, 8), f"{lead}Wqkv.lora_B.default.weight": torch.randn(24, 2)}
    run = saved(tmp_path / "run", {**wrapped, **factors})
    (run / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["Wqkv"]}))
    with pytest.raises(Unsupported, match="parametrization of torch computes the weight") as caught:
        ckpt_cli.merge(run, tmp_path / "out")
    assert caught.value.tensor in factors
    assert f"{lead}Wqkv.base_layer.parametrizations.weight.original" in str(caught.value)
    ckpt_cli.merge(run, tmp_path / "out", lora="export")
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == {
        "base_model.model.Wqkv.lora_A.weight",
        "base_model.model.Wqkv.lora_B.weight",
    }


def test_names_of_peft_count_in_front_of_a_parametrization_alone() -> None:
    own = ["q.parametrizations.weight.0.lora_A", "parametrizations.weight.0.lora_B", "q.parametrizations.weight.original"]
    assert not has_adapters(dict.fromkeys(own))
    assert parametrized_factors([*own, "q.parametrizations.weight.0.base", "q.lora_A.weight"]) == own[:2]
    for name in ("q.base_layer.parametrizations.weight.original0", "q.lora_A.default.parametrizations.weight.original1", "q.lora_B.weight"):
        assert has_adapters({name: None})


def plain(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    return saved(folder, {**state, "norm.weight": torch.ones(8)})


FACTORS = {"q.lora_A": torch.randn(4, 8), "q.lora_B": torch.randn(24, 4)}
"""As loralib has them: parameters of the module itself."""


def test_of_loralib_is_fused_and_exported(tmp_path: Path) -> None:
    weight = torch.randn(24, 8)
    ckpt_cli.merge(plain(tmp_path / "run", {"q.weight": weight, **FACTORS}), tmp_path / "out", lora_alpha=8)
    written = load_file(tmp_path / "out" / "model.safetensors")
    numpy.testing.assert_allclose(written["q.weight"], weight + 2 * FACTORS["q.lora_B"] @ FACTORS["q.lora_A"], rtol=1e-4, atol=1e-5)
    ckpt_cli.merge(saved(tmp_path / "alone", FACTORS), tmp_path / "adapter", lora_alpha=8)
    model = nn.ModuleDict({"q": nn.Linear(8, 24, bias=False)})
    loaded = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter")).state_dict()
    for name, tensor in FACTORS.items():
        assert torch.equal(loaded[f"base_model.model.{name}.default.weight"], tensor)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (
            {"q.weight": torch.ones(24, 8), "q.lora_A": torch.ones(8, 8), "q.lora_B": torch.ones(16, 4)},
            "2 adapters for parts of one weight",
        ),
        ({"q.linear.weight": torch.ones(24, 8), **FACTORS}, "holds its weight as q.linear.weight"),
        ({"q.conv.weight": torch.ones(8, 6, 3, 3), "q.lora_A": torch.ones(12, 18), "q.lora_B": torch.ones(24, 12)}, "q.conv.weight"),
        ({"q.lora_A": torch.ones(5, 4, 8), "q.lora_B": torch.ones(5, 24, 4)}, "several experts or tasks"),
        ({"q.lora_A": torch.ones(5, 24, 4), "q.lora_B": torch.ones(5, 4, 8)}, "several experts or tasks"),
    ],
)
def test_of_modules_of_another_kind_is_told_as_that(state: dict[str, torch.Tensor], said: str, tmp_path: Path) -> None:
    run = plain(tmp_path / "run", state)
    with pytest.raises(Unsupported, match=said) as caught:
        ckpt_cli.merge(run, tmp_path / "out", lora_alpha=8)
    assert caught.value.tensor in state
    assert "--lora keep" in str(caught.value.hint)
    assert "damaged-adapter" not in {item.code for item in ckpt_cli.verify(run).findings}
    ckpt_cli.merge(run, tmp_path / "out", lora="keep")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {*state, "norm.weight"}


MODULE = "layers.0.q"
CUT = {
    "A's rank": ((2, 16), (12, 4), "lora_A"),
    "B's rank": ((4, 16), (12, 2), "lora_B"),
    "B's rows": ((4, 16), (6, 4), "lora_B"),
    "A's columns": ((4, 8), (12, 4), "lora_A"),
    "A, flat": ((64,), (12, 4), "lora_A"),
    "B, flat": ((4, 16), (24,), "lora_B"),
}


@pytest.mark.parametrize("lead", ["", "base_model.model.", "module.base_model.model."])
@pytest.mark.parametrize("kind", CUT)
def test_a_cut_factor_is_refused_by_its_own_name(kind: str, lead: str, tmp_path: Path) -> None:
    a, b, cut = CUT[kind]
    state = {
        f"{lead}{MODULE}.base_layer.weight": torch.ones(12, 16),
        f"{lead}{MODULE}.lora_A.default.weight": torch.ones(a),
        f"{lead}{MODULE}.lora_B.default.weight": torch.ones(b),
    }
    run = saved(tmp_path / "run", state)
    (run / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q"]}))
    with pytest.raises(Inconsistent) as caught:
        ckpt_cli.merge(run, tmp_path / "out")
    assert caught.value.tensor == f"{lead}{MODULE}.{cut}.default.weight"
    assert "cut" in str(caught.value.hint) or "what one rank held" in str(caught.value.hint)
    (found,) = ckpt_cli.verify(run).of_severity("error")
    assert (found.code, found.tensor) == ("damaged-adapter", f"{lead}{MODULE}.{cut}.default.weight")


def test_factors_for_other_sides_are_not_called_cut(tmp_path: Path) -> None:
    state = {
        "q.base_layer.weight": torch.ones(12, 16),
        "q.lora_A.default.weight": torch.ones(4, 10),
        "q.lora_B.default.weight": torch.ones(6, 4),
    }
    with pytest.raises(Inconsistent, match="do not fit") as caught:
        ckpt_cli.merge(saved(tmp_path / "run", state), tmp_path / "out", lora_alpha=8)
    assert caught.value.hint == "the adapters may belong to another model"


@pytest.mark.parametrize("lead", ["", "base_model.model."])
def test_wrapped_modules_are_called_as_in_the_file(lead: str, tmp_path: Path) -> None:
    state = {f"{lead}experts.down_proj.base_layer.weight{number}": torch.ones(12, 16) for number in range(2)}
    with pytest.raises(Inconsistent, match="no factors of adapters are here") as caught:
        ckpt_cli.merge(saved(tmp_path / "run", state), tmp_path / "out")
    assert caught.value.tensor in state


@pytest.mark.parametrize("lead", ["", "base_model.model."])
def test_what_an_adapter_lacks_is_called_as_its_file_would(lead: str, tmp_path: Path) -> None:
    base = build(*MODELS["qwen2"])
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "run")
    file = tmp_path / "run" / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if ".layers.1." not in name}
    save_file({name.replace("base_model.model.", lead, 1): tensor for name, tensor in tensors.items()}, file)
    with pytest.raises(Inconsistent, match="no factors") as caught:
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=tmp_path / "base")
    assert str(caught.value.tensor).startswith(f"{lead}model.layers.1.")
