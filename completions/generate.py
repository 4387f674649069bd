"""Write the completion scripts of bash, zsh and fish, as Typer generates them: `python completions/generate.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILES = {"bash": "ckpt.bash", "zsh": "_ckpt", "fish": "ckpt.fish"}


def script(shell: str) -> str:
    """The completion script of one shell."""
    environment = {**os.environ, "_CKPT_COMPLETE": f"source_{shell}"}
    command = [sys.executable, "-m", "ckpt_cli"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip() + "\n"


def main() -> None:
    for shell, name in FILES.items():
        Path(__file__).with_name(name).write_text(script(shell))


if __name__ == "__main__":
    main()
