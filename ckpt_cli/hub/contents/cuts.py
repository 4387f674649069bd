"""Side files that end too early, as an interrupted copy leaves them: code, tables of words, models of sentencepiece. Nothing is run."""

from __future__ import annotations

import io
import re
import symtable
import tokenize
import warnings

from ckpt_cli.names import plural

ZEROS = bytes(8)
END = "the file ends with zeros, as after a power loss"

MAX_CODE = 1 << 20
"""Bytes of code that is parsed; models have some hundred thousand."""
LAST_WORD = re.compile(r"\w*\s*\Z")
DETECTED = re.compile(r"detected at line (\d+)")

HEADER = "#version"
"""How the first line of a merges.txt begins, which is none of its pairs."""

PIECES, SPECS = 1, frozenset({2, 3})
"""Fields of a model of sentencepiece: its vocabulary, then how it was trained and how it changes texts. Training writes all of them."""
WIDTHS = {1: 8, 5: 4}
"""Bytes of values of fixed width, by wire type."""
STRING = b"\n"
"""The key of field 1 where it holds bytes."""


def cut_text(raw: bytes) -> str | None:
    """Why a text that should be UTF-8 is not all there. What is in another encoding is not known."""
    if raw.endswith(ZEROS):
        return END
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return "the file ends within a character"
    return None


def cut_code(raw: bytes) -> str | None:
    """Why Python code was cut off: it does not parse, and it is at its end that it does not.

    An error anywhere else may be syntax of a newer Python than this one.
    """
    found = error_in(raw)
    if found is None or not _ends_early(raw.decode("utf-8-sig"), found):
        return None
    return f"the code ends in the middle: {found.msg}, line {found.lineno}"


def error_in(raw: bytes) -> SyntaxError | None:
    """Where Python code in UTF-8 does not parse; None also for what is not known."""
    if len(raw) > MAX_CODE:
        return None
    try:
        text = raw.decode("utf-8-sig")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            symtable.symtable(text, "code", "exec")
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError, MemoryError, OverflowError):
        return None
    return None


def _ends_early(text: str, error: SyntaxError) -> bool:
    """Whether the parser met the end of the text, or its last word, where more should follow."""
    end = text.rstrip()
    lines = end.count("\n") + 1
    detected = DETECTED.search(error.msg)
    if detected is not None:
        return int(detected[1]) >= lines
    word = LAST_WORD.search(end)
    start = word.start() if word is not None else len(end)
    last = (end.count("\n", 0, start) + 1, start - end.rfind("\n", 0, start))
    # Behind the last line there is no column.
    if (error.lineno or 0) >= lines and not error.offset:
        return True
    until = (error.end_lineno or 0, error.end_offset or 0)
    more = error.msg.startswith("expected") and until > (lines, len(end) - end.rfind("\n") - 1)
    return (error.lineno or 0, error.offset or 0) >= last or more or _is_open(text)


def _is_open(text: str) -> bool:
    """Whether a bracket is open at the end of code. The parser also says so of an error between brackets that are closed later."""
    try:
        for _ in tokenize.generate_tokens(io.StringIO(text).readline):
            pass
    except tokenize.TokenError as error:
        return "EOF in multi-line" in str(error.args[0])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return False


def cut_table(text: str) -> str | None:
    r"""Why the last line of a table of words is not whole: it has fewer words than all others, or half the number that is due.

    >>> cut_table("#version: 0.2\na b\nab c\nab")
    'the last line has 1 word, all others have 2'
    >>> cut_table("YQ== 98\nYg== 99\nYw== 10")
    'the last line has the number 10 where 100 follows'
    """
    lines = text.removesuffix("\n").split("\n")
    rows = [row.rstrip("\r ").split(" ") for row in (lines[1:] if lines[0].startswith(HEADER) else lines)]
    counts = [len(row) for row in rows]
    if len(rows) < 2 or len(set(counts[:-1])) > 1 or rows[-1] == [""]:
        return None
    if counts[-1] < counts[0]:
        return f"the last line has {plural(counts[-1], 'word')}, all others have {counts[0]}"
    numbers = [row[-1] for row in rows[-3:]]
    if len(numbers) == 3 and all(re.fullmatch(r"[0-9]{1,12}", each, re.ASCII) for each in numbers):
        first, second, last = numbers
        due = str(int(second) + 1)
        if int(second) == int(first) + 1 and last != due and due.startswith(last):
            return f"the last line has the number {last} where {due} follows"
    return None


def cut_pieces(raw: bytes) -> str | None:
    """Why a model of sentencepiece was cut off, by the lengths of its fields. None for what is whole, or is no such model."""
    if not begins_with_a_piece(raw):
        return None
    place, fields = 0, set[int]()
    while place < len(raw):
        number, end = _field(raw, place)
        if not number:
            return f"from byte {place} on the file is no model of sentencepiece"
        if end > len(raw):
            return "the file ends within a field"
        fields.add(number)
        place = end
    return None if fields & SPECS else "the file ends with its vocabulary, and does not say how that is used"


def begins_with_a_piece(raw: bytes) -> bool:
    """Whether bytes begin as a vocabulary of sentencepiece: with a field that begins with a text."""
    number, end = _field(raw, 0)
    length = _number(raw, 1)
    if number != PIECES or not raw.startswith(STRING) or length is None:
        return False
    word = _number(raw, length[1] + 1)
    return raw[length[1] : length[1] + 1] == STRING and word is not None and word[1] + word[0] <= end


def _field(raw: bytes, place: int) -> tuple[int, int]:
    """Number and end of the field at a place. It ends behind the bytes where these end before; the number is 0 if it is no field."""
    key = _number(raw, place)
    if key is None:
        return PIECES, len(raw) + 1
    (number, kind), inside = divmod(key[0], 8), key[1]
    if kind in WIDTHS:
        return number, inside + WIDTHS[kind]
    if kind not in (0, 2):
        return 0, inside
    value = _number(raw, inside)
    if value is None:
        return number, len(raw) + 1
    return number, value[1] + (value[0] if kind == 2 else 0)


def _number(raw: bytes, place: int) -> tuple[int, int] | None:
    """A number of variable length and where it ends; None if the bytes end before."""
    value = shift = 0
    while place < len(raw):
        value |= (raw[place] & 127) << min(shift, 64)
        shift, place = shift + 7, place + 1
        if raw[place - 1] < 128:
            return value, place
    return None
