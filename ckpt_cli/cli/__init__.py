"""The command line. `main` is its entry point and the only place that exits."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from ckpt_cli.errors import CkptError, no_memory

INTERNAL = 70
"""Exit code of an error that is a bug of ours (EX_SOFTWARE of sysexits.h)."""


SIGPIPE = 13
LIMITED = "CKPT_LIMITS_OPENBLAS"
"""Set with OPENBLAS_NUM_THREADS where that was not, so that commands of the user do not inherit it (`ckpt watch --exec`)."""


class Ended(BaseException):
    """A signal asked the process to end; everything cleans up on its way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 findings, 2 usage, 3 input, 4 incomplete, 5 output, 128 + n for signal n."""
    # A stream that was closed by the caller (`>&-`) is None.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    # Workers are threads of ours; a BLAS that starts its own in each of them only makes them wait for each other.
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        os.environ |= {"OPENBLAS_NUM_THREADS": "1", LIMITED: "1"}
    # Half a million pieces are no garbage: walking over them again and again would take a third of the time.
    gc.set_threshold(50_000, 20, 100)
    _handle_signals(_end)
    code = _run(list(sys.argv[1:] if arguments is None else arguments))
    _handle_signals(_end_now)  # nothing is left to be cleaned up
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader went away, as with `ckpt inspect | head`: nothing is wrong.
        _silence_stdout()
        code = 128 + SIGPIPE
    except OSError as error:
        sys.stderr.write(f"error[output]: stdout cannot be written: {error.strerror}\n")
        _silence_stdout()
        code = 5
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    debug = "--debug" in arguments or bool(os.environ.get("CKPT_DEBUG"))
    try:
        result = _call(arguments)
    except Ended as ended:
        if ended.exit_code == 128 + SIGPIPE:
            _silence_stdout()
            return ended.exit_code
        name = signal.Signals(ended.exit_code - 128).name
        left, told = getattr(ended, "__notes__", ("no unfinished output is left", None))
        _tell(arguments, ended.exit_code, "interrupted", f"ended by {name}; {left}", _fitting(told, arguments))
        return ended.exit_code
    except BrokenPipeError:
        _silence_stdout()
        return 128 + SIGPIPE
    except OSError as error:
        # Files have errors of their own; what is left is a stream that cannot be written, or a folder that vanished.
        _tell(arguments, 5, "output", f"{error.strerror}{f': {error.filename!r}' if error.filename else ''}")
        return 5
    except Exception as error:
        # The one net under everything: a bug of ours ends in one line, not in a traceback.
        if isinstance(error, MemoryError) or (isinstance(error, ImportError) and "failed to map segment" in str(error)):
            lack = no_memory()
            _tell(arguments, lack.exit_code, lack.code, lack.message, lack.advice)
            return lack.exit_code
        if debug:
            raise
        _tell(arguments, INTERNAL, "internal", f"{type(error).__name__}: this is a bug in ckpt", "run again with --debug and report it")
        return INTERNAL
    return result


def _call(arguments: list[str]) -> int:
    import typer

    from ckpt_cli.cli.app import root_command

    if "_CKPT_COMPLETE" in os.environ:
        from typer._completion_classes import completion_init

        completion_init()
    try:
        result = root_command()(args=arguments, prog_name="ckpt", standalone_mode=False)
    except typer.TyperException as error:
        from ckpt_cli.cli.words.mistakes import explained

        return _usage_error(explained(error, arguments), arguments)
    except CkptError as error:
        return _usage_error(error, arguments)
    except typer.Abort:
        return Ended(signal.SIGINT).exit_code
    except SystemExit as error:
        # Typer ends with code 1 when the reader of its help goes away; `main` knows better.
        raise error.__context__ if isinstance(error.__context__, BrokenPipeError) else error from None
    return result if isinstance(result, int) else 0


def _tell(arguments: list[str], code: int, name: str, message: str, hint: str | None = None) -> None:
    """Report an error outside of any command: as text, and as the one JSON document with ``--json``."""
    from ckpt_cli.cli.session import plain_envelope, print_document, wants_color

    # Without rich, which may not be loadable where memory lacks.
    on, off = ("\x1b[1;31m", "\x1b[0m") if wants_color("auto", sys.stderr) else ("", "")
    sys.stderr.write(f"{on}error[{name}]:{off} {message}\n" + (f"  hint: {hint}\n" if hint else ""))
    try:
        if "--json" in arguments:
            print_document(plain_envelope(_command(arguments), code, name, message, hint))
            sys.stdout.flush()
    except OSError:
        _silence_stdout()


def _fitting(hint: str | None, arguments: list[str]) -> str | None:
    if hint is None:
        return None
    from ckpt_cli.cli.words.hints import fitting

    return fitting(hint, _command(arguments))


def _command(arguments: list[str]) -> str:
    return next((argument for argument in arguments if not argument.startswith("-")), "ckpt")


def _usage_error(error: CkptError, arguments: list[str]) -> int:
    """Report a command line that does not parse like any other error."""
    from ckpt_cli.cli.session import Session, plain_envelope, print_document

    if error.hint is None:
        error.hint = f"ckpt {command} --help" if (command := _command(arguments)) != "ckpt" else "ckpt --help"
    if "--json" in arguments:
        print_document(plain_envelope(_command(arguments), error.exit_code, error.code, error.message, error.advice))
    else:
        Session(_command(arguments)).show(error)
    return error.exit_code


def _silence_stdout() -> None:
    """Discard what Python flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(number: int, _: FrameType | None) -> None:
    # A second signal ends at once.
    signal.signal(number, signal.SIG_DFL)
    raise Ended(number)


def _end_now(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # Shells start background jobs with SIGINT ignored; that is respected.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
