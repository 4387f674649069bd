"""Runs commands that crash at chosen points, and judges what they leave. Started with crash.so preloaded; without torch, as users run ckpt.

Each run is a fork of this process, where everything is imported already, so that a thousand of them take a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import json
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer.main

from ckpt_cli.cli import main

KILL, SHORT = 0, -1
"""What may become of a call besides an errno: SIGKILL right before it, and half of the bytes."""

REMOVING = ("unlink", "rmdir", "read-open")
"""Calls that tidy up: whether these can fail is not up to ckpt, so something may stay until the next run."""

TIMES = re.compile(rb', "(time|seconds)": ("[^"]*"|[0-9.e-]+)')
CHANGED = re.compile(rb'"ctime_ns": [0-9]+')
AGAIN = "run the same command again"
JOURNAL = "watch.jsonl"
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
    """A command that writes into the folder PLACE; ``before`` is what stands there at its start, ``lacking`` calls the system has not.

    ``then`` is a command that shows what the first one wrote, where users see nothing of it yet.
    """

    name: str
    command: list[str]
    before: str
    lacking: str = ""
    then: Sequence[str] = ()


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
    return {str(path.relative_to(place)): _content(path) for path in sorted(place.rglob("*")) if path.is_file()}


def _content(path: Path) -> bytes:
    """The bytes of a file; of a manifest without when its sources changed, which differs from copy to copy.

    Of a journal its whole lines in any order, without failures, and without when and how fast it was.
    """
    if path.name == MANIFEST:
        return CHANGED.sub(b"", path.read_bytes())
    if path.name != JOURNAL:
        return path.read_bytes()
    lines = (line for line in path.read_bytes().splitlines() if _is_whole(line) and b'"failed"' not in line)
    return b"\n".join(sorted(TIMES.sub(b"", line) for line in lines))


def _is_whole(line: bytes) -> bool:
    with contextlib.suppress(ValueError):
        return bool(json.loads(line))
    return False


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
        self.staying = {*hidden(self.before), *hidden(self.place)}
        self.shown = self.show()

    def fresh(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.before, self.place)

    def left(self) -> list[str]:
        """Temporary files and folders that a run should have removed."""
        return [name for name in hidden(self.place) if name not in self.staying]

    def show(self) -> Tree:
        """What is there after the second command, if there is one."""
        if self.scenario.then and (then := run(replace(self.scenario, command=list(self.scenario.then)), self.place)).code:
            return {"error": then.text.encode()}
        return seen(self.place)

    def is_intact(self, now: Tree, text: str, *, killed: bool, forever: bool) -> bool:
        """Whether what a failure left is what was there, or if nothing could be undone any more, the output."""
        if now == self.old or ((killed or forever) and now == self.new):
            return True
        # Outputs of a watch appear step by step, each before its line in the journal: without the line the next watch looks at it again.
        if "watch" in self.scenario.command:
            whole, there = _by_folder(self.new), _by_folder(now)
            names = [files.keys() for files in whole.values()]
            return all(files == whole.get(folder, files) and files.keys() in names for folder, files in there.items())
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
            left = self.left()
            if left and not (ended.code and AGAIN in ended.text):
                faults.append(f"left {left}")
        faults += self._again(now, report, tidied=killed or named not in REMOVING or "watch" not in self.scenario.command)
        report.faults += [f"{self.scenario.name}, {point} ({named}): {fault}\n{ended.text}" for fault in faults]

    def _again(self, now: Tree, report: Report, *, tidied: bool) -> list[str]:
        """Run it again. A watch comes back to no step that is done, so what could not be removed then is not ``tidied``."""
        again = run(self.scenario, self.place)
        if again.code == 5 and "output-exists" in again.text and now == self.new:
            if "--in-place" in self.scenario.command:
                return [f"finding the output left {self.left()}"] if self.left() and tidied else []
            again = run(self.scenario, self.place, None, "--overwrite")
        report.resumed += "interrupted run" in again.text
        if again.code:
            return [f"running it again ended with {again.code}: {again.text}"]
        faults = []
        if seen(self.place) != self.new:
            faults.append(f"running it again wrote something else: {_difference(seen(self.place), self.new)}")
        if self.left() and tidied:
            faults.append(f"running it again left {self.left()}")
        if self.scenario.then and (shown := self.show()) != self.shown:
            faults.append(f"what it wrote is something else: {_difference(shown, self.shown)} {shown.get('error', b'').decode()}")
        return faults


def _warm_up(command: Sequence[str], place: Path) -> None:
    """Run the command in this process, so that every fork has imported what it needs."""
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nothing))
        stack.enter_context(contextlib.redirect_stderr(nothing))
        stack.enter_context(contextlib.suppress(SystemExit))
        main([word.replace("PLACE", str(place)) for word in command])


def _by_folder(tree: Tree) -> dict[str, Tree]:
    """The files of each output of a watch."""
    folders: dict[str, Tree] = {}
    for path, content in tree.items():
        if not path.endswith(JOURNAL):
            folders.setdefault(os.path.dirname(path), {})[os.path.basename(path)] = content
    return folders


def _difference(now: Tree, expected: Tree) -> str:
    lacking, more = sorted(expected.keys() - now.keys()), sorted(now.keys() - expected.keys())
    other = sorted(name for name in now.keys() & expected.keys() if now[name] != expected[name])
    return f"lacking {lacking}, more {more}, other bytes in {other}"


def points(calls: int, spec: dict[str, Any], offset: int) -> Iterator[Point]:
    """Every ``every``-th call with each of the failures, or with every second one in turn if ``halved``, and limits of file sizes."""
    ways = [(failure, forever) for failure in spec["failures"] for forever in (spec["forever"] if failure > 0 else [failure == SHORT])]
    if spec["halved"]:  # of an errno either once or from then on
        ways = [way for number, way in enumerate(ways) if (number + number // 2 + offset) % 2 == 0]
    for failure, forever in ways:
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
        gc.freeze()
        for point in points(len(stage.calls), spec, number):
            stage.judge(point, report)
        shutil.rmtree(work)
    return report


if __name__ == "__main__":
    print(json.dumps(vars(drive(json.loads(Path(sys.argv[1]).read_text())))))
