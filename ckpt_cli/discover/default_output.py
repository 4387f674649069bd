"""The default name of an output: that of its checkpoint. Trainers that count their steps by names may take it for one of these."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.discover.counters import TRAINER_STATE
from ckpt_cli.discover.downloads.hub_cache import cached_model
from ckpt_cli.discover.found import Found
from ckpt_cli.discover.places import MAIN
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders, is_file
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.formats.torch_files.reader import unmarked
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Note
from ckpt_cli.urls import is_remote

AMONG = "output-among-steps"
"""The code of a warning that is of use before the output is written."""

OF_TRANSFORMERS = re.compile(r"checkpoint-[0-9]+")
"""Its ``save_total_limit`` counts whatever begins so (`transformers.trainer_utils.sort_checkpoints`)."""
OF_ACCELERATE, ITS_STEPS, ITS_STATE = re.compile(r"checkpoint_[0-9]+"), "checkpoints", re.compile(r"random_states_[0-9]+\.pkl")
"""``automatic_checkpoint_naming``: ``total_limit`` and ``load_state()`` count whatever lies in the folder ``checkpoints``."""


def default_output(found: Found, component: str, what: str = "merged") -> Path:
    """``<checkpoint>_merged`` (or _state, ...) beside the checkpoint, with ``_<component>`` for any but the main one.

    Nothing is written into the Hub cache or a store: of a model in there, the output is in the current folder.
    """
    path = Path(absolute(found.path))
    stem = path.stem if is_file(path) and unmarked(path.name) == path.name else path.name
    cached = cached_model(path)
    folder = path.parent if cached is None and not is_remote(path) else Path(absolute("."))
    stem = stem if cached is None else cached
    main = component in MAIN and component == found.places[0].name
    return folder / f"{stem}_{what}{'' if main else f'_{component}'}"


def among_steps_notes(found: Found, output: Path) -> list[Note]:
    """A warning if an output lies where a training that may go on looks for its steps, and counts the output as one.

    The Trainer records after how many steps it is over; nothing that accelerate writes tells it.
    """
    step, there = Path(absolute(found.path)), Folders()
    if is_remote(found.path) or output.parent != step.parent:
        return []
    told = ""
    with contextlib.suppress(CkptError):  # where that cannot be read, nothing is known of it
        if OF_TRANSFORMERS.fullmatch(step.name):
            told = _lacking_steps(step.parent, there)
        elif OF_ACCELERATE.fullmatch(step.name) and step.parent.name == ITS_STEPS and there.files(step, ITS_STATE.fullmatch):
            told = "accelerate's total_limit and load_state() count it as one, if that goes on"
    if not told:
        return []
    text = f"{output.name} lies among the steps of a training: {told}; pass -o with a folder outside of {step.parent.name}/"
    return [Note("warning", AMONG, text)]


def _lacking_steps(run: Path, there: Folders) -> str:
    """What is said where the newest step of the Trainer in a folder is not the last one that it wanted."""
    steps = sorted(there.folders(run, OF_TRANSFORMERS.fullmatch), key=lambda step: int(step.name.partition("-")[2]))
    newest = next((step / TRAINER_STATE for step in reversed(steps) if there.is_file(step / TRAINER_STATE)), None)
    state = parse_json(read_small(newest), TRAINER_STATE) if newest is not None else None
    done, last = (state.get("global_step"), state.get("max_steps")) if isinstance(state, dict) else (None, None)
    if state is None or not (isinstance(done, int) and isinstance(last, int) and done < last) or _is_stopped(state):
        return ""
    return f"the Trainer's save_total_limit counts it as one, if that goes on after step {done} of {last}"


def _is_stopped(state: Mapping[str, Any]) -> bool:
    """Whether the Trainer recorded that it stops here, as callbacks for early stopping make it."""
    said: Any = state
    for key in ("stateful_callbacks", "TrainerControl", "args", "should_training_stop"):
        said = said.get(key) if isinstance(said, dict) else None
    return said is True
