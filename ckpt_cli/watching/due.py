"""Which steps of a run a watch is to make, and which it passes over: every one that a merge of it would refuse is said, never left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpt_cli.discover.found import Found, Target
from ckpt_cli.discover.steps import Steps, bare_in
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.trainers import PARTIAL, number_in
from ckpt_cli.watching.options import WatchOptions

BARE = "no weights were recognised in this step folder"


def is_wanted(step: int, options: WatchOptions) -> bool:
    """Whether the options choose a step."""
    return step >= (options.since or 0) and (options.every is None or step % options.every == 0)


def steps_of(target: Target, options: WatchOptions) -> Iterator[tuple[Found, int]]:
    """The steps that are wanted, oldest first, each once: one that lies in several folders too, which `merge` is to refuse."""
    before: int | None = None
    for found in target.checkpoints:
        step = found.step
        if step is not None and step != before and is_wanted(step, options):
            yield found, step
        before = step


def is_ambiguous(target: Target, step: int) -> bool:
    """Whether a step lies in several folders, so that nothing says which is meant."""
    return sum(found.step == step for found in target.checkpoints) > 1


def passed_over(target: Target, options: WatchOptions) -> Iterator[tuple[int, str]]:
    """Steps of which there is something but no checkpoint that could be read, and why."""
    reasons: dict[int, str] = {}
    for folder in target.made:
        reasons[step_of(folder) or 0] = f"{target.label(folder)} is an output of ckpt, not a save of the training"
    for folder in target.partial:
        if (number := number_in(folder.name, PARTIAL)) is not None:
            reasons[number] = f"the name of {target.label(folder)} says that the save did not finish"
    reasons |= _bare(target.bare)
    there = {found.step for found in target.checkpoints}
    reasons = {step: reason for step, reason in reasons.items() if step not in there}
    reasons |= {blocked.step: blocked.error.message for blocked in target.blocked}
    yield from ((step, reason) for step, reason in sorted(reasons.items()) if is_wanted(step, options))


def bare_steps(run: Path, options: WatchOptions) -> Iterator[tuple[int, str]]:
    """The step folders of a run in which no weights were recognised at all."""
    bare = _bare(bare_in(run, Steps(), Folders(), None))
    yield from ((step, reason) for step, reason in sorted(bare.items()) if is_wanted(step, options))


def _bare(folders: tuple[Path, ...]) -> dict[int, str]:
    return {step: BARE for folder in folders if (step := step_of(folder)) is not None}
