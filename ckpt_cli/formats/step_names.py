"""How folder names give a step."""

from __future__ import annotations

import re
from pathlib import PurePath

STEP_FOLDERS = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        r"global_steps?_?(?P<step>[0-9]+)",
        r"checkpoint[-_](?P<step>[0-9]+)",
        r"step[-_]?(?P<step>[0-9]+)(\.ckpt)?",
        r"epoch=[0-9]+-step=(?P<step>[0-9]+)(\.ckpt)?",
        r"epoch_[0-9]+_step_(?P<step>[0-9]+)",
        r"ep[0-9]+-ba(?P<step>[0-9]+)",
        r"iter_(?P<step>[0-9]{7})",
        r"(?P<step>[0-9]{7})",
    )
)


def step_of(folder: PurePath) -> int | None:
    """The step in the name of a folder; None for other names.

    >>> step_of(PurePath("global_step_20")), step_of(PurePath("epoch_3"))
    (20, None)
    """
    for regex in STEP_FOLDERS:
        fields = regex.fullmatch(folder.name)
        if fields:
            return int(fields["step"])
    return None


def nearest_step(path: PurePath) -> int | None:
    """The step in a path: in its own name, or in that of the nearest folder above."""
    return next((step for each in (path, *path.parents) if (step := step_of(each)) is not None), None)
