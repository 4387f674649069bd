"""Names of files that are one part of a set: ``model-00002-of-00003.safetensors``, ``zero_pp_rank_0_...``, ``rank0.pt``.

A part alone is a well-formed weights file; only its name, its siblings or its content show that it is not a model. This module has
the names; `sets.contents` reads what a file itself says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ckpt_cli.errors import CkptError, PartOfSet
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.sets.indexes import index_beside, listed_files
from ckpt_cli.formats.sets.kinds import (
    ADAPTERS,
    AFTER_SUFFIX,
    BY_CONTENT,
    COUNTER,
    MARKS,
    MAX_DIGITS,
    MAX_PARTS,
    NUMBERED,
    OF,
    OF_ALL,
    OF_PROCESSES,
    ONE_WRITER,
    OUTSIDE,
    PART_NAME,
    RANK,
    RANK_FOLDER,
    SHARD,
    SHARED,
    SHOWN,
    SMALL,
    TORCHTUNE,
    TUTEL,
    TUTEL_SHARED,
    UNIVERSAL,
    WAYS,
    WEAK,
    WHOLE_NAMES,
    SetKind,
)
from ckpt_cli.formats.sets.one_rank import is_of_one_rank
from ckpt_cli.names import few


@dataclass(frozen=True, slots=True)
class SetMember:
    """One file of a set: its number, how many there are (None: unknown), and its siblings that are there, by number.

    ``place``: where the number stands in the name.
    """

    path: Path
    kind: SetKind
    number: int
    count: int | None
    siblings: Mapping[int, Path]
    place: tuple[int, int] | None = None

    @property
    def is_alone(self) -> bool:
        return len(self.siblings) == 1

    @property
    def has_neighbour(self) -> bool:
        """Whether number 0 is there, or one next to this: not so for models of ranks 64 and 128, or with 12 and 24 layers."""
        return not self.is_alone and any(number in self.siblings for number in (0, self.number - 1, self.number + 1))

    @property
    def is_indexed(self) -> bool:
        """Whether such files have an index: parts of a Hugging Face model, no ranks or shards of another program."""
        marked = any(mark.regex.search(self.path.name) for mark in (RANK, SHARD))
        return self.kind is OF and not marked and self.path.suffix in (".safetensors", ".bin")

    @property
    def missing(self) -> tuple[int, ...]:
        """The first missing numbers, by names: a few more than are shown."""
        if self.kind.unit in ("layer", "parameter", "rest", "shared") or self.kind.regex is RANK_FOLDER:
            # Layers without weights have no file, and of folders only one was looked at.
            return ()
        from_one = self.kind is OF and 0 not in self.siblings and self.number > 0 and "rank" not in self.path.name
        first = 1 if from_one else 0
        last = first + self.count if self.count is not None else max(self.siblings) + 1
        return tuple(islice((number for number in range(first, last) if number not in self.siblings), SHOWN + 1))


class PartName(NamedTuple):
    """The fields of ``model-00002-of-00003.safetensors``."""

    stem: str
    part: int
    parts: int
    suffix: str


def part_name(name: str) -> PartName | None:
    """What the name of a part of a Hugging Face model says; None for other names."""
    fields = PART_NAME.fullmatch(name)
    if fields is None or not any(found.start("part") == fields.start("part") for found in _counts(name)):
        return None
    return PartName(fields["stem"], int(fields["part"]), int(fields["parts"]), fields["suffix"])


def lost_part(paths: Sequence[Path], there: Folders) -> PartOfSet | None:
    """Why files called "N of M" are no model: some are missing, or they are such as no index belongs to. None if only that is missing."""
    part = part_of(paths[0], there)
    return None if part is None or (part.is_indexed and not part.missing) else error_of(part, there)


def part_of(path: Path, there: Folders) -> SetMember | None:
    """The set that a file is one of, by its name and those beside it; None for what may be a whole model.

    The first of these that applies decides:

    =======================  ===============================================  =========================================
    what                     is a part                                        is not
    =======================  ===============================================  =========================================
    ``zero/<name>/fp32.pt``  always: one parameter (`UNIVERSAL`)
    ``non-tp.pt``            always: without the layers (`OUTSIDE`)
    ``x-shared.pt``          beside ``x-rank-0.pt``, if that is a part        otherwise
    ``x.pth.rank0``          always, so is ``x.pth.global`` (`AFTER_SUFFIX`)
    names of one program     always (`WHOLE_NAMES`)                           "1 in all"; number 0 alone, where content
                                                                              decides (``consolidated.00.pth``)
    "N of M" (`OF`)          always                                           M is 1; after a `COUNTER` (``epoch_3_of_10``),
                                                                              unless as transformers writes it (`NUMBERED`)
    a rank (`RANK`)          below `SMALL`, padded with 0, of parallelism     larger and by itself (``svd_rank_64.pt``);
                             (``tp_rank``), or beside a neighbour             of LoRA factors; ``world_size_1``; number 0 alone
                                                                              where config.json says so (`one_rank`)
    other marks (`MARKS`)    always                                           of LoRA factors; ``world_size_1``
    weak marks (`WEAK`)      beside a neighbour (``gpu0.pt``, ``gpu1.pt``)    otherwise (``layers12.pt``, ``layers24.pt``)
    the folder               ``mp_rank_00/`` always; ``rank0/`` beside a      files of `BY_CONTENT`
                             neighbour with a file of the same name
    =======================  ===============================================  =========================================

    A neighbour has number 0 or the next one in either direction. The content of a file comes after its name (`sets.contents`).
    """
    folder = path.parent
    if UNIVERSAL.fullmatch(path.name) and folder.parent.name == "zero":
        return SetMember(path, SetKind(UNIVERSAL, "a DeepSpeed universal checkpoint", "parameter"), 0, None, {0: path})
    if OUTSIDE.regex.fullmatch(path.name):
        return SetMember(path, OUTSIDE, 0, None, {0: path})
    if (shared := SHARED.regex.fullmatch(path.name)) and (ranks := _ranks_beside(path, shared, there)):
        return SetMember(path, SHARED, OF_ALL, None, {OF_ALL: path, **ranks})
    if (tutel := AFTER_SUFFIX.fullmatch(path.name)) is not None:
        return _part(path, TUTEL, tutel, there) if tutel["part"] else SetMember(path, TUTEL_SHARED, OF_ALL, None, {OF_ALL: path})
    for kind in WHOLE_NAMES:
        fields = kind.regex.fullmatch(path.name)
        if fields:
            part = _part(path, kind, fields, there)
            return None if kind.content_decides and part.number == 0 and len(part.siblings) == 1 else part if part.count != 1 else None
    counts = [_part(path, OF, fields, there) for fields in _counts(path.name) if len(fields["part"]) <= MAX_DIGITS]
    several = next((part for part in counts if part.count != 1), None)
    if several is not None:
        return several
    counted = {place for fields in OF.regex.finditer(path.name) for place in range(*fields.span())}
    for kind in (TORCHTUNE, *MARKS, WEAK):
        fields = next((found for found in kind.regex.finditer(path.name) if found.start("part") not in counted), None)
        if fields is None or len(fields["part"]) > MAX_DIGITS:
            continue
        part = _part(path, kind, fields, there)
        if kind is RANK and part.number == 0 and part.is_alone and is_of_one_rank(folder, there):
            continue
        if part.count != 1 and not _says_otherwise(part) and (part.has_neighbour or _counts_alone(part)):
            return part
    if path.name in BY_CONTENT:
        return None
    if RANK_FOLDER.fullmatch(folder.name):
        return SetMember(path, SetKind(RANK_FOLDER, f"model parallelism ({folder.name})", "rank"), 0, None, {0: path})
    return _part_of_folders(path, there)


def _ranks_beside(path: Path, shared: re.Match[str], there: Folders) -> dict[int, Path]:
    """The files of ranks that a file of what they share has beside it: of its name, but for the rank."""
    like = re.compile(re.escape(shared["stem"]) + r"rank[-_.]?(\d{1,12})" + re.escape(shared["suffix"]), re.ASCII)
    ranks = {int(found[1]): entry for entry in there.entries(path.parent) if (found := like.fullmatch(entry.name))}
    return ranks if ranks and part_of(ranks[min(ranks)], there) is not None else {}


def _part_of_folders(path: Path, there: Folders) -> SetMember | None:
    """Files of one name in folders of ranks or shards: ``rank0/model.pt`` beside ``rank1/model.pt``."""
    folder = path.parent
    for kind in (RANK, SHARD):
        fields = kind.regex.fullmatch(folder.name)
        if fields:
            part = _part(folder, kind, fields, there)
            like = {number: sibling / path.name for number, sibling in part.siblings.items() if there.is_file(sibling / path.name)}
            found = SetMember(path, SetKind(RANK_FOLDER, f"folders like {folder.name}", kind.unit), part.number, None, like)
            if found.has_neighbour and not _says_otherwise(replace(part, path=folder / path.name)):
                return found
    return None


def part_error(path: Path, there: Folders) -> CkptError | None:
    """Why a file alone is not a model, by its own name or that of a link's target; None if nothing says so."""
    part = part_of(path, there)
    if part is None and os.path.islink(path):
        part = part_of(Path(os.path.realpath(path)), there)
    return None if part is None else error_of(part, there)


