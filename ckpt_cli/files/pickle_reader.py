"""The inert pickle reader: a pickle becomes plain values and opaque nodes, and nothing in it ever runs.

CPython's pickle documentation calls unpickling unsafe because GLOBAL looks names up and REDUCE calls them. Here GLOBAL
makes a `Global` node, REDUCE and its relatives make a `Call` node, BUILD stores the state on that node. No name is
imported, no attribute looked up, no callable called. Protocols 0 to 5 are read; extension codes and out-of-band buffers
are refused.

Work and memory are proportional to the size of the input: every length is checked against the bytes that are left, memo
indices and marks are bounded, and keys are restricted to types whose hash is cheap (CPython overflows its stack while
hashing a deeply nested tuple).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ckpt_cli.errors import CorruptFile
from ckpt_cli.files.collecting import Uncollected
from ckpt_cli.files.pickle_nodes import Call, Global, Persistent
from ckpt_cli.files.pickle_stack import NO_FRAME, Malformed, Stack

BETWEEN_CHECKS = 1 << 16
MAX_STACK = 4_000_000
MAX_KEY = 1 << 60
MAX_KEY_PARTS = 8
MAX_TUPLE_KEYS = 4096
"""Tuples of integers can be made to collide, which makes a dict quadratic."""


def load_pickle(data: bytes | memoryview, start: int = 0) -> tuple[Any, int]:
    """The value of the pickle that begins at ``start``, and the position after its STOP.

    Raises CorruptFile (with the opcode and byte position) for anything that is not a well-formed pickle.
    """
    machine = Machine(bytes(data), start)
    try:
        with Uncollected():
            return machine.run(), machine.position
    except Malformed as error:
        raise CorruptFile(f"damaged pickle: {error} at byte {machine.opcode_at}") from None
    except (IndexError, KeyError, AttributeError, TypeError, ValueError, OverflowError, struct.error, RecursionError):
        raise CorruptFile(f"damaged pickle: opcode {machine.opcode_name} is invalid at byte {machine.opcode_at}") from None


class Machine(Stack):
    """Pickle's stack machine. Every opcode is one small method; the table below maps bytes to methods."""

    def run(self) -> Any:
        data, handlers, stack = self.data, HANDLERS, self.stack
        end = len(data)
        while len(stack) <= MAX_STACK:
            for _ in range(BETWEEN_CHECKS):
                at = self.opcode_at = self.position
                if at >= end:
                    raise Malformed("the pickle ends without a STOP")
                self.position = at + 1
                handlers[data[at]](self)
                if self.position > self.frame_end:
                    if at < self.frame_end:
                        raise Malformed("a frame ends inside of an opcode")
                    self.frame_end = NO_FRAME
                if self.stopped:
                    if self.marks or len(stack) != 1:
                        raise Malformed("values are left over")
                    return stack[0]
        raise Malformed("the stack grows too large")

    def op_refused(self) -> None:
        raise Malformed(f"opcode {self.opcode_name} is not allowed")

    # -- framing -----------------------------------------------------------------------------------------------------

    def op_proto(self) -> None:
        if self.number(1) > 5:
            raise Malformed("unknown protocol")

    def op_frame(self) -> None:
        length = self.number(8)
        if length > len(self.data) - self.position:
            raise Malformed("a frame is longer than the file")
        if self.frame_end != NO_FRAME and self.opcode_at < self.frame_end:
            raise Malformed("a frame begins inside of another one")
        self.frame_end = self.position + length

    # -- containers --------------------------------------------------------------------------------------------------

    def op_empty_tuple(self) -> None:
        self.push(())

    def op_tuple(self) -> None:
        self.push(tuple(self.pop_to_mark()))

    def op_tuple1(self) -> None:
        self.push((self.pop(),))

    def op_tuple2(self) -> None:
        b, a = self.pop(), self.pop()
        self.push((a, b))

    def op_tuple3(self) -> None:
        c, b, a = self.pop(), self.pop(), self.pop()
        self.push((a, b, c))

    def op_empty_list(self) -> None:
        self.push([])

    def op_list(self) -> None:
        self.push(self.pop_to_mark())

    def op_append(self) -> None:
        value = self.pop()
        self.extend(self.top(), [value])

    def op_appends(self) -> None:
        items = self.pop_to_mark()
        self.extend(self.top(), items)

    def extend(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, Call):
            target.items = target.items or []
            target.items.extend(items)
        elif type(target) is list:
            target.extend(items)
        else:
            raise Malformed("items are appended to something that is not a list")

    def op_empty_dict(self) -> None:
        self.push({})

    def op_dict(self) -> None:
        items = self.pop_to_mark()
        target: dict[Any, Any] = {}
        self.set_pairs(target, items)
        self.push(target)

    def op_setitem(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_pairs(self.top(), [key, value])

    def op_setitems(self) -> None:
        items = self.pop_to_mark()
        self.set_pairs(self.top(), items)

    def set_pairs(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, Call):
            if target.pairs is None:
                target.pairs = {}
            pairs = target.pairs
        elif type(target) is dict:
            pairs = target
        else:
            raise Malformed("pairs are set on something that is not a dict")
        if len(items) % 2:
            raise Malformed("a key has no value")
        for index in range(0, len(items), 2):
            key = items[index]
            if type(key) is not str:
                self.check_key(key)
            if key in pairs:
                raise Malformed("a dict has the same key twice")
            pairs[key] = items[index + 1]

    def check_key(self, key: Any) -> None:
        self.tuple_keys += isinstance(key, tuple)
        if self.tuple_keys > MAX_TUPLE_KEYS:
            raise Malformed("too many dict keys are tuples")
        if isinstance(key, tuple) and len(key) <= MAX_KEY_PARTS and not any(isinstance(part, tuple) for part in key):
            for part in key:
                self.check_key(part)
        elif isinstance(key, int):
            if abs(key) >= MAX_KEY:
                raise Malformed("a dict key is too large")
        elif isinstance(key, float):
            if key != key:
                raise Malformed("a dict key is NaN")
        elif key is not None and not isinstance(key, (str, bytes, Call, Global, Persistent)):
            raise Malformed(f"a dict key is a {type(key).__name__}")

    def op_empty_set(self) -> None:
        self.push(Call(Global("builtins", "set"), ()))

    def op_additems(self) -> None:
        items = self.pop_to_mark()
        target = self.top()
        if not isinstance(target, Call):
            raise Malformed("items are added to something that is not a set")
        self.extend(target, items)

    def op_frozenset(self) -> None:
        self.push(Call(Global("builtins", "frozenset"), (self.pop_to_mark(),)))

    # -- names and calls: nodes, never actions -----------------------------------------------------------------------

    def op_global(self) -> None:
        module, name = self.line(), self.line()
        self.push(Global(module.decode("utf-8"), name.decode("utf-8")))

    def op_stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise Malformed("a name is not a string")
        self.push(Global(module, name))

    def op_reduce(self) -> None:
        args, target = self.pop(), self.pop()
        if type(args) is not tuple or not isinstance(target, (Global, Call)):
            raise Malformed("something that is not a name is called")
        self.stack.append(Call(target, args))

    def op_newobj_ex(self) -> None:
        kwargs, args, target = self.pop(), self.pop(), self.pop()
        if type(kwargs) is not dict:
            raise Malformed("keyword arguments are not a dict")
        self.call(target, args, kwargs)

    def op_obj(self) -> None:
        items = self.pop_to_mark()
        self.call(items[0], tuple(items[1:]))

    def op_inst(self) -> None:
        items = self.pop_to_mark()
        self.op_global()
        self.call(self.pop(), tuple(items))

    def call(self, target: Any, args: Any, kwargs: Any = None) -> None:
        if not isinstance(target, (Global, Call)) or type(args) is not tuple:
            raise Malformed("something that is not a name is called")
        self.push(Call(target, args, kwargs))

    def op_build(self) -> None:
        state = self.pop()
        target = self.top()
        if not isinstance(target, Call):
            raise Malformed("a state is set on something that is not an object")
        target.state = state

    def op_persid(self) -> None:
        self.push(Persistent(self.line().decode("ascii")))

    def op_binpersid(self) -> None:
        self.push(Persistent(self.pop()))


def _handlers() -> list[Callable[[Machine], None]]:
    """Opcode byte -> method, as in CPython's Lib/pickletools.py. Missing: EXT1-4, NEXT_BUFFER, READONLY_BUFFER."""
    m = Machine
    table: dict[bytes, Callable[[Machine], None]] = {
        b"(": m.op_mark, b".": m.op_stop, b"0": m.op_pop, b"1": m.op_pop_mark, b"2": m.op_dup,
        b"\x80": m.op_proto, b"\x95": m.op_frame,
        b"N": m.op_none, b"\x88": m.op_true, b"\x89": m.op_false,
        b"I": m.op_int_line, b"L": m.op_long_line, b"F": m.op_float_line, b"G": m.op_float,
        b"K": m.op_int1, b"M": m.op_int2, b"J": m.op_int4, b"\x8a": m.op_long1, b"\x8b": m.op_long4,
        b"S": m.op_string_line, b"T": m.op_string4, b"U": m.op_string1,
        b"V": m.op_unicode_line, b"X": m.op_unicode4, b"\x8c": m.op_unicode1, b"\x8d": m.op_unicode8,
        b"C": m.op_bytes1, b"B": m.op_bytes4, b"\x8e": m.op_bytes8, b"\x96": m.op_bytes8,
        b")": m.op_empty_tuple, b"t": m.op_tuple, b"\x85": m.op_tuple1, b"\x86": m.op_tuple2, b"\x87": m.op_tuple3,
        b"]": m.op_empty_list, b"l": m.op_list, b"a": m.op_append, b"e": m.op_appends,
        b"}": m.op_empty_dict, b"d": m.op_dict, b"s": m.op_setitem, b"u": m.op_setitems,
        b"\x8f": m.op_empty_set, b"\x90": m.op_additems, b"\x91": m.op_frozenset,
        b"c": m.op_global, b"\x93": m.op_stack_global, b"R": m.op_reduce,
        b"\x81": m.op_reduce, b"\x92": m.op_newobj_ex, b"o": m.op_obj, b"i": m.op_inst,
        b"b": m.op_build, b"P": m.op_persid, b"Q": m.op_binpersid,
        b"p": m.op_put_line, b"q": m.op_put1, b"r": m.op_put4, b"\x94": m.op_memoize,
        b"g": m.op_get_line, b"h": m.op_get1, b"j": m.op_get4,
    }  # fmt: skip
    handlers: list[Callable[[Machine], None]] = [m.op_refused] * 256
    for code, handler in table.items():
        handlers[code[0]] = handler
    return handlers


HANDLERS = _handlers()
