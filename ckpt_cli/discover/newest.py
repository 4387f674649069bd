"""Going through the checkpoints of a run from the newest to the oldest, past those that cannot be used.

And whether the highest number is the newest step at all: numbers may count different things, or be those of two runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ckpt_cli.discover.found import Dated, Found, Target, ages, number_of, of_other_epochs, path_of
from ckpt_cli.errors import AmbiguousStep, CkptError, CorruptFile, IncompleteError, IsOptimizer, NoComponent, NotFound
from ckpt_cli.formats.step_names import counter_of, epoch_of
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

PASSED = (IncompleteError, CorruptFile, IsOptimizer, NotFound)
"""Errors that another step of a run may not have."""

Made = TypeVar("Made")


@dataclass(slots=True)
class Passed:
    """The checkpoints that were passed over, newest first, each with its error."""

    errors: list[tuple[Found, CkptError]] = field(default_factory=list)

    @property
    def reasons(self) -> dict[Path, str]:
        return {found.path: short_reason(error, found.path) for found, error in self.errors}

    def notes(self, target: Target, what: str) -> list[Note]:
        """Warnings about them: that they ``what``, such as "skipped"."""
        return skipped_notes(target, self.reasons, what)


def skipped_notes(target: Target, reasons: Mapping[Path, str], what: str = "skipped") -> list[Note]:
    """A warning for every reason why steps are ``what``."""
    notes = []
    for reason in dict.fromkeys(reasons.values()):
        labels = [target.label(path) for path, why in reasons.items() if why == reason]
        notes.append(Note("warning", "step-skipped", f"{few(labels, 5)} {'is' if len(labels) == 1 else 'are'} {what}: {reason}"))
    return notes


def newest_first(
    candidates: Iterable[Found], attempt: Callable[[Found], Made], passed: Passed, may_pass: Callable[[Found, CkptError], bool]
) -> Iterator[tuple[Found, Made]]:
    """What ``attempt`` makes of checkpoints, which come newest first and are only looked at when it is their turn.

    An error that ``may_pass`` goes to ``passed``, any other one is raised; `may_pass` may complete its hint.
    """
    for found in candidates:
        try:
            made = attempt(found)
        except CkptError as error:
            if not may_pass(found, error):
                raise
            passed.errors.append((found, error))
        else:
            yield found, made


def short_reason(error: CkptError, folder: Path | None = None) -> str:
    """An error in one line, with the name of its file, unless that is the ``folder`` whose name is said anyway."""
    if isinstance(error, NoComponent):
        return error.message.partition(" has ")[2]
    where = Path(error.path).name if error.path and Path(error.path) != folder else None
    return f"{error.message} ({where})" if where and where not in error.message else error.message


def ambiguous(target: Target, step: int | None, rivals: Sequence[Dated]) -> AmbiguousStep:
    """The error for a step that lies in several folders: nothing says which of them is meant, and their names do not either."""
    paths = [path_of(rival) for rival in rivals]
    names = ", ".join(map(target.label, paths))
    held = next((rival.path for rival in reversed(rivals) if isinstance(rival, Found)), None)
    hint = f"pass the folder itself, such as {held}" if held is not None and of_other_epochs(rivals) else "pass the folder itself"
    return AmbiguousStep(f"step {step} is there more than once: {names}", path=target.path, hint=hint)


def numbered_alike(target: Target, step: int) -> list[Dated]:
    """What there is of steps with a number, if it is that of several epochs; nothing else."""
    there: list[Dated] = [*target.bare, *target.blocked, *target.checkpoints]
    alike = [each for each in there if number_of(each) == step]
    return sorted(alike, key=target.age) if of_other_epochs(alike) else []


def oldest_first(checkpoints: Iterable[Found]) -> list[Found]:
    """Checkpoints in the order of their `ages`."""
    listed = list(checkpoints)
    age = ages(listed)
    return sorted(listed, key=lambda found: (age(found), found.path.name, found.path))


def anew_notes(target: Target, taken: Found) -> list[Note]:
    """A remark where the newest step is not the one of the highest number, since steps are counted anew in each epoch."""
    higher = [found for found in target.checkpoints if (found.step or 0) > (taken.step or 0) and epoch_of(found.path) is not None]
    epoch = epoch_of(taken.path)
    lower = [found for found in higher if epoch is not None and (epoch_of(found.path) or 0) < epoch]
    if not lower:
        return []
    text = f"{target.label(taken.path)} was taken, of the latest epoch: steps are counted anew in each"
    return [Note("info", "counters", f"{text}, as {target.label(lower[-1].path)} shows")]


def counter_notes(target: Target, taken: Found) -> list[Note]:
    """A warning where some steps are counted in epochs and others are not: no number says which of them is the newest."""
    counted = by_counter(target.checkpoints)
    if len(counted) < 2:
        return anew_notes(target, taken)
    text = f"{target.label(taken.path)} was taken for its number, but that does not tell the newest: {told_counters(counted)}"
    return [Note("warning", "counters", text)]


def by_counter(steps: Sequence[Found]) -> dict[str, list[Found]]:
    """Steps by what their numbers count."""
    counted: dict[str, list[Found]] = {}
    for found in steps:
        counted.setdefault(counter_of(found.path) or "steps", []).append(found)
    return counted


def told_counters(counted: Mapping[str, Sequence[Found]]) -> str:
    parts = [f"{few([found.path.name for found in steps], 3)} by {counter}" for counter, steps in counted.items()]
    return f"the folders are numbered {', '.join(parts)}"


def mixed_notes(target: Target, taken: Found) -> list[Note]:
    """A warning where the steps are by their names those of several trainers: then the highest number is only the newest of its own run."""
    runs = by_trainer(target)
    if not runs:
        return []
    told = "; ".join(f"{few([target.label(found.path) for found in steps], 4)} of {trainer}" for trainer, steps in runs.items())
    text = f"the steps here are by their names those of {len(runs)} runs: {told}"
    newest = f"{target.label(taken.path)} counts as the newest for its number, so pass a step folder or --step if another run is meant"
    return [Note("warning", "several-runs", f"{text}; {newest}")]


def by_trainer(target: Target) -> dict[str, list[Found]]:
    """Steps by the trainer that wrote them, if there are several.

    It only counts where the folders are named in another way too: what tells a trainer may be missing in some steps of one run.
    """
    runs: dict[str, list[Found]] = {}
    for found in target.checkpoints:
        runs.setdefault(found.trainer(target.run), []).append(found)
    forms = [{re.sub(r"[0-9]+", "N", found.path.name) for found in steps} for steps in runs.values()]
    apart = all(one.isdisjoint(other) for at, one in enumerate(forms) for other in forms[:at])
    return runs if apart and len(runs) > 1 else {}
