"""The catalogue of a torch DCP folder: ``.metadata`` (or one ``__R.metadata`` per rank), read inertly.

It is a plain pickle of ``torch.distributed.checkpoint.metadata.Metadata``: sizes and chunks of every tensor, and where each
chunk lies (``_StorageInfo``: file, offset, length). Class paths of torch 2.0 to 2.14 and OLMo-core's own ``_StorageInfo``
are understood by their attributes. Paths of nested keys come from ``planner_data``; keys may contain dots themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from ckpt_cli.boxes import Box, Shape
from ckpt_cli.dtypes import BY_TORCH, Dtype
from ckpt_cli.errors import CorruptFile, Inconsistent, MissingShard, Unsupported, reading
from ckpt_cli.files.folders import Folders, entries_in, is_file, stays_inside
from ckpt_cli.files.pickle_nodes import Call, Global, as_dict, attributes
from ckpt_cli.files.pickle_reader import load_pickle
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import dimensions
from ckpt_cli.formats.dcp.agreement import Prefixes, lost_names, planned, shared_places

MAX_METADATA = 1 << 30
METADATA = ".metadata"
RANK_METADATA = re.compile(r"__(?P<rank>[0-9]+)\.metadata", re.ASCII)
ITEM_FILE = re.compile(r"(?:.*/)?__(?P<rank>[0-9]{1,9})_[0-9]+\.distcp", re.ASCII)
"""How torch names the files of a rank, with or without the folder."""

ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"

Writer = Literal["<= 2.2", "2.3", "2.4-2.6", "2.7-2.8", ">= 2.9"]


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the bytes of one chunk or object are. ``transforms`` undo from first to last, such as "stream.zstd/1"."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The rank that wrote the file, by its name; 0 if the name does not say it."""
        fields = ITEM_FILE.fullmatch(self.file)
        return int(fields["rank"]) if fields else 0


