"""Weights of a step that are files of another step of its run: a link to save space, or a link or copy that was made by mistake."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.found import Found, Place, ages
from ckpt_cli.errors import Inconsistent, Unreadable
from ckpt_cli.files.folders import Folders, same_content, status_of
from ckpt_cli.formats.registry import format_of
from ckpt_cli.formats.step_names import counter_of, step_of
from ckpt_cli.names import few
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Note
from ckpt_cli.urls import is_remote

MAX_SIBLINGS = 64
"""In how many steps, the nearest ones, a second name of a file is looked for. Only files with several names are."""

END = 1 << 16
"""Bytes at each end of two files that are compared. The checksums of some hundred records of torch fit into the last ones."""

OF_A_LAYER = re.compile(r"layer_[0-9]+(-|_expert_[0-9]+_).*\.pt", re.ASCII)
"""What DeepSpeed saves of a layer of a pipeline, or of an expert. Without training it has the same bytes in every step, and programs that
save space (``jdupes -L``, ``hardlink``) make one file of them."""

ZIP = b"PK"
SECOND = 10**9


def other_step_notes(found: Found, place: Place, files: Iterable[Path], *, weights: bool = True) -> list[Note]:
    """A warning if ``files`` of a step are those of another step of its run, through links, as the same files under two names, or copies.

    Raises Inconsistent if some are, and others its own, where each rank wrote one: no save was ever like that. Parts of a model may be
    shared on purpose, if they were not trained, and so may the layers of a pipeline under two names. A file under two names, or there
    twice, is taken for that of the lower step. Copies are only looked for among ``weights``: state may be the same in two steps.
    """
    if found.step is None or step_of(found.path) != found.step:
        return []
    steps = _Steps(found)
    paths = list({absolute(path): path for path in files}.values())
    linked = {path: other for path in paths if (other := steps.led_to(path)) is not None}
    held = linked | {path: other for path in paths if path not in linked and (other := steps.shared_with(path)) is not None}
    are_links = bool(held)
    if not held and weights:
        # The steps beside it are only asked: one that cannot be looked at is no reason to refuse this one.
        with contextlib.suppress(Unreadable):
            held = steps.copies(paths)
    if not held:
        return []
    step, others = found.path.name, set(held.values())
    if len(held) == len(paths) and len(others) == 1:
        text = f"the files of {place.name} in {step} are those of {others.pop()}"
        return [Note("warning", "other-step", text)]
    older = {path for path, other in held.items() if path in linked or _is_older(Path(other), found.path)}
    told = few([f"{path.name} {'is that of' if path in older else 'is also in'} {other}" for path, other in held.items()], 3)
    text = f"the files of {place.name} are not all of {step}: {told}"
    foreign = [path for path in held if path in older]
    mixed = [path for path in foreign if path in linked or not (are_links and OF_A_LAYER.fullmatch(path.name))]
    # Of copies that are the most, the step may be the one that was copied.
    if format_of(place.match).is_sharded and mixed and (are_links or 2 * len(foreign) <= len(paths)):
        hint = f"put the file of {step} in place of {mixed[0]}"
        if mixed[0] in linked and OF_A_LAYER.fullmatch(mixed[0].name) and mixed[0].is_symlink():
            copied = " ".join(["cp --remove-destination", shell.path(os.path.realpath(mixed[0])), shell.path(mixed[0])])
            hint += f", or if that layer was not trained, and is the same in both, a copy in place of the link: {copied}"
        raise Inconsistent(text, path=mixed[0], expected=f"files of {step} only", hint=hint)
    return [Note("warning", "other-step", text)]


def _is_older(other: Path, step: Path) -> bool:
    age = ages((other, step))
    return age(other) < age(step)


def _number(step: Path) -> int:
    return step_of(step) or 0


def _ends(path: Path) -> tuple[bytes, bytes] | None:
    """The first and last bytes of a file; None if it cannot be read, of which others tell."""
    try:
        with open(path, "rb") as file:
            first = file.read(END)
            file.seek(max(0, os.fstat(file.fileno()).st_size - END))
            return first, file.read(END)
    except OSError:
        return None


class _Steps:
    """The other steps of the run that a step is one of, and which files of the step lie in them. Folders are looked at once."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._there = Folders()
        self._real: dict[Path, Path] = {}
        self._twins: dict[Path, dict[int, Path]] = {}
        self._near: dict[Path, list[Path]] = {}

    def led_to(self, path: Path) -> str | None:
        """The name of the other step of the same run in whose folder a file lies, behind links."""
        step = self._step_above(path)
        if step is None:
            return None
        run = self._resolved(step.parent)
        real = Path(os.path.realpath(path)) if path.is_symlink() else self._resolved(path.parent) / path.name
        inside = real.relative_to(run).parts[0] if real.is_relative_to(run) else step.name
        return inside if self._is_other(Path(inside)) else None

    def shared_with(self, path: Path) -> str | None:
        """The name of the other step of the same run in which a file has a second name, in the same place."""
        step, status = self._step_above(path), status_of(path)
        if step is None or status is None or status.st_nlink < 2:
            return None
        twin = self._of_siblings(path.parent, step).get(status.st_ino)
        also = status_of(twin) if twin is not None else None
        return twin.relative_to(step.parent).parts[0] if twin is not None and also is not None and os.path.samestat(status, also) else None

    def copies(self, paths: Sequence[Path]) -> dict[Path, str]:
        """The files of which the step before or after has a copy, in the same place, each with the name of that step.

        Size and time show those of which a copy kept the time (``cp -p``, rsync), and both ends of the files confirm it. What torch saved
        ends with the checksums of all its records: these show copies of any time, and so do the tags of a store, but say nothing of some
        files alone, since a rank or a stage may hold only what is not trained.
        """
        kept = {path: other for path in paths if (other := self._copied_from(path, of_any_time=False)) is not None}
        if kept:
            return kept
        found: dict[Path, str] = {}
        for path in paths:
            other = self._copied_from(path, of_any_time=True)
            if other is None:
                return {}
            found[path] = other
        return found

    def _copied_from(self, path: Path, *, of_any_time: bool) -> str | None:
        step = self._step_above(path)
        # In a store, times are those of the upload, and only what it says of the content tells copies.
        status = None if step is None or (is_remote(path) and not of_any_time) else status_of(path)
        if step is None or status is None:
            return None
        for sibling in self._neighbours(step):
            twin = sibling / path.relative_to(step)
            also = status_of(twin)
            if also is None or also.st_size != status.st_size or os.path.samestat(also, status):
                continue
            if is_remote(path):
                if same_content(path, twin):
                    return sibling.name
                continue
            # Times of whole seconds are those of archives, in which several saves may have one.
            timed = also.st_mtime_ns == status.st_mtime_ns and status.st_mtime_ns % SECOND != 0
            ends = _ends(path) if timed or of_any_time else None
            if ends and ends == _ends(twin) and (timed or ends[0].startswith(ZIP)):
                return sibling.name
        return None

    def _neighbours(self, step: Path) -> list[Path]:
        """The step before and the one after, named alike."""
        if step not in self._near:
            number, others = self._found.step or 0, [each for each in self._there.entries(step.parent) if self._is_other(each)]
            lower = [each for each in others if (step_of(each) or 0) < number]
            higher = [each for each in others if (step_of(each) or 0) > number]
            self._near[step] = [*sorted(lower, key=_number)[-1:], *sorted(higher, key=_number)[:1]]
        return self._near[step]

    def _step_above(self, path: Path) -> Path | None:
        """The folder of the step, which has the same name on each node."""
        return next((folder for folder in path.parents if folder.name == self._found.path.name), None)

    def _is_other(self, folder: Path) -> bool:
        step = step_of(folder)
        return step not in (None, self._found.step) and counter_of(folder) == counter_of(self._found.path)

    def _resolved(self, folder: Path) -> Path:
        if folder not in self._real:
            self._real[folder] = Path(os.path.realpath(folder))
        return self._real[folder]

    def _of_siblings(self, folder: Path, step: Path) -> dict[int, Path]:
        """What lies in the place of a folder in the nearest other steps, by inode: names cost nothing more than a listing."""
        if folder not in self._twins:
            siblings = [sibling for sibling in self._there.entries(step.parent) if self._is_other(sibling)]
            siblings.sort(key=lambda sibling: abs((step_of(sibling) or 0) - (self._found.step or 0)))
            self._twins[folder] = {}
            for sibling in siblings[:MAX_SIBLINGS]:
                with contextlib.suppress(OSError), os.scandir(sibling / folder.relative_to(step)) as entries:
                    self._twins[folder] |= {entry.inode(): Path(entry.path) for entry in entries}
        return self._twins[folder]
