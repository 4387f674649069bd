"""The stack of the pickle machine: its arguments, values that stand for themselves, and its memo.

Every length is checked against the bytes that are left; marks and memo indices are bounded.
"""

from __future__ import annotations

import codecs
import struct
import warnings
from typing import Any

MAX_MARKS = 1_000
MAX_INT_BYTES = 64
NO_FRAME = 1 << 62


class Mark:
    __slots__ = ()


MARK = Mark()


class Malformed(Exception):
    """What is wrong with a pickle."""


class Stack:
    """The state of the machine, and the opcodes that only push what they hold, or move values around."""

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

    # -- reading arguments -------------------------------------------------------------------------------------------

    def take(self, length: int) -> bytes:
        start = self.position
        if length < 0 or start + length > len(self.data):
            raise Malformed(f"{length} bytes announced, {len(self.data) - start} left")
        self.position = start + length
        return self.data[start : start + length]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise Malformed("a line does not end")
        text = self.data[self.position : end]
        self.position = end + 1
        return text

    # -- stack -------------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        stack = self.stack
        if not stack or stack[-1] is MARK:
            raise Malformed("the stack is empty")
        return stack.pop()

    def top(self) -> Any:
        stack = self.stack
        if not stack or stack[-1] is MARK:
            raise Malformed("the stack is empty")
        return stack[-1]

    def pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise Malformed("there is no mark")
        start = self.marks.pop()
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def op_mark(self) -> None:
        if len(self.marks) >= MAX_MARKS:
            raise Malformed("too many marks")
        self.marks.append(len(self.stack))
        self.stack.append(MARK)

    def op_pop(self) -> None:
        if self.stack and self.stack[-1] is MARK:
            self.pop_to_mark()
        else:
            self.pop()

    def op_pop_mark(self) -> None:
        self.pop_to_mark()

    def op_dup(self) -> None:
        self.push(self.top())

    def op_stop(self) -> None:
        self.stopped = True

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
            raise Malformed("an integer is too long")
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
            raise Malformed("an integer is too long")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def op_float_line(self) -> None:
        text = self.line()
        if len(text) > 64:
            raise Malformed("a float is too long")
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
            raise Malformed("a string is not quoted")
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
            raise Malformed("a text is longer than the file")
        self.stack.append(self.data[start:stop].decode("utf-8", "surrogatepass"))

    def op_unicode8(self) -> None:
        self.push(self.text(self.take(self.number(8))))

    def op_bytes1(self) -> None:
        self.push(self.take(self.number(1)))

    def op_bytes4(self) -> None:
        self.push(self.take(self.number(4)))

    def op_bytes8(self) -> None:
        self.push(self.take(self.number(8)))

    # -- memo --------------------------------------------------------------------------------------------------------

    def store(self, index: int) -> None:
        value = self.stack[-1]
        if value is MARK or not 0 <= index <= len(self.data):
            raise Malformed("a memo index is too large, or the stack is empty")
        self.memo[index] = value

    def op_put_line(self) -> None:
        self.store(self.decimal(self.line()))

    def op_put1(self) -> None:
        value, at = self.stack[-1], self.position
        if value is MARK:
            raise Malformed("there is nothing to memoize")
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
            raise Malformed("a memo index is unknown")
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
