"""From pickle nodes to plain values: what a training state holds besides weights, without running anything.

Dicts, lists, tuples, numbers, text, bytes and tensors stay what they are; numpy arrays become tensors, numpy scalars numbers,
OrderedDict and Counter dicts, sets and deques lists, paths and devices text. Whatever else a pickle wanted to build is
`Unrepresented`: it is named, and left where it is.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ckpt_cli.boxes import Shape, contiguous_strides, whole
from ckpt_cli.dtypes import BY_CODE, BY_TORCH, Dtype
from ckpt_cli.errors import CkptError, CorruptFile, Unsupported
from ckpt_cli.files.pickle_nodes import Call, Global, as_dict, describe
from ckpt_cli.files.torch_file import StoredTensor, TorchFile
from ckpt_cli.tensors.reading import element_bytes
from ckpt_cli.tensors.records import Records
from ckpt_cli.tensors.tensor import Piece, Tensor

MAX_DEPTH = 100
MAX_BYTES = 256 << 20
"""The limit for all tensors of a file together: larger files are not training state."""

MAX_NODES = 2_000_000
"""A pickle of a few bytes can refer to itself so often that it unfolds to any size."""

MAX_LETTERS, UNFOLDING = 1 << 20, 16
"""Text that a file may unfold to: a text can be referred to as often as the file has bytes."""

MAX_IN_JSON = 1 << 16
"""Elements of a tensor that are written out in JSON."""

NUMPY_CODES = {
    "f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8",
    "u8": "U64", "u4": "U32", "u2": "U16", "u1": "U8", "b1": "BOOL",
}  # fmt: skip
NUMPY_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
BUILTINS = ("builtins", "__builtin__")
PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A small tensor by value: little-endian bytes in C order."""

    dtype: Dtype
    shape: Shape
    data: bytes

    def numbers(self) -> list[Any]:
        """The elements as Python numbers, in C order; raises Unsupported for dtypes that have none."""
        return list(_unpacked(self.dtype, self.data))


@dataclass(frozen=True, slots=True)
class TorchName:
    """A dtype of torch, by its name, such as "bfloat16"."""

    name: str


@dataclass(frozen=True, slots=True)
class Unrepresented:
    """Something that only its own class could interpret; ``what`` says what the pickle would have built."""

    what: str


