"""Checkpoints as mappings of lazy tensors: names, slices that read what they cover, and values, judged by torch and safetensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import CastOverflow, NotFound, SourceChanged, Unsupported, UsageError
from ckpt_cli.loading.lazy import LazyTensor
from ckpt_cli.tensors import views
from tests.cli import ROOT
from tests.tensors import differences

EMBEDDING = "model.embed_tokens.weight"
EXAMPLE = ROOT / "examples" / "tiny-run"


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads that a process asks its system for, as they happen."""
    sizes: list[int] = []
    plain = os.preadv

    def counting(fd: int, buffers: Any, offset: int) -> int:
        count = plain(fd, buffers, offset)
        sizes.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    return sizes


class TestNames:
    @pytest.mark.parametrize("component", ["model", "ema"])
    def test_are_those_that_a_merge_writes(self, component: str, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "lmms-run" / "run"
        ckpt_cli.merge(run, tmp_path / "out", type=component)
        written = load_file(tmp_path / "out" / "model.safetensors")
        with ckpt_cli.open(run, type=component) as checkpoint:
            assert differences({name: tensor.torch() for name, tensor in checkpoint.items()}, written) == []
            assert (checkpoint.component, checkpoint.step) == (component, 200)
            assert {"model", "ema"} <= set(checkpoint.components)

    @pytest.mark.parametrize("place", ["lora_only", "full"])
    def test_of_adapters_are_those_that_a_merge_writes(self, place: str, layouts: Path, tmp_path: Path) -> None:
        """Alone they get the names of PEFT's files, and with their base they are fused."""
        ckpt_cli.merge(layouts / "verl-lora" / place, tmp_path / "out")
        written = {name: tensor for file in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(file).items()}
        assert differences(ckpt_cli.load_state_dict(layouts / "verl-lora" / place), written) == []
        if place == "lora_only":
            assert all(".default." in name for name in ckpt_cli.open(layouts / "verl-lora" / place, names="native"))

    def test_of_training_include_those_of_tied_tensors(self) -> None:
        hub, native = ckpt_cli.open(EXAMPLE), ckpt_cli.open(EXAMPLE, names="native")
        assert set(native) - set(hub) == {"lm_head.weight"}
        assert native["lm_head.weight"].identity == native["model.embed_tokens.weight"].identity
        state = ckpt_cli.load_state_dict(EXAMPLE, names="native")
        assert state["lm_head.weight"] is state["model.embed_tokens.weight"]

    def test_a_mapping(self) -> None:
        checkpoint = ckpt_cli.open(EXAMPLE)
        assert list(checkpoint) == list(checkpoint.names)
        assert len(checkpoint) == len(checkpoint.names) == 24
        assert "model.norm.weight" in checkpoint
        assert "model.norm" not in checkpoint
        assert checkpoint.get("nothing") is None
        with pytest.raises(KeyError) as caught:
            checkpoint["model.norm.weigth"]
        assert isinstance(caught.value, NotFound)
        assert "did you mean model.norm.weight?" in str(caught.value)

    def test_filters_as_in_a_merge(self) -> None:
        assert ckpt_cli.open(EXAMPLE, include="*norm*", exclude="model.layers.*").names == ("model.norm.weight",)
        with pytest.raises(NotFound):
            ckpt_cli.open(EXAMPLE, include="nothing")

    def test_steps_and_components_are_chosen(self) -> None:
        first, second = (ckpt_cli.open(EXAMPLE, step=step)["model.embed_tokens.weight"].torch() for step in (100, 200))
        assert not torch.equal(first, second)
        with pytest.raises(NotFound, match="no step of this run has a component actor"):
            ckpt_cli.open(EXAMPLE, type="actor")
        with pytest.raises(UsageError, match="several components"):
            ckpt_cli.open(EXAMPLE, type="both")


class TestValues:
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_of_every_layout_are_those_of_the_merge(self, layouts: Path, expect: dict[str, Any]) -> None:
        """Every result of every layout that a plain merge of one component gives."""
        compared = 0
        for layout, cases in expect.items():
            for case in cases["results"]:
                arguments = case["arguments"]
                known = {"--type": "type", "--step": "step"}
                if len(arguments) % 2 == 0 or any(option not in known for option in arguments[1::2]):
                    continue
                options: dict[str, Any] = {known[key]: value for key, value in zip(arguments[1::2], arguments[2::2], strict=True)}
                if "step" in options:
                    options["step"] = int(options["step"])
                state = ckpt_cli.load_state_dict(layouts / layout / arguments[0], names="native", **options)
                state = {name: tensor for name, tensor in state.items() if name != "lm_head.weight" or tensor is not state[EMBEDDING]}
                assert differences(state, load_file(layouts / layout / case["file"])) == [], (layout, arguments)
                compared += 1
        assert compared >= 20

    @pytest.mark.parametrize("dtype", ["bf16", torch.float16, numpy.float32, ml_dtypes.bfloat16], ids=str)
    def test_are_cast_as_a_merge_casts(self, dtype: Any, tmp_path: Path) -> None:
        ckpt_cli.merge(EXAMPLE, tmp_path / "out", dtype=dtype)
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert differences(ckpt_cli.load_state_dict(EXAMPLE, dtype=dtype), written) == []
        lazy = ckpt_cli.open(EXAMPLE)
        assert differences({name: tensor.to(dtype).torch() for name, tensor in lazy.items()}, written) == []

    def test_of_every_dtype(self, tmp_path: Path) -> None:
        kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64]
        kinds += [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64]
        values = {str(kind): torch.arange(-8, 8).reshape(4, 4).to(kind) for kind in kinds} | {
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(2.5),
        }
        save_file(values, tmp_path / "model.safetensors")
        checkpoint = ckpt_cli.open(tmp_path / "model.safetensors")
        assert differences({name: tensor.torch() for name, tensor in checkpoint.items()}, values) == []
        for name, value in values.items():
            found, lazy = checkpoint[name].numpy(), checkpoint[name]
            assert (found.shape, found.tobytes()) == (tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
            assert (lazy.dtype, lazy.ndim, lazy.nbytes) == (str(value.dtype).removeprefix("torch."), value.ndim, value.nbytes)
        assert numpy.asarray(checkpoint["scalar"]) == 2.5
        assert numpy.asarray(checkpoint["torch.int8"], dtype="f4").dtype == numpy.float32

    def test_an_overflow_is_refused(self, tmp_path: Path) -> None:
        save_file({"a": torch.tensor([1.0, 1e30])}, tmp_path / "model.safetensors")
        lazy = ckpt_cli.open(tmp_path / "model.safetensors")["a"].to("fp16")
        assert lazy[:1].numpy() == 1
        with pytest.raises(CastOverflow, match="1 finite value becomes infinite"):
            lazy.numpy()

    @pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
    @settings(max_examples=20, deadline=None)
    @examples(chain=st.lists(st.sampled_from(["fp32", "bf16", "fp16"]), min_size=1, max_size=5))
    def test_casts_of_casts_are_made_one_after_the_other(
        self, stored: str, chain: list[str], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """What was opened as bf16 had the unrounded values of the file when it was cast to fp32."""
        kinds = {"fp32": numpy.float32, "bf16": ml_dtypes.bfloat16, "fp16": numpy.float16}
        file = tmp_path_factory.mktemp("chain") / "model.safetensors"
        values = torch.randn(40, generator=torch.Generator().manual_seed(1)).to(getattr(torch, stored))
        save_file({"a": values}, file)
        expected = values.float().numpy().astype(kinds[{"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[stored]])
        lazy, opened = ckpt_cli.open(file)["a"], ckpt_cli.open(file, dtype=chain[0])["a"]
        for at, name in enumerate(chain):
            expected = expected.astype(numpy.float32).astype(kinds[name])
            lazy, opened = lazy.to(name), opened.to(name) if at else opened
        for made in (lazy, opened, lazy[:]):
            assert made.numpy().dtype == expected.dtype
            assert made.numpy().tobytes() == expected.tobytes() == made.torch().view(torch.uint8).numpy().tobytes()
        assert lazy[3:7].numpy().tobytes() == expected[3:7].tobytes()

    def test_an_overflow_on_the_way_is_refused(self, tmp_path: Path) -> None:
        save_file({"a": torch.tensor([1.0, 1e30])}, tmp_path / "model.safetensors")
        with pytest.raises(CastOverflow, match="1 finite value becomes infinite"):
            ckpt_cli.open(tmp_path / "model.safetensors")["a"].to("bf16").to("fp16").to("fp32").numpy()

    def test_without_torch_there_is_numpy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "torch", None)
        checkpoint = ckpt_cli.open(EXAMPLE)
        assert checkpoint["model.norm.weight"].numpy().shape == (24,)
        for refused in (checkpoint["model.norm.weight"].torch, lambda: ckpt_cli.load_state_dict(EXAMPLE)):
            with pytest.raises(Unsupported, match="needs torch, which is not installed"):
                refused()

    def test_a_file_that_changed_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        save_file({"a": torch.ones(4)}, path)
        checkpoint = ckpt_cli.open(path)
        checkpoint.close()
        assert checkpoint["a"].numpy().sum() == 4
        checkpoint.close()
        save_file({"a": torch.zeros(8)}, path)
        with pytest.raises(SourceChanged):
            checkpoint["a"].numpy()

    def test_objects_describe_themselves_and_escape_names(self, tmp_path: Path) -> None:
        save_file({"<b>\x1b": torch.ones(4, 2)}, tmp_path / "model.safetensors")
        checkpoint = ckpt_cli.open(tmp_path / "model.safetensors")
        (lazy,) = checkpoint.values()
        assert repr(lazy) == "<<b>\\x1b: float32 4 x 2>"
        assert "<b>" not in checkpoint._repr_html_()
        assert "&lt;b&gt;\\x1b" in checkpoint._repr_html_()


def slices(length: int) -> st.SearchStrategy[Any]:
    bound = st.none() | st.integers(-length - 2, length + 2)
    return st.builds(slice, bound, bound, st.none() | st.integers(1, 4)) | (st.integers(-length, length - 1) if length else st.nothing())


@pytest.fixture(scope="module")
def sharded(layouts: Path) -> dict[str, Any]:
    """Tensors cut by rows, by columns, on two dimensions, by strides, and in flat parameters of FSDP1."""
    found: dict[str, Any] = {}
    for place in ("mesh-line/line/ranks", "mesh-grid/tp/ranks", "mesh-grid/any/ranks", "lmms-run/run"):
        for name, lazy in ckpt_cli.open(layouts / place, names="native").items():
            found[f"{place}:{name}"] = (lazy, lazy.numpy())
    return found


class TestSlices:
    @settings(max_examples=400, deadline=None)
    @examples(data=st.data())
    def test_are_those_of_numpy(self, sharded: dict[str, Any], data: st.DataObject) -> None:
        lazy, whole = sharded[data.draw(st.sampled_from(sorted(sharded)))]
        key = tuple(data.draw(slices(length)) for length in whole.shape[: data.draw(st.integers(0, whole.ndim))])
        if data.draw(st.booleans()):
            rest = data.draw(st.integers(0, len(key)))
            key = (*key[:rest], ..., *key[rest:]) if len(key) == whole.ndim else (*key, ...)
        want, found = whole[key], lazy[key]
        assert found.shape == want.shape
        assert numpy.array_equal(found.numpy().view(f"u{whole.dtype.itemsize}"), want.view(f"u{whole.dtype.itemsize}"))

    @settings(max_examples=100, deadline=None)
    @examples(data=st.data())
    def test_of_a_tensor_that_was_reshaped_are_those_of_numpy(self, sharded: dict[str, Any], data: st.DataObject) -> None:
        lazy, whole = sharded["mesh-grid/any/ranks:model.embed_tokens.weight"]
        flat = views.merged(lazy._tensor, 0)
        shape = data.draw(st.sampled_from([(whole.size,), (whole.shape[1], whole.shape[0]), (2, whole.shape[1] // 2, whole.shape[0])]))
        reshaped, want = LazyTensor(views.unfolded(flat, 0, shape), lazy._dtype), whole.reshape(shape)
        key = tuple(data.draw(slices(length)) for length in shape[: data.draw(st.integers(0, len(shape)))])
        assert numpy.array_equal(reshaped[key].numpy(), want[key])

    def test_a_slice_of_a_slice(self) -> None:
        lazy = ckpt_cli.open(EXAMPLE)["model.embed_tokens.weight"]
        assert numpy.array_equal(lazy[10:300:3][5:, 2].numpy(), lazy.numpy()[10:300:3][5:, 2])
        assert lazy[3, 2].numpy().shape == ()
        assert [len(row) for row in lazy[:2]] == [24, 24]

    def test_read_only_what_they_cover(self, tmp_path: Path, read_bytes: list[int]) -> None:
        values = torch.randn(64, 32768)  # elements of a column lie further apart than what is read along with them
        save_file({"a": values}, tmp_path / "model.safetensors")
        lazy = ckpt_cli.open(tmp_path / "model.safetensors")["a"]
        read_bytes.clear()
        assert numpy.array_equal(lazy[10:14].numpy(), values[10:14].numpy())
        assert sum(read_bytes) == 4 * 32768 * 4
        read_bytes.clear()
        assert numpy.array_equal(lazy[:, 7].numpy(), values[:, 7].numpy())
        assert sum(read_bytes) < values.nbytes / 100
        read_bytes.clear()
        assert lazy[::2][5:9].shape == (4, 32768)
        assert read_bytes == []

    @pytest.mark.parametrize(
        "key", [slice(None, None, -1), [0, 1], None, True, 1.5, "a", (0, ..., ...), slice(0, 4, 0), slice("a")], ids=str
    )
    def test_what_is_no_slice_is_an_error_in_words(self, key: Any) -> None:
        with pytest.raises(UsageError):
            ckpt_cli.open(EXAMPLE)["model.embed_tokens.weight"][key]

    @pytest.mark.parametrize("key", [320, -321, (0, 24), (0, 0, 0)], ids=str)
    def test_what_is_out_of_range_is_an_index_error(self, key: Any) -> None:
        with pytest.raises(IndexError):
            ckpt_cli.open(EXAMPLE)["model.embed_tokens.weight"][key]

    @pytest.mark.parametrize("library", [numpy.array, torch.tensor], ids=["numpy", "torch"])
    @pytest.mark.parametrize("values", [[True] * 320, [[True] * 24] * 320, True, [0, 1], [1], [], 1.0], ids=lambda values: str(values)[:12])
    def test_masks_and_positions_are_an_error_in_words(self, library: Any, values: Any) -> None:
        """An array of one element is one of positions too, and keeps its dimension."""
        lazy = ckpt_cli.open(EXAMPLE)["model.embed_tokens.weight"]
        for key in (library(values), (slice(None), library(values)), (None, library(values), 0)):
            with pytest.raises(UsageError, match=r"takes integers, slices and '\.\.\.'"):
                lazy[key]

    @pytest.mark.parametrize("bound", [numpy.array([0, 1]), torch.tensor([0, 1]), torch.tensor(1.5)], ids=str)
    def test_slices_up_to_several_positions_are_an_error_in_words(self, bound: Any) -> None:
        with pytest.raises(UsageError, match="not a slice of integers"):
            ckpt_cli.open(EXAMPLE)["model.embed_tokens.weight"][:bound]

    @pytest.mark.parametrize("integer", [numpy.int64(3), numpy.uint8(3), numpy.array(3), torch.tensor(3)], ids=type)
    def test_integers_of_any_library_are_integers(self, integer: Any) -> None:
        lazy = ckpt_cli.open(EXAMPLE)["model.embed_tokens.weight"]
        assert numpy.array_equal(lazy[integer, integer:].numpy(), lazy.numpy()[3, 3:])