def error_of(part: SetMember, there: Folders) -> PartOfSet:
    """The error for a part: the set, what is missing, what to do."""
    name, unit = part.path.name, part.kind.unit
    if unit == "parameter":
        message = f"{part.path.parent.name}/{name} is one parameter of {part.kind.writer}"
    elif unit == "rest":
        message = f"{name} is {part.kind.writer} without the layers, which are in files of their own (tp_00_00.pt)"
    elif unit == "shared":
        message = f"{name} is one file of a set: it holds what the ranks share, and not what each has of its own"
    elif part.count is not None:
        message = f"{name} is one of {part.count} files of {part.kind.writer}"
    else:
        message = f"{name} is one file of a set ({part.kind.writer}), {unit} {part.number}"
    missing = [_sibling_name(part, number) for number in part.missing]
    listed = f"{', '.join(missing[:SHOWN])} and others" if len(missing) > SHOWN else few(missing)
    expected = f"the whole set; not here: {listed}" if missing else None
    if expected is None and len(part.siblings) > 1:
        shown = {number: path.name if path.parent == part.path.parent else str(path) for number, path in part.siblings.items()}
        others = [name for number, name in sorted(shown.items()) if number != part.number]
        expected = f"the whole set; beside it: {few(others)}"
    return PartOfSet(message, path=part.path, expected=expected or "the whole set", hint=_hint(part, missing, there))


