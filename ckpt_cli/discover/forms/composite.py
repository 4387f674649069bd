"""Models that are stored in several parts, each a model in a folder of its own: a Router of sentence-transformers, a pipeline of diffusers.

No command makes one model of the parts, so that what holds them has no weights of its own to read.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders, is_file, is_folder, stays_inside
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.formats.registry import recognise
from ckpt_cli.hub.assets import MODULES
from ckpt_cli.hub.sentences.parts import parts_of
from ckpt_cli.names import few

PIPELINE = "model_index.json"
"""What diffusers names the parts of a pipeline in: each with its library and class, or null for what it does without."""


@dataclass(frozen=True, slots=True)
class Composite:
    """A folder with several models that make one; ``named_by`` is the file that names their folders, ``loader`` what loads it."""

    folder: Path
    named_by: str
    loader: str
    parts: tuple[Path, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The parts, as paths in the folder."""
        return tuple(part.relative_to(self.folder).as_posix() for part in self.parts)

    @property
    def told(self) -> str:
        """What is said where the weights of one model are asked for."""
        listed = few([f"{name}/" for name in self.names], 6)
        return f"{self.folder.name}/ is one model in {len(self.parts)} parts with weights of their own, as {self.named_by} says: {listed}"

    @property
    def hint(self) -> str:
        """What can be done with it."""
        return (
            f"{self.loader} loads such a folder without a merge, and ckpt verify {shell.path(self.folder)} checks all parts; "
            f"to change or average them, pass them one by one ({shell.path(self.parts[0])}), and put the results into a copy of the folder"
        )


def composite_in(folder: Path, there: Folders) -> Composite | None:
    """The model in several parts that a folder is. None where fewer than two parts have weights, or it has some itself."""
    for name, loader in ((MODULES, "sentence-transformers"), (PIPELINE, "diffusers")):
        if not is_file(folder / name):
            continue
        named = parts_of(folder / name) if name == MODULES else _of_pipeline(folder / name)
        folders = [folder / part for part in named if stays_inside(part) and is_folder(folder / part)]
        parts = tuple(part for part in folders if _is_read(part, there))
        own = [match for match in recognise(folder, there) if match.root == folder]
        if len(parts) > 1 and not own:
            return Composite(folder, name, loader, parts)
    return None


def _is_read(part: Path, there: Folders) -> bool:
    with contextlib.suppress(CkptError):
        return any(match.trouble is None for match in recognise(part, there))
    return False


def _of_pipeline(index: Path) -> list[str]:
    """The folders of what a pipeline is made of; what cannot be read names none."""
    content: object = None
    with contextlib.suppress(CkptError):
        content = parse_json(read_small(index))
    entries = content.items() if isinstance(content, dict) else ()
    return [name for name, of in entries if isinstance(of, list) and len(of) == 2 and all(isinstance(each, str) for each in of)]
