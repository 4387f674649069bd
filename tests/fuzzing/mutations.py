"""How inputs are changed: bytes, what is in an archive, and what is in JSON."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from typing import Any

OPCODES = b"(.02NtRbocieQhjqru]}s\x80\x81\x85\x86\x87\x8c\x8f\x91\x92\x93\x94\x95"
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 2**31, 2**63, 2**64, -(2**63), 10**30, 1.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "0", "-1",
    "../../x", "/etc/passwd", "\0", "\ud800", "\x1b[31m", "٣", "²", "x" * 5_000, [], [[]], [0] * 100, {}, {"": {}}, {"a": None},
)  # fmt: skip
NUMBERS = (0, 1, 2, 3, 4, 8, 127, 128, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)


def changed_bytes(data: bytes, source: random.Random) -> bytes:
    """Some bytes changed, left out, repeated, cut off or taken from elsewhere; opcodes of pickle more often than others."""
    raw = bytearray(data)
    for _ in range(source.choice((1, 1, 1, 2, 4, 16))):
        at = source.randrange(len(raw) + 1)
        kind = source.randrange(7)
        if kind == 0 and at < len(raw):
            raw[at] = source.choice((source.randrange(256), source.choice(OPCODES), raw[at] ^ (1 << source.randrange(8))))
        elif kind == 1:
            del raw[at : at + source.choice((1, 1, 2, 8, 100))]
        elif kind == 2:
            raw[at:at] = bytes([source.choice(OPCODES)])
        elif kind == 3:
            start = source.randrange(len(raw) + 1)
            raw[at:at] = raw[start : start + source.randrange(64)]
        elif kind == 4:
            size = source.choice((1, 2, 4, 8))
            raw[at : at + size] = struct.pack("<Q", source.choice(NUMBERS))[:size]
        elif kind == 5 and source.random() < 0.2:
            del raw[at:]
        else:
            start = source.randrange(len(raw) + 1)
            size = source.randrange(16)
            raw[at : at + size] = raw[start : start + size]
    return bytes(raw)


def changed_archive(data: bytes, source: random.Random) -> bytes:
    """An archive that is right but for one of its members: nearly always the pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        names = old.namelist()
        pickles = [name for name in names if name.endswith(".pkl")]
        chosen = source.choice(pickles if pickles and source.random() < 0.9 else names)
        for name in names:
            content = old.read(name)
            new.writestr(name, changed_bytes(content, source) if name == chosen else content)
    return buffer.getvalue()


def changed_json(data: bytes, source: random.Random) -> bytes:
    """JSON with a value of another kind, or without one."""
    content = json.loads(data)
    places: list[tuple[Any, Any]] = []
    pending = [content]
    while pending:
        node = pending.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            places.append((node, key))
            pending.append(node[key])
    if not places:
        return json.dumps(source.choice(ODD)).encode()
    for _ in range(source.choice((1, 1, 2))):
        node, key = source.choice(places)
        if isinstance(node, dict) and source.random() < 0.2:
            node.pop(key, None)
        elif isinstance(node, dict):
            node[key] = source.choice((*ODD, source.choice(list(node.values()) or [0])))
        elif key < len(node):
            node[key] = source.choice(ODD)
    return json.dumps(content).encode()


def changed(data: bytes, source: random.Random) -> bytes:
    """A mutant of a file, by what it is."""
    if data.startswith(b"PK\x03\x04") and source.random() < 0.7:
        try:
            return changed_archive(data, source)
        except zipfile.BadZipFile:
            return changed_bytes(data, source)
    if data[:1] in b"{[" and data and source.random() < 0.7:
        try:
            return changed_json(data, source)
        except (ValueError, RecursionError):
            return changed_bytes(data, source)
    length = int.from_bytes(data[:8], "little")
    if data[8:9] == b"{" and length < len(data) and source.random() < 0.7:
        header = (changed_json if source.random() < 0.6 else changed_bytes)(data[8 : 8 + length], source)
        return struct.pack("<Q", len(header)) + header + data[8 + length :]
    return changed_bytes(data, source)
