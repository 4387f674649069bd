"""Folders that are recognised but not read: sets of unknown names.

They are last in the registry, and count only if no other format matches: a folder that also holds a whole model
is that model.
"""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.errors import Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Format, Match, ReadOptions
from ckpt_cli.formats.sets.kinds import AFTER_SUFFIX, SUFFIXES
from ckpt_cli.formats.sets.names import error_of, part_of
from ckpt_cli.formats.training_state_names import is_state_file
from ckpt_cli.tensors.component import Component

FORMAT = "unread"
MAX_NAMES = 1000


class Unread(Format):
    """Recognises formats that are refused."""

    name = FORMAT
    display = "not read"
    is_refused = True

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        if there.is_file(path) and AFTER_SUFFIX.fullmatch(path.name):
            path = path.parent
        if not there.is_folder(path):
            return []
        names = [entry.name for entry in there.files(path, lambda name: name.endswith(SUFFIXES) or AFTER_SUFFIX.fullmatch(name))]
        wanted = [name for name in sorted(names)[:MAX_NAMES] if not is_state_file(name)]
        part = next((found for name in wanted if (found := part_of(path / name, there)) is not None), None)
        if part is None:
            return []
        return [Match(FORMAT, "model", path, tuple(part.siblings.values()), "a set of files", trouble=error_of(part, there))]

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        raise match.trouble or Unsupported("this format is not read", path=match.root)
