"""Small files in place of others: pointers that a program should have replaced by the content, and links that became files."""

from __future__ import annotations

import re

from ckpt_cli.errors import FilePointer, LfsPointer, NotFetched

POINTER_SIZE = 1068
"""Bytes, and one more than any has: Git LFS allows less than 1024 (docs/spec.md of git-lfs), Samba and macOS write links of 1067."""

OF_LFS = b"version https://git-lfs.github.com/spec/"
OF_XET = re.compile(rb"# xet version \d+\s+filesize\b")
OF_ANNEX = re.compile(rb"(\.{0,2}/)*(\.git)?/annex/objects/")
"""A pointer, or the text of the link that stands for a file where links work."""
OF_LINKS = (b"XSym\n", b"IntxLNK\x01", b"!<symlink>")
"""How Samba and macOS, Interix and Cygwin keep a link in a file, on disks that have none."""

GET = {
    "git-annex": "run `git annex get` in its repository",
    "git-xet": "get the file itself with git-xet, which wrote the pointer",
}
SHOWN = 80
INSTEAD = "put the file that it names in its place"

# A link in a repository is checked out as a text where links are not allowed: the path, without the end of a line.
UPWARDS = re.compile(r"(\.{1,2}/)+[^\x00-\x1f<>{}\"]+")
ABSOLUTE = re.compile(r"(/[^\s\x00/<>{}\"]+){2,}")
DOWNWARDS = re.compile(r"[^\s\x00/<>{}\"]+(/[^\s\x00/<>{}\"]+)*")
NAMED = re.compile(r".*\.(?P<suffix>jinja|py|json|model|spm|tiktoken|codes|safetensors|bin|pt)|(vocab|merges|dict)\.(?P<text>txt)")
"""Files that are never a path alone. Trackers of other names are, and .pth of Python."""
TRACKING = frozenset({"json", "bin", "pt"})
"""Suffixes of what may track another file; then only a path upwards is that of a link."""


def refuse_pointer(content: bytes | bytearray | memoryview, name: str, size: int) -> None:
    """Raise LfsPointer or FilePointer for a file that stands in place of another. ``content`` is all of it, if it is small enough."""
    if size >= POINTER_SIZE:
        return
    trouble = _pointer(bytes(content), name.replace("\\", "/").rsplit("/", 1)[-1])
    if trouble is not None:
        trouble.path = name
        raise trouble


def _pointer(content: bytes, name: str) -> NotFetched | None:
    if content.startswith(OF_LFS):
        return LfsPointer("this is a Git LFS pointer, not the file itself")
    kind = "git-annex" if OF_ANNEX.match(content) else "git-xet" if OF_XET.match(content) else None
    if kind is not None:
        return FilePointer(f"this is a pointer of {kind}, not the file itself", hint=GET[kind])
    if content.startswith(OF_LINKS):
        return FilePointer("this is a link that was kept as a file, not the file itself", hint=INSTEAD)
    path = _path_in(content, name)
    if path is None:
        return None
    shown = path if len(path) <= SHOWN else f"{path[:SHOWN]}..."
    return FilePointer(f"this is the text of a link to {shown}, not the file itself", hint=INSTEAD)


def _path_in(content: bytes, name: str) -> str | None:
    """The path that is all that a file holds; None for anything else."""
    named = NAMED.fullmatch(name)
    if named is None:
        return None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    suffix = named["suffix"] or named["text"]
    is_link = UPWARDS.fullmatch(text) is not None
    if suffix not in TRACKING:
        is_link = is_link or ABSOLUTE.fullmatch(text) is not None or (DOWNWARDS.fullmatch(text) is not None and text.endswith(f".{suffix}"))
    return text if is_link else None