def unlisted_parts(files: Iterable[str]) -> list[str]:
    """Parts that names such as "x-00001-of-00003.bin" imply and that are not among the files; the first one of each set."""
    sets: dict[tuple[str, str, int, int], set[int]] = {}
    for name in {file.rpartition("/")[2] for file in files}:
        for fields in _counts(name):
            (start, stop), count = fields.span("part"), int(fields["parts"][:MAX_DIGITS])
            if stop - start <= MAX_DIGITS and int(fields["part"]) <= count <= MAX_PARTS:
                sets.setdefault((name[:start], name[stop:], stop - start, count), set()).add(int(fields["part"]))
    absent = []
    for (before, after, width, count), numbers in sorted(sets.items()):
        first = 0 if 0 in numbers else 1
        missing = next((number for number in range(first, first + count) if number not in numbers), None)
        if missing is not None:
            absent.append(f"{before}{missing:0{width}d}{after}")
    return absent


def _part(path: Path, kind: SetKind, fields: re.Match[str], there: Folders) -> SetMember:
    start, stop = fields.span("part")
    if stop - start > MAX_DIGITS:
        return SetMember(path, kind, MAX_PARTS, None, {MAX_PARTS: path})
    like = re.compile(re.escape(path.name[:start]) + r"(\d{1,12})" + re.escape(path.name[stop:]), re.ASCII)
    siblings = {int(found[1]): entry for entry in there.entries(path.parent) if (found := like.fullmatch(entry.name))}
    number = int(fields["part"])
    text = fields.groupdict().get("parts")
    count = int(text[:MAX_DIGITS]) if text else None
    if ONE_WRITER.search(path.name) and kind.unit == "rank":
        count = 1
    return SetMember(path, kind, number, count, {number: path, **siblings}, (start, stop))


