"""Which part of an output a process writes: as it was typed, or as a launcher says. Apart, so that options are read without the rest."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ckpt_cli.errors import UsageError
from ckpt_cli.launchers import LAUNCHERS, environments_above, launcher_of

MAX_PARTS = 100_000
WHOLE_FILES = ":files"
TEXT = re.compile(rf"([0-9]{{1,6}})/([0-9]{{1,6}})({WHOLE_FILES})?", re.ASCII)
AUTO = ("auto", f"auto{WHOLE_FILES}")

Engine = Literal["local", "ray"]
"""Who does the parts of a command: this process, or the machines of a Ray cluster."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``number`` of ``count``, counted from 0. ``launched``: of one run, so that the part which is done last publishes.

    ``whole_files``: no file is written by two parts, for file systems on which several machines cannot write into one.
    """

    number: int
    count: int
    launched: bool = False
    whole_files: bool = False

    @classmethod
    def of(cls, text: str) -> Part:
        """The part that "3/8" or "3/8:files" names. Raises UsageError."""
        match = TEXT.fullmatch(text)
        number, count = (int(match[1]), int(match[2])) if match else (0, 0)
        if not number < count <= MAX_PARTS:
            last = f"0/{count} to {count - 1}/{count}" if match and 0 < count <= MAX_PARTS else "K/N, such as 0/8 to 7/8"
            raise UsageError(f"--part {text[:40]} is no part", expected=last, hint="parts are counted from 0")
        return cls(number, count, whole_files=bool(match and match[3]))

    @classmethod
    def chosen(cls, text: str) -> Part:
        """The part that a text names, or that a launcher says if it is "auto" or "auto:files". Raises UsageError."""
        if text in AUTO:
            return replace(cls.of_environment(os.environ, environments_above()), whole_files=text != AUTO[0])
        return cls.of(text)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str], above: Iterable[Mapping[str, str]] = ()) -> Part:
        """The part of this process among those that the nearest of `LAUNCHERS` started. Raises UsageError if none did.

        ``above`` are the environments of the processes above it, as for `launcher_of`.
        """
        launcher = launcher_of(environment, above)
        if launcher is None:
            listed = ", ".join(f"{each.number} and {each.count}" for each in LAUNCHERS)
            raise UsageError(
                "--part auto: no launcher says which part this is",
                expected=f"{listed} in the environment, as torchrun, srun and mpirun set them",
                hint="start it with one of them (a batch script of Slurm alone is none), or pass --part K/N, such as 0/8 to 7/8",
            )
        try:
            return replace(cls.of(launcher.says(environment) or ""), launched=True)
        except UsageError as error:
            said = ", ".join(f"{name} is {environment[name][:40]}" for name in (launcher.number, launcher.count))
            raise UsageError(said, expected=error.expected, hint="pass --part K/N, such as 0/8 to 7/8") from error

    def __str__(self) -> str:
        return f"{self.number}/{self.count}{WHOLE_FILES if self.whole_files else ''}"


def check_engine(engine: Engine, address: str | None, count: int | None, part: Part | None) -> None:
    """Raise UsageError if options of an engine do not go together, or with a part of this process."""
    if part is not None and engine == "ray":
        raise UsageError("--engine ray does all parts, so --part does not apply", hint="leave out one of them")
    if engine != "ray" and (address is not None or count is not None):
        option = "--ray-address" if address is not None else "--ray-parts"
        raise UsageError(f"{option} is for --engine ray", hint="pass --engine ray as well")
    if count is not None and not 1 <= count <= MAX_PARTS:
        raise UsageError("--ray-parts is out of range", expected=f"1 to {MAX_PARTS}")
