"""Whether a template of Jinja is whole, by its tags and blocks alone: nothing of it is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_TEMPLATE = 1 << 20
"""Characters of what is looked at; chat templates have some thousands."""

BLOCKS = frozenset({"if", "for", "macro", "call", "filter", "block", "with", "autoescape", "generation"})
"""Words that begin what another tag ends, in Jinja and in the chat templates of transformers."""
SET = "set"
"""Begins a block where the tag assigns nothing."""

BEGIN = re.compile(r"\{%[-+]?\s*raw\s*-?%\}|\{[%{#]")
END_OF_RAW = re.compile(r"\{%[-+]?\s*endraw\s*[-+]?%\}")
MARK = re.compile(r"""['"()\[\]{}]|%\}|(?<![=!<>])=(?!=)""")
STRINGS = {quote: re.compile(rf"{quote}[^{quote}\\]*(?:\\.[^{quote}\\]*)*{quote}", re.DOTALL) for quote in "'\""}
OPENING = {")": "(", "]": "[", "}": "{"}
WORD = re.compile(r"[-+]?\s*([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class _Tag:
    """Where a tag ends, and whether it assigns something. ``end`` is None if the text ends before."""

    end: int | None
    assigns: bool = False


def broken(text: str) -> str | None:
    """Why no loader compiles a template, if it was cut off or lacks a part; None for what is whole or not known.

    >>> broken("{% for m in messages %}{{ m.content }}{% endfor %}{{ '{% if' }}")
    >>> broken("{% for m in messages %}{{ m.content }}")
    'the template ends before {% endfor %}'
    """
    if len(text) > MAX_TEMPLATE:
        return None
    place, blocks = 0, list[str]()
    while (begin := BEGIN.search(text, place)) is not None:
        kind, place = begin[0], begin.end()
        if kind == "{#":
            place = text.find("#}", place) + 2
            if place < 2:
                return "the template ends within a comment"
        elif len(kind) > 2:
            end = END_OF_RAW.search(text, place)
            if end is None:
                return "the template ends before {% endraw %}"
            place = end.end()
        else:
            tag = _tag(text, place, "%}" if kind == "{%" else "}}")
            if tag is None:
                return None
            if tag.end is None:
                return "the template ends within a tag"
            if kind == "{%" and (trouble := _follow(blocks, text, place, tag)) is not None:
                return trouble
            place = tag.end
    return f"the template ends before {{% end{blocks[-1]} %}}" if blocks else None


def templates_in(content: Any) -> Iterator[str]:
    """The chat templates in a parsed config, where transformers keeps them: one, several by name, or a list of these."""
    held = content.get("chat_template") if isinstance(content, Mapping) else None
    several = list(held.values()) if isinstance(held, Mapping) else held if isinstance(held, list) else [held]
    for each in several:
        text = each.get("template") if isinstance(each, Mapping) else each
        if isinstance(text, str):
            yield text


def _tag(text: str, place: int, close: str) -> _Tag | None:
    """The tag whose inside begins at a place. Its end counts outside of strings and brackets. None for brackets that do not match."""
    brackets, assigns = list[str](), False
    while (found := MARK.search(text, place)) is not None:
        mark, place = found[0], found.end()
        if mark in STRINGS:
            string = STRINGS[mark].match(text, found.start())
            if string is None:
                return _Tag(None)
            place = string.end()
        elif not brackets and text.startswith(close, found.start()):
            return _Tag(found.start() + len(close), assigns)
        elif mark in "([{":
            brackets.append(mark)
        elif mark == "=":
            assigns = assigns or not brackets
        elif not brackets or brackets.pop() != OPENING[mark[-1]]:
            return None
    return _Tag(None)


def _follow(blocks: list[str], text: str, place: int, tag: _Tag) -> str | None:
    """Open or close the block of a tag. Words that Jinja itself does not know are left to whoever knows them."""
    found = WORD.match(text, place)
    word = found[1] if found is not None else ""
    if word in BLOCKS or (word == SET and not tag.assigns):
        blocks.append(word)
    elif word.startswith("end") and word[3:] in BLOCKS | {SET} and (not blocks or blocks.pop() != word[3:]):
        return f"the template has {{% {word} %}} where no {{% {word[3:]} %}} is open"
    return None
