"""Whether a data file of a DCP folder was copied over another: an item says neither whose it is nor of what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ckpt_cli.boxes import Box
from ckpt_cli.errors import Inconsistent
from ckpt_cli.formats.assembly import one_piece
from ckpt_cli.formats.dcp.items import ItemReader
from ckpt_cli.formats.dcp.metadata import Catalog, CatalogTensor, Stored
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.reading import element_bytes

SAMPLE = 4096
"""Bytes that are compared in the middle and at the end of an item, where its checksums are."""

LAYOUTS = 16
"""How many places are looked at in files of one size: those of ranks are alike, or have other sizes."""

STACKED = re.compile(r"(^|\.)(layers|blocks|h|experts)\.(?![0-9])|(^|\.)experts?(\.|_|$)", re.ASCII)
"""Tensors whose first axis counts layers or experts, which may have been made of one another."""

Place = tuple[int, int]
"""Offset and length of an item."""

Held = Mapping[Place, list[tuple[CatalogTensor, Box, Stored]]]
"""What is at the places of one file; in a blob of safetensors several tensors are at one."""


def copied_notes(catalog: Catalog, used: Sequence[str], reader: ItemReader) -> list[Note]:
    """A warning about files with the same bytes that may be layers or experts made of one another.

    Raises Inconsistent if they are said to be other parts of one tensor. Nothing is read of stores where only descriptions are wanted.
    """
    held = _by_file(catalog, used)
    equals: list[str] = []
    for first, second in _alike(held, reader):
        others = [(entry, box) for entry, box, _ in (owned for owners in held[second].values() for owned in owners)]
        differing = [owned for owned in _differing(held[first], held[second]) if _tells(*owned, reader)]
        for entry, box, _ in differing:
            theirs = next((other for named, other in others if named is entry), None)
            if theirs is not None and not _may_be_equal(entry.name, box, theirs):
                text = f"{first} and {second} hold the same bytes, said to be its parts at {list(box.offset)} and {list(theirs.offset)}"
                hint = "one file was copied over the other: get both again from the nodes that wrote them"
                raise Inconsistent(text, path=reader.path(second), tensor=entry.name, expected="another part in each file", hint=hint)
        if differing:
            equals.append(f"{first} and {second}")
    if not equals:
        return []
    text = f"{few(equals, 3)} hold the same bytes: if layers or experts were not just made of one another, a file was copied over another"
    return [Note("warning", "equal-files", text)]


def _by_file(catalog: Catalog, used: Sequence[str]) -> dict[str, Held]:
    held: dict[str, dict[Place, list[tuple[CatalogTensor, Box, Stored]]]] = {file: {} for file in used}
    for entry in catalog.tensors.values():
        for box, places in entry.chunks.items():
            for stored in places:
                if stored.file in held:
                    held[stored.file].setdefault((stored.offset, stored.length), []).append((entry, box, stored))
    return {file: there for file, there in held.items() if there}


def _alike(held: Mapping[str, Held], reader: ItemReader) -> Iterator[tuple[str, str]]:
    """Two files each, the second of which has the same bytes wherever the metadata has an item of the first."""
    by_size: dict[int, list[str]] = {}
    for file in held:
        if (size := reader.size(file)) is not None:
            by_size.setdefault(size, []).append(file)
    for files in by_size.values():
        if len(files) < 2:
            continue
        largest = {file: max(held[file], key=lambda place: place[1]) for file in files}
        for place in list(dict.fromkeys(largest.values()))[:LAYOUTS]:
            seen: dict[bytes, list[str]] = {}
            for file in files:
                seen.setdefault(reader.raw(file, *_end(place)), []).append(file)
            for same in (same for same in seen.values() if len(same) > 1):
                for first in (file for file in same if largest[file] == place):
                    # Each two once: from the one that stands first, or the only one of this layout.
                    later = [file for file in same if file != first and (largest[file] != place or same.index(file) > same.index(first))]
                    yield from ((first, other) for other in later if _equal(first, other, held[first], reader))


def _equal(first: str, second: str, places: Held, reader: ItemReader) -> bool:
    spans = (span for place in places for span in (_end(place), _middle(place)))
    return all(reader.raw(first, *span) == reader.raw(second, *span) for span in spans)


def _end(place: Place) -> Place:
    count = min(SAMPLE, place[1])
    return place[0] + place[1] - count, count


def _middle(place: Place) -> Place:
    count = min(SAMPLE, place[1])
    return place[0] + (place[1] - count) // 2, count


def _differing(first: Held, second: Held) -> Iterator[tuple[CatalogTensor, Box, Stored]]:
    """What the metadata has in one file and not, at the same place, in the other: replicas are equal."""
    for place, owners in first.items():
        known = {(entry.name, box) for entry, box, _ in second.get(place, ())}
        yield from (owned for owned in owners if (owned[0].name, owned[1]) not in known)


def _tells(entry: CatalogTensor, box: Box, stored: Stored, reader: ItemReader) -> bool:
    """Whether equal values are no accident: those of a matrix of numbers that are not all one, as those of new norms are."""
    if entry.dtype.kind != "float" or len(box.extent) < 2:
        return False
    tensor = one_piece(entry.name, reader.read(entry, box, stored), stored.rank)
    sample, size = bytes(element_bytes(tensor, 0, min(tensor.numel, SAMPLE))), entry.dtype.itemsize
    return sample != sample[:size] * (len(sample) // size)


def _may_be_equal(name: str, box: Box, other: Box) -> bool:
    return STACKED.search(name) is not None and box.offset[0] != other.offset[0]
