"""Header level of `verify`: the files of a model folder, their headers, the index, and the manifest. No weight byte is read."""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.discover.beside.files import could_be_model
from ckpt_cli.discover.beside.same_weights import holds_same, is_copy_of
from ckpt_cli.discover.beside.stages import stage_trouble
from ckpt_cli.errors import CkptError, PartOfSet, Unsupported
from ckpt_cli.files.folders import Folders, files_in, is_file, status_of, stays_inside
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.manifest import Manifest, read_manifest
from ckpt_cli.files.safetensors_file import parse_json, read_header
from ckpt_cli.files.source import Files, read_small
from ckpt_cli.formats.placeholders import placeholders
from ckpt_cli.formats.registry import format_of, recognise
from ckpt_cli.formats.safetensors.folder import EMA, INDEX, INDEX_SUFFIX, SINGLE, described_entry, safetensors_part
from ckpt_cli.formats.safetensors.index import listed_files
from ckpt_cli.formats.safetensors.shards import SHARD
from ckpt_cli.formats.sets.contents import refuse_shard, share_error
from ckpt_cli.formats.sets.names import part_error, part_name, unlisted_parts
from ckpt_cli.formats.sets.stages import stage_error
from ckpt_cli.formats.torch_files.reader import INDEX as TORCH_INDEX
from ckpt_cli.formats.training_state_names import is_state_file
from ckpt_cli.names import few
from ckpt_cli.results.verify import Finding
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.verifying.beside import check_beside, check_changed
from ckpt_cli.verifying.findings import finding, unread

SUFFIX = ".safetensors"
OTHER_FORMAT = re.compile(r"pytorch_model.*\.bin|tf_model\.h5|.*\.gguf|flax_model\.msgpack|consolidated.*\.pth", re.ASCII)


@dataclass(frozen=True, slots=True)
class WeightSet:
    """The weight files that are loaded together, and the tensors of those that can be read, by name; ``readable``: of all."""

    name: str
    index: Path | None
    files: tuple[Path, ...]
    tensors: Mapping[str, Tensor]
    readable: bool


@dataclass(frozen=True, slots=True)
class FolderCheck:
    """A model folder: its sets of weights, the main one first, and what is wrong with the files."""

    folder: Path
    manifest: Manifest | None
    sets: tuple[WeightSet, ...]
    findings: tuple[Finding, ...]


def is_model_folder(path: Path) -> bool:
    """Whether a folder holds weights as loaders read them, or says that it did when it was written."""
    names = [entry.name for entry in files_in(path, lambda name: name.endswith((SUFFIX, INDEX_SUFFIX)) or name == MANIFEST)]
    weights = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX)) and not SHARD.fullmatch(name)]
    usual = any(name.endswith(INDEX_SUFFIX) or name in (SINGLE, EMA) or safetensors_part(name) for name in weights)
    if not usual and any(not format_of(match).is_loaded for match in recognise(path)):
        # A value head or an adapter beside pytorch_model.bin, or files of ranks, is not the model.
        weights = []
    return MANIFEST in names or (bool(weights) and not any(SHARD.fullmatch(name) for name in names))