@dataclass(slots=True)
class CatalogTensor:
    """One tensor: its path of nested keys, and its chunks with all places that hold them (replicas have several).

    ``keys`` is the path with numbers where it goes through a list.
    """

    name: str
    path: tuple[str, ...]
    dtype: Dtype
    shape: Shape
    chunks: dict[Box, list[Stored]] = field(default_factory=dict)
    keys: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogObject:
    """Something else that was pickled: its path of nested keys, and where it is, if the metadata says so."""

    path: tuple[str, ...]
    stored: Stored | None
    keys: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything that the metadata of a folder tells."""

    tensors: Mapping[str, CatalogTensor]
    objects: Mapping[str, CatalogObject]
    writer: Writer
    ordered: bool = True
    """Whether planner data tell the order of the state dict; entries alone come in the order of ranks."""

    origins: tuple[str, ...] = ()
    """The folders that the save was written to, as torch >= 2.3 notes it in the metadata; empty where it does not say."""

    logical: Mapping[str, Shape] = field(default_factory=dict)
    """The shapes of tensors that Megatron stored in another one: blocks of a grid, each flattened (``mcore_data``)."""

    lost: tuple[str, ...] = ()
    """Names of tensors that have no entry, although the planner or the places of bytes list them."""

    shared: Mapping[Stored, tuple[str, str]] = field(default_factory=dict)
    """Places at which two tensors are said to be, with the names of both."""

    @property
    def files(self) -> list[str]:
        """The data files that chunks lie in, sorted."""
        return sorted({stored.file for tensor in self.tensors.values() for places in tensor.chunks.values() for stored in places})

    @property
    def ranks(self) -> int | None:
        """How many ranks wrote tensors and objects, as far as the names of the files tell; None for one, which may write what all have."""
        objects = [thing.stored.rank for thing in self.objects.values() if thing.stored is not None]
        tensors = [stored.rank for tensor in self.tensors.values() for places in tensor.chunks.values() for stored in places]
        return max((*tensors, *objects), default=0) + 1 if any(tensors) or any(objects) else None


def metadata_files(folders: Sequence[Path], files: Files) -> list[Path]:
    """``.metadata``, or what a save without collectives leaves: one file per rank, in the order of ranks.

    Raises Inconsistent if several folders hold different ``.metadata``, or the file of one rank twice.
    """
    whole = [folder / METADATA for folder in folders if is_file(folder / METADATA)]
    for other in whole[1:]:
        if _content(other, files) != _content(whole[0], files):
            raise Inconsistent(f"{other} is from another save", path=whole[0], hint="join only folders of one save")
    if whole:
        return whole[:1]
    found: dict[int, Path] = {}
    for path in (path for folder in folders for path in entries_in(folder)):
        fields = RANK_METADATA.fullmatch(path.name)
        if fields and found.setdefault(int(fields["rank"]), path) != path:
            raise Inconsistent(f"{path.name} is in two folders", path=path, hint="join only folders of one save")
    return [found[rank] for rank in sorted(found)]


def named_metadata(folder: Path, there: Folders) -> list[Path]:
    """The metadata of one folder, by name."""
    if there.is_file(folder / METADATA):
        return [folder / METADATA]
    return [path for path in there.entries(folder) if RANK_METADATA.fullmatch(path.name)]


def _content(path: Path, files: Files) -> bytes:
    source = files.source(path)
    if source.size > MAX_METADATA:
        raise CorruptFile(f"{source.size} bytes is too large for metadata", path=path, expected=f"at most {MAX_METADATA} bytes")
    return source.read(0, source.size)


def _check_ranks(listed: Sequence[Path], folders: Sequence[Path]) -> None:
    """Raise MissingShard if there is no metadata, or a rank's is not there although others', or its data, are."""
    if not listed:
        raise MissingShard(
            f"{METADATA} is missing",
            path=folders[0],
            expected=str(folders[0] / METADATA),
            hint="if the save did finish, .metadata is on the node that ran rank 0: copy it from there",
        )
    if listed[0].name == METADATA:
        return
    wrote = {int(fields["rank"]) for folder in folders for path in entries_in(folder) if (fields := ITEM_FILE.fullmatch(path.name))}
    names = {path.name for path in listed}
    for rank in (*range(len(listed)), *sorted(wrote)):
        if f"__{rank}.metadata" not in names:
            raise MissingShard(
                f"the metadata of rank {rank} is missing",
                path=folders[0],
                expected=str(folders[0] / f"__{rank}.metadata"),
                hint="copy it from the node that wrote it, or pass that node's folder with --also"
                + (f"; if __{rank}_*.distcp are left-overs of another save, move them away" if rank in wrote else ""),
            )


def names_in(folders: Sequence[Path], files: Files, text: str) -> bool:
    """Whether the metadata of a save may have a name with this text in it: far quicker than reading what it says."""
    return any(text.encode() in _content(path, files) for path in metadata_files(folders, files))


def read_catalog(folders: Sequence[Path], files: Files) -> Catalog:
    """The catalogue of a save, which may lie in several folders (of several nodes). ``files`` keeps it: it is read once.

    Raises CorruptFile, Unsupported, MissingShard, or Inconsistent between ranks' files.
    """
    return files.kept((read_catalog, *folders), lambda: _read_catalog(folders, files))


def _read_catalog(folders: Sequence[Path], files: Files) -> Catalog:
    tensors: dict[str, CatalogTensor] = {}
    objects: dict[str, CatalogObject] = {}
    writer: Writer = ">= 2.9"
    ordered = True
    origins: dict[str, None] = {}
    logical: dict[str, Shape] = {}
    plans: dict[object, None] = {}
    stored: dict[object, None] = {}
    listed = metadata_files(folders, files)
    _check_ranks(listed, folders)
    for path in listed:
        with reading(path):
            root, end = load_pickle(raw := _content(path, files))
            if end != len(raw) or not isinstance(root, Call) or not isinstance(root.target, Global) or root.target.name != "Metadata":
                raise CorruptFile("this is not the metadata of torch.distributed.checkpoint")
            fields = attributes(root.state)
            writer = _writer(fields)
            if (origin := _origin(fields)) is not None:
                origins[origin] = None
            logical |= _logical(fields.get("mcore_data"))
            places = _places(fields.get("storage_data"))
            paths = planned(as_dict(fields.get("planner_data")) or {})
            prefixes = Prefixes(paths.values())
            plans |= dict.fromkeys(paths)
            stored |= dict.fromkeys(name for name, offset in places if offset is not None)
            entries = as_dict(fields.get("state_dict_metadata")) or {}
            ordered &= entries.keys() <= paths.keys()
            # The planner lists the keys as the state dict does; the entries come in the order of ranks and their loads.
            for name in (*(name for name in paths if name in entries), *(name for name in entries if name not in paths)):
                entry = entries[name]
                if not isinstance(name, str) or not isinstance(entry, Call) or not isinstance(entry.target, Global):
                    raise CorruptFile("an entry of the metadata is invalid")
                keys = paths.get(name) or prefixes.keys(name)
                nested = tuple(str(key) for key in keys)
                with reading(path, tensor=name):
                    if entry.target.name == "TensorStorageMetadata":
                        _add_tensor(tensors, name, nested, attributes(entry.state), places)
                        tensors[name].keys = keys
                    elif entry.target.name == "BytesStorageMetadata":
                        # Without collectives every rank lists all objects, and says only where its own are.
                        known = objects.get(name)
                        objects[name] = CatalogObject(nested, places.get((name, None)) or (known.stored if known else None), keys)
                    else:
                        raise CorruptFile(f"an entry is {entry.target}, neither a tensor nor an object")
    endings = {name.rpartition(".")[2] for name in tensors}
    lost = lost_names(plans, stored, tensors.keys() | objects.keys(), endings)
    return Catalog(tensors, objects, writer, ordered, tuple(origins), logical, tuple(lost), shared_places(tensors.values()))


def _logical(mcore_data: object) -> dict[str, Shape]:
    """The original shapes that Megatron core (to 0.15) notes of tensors that it stored in another one."""
    noted = ((name, as_dict(fields)) for name, fields in (as_dict(mcore_data) or {}).items())
    return {str(name): dimensions(fields[ORIGINAL_SHAPE]) for name, fields in noted if fields and ORIGINAL_SHAPE in fields}


def _add_tensor(
    tensors: dict[str, CatalogTensor],
    name: str,
    path: tuple[str, ...],
    fields: Mapping[str, Any],
    places: Mapping[tuple[str, Shape | None], Stored],
) -> None:
    dtype, shape = _dtype(fields.get("properties")), dimensions(fields.get("size"))
    tensor = tensors.setdefault(name, CatalogTensor(name, path, dtype, shape))
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise Inconsistent("the metadata of two ranks disagree about dtype or shape", hint="files from two saves may be mixed")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list):
        raise CorruptFile("the metadata lists no chunks")
    for chunk in chunks:
        corner = attributes(chunk.state) if isinstance(chunk, Call) else {}
        box = Box(dimensions(corner.get("offsets")), dimensions(corner.get("sizes")))
        if len(box.offset) != len(shape) or len(box.extent) != len(shape):
            raise CorruptFile(f"a chunk has {len(box.offset)} dimensions, the tensor {len(shape)}")
        if not box.numel:
            continue
        if any(a + n > size for a, n, size in zip(box.offset, box.extent, shape, strict=True)):
            raise CorruptFile(f"chunk {box} lies outside of the tensor's shape {list(shape)}")
        stored = places.get((name, box.offset))
        if stored is None:
            raise CorruptFile(f"the metadata does not say where chunk {box} is")
        tensor.chunks.setdefault(box, []).append(stored)


def _places(storage_data: object) -> dict[tuple[str, Shape | None], Stored]:
    """(name, offsets of the chunk) -> place; objects have no offsets."""
    found: dict[tuple[str, Shape | None], Stored] = {}
    for index, info in (as_dict(storage_data) or {}).items():
        if not isinstance(index, Call) or not isinstance(info, Call):
            raise CorruptFile("the metadata does not say where its data is")
        key, place = attributes(index.state), attributes(info.state)
        name, offset = key.get("fqn"), key.get("offset")
        if not isinstance(name, str):
            raise CorruptFile("the metadata does not say where its data is")
        begin, length = place.get("offset"), place.get("length")
        if type(begin) is not int or type(length) is not int or not (0 <= begin < 1 << 62 and 0 <= length < 1 << 62):
            raise CorruptFile("an offset or a length is not a natural number", tensor=name)
        transforms = place.get("transform_descriptors") or ()
        if not isinstance(transforms, (list, tuple)) or not all(isinstance(t, str) for t in transforms):
            raise CorruptFile("the transforms of an item are invalid", tensor=name)
        stored = Stored(_inside(place.get("relative_path"), name), begin, length, tuple(transforms))
        found[name, None if offset is None else dimensions(offset)] = stored
    return found


def _inside(file: object, name: str) -> str:
    """A relative path that stays in its folder."""
    if not stays_inside(file):
        raise CorruptFile("the metadata points to a file outside of its folder", tensor=name, expected="a path such as __0_0.distcp")
    return str(file)


def _dtype(properties: object) -> Dtype:
    """The dtype of TensorProperties: its state is a tuple that begins with it (an attribute dict in old versions)."""
    if not isinstance(properties, Call):
        raise CorruptFile("the metadata does not record the dtype")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else attributes(state).get("dtype")
    if not isinstance(dtype, Global) or dtype.module != "torch":
        raise CorruptFile("the metadata does not record the dtype")
    if dtype.name not in BY_TORCH:
        raise Unsupported(f"dtype {dtype} is not known")
    return BY_TORCH[dtype.name]


def _origin(fields: Mapping[str, Any]) -> str | None:
    """The folder that a save was written to: a text, or a path as pickle takes it apart."""
    meta = fields.get("storage_meta")
    told = attributes(meta.state).get("checkpoint_id") if isinstance(meta, Call) else None
    if isinstance(told, Call) and isinstance(told.target, Global) and told.target.module.startswith("pathlib"):
        parts = [part for part in told.args if isinstance(part, str)]
        return str(PurePosixPath(*parts)) if len(parts) == len(told.args) else None
    return told if isinstance(told, str) and told else None


def _writer(fields: Mapping[str, Any]) -> Writer:
    """The torch version that wrote the metadata, by the fields that later versions added."""
    if fields.get("version") is not None:
        return ">= 2.9"
    meta = fields.get("storage_meta")
    if isinstance(meta, Call):
        return "2.7-2.8" if "modules" in attributes(meta.state) else "2.4-2.6"
    entries = as_dict(fields.get("state_dict_metadata")) or {}
    for entry in entries.values():
        properties = attributes(entry.state).get("properties") if isinstance(entry, Call) and entry.state is not None else None
        if isinstance(properties, Call) and isinstance(properties.target, Global):
            return "<= 2.2" if "_shard" in properties.target.module else "2.3"
    return "2.3"
