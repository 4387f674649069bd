"""Words of command lines that people copy: bash reads each back as the same bytes, and a terminal shows all of it.

``shlex.quote`` leaves a newline, an escape sequence or a byte that is no UTF-8 inside of its quotes. What is printed has escapes in their
place, which bash would not read back there; between ``$'`` and ``'`` it does (so do ksh, zsh and POSIX shells since 2024).

Callers of the library read options as the keywords that they are in Python (`in_python`).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

from ckpt_cli.names import printable

SPOKEN = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
"""What has an escape of its own between ``$'`` and ``'``; the bytes of other characters that a terminal must not get are hexadecimal."""

MISTAKEN = re.compile(r"-|[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
"""How relative paths begin that would be taken for an option, or for the address of a store."""

WORD = re.compile(r"\$'((?:[^'\\]|\\.)*)'|((?:'[^']*'|\"'\"|[^\s'\"])+)", re.DOTALL)
ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(.))", re.DOTALL)


OPTION = re.compile(r"(?<![\w-])(--(?P<long>[a-z][a-z-]*[a-z])|-o)(?![\w-])")
KEYWORDS = {"help": "help()", "all": "everything", "from": "begin", "to": "end", "no-normalize": "normalize"}
"""Options whose keyword in Python is another word."""

OF_OTHERS = ("recursive", "local-dir", "head")
"""Options of programs that hints name besides ckpt."""


def word(text: str) -> str:
    r"""A text as one word.

    >>> print(word("run"), word("my run"), word("two" + chr(10) + "lines"), word("bad" + chr(0xDCFF)))
    run 'my run' $'two\nlines' $'bad\xff'
    """
    if printable(text) == text:
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def path(name: str | os.PathLike[str]) -> str:
    """A path as one word, which no command takes for anything else.

    >>> path("-lr=1"), path("s3:/run"), path("/data/run"), path("s3://bucket/run")
    ('./-lr=1', './s3:/run', '/data/run', 's3://bucket/run')
    """
    text = os.fspath(name)
    return word(f"./{text}" if MISTAKEN.match(text) else text)


def join(words: Iterable[str]) -> str:
    """Words as one line: the reverse of `split`."""
    return " ".join(map(word, words))


def split(line: str) -> list[str]:
    """The words of a line that this module made."""
    return [_unescaped(found[1]) if found[1] is not None else shlex.split(found[2])[0] for found in WORD.finditer(line)]


def _escaped(character: str) -> str:
    if character in SPOKEN:
        return SPOKEN[character]
    if printable(character) == character:
        return character
    return "".join(f"\\x{byte:02x}" for byte in _bytes(character))


def _bytes(text: str) -> bytes:
    """The bytes of a name of a file, also where they are no UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _unescaped(text: str) -> str:
    spoken = {escape[1:].encode(): character.encode() for character, escape in SPOKEN.items()}
    raw = ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()) if found[1] is not None else spoken[found[2]], text.encode())
    return raw.decode("utf-8", "surrogateescape")


def in_python(text: str) -> str:
    """A text with options as the keywords that they are in Python; whole commands stay as they are.

    >>> in_python("pass --match-base as well"), in_python("ckpt merge run --step 5")
    ('pass match_base as well', 'ckpt merge run --step 5')
    """

    def keyword(found: re.Match[str]) -> str:
        name = found["long"] or "output"
        return found[0] if name in OF_OTHERS else KEYWORDS.get(name, name.replace("-", "_"))

    return text if "ckpt " in text or "hf download " in text else OPTION.sub(keyword, text)
