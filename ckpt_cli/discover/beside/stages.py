"""Whether the folder of a component is one stage of a pipeline: its neighbour has the same modules of other layers, and no tensor twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import CkptError, PartOfSet
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Match, ReadOptions
from ckpt_cli.formats.registry import describe, recognise
from ckpt_cli.formats.sets.stages import complement, part_of_stages, siblings
from ckpt_cli.tensors.component import Component
from ckpt_cli.tensors.tensor import Tensor


def refuse_stage(found: Found, place: Place, component: Component, files: Files) -> None:
    """Raise PartOfSet if the folder of a component is one stage of a pipeline, as `stage_trouble` says."""
    like = (place.match.format, place.match.component)
    for folder in dict.fromkeys((place.match.root, place.home, found.path)):
        trouble = stage_trouble(folder, component.tensors, files, lambda match: (match.format, match.component) == like)
        if trouble is not None:
            raise trouble


def stage_trouble(folder: Path, tensors: Mapping[str, Tensor], files: Files, is_like: Callable[[Match], bool]) -> PartOfSet | None:
    """The error for a folder if the nearest one of the same name, but for its number, holds the rest of the model; None otherwise.

    Stages of a training (``stage1``, ``stage2``) hold the same names, and models of different kinds have no module in common.
    """
    there = Folders()
    others = siblings(folder, there) if there.is_folder(folder) else []
    held = _tensors_in(others[0], files, is_like) if others else None
    return part_of_stages(folder, others) if held is not None and complement(tensors, held) else None


def _tensors_in(folder: Path, files: Files, is_like: Callable[[Match], bool]) -> Mapping[str, Tensor] | None:
    """What a folder holds of the same kind; None if it cannot be told."""
    try:
        match = next((match for match in recognise(folder) if is_like(match)), None)
        return describe(replace(match, trouble=None), files, ReadOptions()).tensors if match is not None else None
    except CkptError:
        return None
