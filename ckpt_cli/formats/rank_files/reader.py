"""One file of ``torch.save`` per rank: what verl, EasyR1, SkyRL, lmms-engine, accelerate and BAGEL forks write.

File names carry the rank and mostly the world size; ranks are not zero-padded, so they are ordered as numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_cli import shell
from ckpt_cli.errors import CkptError, Inconsistent, MissingShard, MixedWorldSizes, PartOfSet, reading
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.pickle_nodes import as_dict, describe
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import StoredTensor, TorchFile
from ckpt_cli.formats.ages import age_notes
from ckpt_cli.formats.assembly import RankState, assemble
from ckpt_cli.formats.base import APART, MAX_RANKS, Format, Match, ReadOptions, are_apart, missing_of
from ckpt_cli.formats.kept_configs import KeptConfig, configs_in
from ckpt_cli.formats.rank_files.dtensor import DistributedLocal, LocalReader, ShardedLocal
from ckpt_cli.formats.sets.contents import refuse_part
from ckpt_cli.formats.sets.recorded import recorded_rank
from ckpt_cli.formats.torch_files.counters import notes_of_counters
from ckpt_cli.formats.torch_files.groups import FileGroup, chosen_group, groups_of, notes_of_group
from ckpt_cli.formats.torch_files.state_dict import left_out_notes, read_state
from ckpt_cli.names import few, numbered, plural
from ckpt_cli.tensors.component import Component, Leaf, Mesh, Note

FORMAT = "rank-shards"


@dataclass(frozen=True, slots=True)
class NamePattern:
    """How one family of trainers names the files of one component, or of several with a ``number`` each."""

    regex: re.Pattern[str]
    component: str
    writer: str


PATTERNS = (
    NamePattern(re.compile(r"model_world_size_(?P<world>[0-9]+)_rank_(?P<rank>[0-9]+)\.pt", re.ASCII), "model", "verl family"),
    NamePattern(re.compile(r"model_rank(?P<rank>[0-9]+)\.pt", re.ASCII), "model", "BAGEL fork"),
    NamePattern(re.compile(r"ema_rank(?P<rank>[0-9]+)\.pt", re.ASCII), "ema", "BAGEL fork"),
    NamePattern(re.compile(r"pytorch_model_fsdp(_(?P<number>[0-9]{1,9}))?_rank(?P<rank>[0-9]+)\.bin", re.ASCII), "model", "accelerate"),
)


@dataclass(frozen=True, slots=True)
class RankRead:
    """What the file of a rank holds: the chosen state dict's ``entries``, described as ``state``, beside the other ``groups``."""

    state: RankState
    notes: list[Note]
    entries: Mapping[Any, Any]
    groups: list[FileGroup]


