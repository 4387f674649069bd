"""JSON and templates beside the weights, as loaders read them: UTF-8 without a byte order mark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ckpt_cli.errors import CkptError, CorruptFile
from ckpt_cli.files.source import begins_with, read_small
from ckpt_cli.tensors.component import Note

TEXTS = (".json", ".jinja")
MARK = b"\xef\xbb\xbf"
"""The byte order mark that editors on Windows put in front of UTF-8; json.load refuses it, a template would print it."""


def check_text(path: Path) -> None:
    """Raise CorruptFile for text that no loader reads. Duplicate keys are left to the loader."""
    raw = read_small(path)
    if raw.startswith(MARK):
        raise CorruptFile("the file begins with a byte order mark, which loaders do not read", path=path)
    _parse(path, raw)


def text_notes(assets: Mapping[str, Path]) -> list[Note]:
    """Notes about the texts that are copied: removed byte order marks, and files that no loader can read."""
    notes = []
    for name, path in assets.items():
        if path.suffix not in TEXTS:
            continue
        try:
            raw = read_small(path)
            if raw.startswith(MARK):
                notes.append(Note("info", "byte-order-mark", f"{name} begins with a byte order mark, which loaders do not read: left out"))
            _parse(path, raw.removeprefix(MARK))
        except CkptError as error:
            notes.append(Note("warning", "damaged-asset", f"{name} is passed on as it is: {error.message}"))
    return notes


def unmarked(path: Path) -> bytes | Path:
    """The path of a text, or its content if that begins with a byte order mark."""
    marked = path.suffix in TEXTS and begins_with(path, MARK)
    return read_small(path).removeprefix(MARK) if marked else path


def _parse(path: Path, raw: bytes) -> None:
    try:
        text = raw.decode()
        if path.suffix == ".json":
            json.loads(text)
    except UnicodeDecodeError:
        raise CorruptFile("the file is not UTF-8", path=path) from None
    except (ValueError, RecursionError):
        raise CorruptFile("the file is empty" if not raw else "the file is not valid JSON", path=path) from None