def check_folder(folder: Path, files: Files) -> FolderCheck:
    """Check every weights file of a folder by its header, and all that lists files: index and manifest."""
    found: list[Finding] = []
    manifest = _manifest(folder, found)
    names = [path.name for path in files_in(folder, lambda name: name.endswith(SUFFIX))]
    indexes = files_in(folder, lambda name: name.endswith(INDEX_SUFFIX))
    headers = {name: _entries(folder / name, files, found) for name in names}
    sets: list[WeightSet] = []
    broken: set[str] = set()
    for index in list(indexes):
        mapping = _weight_map(index, found)
        if mapping is None:
            indexes.remove(index)
            broken.add(index.name)
            continue
        for file in set(mapping.values()) - set(headers):
            if is_file(folder / file):
                headers[file] = _entries(folder / file, files, found)
        found += list(_index_findings(mapping, headers)) or _total_findings(index, mapping, headers)
        for file in unlisted_parts(mapping.values()):
            found.append(finding("part-of-set", f"the index does not list {file}, which other names imply", file=index.name))
        used = sorted({file for file in mapping.values() if file in headers})
        complete = set(mapping.values()) <= set(headers)
        name = _name_of(used[0] if len(used) == 1 else index.name, SUFFIX if len(used) == 1 else INDEX_SUFFIX)
        sets.append(_set(name, index, folder, used, headers, found, complete=complete))
    grouped = {path.name for weights in sets for path in weights.files}
    alone = [name for name in names if name not in grouped]
    stale = [name for name in alone if _is_stale(name, names, {index.name for index in indexes}, manifest)]
    found += [finding("stale-file", "belongs to no index, and loaders may read it", file=name) for name in stale]
    parts: dict[str, list[str]] = {}
    for name in alone:
        part = safetensors_part(name)
        if part is None or part.parts == 1:
            refused = part_error(folder / name, Folders()) or share_error(headers[name] or {}, folder / name)
            if refused is not None:
                found.append(finding("part-of-set", _told(refused), file=name))
            sets.append(_set(_name_of(name, SUFFIX), None, folder, [name], headers, found))
        elif name not in stale:
            parts.setdefault(part.stem, []).append(name)
    for stem, members in parts.items():
        index_name = f"{stem}{INDEX_SUFFIX}"
        if index_name not in broken and not any(item.file == index_name for item in found):
            found.append(finding("missing-index", f"{len(members)} of {_count(members[0])} parts and no {index_name}", file=index_name))
        sets.append(_set(_name_of(members[0], SUFFIX), None, folder, members, headers, found))
    for weights in sets:
        empty = placeholders({name: tensor.shape for name, tensor in weights.tensors.items()})
        if empty:
            text = f"{len(empty)} of {len(weights.tensors)} tensors have no elements: ZeRO stage 3 leaves such placeholders"
            place = weights.index or (weights.files[0] if weights.files else None)
            found.append(finding("empty-weights", text, tensor=empty[0], file=place.name if place else None))
    sets.sort(key=lambda weights: _rank(weights, manifest))
    for weights in sets[1:]:
        listed = manifest is not None and all(path.name in (*manifest.outputs, *manifest.side_files) for path in weights.files)
        if not listed and (weights.name != "ema" or manifest is not None):
            held = f"{len(weights.tensors)} tensors" if weights.readable else "unreadable"
            name = weights.index.name if weights.index is not None else weights.files[0].name
            rival = could_be_model(name) and name not in stale and not holds_same(sets[0].tensors, weights.tensors)
            text = _rival(sets[0]) if rival else f"beside the model ({held})"
            code = "other-model" if rival else "other-weights"
            found.append(finding(code, text, file=few([path.name for path in weights.files], 2)))
    found += [*check_beside(folder), *(check_changed(folder, manifest.side_checksums) if manifest is not None else ())]
    if sets:
        found += _in_other_formats(folder, sets[0], manifest, files)
        stage = stage_error(folder, Folders()) or stage_trouble(folder, sets[0].tensors, files, lambda match: format_of(match).is_loaded)
        found += [finding("part-of-set", _told(stage))] if stage is not None else []
    return FolderCheck(folder, manifest, tuple(sets), tuple(found))


def _in_other_formats(folder: Path, main: WeightSet, manifest: Manifest | None, files: Files) -> Iterator[Finding]:
    """What is said of weights in other formats: whether they are the model once more is told by samples."""
    written = (*manifest.outputs, *manifest.side_files) if manifest is not None else ()
    indexed = is_file(folder / TORCH_INDEX)
    # The shards that were merged here are the source, and no model by themselves.
    shards = {path.name for match in recognise(folder) if format_of(match).is_sharded for path in match.files}
    for path in files_in(folder, lambda name: OTHER_FORMAT.fullmatch(name) or could_be_model(name)):
        name = path.name
        part = part_name(name)
        if (
            name in shards
            or name in written
            or name.endswith((SUFFIX, ".json"))
            or is_state_file(name)
            or (indexed and part is not None and part.parts > 1)
        ):
            continue
        rival = could_be_model(name)
        if rival and is_copy_of(path, main.tensors, files):
            yield finding("other-weights", "the same model again: samples of all tensors are equal", file=name)
        elif rival:
            yield finding("other-model", _rival(main), file=name)
        else:
            yield finding("other-weights", "weights in another format, not checked", file=name)
    if indexed and is_copy_of(folder / TORCH_INDEX, main.tensors, files):
        yield finding("other-weights", "the same model again: samples of all tensors are equal", file=TORCH_INDEX)
    elif indexed:
        yield finding("other-model", _rival(main), file=TORCH_INDEX)


def _rival(main: WeightSet) -> str:
    read = main.index.name if main.index is not None else few([path.name for path in main.files], 1)
    return f"this could also be the model, with different values: {read} was checked"


def _count(member: str) -> int:
    part = safetensors_part(member)
    return part.parts if part else 1


def _told(error: CkptError) -> str:
    return f"{error.message}; expected {error.expected}" if error.expected else error.message


def _manifest(folder: Path, found: list[Finding]) -> Manifest | None:
    """The manifest, after comparing the files that it lists with those that are there."""
    try:
        manifest = read_manifest(folder)
    except CkptError as error:
        found.append(unread("damaged-manifest", error, MANIFEST))
        return None
    if manifest is None:
        return None
    for name, size in manifest.outputs.items():
        status = status_of(folder / name) if stays_inside(name) else None
        if status is None or not stat.S_ISREG(status.st_mode):
            found.append(finding("missing-file", f"the manifest lists it with {size} bytes", file=name))
        elif (now := status.st_size) != size:
            found.append(finding("changed-size", f"{now} bytes, but {size} were written", file=name, bytes=now, expected=size))
    absent = [name for name in manifest.side_files if not stays_inside(name) or not is_file(folder / name)]
    found += [finding("missing-file", "the manifest lists it", file=name) for name in absent]
    return manifest


