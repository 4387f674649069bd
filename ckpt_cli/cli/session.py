"""One run of one command: where output goes, how errors are shown, and the exit code. Only `cli` prints or exits."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar, cast

from ckpt_cli.cli import SIGPIPE, Ended
from ckpt_cli.cli.text import path as shown_path
from ckpt_cli.cli.text import wrapped
from ckpt_cli.errors import CkptError, OutputExists, UsageError, Warned
from ckpt_cli.names import delimited, printable
from ckpt_cli.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt_cli.results.envelope import Envelope, ErrorInfo

ColorMode = Literal["auto", "always", "never"]
ProgressMode = Literal["auto", "plain", "json", "off"]
Result = TypeVar("Result")
TRAILING = re.compile(r" +(?=\n)")
DETAILS = 20
"""How many lines of an error's details are shown."""

TYPED = "ckpt.typed"
"""Where the words of a command line are kept while it runs."""

WIDE = 100_000
"""Off a terminal nothing is cut or wrapped."""


@dataclass(frozen=True, slots=True)
class Session:
    """The output options of a command; ``path``, ``again`` (its options as text) and ``typed`` (all its words) go into the next one.

    ``quiet`` 1 shows the result, warnings and errors, 2 no warnings; with ``strict``, warnings end with code 1. ``refused``: what was
    planned cannot be done, which is said before the next command.
    """

    command: str
    json: bool = False
    quiet: int = 0
    strict: bool = False
    verbose: bool = False
    debug: bool = False
    color: ColorMode = "auto"
    progress: ProgressMode = "auto"
    path: str | None = None
    again: str = ""
    typed: tuple[str, ...] = ()
    refused: CkptError | None = None

    def run(self, work: Callable[[Progress], Result], render: Callable[[Result, Session], None], exit_code: Callable[[Result], int]) -> int:
        """Do the work, show its result (or its error), and return the exit code."""
        from ckpt_cli.cli.live import make_progress

        progress = make_progress(self)
        try:
            result = work(progress)
        except CkptError as error:
            progress.finish()
            if self.debug:
                import traceback

                traceback.print_exc()
            planned: Any = getattr(error, "planned", None)
            if isinstance(error, OutputExists) and planned is not None and not self.json and not self.quiet:
                from ckpt_cli.cli.words.elsewhere import past
                from ckpt_cli.cli.words.hints import fitting

                error.hint = fitting(error.advice, self.command)
                render(planned, replace(self, typed=past(error, self.typed), refused=error))
                return error.exit_code
            return self.fail(error)
        progress.finish()
        from ckpt_cli.cli.screens.troubles import as_errors, lines, troubles_of

        code = exit_code(result)
        troubles = troubles_of(result)  # type: ignore[arg-type]
        warned = as_errors(troubles) if self.strict else []
        known = self._fitting(getattr(result, "error", None))
        try:
            if self.json:
                data = result.model_dump(mode="json")  # type: ignore[attr-defined]
                errors = [*([known] if known is not None else []), *warned]
                print_document(_envelope(self.command, code or int(bool(warned)), data, errors))
                return code or int(bool(warned))
            render(result, self)
            if self.quiet:
                shown = [trouble for trouble in troubles if self.quiet == 1 or trouble.level == "error"]
                for label, text in lines(shown):
                    self.labelled(label, "red" if label.startswith("error") else "yellow", text)
            if warned and not code:
                self.show(Warned.of([(error.code, error.message) for error in warned]))
        except BrokenPipeError:
            # Typer would make an exit code of its own of it.
            raise Ended(SIGPIPE) from None
        return code or int(bool(warned))

    def fail(self, error: CkptError) -> int:
        """Report an error: as JSON on stdout, or as text on stderr."""
        from ckpt_cli.cli.words.hints import fitting

        hint = fitting(error.hint, self.command) or error.usual_hint
        error.hint = f"ckpt {self.command} --help" if hint == UsageError.usual_hint else hint
        if self.json:
            from ckpt_cli.results.envelope import ErrorInfo

            warned = [ErrorInfo(code=code, message=printable(text)) for code, text in error.warnings] if isinstance(error, Warned) else []
            planned: Any = getattr(error, "planned", None)
            data = None if planned is None else planned.model_dump(mode="json")
            print_document(_envelope(self.command, error.exit_code, data, warned or [ErrorInfo.of(error)]))
        else:
            self.show(error)
        return error.exit_code

    def show(self, error: CkptError | ErrorInfo) -> None:
        """An error on stderr: a line for each thing that is known."""
        for label, text in error_lines(error):
            self.labelled(label, "red" if label.startswith("error") else "dim" if label else None, text)

    def _fitting(self, error: ErrorInfo | None) -> ErrorInfo | None:
        """An error that is part of a result, with a hint that this command can follow."""
        from ckpt_cli.cli.words.hints import fitting

        return None if error is None else error.model_copy(update={"hint": fitting(error.hint, self.command)})

    def labelled(self, label: str, colour: str | None, text: str, *, style: str = "", wrap: bool = True) -> None:
        """A line on stderr that begins with a label; on a terminal it is wrapped between words and indented."""
        from rich.text import Text

        console, text = self.err(), printable(text)
        indent = " " * (len(label) - len(label.lstrip()) + 2)
        head = f"{label}: " if label.strip() else f"{label}"
        if wrap and console.width < WIDE:
            text = "\n".join(wrapped(head + text, console.width, indent))[len(head) :]
        line = Text.assemble((head, f"bold {colour}" if colour == "red" else colour or ""), (text, style))
        with contextlib.suppress(BrokenPipeError):
            console.print(line, soft_wrap=True)

    def out(self) -> Console:
        """stdout, for data."""
        return _console(self.color, sys.stdout)

    def err(self) -> Console:
        """stderr, for messages."""
        return _console(self.color, sys.stderr)


