"""LoRA: fused as PEFT fuses it, exported as PEFT loads it, refused where the files do not say enough."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import (
    CastOverflow,
    CkptError,
    CorruptFile,
    IncompleteError,
    Inconsistent,
    NonFinite,
    Undecidable,
    Unsupported,
    UsageError,
)
from tests.architectures import MODELS, build
from tests.cli import ckpt_fork as ckpt
from tests.tensors import load
from tests.training import shard

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")]
"""PEFT warns of what transformers will change, and of tied layers."""

ATTENTION = ["q_proj", "o_proj", "down_proj"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen2", {"target_modules": ATTENTION}),
    "every linear module": ("llama", {"target_modules": "all-linear"}),
    "rank-stabilised": ("qwen2", {"target_modules": ATTENTION, "use_rslora": True}),
    "DoRA": ("qwen2", {"target_modules": ATTENTION, "use_dora": True}),
    "modules to save": ("qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "a head of its own": ("qwen2, sequence classification", {"target_modules": ["q_proj"], "modules_to_save": ["score"]}),
    "biases": ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}),
    "bias of B": ("qwen2", {"target_modules": ["q_proj"], "lora_bias": True}),
    "patterns": ("qwen2", {"target_modules": ATTENTION, "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 40}}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "DoRA of an embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "tied embedding": ("llama, tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "fan in, fan out": ("gpt2", {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    "DoRA, fan in, fan out": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    "convolutions": ("vit", {"target_modules": ["projection", "q_proj"]}),
    "mixture of experts": ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"]}),
    "fused experts": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "parameters without their module": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
    ),
    "patterns of parameters": (
        "qwen3_moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.down_proj"],
            "alpha_pattern": {"mlp.experts.down_proj": 40},
        },
    ),
    "vision and language": ("qwen2_5_vl", {"target_modules": r".*language_model.*(q_proj|down_proj)"}),
}


def adapted(kind: str, options: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A model with random adapters, as PEFT makes it; nothing in it is zero or one."""
    model = build(*MODELS[kind]).to(dtype)
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=10, **options))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1 if "magnitude" in name else 0))
    return made.eval()


def trained(model: Any, folder: Path, *, config: bool = True) -> Path:
    """What training leaves of it: files of ranks under PEFT's names, the config of the model, and that of the adapter."""
    run = folder / "global_step_1"
    (run / "huggingface").mkdir(parents=True)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    shard(model.state_dict(), parameters, run)
    inner = model.get_base_model().config
    inner.architectures = [type(model.get_base_model()).__name__]
    inner.save_pretrained(run / "huggingface")
    if config:
        (run / "lora_adapter").mkdir()
        model.peft_config["default"].save_pretrained(run / "lora_adapter")
    return run


