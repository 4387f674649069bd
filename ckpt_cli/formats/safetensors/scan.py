"""One look at a Hugging Face folder: its sets of weights by headers and indexes, and everything that is wrong with these files.

Whoever reads a set raises the first problem that keeps it from being read; `verify` lists them all. No weight byte is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_cli.boxes import contiguous_strides, whole
from ckpt_cli.errors import CkptError, Inconsistent, PartOfSet, Unsupported, reading
from ckpt_cli.files.folders import Folders, entries_in, files_in
from ckpt_cli.files.safetensors_file import Entry, read_header
from ckpt_cli.files.source import Files, Source
from ckpt_cli.formats.placeholders import placeholders
from ckpt_cli.formats.safetensors.index import Index, Problem
from ckpt_cli.formats.safetensors.leftovers import has_model, leftover_text, listing_nothing
from ckpt_cli.formats.safetensors.names import INDEX_SUFFIX, SUFFIX, is_index, is_whole, safetensors_part, stem_of
from ckpt_cli.formats.safetensors.two_exports import signs
from ckpt_cli.formats.sets.contents import refuse_shard, share_error
from ckpt_cli.formats.sets.names import part_error
from ckpt_cli.names import few
from ckpt_cli.tensors.tensor import Piece, Tensor

STALE = "belongs to no index, and loaders may read it"


@dataclass(frozen=True, slots=True)
class WeightSet:
    """The weight files that are loaded together, and the tensors of those that can be read, by name; ``readable``: of all."""

    name: str
    index: Path | None
    files: tuple[Path, ...]
    tensors: Mapping[str, Tensor]
    readable: bool


@dataclass(frozen=True, slots=True)
class Scan:
    """The sets of weights of a folder, and what is wrong with its files."""

    sets: tuple[WeightSet, ...]
    problems: tuple[Problem, ...]


def scan(folder: Path, files: Files, written: Collection[str] | None = None) -> Scan:
    """All safetensors files and indexes of a folder. ``written``: the files that its manifest lists, if it has one. Raises Unreadable."""
    look = _Look(folder, files)
    names = [path.name for path in files_in(folder, lambda name: name.endswith(SUFFIX))]
    indexes: dict[str, Index | None] = {}
    there = Folders()
    for path in files_in(folder, is_index):
        if path.name not in (written or ()) and has_model(names) and listing_nothing(path, there) is not None:
            look.problems.append(Problem("leftover-index", leftover_text(path), file=path.name))
            continue
        indexes[stem_of(path.name)] = None
        try:
            indexes[stem_of(path.name)] = Index.read(path, SUFFIX, files)
        except CkptError as error:
            look.problems.append(Problem("damaged-index", None, error, path.name))
    sets = [look.indexed(index) for index in indexes.values() if index is not None]
    parts: dict[str, list[str]] = {}
    for name in sorted(set(names) - {path.name for weights in sets for path in weights.files}):
        part, stem, tensors = safetensors_part(name), stem_of(name), look.tensors(name)
        stale = indexes.get(stem) is not None or (part is not None and (written is not None or f"{stem}{SUFFIX}" in names))
        if stale := stale and name not in (written or ()):
            look.problems.append(Problem("stale-file", STALE, file=name))
        if is_whole(name):
            refused = part_error(folder / name, Folders()) or share_error(tensors or {}, folder / name, files)
            # Beside a whole model it is a file that nobody loads, such as a copy that a sync left of one part.
            if refused is not None and not any(weights.index is not None and weights.readable for weights in sets):
                look.problems.append(part_problem(refused, name))
            sets.append(look.together([name]))
        elif not stale:
            parts.setdefault(stem, []).append(name)
    for stem, members in parts.items():
        if stem not in indexes and (first := safetensors_part(members[0])) is not None:
            text = f"{len(members)} of {first.parts} parts and no {stem}{INDEX_SUFFIX}"
            look.problems.append(Problem("missing-index", text, file=f"{stem}{INDEX_SUFFIX}"))
        sets.append(look.together(members))
    for weights in sets:
        empty = placeholders({name: tensor.shape for name, tensor in weights.tensors.items()})
        if empty:
            text = f"{len(empty)} of {len(weights.tensors)} tensors have no elements: ZeRO stage 3 leaves such placeholders"
            look.problems.append(Problem("empty-weights", text, file=(weights.index or weights.files[0]).name, tensor=empty[0]))
    return Scan(tuple(sets), tuple(look.problems))


def scan_set(first: Path, files: Files) -> Scan:
    """One set alone: that of an index, in whose order its tensors then are, or one file. Raises what `Index.read` raises."""
    look = _Look(first.parent, files)
    if not is_index(first.name):
        return Scan((look.together([first.name]),), tuple(look.problems))
    index = Index.read(first, SUFFIX, files)
    files.expect([first.parent / name for name in index.files])
    parts = [entry.name for entry in entries_in(first.parent) if safetensors_part(entry.name) and entry.name not in index.files]
    weights = look.indexed(index, [name for name in parts if stem_of(name) == stem_of(first.name)])
    ordered = {name: weights.tensors[name] for name in index.owners if name in weights.tensors}
    return Scan((replace(weights, tensors=ordered),), tuple(look.problems))


class _Look:
    """Reads the files of a folder, each once, and gathers what is wrong with them."""

    def __init__(self, folder: Path, files: Files) -> None:
        self.folder, self.files = folder, files
        self.problems: list[Problem] = []
        self._held: dict[str, Mapping[str, Tensor] | None] = {}

    def tensors(self, name: str) -> Mapping[str, Tensor] | None:
        """The tensors of a file by its header, None if it cannot be read."""
        if name not in self._held:
            self._held[name] = self._described(self.folder / name)
        return self._held[name]

    def _described(self, path: Path) -> Mapping[str, Tensor] | None:
        try:
            source, header = self.files.source(path), self.files.parsed(path, read_header)
            with reading(path):
                refuse_shard(header.metadata)
        except PartOfSet as error:
            self.problems.append(part_problem(error, path.name))
        except CkptError as error:
            self.problems.append(Problem("unread-file" if isinstance(error, Unsupported) else "damaged-file", None, error, path.name))
        else:
            if not header.entries:
                self.problems.append(Problem("empty-file", "no tensor is in it", file=path.name))
            return {entry.name: _tensor(entry, source) for entry in header.entries}
        return None

    def indexed(self, index: Index, unlisted: Sequence[str] = ()) -> WeightSet:
        """The files of an index; ``unlisted`` are parts of its model that it does not list."""
        missing = list(index.missing())
        lost = {problem.file for problem in missing if problem.code == "missing-file"}
        self.problems += missing
        text, hint = f"the index does not mention {few(unlisted)}", "move it away if it is from an older save"
        older = Inconsistent(text, path=index.path, hint=hint)
        self.problems += [Problem("stale-file", STALE, older, name) for name in unlisted]
        held = {name: self.tensors(name) for name in index.files if name not in lost}
        misplaced = list(index.misplaced(held))
        self.problems += misplaced
        readable = not lost and None not in held.values()
        self.problems += index.for_loaders()
        if readable and not misplaced:
            self.problems += signs(index, {file: tensors for file, tensors in held.items() if tensors is not None})
        return self._set(next(iter(held)) if len(held) == 1 else index.path.name, index.path, held, readable)

    def together(self, names: Sequence[str]) -> WeightSet:
        """Files without an index."""
        held = {name: self.tensors(name) for name in names}
        return self._set(names[0], None, held, None not in held.values())

    def _set(self, name: str, index: Path | None, held: Mapping[str, Mapping[str, Tensor] | None], readable: bool) -> WeightSet:
        tensors: dict[str, Tensor] = {}
        for file, more in held.items():
            for key, tensor in (more or {}).items():
                if tensors.setdefault(key, tensor) is not tensor and index is None:
                    self.problems.append(Problem("duplicate-tensor", f"{name} or another part also holds it", file=file, tensor=key))
        return WeightSet(stem_of(name), index, tuple(self.folder / file for file in held), tensors, readable)


def part_problem(error: CkptError, file: str | None = None) -> Problem:
    """Weights that are one part of a set."""
    text = f"{error.message}; expected {error.expected}" if error.expected else error.message
    return Problem("part-of-set", text, error, file, error.tensor)


def _tensor(entry: Entry, source: Source) -> Tensor:
    """A tensor of a safetensors file: one piece, the whole of it."""
    piece = Piece(source, entry.offset, contiguous_strides(entry.shape), whole(entry.shape))
    return Tensor(entry.name, entry.dtype, entry.shape, (piece,) if entry.nbytes else ())
