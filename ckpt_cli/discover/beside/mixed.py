"""Steps in one folder that may not be those of one run: numbers that count different things, or names of two trainers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckpt_cli.discover.found import Found, Target
from ckpt_cli.formats.step_names import counter_of
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note


def counter_notes(target: Target, taken: Found) -> list[Note]:
    """A warning where some steps are counted in epochs and others are not: no number says which of them is the newest."""
    counted = by_counter(target.checkpoints)
    if len(counted) < 2:
        return []
    text = f"{target.label(taken.path)} was taken for its number, but that does not tell the newest: {told_counters(counted)}"
    return [Note("warning", "counters", text)]


def by_counter(steps: Sequence[Found]) -> dict[str, list[Found]]:
    """Steps by what their numbers count."""
    counted: dict[str, list[Found]] = {}
    for found in steps:
        counted.setdefault(counter_of(found.path) or "steps", []).append(found)
    return counted


def told_counters(counted: Mapping[str, Sequence[Found]]) -> str:
    parts = [f"{few([found.path.name for found in steps], 3)} by {counter}" for counter, steps in counted.items()]
    return f"the folders are numbered {', '.join(parts)}"


def mixed_notes(target: Target, taken: Found) -> list[Note]:
    """A warning where the steps are by their names those of several trainers: then the highest number is only the newest of its own run."""
    runs = by_trainer(target)
    if not runs:
        return []
    told = "; ".join(f"{few([target.label(found.path) for found in steps], 4)} of {trainer}" for trainer, steps in runs.items())
    text = f"the steps here are by their names those of {len(runs)} runs: {told}"
    newest = f"{target.label(taken.path)} counts as the newest for its number, so pass a step folder or --step if another run is meant"
    return [Note("warning", "several-runs", f"{text}; {newest}")]


def by_trainer(target: Target) -> dict[str, list[Found]]:
    """Steps by the trainer that wrote them, if there are several.

    It only counts where the folders are named in another way too: what tells a trainer may be missing in some steps of one run.
    """
    runs: dict[str, list[Found]] = {}
    for found in target.checkpoints:
        runs.setdefault(found.trainer(target.run), []).append(found)
    forms = [{re.sub(r"[0-9]+", "N", found.path.name) for found in steps} for steps in runs.values()]
    apart = all(one.isdisjoint(other) for at, one in enumerate(forms) for other in forms[:at])
    return runs if apart and len(runs) > 1 else {}
