"""Steps that are beside the other steps of a run as archives, or as pointers to data that is elsewhere: they are named, never read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpt_cli.files.folders import Folders, is_file, is_there
from ckpt_cli.formats.step_names import step_of

SUFFIXES = (
    *(".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".zip", ".7z", ".rar", ".sqsh", ".squashfs"),
    *(f".tar.{kind}" for kind in ("gz", "bz2", "xz", "zst", "lz4", "lzma", "lz")),
)

POINTERS = (".dvc",)
"""What DVC calls the file that stands for a folder; until ``dvc pull`` it may be all that is there."""
FORMS = (*SUFFIXES, *POINTERS)


def archived_steps(run: Path, there: Folders) -> Iterator[Path]:
    """The folders of steps that are there as archives or pointers alone, as they would be called if they were unpacked."""
    for entry in there.entries(run):
        suffix = next((suffix for suffix in sorted(FORMS, key=len, reverse=True) if entry.name.endswith(suffix)), None)
        step = entry.with_name(entry.name.removesuffix(suffix)) if suffix is not None else entry
        if step != entry and step_of(step) is not None and not is_there(step) and there.is_file(entry):
            yield step


def archive_of(step: Path) -> Path | None:
    """The archive of a step whose folder is not there, or the pointer to it."""
    if is_there(step):
        return None
    return next((path for suffix in FORMS if is_file(path := step.with_name(f"{step.name}{suffix}"))), None)


def where_it_is(archive: Path) -> str:
    """What is said of a step that is there in this form alone."""
    return f"elsewhere, as {archive.name} says" if archive.suffix in POINTERS else f"in an archive, {archive.name}"


def way_to(archive: Path) -> str:
    """What to do about it."""
    return "pull it with DVC" if archive.suffix in POINTERS else "unpack it beside the archive"


def why_bare(step: Path) -> str:
    """Why no weights of a step can be read."""
    archive = archive_of(step)
    if archive is None:
        return "no weights were recognised in it"
    return f"it is {where_it_is(archive)}: {way_to(archive)}, to use it"
