"""Steps of two trainings in one folder: one that was started again writes the low steps first, and the high ones of the run before stay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ckpt_cli.discover.found import Age, Target
from ckpt_cli.discover.steps import SECONDS, written_at
from ckpt_cli.names import span_text

Step = TypeVar("Step")


@dataclass(frozen=True, slots=True)
class Written(Generic[Step]):
    """When the steps of a run were written, in seconds, each with its age, oldest first; as far as that is known."""

    rows: tuple[tuple[Step, Age, float], ...]

    def later_below(self, step: Step) -> tuple[Step, float] | None:
        """The lower step that was written last and by how much, if that is over an hour after this one: it is then of a training before."""
        return max(self._later_below(step), key=lambda pair: pair[1], default=None)

    def of_before(self) -> list[Step]:
        """The steps that are of a training before, by this, oldest first."""
        before, latest = list[Step](), float("-inf")
        for _, alike in itertools.groupby(self.rows, key=lambda row: row[1]):
            same = list(alike)
            before += [step for step, _, time in same if latest - time > SECONDS]
            latest = max(latest, *(time for _, _, time in same))
        return before

    def last(self, count: int) -> list[Step]:
        """Those that were written last."""
        return [step for step, _, _ in sorted(self.rows, key=lambda row: row[2])[-count:]]

    def apart(self, steps: Sequence[Step]) -> tuple[Step, Step, float] | None:
        """What shows that steps, oldest first, are of several trainings: a step, a higher one that was written earlier, and how much.

        Two of them are so themselves; or a step that is below the lower one was written after that, but before the higher one.
        """
        times = {step: time for step, _, time in self.rows}
        known = [step for step in steps if step in times]
        for at, low in enumerate(known):
            between = min(self._later_below(low), key=lambda pair: pair[1], default=None)
            for high in known[at + 1 :]:
                if times[low] - times[high] > SECONDS:
                    return low, high, times[low] - times[high]
                if between is not None and times[low] + between[1] <= times[high]:
                    return between[0], low, between[1]
        return None

    def _later_below(self, step: Step) -> list[tuple[Step, float]]:
        own = next(((age, time) for each, age, time in self.rows if each == step), None)
        if own is None:
            return []
        return [(each, time - own[1]) for each, age, time in self.rows if age < own[0] and time - own[1] > SECONDS]


def written_in(target: Target) -> Written[Path]:
    """When the steps of a run were written, by one of their weights files."""
    age = target.age
    times = ((found, written_at(found)) for found in target.checkpoints)
    return Written(tuple((found.path, age(found), time) for found, time in times if time is not None))


def started_again(target: Target, written: Written[Path]) -> str | None:
    """What is said where steps of the training before lie above those of one that was started again; None if there are none."""
    before = written.of_before()
    later = written.later_below(before[-1]) if before else None
    if later is None:
        return None
    names = told_later(target.label(later[0]), target.label(before[-1]), later[1])
    return f"{names}: if training was started again in this folder, the latter is of the training before"


def told_later(younger: str, older: str, seconds: float) -> str:
    return f"{younger} was written {span_text(seconds)} later than {older}"
