"""Which steps of a run a watch is to make, and which it passes over: every one that a merge of it would refuse is said, never left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.found import Age, Dated, Found, Target, ages, number_of
from ckpt_cli.discover.newest import numbered_alike
from ckpt_cli.discover.steps import Steps, bare_in
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.trainers import PARTIAL, number_in
from ckpt_cli.watching.options import WatchOptions

BARE = "no weights were recognised in this step folder"


def wanted(there: Iterable[Dated], age: Callable[[Dated], Age], options: WatchOptions) -> Callable[[Dated], bool]:
    """Which steps the options choose: from the first one on that has the number of ``--since``, so that those of later epochs count too."""
    begin = min((age(step) for step in there if (number_of(step) or 0) >= (options.since or 0)), default=(float("inf"), float("inf")))
    return lambda step: age(step) >= begin and (options.every is None or (number_of(step) or 0) % options.every == 0)


def _there(target: Target) -> list[Dated]:
    return [*target.checkpoints, *target.blocked, *target.bare, *target.partial, *target.made]


def steps_of(target: Target, options: WatchOptions) -> Iterator[tuple[Found, int]]:
    """The steps that are wanted, oldest first, each number once: one that lies in several folders too, which `merge` is to refuse."""
    is_wanted, seen = wanted(_there(target), target.age, options), set[int]()
    for found in target.checkpoints:
        step = found.step
        if step is not None and step not in seen and is_wanted(found):
            seen.add(step)
            yield found, step


def is_ambiguous(target: Target, step: int) -> bool:
    """Whether a step lies in several folders, or several epochs have one of this number, so that nothing says which is meant."""
    return sum(found.step == step for found in target.checkpoints) > 1 or bool(numbered_alike(target, step))


def passed_over(target: Target, options: WatchOptions) -> Iterator[tuple[int, str]]:
    """Steps of which there is something but no checkpoint that could be read, and why."""
    reasons: dict[int, tuple[Dated, str]] = {}
    for folder in target.made:
        reasons[step_of(folder) or 0] = folder, f"{target.label(folder)} is an output of ckpt, not a save of the training"
    for folder in target.partial:
        if (number := number_in(folder.name, PARTIAL)) is not None:
            reasons[number] = folder, f"the name of {target.label(folder)} says that the save did not finish"
    reasons |= _bare(target.bare)
    there = {found.step for found in target.checkpoints}
    reasons = {step: reason for step, reason in reasons.items() if step not in there}
    # Where another epoch has a step of this number, making that says it.
    blocked = [each for each in target.blocked if each.step not in there or not numbered_alike(target, each.step)]
    reasons |= {each.step: (each, each.error.message) for each in blocked}
    is_wanted = wanted(_there(target), target.age, options)
    yield from ((step, reason) for step, (of, reason) in sorted(reasons.items(), key=lambda item: item[0]) if is_wanted(of))


def bare_steps(run: Path, options: WatchOptions) -> Iterator[tuple[int, str]]:
    """The step folders of a run in which no weights were recognised at all."""
    folders = bare_in(run, Steps(), Folders(), None)
    bare, is_wanted = _bare(folders), wanted(folders, ages(folders), options)
    yield from ((step, reason) for step, (folder, reason) in sorted(bare.items(), key=lambda item: item[0]) if is_wanted(folder))


def beside_text(run: Path, weights: str) -> str:
    """What is said of weights in the folder of a run itself, which are no step and so none of the outputs."""
    return f"{weights} beside the steps, weights of the folder itself: ckpt merge {shell.path(run)} takes them"


def _bare(folders: Iterable[Path]) -> dict[int, tuple[Dated, str]]:
    return {step: (folder, BARE) for folder in folders if (step := step_of(folder)) is not None}
