"""Steps that somebody put into archives beside the other steps of a run: they are named, never read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpt_cli.files.folders import Folders, is_file, is_there
from ckpt_cli.formats.step_names import step_of

SUFFIXES = (
    *(".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".zip", ".7z", ".rar", ".sqsh", ".squashfs"),
    *(f".tar.{kind}" for kind in ("gz", "bz2", "xz", "zst", "lz4", "lzma", "lz")),
)


def archived_steps(run: Path, there: Folders) -> Iterator[Path]:
    """The folders of steps that are there as archives alone, as they would be called if they were unpacked."""
    for entry in there.entries(run):
        suffix = next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if entry.name.endswith(suffix)), None)
        step = entry.with_name(entry.name.removesuffix(suffix)) if suffix is not None else entry
        if step != entry and step_of(step) is not None and not is_there(step) and there.is_file(entry):
            yield step


def archive_of(step: Path) -> Path | None:
    """The archive of a step whose folder is not there."""
    if is_there(step):
        return None
    return next((path for suffix in SUFFIXES if is_file(path := step.with_name(f"{step.name}{suffix}"))), None)


def why_bare(step: Path) -> str:
    """Why no weights of a step can be read."""
    archive = archive_of(step)
    return "no weights were recognised in it" if archive is None else f"it is in an archive, {archive.name}: unpack it to use it"