def error_lines(error: CkptError | ErrorInfo) -> Iterator[tuple[str, str]]:
    """error[code]: message, then details, where, what was expected, and what to do next: a label and a text for each line."""
    yield f"error[{error.code}]", error.message
    yield from (("  ", line) for line in error.details[:DETAILS])
    if len(error.details) > DETAILS:
        yield "  ", f"... and {len(error.details) - DETAILS} more (--json lists all)"
    if error.tensor is not None:
        yield "  tensor", error.tensor
    if error.path is not None:
        yield "  path", delimited(shown_path(error.path))
    if error.expected is not None:
        yield "  expected", shown_path(error.expected) if os.path.isabs(error.expected) else error.expected
    if error.advice is not None:
        yield "  hint", error.advice


def plain_envelope(command: str, code: int, name: str, message: str, hint: str | None) -> Envelope:
    """The JSON document for an error that is not a CkptError: a command line that does not parse, a bug."""
    from ckpt_cli.results.envelope import SCHEMA, Envelope, ErrorInfo

    error = ErrorInfo(code=name, message=message, hint=hint)
    return Envelope(schema_version=SCHEMA, command=command, status="error", exit_code=code, data=None, errors=(error,))


def print_document(envelope: Envelope) -> None:
    """The one JSON document of a command, on stdout."""
    sys.stdout.write(envelope.to_json() + "\n")


def _envelope(command: str, code: int, data: dict[str, Any] | None, errors: Sequence[ErrorInfo]) -> Envelope:
    from ckpt_cli.results.envelope import SCHEMA, Envelope

    status = "success" if code == 0 else "error" if errors else "findings"
    return Envelope(schema_version=SCHEMA, command=command, status=status, exit_code=code, data=data, errors=tuple(errors))


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


def wants_color(color: ColorMode, stream: Any) -> bool:
    """Whether a stream gets colours: --color decides, then NO_COLOR, FORCE_COLOR and the terminal."""
    if color != "auto":
        return color == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (bool(stream.isatty()) and os.environ.get("TERM") != "dumb")


def _console(color: ColorMode, stream: Any) -> Console:
    """A console with colours where they are wanted, as wide as the terminal."""
    from rich.console import Console

    class PipeConsole(Console):
        """rich ends the process with code 1 when the reader goes away; here the caller decides."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    terminal = stream.isatty()
    wanted = wants_color(color, stream)
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
