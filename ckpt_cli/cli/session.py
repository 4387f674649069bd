"""One run of one command: where output goes, how errors are told, which exit code results. Only `cli` prints or exits."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar, cast

from ckpt_cli.cli import SIGPIPE, Ended
from ckpt_cli.cli.text import path as shown_path
from ckpt_cli.errors import CkptError
from ckpt_cli.names import printable
from ckpt_cli.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt_cli.report import Envelope

ColorMode = Literal["auto", "always", "never"]
ProgressMode = Literal["auto", "plain", "json", "off"]
Result = TypeVar("Result")
TRAILING = re.compile(r" +(?=\n)")
DETAILS = 20
"""How many lines of an error's details are shown."""

WIDE = 100_000
"""Off a terminal nothing is cut or wrapped."""


@dataclass(frozen=True, slots=True)
class Session:
    """The output options of a command; ``path`` and ``again`` (its options as text) go into the next command."""

    command: str
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    color: ColorMode = "auto"
    progress: ProgressMode = "auto"
    path: str | None = None
    again: str = ""

    def run(self, work: Callable[[Progress], Result], render: Callable[[Result, Session], None], exit_code: Callable[[Result], int]) -> int:
        """Do the work, show its result (or its error), and return the exit code."""
        from ckpt_cli.cli.live import make_progress

        try:
            result = work(make_progress(self))
        except CkptError as error:
            if self.debug:
                import traceback

                traceback.print_exc()
            return self.fail(error)
        code = exit_code(result)
        try:
            if self.json:
                data = result.model_dump(mode="json")  # type: ignore[attr-defined]
                print_document(_envelope(self.command, code, data, []))
            else:
                render(result, self)
        except BrokenPipeError:
            # Typer would make an exit code of its own of it.
            raise Ended(SIGPIPE) from None
        return code

    def fail(self, error: CkptError) -> int:
        """Tell an error: as JSON on stdout, or as text on stderr."""
        if self.json:
            print_document(_envelope(self.command, error.exit_code, None, [error]))
        else:
            self.say(error_text(error), wrap=False)
        return error.exit_code

    def say(self, text: str, style: str | None = None, *, wrap: bool = True) -> None:
        """One plain line (or several) on stderr, on a terminal wrapped between words."""
        from rich.text import Text

        with contextlib.suppress(BrokenPipeError):
            self.err().print(Text(text, style=style or ""), soft_wrap=not wrap)

    def out(self) -> Console:
        """stdout, for data."""
        return _console(self.color, sys.stdout)

    def err(self) -> Console:
        """stderr, for talk."""
        return _console(self.color, sys.stderr)


def error_text(error: CkptError) -> str:
    """error[code]: message, then where, what was expected, and what to do next, one line each."""
    lines = [f"error[{error.code}]: {printable(error.message)}"]
    lines += [f"  {printable(line)}" for line in error.details[:DETAILS]]
    if len(error.details) > DETAILS:
        lines.append(f"  ... and {len(error.details) - DETAILS} more, all of them with --json")
    if error.tensor is not None:
        lines.append(f"  tensor: {printable(error.tensor)}")
    if error.path is not None:
        lines.append(f"  path: {shown_path(error.path)}")
    if error.expected is not None:
        lines.append(f"  expected: {shown_path(error.expected) if os.path.isabs(error.expected) else printable(error.expected)}")
    if error.advice is not None:
        lines.append(f"  hint: {printable(error.advice)}")
    return "\n".join(lines)


def plain_envelope(command: str, code: int, name: str, message: str, hint: str | None) -> Envelope:
    """The JSON document for an error that is none of ours: a command line that does not parse, a bug."""
    from ckpt_cli.report import SCHEMA, Envelope, ErrorInfo

    error = ErrorInfo(code=name, message=message, hint=hint)
    return Envelope(schema_version=SCHEMA, command=command, status="error", exit_code=code, data=None, errors=(error,))


def print_document(envelope: Envelope) -> None:
    """The one JSON document of a command, on stdout."""
    sys.stdout.write(envelope.to_json() + "\n")


def _envelope(command: str, code: int, data: dict[str, Any] | None, errors: list[CkptError]) -> Envelope:
    from ckpt_cli.report import SCHEMA, Envelope, ErrorInfo

    infos = tuple(
        ErrorInfo(
            code=error.code,
            message=_clean(error.message),
            hint=_clean(error.advice),
            path=_clean(error.path),
            tensor=_clean(error.tensor),
            expected=_clean(error.expected),
            details=tuple(_clean(line) for line in error.details),
        )
        for error in errors
    )
    status = "success" if code == 0 else "error" if errors else "findings"
    return Envelope(schema_version=SCHEMA, command=command, status=status, exit_code=code, data=data, errors=infos)


def _clean(text: str | None) -> Any:
    """Text that JSON can carry: file names that are no UTF-8 are escaped."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


class _Trimmed(io.TextIOBase):
    """A stream without the spaces that pad the last column of a table: for files and pipes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream behind it: rich asks whether it can show more than ASCII."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._stream.write(TRAILING.sub("", text))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _console(color: ColorMode, stream: Any) -> Console:
    """A console that follows --color, NO_COLOR, FORCE_COLOR and the terminal, in this order."""
    from rich.console import Console

    class PipeConsole(Console):
        """rich ends the process with code 1 when the reader goes away; here the caller decides."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    terminal = stream.isatty()
    if color == "auto":
        wanted = not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or terminal)
        wanted = wanted and (bool(os.environ.get("FORCE_COLOR")) or os.environ.get("TERM") != "dumb")
    else:
        wanted = color == "always"
    return PipeConsole(
        file=cast("IO[str]", stream if terminal else _Trimmed(stream)),
        force_terminal=terminal or wanted,
        no_color=not wanted,
        color_system="auto" if terminal and wanted else "standard" if wanted else None,
        width=None if terminal else WIDE,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
