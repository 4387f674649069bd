"""A folder of nodes as one run: without a shared disk, each node keeps its own ranks' files of the same checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli.discover.found import Found, Target, ages, counted
from ckpt_cli.discover.nodes.joining import joined_checkpoint, twin_of, with_trouble
from ckpt_cli.discover.places import inside_checkpoint
from ckpt_cli.discover.steps import steps_in, with_step
from ckpt_cli.errors import MissingShard, NotRecognised, Unreadable
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.registry import complement, format_of

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
    by_step = [{counted(found): found for found in target.checkpoints} for target in targets]
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
        whole = _joined_targets(whole, other)
    whole = mark_partial_steps(whole, targets)
    return with_step(replace(whole, path=parent, run=parent, nodes=len(targets)), step)


def _joined_targets(first: Target, second: Target) -> Target:
    """The checkpoints of two nodes, where those of one step are parts of one checkpoint (a folder may say no step)."""
    others = list(second.checkpoints)
    found: list[Found] = []
    for checkpoint in first.checkpoints:
        twin = twin_of(first, checkpoint, second)
        if twin is not None:
            others.remove(twin)
        found.append(checkpoint if twin is None else replace(joined_checkpoint(checkpoint, twin).found, more=()))
    found += others
    return replace(first, checkpoints=tuple(sorted(found, key=ages(found))), blocked=(*first.blocked, *second.blocked))


def mark_partial_steps(target: Target, parts: Sequence[Target]) -> Target:
    """Adds an error to steps that only some of several folders have, if the files do not record the number of ranks."""
    checkpoints: list[Found] = []
    for found in target.checkpoints:
        holders = sum(any(counted(other) == counted(found) for other in part.checkpoints) for part in parts)
        if holders < len(parts):
            held = [{counted(other) for other in part.checkpoints} for part in parts]
            shared = max((one for one in target.checkpoints if all(counted(one) in each for each in held)), key=target.age, default=None)
            option = target.option(shared) if shared is not None and shared.step is not None else None
            hint = f"pass {option}, which all of them have" if option is not None else None
            trouble = MissingShard(f"{found.path.name} is in {holders} of {len(parts)} folders", path=found.path, hint=hint)
            places = [p if format_of(p.match).counts_ranks(p.match) else with_trouble(p, trouble) for p in found.places]
            checkpoints.append(replace(found, places=tuple(places)))
        else:
            checkpoints.append(found)
    return replace(target, checkpoints=tuple(checkpoints))
