"""The config.json that lies where weights are written in place: it stays as it is, and loaders read the weights by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import is_there
from ckpt_cli.hub.assets import CONFIG
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.names import few, printable
from ckpt_cli.output.publish import SideFiles
from ckpt_cli.tensors.component import Note

DTYPES = ("dtype", "torch_dtype")


def kept_config_notes(folder: Path, side: SideFiles) -> list[Note]:
    """A warning where the config of the ``folder`` says other than the one that would be written beside the weights elsewhere."""
    path, wanted = folder / CONFIG, side.get(CONFIG)
    if wanted is None or wanted == path or not is_there(path):
        return []
    try:
        different = list(_different(read_config(path), read_config(wanted)))
    except CkptError as error:
        different = [error.message]
    if not different:
        return []
    text = f"{CONFIG} in {folder.name}/ stays as it is, and does not fit the weights beside it: {few(different, 3)}"
    return [Note("warning", "config-kept", f"{text}; -o writes a folder with one that fits")]


def _different(held: Config, wanted: Config) -> Iterator[str]:
    """The entries that differ, with both values where these are short. A dtype that is not there may have any of its two names."""
    for key in {**held, **wanted}:
        if key in DTYPES and key not in held and all(other not in held for other in DTYPES):
            continue  # loaders take that of the weights
        if held.get(key) != wanted.get(key):
            values = [value for value in (held.get(key), wanted.get(key)) if isinstance(value, (str, int, float))]
            yield f"{printable(key)} is {printable(values[0])}, not {printable(values[1])}" if len(values) == 2 else printable(key)
