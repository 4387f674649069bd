"""Expressions of adapter configs, matched in bounded time.

``re`` tries one way after the other, and the ways through an expression may be more than it can try in a lifetime. Here all places that
a part of the expression can end at are found together, so that the work grows with the name and the expression, not with the ways.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

LONGEST = 20_000
"""Characters of an expression; those of trainers that list every layer are long."""

MOST_STEPS = 20_000_000
"""Places that are looked at by one expression, over all names: some seconds."""

Places = frozenset[int]
NOWHERE: Places = frozenset()


class _UndecidedError(Exception):
    """The expression needs what is not known here, or more work than it may."""


class Expression:
    """An expression that is matched with whole names, as ``re.fullmatch`` does."""

    def __init__(self, pattern: str) -> None:
        self._steps = 0
        self._parts: Any = None
        try:
            if len(pattern) <= LONGEST:
                self._parts = _parsed(pattern)
        except (re.error, RecursionError, OverflowError, ImportError, _UndecidedError):
            pass

    def matches(self, name: str) -> bool | None:
        """Whether it matches all of a name; None where that cannot be told."""
        if self._parts is None:
            return None
        try:
            return len(name) in self._ends(self._parts, name, frozenset((0,)))
        except (_UndecidedError, RecursionError):
            return None

    def _ends(self, parts: Any, name: str, starts: Places) -> Places:
        """Where a sequence can end that begins at one of these places."""
        for op, argument in parts:
            if not starts:
                return NOWHERE
            self._steps += len(starts)
            if self._steps > MOST_STEPS:
                raise _UndecidedError
            starts = self._after(str(op), argument, name, starts)
        return starts

    def _after(self, op: str, argument: Any, name: str, starts: Places) -> Places:
        if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            fits = _character(op, argument)
            return frozenset(at + 1 for at in starts if at < len(name) and fits(name[at]))
        if op == "BRANCH":
            return NOWHERE.union(*(self._ends(branch, name, starts) for branch in argument[1]))
        if op == "SUBPATTERN":
            return self._ends(argument[3], name, starts)
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = argument
            return self._repeated(int(least), int(most), inner, name, starts)
        if op == "AT":
            return frozenset(at for at in starts if _is_at(str(argument), name, at))
        # What is looked ahead or behind for.
        wanted, (direction, inner) = op == "ASSERT", argument
        if direction > 0:
            return frozenset(at for at in starts if bool(self._ends(inner, name, frozenset((at,)))) is wanted)
        width = inner.getwidth()[0]
        return frozenset(at for at in starts if (at >= width and at in self._ends(inner, name, frozenset((at - width,)))) is wanted)

    def _repeated(self, least: int, most: int, inner: Any, name: str, starts: Places) -> Places:
        # After twice as many rounds as there are places, further rounds lead to the same places.
        enough = 2 * len(name) + 2
        for _ in range(min(least, enough)):
            ends = self._ends(inner, name, starts)
            if ends == starts or not ends:
                starts = ends
                break
            starts = ends
        found = new = starts
        for _ in range(min(most, enough) - min(least, enough)):
            new = self._ends(inner, name, new) - found
            if not new:
                break
            found |= new
        return found


KNOWN = frozenset({"LITERAL", "NOT_LITERAL", "ANY", "IN", "BRANCH", "SUBPATTERN", "MAX_REPEAT", "MIN_REPEAT", "AT", "ASSERT", "ASSERT_NOT"})
CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda char: char.isalnum() or char == "_",
}


def _parsed(pattern: str) -> Any:
    """The parts of an expression as ``re`` parses it. Raises what that raises, and _UndecidedError for parts that are not known here."""
    parser = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
    parsed = parser.parse(pattern)
    if parsed.state.flags & ~re.UNICODE:
        raise _UndecidedError
    _check_known(parsed)
    return parsed


def _check_known(parts: Any) -> None:
    for op, argument in parts:
        name = str(op)
        if name not in KNOWN or (name == "SUBPATTERN" and (argument[1] or argument[2])):
            raise _UndecidedError
        if name == "BRANCH":
            for branch in argument[1]:
                _check_known(branch)
        elif name in ("SUBPATTERN", "MAX_REPEAT", "MIN_REPEAT", "ASSERT", "ASSERT_NOT"):
            _check_known(argument[-1])


def _character(op: str, argument: Any) -> Callable[[str], bool]:
    if op == "ANY":
        return lambda char: char != "\n"
    if op == "IN":
        return _one_of(tuple((str(kind), value) for kind, value in argument))
    return (lambda char: ord(char) == argument) if op == "LITERAL" else (lambda char: ord(char) != argument)


@functools.lru_cache(maxsize=256)
def _one_of(kinds: tuple[tuple[str, Any], ...]) -> Callable[[str], bool]:
    """A set of characters."""

    @functools.lru_cache(maxsize=256)
    def fits(char: str) -> bool:
        found, wanted = False, True
        for kind, value in kinds:
            if kind == "NEGATE":
                wanted = False
            elif kind == "LITERAL":
                found = found or ord(char) == value
            elif kind == "RANGE":
                found = found or value[0] <= ord(char) <= value[1]
            else:
                _, *no, category = str(value).split("_")
                found = found or CATEGORIES[category](char) is not bool(no)
        return found is wanted

    return fits


def _is_at(place: str, name: str, at: int) -> bool:
    if place in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return at == 0
    if place in ("AT_END", "AT_END_STRING"):
        return at == len(name) or (place == "AT_END" and at == len(name) - 1 and name[at] == "\n")
    of_word = CATEGORIES["WORD"]
    before, after = at > 0 and of_word(name[at - 1]), at < len(name) and of_word(name[at])
    return (before is not after) is (place == "AT_BOUNDARY")
