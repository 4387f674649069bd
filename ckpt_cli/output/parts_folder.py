"""The folder that the parts of an output share: where it lies, the records in it, and what it was when the output got its name."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckpt_cli.errors import CkptError
from ckpt_cli.files.descriptors import MadeFrom
from ckpt_cli.files.folders import entries_in
from ckpt_cli.files.source import read_small
from ckpt_cli.output.interrupted.place import MARK as STAGED
from ckpt_cli.output.interrupted.place import temporary_name
from ckpt_cli.output.part import Part
from ckpt_cli.output.staging import sync_folder
from ckpt_cli.output.writer import copy_side_file, write_bytes
from ckpt_cli.results.checkpoint import Frozen

MARK = ".ckpt-parts-"
SCHEMA: Literal[4] = 4
DIGITS = 16


class Whole(Frozen):
    """What part 0 knows of the whole output: its manifest so far; size, length and CRC-32 of the header of each file."""

    manifest: dict[str, Any]
    headers: dict[str, tuple[int, int, int]]
    overwrite: bool
    tensors: int


class Record(Frozen):
    """What a part leaves when it is done: ``wrote`` bytes by file, and ``tiles`` (position, CRC-32, length), by file and tensor.

    ``samples`` (position, length, CRC-32) by file are read back from what was written: in a file that another part wrote on another disk
    they are not. ``cutting`` is the rule by which the plan was cut into parts; ``overflows`` and ``non_finite`` are as in `Written`.
    ``side_files`` are the CRC-32 of the files beside the weights, the index among them, as this part found them; ``made_from`` are the
    sources of the plan. ``allowed`` names the options (``allow_...``) that this part was given.
    """

    schema_version: Literal[4]
    plan_digest: str
    part: int
    parts: int
    cutting: str
    wrote: dict[str, int]
    tiles: dict[str, dict[str, list[tuple[int, int, int]]]]
    samples: dict[str, list[tuple[int, int, int]]]
    overflows: dict[str, int]
    non_finite: dict[str, dict[int, int]]
    side_files: dict[str, int]
    made_from: MadeFrom
    allowed: list[str]
    whole: Whole | None = None


@dataclass(frozen=True, slots=True)
class PartsFolder:
    """The folder that the parts of one plan for one output share."""

    target: Path
    digest: str

    @property
    def root(self) -> Path:
        """The folder, beside the output."""
        return self.target.parent / f".{self.target.name}{MARK}{self.digest[:DIGITS]}"

    @property
    def output(self) -> Path:
        """What will be the output: a name that `Staging` knows."""
        return self.root / f".{self.target.name}{STAGED}whole"

    @property
    def claimed(self) -> Path:
        """Tells which folder was about to be renamed."""
        return self.root / "claimed"

    def record(self, part: Part) -> Path:
        """The record of a part, which is there when the part is done."""
        return self.root / f"part-{part.number}-of-{part.count}.json"

    def done(self, count: int) -> list[int]:
        """The parts, of so many, that are written."""
        names = {entry.name for entry in entries_in(self.root)}
        return [number for number in range(count) if self.record(Part(number, count)).name in names]

    def replace(self, path: Path, content: bytes | Path) -> int:
        """Give a file this content in one step, whether another process does the same or not; returns the CRC-32 of its bytes."""
        temporary = self.root / f".{uuid.uuid4().hex[:12]}"
        if isinstance(content, Path):
            crc = copy_side_file(content, temporary)
        else:
            write_bytes(temporary, content)
            crc = zlib.crc32(content)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary, path)
        sync_folder(path.parent)
        return crc

    def claim(self) -> None:
        """Note which folder is about to get the name: should this process end right after that, it is known that it has it."""
        self.replace(self.claimed, _inode(self.output).encode())

    @property
    def has_its_name(self) -> bool:
        """Whether the output was renamed, and only what stays behind was not removed."""
        return self._was_claimed(self.target) is True

    @property
    def was_renamed(self) -> bool:
        """Whether the folder that the parts wrote is no longer here: what has its place is an older output, or was begun anew."""
        return self._was_claimed(self.output) is False

    def _was_claimed(self, folder: Path) -> bool | None:
        """Whether a folder is the one that was about to be renamed; None if none was, or if there is no such folder."""
        try:
            return read_small(self.claimed).decode("ascii", "replace") == _inode(folder)
        except (CkptError, OSError):
            return None

    def remove(self) -> None:
        """Remove the folder, under another name, so that nothing ever takes what is left for parts of an output."""
        root = self.root
        with contextlib.suppress(OSError):
            root = root.rename(temporary_name(self.target))
        # Where folders cannot be renamed the records go first.
        with contextlib.suppress(OSError):
            for path in root.glob("part-*.json"):
                path.unlink()
            shutil.rmtree(root)


def _inode(folder: Path) -> str:
    status = os.stat(folder, follow_symlinks=False)
    return f"{status.st_dev}:{status.st_ino}"
