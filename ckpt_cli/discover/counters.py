"""Which step a training state records: to notice ranks joined from several saves, and another step's state in a folder.

Shard files record no step, but the small state files beside them do. How they count varies: accelerate steps a scheduler once per
process, gradient accumulation once per several batches, others once per epoch. So a number alone never contradicts the name of a
folder; `foreign_step` explains what does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_cli.discover.found import Found, Place
from ckpt_cli.discover.state_files import StateFile, find_state_files
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import entries_in, is_file, is_folder
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import Files, read_small, size_of
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.assembly import ranks_of
from ckpt_cli.formats.step_names import counts_other, step_of
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.plain_values import TensorValue, ValueReader

STEPS = ("global_step", "step", "train_steps", "iteration", "batch")
SCHEDULERS = tuple(f"{prefix}scheduler{suffix}" for prefix in ("lr_", "") for suffix in ("", "_state", "s", "_state_dict", "_states"))
"""What trainers call the state of the learning rate schedule."""

MAX_BYTES = 1 << 20
"""The size up to which commands that only need weights read a state file: schedulers and random states have some kilobytes."""

MAX_SIBLINGS = 3

TRAINER_STATE = "trainer_state.json"
MAX_TRAINER_STATE = 16 << 20
"""It has a line for each logged step: some megabytes after a long training."""


def counter_of(values: Mapping[str, Any]) -> int | None:
    """The step that the state of a rank counts: of its own, or that of its scheduler. None if it says none."""
    for name in STEPS:
        if (number := natural(values.get(name))) is not None:
            return number
    return next((found for name in SCHEDULERS if (found := scheduler_step(values.get(name))) is not None), None)


def scheduler_step(scheduler: Any) -> int | None:
    """The step of a scheduler: of several, all of them."""
    if isinstance(scheduler, list):
        steps = {scheduler_step(each) for each in scheduler}
        return steps.pop() if len(steps) == 1 else None
    return natural(scheduler.get("last_epoch")) if isinstance(scheduler, dict) else None


def disagreement(counters: Mapping[int, int], world: int) -> str | None:
    """The message for ranks whose states record different steps; None if they agree."""
    by_step: dict[int, list[int]] = {}
    for rank, step in counters.items():
        by_step.setdefault(step, []).append(rank)
    if len(by_step) < 2:
        return None
    told = [f"{step} ({ranks_of(ranks, world)})" for step, ranks in sorted(by_step.items())]
    return f"the training states of the ranks are from different steps: {few(told, 4)}; some ranks may be from an older save"


def notes_of_ranks(place: Place, files: Files) -> list[Note]:
    """A warning if the state files beside rank files record different steps. Large and unreadable files are ignored."""
    try:
        return _notes_of_ranks(place, files)
    except CkptError:
        return []  # weights are what is wanted; `extract-state` refuses such files


def _notes_of_ranks(place: Place, files: Files) -> list[Note]:
    homes = list(dict.fromkeys((place.home, *place.more_homes, place.match.root, *place.match.more_roots)))
    counters: dict[int, int] = {}
    if len(place.match.ranks) < 2 and not place.more_homes:
        return []
    for file in find_state_files(list(filter(is_folder, homes))):
        number = _read(file, files) if file.rank is not None and file.kind == "extra" and file.rank not in counters else None
        if number is not None and file.rank is not None:
            counters[file.rank] = number
    text = disagreement(counters, max([*place.match.ranks, *counters], default=0) + 1)
    if text is None and place.more_homes:
        text = nodes_disagree(homes)
    return [Note("warning", "ranks-of-steps", text)] if text else []


def nodes_disagree(homes: Sequence[Path]) -> str | None:
    """The message for node folders whose trainer_state.json record different steps."""
    steps: dict[int, Path] = {}
    for path in dict.fromkeys(home / TRAINER_STATE for home in homes):
        content = parse_json(read_small(path)) if is_file(path) else None
        number = natural(content.get("global_step")) if isinstance(content, dict) else None
        if number is not None:
            steps.setdefault(number, path)
    if len(steps) < 2:
        return None
    told = [f"{number} ({path.parent})" for number, path in sorted(steps.items())]
    return f"trainer_state.json of the joined folders names different steps: {few(told, 4)}"


def renamed_notes(found: Found, components: Iterable[Component]) -> list[Note]:
    """A warning if what lies in a step folder records another step than its name.

    That is trainer_state.json right in it, or what a format reads beside the weights (`Component.step`). Without a number in the name,
    these two are compared.
    """
    beside, counted = [each.step for each in components], trainer_step(found.numbered_at)
    others = sorted({number for number in (*beside, counted) if number is not None and number != found.step})
    if found.step is not None:
        return [step_note(found, few(list(map(str, others))))] if others else []
    return two_steps_notes(counted, others)


def two_steps_notes(counted: int | None, others: Iterable[int]) -> list[Note]:
    """A warning if trainer_state.json, which says ``counted``, is of another step than what ``others`` beside it say."""
    differing = [str(number) for number in others if counted is not None and number != counted]
    text = f"{TRAINER_STATE} is of step {counted}, but the files of the weights of {few(differing)}: files of two saves are mixed"
    return [Note("warning", "step-differs", text)] if differing else []


def trainer_step(folder: Path) -> int | None:
    """The step that trainer_state.json right in a folder records; None if there is none that can be read."""
    return natural(trainer_state(folder).get("global_step"))


def trainer_state(folder: Path) -> Mapping[str, Any]:
    """The content of trainer_state.json right in a folder; nothing if there is none that can be read."""
    with contextlib.suppress(CkptError):  # weights are what is wanted
        path = folder / TRAINER_STATE
        content = parse_json(read_small(path, MAX_TRAINER_STATE)) if is_file(path) else None
        return content if isinstance(content, dict) else {}
    return {}


def step_note(found: Found, said: object) -> Note:
    """That the state in a folder is of another step than its name says: a warning, unless the name counts something else."""
    if (counter := counts_other(found.numbered_at)) is not None:
        return Note("info", "step-differs", f"{found.numbered_at.name} is numbered by {counter}; the state in it says step {said}")
    return Note("warning", "step-differs", f"the folder says step {found.step}, the state in it says {said}")


def foreign_step(found: Found, place: Place, said: int, files: Files) -> str | None:
    """Why a scheduler's number shows that it belongs to another step than its folder; None if it does not.

    That it is the number of another folder of the run, and that no state of the others counts in another way: if the scheduler of
    some other folder is not at that folder's number, this trainer counts otherwise (half of 200 is 100 with gradients accumulated over two
    batches, and twice 100 is 200 with two processes of accelerate).
    """
    if found.step is None or said == found.step:
        return None
    try:
        siblings = {step: path for path in entries_in(found.path.parent) if (step := step_of(path)) is not None and step != found.step}
        if said not in siblings:
            return None
        inside = place.home.relative_to(found.path) if place.home.is_relative_to(found.path) else Path()
        nearest = sorted(siblings, key=lambda step: (step != said, -step))
        states = ((step, _of_folder(siblings[step] / inside, siblings[step], files)) for step in nearest)
        for step, counter in itertools.islice(((step, counter) for step, counter in states if counter is not None), MAX_SIBLINGS):
            if counter != step:
                return None
    except CkptError:
        return None  # what other folders hold is only looked at for a warning
    return f"the folder says step {found.step}, but its scheduler is at {said}, the step of {siblings[said].name}"


def _of_folder(home: Path, step: Path, files: Files) -> int | None:
    """The step of the scheduler of another checkpoint."""
    for file in find_state_files([folder for folder in (home, step) if is_folder(folder)]):
        if file.kind in ("extra", "scheduler") and (number := _read(file, files)) is not None:
            return number
    return None


def _read(file: StateFile, files: Files) -> int | None:
    if size_of(file.path) > MAX_BYTES:
        return None
    parsed = TorchFile(files.source(file.path))
    values = ValueReader(parsed).read(parsed.root)
    if file.kind == "scheduler":
        return scheduler_step(values)
    return counter_of({str(key): value for key, value in values.items()}) if isinstance(values, dict) else None


def natural(value: Any) -> int | None:
    """A number that counts something, also one in a tensor; None for all else."""
    if isinstance(value, TensorValue) and value.shape == () and value.dtype.kind == "int":
        value = value.numbers()[0]
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
