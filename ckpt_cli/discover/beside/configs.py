"""Several configs for one component: which one was taken, in what the others differ, and the one that the checkpoint holds itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_cli.boxes import Shape
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.discover.recorded.inside import kept_in
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import is_file, same_file
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.kept_configs import KeptConfig
from ckpt_cli.hub.assets import CONFIG, HUB_FOLDER, Assets
from ckpt_cli.hub.beside.model_config import no_model_config
from ckpt_cli.hub.config import Config, architecture, levels
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.hub.entries.marks import other_marks
from ckpt_cli.hub.megatron.config import config_from
from ckpt_cli.hub.settings import differences, different_settings, settings_text
from ckpt_cli.names import few, printable
from ckpt_cli.tensors.component import Component, Note

APART = ("auto_map", "quantization_config")
"""Entries of a config that mean nothing without code of its own, or of weights that training did not have."""

DTYPES = ("dtype", "torch_dtype")
"""What is told of the weights that are written."""

WIDTHS = ("hidden_size", "n_embd", "d_model")


def config_notes(found: Found, place: Place, assets: Assets) -> list[Note]:
    """Warnings about other configs of a component than the one that was taken: beside it and in `HUB_FOLDER`, in the step, on other nodes.

    A second model of a step has a config of its own, so that the step's is the main one's.
    """
    taken = assets.files.get(CONFIG)
    main = place is found.places[0] or place.home == found.path
    nodes = (home for home in place.more_homes if main or home.name == place.home.name)
    homes = (place.home, *((found.path,) if main else ()), *nodes)
    if taken is None or taken.parent not in {folder for home in homes for folder in (home / HUB_FOLDER, home)}:
        return []
    notes = []
    for other in _others(homes, taken):
        try:
            differing = [entry.pair for entry in differences(assets.config, read_config(other))]
        except CkptError as error:
            differing = [error.message]
        if differing:
            text = f"config.json was taken from {_shown(taken, found)}; that of {_shown(other, found)} differs: {few(differing, 4)}"
            notes.append(Note("warning", "other-config", text))
    return notes


def with_config(assets: Assets, component: Component, match: Match, files: Files, base: Path | None) -> tuple[Assets, list[Note]]:
    """The assets with the config that the checkpoint holds, or that the arguments of a training describe, where there is no config.json.

    Where there is one, a warning says how it uses the weights otherwise; a ``base`` then gives way to what the training itself says, also
    of texts and labels.
    """
    kept = _kept_config(component, match, files, assets.config)
    if not assets.config:
        return _made(assets, component, kept)
    of_base = base is not None and assets.files[CONFIG].parent in (base, base / HUB_FOLDER)
    settings = different_settings(assets.config, kept.config) if kept is not None else []
    settings += other_marks(assets.config, kept.config) if kept is not None and of_base else []
    if kept is None or not settings:
        return assets, []
    own = _written(kept, architecture(assets.config)) if of_base else None
    said = f"{CONFIG}{' of the base' if own is not None else ''} and the config inside of the checkpoint (at {printable(kept.where)})"
    text = f"{said} differ in how weights of these shapes are used: {settings_text(settings, 'checkpoint')}"
    if own is None:
        return assets, [Note("warning", "other-settings", text)]
    others = {name: path for name, path in assets.files.items() if name != CONFIG}
    assets = replace(assets, files=others, config=own, made=True)
    return assets, [Note("warning", "other-settings", f"{text}; that of the checkpoint is written")]


def _made(assets: Assets, component: Component, kept: KeptConfig | None) -> tuple[Assets, list[Note]]:
    if component.arguments:
        config = config_from(component.arguments)
        if isinstance(config, str):
            return assets, [Note("info", "no-config", f"no config.json can be written: {config}")]
        text = f"there is no config.json: it is written from the training's arguments, as {config['architectures'][0]}"
    elif kept is None:
        return assets, []
    else:
        own, where = _written(kept, None), printable(kept.where)
        if own is None:
            text = f"the config inside of the checkpoint, at {where}, is not written: it names no class, or needs more than itself"
            return assets, [Note("info", "no-config", text)]
        config = own
        text = f"there is no config.json: it is that inside of the checkpoint, at {where}, as {printable(architecture(config))}"
    return replace(assets, config=config, made=True), [Note("info", "config-made", text)]


def _written(kept: KeptConfig, kind: str | None) -> dict[str, Any] | None:
    """A kept config as config.json, of the class that it names, or ``kind``; None if that would not be all of it."""
    kind = architecture(kept.config) or kind
    if kind is None or not kept.is_plain or any(map(kept.config.get, APART)):
        return None
    return {**{key: value for key, value in kept.config.items() if key not in DTYPES}, "architectures": [kind]}


def _kept_config(component: Component, match: Match, files: Files, taken: Config) -> KeptConfig | None:
    """The one config of these weights that the checkpoint holds, of the same type as one that was ``taken``; None if several differ."""
    held = [kept for kept in kept_in(match, files) if kept.is_config]
    shapes = {tensor.shape for tensor in component.tensors.values() if len(tensor.shape) == 2}
    wanted = taken.get("model_type")
    fitting = [kept for kept in held if (not taken or kept.config["model_type"] == wanted) and _is_of(kept.config, shapes)]
    return fitting[0] if fitting and all(kept.config == fitting[0].config for kept in fitting) else None


def _is_of(config: Config, shapes: Iterable[Shape]) -> bool:
    """Whether an embedding has the sizes that a config, or that of its language model, says; its rows may be padded."""
    for level in levels(config):
        width, rows = next((level[key] for key in WIDTHS if type(level.get(key)) is int), None), level.get("vocab_size")
        if width is not None and type(rows) is int and any(shape[1] == width and rows <= shape[0] for shape in shapes):
            return True
    return False


def _others(homes: tuple[Path, ...], taken: Path) -> Iterator[Path]:
    for path in dict.fromkeys(folder / CONFIG for home in homes for folder in (home / HUB_FOLDER, home)):
        if path != taken and is_file(path) and not same_file(path, taken) and no_model_config(path) is None:
            yield path


def _shown(path: Path, found: Found) -> str:
    return f"{os.path.relpath(path.parent, found.path.parent)}/"
