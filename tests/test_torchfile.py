"""Files of torch.save: the same tensors that torch.load gives, or a refusal."""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import random
import struct
import tarfile
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt_cli
from ckpt_cli.boxes import whole
from ckpt_cli.dtypes import BY_TORCH
from ckpt_cli.errors import CkptError, CorruptFile, Unsupported
from ckpt_cli.files.pickle_nodes import Call, Global, Persistent, as_dict
from ckpt_cli.files.pickle_reader import load_pickle
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import StoredTensor, TorchFile
from ckpt_cli.formats.rank_files.dtensor import LocalReader
from ckpt_cli.tensors.reading import read_tile
from ckpt_cli.tensors.tensor import Piece, Tensor

ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
WEIGHT_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64, torch.complex128),
]


YOUNG_DTYPES = {d for d in WEIGHT_DTYPES if "float8" in str(d)} | {torch.uint64, torch.uint32, torch.uint16}
"""Those that have no storage class, which torch cannot save in legacy files."""


def can_be_saved(dtype: torch.dtype) -> bool:
    """Whether torch.save writes a tensor of this dtype; quantised tensors are another matter."""
    try:
        torch.save(torch.arange(16, dtype=torch.uint8).view(dtype), io.BytesIO())
    except (KeyError, RuntimeError):
        return False
    return True


@pytest.fixture(params=[True, False], ids=["zip", "legacy"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any], Path]:
    """Writes an object with torch.save, in today's format and in that of torch < 1.6."""

    def save(state: Any) -> Path:
        torch.save(state, tmp_path / "file.pt", _use_new_zipfile_serialization=request.param)
        return tmp_path / "file.pt"

    return save


@pytest.fixture
def files() -> Iterator[Files]:
    with Files() as opened:
        yield opened


