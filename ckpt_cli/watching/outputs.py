"""The outputs of a watch: whether they are what was written, and what becomes of them."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import status_of, stays_inside
from ckpt_cli.files.leftovers.written_over import written_over
from ckpt_cli.files.manifest import NAME, foreign_entries, is_unfinished, read_manifest
from ckpt_cli.names import few
from ckpt_cli.output.interrupted.place import remove_leftovers, temporary_name
from ckpt_cli.pushing import card
from ckpt_cli.results.watch import WatchEvent
from ckpt_cli.results.written import AverageResult, MergeResult
from ckpt_cli.watching.readiness import is_other, sources_of


def folders_of(made: WatchEvent) -> list[Path]:
    """The folders that an event says were written."""
    return [Path(folder) for folder in made.outputs or (made.output,)]


def trouble_of(made: WatchEvent) -> str | None:
    """What is wrong with an output by the names and sizes in its manifests; None if nothing is. The values are not read."""
    for folder in folders_of(made):
        try:
            trouble = _trouble(folder)
        except CkptError as error:
            trouble = error.message
        if trouble is not None:
            return trouble if len(made.outputs) < 2 else f"{folder.name}: {trouble}"
    return None


def _trouble(folder: Path) -> str | None:
    if not os.path.isdir(folder):
        return "that folder is gone"
    if is_unfinished(folder):
        return "a run is writing it, or was interrupted at that"
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{NAME} is gone, so that nothing says what was written"
    expected = {**dict.fromkeys(manifest.side_files), **manifest.outputs}
    sizes = {name: _size(folder, name) for name in expected}
    if absent := [name for name, size in sizes.items() if size is None]:
        return f"{few(absent, 2)} {'is' if len(absent) == 1 else 'are'} gone"
    for name, size in expected.items():
        if size is not None and sizes[name] != size:
            return f"{name} has {sizes[name]} bytes, but {size} were written"
    return None


def _size(folder: Path, name: str) -> int | None:
    status = status_of(folder / name) if stays_inside(name) else None
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None


def is_output_of(result: MergeResult | AverageResult, output: Path) -> bool:
    """Whether a folder is what a dry run would write: the same plan, read from files as they are, with the same files beside it."""
    for each in result.outputs:
        if _trouble(Path(each.output)) is not None:
            return False
        made = read_manifest(Path(each.output))
        if made is None or made.facts.get("plan_digest") != each.plan_digest or any(map(is_other, sources_of(Path(each.output)))):
            return False
        # A card that was written for the Hub says where the weights come from.
        beside = {name: crc for name, crc in made.side_checksums.items() if name != card.NAME}
        if beside != {name: crc for name, crc in each.side_checksums.items() if name != card.NAME}:
            return False
    return os.path.isdir(output)


def why_kept(folder: Path, home: Path) -> str | None:
    """Why an output is not removed; None if it may be. Raises Unreadable."""
    if home not in folder.parents:
        return "it lies elsewhere"
    if folder.is_symlink():
        return "it is a link"
    if not folder.is_dir():
        return None
    foreign = foreign_entries(folder)
    if foreign is None:
        return f"it has no {NAME} that says what ckpt wrote there"
    if foreign:
        return f"it holds more than ckpt wrote there ({few(foreign, 2)})"
    made = read_manifest(folder)
    others = written_over(folder, made) if made is not None else []
    return (
        f"{few(others, 2)} {'was' if len(others) == 1 else 'were'} saved again since ckpt wrote {'it' if len(others) == 1 else 'them'}"
        if others
        else None
    )


def remove(folders: Iterable[Path], above: Path) -> bool:
    """Remove folders in a way that never leaves half of one under its name, and the empty one ``above``; whether anything was there."""
    was_there = False
    for folder in folders:
        if folder.is_dir():
            aside = temporary_name(folder)
            os.rename(folder, aside)
            shutil.rmtree(aside, ignore_errors=True)
            was_there = True
        # Of a watch that was killed right here: nothing else would ever look at this name again.
        was_there = bool(remove_leftovers(folder)) or was_there
    if os.path.isdir(above) and not os.listdir(above):
        os.rmdir(above)
    return was_there
