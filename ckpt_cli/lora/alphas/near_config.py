"""Files whose names are nearly that of an adapter's config, which PEFT does not read: a second download, a suffix more, other letters."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import files_in
from ckpt_cli.hub.beside.near_names import meant_by
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG, ADAPTER_FOLDER
from ckpt_cli.names import few


def near_configs(homes: Sequence[Path]) -> list[Path]:
    """The files that may be the config of adapters in the first of these folders, where none is."""
    found: list[Path] = []
    for folder in (home / ADAPTER_FOLDER if inner else home for home in homes[:1] for inner in (True, False)):
        with contextlib.suppress(CkptError):  # what cannot be listed is told elsewhere
            found += files_in(folder, _is_near)
    return found


def near_text(near: Sequence[Path]) -> str:
    """What is said of such files."""
    which = few([path.name for path in near], 3)
    those = "it is" if len(near) == 1 else "one of them is"
    return f"{which}: PEFT reads no config under such a name; if {those} that of these adapters, rename it to {ADAPTER_CONFIG}"


def _is_near(name: str) -> bool:
    """Whether a name is nearly that of the config, but not that of a copy which was put aside."""
    meant = meant_by(name.replace("-", "_"))
    return name != ADAPTER_CONFIG and (meant.get(ADAPTER_CONFIG) is False or name.replace("-", "_") == ADAPTER_CONFIG)
