"""A command that is interrupted, or whose reader goes away, while it starts: real processes, at every stage of the start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

STAGES = [
    "ckpt_cli.cli",
    "signal",
    "ckpt_cli.urls",
    "typer",
    "typer.core",
    "ckpt_cli.cli.app",
    "ckpt_cli.cli.detect",
    "ckpt_cli.commands.inspect",
]
"""Modules that a start loads, in this order."""

AT_MODULE = """
import os, signal, sys
class Interrupt:
    @staticmethod
    def find_spec(name, *_):
        if name == sys.argv[1]:
            print("reached", flush=True)
            os.kill(os.getpid(), signal.SIGINT)
sys.modules.pop(sys.argv[1], None)
sys.meta_path.insert(0, Interrupt)
sys.argv[:] = ["ckpt", "detect", "."]
{before}
from ckpt_cli.__main__ import main
main()
"""


def at_module(module: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """`ckpt detect .`, which gets SIGINT when it begins to load a module."""
    code = AT_MODULE.replace("sys.argv[1]", repr(module)).replace("{before}", before)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)


@pytest.mark.parametrize("module", STAGES)
def test_ctrl_c_at_any_stage_of_the_start_ends_it_quietly(module: str) -> None:
    done = at_module(module)
    assert done.returncode == 130
    assert done.stdout.startswith("reached")
    assert done.stderr in ("", "error[interrupted]: ended by SIGINT; no unfinished output is left\n")


def test_a_background_job_that_ignores_ctrl_c_goes_on() -> None:
    done = at_module("typer", "signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert "reached" in done.stdout
    assert done.returncode != 130


def test_ctrl_c_at_any_moment_leaves_no_traceback_of_ours() -> None:
    for wait in range(0, 160, 20):
        process = subprocess.Popen([sys.executable, "-m", "ckpt_cli", "--help"], stdout=-1, stderr=-1, text=True, env=ENVIRONMENT)
        time.sleep(wait / 1000)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        # Before the first line of ours, and after the last, Python is alone; the first ones are about to meet signals.
        assert process.returncode in (0, 130, -signal.SIGINT, 1)
        assert set(re.findall(r"ckpt_cli/([^\"]+)", errors)) <= {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("words", [["--help"], ["merge", "--help"], ["detect", "."], ["nothing"]])
def test_a_reader_that_is_gone_before_the_start_is_no_error(words: list[str]) -> None:
    for closed in ("stdout", "stderr"):
        reading, writing = os.pipe()
        os.close(reading)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, closed: writing}
        done = subprocess.run([sys.executable, "-m", "ckpt_cli", *words], **streams, text=True, env=ENVIRONMENT, timeout=60)  # type: ignore[call-overload]
        os.close(writing)
        assert done.returncode == 141 if (closed == "stdout" and "--help" in words) else done.returncode in (0, 2, 3, 141)
        assert "Traceback" not in f"{done.stdout}{done.stderr}"
        assert "BrokenPipe" not in f"{done.stdout}{done.stderr}"


def test_the_installed_commands_begin_where_signals_are_met() -> None:
    assert (ROOT / "pyproject.toml").read_text().count('= "ckpt_cli.__main__:main"') == 2
