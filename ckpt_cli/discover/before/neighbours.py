"""What of a step is otherwise than in the steps before and after it, in files and in tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpt_cli.discover.before.settings import step_settings_notes
from ckpt_cli.discover.before.tensors import step_tensors_notes
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.hub.assets import Assets
from ckpt_cli.tensors.component import Component, Note


def neighbour_notes(
    found: Found,
    place: Place,
    homes: Sequence[Path],
    component: Component,
    assets: Assets,
    options: ReadOptions,
    files: Files,
    *,
    is_linked: bool,
) -> list[Note]:
    """Warnings about a component and its ``assets`` that no neighbour of its step has so; ``homes`` may have side files.

    ``is_linked``: it is said already that files are those of another step.
    """
    tensors = [] if is_linked else step_tensors_notes(found, place, component.tensors, options, files)
    return [*step_settings_notes(found, homes, assets), *tensors]