def _counts(name: str) -> Iterator[re.Match[str]]:
    """Where a name says "N of M", N being no count of epochs and the like."""
    for fields in OF.regex.finditer(name):
        start = fields.start("part")
        if NUMBERED.match(name, max(start - 1, 0)) or not any(word.end() == start for word in COUNTER.finditer(name, 0, start)):
            yield fields


def _counts_alone(part: SetMember) -> bool:
    """Whether a mark without a neighbour is one: not a weak one, nor a rank that is rather that of a decomposition."""
    if part.kind is TORCHTUNE:
        return part.number > 1
    if part.kind is not RANK or part.place is None:
        return part.kind is not WEAK
    padded = part.path.name[part.place[0]] == "0"
    return part.number < SMALL or padded or bool(OF_PROCESSES.search(part.path.name, 0, part.place[0]))


def _says_otherwise(part: SetMember) -> bool:
    """Whether the number is the rank of LoRA factors."""
    name = f"{part.path.parent.name}/{part.path.name}"
    return part.kind.unit == "rank" and bool(ADAPTERS.search(name)) and part.number > 0 and 0 not in part.siblings


def _sibling_name(part: SetMember, number: int) -> str:
    if part.place is None:
        return f"{part.kind.unit} {number}"
    start, stop = part.place
    width = stop - start if part.path.name[start] == "0" else 0
    return f"{part.path.name[:start]}{number:0{width}d}{part.path.name[stop:]}"


def _hint(part: SetMember, missing: Sequence[str], there: Folders) -> str:
    """What to do next; every hint states only what was checked."""
    index = index_beside(part.path, there)
    if index is not None:
        absent = [file for file in sorted(listed_files(index)) if not there.is_file(index.parent / file)]
        return f"pass {index}" if not absent else f"{index.name} lists the files; get the missing ones: {few(absent)}"
    if part.kind.unit == "parameter":
        return "pass the folder of the whole save"
    if part.is_indexed:
        what = "the other files and the index" if missing else "the index that belongs to these files"
        advice = f"get {what} from where the model came from"
    elif part.is_alone and part.count is None and part.number > 0 and part.kind.unit == "part":
        advice = "get the other files"
    else:
        advice = WAYS.get(part.kind.writer, "put the set together with the program that wrote it, and save one state dict")
    certain = part.place is None or NUMBERED.search(part.path.name) or (part.kind is not OF and part.count is not None)
    if certain or not part.is_alone or _is_one_of_several(part.path, there):
        return advice
    several = len(RANK.regex.findall(part.path.name)) > 1
    return f"{advice}; if it is a whole model, rename it {f'to model{part.path.suffix}' if several else 'without the number'}"


def _is_one_of_several(path: Path, there: Folders) -> bool:
    """Whether there are files of other ranks of any kind in its name: ``tp_rank_01`` beside ``tp_rank_00``."""
    alike = RANK.regex.sub("rank", path.name)
    return any(other != path and RANK.regex.sub("rank", other.name) == alike for other in there.entries(path.parent))
