"""Several folders as one: without a shared disk, each node keeps its own ranks' files of the same checkpoints.

A format joins the files of one component; here it is decided which checkpoints and components belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli.discover.found import Found, Place, Target
from ckpt_cli.discover.places import inside_checkpoint
from ckpt_cli.discover.steps import steps_in, with_step
from ckpt_cli.errors import CkptError, MissingShard, NotRecognised, Unreadable, UsageError
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.registry import complement, format_of, joined
from ckpt_cli.names import few

MAX_NODES = 1024


def node_folders(parent: Path, step: int | None, there: Folders) -> Target | None:
    """A folder whose subfolders are the nodes of one training, each with its own ranks' files of the same checkpoints."""
    targets: list[Target] = []
    unknown: Unreadable | None = None
    seen = 0
    for path in there.entries(parent):
        try:
            if not there.is_folder(path):
                continue
            seen += 1
            if seen > MAX_NODES:
                break
            checkpoints, blocked = steps_in(path, there)
            inside = Target(path, path, checkpoints, blocked=blocked) if checkpoints or blocked else inside_checkpoint(path, there)
        except Unreadable as error:
            unknown = unknown or error
            continue
        if inside is not None:
            targets.append(inside)
    if len(targets) < 2:
        return None
    if unknown is not None:
        # It may be one more node.
        raise unknown
    for node in targets:
        if not node.checkpoints:
            node.check_readable(lambda _: True)
    # The newest step that all of them have decides; the last save may have ended on some nodes only.
    by_step = [{found.step: found for found in target.checkpoints} for target in targets]
    shared = [step for step in by_step[0] if all(step in listed for listed in by_step)]
    if not shared:
        return None
    first, *twins = (listed[shared[-1]].places[0].match for listed in by_step)
    if not all(complement(first, twin) for twin in twins):
        return None
    if seen > MAX_NODES:
        raise NotRecognised(
            f"there are more than {MAX_NODES} folders, and some of those examined hold parts of one checkpoint",
            path=parent,
            expected=f"at most {MAX_NODES} folders",
            hint="pass one node's folder, and those of the others with --also",
        )
    whole = targets[0]
    for other in targets[1:]:
        whole = joined_targets(whole, other)
    whole = mark_partial_steps(whole, targets)
    return with_step(replace(whole, path=parent, run=parent, nodes=len(targets)), step)


def joined_targets(first: Target, second: Target) -> Target:
    """The checkpoints of two folders, where those of one step are parts of one checkpoint (a folder may say no step).

    Raises UsageError if the first is one checkpoint and the second holds no part of it: another step would take its place.
    """
    others = list(second.checkpoints)
    found: list[Found] = []
    for checkpoint in first.checkpoints:
        twin = next((other for other in others if _same_step(first, checkpoint, second, other)), None)
        if twin is None:
            found.append(checkpoint)
            continue
        others.remove(twin)
        pairs = [(place, _twin_place(checkpoint, place, twin)) for place in checkpoint.places]
        places = [place if same is None else _joined_place(place, same, twin.path) for place, same in pairs]
        places += [place for place in twin.places if all(place is not same for _, same in pairs)]
        found.append(replace(checkpoint, places=tuple(places), step=twin.step if checkpoint.step is None else checkpoint.step))
    blocked = (*first.blocked, *second.blocked)
    if first.run is None:
        if len(others) == len(second.checkpoints):
            missing = first.checkpoints[0].path.name
            held = [checkpoint.path.name for checkpoint in second.checkpoints if checkpoint.step is not None]
            raise UsageError(
                f"--also holds no part of this checkpoint: {second.path}{f' (it holds {few(held, 3)})' if held else ''}",
                path=first.path,
                expected=f"a folder with more files of {missing}",
                hint=f"pass the folder of {missing} on the other node",
            )
        return replace(first, checkpoints=tuple(found))
    found += others
    return replace(first, checkpoints=tuple(sorted(found, key=lambda checkpoint: checkpoint.step or 0)), blocked=blocked)


def mark_partial_steps(target: Target, parts: Sequence[Target]) -> Target:
    """Adds an error to steps that only some of several folders have, if the files do not record the number of ranks."""
    checkpoints: list[Found] = []
    for found in target.checkpoints:
        holders = sum(any(other.step == found.step for other in part.checkpoints) for part in parts)
        if holders < len(parts):
            held = [{other.step for other in part.checkpoints} for part in parts]
            shared = max((step for step in set.intersection(*held) if step is not None), default=None)
            hint = f"pass --step {shared}, which all of them have" if shared is not None else None
            trouble = MissingShard(f"{found.path.name} is in {holders} of {len(parts)} folders", path=found.path, hint=hint)
            places = [p if format_of(p.match).counts_ranks(p.match) else _with_trouble(p, trouble) for p in found.places]
            checkpoints.append(replace(found, places=tuple(places)))
        else:
            checkpoints.append(found)
    return replace(target, checkpoints=tuple(checkpoints))


def _with_trouble(place: Place, trouble: CkptError) -> Place:
    return replace(place, match=replace(place.match, trouble=trouble))


def _same_step(first: Target, checkpoint: Found, second: Target, other: Found) -> bool:
    unsaid = first.run is None and second.run is None and None in (checkpoint.step, other.step)
    return unsaid or checkpoint.step == other.step


def _twin_place(checkpoint: Found, place: Place, twin: Found) -> Place | None:
    """The same component in another folder, which may hold the main one's files without saying its role."""
    same = twin.place(place.name)
    main = twin.places[0]
    if same is None and place is checkpoint.places[0] and "model" in (place.name, main.name):
        same = main if main.match.component == place.match.component and checkpoint.place(main.name) is None else None
    return same


def _joined_place(place: Place, same: Place, twin: Path) -> Place:
    return replace(place, match=joined(place.match, same.match), more_homes=(*place.more_homes, same.home, twin))
