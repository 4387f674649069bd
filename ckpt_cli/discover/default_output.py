"""The default name of an output: that of its checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_cli.discover.found import Found
from ckpt_cli.discover.hub_cache import cached_model
from ckpt_cli.discover.places import MAIN


def default_output(found: Found, component: str, what: str = "merged") -> Path:
    """``<checkpoint>_merged`` (or _state, ...) beside the checkpoint, with ``_<component>`` for any but the main one.

    Nothing is written into the Hub cache: of a model in it, the output is in the current folder.
    """
    path = found.path if found.path.is_absolute() else Path.cwd() / found.path
    stem = path.stem if os.path.isfile(path) else path.name
    cached = cached_model(path)
    folder, stem = (path.parent, stem) if cached is None else (Path.cwd(), cached)
    main = component in MAIN and component == found.places[0].name
    return folder / f"{stem}_{what}{'' if main else f'_{component}'}"
