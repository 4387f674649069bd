"""Whether checkpoints are of one training, as far as trainer_state.json of the Hugging Face Trainer records it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_cli.discover.counters import TRAINER_STATE
from ckpt_cli.errors import CkptError
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.tensors.component import Note


def history_notes(paths: Sequence[Path], labels: Sequence[str]) -> list[Note]:
    """A warning about checkpoints that record other losses for a step that both have in their history.

    Each save of a training repeats the history of those before it. Nothing is said of checkpoints without one, or without a common step.
    """
    held = [(label, losses) for label, path in zip(labels, paths, strict=True) if (losses := _losses(path))]
    for (label, first), (other, second) in itertools.pairwise(held):
        step = next((step for step in first if step in second and second[step] != first[step]), None)
        if step is not None:
            text = f"{label} and {other} are of different trainings: {TRAINER_STATE} records other losses at step {step}"
            return [Note("warning", "different-runs", text)]
    return []


def _losses(folder: Path) -> Mapping[int, float]:
    """The loss at each step that is logged; of a step with several entries the first."""
    content: object = None
    with contextlib.suppress(CkptError):
        content = parse_json(read_small(folder / TRAINER_STATE))
    entries = content.get("log_history") if isinstance(content, dict) else None
    losses: dict[int, float] = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and isinstance(entry.get("loss"), float):
            losses.setdefault(entry["step"], entry["loss"])
    return losses
