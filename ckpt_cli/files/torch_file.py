"""Files of ``torch.save``: the object tree of the pickle, with tensors as places in the file.

A file is a zip archive ``<top>/data.pkl`` + ``<top>/data/<key>`` (torch/serialization.py, ``_save``), read in place. The
format of torch < 1.6 (pickles one after the other, then raw storages) is read as well: `_read_legacy`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from ckpt_cli.boxes import Shape
from ckpt_cli.dtypes import BY_STORAGE, BY_TORCH, Dtype
from ckpt_cli.errors import INTERRUPTED, CorruptFile, Unsupported, reading
from ckpt_cli.files.pickle_nodes import Call, Global, Persistent, as_dict, below
from ckpt_cli.files.pickle_reader import load_pickle
from ckpt_cli.files.source import FileSource, Source, Window
from ckpt_cli.files.zip_archive import ZipMap

MAX_PICKLE = 256 << 20
MAX_RANK = 64
MAX_WRAPPERS = 8
PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""The first pickle of a file of torch < 1.6: MAGIC_NUMBER of torch/serialization.py, in any protocol."""

LEGACY_HEAD = 64
"""Bytes in which that pickle ends."""

OTHER_FORMATS: tuple[tuple[bytes, str, str], ...] = (
    (b"<", "an HTML or XML page, not a checkpoint", "if it was downloaded, the server sent a page instead: download it again"),
    (b"\x1f\x8b", "a gzip file", "unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
)


def is_legacy(head: bytes) -> bool:
    """Whether a file that begins like this has the format of torch < 1.6, with which torch.save still writes if it is asked to."""
    if not head.startswith((b"\x80", b"L")):
        return False
    try:
        value, _ = load_pickle(head[:LEGACY_HEAD])
    except CorruptFile:
        return False
    return type(value) is int and value == LEGACY_MAGIC


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of one torch storage: where they begin, how many they are, and the CRC-32 of their record, if any."""

    source: Source
    key: str
    offset: int
    nbytes: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as one file holds it: ``strides`` in elements, ``offset`` in bytes from the start of the file."""

    storage: Storage
    dtype: Dtype
    shape: Shape
    strides: Shape
    offset: int
    swapped: bool = False
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def record_crc(self) -> int | None:
        """The record's CRC-32 if the tensor is the whole record, so that equal CRCs mean equal tensors."""
        whole = (self.offset, self.numel * self.dtype.itemsize) == (self.storage.offset, self.storage.nbytes)
        return self.storage.crc if whole else None

    def read_ints(self) -> list[int]:
        """The values of a small integer tensor, in C order (device meshes are stored like that)."""
        if self.dtype.kind != "int" or self.numel > 1 << 20:
            raise CorruptFile(f"a mesh is a {self.dtype} tensor of {self.numel} elements")
        order = ">" if self.swapped else "<"
        itemsize = self.dtype.itemsize
        code = {8: "q", 4: "i", 2: "h", 1: "b"}[itemsize]
        code = code.upper() if self.dtype.code.startswith("U") else code
        reach = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        if reach > 1 << 20:
            raise CorruptFile("the ranks of a mesh are spread too far")
        if not self.numel:
            return []
        values = struct.unpack(f"{order}{reach}{code}", self.storage.source.read(self.offset, reach * itemsize))
        positions = [0]
        for n, stride in zip(self.shape, self.strides, strict=True):
            positions = [p + i * stride for p in positions for i in range(n)]
        return [values[p] for p in positions]


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a pickle says of a tensor: ``nbytes`` are those of its storage, ``first`` is its first element in it."""

    key: str
    nbytes: int
    dtype: Dtype
    first: int
    shape: Shape
    strides: Shape
    conj: bool
    neg: bool


class TorchFile:
    """One file of ``torch.save``: ``root`` is its object, `tensor` tells which of its nodes are tensors.

    The file is the whole of ``source``, or ``size`` bytes of it from ``start`` on (an item of a ``.distcp``).
    """

    def __init__(self, source: Source, start: int = 0, size: int | None = None) -> None:
        self.source = source
        self._window = Window(source, start, source.size if size is None else size)
        self._storages: dict[str, Storage] = {}
        self._swapped = False
        self._zip: ZipMap | None = None
        self._top = ""
        self._tensors: dict[Call, StoredTensor] = {}
        with reading(source.path):
            self.root = self._read()

    @property
    def size(self) -> int:
        """Bytes of the file, or of the item."""
        return self._window.size

    @property
    def stem(self) -> str | None:
        """What torch called the archive: the name of the file that was written, without its suffix. None if there is no archive."""
        return self._top.rstrip("/") or None if self._zip is not None else None

    @property
    def fingerprint(self) -> bytes | None:
        """Equal for two files whose storages have the same names, sizes and checksums; None without checksums."""
        if self._zip is None:
            return None
        data = f"{self._top}data/"
        records = [(name[len(data) :], m.size, m.crc) for name, m in self._zip.members.items() if name.startswith(data)]
        return sha256(repr(records).encode()).digest() if any(crc for _, _, crc in records) else None

    def tensor(self, node: object) -> StoredTensor | None:
        """The tensor that a node stands for, or None if it is something else.

        Unwraps parameters and tensor subclasses that keep plain data. Raises CorruptFile if the node is a tensor whose
        numbers contradict the file, Unsupported if it is a kind that has no plain bytes (sparse, quantised, ...).
        """
        if not isinstance(node, Call) or not isinstance(node.target, Global):
            return None
        known = self._tensors.get(node)
        if known is None:
            with reading(self.source.path):
                header = node.known if isinstance(node.known, TensorHeader) else _header(node)
                if header is None:
                    return None
                node.known = header
                known = self._tensors[node] = self._located(header)
        return known

    # -- the container -----------------------------------------------------------------------------------------------

    def _read(self) -> Any:
        size = self._window.size
        start = self._window.read(0, min(size, LEGACY_HEAD))
        if is_legacy(start):
            return self._read_legacy()
        for magic, what, hint in OTHER_FORMATS:
            if start.startswith(magic):
                raise CorruptFile(f"this is {what}", hint=hint)
        if size and not start.startswith(b"PK"):
            raise CorruptFile(
                "this is not a file of torch.save",
                expected="a zip archive (torch >= 1.6) or a legacy torch.save file",
                hint="it begins with zeros: the copy may have been interrupted" if not start.strip(b"\0") else None,
            )
        self._zip = ZipMap(self._window, self._window.before_reading)
        self._top = self._single_top(self._zip.members)
        if f"{self._top}constants.pkl" in self._zip.members or any(name.startswith(f"{self._top}code/") for name in self._zip.members):
            raise Unsupported("this is a TorchScript archive, not a checkpoint", hint="save the state dict with torch.save instead")
        if f"{self._top}byteorder" in self._zip.members:
            order = self._zip.read(f"{self._top}byteorder", 64)
            if order not in (b"little", b"big"):
                raise CorruptFile("the byte order is neither little nor big")
            self._swapped = order == b"big"
        data = self._zip.read(f"{self._top}data.pkl", MAX_PICKLE)
        root, end = self.source.pickles.load(data) if isinstance(self.source, FileSource) else load_pickle(data)
        if end != len(data):
            raise CorruptFile("bytes follow the pickle in data.pkl")
        return root

    def _single_top(self, members: Mapping[str, object]) -> str:
        tops = {name.split("/", 1)[0] + "/" if "/" in name else "" for name in members}
        if len(tops) != 1:
            raise CorruptFile("the archive has no single top folder", expected="one folder with data.pkl, as torch.save writes it")
        top = tops.pop()
        if f"{top}data.pkl" not in members:
            raise CorruptFile("the archive has no data.pkl", expected="a file of torch.save")
        return top

    def _read_legacy(self) -> Any:
        """Magic number, protocol, system info, object and storage keys as pickles, then per key a count and raw data."""
        size, window = self._window.size, 1 << 20
        while True:
            head = self._window.read(0, min(size, window))
            try:
                position, values = 0, []
                for _ in range(5):
                    value, position = load_pickle(head, position)
                    values.append(value)
                break
            except CorruptFile:
                if window >= min(size, MAX_PICKLE):
                    raise
                window *= 8
        _, _, info, root, keys = values
        info = as_dict(info) or {}
        if info.get("little_endian") is False:
            raise Unsupported("this legacy torch.save file was written on a big-endian machine")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise CorruptFile("the storage keys are not a list of strings")
        sizes = self._legacy_itemsizes(root)
        for key in keys:
            if key not in sizes:
                raise CorruptFile(f"storage {key[:40]} is not used by any tensor")
            count = int.from_bytes(self._window.read(position, 8), "little", signed=True)
            nbytes = count * sizes[key]
            if count < 0 or position + 8 + nbytes > size:
                raise CorruptFile(
                    f"the file ends inside storage {key[:40]}",
                    hint=INTERRUPTED,
                )
            self._storages[key] = Storage(self.source, key, self._window.start + position + 8, nbytes, None)
            position += 8 + nbytes
        if position != size:
            raise CorruptFile(f"{size - position} bytes follow the last storage")
        return root

    def _legacy_itemsizes(self, root: object) -> dict[str, int]:
        sizes: dict[str, int] = {}
        pending, seen = [root], set()
        while pending:
            node = pending.pop()
            if isinstance(node, Persistent):
                dtype, key, _ = storage_id(node)
                sizes[key] = 1 if dtype is None else dtype.itemsize
            elif isinstance(node, (list, tuple, dict, Call)) and id(node) not in seen:
                seen.add(id(node))
                pending += below(node)
        return sizes

    # -- tensors -----------------------------------------------------------------------------------------------------

    def _located(self, header: TensorHeader) -> StoredTensor:
        storage, size = self._storage(header.key), header.dtype.itemsize
        shape, numel = header.shape, math.prod(header.shape)
        if header.nbytes != storage.nbytes:
            raise CorruptFile(
                f"storage {header.key[:40]} has {storage.nbytes} bytes", expected=f"{header.nbytes} bytes, as its tensors say"
            )
        last = header.first + sum((n - 1) * stride for n, stride in zip(shape, header.strides, strict=True)) if numel else header.first
        if numel and (last + 1) * size > storage.nbytes:
            raise CorruptFile(f"a tensor of shape {list(shape)} reaches beyond its storage of {storage.nbytes} bytes")
        if numel * size > self._window.size:
            raise Unsupported(
                f"a tensor of shape {list(shape)} repeats {storage.nbytes} stored bytes",
                expected="no more bytes than the file has",
                hint="it was saved as an expanded view; save a contiguous copy",
            )
        offset = storage.offset + header.first * size if numel else storage.offset
        swapped = self._swapped and size > 1
        return StoredTensor(storage, header.dtype, shape, header.strides, offset, swapped, header.conj, header.neg)

    def _storage(self, key: str) -> Storage:
        if key not in self._storages:
            if self._zip is None or f"{self._top}data/{key}" not in self._zip.members:
                raise CorruptFile(f"storage {key[:40]} is not in the file")
            offset, member = self._zip.locate(f"{self._top}data/{key}")
            self._storages[key] = Storage(self.source, key, self._window.start + offset, member.size, member.crc)
        return self._storages[key]


def _header(node: Call) -> TensorHeader | None:
    node = unwrap(node)
    if node.is_("torch._utils", "_rebuild_tensor_v2", "_rebuild_tensor", "_rebuild_tensor_v3"):
        return _rebuilt(node)
    if node.is_("torch._tensor", "_rebuild_from_type_v2"):
        kind = node.args[1] if len(node.args) > 1 else None
        if isinstance(kind, Global) and kind.module.startswith("torch.distributed."):
            return None
        raise Unsupported(f"tensors of class {kind if isinstance(kind, Global) else 'unknown'} are not known")
    if isinstance(node.target, Global) and node.target.module in ("torch._utils", "torch._tensor", "torch.sparse"):
        name = node.target.name
        if any(word in name for word in ("sparse", "qtensor", "nested", "meta", "device_tensor")):
            raise Unsupported(f"{name.strip('_').replace('_', ' ')}: such tensors have no plain bytes to copy")
    return None


def _rebuilt(node: Call) -> TensorHeader:
    args = node.args
    wide = node.target == Global("torch._utils", "_rebuild_tensor_v3")
    if len(args) < 4 or not isinstance(args[0], Persistent):
        raise CorruptFile("a tensor has no storage")
    dtype, key, count = storage_id(args[0])
    if wide:
        if len(args) < 7 or not isinstance(args[6], Global) or args[6].module != "torch":
            raise CorruptFile("a tensor has no dtype")
        named = BY_TORCH.get(args[6].name)
        if named is None:
            raise Unsupported(f"dtype {args[6]} is not known", hint="a newer version of ckpt may read it")
        nbytes, dtype = count if dtype is None else count * dtype.itemsize, named
    elif dtype is None:
        raise CorruptFile("an untyped storage is used without a dtype")
    else:
        nbytes = count * dtype.itemsize
    first = _nonnegative(args[1])
    shape, strides = dimensions(args[2]), dimensions(args[3])
    if len(shape) != len(strides) or len(shape) > MAX_RANK:
        raise CorruptFile(f"a tensor has {len(shape)} sizes and {len(strides)} strides")
    flags = as_dict(args[-1]) if len(args) > (7 if wide else 6) else None
    return TensorHeader(key, nbytes, dtype, first, shape, strides, _flag(flags, "conj"), _flag(flags, "neg"))


def storage_id(node: Persistent) -> tuple[Dtype | None, str, int]:
    """Dtype (None: counted in bytes), key and number of elements of ("storage", type, key, location, numel, ...)."""
    pid = node.pid
    if isinstance(pid, str) and pid.startswith("('storage',"):
        raise Unsupported(
            "this was pickled with protocol 0, which keeps of a storage no more than a text: torch.load fails too",
            hint="save it again with the usual pickle_protocol of torch.save",
        )
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], Global):
        raise CorruptFile("a persistent id is not a storage")
    kind, key = pid[1], pid[2]
    if len(pid) > 5 and pid[5] is not None:
        raise Unsupported("a storage is a view of another storage (torch < 0.4)")
    if type(key) is not str:
        raise CorruptFile("a storage key is not a string")
    if kind.module == "torch.storage" and kind.name in ("UntypedStorage", "_UntypedStorage"):
        return None, key, _nonnegative(pid[4])
    if kind.module not in ("torch", "torch.cuda") or kind.name not in BY_STORAGE:
        raise Unsupported(f"storages of type {kind} are not known")
    return BY_STORAGE[kind.name], key, _nonnegative(pid[4])


def unwrap(node: Call) -> Call:
    """The call that makes the data: without ``nn.Parameter``, ``Buffer`` and attributes that hang on a plain tensor."""
    for _ in range(MAX_WRAPPERS):
        inner: object = None
        if node.is_("torch._utils", "_rebuild_parameter", "_rebuild_parameter_with_state") and node.args:
            inner = node.args[0]
        elif node.is_("torch._tensor", "_rebuild_from_type_v2") and len(node.args) == 4 and _is_plain(node.args[1]):
            function, _, args, _ = node.args
            inner = Call(function, args) if isinstance(function, Global) and isinstance(args, tuple) else None
        if not isinstance(inner, Call):
            break
        node = inner
    return node


def _is_plain(kind: object) -> bool:
    """Whether a class is torch's own tensor or parameter."""
    return isinstance(kind, Global) and str(kind) in PLAIN_TYPES


def _nonnegative(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CorruptFile("a tensor has a size, stride or offset that is not a natural number")
    return value


def _flag(flags: Mapping[Any, Any] | None, name: str) -> bool:
    value = (flags or {}).get(name, False)
    if not isinstance(value, bool):
        raise CorruptFile(f"the {name} flag of a tensor is neither true nor false")
    return value


def dimensions(value: object) -> Shape:
    """A shape: a tuple, or torch.Size of one."""
    if isinstance(value, Call) and value.is_("torch", "Size") and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, (tuple, list)):
        raise CorruptFile("a shape is not a tuple")
    return tuple(_nonnegative(n) for n in value)
