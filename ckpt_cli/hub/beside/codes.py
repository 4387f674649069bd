"""Files that say how weights were quantised, which engines believe also of weights that are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt_cli.hub.assets import HUB_FOLDER, Assets
from ckpt_cli.hub.beside.names import OF_CODES
from ckpt_cli.hub.classes.config_counts import STORED
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note


def settings_of_codes(names: Iterable[str]) -> list[str]:
    """The files among these that say how weights were quantised."""
    return sorted(name for name in names if OF_CODES.fullmatch(name))


def without_settings_of_codes(assets: Assets, tensors: Iterable[str], base: Path | None) -> tuple[Assets, list[Note]]:
    """Assets without files that tell of quantised weights, where those to be written have no scales; and what is said of it."""
    said = settings_of_codes(assets.files)
    if not said or has_scales(tensors):
        return assets, []
    of_base = [name for name in said if base is not None and assets.files[name].parent in (base, base / HUB_FOLDER)]
    files: Mapping[str, Path] = {name: path for name, path in assets.files.items() if name not in said}
    notes = []
    if of_base:
        text = f"{few(of_base)} of the base: not copied, since it tells of quantised weights, and no tensor is named like a scale"
        notes.append(Note("info", "settings-of-codes", text))
    notes += [Note("warning", "no-scales", f"{no_scales_text(name)}: it is not written") for name in said if name not in of_base]
    return replace(assets, files=files), notes


def has_scales(names: Iterable[str]) -> bool:
    """Whether tensors are named as quantised weights have them."""
    return any(STORED.search(name) for name in names)


def no_scales_text(name: str) -> str:
    """What is said of such a file beside weights without scales."""
    return f"{name} says that weights are quantised, but no tensor is named like a scale"
