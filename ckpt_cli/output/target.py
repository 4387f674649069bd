"""Where an output goes, and whether it may: beside the checkpoint, never inside or over the input."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_cli.errors import InputError, NoSpace, NotWritable, OutputExists, OutputInsideSource
from ckpt_cli.files import manifest
from ckpt_cli.files.folders import entries_in, files_in, is_folder, is_there
from ckpt_cli.files.leftovers.written_over import written_over
from ckpt_cli.files.remote.tree import look_again
from ckpt_cli.files.source import Source
from ckpt_cli.formats.safetensors.names import SUFFIX, is_index, stem_of
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.trainers import RUNS
from ckpt_cli.names import few
from ckpt_cli.output.interrupted.place import half_published, refuse_held, temporary_name
from ckpt_cli.output.staging import sync_folder
from ckpt_cli.paths import current_folder
from ckpt_cli.urls import is_remote

ELSEWHERE = "choose another place with -o"

TAKEN_LAST = re.compile(r"pytorch_model(-[0-9]+-of-[0-9]+)?\.bin")
"""What transformers takes where there is no model.safetensors."""


def check_target(target: Path, sources: Iterable[Path], *, overwrite: bool, read: Iterable[Path] = (), dry_run: bool = False) -> None:
    """Refuse an output in or around a source, one that holds a file which is ``read``, and an existing folder that ckpt must not replace.

    So is one that would count as a step beside a source, or lie in one. Raises OutputInsideSource or OutputExists; the latter not in
    a dry run, which shows its plan first: see `refuse_planned`.
    """
    if dry_run:
        with contextlib.suppress(OutputExists):
            check_target(target, sources, overwrite=overwrite, read=read)
        return
    for source in (*sources, *(path for path in read if _is_inside(path, target))):
        if _is_inside(target, source):
            raise OutputInsideSource(
                "the output would be inside the input",
                path=target,
                expected="a folder outside of the checkpoint and the base",
                hint="choose another -o",
            )
        if _is_inside(source, target):
            raise OutputInsideSource("the output folder contains the input", path=target, hint="choose another -o")
        _refuse_among_steps(target, source)
    try:
        if is_remote(target):
            # What is known of it may be old: weights were written since then.
            look_again(target)
        there = is_there(target) if is_remote(target) else os.path.lexists(target)
        if os.path.islink(target) or (there and not is_folder(target)):
            raise OutputExists("the output is a file or a link, not a folder", path=target, hint="choose another -o")
        if not there:
            return
        begun = {path.relative_to(target).parts[0] for path in half_published(target)}
        if not {entry.name for entry in entries_in(target)} - begun:
            return
        foreign = manifest.foreign_entries(target)
        unfinished = manifest.is_unfinished(target)
    except InputError as error:
        message = f"the contents of the output folder cannot be determined: {error.message}"
        raise NotWritable(message, path=error.path, hint=error.hint) from error
    if foreign is None or foreign:
        what = "was not written by ckpt" if foreign is None else f"holds more than ckpt wrote there ({few(foreign)})"
        raise OutputExists(
            f"the output folder exists and {what}, so it will not be replaced",
            path=target,
            hint="choose another -o, or move the folder away",
        )
    if not unfinished:
        _refuse_written_over(target)
    if not overwrite and not unfinished:
        raise OutputExists("the output folder exists", path=target, hint="pass --overwrite to replace it, or choose another -o")


def _refuse_written_over(target: Path) -> None:
    """Raise OutputExists for an output that holds weights of somebody else by now."""
    try:
        made = manifest.read_manifest(target)
        others = written_over(target, made) if made is not None else []
    except InputError as error:
        message = f"the contents of the output folder cannot be determined: {error.message}"
        raise NotWritable(message, path=error.path, hint=error.hint) from error
    if others:
        what = "is not what ckpt wrote there" if len(others) == 1 else "are not what ckpt wrote there"
        raise OutputExists(
            f"the output folder exists, and {few(others)} {what}: it was saved again since, so it will not be replaced",
            path=target,
            hint="choose another -o, or move the folder away",
        )


def refuse_existing(folder: Path, names: Sequence[str], index: str | None, sources: Iterable[Source], written: Collection[Path]) -> None:
    """Raise OutputExists for weights in a folder that an output beside them would stand against; ``written`` are files of this output.

    Loaders take one file, or the parts of an index, of one stem, and model.safetensors before pytorch_model.bin: with both there, each
    may take another one. What the output is made of may stay, since both are the same model then.
    """
    hint = "use -o instead of --in-place"
    for name in (*names, *([index] if index else []), manifest.NAME):
        if os.path.lexists(folder / name) and folder / name not in written:
            raise OutputExists("the checkpoint folder already has a file of this name", path=folder / name, hint=hint)
    stems, made_of = {stem_of(name) for name in names}, {source.path for source in sources}
    for path in files_in(folder, lambda name: is_index(name) or name.endswith(SUFFIX) or TAKEN_LAST.fullmatch(name) is not None):
        last = TAKEN_LAST.fullmatch(path.name) is not None
        stands = str(path) not in made_of and "model" in stems if last else stem_of(path.name) in stems
        if stands and path not in written:
            text = "the checkpoint folder has weights in files of other names that loaders would take as well, or no longer"
            raise OutputExists(text, path=path, hint=hint)


def refuse_planned(targets: Iterable[Path], *, overwrite: bool, planned: object) -> None:
    """Raise OutputExists for a dry run whose outputs could not be written, with what it ``planned``."""
    for target in targets:
        try:
            check_target(target, (), overwrite=overwrite)
        except OutputExists as error:
            error.planned = planned
            raise


def make_parents(target: Path) -> list[Path]:
    """Create the folders above the target, durably; returns those that were missing, outermost first. Raises NotWritable.

    Stores have no folders, so nothing is made there.
    """
    if is_remote(target):
        return []
    missing = [parent for parent in target.parents if not os.path.lexists(parent)][::-1]
    made: list[Path] = []
    try:
        for folder in missing:
            try:
                folder.mkdir()
            except FileExistsError:
                continue  # a run beside us made it
            made.append(folder)
            # The name of a new folder is in the one above it, up to the first that was there.
            sync_folder(folder.parent)
    except OSError as error:
        remove_empty(made)
        raise _not_created(target, error.strerror) from error
    except BaseException:
        remove_empty(made)
        raise
    return made


def check_place(target: Path, *, in_place: bool = False) -> None:
    """Raise NotWritable if a folder cannot be given this name (``in_place``: files cannot be added to it), without trying.

    Raises OutputInUse if another run is about to give it one.
    """
    if is_remote(target):
        if in_place:
            hint = "pass -o instead of --in-place"
            raise NotWritable("--in-place adds files to the checkpoint, which ckpt does on disks only", path=target, hint=hint)
        return
    refuse_held(target)
    above = existing_parent(target)
    if not os.path.isdir(above):
        raise NotWritable(f"{above.name} above the output is not a folder", path=target, hint=ELSEWHERE)
    if not _may_write(above):
        raise _not_created(target, f"no permission to write in {above}")
    longest = _longest_name(above)
    for folder in (Path(temporary_name(target).name), *target.parents):
        if len(os.fsencode(folder.name)) > longest:
            raise _not_created(target, f"the name {folder.name[:20]}... is too long")
    if not os.path.isdir(target):
        return
    if os.path.ismount(target):
        if in_place:
            hint = "use -o instead of --in-place"
            raise NotWritable("the checkpoint folder is a mount point, but files are first written beside it", path=target, hint=hint)
        raise NotWritable(
            "the output is a mount point, which cannot be replaced by a folder", path=target, hint=f"use -o {target / 'model'}"
        )
    if not in_place and _holds_current(target):
        hint = "run it from another folder, or name a new one: -o ./NAME"
        raise NotWritable("the current folder is the output, or lies in it, and would be replaced", path=target, hint=hint)
    if not _may_write(target):
        raise NotWritable("no permission to write in the output folder", path=target)
    above_status, status, me = os.stat(above), os.stat(target), _effective_user()
    if not in_place and above_status.st_mode & stat.S_ISVTX and me not in (0, above_status.st_uid, status.st_uid):
        raise NotWritable("the output folder belongs to someone else and cannot be replaced", path=target)


def _not_created(target: Path, reason: str | None) -> NotWritable:
    return NotWritable(f"the output folder cannot be created: {reason}", path=target, hint=ELSEWHERE)


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def _effective_user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _longest_name(folder: Path) -> int:
    """The bytes that a name may have there."""
    try:
        return os.pathconf(folder, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    except (OSError, ValueError):
        return 255


def _holds_current(folder: Path) -> bool:
    here = current_folder()
    return here is not None and here.is_relative_to(os.path.realpath(folder))


def existing_parent(target: Path) -> Path:
    """The nearest existing path above the target."""
    return next((parent for parent in target.parents if os.path.lexists(parent)), target)


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that `make_parents` created and that are still empty, innermost first."""
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:
            return


