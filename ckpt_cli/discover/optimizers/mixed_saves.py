"""Whether trainer_state.json, the scheduler and the optimizer beside it are of one save, by what each of them counts.

Copies that compare sizes alone (``rsync --size-only``, ``aws s3 sync --size-only``) leave files of an older save: those of optimizer,
scheduler and weights have one size at every step, and trainer_state.json grows. There the Hugging Face Trainer counts steps of its
optimizer, and takes a step of both or, where gradients overflowed, of none. A number alone shows nothing: schedulers of ReduceLROnPlateau
count evaluations, those of accelerate every process. Two of three that agree do, or a learning rate that was logged for one step alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.discover.counters import MAX_BYTES, TRAINER_STATE, natural, scheduler_step, trainer_state
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.discover.optimizers.files import find_optimizer_files
from ckpt_cli.discover.state_files import find_state_files
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import folders_in, is_folder
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.files.source import Files, size_of
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.optimizer_state import states_of_optimizers
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.plain_values import TensorValue, ValueReader
from ckpt_cli.urls import is_remote

FEW, PART = 20, 50
"""Steps that may be left out since gradients overflowed: so many, as a loss scale that is too high takes to fall, and one in so many."""

LEAST_INTERVAL = 20
"""Steps between saves from which on it is no chance that a count is just the number of a save."""

ROUNDED = 1e-5
"""The part in which learning rates may differ that a log has rounded."""

MOST_PARAMETERS = 1000
"""Parameters whose own counts are read: those of a step are the same, or less where a parameter was not used in each."""


def mixed_notes(found: Found, place: Place, files: Files, counted: Callable[[], int | None] | None = None) -> list[Note]:
    """A warning if scheduler or optimizer of a step are of another save than its trainer_state.json.

    ``counted`` gives the steps of an optimizer that is described anyhow; without it, the file of one is only read where the scheduler's
    number differs.
    """
    with contextlib.suppress(CkptError):  # weights are what is wanted; `extract-state` refuses such files
        state = trainer_state(found.path)
        total = natural(state.get("global_step"))
        if total is None or place.match.number or (counted is None and is_remote(found.path)):
            return []
        homes = [folder for folder in (place.home, found.path) if is_folder(folder)]
        name, scheduler = _scheduler(homes, files)
        text = _text(name, scheduler, counted or (lambda: _of_file(homes, files)), state, total, found, asked=counted is not None)
        return [Note("warning", "step-differs", f"{TRAINER_STATE} is of step {total}, but {text}")] if text is not None else []
    return []


def _text(
    name: str, scheduler: Any, counted: Callable[[], int | None], state: Mapping[str, Any], total: int, found: Found, *, asked: bool
) -> str | None:
    stands = scheduler_step(scheduler)
    others = "files of two saves are mixed, as by a copy that compares sizes alone, and the weights may be those of either"
    if stands is None or stands == total:
        own = counted() if asked else None
        if own is None or own >= total or not (_is_save(own, state) or _has_sibling(own, found)):
            return None
        return f"the optimizer has taken {own} steps: {others}, unless it was started anew"
    older = _is_older(scheduler, stands, state, total)
    if older:
        return f"{name} is of step {stands}, by its learning rate too: {others}"
    if older is not None or counted() != stands or (0 < total - stands <= FEW + total // PART and not _is_save(stands, state)):
        return None
    anew = f", unless training went on at step {total - stands} with a new optimizer" if stands < total else ""
    return f"{name} and the optimizer are of step {stands}: {others}{anew}"


def _is_save(step: int, state: Mapping[str, Any]) -> bool:
    """Whether a step is one at which a training saves."""
    interval = natural(state.get("save_steps"))
    return interval is not None and interval >= LEAST_INTERVAL and step > 0 and step % interval == 0


def _has_sibling(step: int, found: Found) -> bool:
    return any(step_of(path) == step for path in folders_in(found.path.parent) if path != found.path)


def _is_older(scheduler: Mapping[str, Any], stands: int, state: Mapping[str, Any], total: int) -> bool | None:
    """Whether the learning rate of a scheduler was logged for its own step and for none after that; None if the log does not tell.

    It is logged before the scheduler takes its step, or after it.
    """
    rates = scheduler.get("_last_lr")
    rate = rates[0] if isinstance(rates, (list, tuple)) and rates else None
    history = state.get("log_history")
    if not isinstance(rate, float) or not isinstance(history, list):
        return None
    logged = [
        (entry["step"], math.isclose(entry["learning_rate"], rate, rel_tol=ROUNDED))
        for entry in history
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and isinstance(entry.get("learning_rate"), float)
    ]
    own = any(same for step, same in logged if step in (stands, stands + 1))
    later = [(step, same) for step, same in logged if stands + 1 < step <= total]
    if stands < total and own and later and not any(same for _, same in later):
        return True
    # A rate that stays says nothing; one that has changed since and is the last is that of this step, also where a schedule began anew.
    return False if later and max(later)[1] and not (own and all(same for _, same in later)) else None


# -- what files say --------------------------------------------------------------------------------------------------


def _scheduler(homes: list[Path], files: Files) -> tuple[str, Any]:
    """The name and the state of the scheduler's file, small as they are; no state if there is none."""
    for file in find_state_files(homes):
        if file.kind == "scheduler" and not file.number and size_of(file.path) <= MAX_BYTES:
            parsed = TorchFile(files.source(file.path))
            return file.path.name, ValueReader(parsed).read(parsed.root)
    return "", None


def _of_file(homes: list[Path], files: Files) -> int | None:
    """How many steps the file of an optimizer counts; of ranks, the first one's."""
    listed = find_optimizer_files(homes)
    return steps_in(TorchFile(files.source(listed.ranks[min(listed.ranks)]))) if listed is not None else None


def steps_in(file: TorchFile) -> int | None:
    """The steps that the optimizer in a file of `torch.save` has taken, by its parameters or its groups; None if it does not count them."""
    values, nodes = ValueReader(file), list[Any]()
    for entries in states_of_optimizers(file.root):
        groups = entries["param_groups"]
        held = [*(as_dict(entries.get("state")) or {}).values()][:MOST_PARAMETERS]
        nodes += [slots for slots in map(as_dict, [*held, *(groups if isinstance(groups, list) else [])]) if slots is not None]
    return most_steps([values.read(slots["step"]) for slots in nodes if "step" in slots])


def most_steps(counts: list[Any]) -> int | None:
    """The largest of the counts that are whole numbers: a parameter that is not used in each step counts less."""
    numbers = [value.numbers()[0] if isinstance(value, TensorValue) and value.shape in ((), (1,)) else value for value in counts]
    whole = [int(number) for number in numbers if isinstance(number, (int, float)) and float(number).is_integer() and number >= 0]
    return max(whole, default=None)
