"""`load_into` fills live models: plain ones here, sharded ones in a process per rank (`tests.live_models`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckpt_cli
from ckpt_cli.errors import CastOverflow, DifferentTensors, Inconsistent, MissingTensors, Unsupported, UsageError
from tests.architectures import MODELS, build
from tests.cli import ROOT
from tests.live_models import Tree, held, in_dtype, other_values, unequal

EXPERTS = MODELS["qwen3_moe"]
EXAMPLE = ROOT / "examples" / "tiny-run"


@pytest.fixture(scope="module")
def folder(layouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with odd tensors, one large file, and a mixture of experts as on the hub and as in memory."""
    place = tmp_path_factory.mktemp("models")
    (place / "lmms-run").symlink_to(layouts / "lmms-run")
    (place / "large").mkdir()
    generator = torch.Generator().manual_seed(0)
    large = {f"layers.{i}.weight": torch.randn(257, 128, generator=generator) for i in range(6)}
    save_file({**large, "norm.weight": torch.randn(130, generator=generator)}, place / "large" / "model.safetensors")
    model = build(*EXPERTS)
    model.save_pretrained(place / "experts-hub")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file({**state, "lm_head.weight": model.lm_head.weight.detach().clone()}, place / "experts-fused.safetensors")
    return place


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_reads_its_own_slices(world: int, folder: Path, tmp_path: Path) -> None:
    """FSDP2, tensor parallelism and both, on so many processes; what they check is in `tests.live_models`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.live_models", str(world), str(folder), str(tmp_path / "meeting")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-6000:]


class TestPlainModels:
    @pytest.mark.parametrize("component", ["model", "ema"])
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=str)
    def test_are_filled_in_place(self, component: str, dtype: torch.dtype | None, folder: Path) -> None:
        full = load_file(folder / "lmms-run" / ("expected.safetensors" if component == "model" else "expected-ema.safetensors"))
        model = Tree(other_values(full, dtype), {"lm_head.weight": "model.embed_tokens.weight"})
        before = dict(model.named_parameters())
        result = ckpt_cli.load_into(model, folder / "lmms-run" / "run", type=component)
        assert unequal(held(model), held(Tree(in_dtype(full, dtype), {"lm_head.weight": "model.embed_tokens.weight"}))) == []
        assert all(before[name] is parameter and parameter.requires_grad for name, parameter in model.named_parameters())
        assert result.tensors == len(full)
        assert result.step == 200

    def test_of_transformers_from_a_training_run_and_from_the_hub(self, folder: Path, tmp_path: Path) -> None:
        """A fused mixture of experts: as `from_pretrained` would have loaded it."""
        wanted = load_file(folder / "experts-fused.safetensors")
        torch.save(wanted, tmp_path / "model.pt")
        shutil.copy(folder / "experts-hub" / "config.json", tmp_path)
        assert any("experts.0.gate_proj" in name for name in load_file(folder / "experts-hub" / "model.safetensors"))
        for path, naming in ((folder / "experts-hub", "hub"), (tmp_path / "model.pt", "native")):
            model = build(*EXPERTS)
            for values in model.state_dict().values():
                values.fill_(7)
            assert ckpt_cli.load_into(model, path).naming == naming
            assert unequal(dict(model.state_dict()), wanted) == []

    @pytest.mark.parametrize("wrap", ["compile", "parallel"])
    def test_wrapped_by_compile_or_data_parallel(self, wrap: str, folder: Path) -> None:
        full = load_file(folder / "large" / "model.safetensors")
        model = Tree(other_values(full))
        wrapped = torch.compile(model) if wrap == "compile" else nn.DataParallel(model)
        ckpt_cli.load_into(wrapped, folder / "large")
        assert unequal(held(model), full) == []

    def test_strides_of_parameters_are_kept(self, tmp_path: Path) -> None:
        values = {"conv": torch.randn(4, 6, 5, 3), "turned": torch.randn(7, 9)}
        save_file(values, tmp_path / "model.safetensors")
        model = nn.Module()
        model.conv = nn.Parameter(torch.zeros(4, 6, 5, 3).to(memory_format=torch.channels_last))
        model.turned = nn.Parameter(torch.zeros(9, 7).t())
        strides = [parameter.stride() for parameter in model.parameters()]
        ckpt_cli.load_into(model, tmp_path / "model.safetensors")
        assert unequal(held(model), values) == []
        assert [parameter.stride() for parameter in model.parameters()] == strides

    def test_buffers_that_are_not_persistent_are_left_alone(self, tmp_path: Path) -> None:
        save_file({"a": torch.ones(3), "kept": torch.ones(2)}, tmp_path / "model.safetensors")
        model = nn.Module()
        model.a = nn.Parameter(torch.zeros(3))
        model.register_buffer("kept", torch.zeros(2))
        model.register_buffer("made", torch.zeros(2), persistent=False)
        assert ckpt_cli.load_into(model, tmp_path / "model.safetensors").tensors == 2
        assert (model.kept.tolist(), model.made.tolist()) == ([1, 1], [0, 0])

    def test_rounding_is_that_of_the_project(self, tmp_path: Path) -> None:
        """Once, to nearest even, also from float64, where torch rounds twice."""
        values = torch.tensor([1 + 2**-8 + 2**-40, 1 + 2**-8, 1 + 3 * 2**-8, float("nan"), float("inf"), 1e-310], dtype=torch.float64)
        save_file({"a": values}, tmp_path / "model.safetensors")
        model = nn.Module()
        model.a = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
        ckpt_cli.load_into(model, tmp_path / "model.safetensors")
        ckpt_cli.merge(tmp_path / "model.safetensors", tmp_path / "out", dtype="bf16")
        merged = load_file(tmp_path / "out" / "model.safetensors")["a"]
        assert torch.equal(model.a.detach().view(torch.int16), merged.view(torch.int16))
        assert model.a[0].item() == 1 + 2**-7

    def test_progress_is_told(self, folder: Path) -> None:
        told: list[int] = []

        class Watching:
            def start(self, total_bytes: int, label: str) -> None:
                told.append(total_bytes)

            def advance(self, count: int, label: str) -> None:
                told[0] -= count

            def finish(self) -> None:
                told.append(0)

        model = Tree(other_values(load_file(folder / "large" / "model.safetensors")))
        ckpt_cli.load_into(model, folder / "large", progress=Watching(), jobs=1)
        assert told == [0, 0]


class TestWhatDoesNotFit:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        save_file({"a": torch.ones(4, 2), "b": torch.ones(3), "count": torch.ones(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"

    def model(self, **shapes: Any) -> nn.Module:
        model = nn.Module()
        for name, value in shapes.items():
            model.register_buffer(name, value) if not value.is_floating_point() else model.register_parameter(name, nn.Parameter(value))
        return model

    def test_everything_is_said_at_once_and_nothing_is_written(self, path: Path) -> None:
        model = self.model(a=torch.zeros(2, 4), count=torch.zeros(2, dtype=torch.int32), more=torch.zeros(1))
        with pytest.raises(DifferentTensors) as caught:
            ckpt_cli.load_into(model, path)
        assert set(caught.value.details) == {
            "other shape: a is [4, 2] in the checkpoint, [2, 4] in the model",
            "other dtype: count is int64 in the checkpoint, int32 in the model",
            "missing in the checkpoint: more",
            "not in the model: b",
        }
        assert not any(values.any() for values in model.state_dict().values())
        assert caught.value.exit_code == 4

    def test_what_both_have_is_loaded_if_asked_for(self, path: Path) -> None:
        model = self.model(a=torch.zeros(4, 2), more=torch.zeros(1))
        with pytest.raises(DifferentTensors) as caught:
            ckpt_cli.load_into(model, path)
        assert caught.value.hint == "pass strict=False to load the tensors that both have"
        result = ckpt_cli.load_into(model, path, strict=False)
        assert (result.missing, set(result.unexpected)) == (("more",), {"b", "count"})
        assert model.a.sum() == 8
        assert ckpt_cli.load_into(model, path, allow_missing="mo*", exclude=["b", "count"]).missing == ()

    def test_missing_tensors_alone_are_called_so(self, path: Path) -> None:
        model = self.model(a=torch.zeros(4, 2), b=torch.zeros(3), count=torch.zeros(2, dtype=torch.int64), c=torch.zeros(1))
        with pytest.raises(MissingTensors, match="1 tensor differs"):
            ckpt_cli.load_into(model, path)

    def test_nothing_in_common(self, path: Path) -> None:
        with pytest.raises(DifferentTensors, match="no tensor in common"):
            ckpt_cli.load_into(self.model(c=torch.zeros(1)), path, strict=False)

    def test_values_that_the_dtype_of_the_model_cannot_hold(self, tmp_path: Path) -> None:
        save_file({"a": torch.tensor([1.0, 1e30])}, tmp_path / "model.safetensors")
        model = self.model(a=torch.zeros(2, dtype=torch.float16))
        with pytest.raises(CastOverflow, match="1 finite value becomes infinite"):
            ckpt_cli.load_into(model, tmp_path / "model.safetensors")
        assert ckpt_cli.load_into(model, tmp_path / "model.safetensors", allow_overflow=True).overflowed == 1

    def test_a_tie_of_the_model_that_the_checkpoint_does_not_have(self, tmp_path: Path) -> None:
        save_file({"a": torch.ones(4, 2), "b": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
        model = nn.Module()
        model.a = model.b = nn.Parameter(torch.full((4, 2), 7.0))
        with pytest.raises(Inconsistent, match="the model ties it to b") as caught:
            ckpt_cli.load_into(model, tmp_path / "model.safetensors")
        assert model.a.sum() == 56
        assert caught.value.hint == "exclude='b' takes the values of a"
        ckpt_cli.load_into(model, tmp_path / "model.safetensors", exclude="b")
        assert model.b.sum() == 8

    def test_a_tie_of_the_checkpoint_that_the_model_does_not_have(self) -> None:
        full = ckpt_cli.load_state_dict(EXAMPLE, names="native")
        model = Tree(other_values(full))
        assert model.at(["lm_head"]).weight is not model.at(["model", "embed_tokens"]).weight
        ckpt_cli.load_into(model, EXAMPLE)
        assert unequal(held(model), full) == []

    def test_models_that_cannot_be_filled(self, path: Path) -> None:
        with torch.device("meta"):
            meta = self.model(a=torch.zeros(4, 2))
        with pytest.raises(UsageError, match="meta device"):
            ckpt_cli.load_into(meta, path)
        with pytest.raises(UsageError, match=r"must be a torch\.nn\.Module, not dict"):
            ckpt_cli.load_into({}, path)  # type: ignore[arg-type]
        lazy = nn.LazyLinear(3)
        with pytest.raises(Unsupported, match="UninitializedParameter"):
            ckpt_cli.load_into(lazy, path)
        taken = self.model(a=torch.zeros(0))
        taken.a.ds_id = 0
        with pytest.raises(Unsupported, match="ZeRO-3"):
            ckpt_cli.load_into(taken, path)


class Gated(nn.Module):
    """A model with two matrices of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((4, 2), 7.0))
        self.b = nn.Parameter(torch.full((4, 2), 7.0))


