"""The command that is run for every output (``--exec``), and the metrics that it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import UsageError
from ckpt_cli.watching.placeholders import PREFIX, filled, refuse_values, uses

GRACE = 10.0
"""Seconds that a command has to end after SIGTERM, before it is killed."""

MOST_LINE = 1 << 20
"""Bytes of the longest line that may hold metrics."""

LIMITED = "CKPT_LIMITS_OPENBLAS"
"""Set by `ckpt_cli.cli` where it gave OPENBLAS_NUM_THREADS a value for itself."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended: its exit code (128 + n for signal n), how long it took, and its last line that is a JSON object."""

    exit_code: int
    seconds: float
    metrics: Mapping[str, Any] | None


def check_command(command: str, homes: Mapping[Path, Path]) -> None:
    """Raise UsageError for a command that never uses the output, or could not use those of these runs, by the folders of both."""
    if not command.strip():
        raise UsageError("--exec is empty", hint="an unset shell variable expands to an empty string")
    if not uses(command, "output"):
        raise UsageError("--exec does not use the output", expected="a command with {output}, such as 'python eval.py {output} {step}'")
    for run, home in homes.items():
        refuse_values(command, values_of(home, 0, run))


def values_of(output: Path, step: int, run: Path) -> dict[str, str]:
    return {"output": str(output), "step": str(step), "run": str(run)}


def run_command(command: str, output: Path, step: int, run: Path, show: Callable[[str], None]) -> Ran:
    """Run a command of the shell for an output, in which ``{output}``, ``{step}`` and ``{run}`` are replaced, whatever quotes are around.

    Its stdout goes to ``show`` line by line, its stderr is that of this process. It gets the same values as CKPT_OUTPUT, CKPT_STEP and
    CKPT_RUN. If this process is asked to end, the command and all that it started is ended first.
    """
    values = values_of(output, step, run)
    line = filled(command, values)
    environment = dict(os.environ) | {f"{PREFIX}{name.upper()}": value for name, value in values.items()}
    if environment.pop(LIMITED, None):
        environment.pop("OPENBLAS_NUM_THREADS", None)
    started = time.monotonic()
    words, began = ["/bin/sh", "-c", line], list[subprocess.Popen[bytes]]()

    def begin() -> None:
        began.append(subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment, start_new_session=True))

    try:
        # In another thread, so that a signal, which raises in this one, never comes between a process and what holds it.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(begin).result()
        metrics = _metrics(began[0], show)
        code = began[0].wait()
    except BaseException:
        for process in began:
            _end(process)
        raise
    return Ran(128 - code if code < 0 else code, time.monotonic() - started, metrics)


def _metrics(process: subprocess.Popen[bytes], show: Callable[[str], None]) -> Mapping[str, Any] | None:
    """Pass the output of a command on, and keep its last line that is a JSON object."""
    found: Mapping[str, Any] | None = None
    if process.stdout is None:
        return None
    with process.stdout as lines:
        while line := lines.readline(MOST_LINE):
            show(line.decode(errors="replace").rstrip("\n"))
            if line.lstrip().startswith(b"{"):
                try:
                    parsed = json.loads(line, parse_constant=str)  # NaN is no JSON for most readers
                except (ValueError, RecursionError):
                    continue
                found = parsed if isinstance(parsed, dict) else found
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and everything in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except (ProcessLookupError, PermissionError):
            return
        except subprocess.TimeoutExpired:
            continue
        else:
            return