def save(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


def stored_bytes(stored: StoredTensor) -> bytes:
    """The elements of a stored tensor in C order, read as a merge reads them."""
    box = whole(stored.shape)
    piece = Piece(stored.storage.source, stored.offset, stored.strides, box, swapped=stored.swapped, conj=stored.conj, neg=stored.neg)
    buffer = bytearray(stored.numel * stored.dtype.itemsize)
    if stored.numel:
        read_tile(Tensor("tensor", stored.dtype, stored.shape, (piece,)), box, buffer)
    return bytes(buffer)


def torch_bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def tensors_of(file: TorchFile) -> dict[Any, StoredTensor]:
    """The tensors in the dict that a file holds."""
    entries = as_dict(file.root)
    assert entries is not None
    return {name: stored for name, node in entries.items() if (stored := file.tensor(node)) is not None}


def check(path: Path, files: Files) -> dict[Any, StoredTensor]:
    """Every tensor of the file is what torch.load gives: dtype, shape and bytes."""
    judge = torch.load(path, weights_only=False)
    found = tensors_of(TorchFile(files.source(path)))
    assert found.keys() == {name for name, value in judge.items() if isinstance(value, torch.Tensor)}
    for name, stored in found.items():
        assert stored.dtype.torch == str(judge[name].dtype).removeprefix("torch."), name
        assert stored.shape == tuple(judge[name].shape), name
        assert stored_bytes(stored) == torch_bytes(judge[name]), name
    return found


def filled(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """A tensor whose bytes are all kinds of bit patterns, among them NaNs, infinities, denormals and -0.0."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (numel * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return (raw % 2 if dtype == torch.bool else raw).view(dtype)


class TestEveryDtype:
    @pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
    def test_that_weights_have_is_read_bit_for_bit(self, dtype: torch.dtype, tmp_path: Path, files: Files) -> None:
        check(save(tmp_path / "a.pt", self.state(dtype)), files)

    @pytest.mark.parametrize("dtype", [dtype for dtype in WEIGHT_DTYPES if dtype not in YOUNG_DTYPES], ids=str)
    def test_that_a_legacy_file_can_hold_is_read_bit_for_bit(self, dtype: torch.dtype, tmp_path: Path, files: Files) -> None:
        torch.save(self.state(dtype), tmp_path / "a.pt", _use_new_zipfile_serialization=False)
        check(tmp_path / "a.pt", files)

    def state(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        flat = filled(dtype, 24)
        return {"flat": flat, "box": flat.clone().view(2, 3, 4), "turned": flat.view(4, 6).t(), "one": flat[3].clone(), "none": flat[:0]}

    @pytest.mark.parametrize("dtype", [dtype for dtype in ALL_DTYPES if can_be_saved(dtype)], ids=str)
    def test_that_torch_can_save_is_read_bit_for_bit_or_refused_by_name(self, dtype: torch.dtype, tmp_path: Path, files: Files) -> None:
        raw = torch.arange(16, dtype=torch.uint8)
        file = TorchFile(files.source(save(tmp_path / "a.pt", raw.view(dtype))))
        if str(dtype).removeprefix("torch.") in BY_TORCH:
            stored = file.tensor(file.root)
            assert stored is not None
            assert stored.dtype.torch == str(dtype).removeprefix("torch.")
            assert stored_bytes(stored) == raw.numpy().tobytes()
        else:
            with pytest.raises(Unsupported, match="(?i)" + str(dtype).removeprefix("torch.")):
                file.tensor(file.root)

    def test_bool_bytes_other_than_0_and_1_are_not_normalised(self, tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, tensor_pickle(storage("BoolStorage", "0", 4), (4,), (1,)), {"0": b"\0\1\2\xff"})
        assert stored_bytes(only(path, files)) == b"\0\1\2\xff"


class TestEveryShape:
    def test_scalars_empty_tensors_and_dimensions_of_one(self, write: Callable[[Any], Path], files: Files) -> None:
        odd = torch.arange(6.0).as_strided((1, 3, 1), (77, 2, 55))
        state = {
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 5),
            "nothing": torch.empty(3, 0, 2),
            "one": torch.ones(1, 1, 1),
            "odd": odd,
        }
        check(write(state), files)

    def test_the_most_dimensions_that_torch_has(self, write: Callable[[Any], Path], files: Files) -> None:
        check(write({"deep": torch.arange(4.0).reshape((2, 2) + (1,) * 62)}), files)

    def test_transposed_permuted_and_channels_last(self, write: Callable[[Any], Path], files: Files) -> None:
        grid = torch.arange(120.0).reshape(2, 3, 4, 5)
        state = {
            "transposed": torch.arange(12.0).reshape(3, 4).t(),
            "permuted": grid.permute(3, 1, 0, 2),
            "channels_last": grid.clone(memory_format=torch.channels_last),
        }
        check(write(state), files)

    def test_slices_with_steps_and_rows_of_a_larger_storage(self, write: Callable[[Any], Path], files: Files) -> None:
        large = torch.arange(1000.0).reshape(50, 20)
        found = check(write({"rows": large[10:20], "columns": large[:, 3:7], "steps": large[::7, ::3], "last": large[-1, -1]}), files)
        assert found["rows"].offset - found["rows"].storage.offset == 10 * 20 * 4

    def test_diagonals_and_windows_that_overlap(self, write: Callable[[Any], Path], files: Files) -> None:
        square = torch.arange(25.0).reshape(5, 5)
        check(
            write(
                {
                    "diagonal": square.diagonal(),
                    "windows": torch.arange(10.0).unfold(0, 4, 2),
                    "same": torch.arange(4.0).as_strided((2, 3), (1, 1)),
                }
            ),
            files,
        )

    def test_a_strided_tensor_of_megabytes(self, write: Callable[[Any], Path], files: Files) -> None:
        check(write({"turned": torch.arange(1_500_000.0).reshape(1000, 1500).t()}), files)

    def test_an_expanded_view_that_is_no_larger_than_the_file(self, write: Callable[[Any], Path], files: Files) -> None:
        check(write({"expanded": torch.arange(4.0).reshape(4, 1).expand(4, 6)}), files)

    def test_an_expanded_view_that_is_larger_than_the_file_is_refused(self, write: Callable[[Any], Path], files: Files) -> None:
        path = write({"expanded": torch.ones(4, 1).expand(4, 1_000_000)})
        with pytest.raises(Unsupported, match="repeats 16 stored bytes") as caught:
            tensors_of(TorchFile(files.source(path)))
        assert caught.value.hint
        assert caught.value.path == str(path)

    @settings(deadline=None, max_examples=150, derandomize=True, database=None)
    @given(data=st.data())
    def test_any_view_of_any_storage(self, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
        shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
        strides = data.draw(st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape)))
        offset = data.draw(st.integers(0, 9))
        reach = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1 if 0 not in shape else offset
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.uint16, torch.float8_e5m2, torch.complex64]))
        base = filled(dtype, max(reach, 1) + data.draw(st.integers(0, 3)))
        path = save(tmp_path_factory.getbasetemp() / "view.pt", {"view": base.as_strided(shape, strides, offset)})
        with Files() as files:
            check(path, files)


class TestSharedStorages:
    def test_two_names_of_one_tensor_are_one_view(self, write: Callable[[Any], Path], files: Files) -> None:
        tied = torch.arange(6.0).reshape(2, 3)
        found = check(write({"embedding": tied, "head": tied, "copy": tied.clone(), "turned": tied.t(), "row": tied[0]}), files)
        assert found["embedding"] == found["head"]
        assert len(set(found.values())) == 4
        assert found["row"].storage == found["embedding"].storage

    def test_a_lazily_conjugated_tensor_is_not_the_same_view(self, tmp_path: Path, files: Files) -> None:
        values = torch.tensor([1 + 2j, 3 - 4j])
        found = check(save(tmp_path / "a.pt", {"plain": values, "conj": values.conj()}), files)
        assert found["plain"] != found["conj"]

    def test_a_tensor_that_is_its_whole_record_has_the_checksum_of_the_record(self, tmp_path: Path, files: Files) -> None:
        large = torch.arange(10.0)
        found = check(save(tmp_path / "a.pt", {"whole": torch.arange(10.0), "part": large[2:5], "rest": large}), files)
        assert found["whole"].record_crc is not None
        assert found["whole"].record_crc == found["rest"].record_crc
        assert found["part"].record_crc is None


class TestLazyFlags:
    def test_conjugated_and_negated_tensors_have_the_values_that_torch_shows(self, write: Callable[[Any], Path], files: Files) -> None:
        values = torch.tensor([[1 - 2j, 3 + 4j], [0 + 1j, -5 - 6j]])
        state = {
            "plain": values,
            "conj": values.conj(),
            "double": values.to(torch.complex128).conj(),
            "turned": values.conj().t(),
            "negative": values.clone().conj().imag,
            "both": torch._neg_view(values.conj()),
        }
        found = check(write(state), files)
        assert (found["conj"].conj, found["conj"].neg) == (True, False)
        assert (found["negative"].conj, found["negative"].neg) == (False, True)
        assert (found["both"].conj, found["both"].neg) == (True, True)

    def test_scalars_have_them_too(self, write: Callable[[Any], Path], files: Files) -> None:
        check(write({"conj": torch.tensor(1 - 2j).conj(), "negative": torch.tensor(1 - 2j).conj().imag}), files)

    def test_a_flag_that_is_not_a_bool_is_not_ignored(self, tmp_path: Path, files: Files) -> None:
        pid = storage("ComplexFloatStorage", "0", 1)
        path = archive(tmp_path, tensor_pickle(pid, (1,), (1,), more=(False, None, {"conj": 1})), {"0": struct.pack("<2f", 1, 2)})
        with contextlib.suppress(CkptError):
            assert only(path, files).conj


class Tagged(torch.Tensor):
    """A subclass that keeps plain data."""


def with_attribute(value: float) -> torch.Tensor:
    tensor = torch.full((4,), float(value))
    tensor.note = "left by a trainer"  # type: ignore[attr-defined]
    return tensor


class TestWrappers:
    def test_parameters_buffers_and_tensors_with_attributes_are_unwrapped(self, write: Callable[[Any], Path], files: Files) -> None:
        noted = torch.nn.Parameter(torch.ones(3))
        noted.note = 1  # type: ignore[attr-defined]
        state = {
            "parameter": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)),
            "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
            "noted parameter": noted,
            "buffer": torch.nn.Buffer(torch.arange(3.0)),
            "noted tensor": with_attribute(5),
        }
        assert len(check(write(state), files)) == len(state)

    def test_each_of_many_tensors_with_attributes_keeps_its_own_values(self, write: Callable[[Any], Path], files: Files) -> None:
        check(write({f"tensor {i}": with_attribute(i) for i in range(50)}), files)

    def test_also_when_a_reader_unwraps_them_itself(self, tmp_path: Path, files: Files) -> None:
        # `unwrap` makes nodes that nobody else holds; whatever is remembered about them must not outlive them.
        path = save(tmp_path / "a.pt", {f"tensor {i}": with_attribute(i) for i in range(50)})
        file = TorchFile(files.source(path))
        reader = LocalReader(file, 0)
        for i, node in enumerate(file.root.values()):
            stored = reader.read(node)
            assert isinstance(stored, StoredTensor)
            assert stored_bytes(stored) == struct.pack("<4f", i, i, i, i)

    def test_a_module_state_dict_with_its_metadata(self, write: Callable[[Any], Path], files: Files) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.LayerNorm(4))
        assert list(check(write(model.state_dict()), files)) == list(model.state_dict())

    def test_a_tensor_that_is_asked_for_twice_is_the_same_object(self, tmp_path: Path, files: Files) -> None:
        file = TorchFile(files.source(save(tmp_path / "a.pt", [torch.ones(2)])))
        assert file.tensor(file.root[0]) is file.tensor(file.root[0])

    def test_an_unknown_subclass_is_read_or_refused_but_never_taken_for_something_else(self, tmp_path: Path, files: Files) -> None:
        path = save(tmp_path / "a.pt", torch.arange(3.0).as_subclass(Tagged))
        file = TorchFile(files.source(path))
        try:
            stored = file.tensor(file.root)
        except Unsupported:
            return
        assert stored is not None
        assert stored_bytes(stored) == torch_bytes(torch.arange(3.0))

    def test_other_objects_are_no_tensors(self, write: Callable[[Any], Path], files: Files) -> None:
        state = {
            "step": 3,
            "names": ["a"],
            "size": torch.Size([2]),
            "dtype": torch.float32,
            "device": torch.device("cpu"),
            "path": Path("x"),
        }
        assert tensors_of(TorchFile(files.source(write(state)))) == {}


class TestTensorsWithoutPlainBytes:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.eye(3).to_sparse(),
            lambda: torch.eye(3).to_sparse_csr(),
            lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8),
            lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
            lambda: torch.empty(3, device="meta"),
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        ],
        ids=["sparse", "sparse csr", "quantised", "quantised per channel", "meta", "nested"],
    )
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_are_refused_by_name(self, make: Callable[[], torch.Tensor], tmp_path: Path, files: Files) -> None:
        file = TorchFile(files.source(save(tmp_path / "a.pt", {"odd": make()})))
        with pytest.raises(Unsupported, match=r"sparse|qtensor|meta|nested"):
            file.tensor(file.root["odd"])


class TestProtocols:
    @pytest.mark.parametrize("protocol", range(1, 6))
    @pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
    def test_of_pickle_are_read_in_both_containers(self, protocol: int, zipped: bool, tmp_path: Path, files: Files) -> None:
        base = torch.arange(20.0)
        state = {"a": base, "b": base[5:9], "c": base.reshape(4, 5).t(), "d": torch.ones(3).half(), "e": torch.nn.Parameter(torch.ones(2))}
        torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
        check(tmp_path / "a.pt", files)

    @pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
    def test_0_loses_the_storages(self, zipped: bool, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped, pickle_protocol=0)
        with pytest.raises(AssertionError):
            torch.load(tmp_path / "a.pt", weights_only=False)
        with pytest.raises(Unsupported, match="protocol 0"):
            ckpt_cli.merge(tmp_path / "a.pt", tmp_path / "out")

    @pytest.mark.parametrize("start", [b"L119547037146038801333357L\n.", b"\x80\x04\x8a\x01\x05.", b"L1\n", b"\x80\x04N."])
    def test_that_begin_with_another_value_are_of_something_else(self, start: bytes, tmp_path: Path, files: Files) -> None:
        with pytest.raises(CorruptFile, match=r"not a file of torch.save"):
            TorchFile(written(tmp_path / "a.pt", start + bytes(100), files))


class TestLegacyFiles:
    def legacy(self, path: Path, state: Any) -> bytes:
        torch.save(state, path, _use_new_zipfile_serialization=False)
        return path.read_bytes()

    def test_shared_storages_and_views(self, tmp_path: Path, files: Files) -> None:
        base = torch.arange(20.0)
        self.legacy(tmp_path / "a.pt", {"a": base, "b": base[5:9], "c": base.reshape(4, 5).t(), "d": torch.ones(3).half()})
        check(tmp_path / "a.pt", files)

    def test_a_pickle_larger_than_the_first_window(self, tmp_path: Path, files: Files) -> None:
        self.legacy(tmp_path / "a.pt", {**{f"layer.{i}": torch.full((2,), float(i)) for i in range(60)}, "text": "x" * 3_000_000})
        check(tmp_path / "a.pt", files)

    def test_cut_off_at_every_byte(self, tmp_path: Path, files: Files) -> None:
        data = self.legacy(tmp_path / "a.pt", {"a": torch.arange(4.0), "b": torch.ones(2).half()})
        for length in range(len(data)):
            with pytest.raises(CorruptFile):
                TorchFile(written(tmp_path / f"cut-{length}.pt", data[:length], files))

    def test_bytes_behind_the_last_storage(self, tmp_path: Path, files: Files) -> None:
        data = self.legacy(tmp_path / "a.pt", {"a": torch.arange(4.0)})
        with pytest.raises(CorruptFile, match="1 bytes follow the last storage"):
            TorchFile(written(tmp_path / "b.pt", data + b"x", files))

    @pytest.mark.parametrize("count", [-1, 3, 5, 1 << 40, (1 << 63) - 1])
    def test_a_storage_with_another_count_of_elements(self, count: int, tmp_path: Path, files: Files) -> None:
        data = self.legacy(tmp_path / "a.pt", {"a": torch.arange(4.0)})
        changed = data[:-24] + struct.pack("<q", count) + data[-16:]
        with pytest.raises(CorruptFile, match=r"ends inside storage|follow the last storage"):
            TorchFile(written(tmp_path / "b.pt", changed, files))

    def test_a_file_of_a_big_endian_machine_is_refused(self, tmp_path: Path, files: Files) -> None:
        data = self.legacy(tmp_path / "a.pt", {"a": torch.arange(4.0)})
        at = data.index(b"little_endian") + len("little_endian")
        at = data.index(b"\x88", at)
        with pytest.raises(Unsupported, match="big-endian"):
            TorchFile(written(tmp_path / "b.pt", data[:at] + b"\x89" + data[at + 1 :], files))

    def test_thousands_of_mutants_raise_nothing_but_errors_of_ours(self, tmp_path: Path) -> None:
        data = self.legacy(tmp_path / "a.pt", {"a": torch.arange(4.0), "b": torch.nn.Parameter(torch.ones(2).half())})
        fuzz(lambda source: mutated(data, source), 2_000, tmp_path)


# -- files written by hand -------------------------------------------------------------------------------------------


def encode(value: object) -> bytes:
    """A pickle (without PROTO and STOP) of plain values and of the nodes of the inert reader."""
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return b"L%dL\n" % value
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(raw)) + raw
    if isinstance(value, bytes):
        return b"B" + struct.pack("<I", len(value)) + value
    if isinstance(value, (tuple, list)):
        return b"(" + b"".join(map(encode, value)) + (b"t" if isinstance(value, tuple) else b"l")
    if isinstance(value, dict):
        return b"(" + b"".join(encode(key) + encode(item) for key, item in value.items()) + b"d"
    if isinstance(value, Global):
        return b"c" + f"{value.module}\n{value.name}\n".encode()
    if isinstance(value, Persistent):
        return encode(value.pid) + b"Q"
    if isinstance(value, Raw):
        return value.data
    assert isinstance(value, Call)
    return encode(value.target) + encode(value.args) + b"R" + (encode(value.state) + b"b" if value.state is not None else b"")


class Raw:
    """Opcodes that are put into the pickle as they are."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def storage(kind: str, key: object, numel: object, location: object = "cpu", module: str = "torch") -> Persistent:
    return Persistent(("storage", Global(module, kind), key, location, numel))


def rebuild(pid: object, size: object, stride: object, offset: object = 0, more: tuple[object, ...] = (False, None)) -> Call:
    return Call(Global("torch._utils", "_rebuild_tensor_v2"), (pid, offset, size, stride, *more))


def tensor_pickle(pid: object, size: object, stride: object, offset: object = 0, more: tuple[object, ...] = (False, None)) -> bytes:
    return b"\x80\x02" + encode(rebuild(pid, size, stride, offset, more)) + b"."


def archive(folder: Path, data: bytes | None, storages: dict[str, bytes] | None = None, **others: bytes) -> Path:
    """An archive as torch.save writes it; ``others`` are more members."""
    path = folder / "hand.pt"
    with zipfile.ZipFile(path, "w") as made:
        if data is not None:
            made.writestr("archive/data.pkl", data)
        for key, content in (storages or {}).items():
            made.writestr(f"archive/data/{key}", content)
        for name, content in others.items():
            made.writestr(f"archive/{name}", content)
    return path


def written(path: Path, data: bytes, files: Files) -> Any:
    path.write_bytes(data)
    return files.source(path)


def only(path: Path, files: Files) -> StoredTensor:
    """The tensor that is the root of a file."""
    file = TorchFile(files.source(path))
    stored = file.tensor(file.root)
    assert stored is not None
    return stored


FOUR = {"0": struct.pack("<4f", 1, 2, 3, 4)}
FLOATS = storage("FloatStorage", "0", 4)


class TestTheHandWrittenFilesOfTheseTests:
    def test_are_read_by_torch_and_here_alike(self, tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, tensor_pickle(FLOATS, (2, 2), (1, 2), more=(False, Call(Global("collections", "OrderedDict"), ()))), FOUR)
        # torch wants a version; here it may be absent.
        complete = archive(
            tmp_path / "..",
            tensor_pickle(FLOATS, (2, 2), (1, 2), more=(False, Call(Global("collections", "OrderedDict"), ()))),
            FOUR,
            version=b"3\n",
        )
        assert torch_bytes(torch.load(complete, weights_only=False)) == stored_bytes(only(path, files)) == struct.pack("<4f", 1, 3, 2, 4)


class TestTensorsThatContradictTheFile:
    @pytest.mark.parametrize("numel", [5, 3, 0, 1 << 40, 1 << 62, 1 << 63, -1, -4, 4.0, "4", True, None, (4,)])
    def test_by_the_number_of_elements_of_the_storage(self, numel: object, tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, tensor_pickle(storage("FloatStorage", "0", numel), (1,), (1,)), FOUR)
        with pytest.raises(CorruptFile) as caught:
            only(path, files)
        assert caught.value.path == str(path)

    @pytest.mark.parametrize(
        ("size", "stride", "offset"),
        [
            ((5,), (1,), 0),
            ((100,), (1,), 0),
            ((4,), (1,), 1),
            ((1,), (1,), 4),
            ((), (), 4),
            ((2, 2), (3, 2), 0),
            ((2,), (4,), 0),
            ((2,), (1 << 61,), 0),
            ((1 << 33, 1 << 33), (1, 1), 0),
            ((1 << 61,), (8,), 0),
            ((1,), (1,), 1 << 61),
        ],
    )
    def test_by_reaching_beyond_the_storage(self, size: object, stride: object, offset: int, tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, tensor_pickle(FLOATS, size, stride, offset), FOUR)
        with pytest.raises(CorruptFile, match="reaches beyond its storage of 16 bytes"):
            only(path, files)

    @pytest.mark.parametrize(
        ("size", "stride", "offset"),
        [
            ((-1,), (1,), 0),
            ((2,), (-1,), 1),
            ((2,), (1,), -1),
            ((2.0,), (1,), 0),
            ((True,), (1,), 0),
            (("2",), (1,), 0),
            ((None,), (1,), 0),
            ((2,), (1,), "0"),
            ((2,), (1,), None),
            ((1 << 62,), (0,), 0),
            ((1 << 200,), (0,), 0),
            (2, (1,), 0),
            ("22", (1,), 0),
            ({2: 1}, (1,), 0),
            (None, (1,), 0),
            ((2,), None, 0),
            (Call(Global("torch", "Size"), ()), (), 0),
            (Call(Global("os", "system"), ((2,),)), (1,), 0),
        ],
    )
    def test_by_sizes_strides_or_offsets_that_are_no_natural_numbers(
        self, size: object, stride: object, offset: object, tmp_path: Path, files: Files
    ) -> None:
        path = archive(tmp_path, tensor_pickle(FLOATS, size, stride, offset), FOUR)
        with pytest.raises(CorruptFile, match=r"natural number|not a tuple"):
            only(path, files)

    @pytest.mark.parametrize(("size", "stride"), [((2, 2), (1,)), ((), (1,)), ((1,) * 65, (1,) * 65), ((1,) * 1_000, (1,) * 1_000)])
    def test_by_their_number_of_dimensions(self, size: object, stride: object, tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, tensor_pickle(FLOATS, size, stride), FOUR)
        with pytest.raises(CorruptFile, match="sizes and"):
            only(path, files)

    def test_an_expand_bomb_is_refused_from_arithmetic(self, tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, tensor_pickle(FLOATS, (10**9, 10**9), (0, 0)), FOUR)
        with pytest.raises(Unsupported, match="repeats 16 stored bytes"):
            only(path, files)

    @pytest.mark.parametrize("content", [b"", b"x" * 15, b"x" * 17, b"x" * 4_000])
    def test_a_record_of_another_size_than_its_storage(self, content: bytes, tmp_path: Path, files: Files) -> None:
        # torch.load(mmap=True) reads the bytes that happen to stand behind a record that is too short.
        path = archive(tmp_path, tensor_pickle(FLOATS, (1,), (1,)), {"0": content})
        with pytest.raises(CorruptFile, match=f"storage 0 has {len(content)} bytes") as caught:
            only(path, files)
        assert caught.value.expected == "16 bytes, as its tensors say"

    @pytest.mark.parametrize("key", ["77", "", "../data.pkl", "0/", "data/0", "/0", "0\0", "x" * 1_000_000, "\ud800"])
    def test_a_storage_that_is_not_there(self, key: str, tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, tensor_pickle(storage("FloatStorage", key, 4), (1,), (1,)), FOUR)
        with pytest.raises(CorruptFile, match="is not in the file") as caught:
            only(path, files)
        assert len(caught.value.message) < 200

    @pytest.mark.parametrize("key", [0, None, b"0", (), 0.0, ["0"], Persistent("0")])
    def test_a_storage_key_that_is_no_string(self, key: object, tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, tensor_pickle(storage("FloatStorage", key, 4), (1,), (1,)), FOUR)
        with pytest.raises(CorruptFile, match="key is not a string"):
            only(path, files)

    @pytest.mark.parametrize(
        "pid",
        [
            Persistent("0"),
            Persistent(()),
            Persistent(("storage",)),
            Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu")),
            Persistent(("module", Global("torch", "FloatStorage"), "0", "cpu", 4)),
            Persistent(("storage", "FloatStorage", "0", "cpu", 4)),
            Persistent(["storage", Global("torch", "FloatStorage"), "0", "cpu", 4]),
            Persistent({"storage": 1}),
            Persistent(None),
            None,
            ("storage", Global("torch", "FloatStorage"), "0", "cpu", 4),
            pytest.param(Call(Global("torch", "FloatStorage"), (4,)), id="call"),
        ],
        ids=str,
    )
    def test_a_persistent_id_that_is_no_storage(self, pid: object, tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, tensor_pickle(pid, (1,), (1,)), FOUR)
        with pytest.raises(CorruptFile):
            only(path, files)

    @pytest.mark.parametrize(
        ("module", "kind"),
        [("torch", "FooStorage"), ("torch", "float32"), ("os", "system"), ("evil", "FloatStorage"), ("torch.storage", "FloatStorage")],
    )
    def test_a_storage_type_that_is_not_known(self, module: str, kind: str, tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, tensor_pickle(storage(kind, "0", 4, module=module), (1,), (1,)), FOUR)
        with pytest.raises(Unsupported, match=f"{module}.{kind}"):
            only(path, files)

    def test_a_storage_type_with_a_name_of_a_megabyte_gives_a_short_message(self, tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, tensor_pickle(storage("F" * 1_000_000, "0", 4), (1,), (1,)), FOUR)
        with pytest.raises(CkptError) as caught:
            only(path, files)
        assert len(caught.value.message) < 1_000

    @pytest.mark.parametrize("kind", ["DoubleStorage", "HalfStorage", "ByteStorage"])
    def test_one_storage_with_two_dtypes(self, kind: str, tmp_path: Path, files: Files) -> None:
        path = archive(
            tmp_path, b"\x80\x02" + encode([rebuild(FLOATS, (1,), (1,)), rebuild(storage(kind, "0", 4), (1,), (1,))]) + b".", FOUR
        )
        file = TorchFile(files.source(path))
        assert file.tensor(file.root[0]) is not None
        with pytest.raises(CorruptFile, match="storage 0 has 16 bytes"):
            file.tensor(file.root[1])

    def test_storages_of_other_devices_are_read_like_any(self, tmp_path: Path, files: Files) -> None:
        for location in ("cuda:99", "npu:0", "x" * 100_000, b"cpu", None):
            path = archive(tmp_path, tensor_pickle(storage("FloatStorage", "0", 4, location), (4,), (1,)), FOUR)
            with Files() as fresh:
                assert stored_bytes(only(path, fresh)) == FOUR["0"]
        path = archive(tmp_path, tensor_pickle(storage("FloatStorage", "0", 4, module="torch.cuda"), (4,), (1,)), FOUR)
        assert stored_bytes(only(path, files)) == FOUR["0"]

    def test_a_view_of_a_storage_of_torch_0_3_is_refused(self, tmp_path: Path, files: Files) -> None:
        pid = Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu", 4, ("1", 0, 2)))
        with pytest.raises(Unsupported, match="view of another storage"):
            only(archive(tmp_path, tensor_pickle(pid, (1,), (1,)), FOUR), files)

    def test_an_untyped_storage_counts_bytes(self, tmp_path: Path, files: Files) -> None:
        def wide(numel: int, dtype: object) -> bytes:
            pid = storage("UntypedStorage", "0", numel, module="torch.storage")
            return b"\x80\x02" + encode(Call(Global("torch._utils", "_rebuild_tensor_v3"), (pid, 0, (8,), (1,), False, None, dtype))) + b"."

        assert stored_bytes(only(archive(tmp_path, wide(16, Global("torch", "uint16")), FOUR), files)) == FOUR["0"]
        for numel, dtype, match in (
            (8, Global("torch", "uint16"), "has 16 bytes"),
            (16, Global("torch", "float32"), "beyond its storage"),
            (16, Global("torch", "float3"), "float3 is not known"),
            (16, Global("os", "uint16"), "no dtype"),
            (16, "uint16", "no dtype"),
        ):
            with Files() as fresh, pytest.raises(CkptError, match=match):
                only(archive(tmp_path, wide(numel, dtype), FOUR), fresh)

    def test_an_untyped_storage_without_a_dtype(self, tmp_path: Path, files: Files) -> None:
        pid = storage("UntypedStorage", "0", 16, module="torch.storage")
        with pytest.raises(CorruptFile, match="without a dtype"):
            only(archive(tmp_path, tensor_pickle(pid, (1,), (1,)), FOUR), files)

    @pytest.mark.parametrize("args", [(), (FLOATS,), (FLOATS, 0), (FLOATS, 0, (4,)), (0, 0, (4,), (1,))])
    def test_too_few_or_other_arguments(self, args: tuple[object, ...], tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, b"\x80\x02" + encode(Call(Global("torch._utils", "_rebuild_tensor_v2"), args)) + b".", FOUR)
        with pytest.raises(CorruptFile, match="has no storage"):
            only(path, files)


class TestWrappersThatAreTraps:
    LAUGHS = Raw(b"]" + b"".join(b"q" + bytes([i]) + b"0](" + (b"h" + bytes([i])) * 2 + b"e" for i in range(25)))
    DEEP = Raw(b"]" * 100_000 + b"a" * 99_999)

    @pytest.mark.parametrize("trap", [LAUGHS, DEEP], ids=["laughs that multiply", "a deep list"])
    @pytest.mark.parametrize(
        "function",
        [
            "torch._tensor._rebuild_from_type_v2",
            "torch._utils._rebuild_parameter",
            "torch._utils._rebuild_tensor_v2",
            "torch._utils._rebuild_tensor_v3",
        ],
    )
    def test_no_argument_is_walked_or_printed(self, function: str, trap: Raw, tmp_path: Path) -> None:
        module, name = function.rsplit(".", 1)
        honest: list[object] = [FLOATS, 0, (4,), (1,), False, None, Global("torch", "float32")]
        if name == "_rebuild_from_type_v2":
            honest = [Global("torch._utils", "_rebuild_tensor_v2"), Global("torch", "Tensor"), (FLOATS, 0, (4,), (1,), False, None), {}]
        elif name == "_rebuild_parameter":
            honest = [rebuild(FLOATS, (4,), (1,)), True, None]
        for place in range(len(honest)):
            args: list[object] = [trap if i == place else argument for i, argument in enumerate(honest)]
            path = archive(tmp_path, b"\x80\x02" + encode(Call(Global(module, name), tuple(args))) + b".", FOUR)
            start = time.process_time()
            with Files() as files:
                file = TorchFile(files.source(path))
                message = ""
                try:
                    file.tensor(file.root)
                except CkptError as error:
                    message = error.message
                assert len(message) < 1_000
            assert time.process_time() - start < 2

    def test_parameters_of_parameters_of_parameters(self, tmp_path: Path, files: Files) -> None:
        node: Call = rebuild(FLOATS, (4,), (1,))
        for _ in range(300):
            node = Call(Global("torch._utils", "_rebuild_parameter"), (node, True, None))
        file = TorchFile(files.source(archive(tmp_path, b"\x80\x02" + encode(node) + b".", FOUR)))
        assert file.tensor(file.root) is None


class TestByteOrder:
    @pytest.mark.parametrize("dtype", [d for d in WEIGHT_DTYPES if not str(d).startswith("torch.float8")], ids=str)
    def test_big_endian_files_are_read_in_the_order_of_this_machine(self, dtype: torch.dtype, tmp_path: Path, files: Files) -> None:
        values = filled(dtype, 12)
        path = save(tmp_path / "little.pt", {"box": values.view(3, 4), "turned": values.view(3, 4).t(), "one": values[5].clone()})
        expected = {name: torch_bytes(tensor) for name, tensor in torch.load(path).items()}
        swapped = tmp_path / "big.pt"
        width = values.element_size() // (2 if dtype.is_complex else 1)
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(swapped, "w") as new:
            for name in old.namelist():
                content = old.read(name)
                if "/data/" in name:
                    content = b"".join(content[i : i + width][::-1] for i in range(0, len(content), width))
                new.writestr(name, b"big" if name.endswith("byteorder") else content)
        found = tensors_of(TorchFile(files.source(swapped)))
        assert {name: stored_bytes(stored) for name, stored in found.items()} == expected

    @pytest.mark.parametrize("order", [b"middle", b"", b"BIG", b"little\n", b"x" * 10_000_000])
    def test_an_unknown_byte_order_is_refused(self, order: bytes, tmp_path: Path, files: Files) -> None:
        with pytest.raises(CorruptFile, match=r"byte order|byteorder"):
            TorchFile(files.source(archive(tmp_path, b"N.", byteorder=order)))


class TestContainers:
    def test_version_and_alignment_members_of_any_size_are_not_read(self, tmp_path: Path, files: Files) -> None:
        path = archive(
            tmp_path,
            tensor_pickle(FLOATS, (4,), (1,)),
            FOUR,
            version=b"9" * 10_000_000,
            **{".format_version": b"x", ".storage_alignment": b"\xff"},
        )
        assert stored_bytes(only(path, files)) == FOUR["0"]

    def test_no_data_pkl(self, tmp_path: Path, files: Files) -> None:
        with pytest.raises(CorruptFile, match=r"no data.pkl"):
            TorchFile(files.source(archive(tmp_path, None, FOUR)))

    @pytest.mark.parametrize("name", ["y/data.pkl", "../../evil", "/absolute", "data.pkl"])
    def test_members_outside_of_the_one_top_folder(self, name: str, tmp_path: Path, files: Files) -> None:
        path = archive(tmp_path, b"N.")
        with zipfile.ZipFile(path, "a") as made:
            made.writestr(name, b"N.")
        with pytest.raises(CorruptFile, match="single top folder"):
            TorchFile(files.source(path))

    def test_a_torchscript_archive(self, tmp_path: Path, files: Files) -> None:
        module = torch.jit.script(torch.nn.Linear(2, 2))
        torch.jit.save(module, tmp_path / "script.pt")
        with pytest.raises(Unsupported, match="TorchScript archive"):
            TorchFile(files.source(tmp_path / "script.pt"))

    def test_bytes_behind_the_pickle(self, tmp_path: Path, files: Files) -> None:
        with pytest.raises(CorruptFile, match="bytes follow the pickle"):
            TorchFile(files.source(archive(tmp_path, b"N.N.")))

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            (b"", "the file is empty"),
            (b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
            (b"<?xml version='1.0'?><Error>AccessDenied</Error>", "XML"),
            (b"\x1f\x8b\x08" + bytes(100), "gzip"),
            (b"7z\xbc\xaf\x27\x1c" + bytes(100), "7z"),
            (pickle.dumps({"a": 1}), "not a file of torch.save"),
            (struct.pack("<Q", 2) + b"{}", "not a file of torch.save"),
            (b"GGUF" + bytes(100), "not a file of torch.save"),
            (b"\x80", "not a file of torch.save"),
            (bytes(4096), "not a file of torch.save"),
        ],
        ids=["empty", "html", "xml", "gzip", "7z", "pickle", "safetensors", "gguf", "one byte", "zeros"],
    )
    def test_other_things_with_the_name_of_a_checkpoint(self, content: bytes, match: str, tmp_path: Path, files: Files) -> None:
        with pytest.raises(CorruptFile, match=match) as caught:
            TorchFile(written(tmp_path / "a.pt", content, files))
        assert caught.value.path == str(tmp_path / "a.pt")

    def test_a_tar_of_torch_0_1(self, tmp_path: Path, files: Files) -> None:
        with tarfile.open(tmp_path / "a.pt", "w") as tar:
            for name in ("storages", "tensors", "pickle"):
                tar.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
        with pytest.raises(CorruptFile, match=r"not a file of torch.save"):
            TorchFile(files.source(tmp_path / "a.pt"))

    def test_zeros_are_named_as_what_an_interrupted_copy_leaves(self, tmp_path: Path, files: Files) -> None:
        with pytest.raises(CorruptFile) as caught:
            TorchFile(written(tmp_path / "a.pt", bytes(4096), files))
        assert caught.value.hint == "it begins with zeros: the copy may have been interrupted"

    def test_pickle_protocols_that_torch_can_be_told_to_use(self, tmp_path: Path, files: Files) -> None:
        for protocol in range(2, 6):
            path = tmp_path / f"{protocol}.pt"
            torch.save(OrderedDict(a=torch.arange(3.0), b=torch.nn.Parameter(torch.ones(2))), path, pickle_protocol=protocol)
            check(path, files)


class TestFingerprints:
    def test_are_equal_for_equal_storages_only(self, tmp_path: Path, files: Files) -> None:
        def fingerprint(name: str, tensor: torch.Tensor) -> object:
            return TorchFile(files.source(save(tmp_path / name, {"a": tensor}))).fingerprint

        assert (
            fingerprint("first.pt", torch.ones(3)) == fingerprint("other.pt", torch.ones(3)) != fingerprint("third.pt", torch.zeros(3) + 2)
        )

    def test_are_absent_without_checksums(self, tmp_path: Path, files: Files) -> None:
        torch.save({"a": torch.ones(3)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
        assert TorchFile(files.source(tmp_path / "legacy.pt")).fingerprint is None
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            save(tmp_path / "plain.pt", {"a": torch.ones(3)})
        finally:
            torch.serialization.set_crc32_options(before)
        assert TorchFile(files.source(tmp_path / "plain.pt")).fingerprint is None


class TestSmallIntegerTensors:
    """Device meshes are stored like that."""

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16], ids=str)
    def test_have_the_values_that_torch_shows(self, dtype: torch.dtype, tmp_path: Path, files: Files) -> None:
        grid = torch.arange(24).to(dtype).reshape(4, 6)
        path = save(tmp_path / "a.pt", {"grid": grid, "turned": grid.t(), "part": grid[1:3], "one": grid[2, 3], "none": grid[:0]})
        judge = torch.load(path)
        for name, stored in tensors_of(TorchFile(files.source(path))).items():
            assert stored.read_ints() == judge[name].reshape(-1).tolist()

    def test_unsigned_values_stay_positive(self, tmp_path: Path, files: Files) -> None:
        assert only(save(tmp_path / "a.pt", torch.tensor([200], dtype=torch.uint8)), files).read_ints() == [200]

    def test_other_dtypes_and_large_ones_are_refused(self, tmp_path: Path, files: Files) -> None:
        for name, tensor in (("float.pt", torch.ones(2)), ("large.pt", torch.zeros((1 << 20) + 1, dtype=torch.int8))):
            with pytest.raises(CorruptFile, match="a mesh is a"):
                only(save(tmp_path / name, tensor), files).read_ints()

    def test_only_the_elements_themselves_are_read(self, tmp_path: Path, files: Files) -> None:
        stored = only(save(tmp_path / "a.pt", torch.zeros(1_000_000, dtype=torch.int64)[5:9]), files)
        seen: list[int] = []
        source = stored.storage.source

        class Watched:
            path, size, identity = source.path, source.size, source.identity

            def read(self, offset: int, length: int) -> bytes:
                seen.append(length)
                return source.read(offset, length)

            def read_at(self, offset: int, buffer: memoryview) -> None:
                seen.append(len(buffer))
                source.read_at(offset, buffer)

        object.__setattr__(stored.storage, "source", Watched())
        assert stored.read_ints() == [0, 0, 0, 0]
        assert sum(seen) < 1_000

    def test_in_an_untyped_storage_of_an_odd_size(self, tmp_path: Path, files: Files) -> None:
        pid = storage("UntypedStorage", "0", 17, module="torch.storage")
        call = Call(Global("torch._utils", "_rebuild_tensor_v3"), (pid, 0, (2,), (1,), False, None, Global("torch", "int64")))
        stored = only(archive(tmp_path, b"\x80\x02" + encode(call) + b".", {"0": struct.pack("<2q", 5, 6) + b"x"}), files)
        with contextlib.suppress(CkptError):
            assert stored.read_ints() == [5, 6]


# -- damage ----------------------------------------------------------------------------------------------------------


def mutated(data: bytes, source: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 4))):
        place = source.randrange(len(changed))
        action = source.randrange(4)
        if action == 0:
            changed[place] = source.randrange(256)
        elif action == 1:
            changed[place] = source.choice(b"(.0122NtRbQqhXKMJsu}])\x85\x86\x87\x88\x89\x8a")
        elif action == 2:
            del changed[place : place + source.randrange(1, 5)]
        else:
            changed[place:place] = changed[source.randrange(len(changed)) :][: source.randrange(1, 12)]
    return bytes(changed)


