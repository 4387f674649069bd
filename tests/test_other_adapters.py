"""Adapters that are not PEFT's LoRA are told by name, alone and beside weights, and never taken for a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import Inconsistent, Unsupported
from ckpt_cli.hub.adapters.other_kinds import PEFT_PARTS, PROMPTS, factors_alone, like_factors
from tests import tiny
from tests.architectures import MODELS, build

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")]

Tensors = dict[str, torch.Tensor]
MODULES = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
NAMES: dict[str, tuple[str, Callable[[str], Tensors]]] = {
    "mlx": ("mlx-lm", lambda module: {f"{module}.lora_a": torch.ones(16, 2), f"{module}.lora_b": torch.ones(2, 16)}),
    "torchtune": ("torchtune", lambda module: {f"{module}.lora_a.weight": torch.ones(2, 16), f"{module}.lora_b.weight": torch.ones(16, 2)}),
    "kohya": (
        "kohya",
        lambda module: {
            f"lora_unet_{module.replace('.', '_')}.{part}": values
            for part, values in (
                ("lora_down.weight", torch.ones(2, 16)),
                ("lora_up.weight", torch.ones(16, 2)),
                ("alpha", torch.tensor(4.0)),
            )
        },
    ),
    "diffusers": (
        "diffusers",
        lambda module: {f"{module}.lora.down.weight": torch.ones(2, 16), f"{module}.lora.up.weight": torch.ones(16, 2)},
    ),
    "minimind": (
        "minimind",
        lambda module: {f"{module}.lora.A.weight": torch.ones(2, 16), f"{module}.lora.B.weight": torch.ones(16, 2)},
    ),
    "LoHa": (
        "LoHa",
        lambda module: {f"{module}.hada_{part}": torch.ones(16, 2) for part in ("w1_a", "w1_b", "w2_a", "w2_b")},
    ),
    "LoKr": ("LoKr", lambda module: {f"{module}.lokr_w1": torch.ones(4, 4), f"{module}.lokr_w2": torch.ones(4, 4)}),
    "parametrizations": (
        "parametrizations of torch",
        lambda module: {
            f"{module}.parametrizations.weight.0.{part}": values
            for part, values in (("lora_A", torch.ones(2, 16)), ("lora_B", torch.ones(16, 2)), ("magnitude", torch.ones(16)))
        },
    ),
    "grouped layers": (
        "grouped layers",
        lambda module: {
            f"{module}.lora_{part}.{leaf}{number}": values
            for number in range(2)
            for leaf in ("weight", "default.weight")
            for part, values in (("A", torch.ones(2, 16)), ("B", torch.ones(16, 2)))
        },
    ),
    "NeMo": (
        "NeMo",
        lambda module: {f"{module}.adapter.linear_in.weight": torch.ones(2, 16), f"{module}.adapter.linear_out.weight": torch.ones(16, 2)},
    ),
    "canonical LoRA of Megatron-Bridge": (
        "Megatron-Bridge",
        lambda module: {
            f"{module}.adapter.adapter_{part}.linear_{end}.weight": values
            for part in "qkv"
            for end, values in (("in", torch.ones(2, 16)), ("out", torch.ones(16, 2)))
        },
    ),
}
METHODS: dict[str, Callable[[], Any]] = {
    "OFT": lambda: peft.OFTConfig(target_modules=["q_proj"], r=0, oft_block_size=4),
    "IA3": lambda: peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    "LOHA": lambda: peft.LoHaConfig(target_modules=["q_proj"], r=2),
    "HRA": lambda: peft.HRAConfig(target_modules=["q_proj"], r=2),
    "VBLORA": lambda: peft.VBLoRAConfig(target_modules=["q_proj"], r=2, vector_length=4, num_vectors=8),
    "LN_TUNING": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def factors(kind: str) -> Tensors:
    return {name: values for module in MODULES for name, values in NAMES[kind][1](module).items()}


def saved(path: Path, tensors: Tensors, name: str = "model.safetensors") -> Path:
    path.mkdir()
    save_file({name: values.contiguous() for name, values in tensors.items()}, path / name)
    return path


@pytest.mark.parametrize("kind", NAMES)
def test_alone_are_no_model(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / "run", factors(kind))
    base = tiny.folder(tmp_path / "base", tiny.weights())
    for options in ({}, {"base": base}):
        with pytest.raises(Unsupported, match=rf"adapters, not a model: .*{NAMES[kind][0]}") as raised:
            ckpt_cli.merge(folder, tmp_path / "out", **options)
        assert "--base" not in (raised.value.hint or "")
    assert not (tmp_path / "out").exists()
    detected = ckpt_cli.detect(folder)
    assert (detected.problem, detected.exit_code) == (raised.value.message, raised.value.exit_code)
    found = {item.code for item in ckpt_cli.verify(folder).findings}
    assert "unfused-adapters" in found
    assert "damaged-adapter" not in found
    assert "unfused-adapters" in {note.code for note in ckpt_cli.inspect(folder).checkpoint.notes}


@pytest.mark.parametrize("kind", NAMES)
def test_beside_weights_are_not_left_unfused_without_a_word(tmp_path: Path, kind: str) -> None:
    folder = tiny.folder(tmp_path / "run", {**tiny.weights(), **factors(kind)})
    with pytest.raises(Unsupported, match=rf"beside the weights are adapters: .*{NAMES[kind][0]}") as raised:
        ckpt_cli.merge(folder, tmp_path / "out")
    assert ckpt_cli.detect(folder).problem == raised.value.message
    assert "unfused-adapters" in {item.code for item in ckpt_cli.verify(folder).of_severity("warning")}


@pytest.mark.parametrize("kind", NAMES)
def test_are_told_in_a_file_called_like_an_adapters(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / "run", factors(kind), "adapter_model.safetensors")
    with pytest.raises(Unsupported, match=NAMES[kind][0]):
        ckpt_cli.merge(folder, tmp_path / "out")
    ckpt_cli.merge(folder, tmp_path / "out", lora="keep")


@pytest.mark.parametrize("kind", ["mlx", "kohya"])
def test_are_kept_left_out_and_read_on_demand(tmp_path: Path, kind: str) -> None:
    whole = {**tiny.weights(), **factors(kind)}
    ckpt_cli.merge(tiny.folder(tmp_path / "run", whole), tmp_path / "kept", lora="keep")
    assert load_file(tmp_path / "kept" / "model.safetensors").keys() == whole.keys()
    ckpt_cli.merge(tmp_path / "run", tmp_path / "plain", exclude=["*lora*"])
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == tiny.weights().keys()
    alone = saved(tmp_path / "alone", factors(kind))
    other = saved(tmp_path / "other", {name: values + 1 for name, values in factors(kind).items()})
    assert not ckpt_cli.diff(alone, other).identical
    with ckpt_cli.open(alone) as checkpoint:
        assert checkpoint.keys() == factors(kind).keys()
    result = ckpt_cli.merge(alone, tmp_path / "copy", lora="keep")
    assert not [note for note in result.outputs[0].notes if "--base" in note.text]


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_peft_are_refused_with_and_without_their_config(tmp_path: Path, method: str) -> None:
    model = peft.get_peft_model(build(*MODELS["llama"]), METHODS[method]())
    model.save_pretrained(tmp_path / "adapter")
    alone = saved(tmp_path / "alone", load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for source in (tmp_path / "adapter", alone, tmp_path / "model.pt"):
        with pytest.raises(Unsupported, match=rf"(?i){method.replace(' ', '.')}") as raised:
            ckpt_cli.merge(source, tmp_path / "out")
        assert ("cannot be merged" in (raised.value.hint or "")) is (method == "prompt tuning")
    assert not (tmp_path / "out").exists()


def test_all_methods_of_peft_are_known() -> None:
    known = {kind.value: prefix for kind, prefix in PEFT_TYPE_TO_PREFIX_MAPPING.items()}
    assert {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} == {"LORA", *PEFT_PARTS, *PROMPTS}
    for kind, parts in PEFT_PARTS.items():
        assert kind == "ADALORA" or any(known[kind].startswith(part) for part in parts.split("|")), kind


def test_wrapped_modules_without_factors_are_refused(tmp_path: Path) -> None:
    model = peft.get_peft_model(build(*MODELS["llama"]), peft.LoraConfig(target_modules=["q_proj"], r=2))
    torch.save({name: values for name, values in model.state_dict().items() if "lora_" not in name}, tmp_path / "model.pt")
    with pytest.raises(Inconsistent, match="no factors"):
        ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class TestUnknownNames:
    @pytest.mark.parametrize(
        "names", [("adapter.down.weight", "adapter.up.weight"), ("delta_u", "delta_v"), ("first.weight", "second.weight")]
    )
    def test_around_a_weight_are_a_warning(self, tmp_path: Path, names: tuple[str, str]) -> None:
        weights = tiny.weights()
        name = "model.layers.0.self_attn.q_proj"
        rows, columns = weights[f"{name}.weight"].shape
        more = {f"{name}.{names[0]}": torch.ones(2, columns), f"{name}.{names[1]}": torch.ones(rows, 2)}
        result = ckpt_cli.merge(tiny.folder(tmp_path / "run", {**weights, **more}), tmp_path / "out")
        (note,) = [note for note in result.outputs[0].notes if note.code == "unfused-adapters"]
        assert "1 pair" in note.text

    @pytest.mark.parametrize("names", [("down.weight", "up.weight"), ("delta_u", "delta_v")])
    def test_alone_are_a_warning(self, tmp_path: Path, names: tuple[str, str]) -> None:
        pairs = {f"{module}.{name}": torch.ones(shape) for module in MODULES for name, shape in zip(names, ((2, 32), (16, 2)), strict=True)}
        torch.save(pairs, tmp_path / "adapter.pt")
        notes = ckpt_cli.merge(tmp_path / "adapter.pt", tmp_path / "out").outputs[0].notes
        assert "all 4 tensors are pairs of matrices of rank 2" in next(note.text for note in notes if note.code == "unfused-adapters")

    def test_models_of_few_layers_are_none(self) -> None:
        autoencoder = {"encoder.weight": (2, 16), "decoder.weight": (16, 2)}
        biased = {
            f"{part}.{name}": shape for part in "ab" for name, shape in (("x.weight", (2, 16)), ("y.weight", (16, 2)), ("y.bias", (16,)))
        }
        wide = {f"{part}.{name}.weight": shape for part in "ab" for name, shape in (("x", (64, 16)), ("y", (16, 64)))}
        uneven = {"a.x": (2, 16), "a.y": (16, 2), "b.x": (4, 16), "b.y": (16, 4)}
        assert [factors_alone(shapes) for shapes in (autoencoder, biased, wide, uneven, {})] == [None] * 5

    def test_of_a_class_with_code_of_its_own_are_not(self, tmp_path: Path) -> None:
        weights = tiny.weights()
        more = {"model.layers.0.mlp.up_proj.P_A.weight": torch.ones(2, 16), "model.layers.0.mlp.up_proj.P_B.weight": torch.ones(32, 2)}
        config = tiny.config(auto_map={"AutoModel": "org/name--modeling_my.MyModel"})
        run = tiny.folder(tmp_path / "run", {**weights, **more}, config)
        assert "unfused-adapters" not in {note.code for note in ckpt_cli.merge(run, tmp_path / "out").outputs[0].notes}

    def test_low_rank_projections_of_a_model_are_none(self) -> None:
        latent = {"attn.q_a_proj.weight": (4, 64), "attn.q_b_proj.weight": (64, 4), "attn.o_proj.weight": (64, 64)}
        rwkv = {"att.w_lora.lora.0.weight": (4, 64), "att.w_lora.lora.2.weight": (64, 4), "att.key.weight": (64, 64)}
        mlp = {"mlp.weight": (64,), "mlp.down.weight": (8, 64), "mlp.up.weight": (64, 8)}
        assert not like_factors({**latent, **rwkv, **mlp})
