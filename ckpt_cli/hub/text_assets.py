"""Texts and vocabularies beside the weights, as loaders read them, and what speaks against them: no text, cut off, another thing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from ckpt_cli.errors import CkptError, CorruptFile
from ckpt_cli.files.source import beginning_of, read_small, size_of
from ckpt_cli.hub.beside.names import ASSET_NAMES
from ckpt_cli.hub.contents.answers import answer_in, answer_of
from ckpt_cli.hub.contents.cuts import begins_with_a_piece, cut_code, cut_pieces, cut_table, cut_text, error_in
from ckpt_cli.hub.contents.forms import conflict_in, form_of, no_code, no_text, no_utf8
from ckpt_cli.hub.contents.templates import broken, templates_in
from ckpt_cli.tensors.component import Note

TEXTS = (".json", ".jinja")
FILLED = re.compile(r".*\.(json|jinja|model|tiktoken|spm|codes|tokenizer)|(vocab|merges|dict)\.txt")
"""Files that have content, whatever a model is: an empty one is left by an interrupted copy or a full disk."""

OF_SENTENCEPIECE = re.compile(r".*\.(model|spm)(\.v[0-9]\w*)?|.*\.tokenizer")
TABLES = re.compile(r".*\.(tiktoken|codes)|(merges|vocab|dict)\.txt")
MODELS = re.compile(r"tokenizer\.model(\.v[0-9]\w*)?|(spiece|sentencepiece|sentencepiece\.bpe|spm|spm_char)\.model|(source|target)\.spm")
TABLE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|\Z)|\s*\{")
NO_MODEL = "the file is neither a model of sentencepiece nor a table of tiktoken"
"""What classes read only as one of the two, and how a table begins. JSON is a form that some code of a model may read."""
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
BEGINNING = 64

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
    trouble = _form(beginning_of(path, BEGINNING)) if large else _wrong(path.name, read_small(path))
    if trouble is not None:
        raise CorruptFile(trouble, path=path)


def _form(raw: bytes) -> str | None:
    return OF_ZEROS if raw.startswith(ZEROS) else form_of(raw)


def _wrong(name: str, raw: bytes) -> str | None:
    """What is wrong with the content of code, of a table of words, or of a vocabulary."""
    if (trouble := _form(raw)) is not None:
        return trouble
    text = raw.decode("utf-8", "replace")
    if name.endswith(".py"):
        return _of_code(raw, text)
    is_table, is_model = TABLES.fullmatch(name) is not None, OF_SENTENCEPIECE.fullmatch(name) is not None
    if is_model and begins_with_a_piece(raw):
        return cut_pieces(raw)
    if not is_model and (trouble := cut_text(raw) or (no_utf8(raw) if is_table else no_text(raw))) is not None:
        return trouble
    if is_model and MODELS.fullmatch(name) and TABLE.match(raw) is None:
        return _answer(raw) or conflict_in(text) or NO_MODEL
    if is_model and no_utf8(raw) is not None:
        return None
    return _answer(raw) or conflict_in(text) or (cut_table(text) if is_table or is_model else None)


def _of_code(raw: bytes, text: str) -> str | None:
    """What is wrong with Python code, which may be in the encoding that it names, and quote what is wrong with others."""
    odd = no_code(raw)
    if odd is not None or raw.endswith(ZEROS):
        return cut_text(raw) or odd
    return (conflict_in(text) or _answer(raw) or cut_code(raw)) if error_in(raw) is not None else _answer(raw)


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
    marked = path.suffix in TEXTS and beginning_of(path, len(MARK)) == MARK
    return read_small(path).removeprefix(MARK) if marked else path


def _parsed(path: Path, raw: bytes) -> Any:
    """The content of JSON, None of a template. Raises CorruptFile for what is another thing, or a part of it."""
    try:
        if (trouble := _form(raw)) is not None:
            raise CorruptFile(trouble, path=path)
        text = raw.decode()
        if path.suffix != ".json":
            content, trouble = None, _answer(raw) or cut_text(raw) or conflict_in(text) or broken(text)
        else:
            content = json.loads(text)
            trouble = _odd(path.name, content)
    except UnicodeDecodeError:
        raise CorruptFile(cut_text(raw) or "the file is not UTF-8", path=path) from None
    except (ValueError, RecursionError):
        why = _answer(raw) or conflict_in(text) or ("the file is empty" if not raw else "the file is not valid JSON")
        raise CorruptFile(why, path=path) from None
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
    found = next((why for text in templates_in(content) if (why := conflict_in(text) or broken(text)) is not None), None)
    return f"chat_template: {found}" if found is not None else None
