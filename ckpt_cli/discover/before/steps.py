"""The steps before and after one, which tell what a step of this training has."""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.discover.components import named_alike
from ckpt_cli.discover.found import Found, ages
from ckpt_cli.files.folders import entries_in, is_folder
from ckpt_cli.formats.step_names import step_of


def step_before(found: Found) -> Path | None:
    """The folder of the step before, beside that of a step and named like it. Raises Unreadable."""
    return _neighbours(found)[0]


def steps_around(found: Found) -> list[Path]:
    """The folders of the step before and of the one after, as far as there are such. Raises Unreadable."""
    return [step for step in _neighbours(found) if step is not None]


def _neighbours(found: Found) -> tuple[Path | None, Path | None]:
    if found.step is None or step_of(found.path) != found.step or not is_folder(found.path):
        return None, None
    steps = [path for path in entries_in(found.path.parent) if step_of(path) is not None and named_alike(path, found.path)]
    age = ages(steps)
    own = age(found.path)
    steps.sort(key=age)
    before = next((path for path in reversed(steps) if age(path) < own and is_folder(path)), None)
    return before, next((path for path in steps if age(path) > own and is_folder(path)), None)
