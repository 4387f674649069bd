"""One file beside nothing: a picture or a page, which appears whole or not at all and replaces nothing unasked."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_cli.errors import NotWritable, OutputExists, UsageError
from ckpt_cli.output.writer import write_bytes
from ckpt_cli.paths import absolute


def check_place(path: str | os.PathLike[str], what: str, *, overwrite: bool = False) -> None:
    """Raise OutputExists or NotWritable if a file of this name cannot be written; to be asked before long work."""
    if os.path.isdir(path) or (os.path.lexists(path) and not overwrite):
        raise OutputExists("a file of this name already exists", path=path, hint=f"choose another name for the {what}")
    folder = Path(absolute(path)).parent
    if not os.path.isdir(folder):
        raise NotWritable(f"there is no folder for the {what}", path=path, hint=f"create {folder} first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise NotWritable(f"no permission to write in {folder}", path=path, hint="choose another place for it")


def check_page(path: Path) -> None:
    """Raise UsageError for a page that is not called like one, and what `check_place` raises."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError("--html writes a page", path=path, expected="a name that ends in .html")
    check_place(path, "page")


def publish_file(content: bytes, path: Path, what: str, *, overwrite: bool = False) -> None:
    """Write the file. Raises OutputExists, NotWritable."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_bytes(temporary, content)
        try:
            _place(temporary, path, overwrite)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as error:
        raise OutputExists("a file of this name already exists", path=path, hint=f"choose another name for the {what}") from error
    except OSError as error:
        raise NotWritable(f"the {what} cannot be written: {error.strerror}", path=path, hint="choose another place for it") from error


def _place(temporary: Path, path: Path, overwrite: bool) -> None:
    """Give the file its name; a link, unlike a renaming, replaces nothing. Not every file system has links."""
    if not overwrite:
        try:
            os.link(temporary, path)
            return
        except OSError:
            if os.path.lexists(path):
                raise
    os.replace(temporary, path)