def check_space(needed: Mapping[Path, int], hint: str) -> dict[Path, int | None]:
    """Free bytes where each target will lie, None if the system does not tell; ``needed`` has the bytes that it takes.

    Raises NoSpace if they do not fit together.
    """
    free: dict[Path, int | None] = {}
    together: dict[int, int] = {}
    for target, count in needed.items():
        if is_remote(target):
            free[target] = None
            continue
        above = existing_parent(target)
        try:
            device, usage = os.stat(above).st_dev, shutil.disk_usage(above)
            # A mount that knows no sizes answers zeros (FUSE without statfs): there is no disk of 0 bytes.
            free[target] = usage.free if usage.total else None
        except OSError:
            free[target] = None
            continue
        together[device] = together.get(device, 0) + count
        there = free[target]
        if there is not None and together[device] > there:
            raise NoSpace(
                f"the output needs {together[device]:,} bytes, {there:,} are free",
                path=target,
                hint=hint,
            )
    return free


def _refuse_among_steps(target: Path, source: Path) -> None:
    """Raise OutputInsideSource for an output that is another step of the source's run by its name, or lies in one; links are followed."""
    own = next(_steps_around(source), None)
    if own is None:
        return
    run = _run_of(own)
    other = next((step for step in _steps_around(target) if step != own and _run_of(step) == run), None)
    if other is None:
        return
    if other.name == target.name and other.parent == Path(os.path.realpath(target.parent)):
        raise OutputInsideSource(
            "the output would lie among the steps of the run, with the name of one",
            path=target,
            expected="a name that is not that of a step",
            hint=f"choose another -o, such as {target}_merged",
        )
    raise OutputInsideSource(
        f"the output would be inside another step of the run ({other.name})",
        path=target,
        expected="a folder outside of the steps of the run",
        hint="choose another -o",
    )


def _steps_around(path: Path) -> Iterator[Path]:
    """The folders with the name of a step that a path is or lies in, innermost first, by where it really is."""
    real = Path(_real(path))
    return (folder for folder in (real, *real.parents) if step_of(folder) is not None)


def _run_of(step: Path) -> str:
    """The folder of the run that a step folder lies in."""
    above = step.parent.parent if step.parent.name in RUNS else step.parent
    return os.path.realpath(above)


def _is_inside(path: Path, folder: Path) -> bool:
    return Path(_real(path)).is_relative_to(_real(folder))


def _real(path: Path) -> str:
    try:
        return os.path.realpath(path)
    except OSError as error:
        raise NotWritable(f"the location of the output cannot be determined: {error.strerror or error}", path=path) from error
