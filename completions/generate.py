"""Write the completion scripts of bash, zsh and fish: `python completions/generate.py`."""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.cli.words.scripts import SCRIPTS

FILES = {"bash": "ckpt.bash", "zsh": "_ckpt", "fish": "ckpt.fish"}


def main() -> None:
    for shell, name in FILES.items():
        Path(__file__).with_name(name).write_text(SCRIPTS[shell])


if __name__ == "__main__":
    main()
