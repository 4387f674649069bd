"""What a pickle would look up and call, found by following its opcodes without doing anything that they say.

`files.pickle_reader` refuses what is not well-formed; here the opposite is wanted: whatever a loader would have reached before it failed is
listed. The trace therefore goes on after an empty stack or an unknown memo, where loaders disagree, and ends only where no loader
could go on: at an unknown opcode, at the end of the bytes, at STOP. Values are followed as far as names depend on them: texts,
tuples and names. Opcodes: CPython's Lib/pickletools.py.
"""

from __future__ import annotations

import codecs
import warnings
from dataclasses import dataclass, field
from typing import Any

from ckpt_cli.scanning.blobs import Blob, Unseen

FIRST_WINDOW, WINDOW = 1 << 10, 1 << 20
"""Bytes that are read at a time: few at first, as most blobs are no pickles."""

ARGUMENT = 16
"""Bytes behind an opcode that are looked at once: no fixed argument is longer."""

MAX_STACK = 4_000_000
MAX_MEMO = 16_000_000
MAX_TEXT = 1_000
"""Characters of a text that may become a name."""

MAX_LINE = 1 << 26
MAX_CALLS = 1_000
MAX_NESTED = 10_000
EXTENSION = "copyreg extension"

FIXED = {
    0x80: 1,
    0x95: 8,
    b"J"[0]: 4,
    b"K"[0]: 1,
    b"M"[0]: 2,
    b"G"[0]: 8,
    b"h"[0]: 1,
    b"j"[0]: 4,
    b"q"[0]: 1,
    b"r"[0]: 4,
    0x82: 1,
    0x83: 2,
    0x84: 4,
}
LINES = frozenset(b"ILFSVPgp")
SIZED = {0x8A: 1, 0x8B: 4, b"U"[0]: 1, b"T"[0]: 4, 0x8C: 1, b"X"[0]: 4, 0x8D: 8, b"C"[0]: 1, b"B"[0]: 4, 0x8E: 8, 0x96: 8}
TEXTS = frozenset(b"UTX\x8c\x8d")
BYTES = frozenset(b"CBUT\x8e\x96")
PLAIN = frozenset(b"NG]}JKM\x88\x89\x8a\x8b\x8f\x97ILF")
"""Opcodes that push a value without a name in it."""

