"""Make the pictures of the README: `python docs/pictures/make.py`. Runs the commands on the example, and draws what a terminal shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).parent
EXAMPLE = HERE.parent.parent / "examples" / "tiny-run"
WIDTH = 108
DARK = TerminalTheme(
    (13, 17, 23),
    (230, 237, 243),
    [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255), (57, 197, 207), (177, 186, 196)],
    [(110, 118, 129), (255, 161, 152), (86, 211, 100), (227, 179, 65), (121, 192, 255), (210, 168, 255), (86, 212, 221), (255, 255, 255)],
)
LIGHT = TerminalTheme(
    (255, 255, 255),
    (31, 35, 40),
    [(36, 41, 47), (207, 34, 46), (17, 99, 41), (154, 103, 0), (9, 105, 218), (130, 80, 223), (27, 124, 131), (110, 119, 129)],
    [(87, 96, 106), (164, 14, 38), (26, 127, 55), (125, 78, 0), (33, 139, 255), (163, 117, 249), (49, 146, 170), (140, 149, 159)],
)


def shown(folder: Path, *arguments: str) -> str:
    """What `ckpt` prints to a colour terminal, with the command above it."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "ckpt_cli", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return f"\x1b[1m$ ckpt {' '.join(arguments)}\x1b[0m\n{done.stdout.rstrip()}\n"


def draw(name: str, text: str) -> None:
    """A picture for light and one for dark pages, without fonts from the web."""
    for suffix, theme in (("", LIGHT), ("-dark", DARK)):
        console = Console(record=True, width=WIDTH, file=open(os.devnull, "w", encoding="utf-8"), force_terminal=True)  # noqa: SIM115
        console.print(Text.from_ansi(text))
        picture = console.export_svg(title="", theme=theme, unique_id=name)
        picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL).replace("Fira Code", "ui-monospace, Menlo, Consolas")
        (HERE / f"{name}{suffix}.svg").write_text("\n".join(line.rstrip() for line in picture.splitlines()) + "\n", encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copytree(EXAMPLE, folder / "run")
        draw("merge", shown(folder, "merge", "run", "--type", "ema", "--dtype", "bf16"))
        draw("drift", shown(folder, "diff", "run", "--steps", "100,200"))


if __name__ == "__main__":
    main()
