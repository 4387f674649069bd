"""The default name of an output: that of its checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_cli.discover.found import Found
from ckpt_cli.discover.places import MAIN


def default_output(found: Found, component: str, what: str = "merged") -> Path:
    """``<checkpoint>_merged`` (or _state, ...) beside the checkpoint, with ``_<component>`` for any but the main one."""
    path = found.path if found.path.is_absolute() else Path.cwd() / found.path
    stem = path.stem if os.path.isfile(path) else path.name
    main = component in MAIN and component == found.places[0].name
    return path.parent / f"{stem}_{what}{'' if main else f'_{component}'}"
