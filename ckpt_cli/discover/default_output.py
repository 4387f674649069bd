"""The default name of an output: that of its checkpoint."""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.discover.found import Found
from ckpt_cli.discover.hub_cache import cached_model
from ckpt_cli.discover.places import MAIN
from ckpt_cli.files.folders import is_file
from ckpt_cli.paths import absolute
from ckpt_cli.urls import is_remote


def default_output(found: Found, component: str, what: str = "merged") -> Path:
    """``<checkpoint>_merged`` (or _state, ...) beside the checkpoint, with ``_<component>`` for any but the main one.

    Nothing is written into the Hub cache or a store: of a model in there, the output is in the current folder.
    """
    path = Path(absolute(found.path))
    stem = path.stem if is_file(path) else path.name
    cached = cached_model(path)
    folder = path.parent if cached is None and not is_remote(path) else Path(absolute("."))
    stem = stem if cached is None else cached
    main = component in MAIN and component == found.places[0].name
    return folder / f"{stem}_{what}{'' if main else f'_{component}'}"
