"""What was found at a path, by names: components, checkpoints, runs. No file is read for this."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.errors import NotFound, Unreadable
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.step_names import counter_of, epoch_of, numbered_path, step_of
from ckpt_cli.formats.trainers import PARTIAL, number_in, trainer_of

Age = tuple[float, float]
"""The epoch, where the steps of a run say theirs, and the number in it: the larger, the newer."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Another reading of a component, which was not taken: its match, what that is in words, and its folder where it has one of its own."""

    match: Match
    text: str
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A component on disk: the files that a reader recognised, and the folder that it belongs to.

    ``home`` is the folder that people think of as the component (``actor/``, or the checkpoint itself): its assets lie
    there or around it, and ``--in-place`` writes there. ``passed_over`` names other matches for the same component,
    ``more_homes`` the same folders on other nodes.
    """

    name: str
    match: Match
    home: Path
    passed_over: tuple[PassedOver, ...] = ()
    more_homes: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, by names: its step (None if the folder does not say) and its components, the main one first.

    ``given``: what was passed, a folder in it or a file of it; None where it was found as a step of a run. ``more`` is the same
    checkpoint in the folders of ``--also``, as far as they hold anything of it. ``lost`` says what shows that its main component is gone:
    what is there was saved beside that, and is not what the step is about.
    """

    path: Path
    step: int | None
    places: tuple[Place, ...]
    given: Path | None = None
    more: tuple[Found, ...] = ()
    lost: str = ""

    def place(self, name: str) -> Place | None:
        return next((place for place in self.places if place.name == name), None)

    def is_named(self, place: Place) -> bool:
        """Whether a file of the component was passed: then that is meant, and nothing that lies beside it."""
        return self.given in place.match.files

    def trainer(self, run: Path | None) -> str:
        """The name of the trainer that wrote it; ``run`` is the folder of its steps."""
        # Steps may lie in a folder of the run, such as checkpoint/.
        inner = self.path.parent if run is not None and self.path.parent.parent == run else run
        return trainer_of(self.places[0].match, self.path, inner)

    @property
    def is_file(self) -> bool:
        """Whether it is a file of weights by itself."""
        return any(self.path in place.match.files for place in self.places)

    @property
    def numbered_at(self) -> Path:
        """What has the number of the step in its name: the checkpoint, or the step folder that the file which was passed lies in."""
        return Path(numbered_path(self.path)) if self.is_file and self.step is not None else self.path

    def known_place(self, name: str) -> Place:
        """The place of a component. Raises NotFound if there is none of that name."""
        place = self.place(name)
        if place is None:
            raise NotFound(f"there is no component {name}", path=self.path, expected=", ".join(p.name for p in self.places) or None)
        return place


@dataclass(frozen=True, slots=True)
class Blocked:
    """A step folder that cannot be accessed: it may hold anything, so no older step may silently replace it."""

    path: Path
    step: int
    error: Unreadable


Dated = Found | Blocked | Path
"""A step, or the folder of one."""


def path_of(step: Dated) -> Path:
    return step if isinstance(step, Path) else step.path


def numbered_at(step: Dated) -> Path:
    """Where the number of a step stands: `Found.numbered_at`."""
    return step.numbered_at if isinstance(step, Found) else path_of(step)


def number_of(step: Dated) -> int | None:
    """The number of a step; that of a folder is in its name, also of one whose save did not finish."""
    if not isinstance(step, Path):
        return step.step
    number = step_of(step)
    return number_in(step.name, PARTIAL) if number is None else number


def counted(step: Dated) -> tuple[int | None, int | None]:
    """What one step of a run is told from the others by: its epoch, where its path says it, and its number."""
    return epoch_of(numbered_at(step)), number_of(step)


def of_other_epochs(steps: Sequence[Dated]) -> bool:
    """Whether some of them are of other epochs than others, as their paths say: the same number is then not the same step."""
    return len({epoch for epoch, _ in map(counted, steps)} - {None}) > 1


def same_step(one: Dated, other: Dated) -> bool:
    """Whether two are the same step by number, and no epoch contradicts."""
    return number_of(one) == number_of(other) and not of_other_epochs((one, other))


def is_in_epoch(step: Path) -> bool:
    """Whether a step lies in the folder of its epoch, which is that of several."""
    return epoch_of(step) != epoch_of(Path(step.name))