class RankShards(Format):
    """Reader of per-rank ``torch.save`` files."""

    name = FORMAT
    display = "files of ranks"

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        if there.is_file(path):
            # One shard file stands for the folder it lies in.
            return [match for match in self.recognise(path.parent, there) if path in match.files] if _pattern(path.name) else []
        entries = [entry.name for entry in there.entries(path) if entry.suffix in (".pt", ".bin")]
        found: dict[tuple[NamePattern, int, int | None], dict[int, list[Path]]] = {}
        for name in entries:
            pattern = _pattern(name)
            fields = pattern.regex.fullmatch(name) if pattern is not None else None
            if pattern is not None and fields is not None:
                world = int(fields["world"]) if "world" in fields.groupdict() else None
                number = int(fields.groupdict().get("number") or 0)
                found.setdefault((pattern, number, world), {}).setdefault(int(fields["rank"]), []).append(path / name)
        worlds: dict[tuple[NamePattern, int], list[int | None]] = {}
        for pattern, number, world in found:
            worlds.setdefault((pattern, number), []).append(world)
        return [
            _match(path, pattern, number, sizes, {size: found[pattern, number, size] for size in sizes})
            for (pattern, number), sizes in sorted(worlds.items(), key=lambda item: (PATTERNS.index(item[0][0]), item[0][1]))
        ]

    def groups(self, match: Match, files: Files) -> list[str]:
        """The state dicts in a rank file: all ranks must have the same, which is checked when they are read."""
        if match.trouble is not None:
            return [match.component]
        path = match.ranks[min(match.ranks)]
        file = files.parsed(path, TorchFile)
        with reading(path):
            return [group.name for group in groups_of(file, match.component, LocalReader(file, min(match.ranks)))[1]]

    def joined(self, first: Match, second: Match) -> Match:
        whole = super().joined(first, second)
        return replace(whole, ranks={**second.ranks, **first.ranks}, trouble=whole.trouble or second.trouble)

    def twice(self, first: Match, second: Match) -> CkptError | None:
        if first.world_size != second.world_size:
            text = f"{first.root} is of {first.world_size} ranks, {second.root} of {second.world_size}"
            return MixedWorldSizes(text, path=second.root, expected="folders of one save", hint=APART)
        both = min(set(first.ranks) & set(second.ranks), default=None)
        if both is None:
            return None
        folders = [match.ranks[both].parent for match in (first, second)]
        text = f"rank {both} is in both {folders[0]} and {folders[1]}"
        whole = first.world_size is not None and not first.missing_ranks
        hint = f"{first.root} has the files of all {first.world_size} ranks: pass it alone" if whole else APART
        return Inconsistent(text, path=second.ranks[both], expected="the file of every rank in one of the folders", hint=hint)

    def adds(self, first: Match, second: Match) -> bool:
        return not set(second.ranks) <= set(first.ranks)

    def complements(self, first: Match, second: Match) -> bool:
        apart = not set(first.ranks) & set(second.ranks) and first.world_size == second.world_size
        return apart and bool(first.missing_ranks) and bool(second.missing_ranks)

    def world_size(self, match: Match, states: Sequence[RankState]) -> int:
        """How many ranks wrote the files: by their names, or by the meshes in them. Raises PartOfSet if neither says it."""
        if match.world_size is not None:
            return match.world_size
        if not any(map(announced_size, states)):
            raise unproven(states)
        return max(max(match.ranks) + 1, *map(announced_size, states))

    def ranks_told(self, match: Match, files: Files) -> int | None:
        if match.world_size is not None or not match.ranks:
            return match.world_size
        first, main = min(match.ranks), match.group or self.groups(match, files)[0]
        state = read_rank_file(first, match.ranks[first], files, match.component, match.group, main).state
        return max(max(match.ranks) + 1, announced_size(state))

    def kept_configs(self, match: Match, files: Files) -> list[KeptConfig]:
        return configs_in(files.parsed(match.ranks[min(match.ranks)], TorchFile)) if match.ranks else []

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        main = match.group or self.groups(match, files)[0]
        component = match.component if match.group is None else _component(match.ranks[min(match.ranks)])
        states: list[RankState] = []
        notes: list[list[Note]] = []
        for rank, path in sorted(match.ranks.items()):
            read = read_rank_file(rank, path, files, component, match.group, main)
            # No more than this is kept: the nodes of a file take several times as much memory.
            states.append(read.state)
            notes.append(read.notes)
        world_size = self.world_size(match, states)
        missing = missing_of(world_size, match.ranks)
        check_rank_files(states, world_size)
        try:
            assembled = assemble(states, world_size, missing, options)
        except MissingShard as error:
            if error.expected is None and missing:
                error.expected = str(match.root / _name_of(match, missing[0]))
            raise
        all_notes = (
            *notes_of_ranks(notes),
            *assembled.notes,
            *left_out_notes(leaf for state in states for leaf in state.leaves),
            *age_notes([files.source(path) for path in match.ranks.values()]),
        )
        mesh = next((m for state in states for m in [largest_mesh(state)] if m is not None), None)
        return Component(
            name=match.component,
            format=self.name,
            root=match.root,
            tensors=assembled.tensors,
            files=tuple(match.ranks[rank] for rank in sorted(match.ranks)),
            world_size=world_size,
            missing_ranks=missing,
            mesh=mesh,
            leaves=states[0].leaves if states else (),
            notes=all_notes,
            writer=match.evidence,
        )


def read_rank_file(rank: int, path: Path, files: Files, component: str, group: str | None, main: str) -> RankRead:
    """What the file of a rank holds of a component (or of one ``group`` of it), and notes about the rest of it.

    ``main`` is the group that the other files have. Raises Inconsistent if this one lacks it, and what reading raises.
    """
    file = files.parsed(path, TorchFile)
    reader = LocalReader(file, rank)
    with reading(path):
        refuse_part(file, path)
        way, groups = groups_of(file, component, reader, group)
        chosen = chosen_group(groups, group)
        if chosen.name != main:
            raise Inconsistent(f"the file of rank {rank} holds no {main}, but that of another rank does", path=path)
        held, leaves = read_state(chosen.entries, reader, path)
        beside = tuple(Leaf(str(key), describe(value)) for key, value in chosen.beside.items())
        notes = notes_of_group("the file of each rank", way, groups, chosen)
        notes += notes_of_counters(chosen.counters, reader, path)
    state = RankState(rank, path, held, (*beside, *leaves), file.fingerprint, _recorded(file, path))
    return RankRead(state, notes, chosen.entries, groups)


