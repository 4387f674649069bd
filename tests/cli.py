"""Running the command line in a process of its own, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of one command."""

    code: int
    out: str
    err: str


def ckpt(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> Outcome:
    """Run ``python -m ckpt_cli`` without colour or width from outside."""
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")}
    clean["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "ckpt_cli", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, timeout=120)
    return Outcome(done.returncode, done.stdout, done.stderr)
