"""Settings in YAML as programs dump them: nested mappings of plain scalars and of lists of these, read line by line.

Anything else (several lines of text, references, tags, lists of mappings) has no value here: what the caller makes of it stands in its
place. Nothing is built of what a file names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ENTRY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_][A-Za-z0-9_]*):(?: +(?P<value>\S.*))?")
ITEM = re.compile(r"(?P<indent> *)-(?: +(?P<value>\S.*))?")
MAX_DEPTH = 32

WORDS: Mapping[str, Any] = {"null": None, "~": None, "true": True, "false": False}
NUMBER = re.compile(r"[-+]?([0-9]+|[0-9]+\.[0-9]*([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)")
PLAIN = re.compile(r"[A-Za-z0-9_./+-]([A-Za-z0-9_./+ -]*[A-Za-z0-9_./+-])?")

Unread = Callable[[str], Any]
"""What stands for a value that is not plain; it is told in words what that is."""


def read_yaml(text: str, unread: Unread) -> dict[str, Any]:
    """The entries of a text of which the top is a mapping; empty if it is none."""
    return _Reader(unread).entries(meant(text.splitlines()), 0)


def meant(lines: Sequence[str]) -> list[str]:
    """The lines without comments of their own, empty ones, and the mark with which a document begins."""
    return [line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#") and not line.startswith("---")]


@dataclass(frozen=True, slots=True)
class _Reader:
    unread: Unread

    def entries(self, body: Sequence[str], depth: int) -> dict[str, Any]:
        first = ENTRY.fullmatch(body[0]) if body else None
        if first is None or depth > MAX_DEPTH:
            return {}
        width = len(first["indent"])
        found: dict[str, Any] = {}
        number = 0
        while number < len(body):
            fields = ENTRY.fullmatch(body[number])
            number += 1
            if fields is None or len(fields["indent"]) != width:
                continue
            start = number
            while number < len(body) and _belongs(body[number], width):
                number += 1
            key = fields["key"]
            # A key that is there twice has no value that everyone reads.
            found[key] = self.unread("a value twice") if key in found else self.value(fields["value"], body[start:number], depth)
        return found

    def value(self, text: str | None, nested: Sequence[str], depth: int) -> Any:
        text = None if text is not None and text.startswith("#") else text
        if text is not None and not nested:
            return self.flow(text) if text[0] in "[{" else self.scalar(text)
        if text in (None, "!!python/tuple"):
            items = [ITEM.fullmatch(line) for line in nested]
            if nested and all(item is not None and item["value"] is not None for item in items):
                return self.whole([self.scalar(item["value"]) for item in items if item is not None])
            if text is None:
                return (self.entries(nested, depth + 1) or self.unread("a nested value")) if nested else None
        return self.unread("a nested value")

    def flow(self, text: str) -> Any:
        """A list in brackets, or a mapping in braces, of scalars."""
        text = re.sub(r"\s+#.*", "", text)
        ends, inner = text[0] + text[-1], text[1:-1].strip()
        if ends == "[]":
            return self.whole([self.scalar(part.strip()) for part in inner.split(",")]) if inner else []
        pairs = [ENTRY.fullmatch(part.strip()) for part in inner.split(",")] if inner else []
        if ends != "{}" or not all(pair is not None and pair["value"] is not None for pair in pairs):
            return self.unread("a nested value")
        return {pair["key"]: self.scalar(pair["value"]) for pair in pairs if pair is not None}

    def whole(self, values: list[Any]) -> Any:
        """A list, unless a value of it was not read."""
        return values if all(value is None or isinstance(value, (str, int, float)) for value in values) else self.unread("a nested value")

    def scalar(self, text: str) -> Any:
        text = re.sub(r"\s+#.*", "", text)
        if text.lower() in WORDS:
            return WORDS[text.lower()]
        if NUMBER.fullmatch(text):
            return int(text) if re.fullmatch(r"[-+]?[0-9]{1,18}", text) else float(text)
        if len(text) > 1 and text[0] == text[-1] == "'":
            return text[1:-1].replace("''", "'")
        if len(text) > 1 and text[0] == text[-1] == '"':
            try:
                return json.loads(text)
            except ValueError:
                return self.unread("a quoted value")
        return text if PLAIN.fullmatch(text) else self.unread("a value of another kind")


def _belongs(line: str, width: int) -> bool:
    """Whether a line is part of the value of an entry with some indentation; items of a list may have the entry's own."""
    indent = len(line) - len(line.lstrip(" "))
    return indent > width or (indent == width and ITEM.fullmatch(line) is not None)
