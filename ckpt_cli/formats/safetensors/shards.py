"""Shards of ``HuggingFaceStorageWriter`` (torch >= 2.8, transformers >= 5): safetensors files whose metadata say which part they are.

Every file has ``DCP_SHARDING_INFO`` = ``{name: {"saved_offsets": [...]}}``. There is neither index nor ``.metadata``: the
shape of a tensor is what its shards span. So a missing last shard cannot be seen in a single tensor, only in the numbering of the
files or in a tensor whose parts leave a hole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_cli.boxes import Box
from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent, MissingShard, MixedWorldSizes, reading
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.safetensors_file import Entry, parse_json, read_header
from ckpt_cli.files.source import Files, FileSource
from ckpt_cli.formats.assembly import PlacedTensor, RankPart, cut_layout, stored_entry, tile
from ckpt_cli.formats.base import APART, Format, Match, ReadOptions
from ckpt_cli.formats.safetensors.folder import entry_leaf
from ckpt_cli.formats.sets.contents import SHARDING as INFO
from ckpt_cli.formats.torch_files.set_apart import names_of, set_apart
from ckpt_cli.names import check_name, few, is_extra_state
from ckpt_cli.tensors.component import Component, Leaf, Note
from ckpt_cli.tensors.tensor import Tensor

FORMAT = "hub-shards"
SHARD = re.compile(r"shard-(?P<rank>[0-9]+)-model-(?P<part>[0-9]+)-of-(?P<parts>[0-9]+)\.safetensors", re.ASCII)


class HubShards(Format):
    """Reader of sharded Hugging Face saves of torch DCP."""

    name = FORMAT
    display = "sharded safetensors"
    keeps_order = False
    proves_whole = False

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        folder = path.parent if SHARD.fullmatch(path.name) else path
        found = [entry for entry in there.entries(folder) if SHARD.fullmatch(entry.name)]
        if not found:
            return []
        return [Match(FORMAT, "model", folder, tuple(found), "DCP with HuggingFaceStorageWriter", trouble=_trouble_of(found, folder))]

    def joined(self, first: Match, second: Match) -> Match:
        whole = super().joined(first, second)
        return replace(whole, trouble=self.twice(first, second) or _trouble_of(whole.files, first.root))

    def twice(self, first: Match, second: Match) -> CkptError | None:
        parts = [fields["parts"] for match in (first, second) if (fields := SHARD.fullmatch(match.first.name))]
        if len(set(map(int, parts))) > 1:
            text = f"{first.root} is of a save of {parts[0]} parts, {second.root} of one of {parts[1]}"
            return MixedWorldSizes(text, path=second.root, expected="folders of one save", hint=APART)
        return super().twice(first, second)

    def groups(self, match: Match, files: Files) -> list[str]:
        """The model, and an average of its weights that lies in the same files under a prefix."""
        if match.trouble is not None or match.component != "model":
            return [match.component]
        entries = (entry for path in match.files for entry in files.parsed(path, read_header).entries)
        return names_of(match.component, {entry.name: entry for entry in entries})

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        parts: dict[str, list[RankPart]] = {}
        leaves: dict[str, Leaf] = {}
        boxes: dict[Path, set[tuple[str, Box]]] = {}
        for path in match.files:
            rank = _rank(path)
            source = files.source(path)
            header = read_header(source)
            with reading(path):
                offsets = _saved_offsets(header.metadata.get(INFO))
                for entry in header.entries:
                    if is_extra_state(entry.name):
                        leaves[entry.name] = entry_leaf(entry)
                        continue
                    with reading(path, tensor=entry.name):
                        part = _part(entry, source, rank, offsets)
                        parts.setdefault(check_name(entry.name), []).append(part)
                        boxes.setdefault(path, set()).add((entry.name, part.box))
        if not parts:
            raise CorruptFile("the files hold no tensor", path=match.root)
        tensors = {}
        for name, held in parts.items():
            with reading(match.root, tensor=name):
                tensors[name] = _assemble(name, held)
        note = Note(
            "warning",
            "unproven-end",
            "these files do not record whole shapes: missing files of the last ranks would go unnoticed; compare with --base",
        )
        world = max((part.rank for held in parts.values() for part in held), default=0) + 1
        component = Component(
            match.component,
            FORMAT,
            match.root,
            tensors,
            match.files,
            world_size=world,
            leaves=tuple(leaves.values()),
            notes=(note, *_twice_held(boxes, tensors)),
            writer=match.evidence,
        )
        return set_apart(component, "the folder", average=match.group is not None)


def _twice_held(boxes: Mapping[Path, set[tuple[str, Box]]], tensors: Mapping[str, Tensor]) -> list[Note]:
    """A warning about files that hold the same parts of tensors as others: a save writes each part once.

    What such a file held before it was copied over may be the end of tensors, which is then not known to be missing.
    """
    cut = {path: frozenset(each for each in held if each[1].extent != tensors[each[0]].shape) for path, held in boxes.items()}
    first: dict[frozenset[tuple[str, Box]], Path] = {}
    said = []
    for path, held in cut.items():
        if held and first.setdefault(held, path) != path:
            said.append(f"{path.name} holds the same parts of tensors as {first[held].name}")
    text = f"{few(said, 2)}: a save writes each part once, and what one of the two held may be lost"
    return [Note("warning", "equal-files", text)] if said else []


def _trouble_of(found: Sequence[Path], folder: Path) -> MissingShard | None:
    """The error for files that are not a whole save by their names."""
    names = [fields for entry in found if (fields := SHARD.fullmatch(entry.name))]
    ranks = {int(fields["rank"]) for fields in names}
    absent = _absent(ranks, max(ranks))
    trouble = f"files of shard {', '.join(map(str, absent))} are missing" if absent else None
    counts = {int(fields["parts"]) for fields in names}
    if len(counts) > 1:
        trouble = trouble or f"files of saves with {' and '.join(map(str, sorted(counts)))} parts are in one folder"
    lost = _absent({int(fields["part"]) for fields in names}, max(counts))
    if lost:
        trouble = trouble or f"no file holds part {lost[0]} of {max(counts)}"
    trouble = trouble or _lost_part(names)
    mixed = "move the files of the older save to another folder"
    hint = "copy what is missing from the nodes that wrote it, or pass their folders with --also" if len(counts) == 1 else mixed
    return MissingShard(trouble, path=folder, hint=hint) if trouble else None


def _absent(there: set[int], highest: int) -> list[int]:
    """The first numbers from 1 on that are not there, however high the highest is."""
    return list(itertools.islice((number for number in range(1, highest + 1) if number not in there), 8))


def _rank(path: Path) -> int:
    """The rank that wrote a file; names count shards from one."""
    fields = SHARD.fullmatch(path.name)
    return int(fields["rank"]) - 1 if fields is not None else 0


def _lost_part(names: list[re.Match[str]]) -> str | None:
    """Every shard must have all parts: without those of the last shard, tensors would only look shorter."""
    held = {(int(fields["rank"]), int(fields["part"])) for fields in names}
    parts = {part for _, part in held}
    for fields in names:
        for part in sorted(parts):
            if (int(fields["rank"]), part) not in held:
                return f"shard-{fields['rank']}-model-{part:0{len(fields['part'])}d}-of-{fields['parts']}.safetensors is missing"
    return None


def _assemble(name: str, held: list[RankPart]) -> Tensor:
    if len({part.stored.dtype for part in held}) > 1 or len({len(part.box.offset) for part in held}) > 1:
        raise Inconsistent("shards of one tensor disagree about dtype or rank", tensor=name, hint="files from two saves may be mixed")
    dims = range(len(held[0].box.offset))
    shape = tuple(max(part.box.offset[d] + part.box.extent[d] for part in held) for d in dims)
    kind, layout = cut_layout(shape, (part.box for part in held))
    return tile(name, held[0].stored.dtype, PlacedTensor(shape, held, kind, layout, check_copies=True), 0, ())


def _part(entry: Entry, source: FileSource, rank: int, offsets: dict[str, Any]) -> RankPart:
    corner = offsets.get(entry.name, {}).get("saved_offsets") if isinstance(offsets.get(entry.name), dict) else None
    if corner is None:
        corner = [0] * len(entry.shape)
    if not isinstance(corner, list) or len(corner) != len(entry.shape) or any(type(n) is not int or not 0 <= n < 1 << 60 for n in corner):
        raise CorruptFile("the offsets of a shard are invalid")
    return RankPart(rank, stored_entry(entry, source), Box(tuple(corner), entry.shape), (0,) * len(entry.shape))


def _saved_offsets(text: str | None) -> dict[str, Any]:
    if text is None:
        raise CorruptFile(f"the file has no {INFO}", expected="a shard of HuggingFaceStorageWriter")
    info = parse_json(text.encode("utf-8", "surrogatepass"), INFO)
    if not isinstance(info, dict):
        raise CorruptFile(f"{INFO} is not an object")
    return info
