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

import codecs
import gc
import struct
import warnings
from collections.abc import Callable
from typing import Any

from ckpt_cli.errors import CorruptFile
from ckpt_cli.files.pickle_nodes import Call, Global, Persistent

BETWEEN_CHECKS = 1 << 16
MAX_MARKS = 1_000
MAX_STACK = 4_000_000
MAX_INT_BYTES = 64
MAX_KEY = 1 << 60
MAX_KEY_PARTS = 8
MAX_TUPLE_KEYS = 4096
"""Tuples of integers can be made to collide, which makes a dict quadratic."""

NO_FRAME = 1 << 62


class _Mark:
    __slots__ = ()


_MARK = _Mark()


def load_pickle(data: bytes | memoryview, start: int = 0) -> tuple[Any, int]:
    """The value of the pickle that begins at ``start``, and the position after its STOP.

    Raises CorruptFile (with the opcode and byte position) for anything that is not a well-formed pickle.
    """
    machine = _Machine(bytes(data), start)
    collecting = gc.isenabled()
    gc.disable()
    try:
        return machine.run(), machine.position
    except _Malformed as error:
        raise CorruptFile(f"damaged pickle: {error} at byte {machine.opcode_at}") from None
    except (IndexError, KeyError, AttributeError, TypeError, ValueError, OverflowError, struct.error, RecursionError):
        raise CorruptFile(f"damaged pickle: opcode {machine.opcode_name} makes no sense at byte {machine.opcode_at}") from None
    finally:
        if collecting:
            gc.enable()


class _Malformed(Exception):
    pass


