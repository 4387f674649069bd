"""What was found at a path, by names: components, checkpoints, runs. No file is read for this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.errors import NotFound, Unreadable
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.step_names import epoch_of
from ckpt_cli.formats.trainers import trainer_of


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Another reading of a component, which was not taken: what it is, and its folder where that is one of its own."""

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
    checkpoint in the folders of ``--also``, as far as they hold anything of it.
    """

    path: Path
    step: int | None
    places: tuple[Place, ...]
    given: Path | None = None
    more: tuple[Found, ...] = ()

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
    ``also`` is what the folders of ``--also`` were taken for.
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

    def label(self, path: Path) -> str:
        """How a step folder is called in messages: by its name, or where steps lie in several folders, as it lies in the run."""
        outer = self.path if self.folders else self.run if epoch_of(path) != epoch_of(Path(path.name)) else None
        return str(path.relative_to(outer)) if outer is not None and path.is_relative_to(outer) else path.name

    def check_readable(self, counts: Callable[[int], bool], hint: str | None = None) -> None:
        """Raise Unreadable for the newest step folder that could not be looked at, of those whose step ``counts``."""
        newest = max((blocked for blocked in self.blocked if counts(blocked.step)), key=lambda blocked: blocked.step, default=None)
        if newest is not None:
            newest.error.hint = ", or ".join(filter(None, (newest.error.hint, hint))) or None
            raise newest.error