def _recorded(file: TorchFile, path: Path) -> int | None:
    """The rank that a file says beside its tensors, or that was in its name when torch wrote it."""
    named = f"{file.stem}{path.suffix}"
    pattern = _pattern(named)
    fields = None if pattern is None else pattern.regex.fullmatch(named)
    said = recorded_rank(as_dict(file.root) or {})
    return said if said is not None or fields is None else int(fields["rank"])


def _component(path: Path) -> str:
    """The component named by a rank file's name."""
    pattern = _pattern(path.name)
    return "model" if pattern is None else pattern.component


def notes_of_ranks(notes: list[list[Note]]) -> list[Note]:
    """Notes of all rank files, each once; a note that some files lack becomes a warning, since ranks differ."""
    said = dict.fromkeys(note for each in notes for note in each)
    shared = {note for note in said if all(note in each for each in notes)}
    partly = (replace(note, level="warning", text=note.text.replace("the file of each rank", "the file of some rank")) for note in said)
    return [note if note in shared else other for note, other in zip(said, partly, strict=True)]


def unproven(states: Sequence[RankState]) -> PartOfSet:
    """The error for files of which neither names nor meshes give the number of ranks: other ranks may have held other layers."""
    names = few([state.path.name for state in states])
    if are_apart([state.rank for state in states]) and _hold_the_same(states):
        return PartOfSet(
            f"{names} hold the same tensors whole, and most numbers between them are missing: they are steps rather than ranks",
            path=states[0].path,
            expected="the file of one step",
            hint=f"pass one of them, such as {states[-1].path}",
        )
    hint = "if one process wrote all of it, give the file a name without a rank, such as model.pt" if states[0].rank == 0 else None
    if len(states) > 1:
        each = f"if each is a whole model, as of an ensemble, pass one of them, such as {shell.path(states[-1].path)}"
        hint = each if _hold_the_same(states) else None
    return PartOfSet(
        f"nothing in {names} says how many ranks there are",
        path=states[0].path,
        expected="the files of all ranks, with distributed tensors in them",
        hint=hint,
    )


def _hold_the_same(states: Sequence[RankState]) -> bool:
    """Whether files hold plain tensors of the same names and shapes, as those of one model do."""
    held = [{name: local.shape for name, local in state.locals.items()} for state in states]
    plain = all(isinstance(local, StoredTensor) for state in states for local in state.locals.values())
    return plain and bool(held[0]) and all(each == held[0] for each in held)


def check_rank_files(states: list[RankState], world_size: int) -> None:
    """The meshes must fit the world size, and the coordinates in the files the ranks in their names.

    Raises MixedWorldSizes, or Inconsistent for files that were renamed or copied over each other.
    """
    for state in states:
        mesh = largest_mesh(state)
        if mesh is not None and mesh.size > world_size:
            raise MixedWorldSizes(
                f"the file of rank {state.rank} was written by {mesh.size} ranks, not {world_size}",
                path=state.path,
                expected=f"a mesh of at most {world_size} ranks",
                hint="files from two saves may be mixed, or files of some ranks may be missing",
            )
    _check_ranks(states)


def _check_ranks(states: list[RankState]) -> None:
    """The coordinate that each file records must be that of the rank in its name.

    Files that torch's fake process group wrote all record rank 0; these identify nothing, unless they are duplicates.
    """
    claims = {state.rank: claimed for state in states for claimed in [_claimed_rank(state)] if claimed is not None}
    if len(claims) > 1 and len(set(claims.values())) == 1 and not _copied(states):
        claims = {}
    recorded = {state.rank: state.recorded for state in states if state.recorded is not None}
    # Ranks within a node, or of one process that wrote all files, tell nothing.
    node = max(recorded.values(), default=0) + 1
    if any(rank % node != said for rank, said in recorded.items()):
        claims = recorded | claims
    for state in states:
        if claims.get(state.rank, state.rank) != state.rank:
            raise Inconsistent(
                f"the file's name says rank {state.rank}, its content says rank {claims[state.rank]}",
                path=state.path,
                hint="it may have been renamed or copied over another one: get it again from the node that wrote it",
            )