def merged_by_peft(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What ``merge_and_unload`` makes of it, as ``save_pretrained`` writes it."""
    model.merge_and_unload().save_pretrained(folder)
    return load(folder)


@pytest.fixture(autouse=True)
def quiet(quiet_transformers: None) -> None:
    """transformers and peft are the oracles here."""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return CASES[request.param]


@pytest.mark.usefixtures("asked_here")
class TestFused:
    def test_is_what_peft_merges(self, case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
        """Both are within (r + 2) float32 roundings of the exact value, where the terms are about 1."""
        model = adapted(*case)
        run = trained(model, tmp_path)
        result = ckpt_cli.merge(run, tmp_path / "out", verify=True)
        found, wanted = load(tmp_path / "out"), merged_by_peft(model, tmp_path / "peft")
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {n: (t.shape, t.dtype) for n, t in wanted.items()}
        for name, tensor in wanted.items():
            scale = max(tensor.abs().max().item(), 1.0)
            assert (found[name] - tensor).abs().max().item() <= 8 * 2**-23 * scale, name
        assert result.exit_code == 0
        lora = result.outputs[0].lora
        assert lora is not None
        assert lora.outcome == "fused"
        assert lora.origin == "adapter_config.json"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_is_rounded_once_to_the_dtype_of_the_weights(self, tmp_path: Path, dtype: torch.dtype) -> None:
        model = adapted("qwen2", {"target_modules": ATTENTION}, dtype)
        run = trained(model, tmp_path)
        state = {name: tensor.double() for name, tensor in model.state_dict().items()}
        ckpt_cli.merge(run, tmp_path / "out")
        for name, tensor in load(tmp_path / "out").items():
            before = name.replace(".weight", "")
            base = f"base_model.model.{before}.base_layer.weight"
            if base in state:
                a, b = (state[f"base_model.model.{before}.lora_{part}.default.weight"] for part in "AB")
                assert torch.equal(tensor, rounded(state[base] + 2.5 * (b @ a), dtype)), name

    def test_of_float32_is_rounded_once_as_well(self, tmp_path: Path) -> None:
        model = adapted("qwen2", {"target_modules": ATTENTION})
        run = trained(model, tmp_path)
        state = {name: tensor.double() for name, tensor in model.state_dict().items()}
        ckpt_cli.merge(run, tmp_path / "out")
        ckpt_cli.merge(run, tmp_path / "half", dtype="bf16")
        out, half = load(tmp_path / "out"), load(tmp_path / "half")
        for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
            a, b = (state[f"base_model.model.{module}.lora_{part}.default.weight"] for part in "AB")
            exact = state[f"base_model.model.{module}.base_layer.weight"] + 2.5 * (b @ a)
            assert torch.equal(out[f"{module}.weight"], exact.float())
            assert torch.equal(half[f"{module}.weight"], exact.float().bfloat16())

    def test_of_bf16_weights_keeps_what_a_wider_dtype_can_hold(self, tmp_path: Path) -> None:
        model = adapted("qwen2", {"target_modules": ATTENTION}, torch.bfloat16)
        run = trained(model, tmp_path)
        ckpt_cli.merge(run, tmp_path / "out", dtype="fp32")
        name = "model.layers.0.self_attn.q_proj.weight"
        wide = load(tmp_path / "out")[name]
        assert not torch.equal(wide, wide.bfloat16().float())

    def test_does_not_depend_on_shards_or_jobs(self, tmp_path: Path) -> None:
        run = trained(adapted("qwen2", {"target_modules": ATTENTION}), tmp_path)
        ckpt_cli.merge(run, tmp_path / "one", jobs=1)
        ckpt_cli.merge(run, tmp_path / "two", jobs=8, max_shard_size=5_000)
        one, two = load(tmp_path / "one"), load(tmp_path / "two")
        assert all(torch.equal(one[name], two[name]) for name in one)

    def test_computes_the_same_logits(self, tmp_path: Path) -> None:
        model = adapted("qwen2", {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]})
        run = trained(model, tmp_path)
        ckpt_cli.merge(run, tmp_path / "out")
        loaded = type(model.get_base_model()).from_pretrained(tmp_path / "out").eval()
        words = torch.tensor([[3, 4, 5, 6]])
        with torch.no_grad():
            assert torch.allclose(loaded(words).logits, model(words).logits, atol=1e-5)

    def test_large_weights_are_read_in_blocks_that_always_agree(self, tmp_path: Path) -> None:
        """Wider than a block of rows, cut into parts by a view: every reading gives the same bits."""
        torch.manual_seed(0)
        w, a, b = torch.randn(600, 3000), torch.randn(8, 3000), torch.randn(600, 8)
        path = plain(tmp_path, {"m.base_layer.weight": w, "m.lora_A.default.weight": a, "m.lora_B.default.weight": b})
        ckpt_cli.merge(path, tmp_path / "out", lora_alpha=4, verify=True)
        exact = w.double() + 0.5 * (b.double() @ a.double())
        assert torch.equal(load(tmp_path / "out")["m.weight"], exact.float())

    def test_a_run_of_ema_is_fused_as_well(self, tmp_path: Path) -> None:
        run = trained(adapted("qwen2", {"target_modules": ATTENTION}), tmp_path)
        result = ckpt_cli.merge(run, tmp_path / "out", type="ema", ema_from_model=True)
        assert result.outputs[0].lora is not None


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 to a 16-bit dtype with one rounding, by way of numpy's float16 or ml_dtypes' exact comparison of neighbours."""
    near = values.to(dtype)
    lower, upper = (torch.nextafter(near, torch.full_like(near, limit)) for limit in (-math.inf, math.inf))
    best = near
    for other in (lower, upper):
        closer = (other.double() - values).abs() < (best.double() - values).abs()
        best = torch.where(closer, other, best)
    return best


def plain(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A folder with one safetensors file of these tensors, under PEFT's prefix."""
    (folder / "run").mkdir()
    save_file({f"base_model.model.{name}": tensor.clone() for name, tensor in tensors.items()}, folder / "run" / "model.safetensors")
    return folder / "run"


EXPORTS = [
    (name, known)
    for name, (_, options) in CASES.items()
    for known in (True, False)
    if name != "biases" and (known or not {"use_rslora", "alpha_pattern", "target_parameters"} & set(options))
]
"""Kinds of adapters, with and without an adapter_config.json in the run; without it nothing says what these options are.

PEFT itself exports no biases of modules that it wraps.
"""


class TestExported:
    @pytest.mark.parametrize(("name", "known"), EXPORTS)
    def test_peft_loads_it_and_computes_the_same(self, tmp_path: Path, name: str, known: bool) -> None:
        kind, options = CASES[name]
        model = adapted(kind, options)
        run = trained(model, tmp_path, config=known)
        if not known:
            (run / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 10, "task_type": null}')
        ckpt_cli.merge(run, tmp_path / "out", lora="export")
        assert not (tmp_path / "out" / "config.json").exists()
        loaded = peft.PeftModel.from_pretrained(build(*MODELS[kind]), tmp_path / "out").eval()
        wanted = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        found = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        ours, theirs = loaded.merge_and_unload().state_dict(), model.merge_and_unload().state_dict()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    def test_both_are_two_folders(self, tmp_path: Path) -> None:
        run = trained(adapted("qwen2", {"target_modules": ATTENTION}), tmp_path)
        result = ckpt_cli.merge(run, tmp_path / "out", lora="both", verify=True)
        assert [Path(output.output).name for output in result.outputs] == ["out", "out_adapter"]
        assert [output.lora.outcome for output in result.outputs if output.lora] == ["fused", "exported"]
        assert result.exit_code == 0
        for output in result.outputs:
            assert ckpt_cli.verify(output.output, full=True, against=run).exit_code == 0

    def test_modules_are_named_in_full(self, tmp_path: Path) -> None:
        run = trained(adapted("qwen2_5_vl", {"target_modules": r".*language_model.*q_proj"}), tmp_path)
        ckpt_cli.merge(run, tmp_path / "out", lora="export")
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert config["target_modules"] == [f"model.language_model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]

    def test_the_base_is_named(self, layouts: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(layouts / "verl-lora" / "lora_only", tmp_path / "out", lora="export", base=layouts / "verl-lora" / "base")
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(layouts / "verl-lora" / "base")
        assert (config["r"], config["lora_alpha"], config["task_type"]) == (3, 6, "CAUSAL_LM")


class TestLayoutsOfVerl:
    def test_full_shards_are_fused(self, layouts: Path, tmp_path: Path) -> None:
        folder = layouts / "verl-lora"
        ckpt_cli.merge(folder / "full", tmp_path / "out", verify=True)
        found, wanted = load(tmp_path / "out"), load(folder / "expected.safetensors")
        assert found.keys() == wanted.keys()
        assert all((found[name] - wanted[name]).abs().max() < 1e-6 for name in wanted)

    def test_adapters_alone_go_onto_their_base(self, layouts: Path, tmp_path: Path) -> None:
        folder = layouts / "verl-lora"
        ckpt_cli.merge(folder / "lora_only", tmp_path / "out", base=folder / "base", verify=True)
        ckpt_cli.merge(folder / "full", tmp_path / "full")
        found, wanted = load(tmp_path / "out"), load(tmp_path / "full")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def test_adapters_alone_are_exported_without_it(self, layouts: Path, tmp_path: Path) -> None:
        folder = layouts / "verl-lora"
        done = ckpt("merge", folder / "lora_only", "-o", tmp_path / "out", "--verify")
        assert done.code == 0
        assert "exported as a PEFT folder; pass --base to fuse them" in " ".join(done.out.split())
        found, wanted = load(tmp_path / "out"), load(folder / "expected-lora_only.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert (tmp_path / "out" / "adapter_config.json").exists()
        assert not (tmp_path / "out" / "config.json").exists()
        assert ckpt_cli.verify(tmp_path / "out", full=True, against=folder / "lora_only").exit_code == 0

    def test_adapters_alone_are_refused_if_asked_to_be_fused(self, layouts: Path, tmp_path: Path) -> None:
        with pytest.raises(Undecidable) as raised:
            ckpt_cli.merge(layouts / "verl-lora" / "lora_only", tmp_path / "out", lora="fuse")
        assert "--base" in str(raised.value.hint)

    @pytest.mark.parametrize("run", ["full", "lora_only"])
    def test_adapters_are_exported(self, layouts: Path, tmp_path: Path, run: str) -> None:
        folder = layouts / "verl-lora"
        ckpt_cli.merge(folder / run, tmp_path / "out", lora="export", verify=True)
        found, wanted = load(tmp_path / "out"), load(folder / "expected-lora_only.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def test_an_exported_adapter_is_read_again(self, layouts: Path, tmp_path: Path) -> None:
        folder = layouts / "verl-lora"
        ckpt_cli.merge(folder / "full", tmp_path / "adapter", lora="export")
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=folder / "base")
        ckpt_cli.merge(folder / "full", tmp_path / "full")
        found, wanted = load(tmp_path / "out"), load(tmp_path / "full")
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def test_shards_are_verified_with_their_adapters(self, layouts: Path) -> None:
        full = ckpt_cli.verify(layouts / "verl-lora" / "full", full=True)
        assert (full.exit_code, full.expected) == (0, 25)
        alone = ckpt_cli.verify(layouts / "verl-lora" / "lora_only", full=True)
        assert alone.exit_code == 0

    def test_the_screen_says_what_was_fused(self, layouts: Path, tmp_path: Path) -> None:
        out = ckpt("merge", layouts / "verl-lora" / "full", "-o", tmp_path / "out").out
        assert "lora        4 modules fused (LoRA), r 3, alpha 6 (lora_train_meta.json), scale 2\n" in out

    def test_averages_are_refused(self, layouts: Path, tmp_path: Path) -> None:
        folder = layouts / "verl-lora" / "full"
        done = ckpt("average", folder, folder, "-o", tmp_path / "out")
        assert done.code == 3
        assert "merge each checkpoint first" in done.err

    def test_averages_of_adapters_alone_are_refused_with_a_way_that_works(self, layouts: Path, tmp_path: Path) -> None:
        folder = layouts / "verl-lora"
        ckpt_cli.merge(folder / "lora_only", tmp_path / "adapter")
        for alone in (folder / "lora_only", tmp_path / "adapter"):
            done = ckpt("average", alone, alone, "-o", tmp_path / "out")
            assert done.code == 3
            assert "merge each with --base and the model that training started from, then average the results" in done.err
        for name in ("a", "b"):
            ckpt_cli.merge(folder / "lora_only", tmp_path / name, base=folder / "base")
        ckpt_cli.average([tmp_path / "a", tmp_path / "b"], output=tmp_path / "out")
        assert load(tmp_path / "out").keys() == load(tmp_path / "a").keys()

    def test_adapters_that_no_merge_fuses_are_for_their_program(self, tmp_path: Path) -> None:
        several = SMALL | {name.replace("default", "other"): tensor for name, tensor in SMALL.items() if "default" in name}
        run = plain(tmp_path, several)
        done = ckpt("average", run, run, "-o", tmp_path / "out")
        assert done.code == 3
        assert "fuse each into its model with the program that made it" in done.err

    def test_only_other_names_count_as_renamed(self, layouts: Path, tmp_path: Path) -> None:
        exported = ckpt_cli.merge(layouts / "verl-lora" / "lora_only", tmp_path / "adapter")
        again = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "again")
        assert [result.outputs[0].renamed for result in (exported, again)] == [8, 0]


SMALL = {"m.base_layer.weight": torch.ones(4, 6), "m.lora_A.default.weight": torch.ones(2, 6), "m.lora_B.default.weight": torch.ones(4, 2)}


class TestAlpha:
    """From lora_train_meta.json, then adapter_config.json, then --lora-alpha; never silently 0."""

    def scale(self, run: Path, out: Path, **options: Any) -> float:
        lora = ckpt_cli.merge(run, out, **options).outputs[0].lora
        assert lora is not None
        factor = (load(out)["m.weight"] - 1) / 2
        assert torch.equal(factor, torch.full((4, 6), lora.scales[0]))
        return lora.scales[0]

    def test_is_taken_from_the_first_file_that_has_it(self, tmp_path: Path) -> None:
        run = plain(tmp_path, SMALL)
        (run / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 8}')
        assert self.scale(run, tmp_path / "a") == 4
        (run / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 6}')
        assert self.scale(run, tmp_path / "b") == 3
        assert self.scale(run, tmp_path / "c", lora_alpha=2) == 1
        (run / "lora_train_meta.json").unlink()
        (run / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": -8}')
        assert self.scale(run, tmp_path / "d") == -4

    def test_that_is_overruled_is_warned_of(self, tmp_path: Path) -> None:
        run = plain(tmp_path, SMALL)
        (run / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 6}')
        result = ckpt_cli.merge(run, tmp_path / "out", lora_alpha=2)
        assert "lora-alpha" in {note.code for note in result.outputs[0].notes if note.level == "warning"}

    @pytest.mark.parametrize(
        "content",
        [None, "{}", '{"lora_alpha": 0}', '{"lora_alpha": "6"}', '{"lora_alpha": NaN}', '{"lora_alpha": true}', '{"lora_alpha": -1e31}'],
    )
    def test_that_is_not_known_is_asked_for(self, tmp_path: Path, content: str | None) -> None:
        run = plain(tmp_path, SMALL)
        if content is not None:
            (run / "adapter_config.json").write_text(content)
        with pytest.raises(Undecidable) as raised:
            ckpt_cli.merge(run, tmp_path / "out")
        assert "--lora-alpha" in str(raised.value.advice)
        with pytest.raises(Undecidable):
            ckpt_cli.merge(run, tmp_path / "out", lora="export")

    @pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
    def test_must_be_a_number_above_0(self, tmp_path: Path, value: float) -> None:
        with pytest.raises(UsageError):
            ckpt_cli.merge(plain(tmp_path, SMALL), tmp_path / "out", lora_alpha=value)


class TestRefusals:
    def merge(self, folder: Path, tensors: Mapping[str, torch.Tensor], **options: Any) -> CkptError:
        with pytest.raises(CkptError) as raised:
            ckpt_cli.merge(plain(folder, tensors), folder / "out", **{"lora_alpha": 2, **options})
        assert not (folder / "out").exists()
        return raised.value

    @pytest.mark.parametrize("half", ["A", "B"])
    def test_half_an_adapter(self, tmp_path: Path, half: str) -> None:
        error = self.merge(tmp_path, {name: tensor for name, tensor in SMALL.items() if f"lora_{half}" not in name})
        assert isinstance(error, Inconsistent)
        assert f"lora_{half}" in error.message

    @pytest.mark.parametrize("shape", [(3, 6), (2, 5), (2,), (2, 6, 1), (0, 6)])
    def test_factors_that_do_not_fit(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        assert isinstance(self.merge(tmp_path, {**SMALL, "m.lora_A.default.weight": torch.ones(shape)}), Inconsistent)

    def test_factors_of_rank_0(self, tmp_path: Path) -> None:
        empty = {"m.lora_A.default.weight": torch.ones(0, 6), "m.lora_B.default.weight": torch.ones(4, 0)}
        assert isinstance(self.merge(tmp_path, {**SMALL, **empty}), Inconsistent)

    @pytest.mark.parametrize("part", ["A", "B"])
    def test_factors_without_dimensions(self, tmp_path: Path, part: str) -> None:
        assert isinstance(self.merge(tmp_path, {**SMALL, f"m.lora_{part}.default.weight": torch.tensor(1.0)}), Inconsistent)

    def test_two_adapters(self, tmp_path: Path) -> None:
        more = {name.replace("default", "other"): tensor for name, tensor in SMALL.items() if "lora" in name}
        error = self.merge(tmp_path, {**SMALL, **more})
        assert isinstance(error, Unsupported)
        assert "default, other" in error.message

    def test_a_weight_that_is_not_there(self, tmp_path: Path) -> None:
        more = {name.replace("m.", "n."): tensor for name, tensor in SMALL.items() if "lora" in name}
        assert isinstance(self.merge(tmp_path, {**SMALL, **more}), Undecidable)

    def test_quantised_weights(self, tmp_path: Path) -> None:
        error = self.merge(tmp_path, {**SMALL, "m.base_layer.weight": torch.ones(4, 6, dtype=torch.uint8)})
        assert isinstance(error, Unsupported)

    def test_another_rank_than_the_files_say(self, tmp_path: Path) -> None:
        run = plain(tmp_path, SMALL)
        (run / "lora_train_meta.json").write_text('{"r": 16, "lora_alpha": 6}')
        with pytest.raises(Inconsistent, match="rank 2"):
            ckpt_cli.merge(run, tmp_path / "out")

    @pytest.mark.parametrize("content", ['{"peft_type": "ADALORA"}', '{"peft_type": "LORA", "use_qalora": true}', '{"peft_type": "IA3"}'])
    def test_other_kinds_of_adapters(self, tmp_path: Path, content: str) -> None:
        run = plain(tmp_path, SMALL)
        (run / "adapter_config.json").write_text(content)
        with pytest.raises(Unsupported):
            ckpt_cli.merge(run, tmp_path / "out", lora_alpha=2)

    @pytest.mark.parametrize("name", ["adapter_config.json", "lora_train_meta.json"])
    @pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"{"])
    def test_files_that_are_broken(self, tmp_path: Path, name: str, content: bytes) -> None:
        run = plain(tmp_path, SMALL)
        (run / name).write_bytes(content)
        with pytest.raises(CorruptFile):
            ckpt_cli.merge(run, tmp_path / "out")

    def test_magnitudes_of_another_module(self, tmp_path: Path) -> None:
        assert isinstance(self.merge(tmp_path, {**SMALL, "m.lora_magnitude_vector.default.weight": torch.ones(5)}), Inconsistent)

    def test_a_model_that_the_config_calls_quantised(self, tmp_path: Path) -> None:
        run = plain(tmp_path, SMALL)
        (run / "config.json").write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
        with pytest.raises(Unsupported, match="quantised"):
            ckpt_cli.merge(run, tmp_path / "out", lora_alpha=2)

    @pytest.mark.parametrize("way", ["pissa", "pissa_niter_16", "olora", "loftq"])
    def test_adapters_alone_that_changed_their_base(self, tmp_path: Path, way: str) -> None:
        run = plain(tmp_path, {name: tensor for name, tensor in SMALL.items() if "lora" in name})
        (run / "adapter_config.json").write_text(json.dumps({"lora_alpha": 2, "init_lora_weights": way}))
        (tmp_path / "base").mkdir()
        save_file({"m.weight": torch.ones(4, 6)}, tmp_path / "base" / "model.safetensors")
        with pytest.raises(Unsupported, match=way):
            ckpt_cli.merge(run, tmp_path / "out", base=tmp_path / "base")

    def test_values_too_large_for_float16(self, tmp_path: Path) -> None:
        huge = {**SMALL, "m.base_layer.weight": torch.full((4, 6), 65504.0, dtype=torch.float16)}
        huge["m.lora_A.default.weight"] = torch.full((2, 6), 100.0)
        assert isinstance(self.merge(tmp_path, huge), CastOverflow)
        ckpt_cli.merge(tmp_path / "run", tmp_path / "infinite", lora_alpha=2, allow_overflow=True)
        assert load(tmp_path / "infinite")["m.weight"].isinf().all()
        ckpt_cli.merge(tmp_path / "run", tmp_path / "wide", lora_alpha=2, dtype="fp32")
        assert torch.equal(load(tmp_path / "wide")["m.weight"], torch.full((4, 6), 65704.0))

    @pytest.mark.parametrize("factor", ["A", "B"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_factors_that_are_not_finite(self, factor: str, value: float, tmp_path: Path) -> None:
        spoiled = {name: tensor.clone() for name, tensor in SMALL.items()}
        spoiled[f"m.lora_{factor}.default.weight"][0, 0] = value
        error = self.merge(tmp_path, spoiled)
        assert isinstance(error, NonFinite)
        assert f"m.lora_{factor}.default.weight" in error.message
        ckpt_cli.merge(tmp_path / "run", tmp_path / "spoiled", lora_alpha=2, allow_overflow=True)
        assert not load(tmp_path / "spoiled")["m.weight"].isfinite().all()

    @pytest.mark.parametrize("pattern", ["(a*)*", "(q|q)+", "x" * 400, "[", "a****"])
    def test_patterns_that_could_take_for_ever(self, tmp_path: Path, pattern: str) -> None:
        run = plain(tmp_path, SMALL)
        (run / "adapter_config.json").write_text(json.dumps({"lora_alpha": 2, "alpha_pattern": {pattern: 4}}))
        with pytest.raises(CkptError, match="pattern"):
            ckpt_cli.merge(run, tmp_path / "out")

    @pytest.mark.parametrize("options", [{"lora": "keep", "lora_alpha": 2.0}, {"lora_alpha": 2.0}])
    def test_an_alpha_that_says_nothing(self, tmp_path: Path, options: dict[str, Any]) -> None:
        tensors = SMALL if "lora" in options else {"m.weight": torch.ones(2, 2)}
        assert isinstance(self.merge(tmp_path, tensors, **options), UsageError)

    def test_an_export_where_there_is_nothing(self, tmp_path: Path) -> None:
        assert isinstance(self.merge(tmp_path, {"m.weight": torch.ones(2, 2)}, lora="export", lora_alpha=None), UsageError)

    def test_two_folders_in_place(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="in_place"):
            ckpt_cli.merge(plain(tmp_path, SMALL), in_place=True, lora="both", lora_alpha=2)

    def test_filters_of_an_export(self, tmp_path: Path) -> None:
        assert isinstance(self.merge(tmp_path, SMALL, lora="export", include="*"), UsageError)

    def test_an_unknown_choice(self, tmp_path: Path) -> None:
        assert isinstance(self.merge(tmp_path, SMALL, lora="melt"), UsageError)


class TestOtherNamesAndForms:
    """Tinker's adapters look like PEFT's, with other names of some modules, and factors of experts as stacks."""

    def saved(self, folder: Path, **factors: tuple[torch.Tensor, torch.Tensor]) -> Path:
        folder.mkdir()
        tensors = {
            f"base_model.model.{name}.lora_{which}.weight": f for name, ab in factors.items() for which, f in zip("AB", ab, strict=True)
        }
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": "all-linear"})
        )
        return folder

    def base(self, folder: Path) -> Path:
        folder.mkdir()
        weights = {"model.layers.0.self_attn.k_proj.weight": torch.zeros(4, 6), "lm_head.weight": torch.zeros(8, 6)}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    @pytest.mark.parametrize(
        ("name", "owner", "rows"),
        [("model.unembed_tokens", "lm_head", 8), ("model.layers.0.attn.k_proj", "model.layers.0.self_attn.k_proj", 4)],
    )
    def test_a_module_of_another_name_is_pointed_at(self, tmp_path: Path, name: str, owner: str, rows: int) -> None:
        base, factors = self.base(tmp_path / "base"), (torch.ones(2, 6), torch.ones(rows, 2))
        with pytest.raises(Undecidable) as caught:
            ckpt_cli.merge(self.saved(tmp_path / "adapter", **{name: factors}), tmp_path / "out", base=base)
        assert f"if it is that of {owner}, rename its tensors" in str(caught.value.hint)
        ckpt_cli.merge(self.saved(tmp_path / "renamed", **{owner: factors}), tmp_path / "out", base=base)
        assert torch.equal(load(tmp_path / "out")[f"{owner}.weight"], torch.full((rows, 6), 2.0))

    def test_a_module_that_no_model_has_is_not_sent_to_peft(self, tmp_path: Path) -> None:
        adapter = self.saved(tmp_path / "adapter", **{"model.other": (torch.ones(2, 6), torch.ones(5, 2))})
        with pytest.raises(Undecidable) as caught:
            ckpt_cli.merge(adapter, tmp_path / "out", base=self.base(tmp_path / "base"))
        assert "PEFT leaves out what has none: fuse it with the program that trained it" in str(caught.value.hint)

    @pytest.mark.parametrize("shapes", [((1, 2, 6), (4, 5, 2)), ((4, 2, 6), (1, 5, 2)), ((4, 2, 6), (4, 5, 2))])
    def test_stacks_of_factors_are_no_part_of_one_rank(self, tmp_path: Path, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        first, second = (torch.ones(shape) for shape in shapes)
        adapter = self.saved(tmp_path / "adapter", **{"model.layers.0.mlp.experts.w1": (first, second)})
        with pytest.raises(Unsupported, match="are stacks of factors") as caught:
            ckpt_cli.merge(adapter, tmp_path / "out", base=self.base(tmp_path / "base"))
        assert "--lora keep" in str(caught.value.hint)
        ckpt_cli.merge(adapter, tmp_path / "kept", lora="keep")


ALONE = {name: tensor for name, tensor in SMALL.items() if "lora" in name}
HALVES = {
    "A of one rank": {"m.lora_A.default.weight": torch.ones(1, 6)},
    "B of one rank": {"m.lora_B.default.weight": torch.ones(4, 1)},
    "magnitudes of one rank": {"m.lora_magnitude_vector.default.weight": torch.ones(2)},
    "no A": {"m.lora_A.default.weight": torch.ones(0)},
    "no B": {"m.lora_B.default.weight": torch.ones(0)},
}


class TestHalfFactors:
    """What one rank of a sharded adapter leaves behind, under every name of a file."""

    @pytest.mark.parametrize("half", HALVES)
    @pytest.mark.parametrize(
        "name", ["pytorch_model_fsdp.bin", "model.pt", "adapter_model.safetensors", "model.safetensors", "other.safetensors"]
    )
    def test_are_refused_and_found(self, tmp_path: Path, half: str, name: str) -> None:
        (tmp_path / "checkpoint-1").mkdir()
        path = tmp_path / "checkpoint-1" / name
        tensors = {f"base_model.model.{key}": tensor for key, tensor in {**ALONE, **HALVES[half]}.items()}
        save_file(tensors, path) if name.endswith(".safetensors") else torch.save(tensors, path)
        for given in (path, path.parent):
            for lora in (None, "export", "keep", "fuse"):
                with pytest.raises(IncompleteError):
                    ckpt_cli.merge(given, tmp_path / "out", lora=lora, lora_alpha=None if lora == "keep" else 2)
            for full in (False, True):
                try:
                    assert "damaged-adapter" in {item.code for item in ckpt_cli.verify(given, full=full).of_severity("error")}
                except Inconsistent:
                    assert not name.endswith(".safetensors")

    @pytest.mark.parametrize("name", ["pytorch_model_fsdp.bin", "adapter_model.safetensors", "other.safetensors"])
    def test_that_are_halves_of_both_are_told_by_the_config(self, tmp_path: Path, name: str) -> None:
        folder = tmp_path / "checkpoint-1"
        folder.mkdir()
        tensors = {"base_model.model.m.lora_A.weight": torch.ones(2, 6), "base_model.model.m.lora_B.weight": torch.ones(4, 2)}
        save_file(tensors, folder / name) if name.endswith(".safetensors") else torch.save(tensors, folder / name)
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["m"]}))
        with pytest.raises(Inconsistent, match="rank 2"):
            ckpt_cli.merge(folder, tmp_path / "out")
        for full in (False, True):
            result = ckpt_cli.verify(folder, full=full)
            assert result.exit_code == 1
            assert "damaged-adapter" in {item.code for item in result.findings}


class TestAdapterFilesWithoutFactors:
    @pytest.mark.parametrize("tensors", [{}, {"base_model.model.score.weight": torch.ones(2, 4)}], ids=["no tensor", "no factor"])
    def test_are_refused_and_found(self, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["m"]}))
        for given in (folder, folder / "adapter_model.safetensors"):
            with pytest.raises(CkptError, match=r"no tensor|no LoRA factors"):
                ckpt_cli.merge(given, tmp_path / "out")
            for full in (False, True):
                assert ckpt_cli.verify(given, full=full).exit_code == 1

    def test_of_another_kind_are_not_merged_as_a_model(self, tmp_path: Path) -> None:
        save_file({"prompt_embeddings": torch.ones(2, 4)}, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "PROMPT_TUNING"}))
        with pytest.raises(Unsupported, match="PROMPT_TUNING") as raised:
            ckpt_cli.merge(tmp_path, tmp_path.with_name("out"))
        assert "--lora keep" in str(raised.value.hint)
        ckpt_cli.merge(tmp_path, tmp_path.with_name("kept"), lora="keep")
        assert "not-compared" in {item.code for item in ckpt_cli.verify(tmp_path).findings}


