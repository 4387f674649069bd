"""Pickles that differ in a few values only, as those that the ranks of one save write: one is read, the others are compared with it.

A `Template` is a pickle that was read while it was recorded which opcode made which value out of which others. Another
pickle of the same opcodes is compared with it byte by byte; where both have an integer, a float or a text, the value may
differ. What depends on such a value is made anew, everything else is shared, so whoever reads nodes must not change
them. What comes out is what the machine of `pickle_reader` makes of the pickle; where a template does not fit, it is asked.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from ckpt_cli.files.collecting import Uncollected
from ckpt_cli.files.pickle_nodes import Call, Persistent
from ckpt_cli.files.pickle_reader import HANDLERS, Machine, load_pickle
from ckpt_cli.files.pickle_stack import Malformed

LEAST, MOST = 1 << 12, 4 << 20
"""Bytes of a pickle that a template is made for, and of all templates: what is recorded takes about 50 bytes for each of them."""

MAX_TEMPLATES = 4
MAX_PLANS = 4
FEW = 64
"""A pickle that differs from every template in more values than this becomes a template itself, while there is room."""

HEAD = 16

LEAVES = frozenset(b"KMJ\x8aGX")
"""Integers, floats and texts: what may differ."""

CONSTANTS = frozenset(b"N\x88\x89c")
POPS = {b")"[0]: 0, b"]"[0]: 0, b"}"[0]: 0, 0x85: 1, 0x86: 2, 0x87: 3, b"R"[0]: 2, 0x81: 2, b"Q"[0]: 1}
"""Opcodes that make one value of so many others."""

STORES = {b"b"[0]: 1, b"s"[0]: 2, b"a"[0]: 1}
"""Opcodes that put so many values into the one below them."""

PROTO, MARK, TUPLE, APPENDS, SETITEMS, STOP = 0x80, b"("[0], b"t"[0], b"e"[0], b"u"[0], b"."[0]
PUT1, PUT4, GET1, GET4 = b"qrhj"
REDUCE, NEWOBJ, BUILD, SETITEM, APPEND, PERSID, LIST, DICT = b"R"[0], 0x81, b"b"[0], b"s"[0], b"a"[0], b"Q"[0], b"]"[0], b"}"[0]

INVALID = (Malformed, IndexError, KeyError, AttributeError, TypeError, ValueError, OverflowError, struct.error)


class Opcode(NamedTuple):
    """An opcode that made the value of ``slot`` out of the values of others, or put these into it."""

    code: int
    slot: int
    inputs: tuple[int, ...]


class Template:
    """A pickle, the values that its opcodes made (each has a slot), and how."""

    def __init__(self, data: bytes) -> None:
        """Raises one of ``INVALID`` if the pickle is damaged or has opcodes that torch.save does not write."""
        self._data = data
        self._starts: list[int] = []
        self._leaves: dict[int, int] = {}
        self._values: list[Any] = []
        self._steps: list[Opcode] = []
        self._plans: dict[frozenset[int], list[Opcode]] = {}
        self._root = self._record()

    @property
    def root(self) -> Any:
        """The value of the pickle itself."""
        return self._values[self._root]

    @property
    def size(self) -> int:
        """Bytes of the pickle."""
        return len(self._data)

    def filled(self, data: bytes, most: int) -> Any | None:
        """The value of another pickle; None if it is damaged, has other opcodes than this one, or more than ``most`` other values."""
        try:
            changed = self._changed(data, most)
            return None if changed is None else self._fill(changed)
        except INVALID:
            return None

    # -- recording ---------------------------------------------------------------------------------------------------

    def _record(self) -> int:
        """Run the machine beside a stack of slots. Returns the slot of the result."""
        data, machine = self._data, Machine(self._data, 0)
        slots: list[int] = []
        memo: dict[int, int] = {}
        while not machine.stopped:
            at = machine.position
            code = data[at]
            self._starts.append(at)
            machine.position = at + 1
            start = machine.marks[-1] if code in (TUPLE, APPENDS, SETITEMS) else len(slots) - (POPS.get(code) or STORES.get(code) or 0)
            HANDLERS[code](machine)
            if code in LEAVES:
                self._leaves[at] = len(self._values)
            if code in (PUT1, PUT4):
                memo[_index(data, at, code)] = slots[-1]
            elif code in (GET1, GET4):
                slots.append(memo[_index(data, at, code)])
            elif code == MARK:
                slots.append(-1)
            elif code in LEAVES or code in CONSTANTS or code in POPS or code == TUPLE:
                inputs = tuple(slots[start + (code == TUPLE) :])
                del slots[start:]
                slots.append(len(self._values))
                if code not in LEAVES and code not in CONSTANTS:
                    self._steps.append(Opcode(code, len(self._values), inputs))
                self._values.append(machine.stack[-1])
            elif code in STORES or code in (APPENDS, SETITEMS):
                inputs = tuple(slots[start + (code in (APPENDS, SETITEMS)) :])
                del slots[start:]
                self._steps.append(Opcode(code, slots[-1], inputs))
            elif code not in (PROTO, STOP):
                raise Malformed("not an opcode that torch.save writes")
        if machine.marks or len(machine.stack) != 1 or machine.position != len(data):
            raise Malformed("values or bytes are left over")
        return slots[0]

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _changed(self, data: bytes, most: int) -> dict[int, Any] | None:
        """Leaves, by slot, that have other values in ``data``; None if anything else differs, or more than ``most`` of them."""
        machine = Machine(data, 0)
        changed: dict[int, Any] = {}
        mine = theirs = 0
        while len(changed) <= most:
            same = _common(self._data, mine, data, theirs)
            mine, theirs = mine + same, theirs + same
            if mine == len(self._data) or theirs == len(data):
                return changed if mine == len(self._data) and theirs == len(data) else None
            opcode = bisect_right(self._starts, mine) - 1
            back = mine - self._starts[opcode]
            slot = self._leaves.get(mine - back)
            if slot is None or data[theirs - back] not in LEAVES:
                return None
            machine.position = theirs - back + 1
            HANDLERS[data[theirs - back]](machine)
            value = machine.pop()
            if type(value) is not type(self._values[slot]):
                return None
            changed[slot] = value
            mine, theirs = self._starts[opcode + 1], machine.position
        return None

    # -- filling in --------------------------------------------------------------------------------------------------

    def _fill(self, changed: Mapping[int, Any]) -> Any:
        values, machine = list(self._values), Machine(b"", 0)
        for slot, value in changed.items():
            values[slot] = value
        for code, slot, inputs in self._plan(frozenset(changed)):
            given = [values[i] for i in inputs]
            if code in (REDUCE, NEWOBJ):
                values[slot] = Call(given[0], given[1])
            elif code in (SETITEM, SETITEMS):
                machine.set_pairs(values[slot], given)
            elif code == BUILD:
                values[slot].state = given[0]
            elif code in (APPEND, APPENDS):
                machine.extend(values[slot], given)
            elif code == PERSID:
                values[slot] = Persistent(given[0])
            elif code in (LIST, DICT):
                values[slot] = [] if code == LIST else {}
            else:
                values[slot] = tuple(given)
        return values[self._root]

    def _plan(self, changed: frozenset[int]) -> list[Opcode]:
        """The steps of all values that depend on these slots, in their order."""
        plan = self._plans.get(changed)
        if plan is None:
            users: dict[int, list[int]] = {}
            for step in self._steps:
                for slot in step.inputs:
                    users.setdefault(slot, []).append(step.slot)
            anew, pending = set(changed), list(changed)
            while pending:
                for slot in users.get(pending.pop(), ()):
                    if slot not in anew:
                        anew.add(slot)
                        pending.append(slot)
            plan = [step for step in self._steps if step.slot in anew]
            # A new dict, which is complete at any time: other threads may read it.
            kept = self._plans if len(self._plans) < MAX_PLANS else {}
            self._plans = {**kept, changed: plan}
        return plan


class Templates:
    """Reads the pickles of many files. One that has the size and the beginning of the pickle before it becomes a template. Thread-safe."""

    def __init__(self, least: int = LEAST) -> None:
        self._least = least
        self._templates: tuple[Template, ...] = ()
        self._before: tuple[bytes, int] = (b"", 0)
        self._lock = threading.Lock()

    def load(self, data: bytes) -> tuple[Any, int]:
        """What `load_pickle` returns and raises."""
        if not self._least <= len(data) <= MOST:
            return load_pickle(data)
        with self._lock:
            templates, (head, size) = self._templates, self._before
            self._before = data[:HEAD], len(data)
        room = len(templates) < MAX_TEMPLATES and sum(template.size for template in templates) + len(data) <= MOST
        resembles = data.startswith(head) and abs(size - len(data)) * 16 < size
        with Uncollected():
            for template in templates:
                root = template.filled(data, FEW if room else len(data))
                if root is not None:
                    return root, len(data)
            if resembles:
                try:
                    new = Template(data)
                except INVALID:
                    return load_pickle(data)
                with self._lock:
                    self._templates = _within_bounds((new, *templates))
                return new.root, len(data)
        return load_pickle(data)


def _within_bounds(templates: tuple[Template, ...]) -> tuple[Template, ...]:
    """The first of these, as many as may be kept."""
    sizes = accumulate(template.size for template in templates)
    return tuple(template for template, size in zip(templates[:MAX_TEMPLATES], sizes, strict=False) if size <= MOST)


def _index(data: bytes, at: int, code: int) -> int:
    """The memo index of a PUT or GET."""
    return data[at + 1] if code in (PUT1, GET1) else int.from_bytes(data[at + 1 : at + 5], "little")


def _common(a: bytes, i: int, b: bytes, j: int) -> int:
    """How many bytes are the same from ``a[i]`` and ``b[j]`` on."""
    most, same, step = min(len(a) - i, len(b) - j), 0, 64
    while same < most and a[i + same : i + same + step] == b[j + same : j + same + step]:
        same, step = same + step, step * 2
    if same >= most:
        return most
    low, high = same, min(same + step, most)
    while low < high:
        middle = (low + high + 1) // 2
        if a[i + same : i + middle] == b[j + same : j + middle]:
            low = middle
        else:
            high = middle - 1
    return low
