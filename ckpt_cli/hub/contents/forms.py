"""Bytes where a text should be: compressed, encrypted, in another encoding; and texts with both sides of a merge that was not ended."""

from __future__ import annotations

import io
import re
import tokenize

UTF_16 = "UTF-16, not UTF-8"
FORMS = (
    (b"\x1f\x8b\x08", "compressed by gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"BZh91AY&SY", "compressed by bzip2"),
    (b"\xfd7zXZ\0", "compressed by xz"),
    (b"\x04\x22\x4d\x18", "compressed by lz4"),
    (b"PK\x03\x04", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\0GITCRYPT\0", "encrypted by git-crypt"),
    (b"age-encryption.org/v", "encrypted by age"),
    (b"\xff\xfe", UTF_16),
    (b"\xfe\xff", UTF_16),
)
"""What files begin with in the form in which something sent, kept or wrote them."""
WIDE = 64
"""Bytes at the beginning that tell UTF-16 without a mark: letters of ASCII, each with a zero."""

CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
"""What no text has, in any of the encodings in which ASCII is ASCII."""

OURS, MIDDLE, THEIRS = (re.compile(pattern, re.MULTILINE) for pattern in (r"^<{7} (?P<label>\S*)", r"^={7}\r?$", r"^>{7} \S"))
"""The lines with which version control marks what it could not merge, in their order."""
EDITING = frozenset({"SEARCH", "ORIGINAL", "FIND", "OLD", "BEFORE"})
"""How models are told to begin a change of code; a template may show it."""


def form_of(raw: bytes) -> str | None:
    r"""In which form bytes are that should be a text, by how they begin; None for all others.

    >>> form_of(b"\x1f\x8b\x08\0\0\0\0\0")
    'the file is compressed by gzip'
    >>> form_of("text".encode("utf-16-le"))
    'the file is UTF-16, not UTF-8'
    >>> form_of("text".encode())
    """
    found = next((form for start, form in FORMS if raw.startswith(start)), None)
    start = raw[:WIDE]
    if found is None and len(start) >= 4 and _is_wide(start):
        found = UTF_16
    return f"the file is {found}" if found is not None else None


def _is_wide(start: bytes) -> bool:
    """Whether every second byte is a zero, and no other."""
    first, second = start[::2], start[1::2]
    return (0 not in first and not any(second)) or (0 not in second and not any(first))


def no_utf8(raw: bytes) -> str | None:
    """Why bytes are no text of UTF-8, which loaders ask for."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return no_text(raw) or f"byte {error.start} of the file is not UTF-8"
    return form_of(raw)


def no_text(raw: bytes) -> str | None:
    """Why bytes are no text of any encoding. What is not known may be one."""
    found = form_of(raw)
    if found is not None:
        return found
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "the file holds no text" if CONTROLS.search(raw) else None
    return None


def no_code(raw: bytes) -> str | None:
    """Why bytes are no Python code, by their encoding, which the code may name."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        raw.decode(encoding)
    except (SyntaxError, LookupError, ValueError):
        return no_text(raw) or "the code is not UTF-8, and names no other encoding"
    return form_of(raw)


def conflict_in(text: str) -> str | None:
    r"""Whether a text holds both sides of what version control could not merge.

    >>> conflict_in("a\n<<<<<<< HEAD\nb\n=======\nc\n>>>>>>> main\n")
    'the file holds both sides of a merge conflict, from line 2 on'
    >>> conflict_in("<<<<<<< SEARCH\nb\n=======\nc\n>>>>>>> REPLACE\n")
    """
    ours = next((found for found in OURS.finditer(text) if found["label"] not in EDITING), None)
    middle = MIDDLE.search(text, ours.end()) if ours is not None else None
    theirs = THEIRS.search(text, middle.end()) if middle is not None else None
    if ours is None or theirs is None:
        return None
    line = text.count("\n", 0, ours.start()) + 1
    return f"the file holds both sides of a merge conflict, from line {line} on"