class _Machine:
    """Pickle's stack machine. Every opcode is one small method; the table below maps bytes to methods."""

    def __init__(self, data: bytes, position: int) -> None:
        self.data = data
        self.position = position
        self.opcode_at = position
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.stopped = False
        self.frame_end = NO_FRAME
        self.tuple_keys = 0

    @property
    def opcode_name(self) -> str:
        code = self.data[self.opcode_at : self.opcode_at + 1]
        return f"0x{code.hex()}" if code else "(end)"

    def run(self) -> Any:
        data, handlers, stack = self.data, _HANDLERS, self.stack
        end = len(data)
        while len(stack) <= MAX_STACK:
            for _ in range(BETWEEN_CHECKS):
                at = self.opcode_at = self.position
                if at >= end:
                    raise _Malformed("the pickle ends without a STOP")
                self.position = at + 1
                handlers[data[at]](self)
                if self.position > self.frame_end:
                    if at < self.frame_end:
                        raise _Malformed("a frame ends inside of an opcode")
                    self.frame_end = NO_FRAME
                if self.stopped:
                    if self.marks or len(stack) != 1:
                        raise _Malformed("values are left over")
                    return stack[0]
        raise _Malformed("the stack grows too large")

    def op_refused(self) -> None:
        raise _Malformed(f"opcode {self.opcode_name} is not allowed")

    # -- reading arguments -------------------------------------------------------------------------------------------

    def take(self, length: int) -> bytes:
        start = self.position
        if length < 0 or start + length > len(self.data):
            raise _Malformed(f"{length} bytes announced, {len(self.data) - start} left")
        self.position = start + length
        return self.data[start : start + length]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise _Malformed("a line does not end")
        text = self.data[self.position : end]
        self.position = end + 1
        return text

    # -- stack -------------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        stack = self.stack
        if not stack or stack[-1] is _MARK:
            raise _Malformed("the stack is empty")
        return stack.pop()

    def top(self) -> Any:
        stack = self.stack
        if not stack or stack[-1] is _MARK:
            raise _Malformed("the stack is empty")
        return stack[-1]

    def pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise _Malformed("there is no mark")
        start = self.marks.pop()
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def op_mark(self) -> None:
        if len(self.marks) >= MAX_MARKS:
            raise _Malformed("too many marks")
        self.marks.append(len(self.stack))
        self.stack.append(_MARK)

    def op_pop(self) -> None:
        if self.stack and self.stack[-1] is _MARK:
            self.pop_to_mark()
        else:
            self.pop()

    def op_pop_mark(self) -> None:
        self.pop_to_mark()

    def op_dup(self) -> None:
        self.push(self.top())

    def op_stop(self) -> None:
        self.stopped = True

    # -- framing -----------------------------------------------------------------------------------------------------

    def op_proto(self) -> None:
        if self.number(1) > 5:
            raise _Malformed("unknown protocol")

    def op_frame(self) -> None:
        length = self.number(8)
        if length > len(self.data) - self.position:
            raise _Malformed("a frame is longer than the file")
        if self.frame_end != NO_FRAME and self.opcode_at < self.frame_end:
            raise _Malformed("a frame begins inside of another one")
        self.frame_end = self.position + length

    # -- scalars -----------------------------------------------------------------------------------------------------

    def op_none(self) -> None:
        self.push(None)

    def op_true(self) -> None:
        self.push(True)

    def op_false(self) -> None:
        self.push(False)

    def op_int_line(self) -> None:
        text = self.line()
        self.push({b"00": False, b"01": True}[text] if text in (b"00", b"01") else self.decimal(text))

    def op_long_line(self) -> None:
        self.push(self.decimal(self.line().removesuffix(b"L")))

    def decimal(self, text: bytes) -> int:
        if len(text) > 3 * MAX_INT_BYTES:
            raise _Malformed("an integer is too long")
        return int(text)

    def op_int1(self) -> None:
        self.stack.append(self.data[self.position])
        self.position += 1

    def op_int2(self) -> None:
        self.push(self.number(2))

    def op_int4(self) -> None:
        self.push(int.from_bytes(self.take(4), "little", signed=True))

    def op_long1(self) -> None:
        self.long(self.number(1))

    def op_long4(self) -> None:
        self.long(self.number(4))

    def long(self, length: int) -> None:
        if length > MAX_INT_BYTES:
            raise _Malformed("an integer is too long")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def op_float_line(self) -> None:
        text = self.line()
        if len(text) > 64:
            raise _Malformed("a float is too long")
        self.push(float(text))

    def op_float(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0])

    # -- text and bytes ----------------------------------------------------------------------------------------------

    def text(self, raw: bytes) -> str:
        # Lone surrogates are legal in pickles; they are kept, and refused where a name is used.
        return raw.decode("utf-8", "surrogatepass")

    def op_string_line(self) -> None:
        raw = self.line()
        if len(raw) < 2 or raw[0] != raw[-1] or raw[:1] not in b"'\"":
            raise _Malformed("a string is not quoted")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.push(codecs.escape_decode(raw[1:-1])[0].decode("latin-1"))

    def op_string1(self) -> None:
        self.push(self.take(self.number(1)).decode("latin-1"))

    def op_string4(self) -> None:
        self.push(self.take(self.number(4)).decode("latin-1"))

    def op_unicode_line(self) -> None:
        self.push(self.line().decode("raw-unicode-escape"))

    def op_unicode1(self) -> None:
        self.push(self.text(self.take(self.number(1))))

    def op_unicode4(self) -> None:
        start = self.position + 4
        stop = self.position = start + int.from_bytes(self.data[start - 4 : start], "little")
        if stop > len(self.data):
            raise _Malformed("a text is longer than the file")
        self.stack.append(self.data[start:stop].decode("utf-8", "surrogatepass"))

    def op_unicode8(self) -> None:
        self.push(self.text(self.take(self.number(8))))

    def op_bytes1(self) -> None:
        self.push(self.take(self.number(1)))

    def op_bytes4(self) -> None:
        self.push(self.take(self.number(4)))

    def op_bytes8(self) -> None:
        self.push(self.take(self.number(8)))

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
            raise _Malformed("items are appended to something that is not a list")

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
            raise _Malformed("pairs are set on something that is not a dict")
        if len(items) % 2:
            raise _Malformed("a key has no value")
        for index in range(0, len(items), 2):
            key = items[index]
            if type(key) is not str:
                self.check_key(key)
            if key in pairs:
                raise _Malformed("a dict has the same key twice")
            pairs[key] = items[index + 1]

    def check_key(self, key: Any) -> None:
        self.tuple_keys += isinstance(key, tuple)
        if self.tuple_keys > MAX_TUPLE_KEYS:
            raise _Malformed("too many dict keys are tuples")
        if isinstance(key, tuple) and len(key) <= MAX_KEY_PARTS and not any(isinstance(part, tuple) for part in key):
            for part in key:
                self.check_key(part)
        elif isinstance(key, int):
            if abs(key) >= MAX_KEY:
                raise _Malformed("a dict key is too large")
        elif isinstance(key, float):
            if key != key:
                raise _Malformed("a dict key is NaN")
        elif key is not None and not isinstance(key, (str, bytes, Call, Global, Persistent)):
            raise _Malformed(f"a dict key is a {type(key).__name__}")

    def op_empty_set(self) -> None:
        self.push(Call(Global("builtins", "set"), ()))

    def op_additems(self) -> None:
        items = self.pop_to_mark()
        target = self.top()
        if not isinstance(target, Call):
            raise _Malformed("items are added to something that is not a set")
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
            raise _Malformed("a name is not a string")
        self.push(Global(module, name))

    def op_reduce(self) -> None:
        args, target = self.pop(), self.pop()
        if type(args) is not tuple or not isinstance(target, (Global, Call)):
            raise _Malformed("something that is not a name is called")
        self.stack.append(Call(target, args))

    def op_newobj_ex(self) -> None:
        kwargs, args, target = self.pop(), self.pop(), self.pop()
        if type(kwargs) is not dict:
            raise _Malformed("keyword arguments are not a dict")
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
            raise _Malformed("something that is not a name is called")
        self.push(Call(target, args, kwargs))

    def op_build(self) -> None:
        state = self.pop()
        target = self.top()
        if not isinstance(target, Call):
            raise _Malformed("a state is set on something that is not an object")
        target.state = state

    def op_persid(self) -> None:
        self.push(Persistent(self.line().decode("ascii")))

    def op_binpersid(self) -> None:
        self.push(Persistent(self.pop()))

    # -- memo --------------------------------------------------------------------------------------------------------

    def store(self, index: int) -> None:
        value = self.stack[-1]
        if value is _MARK or not 0 <= index <= len(self.data):
            raise _Malformed("a memo index is too large, or there is nothing to keep")
        self.memo[index] = value

    def op_put_line(self) -> None:
        self.store(self.decimal(self.line()))

    def op_put1(self) -> None:
        value, at = self.stack[-1], self.position
        if value is _MARK:
            raise _Malformed("there is nothing to keep")
        self.memo[self.data[at]] = value
        self.position = at + 1

    def op_put4(self) -> None:
        at = self.position
        self.position = at + 4
        self.store(int.from_bytes(self.data[at : at + 4], "little"))

    def op_memoize(self) -> None:
        self.memo[len(self.memo)] = self.top()

    def fetch(self, index: int) -> None:
        if index not in self.memo:
            raise _Malformed("a memo index is not known")
        self.push(self.memo[index])

    def op_get_line(self) -> None:
        self.fetch(self.decimal(self.line()))

    def op_get1(self) -> None:
        at = self.position
        self.position = at + 1
        self.stack.append(self.memo[self.data[at]])

    def op_get4(self) -> None:
        at = self.position
        self.position = at + 4
        self.stack.append(self.memo[int.from_bytes(self.data[at : at + 4], "little")])


def _handlers() -> list[Callable[[_Machine], None]]:
    """Opcode byte -> method, as in CPython's Lib/pickletools.py. Missing: EXT1-4, NEXT_BUFFER, READONLY_BUFFER."""
    m = _Machine
    table: dict[bytes, Callable[[_Machine], None]] = {
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
    handlers: list[Callable[[_Machine], None]] = [m.op_refused] * 256
    for code, handler in table.items():
        handlers[code[0]] = handler
    return handlers


_HANDLERS = _handlers()