def ages(steps: Iterable[Dated]) -> Callable[[Dated], Age]:
    """How new steps of a run are, for those that the ``steps`` with weights lie among: the one order of steps that there is.

    Where all of these say their epoch, that comes first: steps may be counted anew in each. What does not say it may then be of the latest,
    and a folder of an epoch may hold any step of that.
    """
    listed = list(steps)
    if not listed or any(epoch_of(numbered_at(step)) is None for step in listed):
        return lambda step: (0, number_of(step) or 0)

    def age(step: Dated) -> Age:
        path = numbered_at(step)
        epoch = epoch_of(path)
        if epoch is None and counter_of(path) is None and counter_of(path.parent) == "epochs":
            epoch = step_of(path.parent)  # one whose save did not finish
        if epoch is not None:
            return epoch, number_of(step) or 0
        if counter_of(path) == "epochs":
            return number_of(step) or 0, float("inf")
        return float("inf"), number_of(step) or 0

    return age


def are_counted_anew(steps: Iterable[Dated]) -> bool:
    """Whether numbers do not tell the order of steps, since they begin anew in each epoch, and all say theirs."""
    listed = list(steps)
    if any(epoch_of(numbered_at(step)) is None for step in listed):
        return False
    ordered = sorted({(epoch or 0, number or 0) for epoch, number in map(counted, listed)})
    return any(one[0] < other[0] and one[1] >= other[1] for one, other in itertools.pairwise(ordered))


@dataclass(frozen=True, slots=True)
class Tracker:
    """What a small file of the trainer, or a link called ``latest``, says the last step is. Never trusted, only compared."""

    name: str
    step: int
    said: str = ""
    """What it says in place of a number: Megatron's ``release`` is a model that was not trained yet."""

    def __str__(self) -> str:
        return f"{self.name} says {self.said or self.step}"


@dataclass(frozen=True, slots=True)
class Target:
    """What a path refers to: the checkpoints of a run, oldest first, or one checkpoint.

    ``run`` is None if the path is a checkpoint or lies inside one. ``nodes`` counts the
    folders that were taken together; ``steps_inside`` counts step folders in a folder that is a checkpoint itself, and ``refused``
    names those of them that are not read; ``bare`` are
    step folders without weights, ``blocked`` those that could not be looked at; ``stray``: a weights file beside them that is
    no model, and why not; ``folders`` are those in which the steps lie, if there are several;
    ``partial`` are folders of steps whose names say that the save is not whole, ``made`` outputs of ckpt that are named like steps;
    ``also`` is what the folders of ``--also`` were taken for; ``unread_trackers`` says of trackers why they were not read.
    """

    path: Path
    run: Path | None
    checkpoints: tuple[Found, ...]
    trackers: tuple[Tracker, ...] = ()
    nodes: int = 1
    steps_inside: int = 0
    bare: tuple[Path, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    stray: tuple[str, str] | None = None
    folders: tuple[Path, ...] = ()
    refused: tuple[str, ...] = ()
    partial: tuple[Path, ...] = ()
    made: tuple[Path, ...] = ()
    also: tuple[Target, ...] = ()
    unread_trackers: tuple[str, ...] = ()

    def label(self, path: Path) -> str:
        """How a step folder is called in messages: by its name, or where steps lie in several folders, as it lies in the run."""
        outer = self.path if self.folders else self.run if is_in_epoch(path) else None
        return str(path.relative_to(outer)) if outer is not None and path.is_relative_to(outer) else path.name

    def called(self, step: Found) -> str:
        """A step by its number, or by its label where that does not tell it."""
        return self.label(step.path) if self.counted_anew else str(step.step)

    @property
    def age(self) -> Callable[[Dated], Age]:
        """How new a step of this run is; made once where many are compared."""
        return ages(self.checkpoints or self.blocked)

    @property
    def counted_anew(self) -> bool:
        """Whether the numbers of steps do not tell their order."""
        return are_counted_anew(self.checkpoints)

    def since(self, first: Found) -> Callable[[Dated], bool]:
        """Whether a step is at least as new as the ``first``."""
        age = self.age
        begin = age(first)
        return lambda step: age(step) >= begin

    def option(self, step: Found) -> str | None:
        """The option that asks for a step by its number; None where that is the number of steps of other epochs too."""
        there: list[Dated] = [*self.checkpoints, *self.blocked, *self.bare]
        several = any(number_of(other) == step.step and counted(other) != counted(step) for other in there)
        return None if several else f"--step {step.step}"

    def check_readable(self, counts: Callable[[Blocked], bool], hint: str | None = None) -> None:
        """Raise Unreadable for the newest step folder that could not be looked at, of those that ``counts``."""
        newest = max((blocked for blocked in self.blocked if counts(blocked)), key=self.age, default=None)
        if newest is not None:
            newest.error.hint = ", or ".join(filter(None, (newest.error.hint, hint))) or None
            raise newest.error
