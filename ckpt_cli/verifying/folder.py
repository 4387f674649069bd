"""Header level of `verify`: the files of a model folder, their headers, the index, and the manifest. No weight byte is read."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.discover.beside.files import OTHER_FORM, could_be_model, weights_in
from ckpt_cli.discover.beside.models import other_values, unequal_values
from ckpt_cli.discover.beside.same_weights import difference, difference_from
from ckpt_cli.discover.beside.stages import stage_trouble
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders, files_in, is_file, status_of, stays_inside
from ckpt_cli.files.leftovers.written_over import is_of_another_folder
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.manifest import Manifest, read_manifest, refuse_unfinished
from ckpt_cli.files.source import Files
from ckpt_cli.formats.registry import format_of, recognise
from ckpt_cli.formats.safetensors.index import Index, Problem
from ckpt_cli.formats.safetensors.leftovers import TORCH_INDEX, indexes_of_nothing, leftover_text, listing_nothing
from ckpt_cli.formats.safetensors.names import EMA, SINGLE, SUFFIX, is_index, safetensors_part
from ckpt_cli.formats.safetensors.scan import WeightSet, part_problem, scan
from ckpt_cli.formats.safetensors.shards import SHARD
from ckpt_cli.formats.sets.names import part_name
from ckpt_cli.formats.sets.stages import stage_error
from ckpt_cli.formats.torch_files.heads import is_head_alone
from ckpt_cli.formats.training_state_names import is_state_file
from ckpt_cli.hub.assets import files_of
from ckpt_cli.hub.beside.named import named_by
from ckpt_cli.names import few, plural
from ckpt_cli.paths import absolute
from ckpt_cli.results.verify import Finding
from ckpt_cli.verifying.adapter import check_on_top
from ckpt_cli.verifying.beside import check_beside, check_changed, check_sizes_beside, check_tensors_beside
from ckpt_cli.verifying.findings import finding, unread

OTHER_FORMAT = re.compile(r"pytorch_model.*\.bin|tf_model\.h5|.*\.gguf|flax_model\.msgpack|consolidated.*\.pth", re.ASCII)

MODEL, TORCH_MODEL = "model", "pytorch_model.bin"
"""The set of weights that transformers loads of a folder, and the file where there is none."""


@dataclass(frozen=True, slots=True)
class FolderCheck:
    """A model folder: its sets of weights, the main one first, and what is wrong with the files."""

    folder: Path
    manifest: Manifest | None
    sets: tuple[WeightSet, ...]
    findings: tuple[Finding, ...]


def is_model_folder(path: Path) -> bool:
    """Whether a folder holds weights as loaders read them, or says that it did when it was written."""
    names = [entry.name for entry in files_in(path, lambda name: name.endswith(SUFFIX) or is_index(name) or name == MANIFEST)]
    weights = [name for name in names if name != MANIFEST and not SHARD.fullmatch(name)]
    if any(not format_of(match).is_loaded for match in recognise(path)):
        lost = {index.name for index in indexes_of_nothing(path, Folders())}
        weights = [name for name in weights if name not in lost]
    usual = any(is_index(name) or name in (SINGLE, EMA) or safetensors_part(name) for name in weights)
    if not usual and any(not format_of(match).is_loaded for match in recognise(path)):
        # A value head or an adapter beside pytorch_model.bin, or files of ranks, is not the model.
        weights = []
    return (MANIFEST in names and not _is_copied(path)) or (bool(weights) and not any(SHARD.fullmatch(name) for name in names))


def _is_copied(folder: Path) -> bool:
    try:
        manifest = read_manifest(folder)
    except CkptError:
        return False  # what is damaged is told
    return manifest is not None and is_copied_manifest(folder, manifest)


def is_copied_manifest(folder: Path, manifest: Manifest) -> bool:
    """Whether a folder has weights, and none of those that its manifest lists: it was copied there with other files of a base."""
    return is_of_another_folder(folder, manifest) and bool(recognise(folder))


def check_folder(folder: Path, files: Files) -> FolderCheck:
    """Check every weights file of a folder by its header, and all that lists files. Raises IncompleteError for half an output."""
    refuse_unfinished(folder)
    found: list[Finding] = []
    manifest = _manifest(folder, found)
    written = None if manifest is None else (*manifest.outputs, *manifest.side_files)
    scanned = scan(folder, files, written)
    listed = {item.file for item in found}
    found += [_finding(problem) for problem in scanned.problems if problem.code != "missing-index" or problem.file not in listed]
    stale = {problem.file for problem in scanned.problems if problem.code == "stale-file"}
    sets = sorted(scanned.sets, key=lambda weights: _rank(weights, manifest))
    of_others = _named_by_others(folder)
    for weights in sets[1:]:
        known = all(path.name in (*(written or ()), *of_others) for path in weights.files)
        if not known and (weights.name != "ema" or manifest is not None):
            held = plural(len(weights.tensors), "tensor") if weights.readable else "unreadable"
            name = weights.index.name if weights.index is not None else weights.files[0].name
            differs = _difference(sets[0], weights) if could_be_model(name) and name not in stale else None
            if differs is None and OTHER_FORM.fullmatch(name) and name not in stale and sets[0].readable and weights.readable:
                differs = _values_apart(unequal_values(sets[0].tensors, weights.tensors))
            text = _rival(sets[0], differs) if differs is not None else f"beside the model ({held})"
            code = "other-model" if differs is not None else "other-weights"
            found.append(finding(code, text, file=few([path.name for path in weights.files], 2)))
    found += check_beside(folder, manifest.side_files if manifest is not None else ())
    if manifest is not None:
        found += [*check_changed(folder, manifest.side_checksums), *check_sizes_beside(folder, manifest, files)]
    model = next((weights.tensors for weights in sets if weights.name == MODEL), {})
    found += check_on_top(folder, model, sets, manifest)
    found += check_tensors_beside(folder, model, files)
    if sets:
        found += _in_other_formats(folder, sets[0], written or (), files)
        found += _not_used(folder, sets, [*(written or ()), *of_others, *(item.file for item in found if item.file)], files)
        stage = stage_error(folder, Folders()) or stage_trouble(folder, sets[0].tensors, files, lambda match: format_of(match).is_loaded)
        found += [_finding(part_problem(stage))] if stage is not None else []
    return FolderCheck(folder, manifest, tuple(sets), tuple(found))


def _named_by_others(folder: Path) -> Collection[str]:
    """The files that are a part of others beside the weights."""
    with contextlib.suppress(CkptError):  # what cannot be read is found by other checks
        return named_by(files_of(folder)).files
    return ()


def _in_other_formats(folder: Path, main: WeightSet, written: Collection[str], files: Files) -> Iterator[Finding]:
    """What is said of weights in other formats: whether they are the model once more is told by samples."""
    lost = listing_nothing(folder / TORCH_INDEX, Folders()) is not None and TORCH_INDEX not in written
    if lost:
        yield finding("leftover-index", leftover_text(folder / TORCH_INDEX), file=TORCH_INDEX)
    indexed = is_file(folder / TORCH_INDEX) and not lost
    # The shards that were merged here are the source, and no model by themselves.
    shards = {path.name for match in recognise(folder) if format_of(match).is_sharded for path in match.files}
    others = [
        path
        for path in files_in(folder, lambda name: OTHER_FORMAT.fullmatch(name) or could_be_model(name))
        if not (path.name in shards or path.name in written or path.name.endswith((SUFFIX, ".json")) or is_state_file(path.name))
        and not (indexed and (part := part_name(path.name)) is not None and part.parts > 1)
        and not is_head_alone(path, Folders())
    ]
    for path in (*others, *([folder / TORCH_INDEX] if indexed else [])):
        if path.name != TORCH_INDEX and not could_be_model(path.name):
            values = other_values(path, main.tensors, files) if main.readable and OTHER_FORM.fullmatch(path.name) else None
            if (differs := _values_apart(values)) is not None:
                yield finding("other-model", _rival(main, differs), file=path.name)
            else:
                told = "weights in another format, not checked" if values is None else "the same model in another dtype: samples are equal"
                yield finding("other-weights", told, file=path.name)
        elif (differs := _unread(main) or difference_from(path, main.tensors, files)) is None:
            yield finding("other-weights", "the same model again: samples of all tensors are equal", file=path.name)
        else:
            yield finding("other-model", _rival(main, differs), file=path.name)


def _not_used(folder: Path, sets: Sequence[WeightSet], known: Collection[str], files: Files) -> Iterator[Finding]:
    """What is said of weights that are neither in a set, nor another form of the model: a head, a projector, an average."""
    held = [path for weights in sets for path in weights.files]
    held += [path for match in recognise(folder) if not format_of(match).is_loaded for path in match.files]
    used = {absolute(path) for path in (*held, *(folder / name for name in known))}
    for path in weights_in(folder, used, files):
        if path.suffix != ".json":
            yield finding("other-weights", "weights beside the model, and no part of it", file=path.name)


def _difference(main: WeightSet, other: WeightSet) -> str | None:
    """How a set of weights differs from the main one, or why they were not compared; None if samples of all tensors are equal."""
    return _unread(main) or _unread(other) or difference(main.tensors, other.tensors)


def _values_apart(names: Sequence[str] | None) -> str | None:
    """What is said of tensors that have other values, also where they are rounded."""
    return f"with other values of {names[0]} (samples differ)" if names else None


def _unread(weights: WeightSet) -> str | None:
    return None if weights.readable else f"which was not compared: {_name(weights)} cannot be read whole"


def _rival(main: WeightSet, differs: str) -> str:
    return f"this could also be the model, {differs}: {_name(main)} was checked"


def _name(weights: WeightSet) -> str:
    return weights.index.name if weights.index is not None else few([path.name for path in weights.files], 1)


def is_of_torch(paths: Sequence[Path]) -> bool:
    """Whether these are the files of torch that transformers loads of a folder."""
    return any(path.name in (TORCH_MODEL, TORCH_INDEX) for path in paths)


def index_findings(paths: Sequence[Path], files: Files) -> list[Finding]:
    """What keeps loaders from the index of files of torch, if there is one among those that a model was read from."""
    indexes = [Index.read(path, ".bin", files) for path in paths if path.name == TORCH_INDEX]
    return [_finding(problem) for index in indexes for problem in index.for_loaders()]


def _finding(problem: Problem) -> Finding:
    if problem.text is None and problem.error is not None:
        return unread(problem.code, problem.error, str(problem.file))
    return finding(problem.code, str(problem.text), tensor=problem.tensor, file=problem.file, **problem.numbers)


def _manifest(folder: Path, found: list[Finding]) -> Manifest | None:
    """The manifest, after comparing the files that it lists with those that are there."""
    try:
        manifest = read_manifest(folder)
    except CkptError as error:
        found.append(unread("damaged-manifest", error, MANIFEST))
        return None
    if manifest is None:
        return None
    if is_copied_manifest(folder, manifest):
        text = f"it lists {few(list(manifest.outputs), 3)}, and nothing of this is here: it is that of another folder, and was not used"
        found.append(finding("other-manifest", text, file=MANIFEST))
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


def _rank(weights: WeightSet, manifest: Manifest | None) -> tuple[bool, int, str]:
    """What was written comes first, then what loaders look for first."""
    written = manifest is not None and any(path.name in manifest.outputs for path in weights.files)
    usual = ("model", "ema")
    return not written, usual.index(weights.name) if weights.name in usual else len(usual), weights.name