def _entries(path: Path, files: Files, found: list[Finding]) -> Mapping[str, Tensor] | None:
    """The tensors of a file by its header, None (and a finding) if it cannot be read."""
    try:
        source = files.source(path)
        header = read_header(source)
        refuse_shard(header.metadata)
        entries = {entry.name: described_entry(entry, source) for entry in header.entries}
        if not entries:
            found.append(finding("empty-file", "no tensor is in it", file=path.name))
        return entries
    except PartOfSet as error:
        found.append(finding("part-of-set", _told(error), tensor=error.tensor, file=path.name))
        return None
    except Unsupported as error:
        found.append(finding("unread-file", error.message, tensor=error.tensor, file=path.name))
        return None
    except CkptError as error:
        found.append(unread("damaged-file", error, path.name))
        return None


def _weight_map(index: Path, found: list[Finding]) -> dict[str, str] | None:
    """Tensor name -> file name as an index has it, None (and a finding) if it is no index."""
    try:
        return listed_files(index, SUFFIX)
    except CkptError as error:
        found.append(unread("damaged-index", error, index.name))
        return None


def _index_findings(mapping: Mapping[str, str], headers: Mapping[str, Mapping[str, Tensor] | None]) -> Iterator[Finding]:
    """Where an index and the headers of its files disagree. Files that cannot be read say nothing."""
    for file in sorted(set(mapping.values()) - set(headers)):
        count = sum(owner == file for owner in mapping.values())
        yield finding("missing-file", f"the index says that it holds {count} tensors", file=file)
    owners: dict[str, list[str]] = {}
    for file in sorted(set(mapping.values()) & set(headers)):
        for name in headers[file] or ():
            owners.setdefault(name, []).append(file)
    for name, holders in owners.items():
        if len(holders) > 1:
            yield finding("duplicate-tensor", f"{' and '.join(holders)} hold it", tensor=name, file=holders[0])
        elif mapping.get(name) != holders[0]:
            said = f"the index says {mapping[name]}" if name in mapping else "the index does not list it"
            yield finding("misplaced-tensor", f"{said}, and it is here", tensor=name, file=holders[0])
    for name, owner in mapping.items():
        if name not in owners and headers.get(owner) is not None:
            yield finding("misplaced-tensor", "the index says that it is here, and no file holds it", tensor=name, file=owner)


def _total_findings(index: Path, mapping: Mapping[str, str], headers: Mapping[str, Mapping[str, Tensor] | None]) -> list[Finding]:
    """An index that agrees with all its files about where tensors are, and names another total size."""
    readable = [held for file in set(mapping.values()) if (held := headers.get(file)) is not None]
    total, listed = sum(tensor.nbytes for held in readable for tensor in held.values()), _total_size(index)
    if listed is None or listed == total or len(readable) < len(set(mapping.values())):
        return []
    return [finding("index-total", f"{listed} bytes in the index, {total} in the files", file=index.name, bytes=total, listed=listed)]


def _total_size(index: Path) -> int | None:
    metadata = parse_json(read_small(index), "the index").get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, bool) or not isinstance(total, (int, float)) or (isinstance(total, float) and not math.isfinite(total)):
        return None
    return int(total)


def _is_stale(name: str, names: Sequence[str], indexes: set[str], manifest: Manifest | None) -> bool:
    """Whether a file that no index lists looks like one that loaders would read: a part, or the single file beside an index."""
    if manifest is not None and name in (*manifest.outputs, *manifest.side_files):
        return False
    part = safetensors_part(name)
    if part is None:
        return f"{name.removesuffix(SUFFIX)}{INDEX_SUFFIX}" in indexes
    return manifest is not None or f"{part.stem}{INDEX_SUFFIX}" in indexes or f"{part.stem}{SUFFIX}" in names


def _set(
    name: str,
    index: Path | None,
    folder: Path,
    members: Sequence[str],
    headers: Mapping[str, Mapping[str, Tensor] | None],
    found: list[Finding],
    *,
    complete: bool = True,
) -> WeightSet:
    tensors: dict[str, Tensor] = {}
    for member in members:
        for key, tensor in (headers[member] or {}).items():
            if index is None and key in tensors:
                found.append(finding("duplicate-tensor", f"{members[0]} or another part also holds it", tensor=key, file=member))
            tensors.setdefault(key, tensor)
    readable = complete and all(headers[member] is not None for member in members)
    return WeightSet(name, index, tuple(folder / member for member in members), tensors, readable)


def wanted_index(file: str) -> str:
    """The index that a part should have; the name itself for other files."""
    part = safetensors_part(file)
    return f"{part.stem}{INDEX_SUFFIX}" if part else file


def _name_of(file: str, suffix: str) -> str:
    """What a component is called: as its file, but for those with usual names."""
    usual = {INDEX: "model", SINGLE: "model", EMA: "ema"}
    stem = file.removesuffix(suffix)
    part = safetensors_part(file)
    return usual.get(file) or (part.stem if part else stem)


def _rank(weights: WeightSet, manifest: Manifest | None) -> tuple[bool, int, str]:
    """What was written comes first, then what loaders look for first."""
    written = manifest is not None and any(path.name in manifest.outputs for path in weights.files)
    usual = ("model", "ema")
    return not written, usual.index(weights.name) if weights.name in usual else len(usual), weights.name
