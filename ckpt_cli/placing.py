"""Where an output goes, and whether it may: beside the checkpoint, never in or over something that is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ckpt_cli import manifest
from ckpt_cli.errors import NoSpace, NotWritable, OutputExists, OutputInsideSource, Unreadable
from ckpt_cli.files import entries_in
from ckpt_cli.found import Found
from ckpt_cli.locate import MAIN
from ckpt_cli.names import few


def default_output(found: Found, component: str, what: str = "merged") -> Path:
    """``<checkpoint>_merged`` (or _state, ...) beside the checkpoint, with ``_<component>`` for any but the main one."""
    path = found.path if found.path.is_absolute() else Path.cwd() / found.path
    stem = path.stem if os.path.isfile(path) else path.name
    main = component in MAIN and component == found.places[0].name
    return path.parent / f"{stem}_{what}{'' if main else f'_{component}'}"


def check_target(target: Path, sources: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse an output in or around a source, and anything that stands there and is not ours to replace.

    Raises OutputInsideSource or OutputExists.
    """
    for source in sources:
        if _is_inside(target, source):
            raise OutputInsideSource(
                "the output would lie inside of what is read",
                path=target,
                expected="a folder outside of the checkpoint and the base",
                hint="choose another -o",
            )
        if _is_inside(source, target):
            raise OutputInsideSource("the output folder contains what is read", path=target, hint="choose another -o")
    if os.path.islink(target) or (os.path.lexists(target) and not os.path.isdir(target)):
        raise OutputExists("the output is a file or a link, not a folder", path=target, hint="choose another -o")
    try:
        if not os.path.lexists(target) or not entries_in(target):
            return
        foreign = manifest.foreign_entries(target)
    except Unreadable as error:
        raise NotWritable(f"what is in the output folder cannot be told: {error.message}", path=error.path) from error
    if foreign is None or foreign:
        what = "was not written by ckpt" if foreign is None else f"holds more than ckpt wrote there ({few(foreign)})"
        raise OutputExists(
            f"the output folder exists and {what}, so it will not be replaced",
            path=target,
            hint="choose another -o, or move the folder away",
        )
    if not overwrite:
        raise OutputExists("the output folder exists", path=target, hint="pass --overwrite to replace it, or choose another -o")


def make_parents(target: Path) -> list[Path]:
    """Create the folders above the target; returns those that were missing, outermost first. Raises NotWritable."""
    missing = [parent for parent in target.parents if not os.path.exists(parent)][::-1]
    file = next((parent for parent in target.parents if os.path.lexists(parent) and not os.path.isdir(parent)), None)
    if file is not None:
        raise NotWritable(f"{file.name} above the output is not a folder", path=target, hint="choose another place with -o")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotWritable(
            f"the output folder cannot be created: {error.strerror}", path=target, hint="choose another place with -o"
        ) from error
    return missing


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that `make_parents` created and that nothing came to lie in, innermost first."""
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:
            return


def check_space(target: Path, needed: int, hint: str) -> int | None:
    """Free bytes where the target will lie, None if the system does not tell. Raises NoSpace if ``needed`` bytes do not fit."""
    parent = next(parent for parent in target.parents if os.path.exists(parent))
    try:
        free = shutil.disk_usage(parent).free
    except OSError:
        return None
    if needed > free:
        raise NoSpace(
            f"the output needs {needed:,} bytes, {free:,} are free".replace(",", " ").replace("bytes  ", "bytes, "),
            path=target,
            hint=hint,
        )
    return free


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:
        raise NotWritable(f"where the output lies cannot be told: {getattr(error, 'strerror', None) or error}", path=path) from error
