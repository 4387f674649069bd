"""JSON and templates beside the weights, as loaders read them: UTF-8 without a byte order mark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from ckpt_cli.errors import CkptError, CorruptFile
from ckpt_cli.files.source import begins_with, read_small, size_of
from ckpt_cli.tensors.component import Note

TEXTS = (".json", ".jinja")
FILLED = re.compile(r".*\.(json|jinja|model|tiktoken|spm|codes|tokenizer)|(vocab|merges|dict)\.txt")
"""Files that have content, whatever a model is: an empty one is left by an interrupted copy or a full disk."""

ZEROS = bytes(8)
"""What none of them begins with: they are texts, or models of sentencepiece (a field of a protocol buffer)."""
OF_ZEROS = "the file begins with zeros, as after a power loss"

MARK = b"\xef\xbb\xbf"
"""The byte order mark that editors on Windows put in front of UTF-8; json.load refuses it, a template would print it."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text beside the weights: its parsed ``content`` (of JSON), whether it begins with a byte order mark, and why no loader reads it."""

    content: Any = None
    marked: bool = False
    trouble: CkptError | None = None


class Checked(Protocol):
    """What a text was found to be."""

    @property
    def marked(self) -> bool: ...

    @property
    def trouble(self) -> CkptError | None: ...


NOTHING: Mapping[str, Callable[[], Checked] | None] = MappingProxyType({})


def read_text(path: Path) -> Text:
    """A text, parsed. Raises what reading a file raises; content that no loader reads is its ``trouble``."""
    raw = read_small(path)
    marked = raw.startswith(MARK)
    try:
        return Text(_parsed(path, raw.removeprefix(MARK)), marked)
    except CorruptFile as error:
        return Text(None, marked, error)


def check_text(path: Path) -> None:
    """Raise CorruptFile for text that no loader reads. Duplicate keys are left to the loader."""
    text = read_text(path)
    if text.marked:
        raise CorruptFile("the file begins with a byte order mark, which loaders do not read", path=path)
    if text.trouble is not None:
        raise text.trouble


def check_filled(path: Path) -> None:
    """Raise CorruptFile for an empty file that a loader opens (`FILLED`), and for one of zeros, as a power loss leaves it."""
    if FILLED.fullmatch(path.name) and size_of(path) == 0:
        raise CorruptFile("the file is empty", path=path)
    opened = path.suffix not in TEXTS and (path.suffix in (".py", ".txt") or FILLED.fullmatch(path.name))
    if opened and begins_with(path, ZEROS):
        raise CorruptFile(OF_ZEROS, path=path)


def text_notes(assets: Mapping[str, Path], known: Mapping[str, Callable[[], Checked] | None] = NOTHING) -> list[Note]:
    """Notes about the texts that are copied: removed byte order marks, and files that no loader can read.

    ``known`` gives what was found about some of them before.
    """
    notes = []
    for name, path in assets.items():
        try:
            check_filled(path)
            if path.suffix not in TEXTS:
                continue
            ask = known.get(name)
            text: Checked = ask() if ask is not None else read_text(path)
            marked, trouble = text.marked, text.trouble
        except CkptError as error:
            marked, trouble = False, error
        if marked:
            notes.append(Note("info", "byte-order-mark", f"{name} begins with a byte order mark, which loaders do not read: left out"))
        if trouble is not None:
            notes.append(Note("warning", "damaged-asset", f"{name} is passed on as it is: {trouble.message}"))
    return notes


def unmarked(path: Path) -> bytes | Path:
    """The path of a text, or its content if that begins with a byte order mark."""
    marked = path.suffix in TEXTS and begins_with(path, MARK)
    return read_small(path).removeprefix(MARK) if marked else path


def _parsed(path: Path, raw: bytes) -> Any:
    try:
        if raw.startswith(ZEROS):
            raise CorruptFile(OF_ZEROS, path=path)
        text = raw.decode()
        return json.loads(text) if path.suffix == ".json" else None
    except UnicodeDecodeError:
        raise CorruptFile("the file is not UTF-8", path=path) from None
    except (ValueError, RecursionError):
        raise CorruptFile("the file is empty" if not raw else "the file is not valid JSON", path=path) from None