LAYERS = 2


class TestPartsOfAnAdapter:
    """PEFT adapts every module that the config targets and saves every module to save: what lacks one is no whole adapter."""

    @staticmethod
    def base(folder: Path, layers: int = LAYERS) -> Path:
        folder.mkdir()
        tensors = {f"model.layers.{n}.self_attn.{m}.weight": torch.ones(4, 4) for n in range(layers) for m in ("q_proj", "v_proj")}
        tensors |= {"model.embed_tokens.weight": torch.ones(6, 4), "lm_head.weight": torch.ones(6, 4)}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers, "tie_word_embeddings": False}))
        return folder

    @staticmethod
    def adapter(folder: Path, modules: list[str], saved: tuple[str, ...] = (), **config: Any) -> Path:
        """Modules as "0 q", layer and kind."""
        folder.mkdir()
        tensors = {f"base_model.model.{name}.weight": torch.zeros(6, 4) for name in saved}
        for layer, kind in (module.split() for module in modules):
            path = f"base_model.model.model.layers.{layer}.self_attn.{kind}_proj"
            tensors |= {f"{path}.lora_A.weight": torch.ones(2, 4), f"{path}.lora_B.weight": torch.ones(4, 2)}
        save_file(tensors, folder / "adapter_model.safetensors")
        content = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **config}
        (folder / "adapter_config.json").write_text(json.dumps(content))
        return folder

    WHOLE: ClassVar[list[str]] = ["0 q", "0 v", "1 q", "1 v"]

    @pytest.mark.parametrize(
        ("modules", "config", "told"),
        [
            (WHOLE, {"modules_to_save": ["lm_head"]}, "lm_head was trained as a whole, but it is missing"),
            (WHOLE, {"modules_to_save": ["classifier", "score"], "task_type": "TOKEN_CLS"}, "classifier was trained"),
            (["0 q"], {}, "targets v_proj, but there are no factors for it"),
            (["0 q", "1 q"], {}, "targets v_proj, but there are no factors for it"),
            (
                ["0 q", "0 v"],
                {},
                "layers.1.self_attn.q_proj, model.layers.1.self_attn.v_proj; there are factors in layer 0, none in layer 1",
            ),
            (["0 q", "0 v", "1 v"], {}, "a module of the model has no factors, but others of its kind do: model.layers.1.self_attn.q_proj"),
            (["0 q"], {"target_modules": "all-linear"}, "none in layer 1"),
            (["0 q", "0 v"], {"layers_to_transform": [0, 1]}, "none in layer 1"),
        ],
    )
    def test_are_refused_on_a_base(self, tmp_path: Path, modules: list[str], config: dict[str, Any], told: str) -> None:
        adapter, base = self.adapter(tmp_path / "adapter", modules, **config), self.base(tmp_path / "base")
        for mode in ("fuse", "export"):
            with pytest.raises(Inconsistent) as caught:
                ckpt_cli.merge(adapter, tmp_path / mode, base=base, lora=mode)
            assert told in caught.value.message
            assert caught.value.exit_code == 4
            assert not (tmp_path / mode).exists()

    def test_are_a_base_with_more_layers(self, tmp_path: Path) -> None:
        adapter, base = self.adapter(tmp_path / "adapter", self.WHOLE), self.base(tmp_path / "base", layers=4)
        with pytest.raises(Inconsistent, match="none in layers 2, 3"):
            ckpt_cli.merge(adapter, tmp_path / "out", base=base)

    @pytest.mark.parametrize(
        ("modules", "config"),
        [
            (WHOLE, {}),
            (WHOLE, {"target_modules": ["q_proj", "v_proj", "query_key_value"]}),
            (WHOLE, {"rank_pattern": {"layers.1.self_attn.q_proj": 2}}),
            (["0 q", "0 v"], {"layers_to_transform": [0]}),
            (["1 q", "1 v"], {"layers_to_transform": 1, "layers_pattern": "layers"}),
            (["0 q", "0 v", "1 v"], {"exclude_modules": ["layers.1.self_attn.q_proj"]}),
            (["0 q"], {"target_modules": ["model.layers.0.self_attn.q_proj"]}),
            (["0 q"], {"target_modules": r".*layers\.0\..*q_proj"}),
        ],
    )
    def test_that_the_config_leaves_out_are_not_missed(self, tmp_path: Path, modules: list[str], config: dict[str, Any]) -> None:
        adapter = self.adapter(tmp_path / "adapter", modules, **config)
        result = ckpt_cli.merge(adapter, tmp_path / "out", base=self.base(tmp_path / "base"))
        assert "partial-adapter" not in {note.code for note in result.outputs[0].notes}

    @pytest.mark.parametrize(
        ("modules", "config", "told"),
        [
            (WHOLE, {"modules_to_save": ["lm_head"]}, "lm_head"),
            (["0 q", "1 q"], {}, "v_proj"),
        ],
    )
    def test_are_found_without_a_base(self, tmp_path: Path, modules: list[str], config: dict[str, Any], told: str) -> None:
        adapter = self.adapter(tmp_path / "adapter", modules, **config)
        with pytest.raises(Inconsistent, match=told):
            ckpt_cli.merge(adapter, tmp_path / "out")
        found = [finding for finding in ckpt_cli.verify(adapter).findings if finding.code == "damaged-adapter"]
        assert [told in (finding.message) for finding in found] == [True]

    def test_that_others_have_in_more_layers_are_a_warning(self, tmp_path: Path) -> None:
        adapter = self.adapter(tmp_path / "adapter", ["0 q", "0 v", "1 v"])
        (note,) = (note for note in ckpt_cli.merge(adapter, tmp_path / "out").outputs[0].notes if note.code == "partial-adapter")
        assert note.level == "warning"
        assert "q_proj has factors in layer 0, modules beside it also in layer 1" in note.text
        assert "partial-adapter" in {finding.code for finding in ckpt_cli.verify(adapter).findings}

    def test_of_a_model_with_more_layers_are_a_warning(self, tmp_path: Path) -> None:
        adapter = self.adapter(tmp_path / "adapter", self.WHOLE)
        (adapter / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
        notes = [note.text for note in ckpt_cli.merge(adapter, tmp_path / "out").outputs[0].notes if note.code == "partial-adapter"]
        assert notes == ["there are factors in layers 0, 1, but the model has 4 layers: a part of the adapter may be missing"]

    @pytest.mark.parametrize("tie", [True, False])
    def test_a_tied_head_is_saved_as_its_embedding(self, tmp_path: Path, tie: bool) -> None:
        adapter = self.adapter(
            tmp_path / "adapter", self.WHOLE, ("model.embed_tokens",), modules_to_save=["lm_head", "embed_tokens"], ensure_weight_tying=tie
        )
        base = self.base(tmp_path / "base")
        if tie:
            ckpt_cli.merge(adapter, tmp_path / "out", base=base)
        else:
            with pytest.raises(Inconsistent, match="lm_head"):
                ckpt_cli.merge(adapter, tmp_path / "out", base=base)

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            ("qwen2", {"target_modules": ATTENTION, "layers_to_transform": [1]}),
            ("qwen2", {"target_modules": ATTENTION, "layers_to_transform": [0], "layers_pattern": "layers"}),
            ("qwen2", {"target_modules": ATTENTION, "exclude_modules": ["layers.0.self_attn.q_proj"]}),
            ("qwen2", {"target_modules": [*ATTENTION, "query_key_value"]}),
            ("qwen2", {"target_modules": r".*\.1\..*q_proj"}),
            ("qwen2, sequence classification", {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}),
        ],
    )
    def test_that_peft_left_out_are_not_missed(self, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
        result = ckpt_cli.merge(trained(adapted(kind, options), tmp_path), tmp_path / "out", verify=True)
        assert result.exit_code == 0
        assert "partial-adapter" not in {note.code for note in result.outputs[0].notes}

    @pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}])
    def test_of_the_factors_in_a_model_are_refused(self, tmp_path: Path, options: dict[str, Any]) -> None:
        """Full shards in which one layer, or the module to save, has lost what PEFT trained."""
        run = trained(adapted("qwen2", {"target_modules": ["q_proj"]}), tmp_path)
        config = json.loads((run / "lora_adapter" / "adapter_config.json").read_text())
        (run / "lora_adapter" / "adapter_config.json").write_text(json.dumps({**config, **options}))
        for file in run.glob("*.pt"):
            state = torch.load(file, weights_only=False)
            kept = {name: tensor for name, tensor in state.items() if options or ".layers.1.self_attn.q_proj.lora" not in name}
            torch.save(kept, file)
        with pytest.raises(Inconsistent, match="lm_head" if options else "layers.1.self_attn.q_proj"):
            ckpt_cli.merge(run, tmp_path / "out")


