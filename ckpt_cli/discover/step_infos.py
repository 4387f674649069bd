"""What is listed about the steps of a run and their components, from names alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ckpt_cli.discover.found import Blocked, Found, Place, Target
from ckpt_cli.discover.newest import by_trainer
from ckpt_cli.formats.assembly import ranks_of
from ckpt_cli.formats.base import are_apart
from ckpt_cli.formats.registry import format_of
from ckpt_cli.names import few
from ckpt_cli.results.checkpoint import ComponentInfo, StepInfo


def listed_component(place: Place) -> ComponentInfo:
    """What names alone show about a component."""
    match = place.match
    missing = match.missing_ranks
    problem = match.trouble.message if match.trouble else None
    if missing and problem is None and match.world_size is None and format_of(match).is_unsure and are_apart(match.ranks):
        problem = f"{len(match.files)} files whose numbers have gaps: what is in them tells whether they are steps or ranks"
    elif missing and problem is None:
        problem = f"{ranks_of(missing, match.world_size or max(match.ranks) + 1)} missing"
    return ComponentInfo(
        name=place.name,
        format=match.format,
        writer=match.evidence,
        path=str(match.root),
        files=len(match.files),
        world_size=match.world_size or len(match.ranks) or None,
        missing_ranks=missing,
        problem=problem,
    )


def steps_of(target: Target, problems: Mapping[Path, str]) -> tuple[StepInfo, ...]:
    """One line about every step of a run, also about those that could not be looked at; nothing for a single checkpoint."""
    if target.run is None:
        return ()
    # By the paths of what was found: those of results are addresses, in a store.
    of = {found.path: trainer for trainer, steps in by_trainer(target).items() for found in steps}
    age, listed = target.age, []
    there: list[Found | Blocked] = [*target.checkpoints, *target.blocked]
    for each in sorted(there, key=lambda each: (age(each), each.path)):
        if isinstance(each, Found):
            info = step_info(each, problems.get(each.path))
        else:
            info = StepInfo(step=each.step, path=str(each.path), components=(), problem=each.error.message)
        label = target.label(each.path) if target.counted_anew else None
        listed.append(info.model_copy(update={"trainer": of.get(each.path), "label": label}))
    return tuple(listed)


def newer_infos(target: Target, taken: Found, others: Iterable[tuple[Found, str | None]]) -> tuple[StepInfo, ...]:
    """Steps newer than the one that is taken, oldest first, each with why it was not."""
    age, anew = target.age, target.counted_anew
    newer = sorted((other for other in others if age(other[0]) > age(taken)), key=lambda other: age(other[0]))
    return tuple(step_info(found, why).model_copy(update={"label": target.label(found.path) if anew else None}) for found, why in newer)


def step_info(found: Found, problem: str | None = None) -> StepInfo:
    """One line about a step, from names, or with the problem that was found in its content; which components have it, if not all."""
    faults = {place.name: listed_component(place).problem for place in found.places}
    problem = problem or next(filter(None, faults.values()), None) or found.lost or None
    having = [name for name, fault in faults.items() if fault == problem]
    said = f"{few(having)}: {problem}" if problem and 0 < len(having) < len(faults) else problem
    return StepInfo(step=found.step, path=str(found.path), components=tuple(faults), problem=said)