class ValueReader:
    """Makes values of the nodes of one file. ``tensors`` says what stands for a tensor; without it, that is a `TensorValue`."""

    def __init__(self, file: TorchFile, tensors: Callable[[object], object | None] | None = None) -> None:
        self._file = file
        self._tensors = tensors
        self._left = MAX_BYTES
        self._nodes = 0
        self._letters = 0
        self._most_letters = MAX_LETTERS + UNFOLDING * file.size

    def read(self, node: Any) -> Any:
        """The value of a node. Raises CorruptFile for tensors that contradict the file, and for endless nesting."""
        return self._value(node, 0)

    def _value(self, node: Any, depth: int) -> Any:
        self._nodes += 1
        if depth > MAX_DEPTH:
            raise CorruptFile("values are nested too deeply")
        if self._nodes > MAX_NODES:
            raise CorruptFile(f"the values unfold to more than {MAX_NODES} parts")
        if isinstance(node, str):
            self._letters += len(node)
            if self._letters > self._most_letters:
                raise CorruptFile("the values unfold to far more text than the file holds")
            return node.encode("utf-8", "backslashreplace").decode()
        if node is None or isinstance(node, (bool, int, float, complex, bytes)):
            return node
        if isinstance(node, bytearray):
            return bytes(node)
        if isinstance(node, (list, tuple)):
            return type(node)(self._value(item, depth + 1) for item in node)
        pairs = as_dict(node)
        if pairs is not None:
            return {self._hashable(key, depth): self._value(value, depth + 1) for key, value in pairs.items()}
        if isinstance(node, Global):
            known = node.module == "torch" and node.name in BY_TORCH
            return TorchName(BY_TORCH[node.name].torch) if known else Unrepresented(f"reference({node})")
        if isinstance(node, Call):
            return self._called(node, depth)
        return Unrepresented(describe(node))

    def _hashable(self, node: Any, depth: int) -> Any:
        value = self._value(node, depth + 1)
        return value if isinstance(value, (str, int, float, bool, bytes, type(None))) else Unrepresented(describe(node))

    def _called(self, node: Call, depth: int) -> Any:
        tensor = self._tensor(node) if self._tensors is None else self._tensors(node)
        if tensor is not None:
            return tensor
        if node.is_("_codecs", "encode"):
            return _encoded(node)
        if isinstance(node.target, Global) and node.target.module in NUMPY_CORES:
            return self._numpy(node)
        if node.is_("torch", "Size") and len(node.args) == 1:
            return self._value(tuple(node.args[0]) if isinstance(node.args[0], list) else node.args[0], depth + 1)
        if node.is_("torch", "device") and node.args:
            return ":".join(map(str, node.args)) if _are_plain(node.args) else Unrepresented("a device")
        if node.is_("collections", "Counter", "deque") or any(node.is_(module, "set", "frozenset") for module in BUILTINS):
            content: Any = next((held for held in (node.pairs, node.items, *node.args[:1]) if held is not None), [])
            return self._value(list(content) if isinstance(content, (tuple, list)) else content, depth + 1)
        if any(node.is_(module, "bytes", "bytearray") for module in BUILTINS) and not node.args:
            return b""
        if any(node.is_(module, *PATHS) for module in ("pathlib", "pathlib._local")):
            if not _are_plain(node.args):
                return Unrepresented("a path")
            kind = PureWindowsPath if "Windows" in str(node.target) else PurePosixPath
            return str(kind(*(str(part) for part in node.args)))
        return Unrepresented(f"object({node.target})" if isinstance(node.target, Global) else "object")

    def _tensor(self, node: Call) -> TensorValue | Unrepresented | None:
        try:
            stored = self._file.tensor(node)
        except Unsupported as error:
            return Unrepresented(error.message)
        if stored is None:
            return None
        if not stored.dtype.storable and stored.dtype.code != "C128":
            return Unrepresented(f"a tensor of dtype {stored.dtype.torch}")
        nbytes = stored.numel * stored.dtype.itemsize
        if nbytes > self._left:
            return Unrepresented(f"tensors of more than {MAX_BYTES >> 20} MiB")
        self._left -= nbytes
        return read_stored(stored)

    def _numpy(self, node: Call) -> Any:
        """An array (``_reconstruct`` and a state), or a scalar (dtype and bytes); see numpy's ``__reduce__``."""
        if node.is_(node.target.module, "scalar") and len(node.args) == 2:  # type: ignore[attr-defined]
            dtype, swapped = _numpy_dtype(node.args[0])
            data = node.args[1] if isinstance(node.args[1], bytes) else _encoded(node.args[1])
            if dtype is None or not isinstance(data, bytes) or len(data) != dtype.itemsize:
                return Unrepresented("a numpy scalar")
            return _unpacked(dtype, data[::-1] if swapped else data)[0]
        state = node.state
        if not isinstance(state, tuple) or len(state) != 5:
            return Unrepresented("a numpy array")
        _, shape, kind, fortran, data = state
        dtype, swapped = _numpy_dtype(kind)
        data = data if isinstance(data, bytes) else _encoded(data)
        if dtype is None or not isinstance(data, bytes) or not _is_shape(shape):
            return Unrepresented("a numpy array of objects")
        if math.prod(shape) * dtype.itemsize != len(data) or len(data) > self._left:
            raise CorruptFile("a numpy array does not have the size that its shape says")
        self._left -= len(data)
        if swapped:
            size = dtype.itemsize
            data = b"".join(data[i : i + size][::-1] for i in range(0, len(data), size))
        return TensorValue(dtype, shape, _in_c_order(data, shape, dtype.itemsize) if fortran and len(shape) > 1 else data)


def read_stored(stored: StoredTensor) -> TensorValue:
    """The bytes of a stored tensor."""
    source, flags = stored.storage.source, (stored.swapped, stored.conj, stored.neg)
    piece = Piece(source, stored.offset, stored.strides, whole(stored.shape), 0, *flags, crc=stored.record_crc)
    tensor = Tensor("", stored.dtype, stored.shape, (piece,))
    return TensorValue(stored.dtype, stored.shape, bytes(element_bytes(tensor, records=Records())))


