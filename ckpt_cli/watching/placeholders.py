"""What stands for a value in a command of the shell: ``{output}``, ``{step}`` and ``{run}``, bare or within quotes.

The shell itself puts the value in, from a variable: so it is one word, or a part of one, whatever characters it has. In single quotes,
where no variable is read, the quotes are closed for it. Text that another program takes apart once more (``sh -c``, ``python -c``,
a here-document) can only get values that have one meaning to all of them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from ckpt_cli.errors import UsageError

PREFIX = "CKPT_"
"""The variables with the values, CKPT_OUTPUT and so on."""

PLACEHOLDER = re.compile(r"\{(output|step|run)\}")

Context = Literal["bare", "double", "single", "code"]
"""Where a placeholder stands; ``code`` is whatever is read once more by something else, or what this cannot tell."""

CODE_OPTION = re.compile(r"-[A-Za-z]*[ce]|--(command|eval|wrap|expression)", re.ASCII)
INTERPRETER = re.compile(r"(ba|da|z|k|fi|c|tc)?sh|python[0-9.]*|perl|ruby|node|Rscript|flock|script|sbatch", re.ASCII)
"""Programs of which an option takes code: ``sh -lc``, ``python -c``, ``perl -e``, ``sbatch --wrap``."""

RUNS_CODE = {"eval", "ssh", "rsh", "tmux", "screen", "parallel", "su"}
"""Programs that hand their arguments to a shell."""

HEREDOC = re.compile(r"<<-?[ \t]*([^\s;&|<>()]+)", re.ASCII)
OPENING = {"$'": "ansi", "$(": "paren", "${": "brace", "'": "single", '"': "double", "`": "backtick", "(": "paren"}
CLOSING = {("double", '"'), ("backtick", "`"), ("brace", "}"), ("paren", ")")}
QUOTES = {"single", "double", "ansi", "brace"}
BREAKS = " \t\n;&|<>()"


@dataclass(frozen=True, slots=True)
class Placeholder:
    """``{name}`` at a position of a command."""

    start: int
    end: int
    name: str
    context: Context


def uses(command: str, name: str) -> bool:
    """Whether a command gets a value, as a placeholder or as a variable."""
    return PREFIX + name.upper() in command or any(found.name == name for found in placeholders(command))


def filled(command: str, values: Mapping[str, str]) -> str:
    """A command with the values, for a shell that has them as variables too. Raises UsageError as `refuse_values`."""
    refuse_values(command, values)
    parts, at = list[str](), 0
    for found in placeholders(command):
        parts += [command[at : found.start], _for_shell(found, values[found.name])]
        at = found.end
    return "".join([*parts, command[at:]])


def refuse_values(command: str, values: Mapping[str, str]) -> None:
    """Raise UsageError for a value with characters that mean something to the program which reads a part of the command once more."""
    for found in placeholders(command):
        if found.context == "code" and not _is_plain(values[found.name]):
            variable = f"{PREFIX}{found.name.upper()}"
            raise UsageError(
                f"{{{found.name}}} stands in code that another program reads, which would take the path apart",
                path=values[found.name],
                expected="a path without spaces, quotes and the like",
                hint=f"use the variable {variable} there, as in sh -c 'ls \"${variable}\"', or choose an -o without these",
            )


def _is_plain(value: str) -> bool:
    return shlex.quote(value) == value


def _for_shell(found: Placeholder, value: str) -> str:
    if _is_plain(value):
        return value
    variable = f"${{{PREFIX}{found.name.upper()}}}"
    return {"bare": f'"{variable}"', "double": variable, "single": f"'\"{variable}\"'"}[found.context]


def placeholders(command: str) -> list[Placeholder]:
    """The placeholders of a command, in order; ``${output}`` is none, but a variable of the shell."""
    read = _Reader(command)
    read.all()
    return [
        Placeholder(start, end, command[start + 1 : end - 1], "code" if _is_code(command, read.words, start) else context)
        for start, end, context in read.found
    ]


@dataclass(frozen=True, slots=True)
class _Word:
    """A word of a command; ``level`` is where the substitution begins that it is in."""

    start: int
    end: int
    level: int


def _is_code(command: str, words: list[_Word], at: int) -> bool:
    """Whether the word around a position is code for the program of its command, by the words before it; the innermost word counts."""
    around = [word for word in words if word.start <= at < word.end]
    for word in around:
        before, begin = list[str](), word.start
        for other in sorted((each for each in words if each.level == word.level and each.end <= word.start), key=lambda each: -each.start):
            if command[other.end : begin].replace("\\\n", "").strip(" \t"):
                break  # another command begins
            before.append(command[other.start : other.end])
            begin = other.start
        names = [PurePath(each).name for each in before]
        if any(name in RUNS_CODE for name in names) or command.startswith("--wrap=", word.start):
            return True
        if before and CODE_OPTION.fullmatch(before[0]):
            # Behind the name of a script, options are its own.
            program = next((name for each, name in zip(before[1:], names[1:], strict=True) if not each.startswith("-")), "")
            if INTERPRETER.fullmatch(program):
                return True
    return False


class _Reader:
    """A command, read from front to back as far as needed to know the quotes: ``found`` are placeholders, ``words`` all words."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.found: list[tuple[int, int, Context]] = []
        self.words: list[_Word] = []
        self._at = 0
        self._within: list[str] = []
        self._levels: list[int] = [0]
        self._starts: list[int | None] = [None]
        self._documents: list[str] = []
        # A `)` of a case within a substitution looks like the end of that.
        self._unsure = re.search(r"\besac\b", command) is not None and ("$(" in command or "`" in command)

    def all(self) -> None:
        while self._at < len(self.command):
            self._step()
        while self._starts:
            self._end_word()
            self._starts.pop()
            self._levels.pop()
        if self._within:
            self.found = [(start, end, "code") for start, end, _ in self.found]  # no shell would take it

    @property
    def _inner(self) -> str:
        return self._within[-1] if self._within else ""

    def _step(self) -> None:
        at, inner = self._at, self._inner
        char, quoted = self.command[at], inner in QUOTES
        if not quoted and char in BREAKS:
            self._end_word()
        elif self._starts[-1] is None and not self.command.startswith("\\\n", at):
            self._starts[-1] = at
        variable = char == "$" and PLACEHOLDER.match(self.command, at + 1)
        if variable:
            self._at = variable.end()
        elif found := PLACEHOLDER.match(self.command, at):
            self._note(found)
            self._at = found.end()
        elif inner in ("single", "ansi"):
            self._at += 2 if inner == "ansi" and char == "\\" else 1
            if char == "'":
                self._within.pop()
        elif char == "\\":
            self._at += 2
        elif self._closes(char) or not (self._opens() or (not quoted and self._passes(char))):
            self._at += 1

    def _note(self, found: re.Match[str]) -> None:
        inner = self._inner
        plain: Context = "double" if inner == "double" else "single" if inner == "single" else "bare"
        odd = {"brace", "ansi"} if self._within == ["backtick"] else {"brace", "ansi", "backtick"}
        self.found.append((*found.span(), "code" if self._unsure or odd & {*self._within} else plain))

    def _closes(self, char: str) -> bool:
        if (self._inner, char) not in CLOSING:
            return False
        if self._inner == "paren":
            self._end_word()
            self._starts.pop()
            self._levels.pop()
        self._within.pop()
        return True

    def _opens(self) -> bool:
        """Whether something begins here within which quotes mean something else; it is noted."""
        for opening, kind in OPENING.items():
            if not self.command.startswith(opening, self._at) or (self._inner == "double" and kind not in ("backtick", "brace", "paren")):
                continue
            if opening == "(" and self._inner != "paren":
                continue  # of a group of commands, which begins and ends like any other command
            if self._inner == "brace" and kind in ("single", "ansi", "double"):
                self._unsure = True  # shells differ in what quotes are there
                continue
            self._within.append(kind)
            self._at += len(opening)
            if kind == "paren":
                self._levels.append(self._at)
                self._starts.append(None)
            return True
        return False

    def _passes(self, char: str) -> bool:
        """Pass over a comment, or over the here-documents that a line has begun."""
        before = self.command[self._at - 1 : self._at]
        if char == "#" and (not before or before in BREAKS):
            self._end_word()
            self._at = self._end_of_line(self._at)
        elif char == "\n" and self._documents:
            begin, self._at = self._at, self._at + 1
            for end in self._documents:
                self._pass_document(end)
            self._documents = []
            self.found += [(*each.span(), "code") for each in PLACEHOLDER.finditer(self.command, begin, self._at)]
        elif before != "<" and (heredoc := HEREDOC.match(self.command, self._at)) is not None:
            self._documents.append(re.sub(r"[\\'\"]", "", heredoc[1]))
            self._at = heredoc.end()
        else:
            return False
        return True

    def _pass_document(self, end: str) -> None:
        while self._at < len(self.command):
            stop = self._end_of_line(self._at)
            line, self._at = self.command[self._at : stop].lstrip("\t"), min(stop + 1, len(self.command))
            if line == end:
                return

    def _end_of_line(self, at: int) -> int:
        end = self.command.find("\n", at)
        return len(self.command) if end < 0 else end

    def _end_word(self) -> None:
        start = self._starts[-1]
        if start is not None:
            self.words.append(_Word(start, self._at, self._levels[-1]))
        self._starts[-1] = None
