"""Which order checkpoints were saved in, by what is recorded of them where the names of their folders say nothing.

That is what trainer_state.json counts, the step of which an output of ckpt is, and the revisions of a model in the Hub cache
(``refs/step1000``). Of files in one folder it is the ``global_step`` in each, and a number that is all in which their names differ.
Numbers of other trainings count from the start, so they are only compared within one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ckpt_cli.averaging.histories import history_notes
from ckpt_cli.discover.counters import TRAINER_STATE, trainer_step
from ckpt_cli.discover.downloads.hub_cache import cached_model, revisions_of
from ckpt_cli.discover.open import Opened
from ckpt_cli.errors import CkptError
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.manifest import read_manifest
from ckpt_cli.formats.step_names import is_like_step, number_in_manifest

NUMBER = re.compile(r"[0-9]+")
NUMBER_IN_NAMES = re.compile(r"[0-9]+(?:\.[0-9]+)*", re.ASCII)
"""A number in the name of a file: that of a learning rate or a width (``ema_0.99.pt``) tells no order."""


@dataclass(frozen=True, slots=True)
class RecordedOrder:
    """What is recorded of each checkpoint, in words, as a number or several that are compared; ``by`` is what records it."""

    by: str
    names: tuple[str, ...]
    ages: tuple[tuple[int, ...], ...]


def recorded_order(opened: Sequence[Opened]) -> RecordedOrder | None:
    """The order that is recorded for all of several checkpoints; None where it is not, or not as that of one training."""
    paths = [each.found.path for each in opened]
    files = [each.found.is_file for each in opened]
    folders = [path.parent if is_file else path for path, is_file in zip(paths, files, strict=True)]
    recorded = None
    if len(set(folders)) == len(folders) > 1:
        recorded = _of_trainer_states(folders) or _of_outputs(folders) or _of_revisions(folders)
    if recorded is not None or len({path.parent for path in paths}) > 1:
        return recorded
    names = [path.name for path in paths]
    if all(files):
        return _of_contents(opened) or _of_names(names)
    return _of_names(names) if all(map(is_like_step, names)) else None


def _of_contents(files: Sequence[Opened]) -> RecordedOrder | None:
    """By the step that each file of a trainer holds."""
    steps = [step for each in files if (step := each.components[0].component.step) is not None]
    return _of_numbers("global_step in each file", steps) if len(steps) == len(files) else None


def _of_names(names: Sequence[str]) -> RecordedOrder | None:
    """By the one number in which names differ: two of them may be a step and its loss, and say nothing."""
    if len({NUMBER_IN_NAMES.sub("N", name) for name in names}) > 1:
        return None
    numbers = zip(*(NUMBER_IN_NAMES.findall(name) for name in names), strict=True)
    differing = [column for column in numbers if len(set(column)) > 1]
    if len(differing) != 1 or not all(map(str.isdecimal, differing[0])):
        return None
    return RecordedOrder("their names", tuple(names), tuple((int(number),) for number in differing[0]))


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
