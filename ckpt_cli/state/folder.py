"""A training state as files: what `extract-state` writes, and `merge --with-state` beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckpt_cli.files.folders import is_file
from ckpt_cli.files.source import Files, FileSource
from ckpt_cli.state.torch_writer import about_torch_bytes, torch_bytes
from ckpt_cli.state.training_state import TrainingState, without_unrepresented
from ckpt_cli.tensors.plain_values import to_json

EXTRA = "extra_state_merged.pt"
SCHEDULER = "lr_scheduler_state.json"
TRAINING = "training_state.json"
DATALOADER = "dataloader_state.pt"
ARGUMENTS = "args.json"
OPTIMIZER_WEIGHTS = "optimizer.safetensors"
OPTIMIZER = "optimizer.json"


def state_files(state: TrainingState, framework: str, *, dry_run: bool = False) -> dict[str, bytes | Path]:
    """The files that hold a training state, by name; in a dry run, those that torch would write are zeros, about as many as it would."""
    written = about_torch_bytes if dry_run else torch_bytes
    side: dict[str, bytes | Path] = dict(state.copies)
    extra = without_unrepresented(state.extra)
    if extra:
        side[EXTRA] = written(extra)
    if state.scheduler is not None:
        side[SCHEDULER] = json_bytes(state.scheduler)
    if isinstance(arguments := state.extra.get("args"), dict):
        side[ARGUMENTS] = json_bytes(arguments)
    if state.dataloader is not None:
        side[DATALOADER] = written(without_unrepresented(state.dataloader))
    training = {
        **state.training,
        "framework": framework,
        "world_size": state.ranks or None,
        "read": sorted({path.name for path in state.sources}),
        "copied": sorted(state.copies),
        "not_represented": state.lost,
        "findings": [{"code": note.code, "level": note.level, "text": note.text} for note in state.notes],
    }
    side[TRAINING] = json_bytes(training)
    return side


def state_sources(state: TrainingState, files: Files) -> tuple[FileSource, ...]:
    """The files that a training state was read or is copied from, which must stay as they are until it is written."""
    return tuple(files.source(path) for path in (*state.sources, *state.copies.values()) if is_file(path))


def json_bytes(content: Any) -> bytes:
    """A value as a JSON file."""
    return (json.dumps(to_json(content), indent=2) + "\n").encode()