def unrepresented(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Everything below a value that could not be represented: where it is, and what it is."""
    if isinstance(value, Unrepresented):
        yield name, value.what
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, Unrepresented):
                yield f"{name}, a key", key.what
            yield from unrepresented(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from unrepresented(item, f"{name}[{index}]")


def to_json(value: Any) -> Any:
    """A value as JSON holds it: tensors as (nested) lists, tuples as lists, bytes as base64, NaN as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {key if isinstance(key, str) else _key_text(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, TensorValue) and math.prod(value.shape) > MAX_IN_JSON:
        return {"dtype": value.dtype.torch, "shape": list(value.shape), "values": f"more than {MAX_IN_JSON}, only in the .pt file"}
    if isinstance(value, TensorValue):
        try:
            return _nested([to_json(number) for number in value.numbers()], value.shape)
        except CkptError:
            return {"dtype": value.dtype.torch, "shape": list(value.shape), "base64": base64.b64encode(value.data).decode()}
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, TorchName):
        return f"torch.{value.name}"
    return {"not represented": value.what} if isinstance(value, Unrepresented) else str(value)


def equal(first: Any, second: Any) -> bool:
    """Whether two values are the same, NaN equal to NaN."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(equal(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second) or (isinstance(first, float) and math.isnan(first) and math.isnan(second))


def _are_plain(parts: tuple[Any, ...]) -> bool:
    return len(parts) <= MAX_DEPTH and all(isinstance(part, (str, int)) for part in parts)


def _key_text(key: Any) -> str:
    return key.what if isinstance(key, Unrepresented) else key.hex() if isinstance(key, bytes) else str(key)


def _nested(numbers: list[Any], shape: Shape) -> Any:
    if not shape:
        return numbers[0]
    if 0 in shape and math.prod(n for n in shape if n) > MAX_IN_JSON:
        return []
    step = math.prod(shape[1:])
    return [_nested(numbers[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def _unpacked(dtype: Dtype, data: bytes) -> tuple[Any, ...]:
    codes = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "BOOL": "?"}
    codes |= {"U64": "Q", "U32": "I", "U16": "H", "U8": "B"}
    if dtype.code == "BF16":
        pairs = (data[i : i + 2] for i in range(0, len(data), 2))
        return tuple(struct.unpack("<f", b"\0\0" + pair)[0] for pair in pairs)
    if dtype.code not in codes:
        raise Unsupported(f"{dtype} values have no plain form")
    return struct.unpack(f"<{len(data) // dtype.itemsize}{codes[dtype.code]}", data)


def _encoded(node: Any) -> Any:
    """``_codecs.encode(text, "latin1")``: how protocol 2 holds bytes."""
    if isinstance(node, Call) and not node.args and any(node.is_(module, "bytes") for module in BUILTINS):
        return b""
    if isinstance(node, Call) and node.is_("_codecs", "encode") and len(node.args) == 2 and isinstance(node.args[0], str):
        try:
            return node.args[0].encode("latin1")
        except UnicodeEncodeError:
            pass
    return Unrepresented("bytes")


def _numpy_dtype(node: Any) -> tuple[Dtype | None, bool]:
    """The dtype of a numpy dtype node, and whether it is in the other byte order."""
    if not isinstance(node, Call) or not node.is_("numpy", "dtype") or not node.args or not isinstance(node.args[0], str):
        return None, False
    order = node.state[1] if isinstance(node.state, tuple) and len(node.state) > 1 else "|"
    code = NUMPY_CODES.get(node.args[0].lstrip("<>|="))
    return (BY_CODE[code] if code else None), order == ">" or node.args[0].startswith(">")


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= 32 and all(type(n) is int and 0 <= n < 1 << 40 for n in value)


def _in_c_order(data: bytes, shape: Shape, itemsize: int) -> bytes:
    """Elements that were stored with the first index fastest."""
    if not data:
        return data
    strides = contiguous_strides(shape[::-1])[::-1]
    positions = [0]
    for n, stride in zip(shape, strides, strict=True):
        positions = [position + i * stride for position in positions for i in range(n)]
    return b"".join(data[position * itemsize : (position + 1) * itemsize] for position in positions)
