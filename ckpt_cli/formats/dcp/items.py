"""The items of ``.distcp`` files: a whole ``torch.save`` zip per chunk, or one safetensors blob for all tensors of a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ckpt_cli.boxes import Box
from ckpt_cli.errors import INTERRUPTED, CorruptFile, Inconsistent, MissingShard, reading
from ckpt_cli.files.compressed import Inflaters, inflated
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.safetensors_file import Entry, read_header
from ckpt_cli.files.source import Files, FileSource
from ckpt_cli.files.torch_file import StoredTensor, TorchFile
from ckpt_cli.formats.assembly import PlacedTensor, RankPart, cut_layout, stored_entry, tile
from ckpt_cli.formats.dcp.agreement import MIXED
from ckpt_cli.formats.dcp.later import LaterItem
from ckpt_cli.formats.dcp.metadata import Catalog, CatalogTensor, Stored, read_catalog
from ckpt_cli.formats.torch_files.state_dict import array_search, holds_storage, leaf_of
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Leaf
from ckpt_cli.tensors.plain_values import Unrepresented, ValueReader
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.urls import is_remote

ZIP = b"PK\x03\x04"
ITEM_HEAD, ITEM_TAIL = 2 << 10, 4 << 10
"""Bytes in which the pickle and the directory of an item lie; more is read where they are larger."""

SMALL_OBJECT = 256 << 10
"""Bytes of an object that is read as a whole."""


def assembled(name: str, entry: CatalogTensor, reader: ItemReader) -> Tensor:
    """A tensor of the catalogue with its pieces and replicas. Raises what `tile` raises, and Inconsistent."""
    parts: list[RankPart] = []
    for box, places in entry.chunks.items():
        parts += [RankPart(stored.rank, reader.read(entry, box, stored), box, (0,) * len(box.offset)) for stored in places]
    kind, layout = cut_layout(entry.shape, entry.chunks)
    replicated = any(len(places) > 1 for places in entry.chunks.values())
    return tile(name, entry.dtype, PlacedTensor(entry.shape, parts, kind, layout, check_copies=replicated), 0, ())


def _last_entries(catalog: Catalog) -> dict[str, Stored]:
    """The entry of each data file that ends last."""
    last: dict[str, Stored] = {}
    places = [stored for entry in catalog.tensors.values() for listed in entry.chunks.values() for stored in listed]
    for stored in (*places, *(thing.stored for thing in catalog.objects.values() if thing.stored is not None)):
        known = last.setdefault(stored.file, stored)
        if known.offset + known.length < stored.offset + stored.length:
            last[stored.file] = stored
    return last


class ItemReader:
    """Finds tensors in items; the safetensors blob of a file is parsed once."""

    def __init__(self, roots: Sequence[Path], files: Files) -> None:
        self._roots = roots
        self._files = files
        self._inflaters = Inflaters()
        self._blobs: dict[tuple[str, int], dict[str, Entry]] = {}

    def path(self, file: str) -> Path:
        """Where a data file lies: in the first folder that has it."""
        return next((root / file for root in self._roots if is_file(root / file)), self._roots[0] / file)

    def check_files(self, tensors: Iterable[CatalogTensor]) -> None:
        """Raise MissingShard, naming all missing data files of some tensors."""
        needed = sorted({stored.file for entry in tensors for places in entry.chunks.values() for stored in places})
        absent = [file for file in needed if not is_file(self.path(file))]
        if absent:
            raise MissingShard(
                f"{len(absent)} of {len(needed)} data files are missing: {few(absent)}",
                path=self._roots[0],
                expected=str(self._roots[0] / absent[0]),
                hint="copy them from the nodes that wrote them, or pass their folders with --also",
            )

    def check_ends(self, catalog: Catalog, used: Iterable[str]) -> None:
        """Raise CorruptFile if a data file ends before the last entry in it, whatever that entry is."""
        last = _last_entries(catalog)
        for file in used:
            with reading(self.path(file)):
                self._checked(last[file])

    def cut_files(self, catalog: Catalog, used: Iterable[str]) -> list[str]:
        """Those of some data files that end before the last entry in them."""
        last = _last_entries(catalog)
        return [file for file in used if self._files.source(self.path(file)).size < last[file].offset + last[file].length]

    def size(self, file: str) -> int | None:
        """Bytes of a data file; None for one of a store where no values are read."""
        path = self.path(file)
        return None if is_remote(path) and not self._files.values else self._files.source(path).size

    def raw(self, file: str, offset: int, count: int) -> bytes:
        """Bytes of a data file, whatever they mean; none where the file is cut off before."""
        source = self._files.source(self.path(file))
        return bytes(source.read(offset, count)) if offset + count <= source.size else b""

    def expect(self, tensors: Iterable[CatalogTensor]) -> None:
        """Have the ends of all items of some tensors fetched ahead, if they lie in a store: that is where it says what is in them."""
        ends: dict[str, list[tuple[int, int]]] = {}
        for stored in (stored for entry in tensors for places in entry.chunks.values() for stored in places if not self._waits(stored)):
            begin, end = stored.offset, stored.offset + stored.length
            ends.setdefault(stored.file, []).extend(((begin, min(begin + ITEM_HEAD, end)), (max(end - ITEM_TAIL, begin), end)))
        for file, ranges in ends.items():
            if is_remote(path := self.path(file)):
                self._files.source(path).expect(ranges)

    def expect_objects(self, places: Iterable[Stored]) -> None:
        """Have objects fetched ahead as a whole, if they lie in a store: one by one each would take a request."""
        spans: dict[str, list[tuple[int, int]]] = {}
        for stored in places:
            spans.setdefault(stored.file, []).append((stored.offset, stored.offset + stored.length))
        for file, ranges in spans.items():
            if is_remote(path := self.path(file)):
                self._files.source(path).expect(ranges)

    def read(self, entry: CatalogTensor, box: Box, stored: Stored) -> StoredTensor:
        """One stored chunk; what its item says waits where no values are read. Raises CorruptFile if it is no tensor, and Inconsistent."""
        if self._waits(stored):
            with reading(self.path(stored.file)):
                later = LaterItem(self._checked(stored), entry.name, stored, entry.dtype, box, lambda: self._read(entry, box, stored))
                return later.tensor
        return self._read(entry, box, stored)

    def _waits(self, stored: Stored) -> bool:
        return not self._files.values and is_remote(self.path(stored.file))

    def _read(self, entry: CatalogTensor, box: Box, stored: Stored) -> StoredTensor:
        tensor = self._found(entry, stored)
        if tensor.shape != box.extent or tensor.dtype != entry.dtype:
            raise Inconsistent(
                f"the item at {box.offset} is {tensor.dtype} {list(tensor.shape)}, the metadata says {entry.dtype} {list(box.extent)}",
                path=self.path(stored.file),
                hint="the metadata may be from another save, or record wrong chunks (as of FSDP2 with tensor parallelism)",
            )
        return tensor

    def _found(self, entry: CatalogTensor, stored: Stored) -> StoredTensor:
        with reading(self.path(stored.file)):
            source = self._checked(stored)
            item = self._zip_item(source, stored)
            if item is None:
                return self._blob_item(source, entry, stored)
            tensor = item.tensor(item.root)
            if tensor is None:
                raise CorruptFile("an item holds no tensor")
            if names := read_catalog(self._roots, self._files).shared.get(stored):
                raise Inconsistent(f"{' and '.join(names)} are said to be the same bytes of {stored.file}", tensor=entry.name, hint=MIXED)
            return tensor

    def holds_tensors(self, stored: Stored) -> bool:
        """Whether an object that is not a tensor itself contains tensors. False if its file is missing."""
        if not is_file(self.path(stored.file)):
            return False
        with reading(self.path(stored.file)):
            item = self._object(stored)
            return item is not None and holds_storage(item.root)

    def leaf(self, name: str, stored: Stored) -> Leaf:
        """An object as an entry that is no tensor."""
        with reading(self.path(stored.file)):
            item = self._object(stored)
            return Leaf(name, "stored object") if item is None else leaf_of(name, item.root, array_search())

    def parsed(self, stored: Stored) -> TorchFile | None:
        """An object as the file of torch.save that it is stored as; None if its item is none."""
        with reading(self.path(stored.file)):
            return self._object(stored)

    def value(self, stored: Stored) -> Any:
        """An object that was pickled, as plain values; Unrepresented if its item is no file of torch.save."""
        with reading(self.path(stored.file)):
            item = self._object(stored)
            return Unrepresented("an object of unknown form") if item is None else ValueReader(item).read(item.root)

    def _object(self, stored: Stored) -> TorchFile | None:
        """An object as the file of torch.save that it is; None if its item is none. A small one in a store is fetched with one request."""
        source = self._checked(stored)
        if not source.is_local and stored.length <= SMALL_OBJECT:
            source.read(stored.offset, stored.length)
        return self._zip_item(source, stored)

    def _checked(self, stored: Stored) -> FileSource:
        path = self.path(stored.file)
        if not is_file(path):
            hint = "copy it from the node that wrote it, or pass that node's folder with --also"
            raise MissingShard(f"{stored.file} is missing", expected=str(path), hint=hint)
        source = self._files.source(path)
        if stored.offset + stored.length > source.size:
            raise CorruptFile(
                f"the file has {source.size} bytes",
                expected=f"at least {stored.offset + stored.length}, as the metadata says",
                hint=INTERRUPTED,
            )
        return source

    def _zip_item(self, source: FileSource, stored: Stored) -> TorchFile | None:
        """The item as a file of torch.save, or None if it is not one."""
        if stored.transforms:
            stream = inflated(source, stored.offset, stored.length, stored.transforms, self._inflaters)
            return TorchFile(stream, 0, stream.size)
        if source.read(stored.offset, min(4, stored.length)) == ZIP:
            return TorchFile(source, stored.offset, stored.length)
        return None

    def _blob_item(self, source: FileSource, entry: CatalogTensor, stored: Stored) -> StoredTensor:
        key = stored.file, stored.offset
        if key not in self._blobs:
            header = read_header(source, stored.offset)
            self._blobs[key] = {tensor.name: tensor for tensor in header.entries}
        found = self._blobs[key].get(entry.name)
        if found is None:
            raise CorruptFile("the item is neither a zip of torch.save nor a safetensors blob with this tensor")
        return stored_entry(found, source)
