"""How folder names give a step: by the forms that trainers use (`formats.trainers`)."""

from __future__ import annotations

from pathlib import PurePath

from ckpt_cli.formats.trainers import STEPS, number_in


def step_of(folder: PurePath) -> int | None:
    """The step in the name of a folder (or the epoch, of trainers that count these); None for other names.

    >>> step_of(PurePath("global_step_20")), step_of(PurePath("epoch_3")), step_of(PurePath("step_final"))
    (20, 3, None)
    """
    return number_in(folder.name, STEPS)


def nearest_step(path: PurePath) -> int | None:
    """The step in a path: in its own name, or in that of the nearest folder above."""
    return next((step for each in (path, *path.parents) if (step := step_of(each)) is not None), None)