class TestLayoutOfExperts:
    """Unsloth packed lora_B of fused experts by expert, PEFT packs it by rank: in the same shapes, so the config decides."""

    @pytest.fixture
    def peft_run(self, tmp_path: Path) -> tuple[Any, Path]:
        model = adapted(*CASES["fused experts"])
        return model, trained(model, tmp_path)

    def by_expert(self, model: Any) -> None:
        """What Unsloth would have saved for the same update: flat column e * r + j instead of j * E + e."""
        experts = model.get_base_model().config.num_experts
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "experts" in name and "lora_B" in name:
                    rows = parameter.shape[0]
                    parameter.copy_(parameter.reshape(rows, -1, experts).transpose(1, 2).reshape(rows, -1).clone())

    def mark(self, run: Path, **values: Any) -> None:
        path = run / "lora_adapter" / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    @pytest.mark.parametrize(
        "values",
        [
            {"lora_B_layout": "grouped_by_expert"},
            {
                "lora_B_layout": "mixed",
                "unsloth_fused_expert_lora": {
                    "lora_A_layout": "grouped_by_expert",
                    "parameters": {
                        name: {"lora_B_layout": "grouped_by_expert", "num_experts": 4} for name in ("gate_up_proj", "down_proj")
                    },
                },
            },
        ],
        ids=["common", "of each parameter"],
    )
    def test_is_read(self, peft_run: tuple[Any, Path], tmp_path: Path, values: dict[str, Any]) -> None:
        model, run = peft_run
        ckpt_cli.merge(run, tmp_path / "peft")
        self.by_expert(model)
        (tmp_path / "unsloth").mkdir()
        other = trained(model, tmp_path / "unsloth")
        unmarked = ckpt_cli.merge(other, tmp_path / "unmarked")
        self.mark(other, **values)
        result = ckpt_cli.merge(other, tmp_path / "out")
        wanted, found, wrong = load(tmp_path / "peft"), load(tmp_path / "out"), load(tmp_path / "unmarked")
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert not all(torch.equal(wrong[name], wanted[name]) for name in wanted)
        assert result.outputs[0].plan_digest != unmarked.outputs[0].plan_digest

    def test_that_is_pefts_own_changes_nothing(self, peft_run: tuple[Any, Path], tmp_path: Path) -> None:
        _, run = peft_run
        ckpt_cli.merge(run, tmp_path / "before")
        self.mark(run, lora_B_layout="rank_major", base_model_name_or_path="unsloth/Qwen3-30B-A3B")
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert "expert-layout" not in {note.code for note in result.outputs[0].notes}
        wanted, found = load(tmp_path / "before"), load(tmp_path / "out")
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    @pytest.mark.parametrize(
        "values",
        [{"lora_B_layout": "by_column"}, {"lora_B_layout": 3}, {"unsloth_fused_expert_lora": {"lora_A_layout": "rank_major"}}],
        ids=str,
    )
    def test_that_is_not_known_is_refused_by_name(self, peft_run: tuple[Any, Path], tmp_path: Path, values: dict[str, Any]) -> None:
        _, run = peft_run
        self.mark(run, **values)
        with pytest.raises(Unsupported, match=r"by_column|3|lora_A_layout rank_major"):
            ckpt_cli.merge(run, tmp_path / "out")

    @pytest.mark.parametrize(
        "sign", [{"base_model_name_or_path": "unsloth/Qwen3-30B-A3B"}, {"auto_mapping": {"unsloth_fixed": True}}], ids=str
    )
    @pytest.mark.parametrize("lora", ["fuse", "export"])
    def test_that_is_not_said_is_a_warning(self, peft_run: tuple[Any, Path], tmp_path: Path, sign: dict[str, Any], lora: str) -> None:
        _, run = peft_run
        self.mark(run, **sign)
        result = ckpt_cli.merge(run, tmp_path / "out", lora=lora)
        assert "expert-layout" in {note.code for note in result.outputs[0].notes if note.level == "warning"}
        if lora == "export":
            assert "expert-layout" in {item.code for item in ckpt_cli.verify(tmp_path / "out").of_severity("warning")}

    def test_of_an_export_that_peft_does_not_read_is_a_warning(self, peft_run: tuple[Any, Path], tmp_path: Path) -> None:
        _, run = peft_run
        self.mark(run, lora_B_layout="grouped_by_expert")
        result = ckpt_cli.merge(run, tmp_path / "out", lora="export")
        assert "expert-layout" in {note.code for note in result.outputs[0].notes if note.level == "warning"}
        assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_B_layout"] == "grouped_by_expert"

    def test_of_adapters_alone(self, peft_run: tuple[Any, Path], tmp_path: Path) -> None:
        """Their own folder, and from there onto a base: ranks are those of one expert."""
        _, run = peft_run
        ckpt_cli.merge(run, tmp_path / "adapter", lora="export")
        result = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out")
        assert result.outputs[0].lora is not None
        assert (result.outputs[0].lora.outcome, result.outputs[0].lora.ranks) == ("exported", (4,))
        assert ckpt_cli.verify(tmp_path / "out").exit_code == 0
        found, wanted = load(tmp_path / "out"), load(tmp_path / "adapter")
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_tied_head_follows_its_embedding_where_the_format_lost_the_tie(tmp_path: Path) -> None:
    """DCP stores both; PEFT changes the one storage that they are."""
    model = adapted("llama, tied", {"target_modules": ["embed_tokens"]})
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (tmp_path / "run").mkdir()
    save_file(state, tmp_path / "run" / "model.safetensors")
    config = model.get_base_model().config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "run")
    ckpt_cli.merge(tmp_path / "run", tmp_path / "out", lora_alpha=10)
    assert load(tmp_path / "out").keys() == merged_by_peft(model, tmp_path / "peft").keys()


