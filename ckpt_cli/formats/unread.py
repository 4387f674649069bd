"""Folders that are recognised but not read: steps of DeepSpeed, and sets of unknown names.

They are last in the registry, and count only if no other format matches: a folder that also holds a whole model
is that model.
"""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.errors import Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Format, Match, ReadOptions
from ckpt_cli.formats.sets.deepspeed import deepspeed_hint, unread_sets
from ckpt_cli.formats.sets.names import SUFFIXES, error_of, part_of
from ckpt_cli.formats.training_state_names import is_state_file
from ckpt_cli.tensors.component import Component

FORMAT = "unread"
MAX_NAMES = 1000
STAGE_0_TO_2 = "mp_rank_00_model_states.pt"


class Unread(Format):
    """Recognises formats that are refused."""

    name = FORMAT
    display = "not read"
    is_refused = True

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        if not there.is_folder(path):
            return []
        names = [entry.name for entry in there.files(path, lambda name: name.endswith(SUFFIXES))]
        sharded = unread_sets(names)
        if sharded:
            text = f"this is a DeepSpeed checkpoint ({counted(len(sharded))}), which is not read yet"
            hint = deepspeed_hint(path, there)
            if STAGE_0_TO_2 in sharded and not any(name.startswith(("zero_pp_rank_0_mp_rank_00_model", "layer_")) for name in sharded):
                whole = part_of(path / STAGE_0_TO_2, there) is None
                hint = f"pass {path / STAGE_0_TO_2}, the weights in the dtype of the training; or {hint}" if whole else hint
            trouble = Unsupported(text, path=path, hint=hint)
            return [Match(FORMAT, "model", path, tuple(path / name for name in sharded), "DeepSpeed", trouble=trouble)]
        wanted = [name for name in sorted(names)[:MAX_NAMES] if not is_state_file(name)]
        part = next((found for name in wanted if (found := part_of(path / name, there)) is not None), None)
        if part is None:
            return []
        return [Match(FORMAT, "model", path, tuple(part.siblings.values()), "a set of files", trouble=error_of(part, there))]

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        raise match.trouble or Unsupported("this format is not read", path=match.root)


def refused_tag(folder: Path, there: Folders) -> list[Match]:
    """What is refused in a folder of any name: a tag of DeepSpeed."""
    return [match for match in Unread().recognise(folder, there) if isinstance(match.trouble, Unsupported)]


def counted(files: int) -> str:
    return f"{files} file{'s' if files != 1 else ''}"
