"""Running the command line in a process of its own, as a user does."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT = 120
STARTING = re.compile("PYTHON|LD_|LC_|LANG|TZ$|OMP_|OPENBLAS_|MKL_|COVERAGE_")
"""Variables that a process heeds while it starts, so that a fork would not."""


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of one command."""

    code: int
    out: str
    err: str


def ckpt(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> Outcome:
    """Run ``python -m ckpt_cli`` without colour or width from outside."""
    command = [sys.executable, "-m", "ckpt_cli", *map(str, arguments)]
    whole = {**_clean(), **environment}
    done = subprocess.run(command, cwd=cwd, env=whole, capture_output=True, text=True, timeout=TIMEOUT)
    return Outcome(done.returncode, done.stdout, done.stderr)


def ckpt_fork(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> Outcome:
    """The same in a tenth of the time: in a fork of a process that has loaded the modules.

    For tests of what a command does and says. Not for those of how it starts or what it loads, nor for those that compare two runs,
    which would have the same hash seed. What heeds other limits, users or variables of the start runs in a process of its own.
    """
    loaded = ("torch",) if "extract-state" in arguments or "--with-state" in arguments else ()
    if sys.platform != "linux" or {key for key in environment if STARTING.match(key)} or _process() != _helper(*loaded)[1]:
        return ckpt(*arguments, cwd=cwd, **environment)
    link = _helper(*loaded)[0]
    mask = os.umask(0o077)
    os.umask(mask)
    request = {
        "arguments": [str(argument) for argument in arguments],
        "cwd": os.path.abspath(cwd or os.getcwd()),
        "environment": {**_clean(), **environment},
        "umask": mask,
    }
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    socket.send_fds(link, [json.dumps(request).encode()], [out_end, err_end])
    os.close(out_end)
    os.close(err_end)
    process = json.loads(link.recv(64))
    with ThreadPoolExecutor(2) as readers:
        texts = [readers.submit(_read, end) for end in (out, err)]
        try:
            printed, errors = (text.result(TIMEOUT) for text in texts)
        except TimeoutError:
            os.kill(process, signal.SIGKILL)
            raise
        finally:
            code = json.loads(link.recv(64))
    return Outcome(code, printed, errors)


def _clean() -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")}
    return {**clean, "PYTHONPATH": str(ROOT)}


def _read(end: int) -> str:
    with open(end, encoding="utf-8") as stream:
        return stream.read()


def _process() -> tuple[object, ...]:
    """What a fork of another process would not have from this one."""
    import resource

    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    return os.getresuid(), limits, {key: value for key, value in os.environ.items() if STARTING.match(key)}


@cache
def _helper(*loaded: str) -> tuple[socket.socket, tuple[object, ...]]:
    """The process that forks and has loaded these modules beside those of ckpt, and what it was started with."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.cli_forks", str(other.fileno()), *loaded]
    helper = subprocess.Popen(command, cwd=ROOT, env=_clean(), pass_fds=[other.fileno()], stdin=subprocess.DEVNULL)
    other.close()

    def end() -> None:
        mine.shutdown(socket.SHUT_RDWR)
        mine.close()
        helper.wait()

    atexit.register(end)
    return mine, _process()