def _pattern(name: str) -> NamePattern | None:
    return next((pattern for pattern in PATTERNS if pattern.regex.fullmatch(name)), None)


def _match(
    root: Path, pattern: NamePattern, number: int, sizes: list[int | None], found: Mapping[int | None, Mapping[int, list[Path]]]
) -> Match:
    files = tuple(path for size in sizes for paths in found[size].values() for path in paths)
    size = sizes[0]
    trouble: CkptError | None = None
    if len(sizes) > 1:
        listed = " and ".join(f"{s} ({plural(len(found[s]), 'file')})" for s in sorted(sizes, key=lambda s: s or 0))
        trouble = MixedWorldSizes(
            f"shards of several world sizes are in one folder: {listed}",
            path=root,
            expected="files of one save",
            hint="move the files of the older save to another folder",
        )
    twice = next((paths for paths in found[size].values() if len(paths) > 1), None)
    if twice:
        text = f"two files claim to be the same rank: {' and '.join(path.name for path in twice)}"
        trouble = Inconsistent(text, path=root, hint="move away the one that does not belong to this save")
    ranks = {rank: paths[0] for rank, paths in found[size].items()}
    if max(ranks) >= MAX_RANKS or (size is not None and not max(ranks) < size <= MAX_RANKS):
        text = f"rank {str(max(ranks))[:20]} cannot be one of {'the' if size is None else str(size)[:20]} ranks"
        trouble = trouble or MixedWorldSizes(text, path=root, expected="files of one save", hint="the file may have been renamed")
    component = numbered(pattern.component, number)
    return Match(FORMAT, component, root, files, pattern.writer, size, ranks, trouble, number=number)


def _name_of(match: Match, rank: int) -> str:
    """The name that the file of another rank would have."""
    sibling = next(iter(match.ranks.values())).name
    pattern = _pattern(sibling)
    fields = pattern.regex.fullmatch(sibling) if pattern else None
    if fields is None:
        return f"(rank {rank})"
    start, stop = fields.span("rank")
    width = stop - start if sibling[start] == "0" and stop - start > 1 else 0
    return f"{sibling[:start]}{rank:0{width}d}{sibling[stop:]}"


def announced_size(state: RankState) -> int:
    """The least number of ranks that the content of a file implies, for names without it."""
    sizes = [1 + max(local.mesh.ranks) for local in state.locals.values() if isinstance(local, DistributedLocal)]
    sizes += [1 + rank for local in state.locals.values() if isinstance(local, ShardedLocal) for rank, _ in local.everywhere]
    return max(sizes, default=0)


def largest_mesh(state: RankState) -> Mesh | None:
    """The mesh of most ranks that the tensors of a file lie on; None without distributed tensors."""
    meshes = {
        (local.mesh.names, local.mesh.shape)
        for local in state.locals.values()
        if isinstance(local, DistributedLocal)
    }  # fmt: skip
    if not meshes:
        return None
    return max((Mesh(names, shape) for names, shape in meshes), key=lambda mesh: (mesh.size, len(mesh.shape)))


def _claimed_rank(state: RankState) -> int | None:
    """The rank that the meshes of a file claim; None if they claim nothing or several."""
    meshes = [local.mesh for local in state.locals.values() if isinstance(local, DistributedLocal) and local.mesh.claimed is not None]
    # Up to torch 2.9 a sub-mesh cannot tell ranks of the same row apart; the widest mesh knows best.
    widest = max((len(mesh.ranks) for mesh in meshes), default=0)
    claims = {mesh.claimed for mesh in meshes if len(mesh.ranks) == widest}
    return claims.pop() if len(claims) == 1 else None


def _copied(states: list[RankState]) -> bool:
    """Whether two files have the same bytes although their ranks should hold different parts.

    Without checksums this cannot be excluded, so it is assumed.
    """
    seen: dict[object, RankState] = {}
    for state in states:
        if state.fingerprint is None:
            return True
        other = seen.setdefault(state.fingerprint, state)
        if other is not state and _part_coordinates(other) != _part_coordinates(state):
            return True
    return False


def _part_coordinates(state: RankState) -> list[tuple[str, int, int]]:
    """Tensor, mesh dimension and coordinate of every cut: what makes the part of this rank different from others."""
    return [
        (name, axis, local.mesh.coordinate[axis])
        for name, local in state.locals.items()
        if isinstance(local, DistributedLocal)
        for axis, placement in enumerate(local.placements)
        if placement.kind != "Replicate"
    ]
