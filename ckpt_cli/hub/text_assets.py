"""Texts and vocabularies beside the weights, as loaders read them, and what speaks against them: not UTF-8, cut off, another thing."""

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
from ckpt_cli.hub.beside.names import ASSET_NAMES
from ckpt_cli.hub.contents.answers import answer_in, answer_of
from ckpt_cli.hub.contents.cuts import cut_code, cut_pieces, cut_table, cut_text
from ckpt_cli.hub.contents.templates import broken, templates_in
from ckpt_cli.tensors.component import Note

TEXTS = (".json", ".jinja")
FILLED = re.compile(r".*\.(json|jinja|model|tiktoken|spm|codes|tokenizer)|(vocab|merges|dict)\.txt")
"""Files that have content, whatever a model is: an empty one is left by an interrupted copy or a full disk."""

OF_SENTENCEPIECE = re.compile(r".*\.(model|spm)(\.v[0-9]\w*)?")
TABLES = re.compile(r".*\.(tiktoken|codes)|(merges|vocab|dict)\.txt")
UNOPENED = re.compile(r"(license|notice|copying)\b.*", re.IGNORECASE)
"""What no loader opens."""

LISTS = frozenset({"modules.json", "entity_vocab.json"})
OBJECTS = frozenset(name for name in ASSET_NAMES - LISTS if name.endswith(".json"))
"""JSON of which loaders ask entries by name."""

MAX_CONTENT = 16 << 20
"""Bytes of a file whose content is looked at, besides JSON; vocabularies have a few million."""

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


def check_text(path: Path, *, written: bool = True) -> None:
    """Raise CorruptFile for text that no loader reads. Duplicate keys are left to the loader.

    Of what is not ``written`` yet, a byte order mark will be left out.
    """
    text = read_text(path)
    if text.marked and written:
        raise CorruptFile("the file begins with a byte order mark, which loaders do not read", path=path)
    if text.trouble is not None:
        raise text.trouble


def check_filled(path: Path) -> None:
    """Raise CorruptFile for a file that a loader opens and that is empty, or holds something else than its name says, or a part of it."""
    if FILLED.fullmatch(path.name) and size_of(path) == 0:
        raise CorruptFile("the file is empty", path=path)
    opened = path.suffix in (".py", ".txt") or FILLED.fullmatch(path.name) or OF_SENTENCEPIECE.fullmatch(path.name)
    if path.suffix in TEXTS or not opened or UNOPENED.fullmatch(path.name):
        return
    # Of a larger file the beginning says enough.
    large = size_of(path) > MAX_CONTENT
    zeros = OF_ZEROS if large and begins_with(path, ZEROS) else None
    trouble = zeros if large else _wrong(path.name, read_small(path))
    if trouble is not None:
        raise CorruptFile(trouble, path=path)


def _wrong(name: str, raw: bytes) -> str | None:
    """What is wrong with the content of code, of a table of words, or of a vocabulary."""
    if raw.startswith(ZEROS):
        return OF_ZEROS
    if OF_SENTENCEPIECE.fullmatch(name):
        if (trouble := cut_pieces(raw)) is not None or not _is_text(raw):
            return trouble
    elif (trouble := cut_text(raw)) is not None:
        return trouble
    if name.endswith(".py") and (trouble := cut_code(raw)) is not None:
        return _answer(raw) or trouble
    table = TABLES.fullmatch(name) or OF_SENTENCEPIECE.fullmatch(name)
    return _answer(raw) or (cut_table(raw.decode("utf-8", "replace")) if table else None)


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _answer(raw: bytes) -> str | None:
    held = answer_in(raw.decode("utf-8", "replace"))
    return f"the file holds {held}" if held is not None else None


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
    """The content of JSON, None of a template. Raises CorruptFile for what is another thing, or a part of it."""
    try:
        if raw.startswith(ZEROS):
            raise CorruptFile(OF_ZEROS, path=path)
        text = raw.decode()
        if path.suffix != ".json":
            content, trouble = None, _answer(raw) or cut_text(raw) or broken(text)
        else:
            content = json.loads(text)
            trouble = _odd(path.name, content)
    except UnicodeDecodeError:
        raise CorruptFile(cut_text(raw) or "the file is not UTF-8", path=path) from None
    except (ValueError, RecursionError):
        raise CorruptFile(_answer(raw) or ("the file is empty" if not raw else "the file is not valid JSON"), path=path) from None
    if trouble is not None:
        raise CorruptFile(trouble, path=path)
    return content


def _odd(name: str, content: Any) -> str | None:
    """What is wrong with the content of a file that is valid JSON."""
    held = answer_of(content)
    if held is not None:
        return f"the file holds {held}"
    if not isinstance(content, dict):
        return "the file does not hold a JSON object" if name in OBJECTS else None
    found = next((why for why in map(broken, templates_in(content)) if why is not None), None)
    return f"chat_template: {found}" if found is not None else None
