"""Which order checkpoints were saved in, by what is recorded of them where the names of their folders say nothing.

That is what trainer_state.json counts, the step of which an output of ckpt is, and the revisions of a model in the Hub cache
(``refs/step1000``). Of files in one folder it is the ``global_step`` in each, and a number that is all in which their names differ.
Numbers of other trainings count from the start, so they are only compared within one. Wherever else checkpoints record their steps, these
are an order too, though one that is certain only where the numbers in their paths are in the same.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ckpt_cli.averaging.histories import history_notes
from ckpt_cli.averaging.path_numbers import NUMBER_IN_NAMES, numbers_in, value_of
from ckpt_cli.discover.counters import TRAINER_STATE, trainer_step
from ckpt_cli.discover.downloads.hub_cache import cached_model, revisions_of
from ckpt_cli.discover.open import Opened
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.manifest import read_manifest
from ckpt_cli.formats.step_names import is_like_step, number_in_manifest
from ckpt_cli.tensors.component import Component

NUMBER = re.compile(r"[0-9]+")

GLOBAL_STEP = "global_step"
COUNTERS = ("iteration", "iter", "step", "steps", "ss_steps", "epoch", "epochs", "ss_epoch")
"""What files of people's own loops, and of kohya's scripts (``ss_``), call the number of a save."""


@dataclass(frozen=True, slots=True)
class RecordedOrder:
    """What is recorded of each checkpoint, in words, as a number or several that are compared; ``by`` is what records it.

    Nothing is recorded of those without an age. ``is_certain``: these are of one training, so no other order can be meant.
    """

    by: str
    names: tuple[str, ...]
    ages: tuple[tuple[int, ...], ...]
    is_certain: bool = True

    @property
    def inversion(self) -> tuple[int, int] | None:
        """The first two checkpoints, next to each other but for those of which nothing is recorded, of which the second is older."""
        known = [number for number, age in enumerate(self.ages) if age]
        return next(((a, b) for a, b in itertools.pairwise(known) if self.ages[a] > self.ages[b]), None)

    @property
    def tells_all(self) -> bool:
        """Whether it tells every two of them apart."""
        return all(self.ages) and len(set(self.ages)) == len(self.ages)


def recorded_order(opened: Sequence[Opened]) -> RecordedOrder | None:
    """The order that is recorded of several checkpoints; None where it is not, or for what is known to be of several trainings."""
    order = _of_one_training(opened)
    return order if order is not None else _of_each(opened)


def _of_one_training(opened: Sequence[Opened]) -> RecordedOrder | None:
    paths = [each.found.path for each in opened]
    files, folders = [each.found.is_file for each in opened], _folders(opened)
    recorded = None
    if len(set(folders)) == len(folders) > 1:
        recorded = _of_trainer_states(folders) or _of_outputs(folders) or _of_revisions(folders)
    if recorded is not None or len({path.parent for path in paths}) > 1:
        return recorded
    names = [path.name for path in paths]
    if all(files):
        return _of_contents(opened) or _of_names(names)
    return _of_names(names) if all(map(is_like_step, names)) else None


def _folders(opened: Sequence[Opened]) -> list[Path]:
    return [each.found.path.parent if each.found.is_file else each.found.path for each in opened]


def _of_contents(files: Sequence[Opened]) -> RecordedOrder | None:
    """By the step that each file of a trainer holds."""
    steps = [step for each in files if (step := each.components[0].component.step) is not None]
    return _of_numbers(f"{GLOBAL_STEP} in each file", steps) if len(steps) == len(files) else None


def _of_each(opened: Sequence[Opened]) -> RecordedOrder | None:
    """By the step that each records, wherever it lies; what only some record is compared among these."""
    folders, components = _folders(opened), [each.components[0].component for each in opened]
    states = _states(folders)
    if history_notes(states, list(map(str, states))):
        return None
    of_states = [_said(trainer_step(state), TRAINER_STATE) for state in states]
    steps = [said or _said(each.step, GLOBAL_STEP) for said, each in zip(of_states, components, strict=True)]
    columns = [steps, *([_said(_counted(each, name), name) for each in components] for name in COUNTERS)]
    known = [column for column in columns if sum(said is not None for said in column) > 1]
    column = next((column for column in known if None not in column and len(set(column)) > 1), known[0] if known else None)
    if column is None:
        return None
    by = " and ".join(dict.fromkeys(said[1] for said in column if said is not None))
    names = tuple("none" if said is None else str(said[0]) for said in column)
    order = RecordedOrder(by, names, tuple(() if said is None else (said[0],) for said in column), is_certain=False)
    numbers = numbers_in([each.found.path for each in opened])
    # Two facts that are independent: the numbers of the paths, and what was recorded.
    is_certain = numbers is not None and order.tells_all and _ranked(numbers) == _ranked(order.ages)
    return replace(order, is_certain=is_certain)


def _said(number: int | None, by: str) -> tuple[int, str] | None:
    return None if number is None else (number, by)


def _ranked(ages: Sequence[tuple[int, ...]]) -> list[int]:
    return sorted(range(len(ages)), key=ages.__getitem__)


def _states(folders: Sequence[Path]) -> list[Path]:
    """The folders of trainer_state.json of each: itself, or the one around it where that is another for each."""
    if len(set(folders)) < len(folders):
        return [folder / "_" for folder in folders]  # one for several says nothing of each
    outer = [folder.parent for folder in folders]

    def state_of(folder: Path) -> Path:
        return folder if outer.count(folder.parent) > 1 or is_file(folder / TRAINER_STATE) else folder.parent

    return list(map(state_of, folders))


def _counted(component: Component, name: str) -> int | None:
    """A number that the file of weights has beside them, or in its header."""
    said = [component.metadata[name]] if name in component.metadata else [leaf.text for leaf in component.leaves if leaf.name == name]
    return int(said[0]) if len(said) == 1 and said[0].isascii() and said[0].isdecimal() else None


def _of_names(names: Sequence[str]) -> RecordedOrder | None:
    """By the one number in which names differ: two of them may be a step and its loss, and say nothing."""
    if len({NUMBER_IN_NAMES.sub("N", name) for name in names}) > 1:
        return None
    numbers = zip(*(NUMBER_IN_NAMES.findall(name) for name in names), strict=True)
    differing = [column for column in numbers if len(set(column)) > 1]
    values = [value_of(number) for number in differing[0]] if len(differing) == 1 else []
    if not values or None in values:
        return None
    return RecordedOrder("their names", tuple(names), tuple((value,) for value in values if value is not None))


def _of_trainer_states(folders: Sequence[Path]) -> RecordedOrder | None:
    steps = [step for folder in folders if (step := trainer_step(folder)) is not None]
    if len(steps) < len(folders) or history_notes(folders, [folder.name for folder in folders]):
        return None
    return _of_numbers(TRAINER_STATE, steps)


def _of_outputs(folders: Sequence[Path]) -> RecordedOrder | None:
    steps, runs = list[int](), set[Path]()
    for folder in folders:
        with contextlib.suppress(CkptError):
            made = read_manifest(folder)
            source = made.facts.get("checkpoint") if made is not None else None
            number = number_in_manifest(made.facts) if made is not None else None
            if isinstance(source, str) and number is not None:
                steps.append(number)
                runs.add(Path(source).parent)
    return _of_numbers(MANIFEST, steps) if len(steps) == len(folders) and len(runs) == 1 else None


def _of_numbers(by: str, steps: Sequence[int]) -> RecordedOrder:
    return RecordedOrder(by, tuple(map(str, steps)), tuple((step,) for step in steps))


def _of_revisions(folders: Sequence[Path]) -> RecordedOrder | None:
    """Of one model, by names that differ in numbers alone: ``stage1-step1000-tokens5B``, each of which counts before the next."""
    if len({folder.parent for folder in folders}) > 1 or any(cached_model(folder) is None for folder in folders):
        return None
    of_commit: dict[str, dict[str, str]] = {}
    for name, commit in revisions_of(folders[0].parent.parent).items():
        if is_like_step(name) and NUMBER.search(name):
            of_commit.setdefault(commit, {}).setdefault(NUMBER.sub("N", name), name)
    nothing: Mapping[str, str] = MappingProxyType({})
    named = [of_commit.get(folder.name, nothing) for folder in folders]
    form = next((form for form in named[0] if all(form in each for each in named)), None)
    if form is None:
        return None
    names = tuple(each[form] for each in named)
    return RecordedOrder("refs of the Hub cache", names, tuple(tuple(map(int, NUMBER.findall(name))) for name in names))