NOTHING = frozenset(b"\x80\x95\x98")
TUPLES = {b")"[0]: 0, 0x85: 1, 0x86: 2, 0x87: 3}
DROPS = {b"a"[0]: 1, b"s"[0]: 2}
NESTED = (b"\x80\x00", b"\x80\x01", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
"""How bytes begin that are a pickle or a zip archive themselves."""


class Value:
    """A value of which only the kind is known."""

    __slots__ = ()


UNKNOWN, MARK = Value(), Value()
RESULT = Value()
"""What a call returned: it may be a text, and so a name."""

LONG = Value()
"""A text that is too long to be kept."""

FOLLOWED = Value()
"""Bytes that are a pickle or an archive, and are listed in `Trace.nested`."""


@dataclass(slots=True, eq=False)
class Name:
    """A name that a loader would look up at ``offset``; ``calls`` are the arguments with which it would call it.

    Both parts are empty if the name is only known when the pickle runs.
    """

    module: str
    name: str
    offset: int
    calls: list[Any] = field(default_factory=list)
    changed: bool = False
    """Whether the pickle would set attributes of what it names."""


@dataclass(slots=True)
class Trace:
    """One pickle: from ``start`` to ``end``; ``complete`` if it has a STOP, otherwise ``problem`` says where it ends."""

    start: int
    end: int = 0
    header: bool = False
    complete: bool = False
    problem: str | None = None
    unseen: bool = False
    names: list[Name] = field(default_factory=list)
    nested: list[tuple[int, int, str]] = field(default_factory=list)
    """Start and length of bytes that are pickles themselves, and the encoding if they are kept as text, as protocols before 3 do."""


class Ends(Exception):
    """No loader goes on from here."""


def trace(blob: Blob, start: int = 0) -> Trace:
    """Follow the pickle that begins at ``start``."""
    return _Tracer(blob, start).run()


class _Tracer:
    def __init__(self, blob: Blob, start: int) -> None:
        self.blob = blob
        self.data, self.data_at, self.at = b"", start, start
        self.window = FIRST_WINDOW
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.found = Trace(start)

    def run(self) -> Trace:
        found = self.found
        found.header = self.peek(2)[:1] == b"\x80" and self.peek(2)[1:] <= b"\x05"
        try:
            while not found.complete:
                self.step()
        except Ends as ended:
            found.problem = str(ended)
        except Unseen as unseen:
            found.problem, found.unseen = str(unseen), True
        except (IndexError, ValueError, UnicodeError) as error:
            found.problem = f"{type(error).__name__} at byte {self.at}"
        found.end = self.at
        return found

    # -- bytes -------------------------------------------------------------------------------------------------------

    def peek(self, length: int) -> bytes:
        """The next bytes, at most ``length``, which is small."""
        inside = self.at - self.data_at
        if not 0 <= inside <= len(self.data) - length:
            self.window = min(4 * self.window, WINDOW)
            self.data, self.data_at, inside = self.blob.read(self.at, max(self.window, length)), self.at, 0
        return self.data[inside : inside + length]

    def take(self, length: int) -> bytes:
        data = self.peek(length)
        if len(data) < length:
            raise Ends(f"the data end at byte {self.at}")
        self.at += length
        return data

    def line(self) -> bytes:
        """The bytes up to the next newline."""
        begin, parts = self.at, []
        while True:
            data = self.peek(64)
            inside = self.at - self.data_at
            end = self.data.find(b"\n", inside)
            if end >= 0:
                parts.append(self.data[inside:end])
                self.at = self.data_at + end + 1
                return b"".join(parts)
            parts.append(self.data[inside:])
            self.at = self.data_at + len(self.data)
            if not data and self.at > begin:
                # At the end of the data loaders take the last byte for the newline.
                return b"".join(parts)[:-1]
            if not data or self.at - begin > MAX_LINE:
                raise Ends(f"a line does not end at byte {begin}")

    # -- stack -------------------------------------------------------------------------------------------------------

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is MARK:
            return self.missing()
        return self.stack.pop()

    def top(self) -> Any:
        return self.stack[-1] if self.stack and self.stack[-1] is not MARK else self.missing()

    def missing(self) -> Value:
        """Loaders disagree about what is not there; data without a header that underflow are no pickle."""
        if not self.found.header:
            raise Ends(f"the stack is empty at byte {self.at}")
        return UNKNOWN

    def pop_to_mark(self) -> list[Any]:
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is MARK:
                items = stack[index + 1 :]
                del stack[index:]
                return items
        self.missing()
        items = stack[:]
        stack.clear()
        return items

    def push(self, value: Any) -> None:
        if len(self.stack) >= MAX_STACK or len(self.memo) >= MAX_MEMO:
            self.found.unseen = True
            raise Ends(f"it holds more than {MAX_STACK} values at a time at byte {self.at}")
        self.stack.append(value)

    # -- opcodes -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        at = self.at
        head = self.peek(ARGUMENT)
        if not head:
            raise Ends(f"the data end without a STOP at byte {at}")
        code = head[0]
        self.at += 1
        if code in FIXED:
            argument = int.from_bytes(self.take(FIXED[code]), "little")
            self.with_number(code, argument, at)
        elif code in SIZED:
            self.sized(code)
        elif code in LINES:
            self.with_line(code, self.line())
        elif code in PLAIN:
            self.push(UNKNOWN)
        elif code in TUPLES:
            count = TUPLES[code]
            self.push(tuple([self.pop() for _ in range(count)][::-1]))
        elif code in DROPS:
            for _ in range(DROPS[code]):
                self.pop()
        elif code not in NOTHING:
            self.moved(code, at)

    def with_number(self, code: int, argument: int, at: int) -> None:
        if code in b"hj":
            self.push(self.remembered(argument))
        elif code in b"qr":
            self.memo[argument] = self.top()
        elif code in (0x82, 0x83, 0x84):
            self.named(Name(EXTENSION, str(argument), at))
        elif code not in NOTHING:
            self.push(UNKNOWN)

    def sized(self, code: int) -> None:
        length = int.from_bytes(self.take(SIZED[code]), "little")
        start = self.at
        if start + length > self.blob.size:
            raise Ends(f"{length} bytes are announced at byte {start}, more than there are")
        begin = self.peek(8)[:length]
        value: Any = UNKNOWN
        if code in BYTES and begin.startswith(NESTED):
            value = self.nested(start, length, "")
        elif code in TEXTS and (begin.startswith(b"PK\x03\x04") or (begin[:2] == b"\xc2\x80" and begin[2:3] <= b"\x05")):
            value = self.nested(start, length, "utf-8")
        elif code in TEXTS:
            value = LONG
            if length <= 4 * MAX_TEXT:
                raw = self.peek(length)[:length]
                value = raw.decode("latin-1") if code in b"UT" else raw.decode("utf-8", "surrogatepass")
        self.at = start + length
        self.push(value)

    def nested(self, start: int, length: int, encoding: str) -> Value:
        if len(self.found.nested) >= MAX_NESTED:
            return UNKNOWN
        self.found.nested.append((start, length, encoding))
        return FOLLOWED

    def with_line(self, code: int, line: bytes) -> None:
        if code in b"ILF":
            _check_number(line.removesuffix(b"L"))
            self.push(UNKNOWN)
        elif code == b"S"[0]:
            line = line.strip()
            if len(line) < 2 or line[0] != line[-1] or line[:1] not in b"'\"":
                raise Ends("a text is not quoted")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                raw = codecs.escape_decode(line[1:-1])[0]
            self.push(raw.decode("latin-1") if len(raw) <= MAX_TEXT else LONG)
        elif code == b"V"[0]:
            if line[:24].decode("raw-unicode-escape", "ignore").encode("latin-1", "ignore").startswith(NESTED):
                self.push(self.nested(self.at - len(line) - 1, len(line), "raw-unicode-escape"))
            else:
                self.push(line.decode("raw-unicode-escape") if len(line) <= 6 * MAX_TEXT else LONG)
        elif code == b"P"[0]:
            # Nothing but torch refers to other objects by text, and it never did so without a header.
            self.missing()
            self.push(UNKNOWN)
        elif code == b"g"[0]:
            self.push(self.remembered(int(line)))
        else:
            self.memo[int(line)] = self.top()

    def remembered(self, index: int) -> Any:
        return self.memo[index] if index in self.memo else self.missing()

    def moved(self, code: int, at: int) -> None:
        """Opcodes without arguments in the stream, and names."""
        if code == b"."[0]:
            self.found.complete = True
        elif code == b"("[0]:
            self.push(MARK)
        elif code == b"t"[0]:
            self.push(tuple(self.pop_to_mark()))
        elif code in b"ld\x91":
            self.pop_to_mark()
            self.push(UNKNOWN)
        elif code in b"eu\x90":
            self.pop_to_mark()
        elif code == b"0"[0]:
            if self.stack:
                self.stack.pop()
            else:
                self.missing()
        elif code == b"1"[0]:
            self.pop_to_mark()
        elif code == b"2"[0]:
            self.push(self.top())
        elif code == 0x94:
            self.memo[len(self.memo)] = self.top()
        elif code == b"Q"[0]:
            self.pop()
            self.push(RESULT)
        else:
            self.calling(code, at)

    def calling(self, code: int, at: int) -> None:
        if code == b"c"[0]:
            self.named(self.global_(at))
        elif code == 0x93:
            self.stack_global(at)
        elif code in b"R\x81":
            args, target = self.pop(), self.pop()
            self.called(target, args)
        elif code == 0x92:
            _, args, target = self.pop(), self.pop(), self.pop()
            self.called(target, args)
        elif code == b"o"[0]:
            items = self.pop_to_mark()
            self.called(items[0] if items else UNKNOWN, tuple(items[1:]))
        elif code == b"i"[0]:
            name = self.global_(at)
            self.found.names.append(name)
            self.called(name, tuple(self.pop_to_mark()))
        elif code == b"b"[0]:
            self.pop()
            target = self.top()
            if isinstance(target, Name):
                target.changed = True
        else:
            self.at = at
            raise Ends(f"there is no opcode 0x{code:02x}, at byte {at}")

    def global_(self, at: int) -> Name:
        module = self.line()
        name = self.line() if self.peek(1) else b""
        if len(module) > MAX_TEXT or len(name) > MAX_TEXT:
            return Name("", "", at)
        return Name(module.decode("utf-8"), name.decode("utf-8"), at)

    def stack_global(self, at: int) -> None:
        name, module = self.pop(), self.pop()
        if isinstance(name, str) and isinstance(module, str):
            self.named(Name(module, name, at))
        elif all(isinstance(part, str) or part in (RESULT, LONG) for part in (name, module)):
            self.named(Name("", "", at))
        else:
            # A loader wants texts here, and fails.
            self.missing()
            self.push(UNKNOWN)

    def named(self, name: Name) -> None:
        self.found.names.append(name)
        self.push(name)

    def called(self, target: Any, args: Any) -> None:
        if isinstance(target, Name) and len(target.calls) < MAX_CALLS:
            target.calls.append(args)
        encoded = isinstance(target, Name) and target.module == "_codecs" and isinstance(args, tuple) and args[:1] == (FOLLOWED,)
        self.push(FOLLOWED if encoded else RESULT)


def _check_number(text: bytes) -> None:
    """Raise ValueError for what no loader reads as a number; they disagree about prefixes and leading zeros."""
    for read in (float, int, lambda digits: int(digits, 0)):
        try:
            read(text)
            return
        except ValueError:
            continue
    raise ValueError