class Doubling(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(double)


class Reading(Gated):
    def _load_from_state_dict(self, state: Any, *arguments: Any) -> None:
        super()._load_from_state_dict(state, *arguments)  # type: ignore[no-untyped-call]


class Scaled(Gated):
    def get_extra_state(self) -> dict[str, float]:
        return {"scale": 1.0}

    def set_extra_state(self, state: dict[str, float]) -> None:
        raise AssertionError


def double(module: nn.Module, state: Any, prefix: str, *others: Any) -> None:
    state[f"{prefix}a"] = state[f"{prefix}a"] * 2


class TestMemoryAndHooks:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        save_file({"a": torch.ones(4, 2), "b": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"

    def test_names_that_share_all_memory_are_tied(self, path: Path, tmp_path: Path) -> None:
        """By ``.data``, as if they were one parameter: other values are refused, equal ones fill both."""
        model = Gated()
        model.b.data = model.a.data
        with pytest.raises(Inconsistent, match="the model ties it to b"):
            ckpt_cli.load_into(model, path)
        assert model.a.sum() == 56
        save_file({"a": torch.ones(4, 2), "b": torch.ones(4, 2)}, tmp_path / "equal.safetensors")
        ckpt_cli.load_into(model, tmp_path / "equal.safetensors")
        assert model.a.sum() == model.b.sum() == 8

    @pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
    @pytest.mark.parametrize("way", ["rows", "turned", "other dtype", "expanded", "protected"])
    def test_memory_that_cannot_be_filled_is_refused_before_anything_is_written(self, way: str, path: Path, tmp_path: Path) -> None:
        model, memory = Gated(), torch.full((6, 2), 7.0)
        said = "shares a part of its memory with a"
        if way == "rows":
            model.a, model.b = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])
        elif way == "turned":
            model.b = nn.Parameter(model.a.data.view(2, 4).t())
        elif way == "other dtype":
            model.b = nn.Parameter(model.a.data.view(torch.bfloat16)[:, 1:3])
        elif way == "expanded":
            model.b, said = nn.Parameter(torch.full((1, 2), 7.0).expand(4, 2)), "one place in memory"
        else:
            numpy.full((4, 2), 7, dtype=numpy.float32).tofile(tmp_path / "values")
            mapped = numpy.memmap(tmp_path / "values", dtype=numpy.float32, shape=(4, 2), mode="r")
            model.b, said = nn.Parameter(torch.from_numpy(mapped)), "may only be read"
        before = model.a.detach().clone()
        with pytest.raises(Unsupported, match=said) as caught:
            ckpt_cli.load_into(model, path)
        assert caught.value.hint is not None
        assert caught.value.tensor == "b"
        assert torch.equal(model.a, before)
        model.b.data = model.b.data.clone()  # what the hint says
        if way != "other dtype":
            ckpt_cli.load_into(model, path)
            assert (model.a.sum(), model.b.sum()) == (8, 0)

    def test_columns_of_one_matrix_share_nothing(self, path: Path) -> None:
        model, memory = Gated(), torch.full((4, 4), 7.0)
        model.a, model.b = nn.Parameter(memory[:, :2]), nn.Parameter(memory[:, 2:])
        ckpt_cli.load_into(model, path)
        assert memory.tolist() == [[1, 1, 0, 0]] * 4

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("kind", ["sparse", "quantized"])
    def test_tensors_that_are_not_dense(self, kind: str, path: Path) -> None:
        model = Gated()
        del model.b
        values = torch.ones(4, 2)
        model.register_buffer("b", values.to_sparse() if kind == "sparse" else torch.quantize_per_tensor(values, 0.1, 0, torch.qint8))
        with pytest.raises(Unsupported, match="cannot be filled"):
            ckpt_cli.load_into(model, path)
        assert model.a.sum() == 56

    def test_made_under_inference_mode_are_filled(self, path: Path) -> None:
        with torch.inference_mode():
            model = Gated()
        ckpt_cli.load_into(model, path)
        assert (model.a.sum(), model.b.sum()) == (8, 0)

    @pytest.mark.parametrize(
        ("kind", "line"),
        [
            (Doubling, "inner (Doubling): the hook double"),
            (Reading, "inner (Reading): _load_from_state_dict"),
            (Scaled, "inner (Scaled): set_extra_state"),
        ],
    )
    def test_what_load_state_dict_would_run_is_named(self, kind: type[Gated], line: str, tmp_path: Path) -> None:
        save_file({"inner.a": torch.ones(4, 2), "inner.b": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
        model = nn.Module()
        model.inner = kind()
        with pytest.raises(Unsupported, match="a way of its own") as caught:
            ckpt_cli.load_into(model, tmp_path / "model.safetensors")
        assert caught.value.details == (line,)
        assert model.inner.a.sum() == 56
        result = ckpt_cli.load_into(model, tmp_path / "model.safetensors", strict=False)
        assert [note.text for note in result.notes if note.code == "load-hooks"] == [f"not run: {line}"]
        assert model.inner.a.sum() == 8

    def test_modules_of_torch_load_as_ever(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.LSTM(4, 4))
        save_file({name: values.clone() for name, values in model.state_dict().items()}, tmp_path / "model.safetensors")
        assert "load-hooks" not in [note.code for note in ckpt_cli.load_into(model, tmp_path / "model.safetensors").notes]


@pytest.mark.parametrize("world", [4, pytest.param(6, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_every_placement_on_every_mesh(world: int, tmp_path: Path) -> None:
    """What torch cuts out of a tensor for each rank of larger meshes is what `load_into` reads for it."""
    from tests.fake_ranks import SHAPES

    generator = torch.Generator().manual_seed(0)
    save_file({"t" + "x".join(map(str, shape)): torch.randn(shape, generator=generator) for shape in SHAPES}, tmp_path / "t.safetensors")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.fake_ranks", str(world), str(tmp_path / "t.safetensors")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[-1]) > 60 * world