def test_kept_adapters_are_written_as_they_are(tmp_path: Path) -> None:
    result = ckpt_cli.merge(plain(tmp_path, SMALL), tmp_path / "out", lora="keep", verify=True)
    assert load(tmp_path / "out").keys() == {f"base_model.model.{name}" for name in SMALL}
    assert result.exit_code == 0


def test_a_changed_factor_is_noticed(tmp_path: Path) -> None:
    """The manifest lists the files that were read, and the digest of the plan depends on the scale."""
    run = plain(tmp_path, SMALL)
    digests = [ckpt_cli.merge(run, tmp_path / f"out{alpha}", lora_alpha=alpha).outputs[0].plan_digest for alpha in (2, 4)]
    assert digests[0] != digests[1]
    manifest = json.loads((tmp_path / "out2" / "ckpt-manifest.json").read_text())
    assert [source["path"] for source in manifest["sources"]] == [str(run / "model.safetensors")]


def test_nan_stays_nan(tmp_path: Path) -> None:
    tensors = {**SMALL, "m.base_layer.weight": torch.full((4, 6), math.nan)}
    ckpt_cli.merge(plain(tmp_path, tensors), tmp_path / "out", lora_alpha=2)
    assert numpy.isnan(load_file(tmp_path / "out" / "model.safetensors")["m.weight"].numpy()).all()


