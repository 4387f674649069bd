"""Running what pages of the documentation print, in a folder where `ckpt` and `python` are those of the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cli import ROOT

MARK = re.compile(r"(?:^<!-- (?P<mark>[\w ]+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code of a page, and the comment above it, if it has one."""

    language: str
    text: str
    mark: str


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [Block(found["language"], found["text"], found["mark"] or "") for found in MARK.finditer(text)]


def environment(folder: Path, **programs: str) -> dict[str, str]:
    """Variables for commands in a folder: `ckpt` and `python` are those of the tests, and each of ``programs`` is a script."""
    own = {"ckpt": f'PYTHONPATH={ROOT} exec {sys.executable} -m ckpt_cli "$@"\n', "python": f'exec {sys.executable} "$@"\n'}
    place = folder / "bin"
    place.mkdir()
    for name, script in {**own, **programs}.items():
        (place / name).write_text(f"#!/bin/sh\n{script}")
        (place / name).chmod(0o755)
    return {**os.environ, "PATH": f"{place}:{os.environ['PATH']}", "PWD": str(folder)}


def run(script: str, variables: dict[str, str]) -> str:
    """Run a script in the folder ``PWD``, which must succeed; returns what it printed on both streams."""
    done = subprocess.run(["bash", "-e"], input=script, text=True, cwd=variables["PWD"], env=variables, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def without_numbers(text: str) -> list[str]:
    """The lines of a text without what differs from one machine, run or version to the next: fractions, dates, folders."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:+]+", "DATE", text)
    text = re.sub(r'"/[^"]*/', '"/', re.sub(r" in \d+ s\b", " in 0.0 s", text))
    return [re.sub(r"\d+(\.\d+)+", "#", line).rstrip() for line in text.splitlines() if line.strip()]