def walk(file: TorchFile) -> None:
    """Ask for every node below the root whether it is a tensor, and read the tensors."""
    pending, seen = [file.root], set()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        stored = file.tensor(node)
        if stored is not None and stored.numel < 1 << 16:
            stored_bytes(stored)
            if stored.dtype.kind == "int":
                stored.read_ints()
        if isinstance(node, dict):
            pending += node.values()
        elif isinstance(node, (list, tuple)):
            pending += node
        elif isinstance(node, Call):
            pending += [*node.args, node.state, *(node.items or ()), *(node.pairs or {}).values()]


def fuzz(make: Callable[[random.Random], bytes], count: int, folder: Path) -> None:
    source = random.Random(11)
    outcomes: Counter[bool] = Counter()
    path = folder / "mutant.pt"
    for _ in range(count):
        path.write_bytes(make(source))
        with Files() as files:
            try:
                walk(TorchFile(files.source(path)))
                outcomes[True] += 1
            except CkptError:
                outcomes[False] += 1
    assert min(outcomes[True], outcomes[False]) > count // 50


class TestDamagedFiles:
    def test_thousands_of_mutants_of_the_pickle_raise_nothing_but_errors_of_ours(self, tmp_path: Path) -> None:
        grid = torch.arange(6, dtype=torch.int64).reshape(2, 3)
        state = {
            "a": torch.nn.Parameter(torch.ones(2, 2)),
            "b": grid.t(),
            "c": with_attribute(1),
            "d": torch.ones(3).to(torch.float8_e5m2),
            "step": 3,
        }
        with zipfile.ZipFile(save(tmp_path / "a.pt", state)) as original:
            members = {name: original.read(name) for name in original.namelist()}

        def make(source: random.Random) -> bytes:
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as made:
                for name, content in members.items():
                    made.writestr(name, mutated(content, source) if name.endswith("data.pkl") else content)
            return buffer.getvalue()

        fuzz(make, 2_500, tmp_path)

    def test_cut_off_at_every_byte(self, tmp_path: Path, files: Files) -> None:
        data = save(tmp_path / "a.pt", {"a": torch.arange(4.0)}).read_bytes()
        for length in range(len(data)):
            (tmp_path / "cut.pt").write_bytes(data[:length])
            with Files() as fresh, pytest.raises(CorruptFile):
                TorchFile(fresh.source(tmp_path / "cut.pt"))

    def test_the_hand_written_pickles_are_well_formed(self) -> None:
        value = {"a": [1, -1, 2**70, 1.5, None, True, "x", b"y", (1, 2)]}
        assert load_pickle(b"\x80\x02" + encode(value) + b".")[0] == value
        assert math.isnan(load_pickle(encode(float("nan")) + b".")[0])
