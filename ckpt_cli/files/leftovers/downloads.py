"""Downloads that did not finish: a tool that fills a file in several places keeps account of them in another file beside it.

Such a file has its full size from the beginning, with zeros where nothing came yet, so that neither size nor header tell. Tools that
give a file its name when it is whole (wget, curl, browsers, rsync, rclone, huggingface_hub) leave no doubt about it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator

from ckpt_cli.errors import UnfinishedDownload

CONTROL = {".aria2": "aria2c -c", ".st": "axel", ".lftp-pget-status": "lftp's pget -c"}
"""What names of control files end with, after the name of the whole file, and how such a download goes on."""

LARGEST = 16 << 20
"""Bytes. They have a bit per part of a file, or a line per connection: anything larger is something else of that name."""


def refuse_unfinished(name: str, is_control: Callable[[str], bool] | None = None) -> None:
    """Raise UnfinishedDownload for a file beside which a download tool says that it is not whole yet.

    ``is_control`` says whether a path is such a file; on a disk the system is asked.
    """
    for control, command in _candidates(name, linked=is_control is None):
        if (is_control or _is_control)(control):
            raise UnfinishedDownload(
                f"the download of {os.path.basename(name)} did not finish, says {os.path.basename(control)}: parts of it may be missing",
                path=name,
                hint=f"finish it ({command}, with the same address), or if the file is known to be whole, delete {control}",
            )


def _candidates(name: str, *, linked: bool) -> Iterator[tuple[str, str]]:
    """The control files that there may be of a file, with the command that goes on."""
    for path in (name, *(_targets(name) if linked else ())):
        for suffix, command in CONTROL.items():
            yield path + suffix, command
        # aria2 has one for all files of a torrent, beside their folder.
        if folder := os.path.dirname(path):
            yield f"{folder}.aria2", CONTROL[".aria2"]


def _targets(name: str) -> Iterator[str]:
    """The file behind a link, if a name is one: the tool knew it by its own name."""
    try:
        os.readlink(name)
    except OSError:
        return
    yield os.path.realpath(name)


def _is_control(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST
