"""Runs commands that crash at chosen points, and judges what they leave. Started with crash.so preloaded; without torch, as users run ckpt.

Each run is a fork of this process, where everything is imported already, so that a thousand of them take a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer.main

from ckpt_cli.cli import main

KILL, SHORT = 0, -1
"""What may become of a call besides an errno: SIGKILL right before it, and half of the bytes."""

REMOVING = ("unlink", "rmdir", "read-open")
"""Calls that tidy up: whether these can fail is not up to ckpt, so something may stay until the next run."""

AGAIN = "run the same command again"
MANIFEST = "ckpt-manifest.json"
HIDDEN, ASIDE = ".ckpt-", ".ckpt-old-"
Tree = dict[str, bytes]


@dataclass(frozen=True)
class Point:
    """One way to crash: call ``at`` meets ``failure``, once or ``forever``; or files may have ``limit`` bytes."""

    at: int = 0
    failure: int = KILL
    forever: bool = False
    limit: int | None = None

    def __str__(self) -> str:
        if self.limit is not None:
            return f"files of at most {self.limit} bytes"
        names = {KILL: "SIGKILL", SHORT: "half of the bytes"}
        return f"call {self.at}: {names.get(self.failure) or errno.errorcode[self.failure]}{' from then on' * self.forever}"


@dataclass(frozen=True)
class Scenario:
    """A command that writes into the folder PLACE; ``before`` is what stands there at its start, ``lacking`` calls the system has not."""

    name: str
    command: list[str]
    before: str
    lacking: str = ""


@dataclass
class Report:
    """Runs, calls that were there to fail by name, kept files of interrupted runs, and what went wrong."""

    runs: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    resumed: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ended:
    code: int
    text: str
    calls: list[list[str]]


def run(scenario: Scenario, place: Path, point: Point | None = None, *more: str) -> Ended:
    """The command in a fork of this process; negative codes are signals."""
    log = Path(os.devnull) if point is not None and point.limit is not None else place.parent / "calls"
    reading, writing = os.pipe()
    arguments = [word.replace("PLACE", str(place)) for word in (*scenario.command, *more)]
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            if point is not None:
                os.environ["CRASH_LACKING"] = scenario.lacking
                if point.limit is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (point.limit, point.limit))
                ctypes.CDLL(None).crash_arm(
                    os.fsencode(place), os.fsencode(log), ctypes.c_long(point.at), point.failure, int(point.forever)
                )
            sys.argv = ["ckpt", *arguments]
            try:
                code = main() or 0
            except SystemExit as ended:
                code = int(ended.code or 0)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, errors="replace") as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = [line.split(" ", 2) for line in log.read_text().splitlines()] if point is not None else []
    return Ended(code, text, calls)


def tree(place: Path) -> Tree:
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def hidden(place: Path) -> list[str]:
    """Temporary files and folders, but for what lies in another one."""
    found = sorted(str(path.relative_to(place)) for path in place.rglob("*") if HIDDEN in path.name)
    return [name for name in found if not any(name.startswith(f"{other}/") for other in found)]


def seen(place: Path) -> Tree:
    """What a user sees."""
    return {name: content for name, content in tree(place).items() if HIDDEN not in name}


class Stage:
    """A scenario with what it should write."""

    def __init__(self, scenario: Scenario, work: Path) -> None:
        self.scenario, self.work = scenario, work
        self.place = work / "place"
        self.before = Path(scenario.before)
        self.fresh()
        _warm_up(scenario.command, self.place)
        self.fresh()
        done = run(scenario, self.place, Point())
        if done.code:
            raise SystemExit(f"{scenario.name}: {done.text}")
        self.calls = done.calls
        self.old, self.new = seen(self.before), seen(self.place)

    def fresh(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.before, self.place)

    def is_intact(self, now: Tree, text: str, *, killed: bool, forever: bool) -> bool:
        """Whether what a failure left is what was there, or if nothing could be undone any more, the output."""
        if now == self.old or ((killed or forever) and now == self.new):
            return True
        # In place, files get their names one by one, the manifest last; the next run takes them back.
        if "--in-place" in self.scenario.command and (killed or forever) and not any(MANIFEST in name for name in now):
            return now.items() <= self.new.items() and self.old.items() <= now.items()
        # Where two folders cannot be exchanged there is a moment between two renames, and an error says where the old one is.
        aside = [path for path in self.place.iterdir() if ASIDE in path.name]
        told = killed or (forever and len(aside) == 1 and f"mv {aside[0]}" in text)
        return "renameat2" in self.scenario.lacking and told and not now and [tree(path) for path in aside] == [tree(self.before / "out")]

    def judge(self, point: Point, report: Report) -> None:
        """Crash there, look, run the same command again, and look again."""
        faults: list[str] = []
        self.fresh()
        ended = run(self.scenario, self.place, point)
        report.runs += 1
        report.codes[str(ended.code)] = report.codes.get(str(ended.code), 0) + 1
        now = seen(self.place)
        killed = ended.code == -signal.SIGKILL
        if ended.code not in (0, 3, 5) and not killed:
            faults.append(f"ended with {ended.code}")
        if ended.code == 0 and now != self.new:
            faults.append(f"ended well with the wrong output: {_difference(now, self.new)}")
        if ended.code and not self.is_intact(now, ended.text, killed=killed, forever=point.forever):
            faults.append(f"what was there is not as it was: {_difference(now, self.old)}")
        if "Traceback" in ended.text or "internal" in ended.text or (ended.code and not killed and "error[" not in ended.text):
            faults.append("no proper error")
        if ended.code == 5 and "hint:" not in ended.text:
            faults.append("the error does not say what to do")
        named = ended.calls[point.at - 1][1] if 0 < point.at <= len(ended.calls) else ""
        if not killed and not point.forever and named not in REMOVING:
            left = hidden(self.place)
            if left and not (ended.code and AGAIN in ended.text):
                faults.append(f"left {left}")
        faults += self._again(now, report)
        report.faults += [f"{self.scenario.name}, {point} ({named}): {fault}\n{ended.text}" for fault in faults]

    def _again(self, now: Tree, report: Report) -> list[str]:
        again = run(self.scenario, self.place)
        if again.code == 5 and "output-exists" in again.text and now == self.new:
            again = run(self.scenario, self.place, None, "--overwrite")
            if "--in-place" in self.scenario.command:
                return []
        report.resumed += "interrupted run" in again.text
        if again.code:
            return [f"running it again ended with {again.code}: {again.text}"]
        faults = []
        if seen(self.place) != self.new:
            faults.append(f"running it again wrote something else: {_difference(seen(self.place), self.new)}")
        if hidden(self.place):
            faults.append(f"running it again left {hidden(self.place)}")
        return faults


def _warm_up(command: Sequence[str], place: Path) -> None:
    """Run the command in this process, so that every fork has imported what it needs."""
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nothing))
        stack.enter_context(contextlib.redirect_stderr(nothing))
        stack.enter_context(contextlib.suppress(SystemExit))
        main([word.replace("PLACE", str(place)) for word in command])


def _difference(now: Tree, expected: Tree) -> str:
    lacking, more = sorted(expected.keys() - now.keys()), sorted(now.keys() - expected.keys())
    other = sorted(name for name in now.keys() & expected.keys() if now[name] != expected[name])
    return f"lacking {lacking}, more {more}, other bytes in {other}"


def points(calls: int, spec: dict[str, Any], offset: int) -> Iterator[Point]:
    """Every ``every``-th call with each of the failures, and limits of file sizes."""
    for failure in spec["failures"]:
        for forever in spec["forever"] if failure > 0 else [failure == SHORT]:
            for at in range(1 + offset % spec["every"], calls + 1, spec["every"]):
                yield Point(at, failure, forever)
                offset += 1
    yield from (Point(limit=limit) for limit in spec["limits"])


def drive(spec: dict[str, Any]) -> Report:
    """All scenarios of a specification. They are driven at the same points of every run of it."""
    report = Report()
    # Half of the time of a short run: options and their types never change.
    typer.main.get_command = functools.cache(typer.main.get_command)  # type: ignore[assignment]
    for number, each in enumerate(spec["scenarios"]):
        work = Path(spec["work"]) / str(number)
        work.mkdir()
        stage = Stage(Scenario(**each), work)
        for _, name, *_ in stage.calls:
            report.calls[name] = report.calls.get(name, 0) + 1
        for point in points(len(stage.calls), spec, number):
            stage.judge(point, report)
        shutil.rmtree(work)
    return report


if __name__ == "__main__":
    print(json.dumps(vars(drive(json.loads(Path(sys.argv[1]).read_text())))))
