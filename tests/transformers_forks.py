"""What transformers says of a config, asked in forks of one process that has loaded it: a child of each question takes seconds to start.

The process is started by the first test that asks, serves those of one pytest process and the commands in its forks, and ends with it.
The questions are those of ``ckpt_cli.hub.classes.compile``; nothing is kept from one to the next. How the child itself is started,
and what it leaves, is asked by tests with the fixture ``own_child`` and by those that run a command in a process of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "TESTS_ASKED"
"""The folder of the process that is asked, with the number of the pytest process, in the environment of that and of its commands."""
ROOT = Path(__file__).parent.parent
LOOKED_AFTER = 2.0
"""Seconds between two looks at whether the pytest process still runs."""


def asked_in_forks(own: Callable[..., dict[str, Any] | None]) -> Callable[..., dict[str, Any] | None]:
    """A function with the answers of ``_run_child``; it is ``own``, that function itself, where a child would be limited."""

    def asked(question: str, text: str) -> dict[str, Any] | None:
        from ckpt_cli.errors import memory_limits

        home = os.environ.get(VARIABLE)
        if home is None or memory_limits():
            return own(question, text)
        try:
            link = _connected(Path(home))
        except OSError:  # of a test in which files cannot be opened, or processes not started
            return own(question, text)
        with link:
            link.sendall(json.dumps([question, text]).encode())
            link.shutdown(socket.SHUT_WR)
            said = _read(link)
        content = json.loads(said.splitlines()[-1]) if said else None
        return content if isinstance(content, dict) else None

    return asked


def _connected(home: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            link.connect(_address(home))
        except ConnectionRefusedError:
            _start(home)
            link.connect(_address(home))
    return link


def _address(home: Path) -> str:
    """Not in the file system, where a path may be too long for a socket."""
    return "\0" + str(home)[-100:]


def _start(home: Path) -> None:
    """The process listens when this is over."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(home)}
    command = [sys.executable, "-m", "tests.transformers_forks", str(home)]
    quiet: Mapping[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, **quiet)
    # No assert: that would not run under PYTHONOPTIMIZE.
    with process.stdout or open(os.devnull, "rb") as out:
        if out.readline() != b"ready\n":
            raise RuntimeError("the process that asks transformers did not start")
    process.returncode = 0  # It ends by itself: nobody waits for it.


def _read(link: socket.socket) -> str:
    parts = []
    while part := link.recv(1 << 16):
        parts.append(part)
    return b"".join(parts).decode()


def serve(home: Path) -> None:
    """Until the pytest process is gone; a fork for each question."""
    from ckpt_cli.hub.classes import compile

    owner = int(home.name.rpartition("-")[2])
    load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(_address(home))
        listener.listen(16)
        listener.settimeout(LOOKED_AFTER)
        os.write(1, b"ready\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        while _runs(owner):
            with contextlib.suppress(TimeoutError), listener.accept()[0] as link:
                if not os.fork():
                    link.settimeout(None)
                    question, text = json.loads(_read(link))
                    os.dup2(link.fileno(), 1)
                    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                        file.write(text)
                        file.flush()
                        compile.main([f"--{question}", file.name])
                    sys.stdout.flush()
                    os._exit(0)


def load() -> None:
    """What every answer needs, by asking for one."""
    from tests.architectures import DENSE, answered_here

    text = json.dumps({**DENSE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    for question in ("rules", "tensors"):
        if "error" in (answer := answered_here(question, text)):
            raise RuntimeError(answer["reason"])


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
