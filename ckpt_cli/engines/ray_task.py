"""What a Ray worker does: it makes sure that it sees the files of the driver, and writes or checks one part."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli import __version__
from ckpt_cli.engines.call import PartCall
from ckpt_cli.errors import CkptError, EngineFailed, Inconsistent, NotFound
from ckpt_cli.given import URL
from ckpt_cli.output.parts_folder import PartsFolder
from ckpt_cli.progress import Silent

LOOK = 0.2
"""Seconds between two looks at whether the driver still wants the output."""

SHARED = "all nodes need one file system, with the run and the output under the same paths"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The node that did a part, and why it could not or what it found. Errors are values here: Ray neither prints nor repeats them."""

    node: str
    error: CkptError | None = None
    found: Any = None


def mark_of(shared: PartsFolder) -> Path:
    """The file by which a worker knows that a folder is that of the driver."""
    return shared.root / "driver"


class _WhileWanted(Silent):
    """Ends the work when the mark is gone: the driver takes it away when it is interrupted, or another part failed."""

    def __init__(self, shared: Sequence[PartsFolder], mark: str) -> None:
        self._shared, self._mark, self._next = shared, mark, 0.0

    def advance(self, count: int, label: str) -> None:
        if time.monotonic() < self._next:
            return
        for folder in self._shared:
            if not _is_marked(folder, self._mark):
                raise EngineFailed("the driver no longer wants this output", path=folder.target)
        self._next = time.monotonic() + LOOK


def write_part(call: PartCall, part: str, jobs: int, shared: Sequence[PartsFolder], mark: str, version: str) -> Outcome:
    """Write one part of the outputs that belong to these folders, in each of which the driver left ``mark``."""
    node = socket.gethostname()
    try:
        _check_node(node, call, shared, mark, version)
        wrote = {PartsFolder(Path(output.output), output.plan_digest) for output in call(part, jobs, _WhileWanted(shared, mark)).outputs}
        for stray in wrote - set(shared):
            stray.remove()
            text = f"node {node} planned another output than the driver: its files are not the same, or changed meanwhile"
            raise Inconsistent(text, path=stray.target, hint=f"{SHARED}, and nothing may write to the run")
    except CkptError as error:
        error.details = (*error.details, f"part {part} on node {node}")
        return Outcome(node, error)
    return Outcome(node)


def check_part(call: PartCall, part: str, jobs: int, version: str) -> Outcome:
    """Check one part of something that is there; what the call returns is found."""
    node = socket.gethostname()
    try:
        _check_node(node, call, (), "", version)
        return Outcome(node, found=call(part, jobs, Silent()))
    except CkptError as error:
        error.details = (*error.details, f"part {part} on node {node}")
        return Outcome(node, error)


def _check_node(node: str, call: PartCall, shared: Sequence[PartsFolder], mark: str, version: str) -> None:
    if version != __version__:
        raise EngineFailed(f"node {node} has ckpt {__version__}", expected=f"version {version}, as the driver has")
    for path in call.reads:
        if not URL.fullmatch(path) and not os.path.lexists(path):
            raise NotFound(f"node {node} does not see this path", path=path, hint=SHARED)
    for folder in shared:
        if not _is_marked(folder, mark):
            raise NotFound(f"node {node} does not see the folder of the output", path=folder.target.parent, hint=SHARED)


def _is_marked(folder: PartsFolder, mark: str) -> bool:
    try:
        return mark_of(folder).read_text() == mark
    except OSError:
        return False
