"""Pickles that would run something, in a few bytes each, and files that hold them. What they would run leaves a mark."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import torch


class Runs:
    """Pickled as a call of ``function`` with ``args``."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def text(value: str) -> bytes:
    """A text of protocol 2."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def short(value: str) -> bytes:
    """A text of protocol 4."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


def calling(module: str, name: str, *args: str) -> bytes:
    """The opcodes of a call: a value of a pickle, without its beginning and end."""
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(map(text, args)) + b"tR"


def pickled(body: bytes) -> bytes:
    """A whole pickle of protocol 2."""
    return b"\x80\x02" + body + b"."


def torch_file(content: object, **options: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def repacked(data: bytes, change: Callable[[str, bytes], bytes | None] = lambda _, content: content, **options: Any) -> bytes:
    """The same archive with some members changed, or without those for which ``change`` gives None."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", **options) as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return buffer.getvalue()


def zipped(content: bytes, name: str = "archive/data.pkl", **options: Any) -> bytes:
    """A file of torch.save whose pickle is ``content``, under whatever name."""
    whole = repacked(torch_file({"w": torch.ones(2)}), lambda old, data: None if old.endswith("data.pkl") else data, **options)
    buffer = io.BytesIO(whole)
    with zipfile.ZipFile(buffer, "a", **options) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def in_dict(value: bytes) -> bytes:
    """A pickle of ``{"x": value}``."""
    return pickled(b"}" + text("x") + value + b"s")