def test_sources_are_left_alone(layouts: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(layouts / "verl-lora", tmp_path / "copy"))
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    ckpt_cli.merge(copy / "lora_only", tmp_path / "out", base=copy / "base", lora="both")
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("update", "expected"), [(2.0**-40, 1 + 2.0**-7), (-(2.0**-40), 1.0)])
def test_a_cast_rounds_the_sum_once(tmp_path: Path, update: float, expected: float) -> None:
    """1 + 2^-8 lies halfway between two bfloat16, and float32 does not see what is added to it."""
    tensors = {
        "q_proj.base_layer.weight": torch.full((1, 1), 1 + 2.0**-8),
        "q_proj.lora_A.default.weight": torch.full((1, 1), 2.0**-20),
        "q_proj.lora_B.default.weight": torch.full((1, 1), update * 2.0**20),
    }
    folder = plain(tmp_path, tensors)
    ckpt_cli.merge(folder, tmp_path / "out", dtype="bf16", lora_alpha=1)
    assert load(tmp_path / "out")["q_proj.weight"].item() == expected


@pytest.mark.parametrize(
    ("adapted", "other"), [("model.embed_tokens", "the output head"), ("lm_head", "the embedding"), ("model.norm", None)]
)
def test_an_adapter_on_one_of_two_tied_tensors_is_a_warning(tmp_path: Path, adapted: str, other: str | None) -> None:
    """Training used the other one without it, and a model that ties them cannot."""
    tensors = {f"{name}.weight": torch.ones(4, 4) for name in ("model.embed_tokens", "lm_head", "model.norm") if name != adapted}
    factors = {"base_layer.weight": (4, 4), "lora_A.default.weight": (2, 4), "lora_B.default.weight": (4, 2)}
    folder = plain(tmp_path, tensors | {f"{adapted}.{name}": torch.ones(shape) for name, shape in factors.items()})
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    notes = ckpt_cli.merge(folder, tmp_path / "out", lora_alpha=1).outputs[0].notes
    told = [note.text for note in notes if note.code == "lora-tied"]
    assert bool(told) == bool(other)
    assert other is None or f"changes {other} too" in told[0]
