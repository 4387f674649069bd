"""Folders that are recognised but not read: steps of Megatron, and sets of unknown names.

They are last in the registry, and count only if no other format matches: a folder that also holds a whole model
is that model.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckpt_cli.errors import CkptError, Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Format, Match, ReadOptions
from ckpt_cli.formats.sets.contents import MEGATRON
from ckpt_cli.formats.sets.names import SUFFIXES, error_of, part_of
from ckpt_cli.formats.training_state_names import is_state_file
from ckpt_cli.tensors.component import Component

FORMAT = "unread"
LEGACY = re.compile(r"mp_rank_[0-9]{2,}(_[0-9]{3,})*", re.ASCII)
"""Folders of the ranks in a step of Megatron before torch_dist."""

LEGACY_FILE = "model_optim_rng.pt"
MAX_NAMES = 1000


class Unread(Format):
    """Recognises formats that are refused."""

    name = FORMAT
    display = "not read"
    is_refused = True

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        if not there.is_folder(path):
            return []
        ranks = [folder for folder in there.folders(path, LEGACY.fullmatch) if there.is_file(folder / LEGACY_FILE)]
        if ranks:
            text = f"this is a Megatron checkpoint in {counted(len(ranks))} (legacy torch format), which is not read yet"
            trouble: CkptError = Unsupported(text, path=path, hint=MEGATRON)
            return [Match(FORMAT, "model", path, tuple(folder / LEGACY_FILE for folder in ranks), "Megatron-LM", trouble=trouble)]
        names = [entry.name for entry in there.files(path, lambda name: name.endswith(SUFFIXES))]
        wanted = [name for name in sorted(names)[:MAX_NAMES] if not is_state_file(name)]
        part = next((found for name in wanted if (found := part_of(path / name, there)) is not None), None)
        if part is None:
            return []
        return [Match(FORMAT, "model", path, tuple(part.siblings.values()), "a set of files", trouble=error_of(part, there))]

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        raise match.trouble or Unsupported("this format is not read", path=match.root)


def refused_tag(folder: Path, there: Folders) -> list[Match]:
    """What is refused in a folder of any name."""
    return [match for match in Unread().recognise(folder, there) if isinstance(match.trouble, Unsupported)]


def counted(files: int) -> str:
    return f"{files} file{'s' if files != 1 else ''}"
