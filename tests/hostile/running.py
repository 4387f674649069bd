"""Runs every command that reads on hostile inputs, and what is asked of each, whatever the input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cli import ROOT

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "detect": ("detect", "in"),
    "inspect": ("inspect", "in"),
    "merge": ("merge", "in", "-o", "writes/merged"),
    "average": ("average", "in", "in", "-o", "writes/averaged"),
    "extract-state": ("extract-state", "in", "-o", "writes/state", "--optimizer"),
    "verify": ("verify", "in"),
    "scan": ("scan", "in"),
}
WRITTEN = {"merge": "merged", "average": "averaged", "extract-state": "state"}
SLOW, MOST_MEMORY = 15.0, 700 << 20
CONTROLS = {*map(chr, (*range(10), *range(11, 32), *range(0x7F, 0xA0))), "\u202e"}
READING = (0, 1, 2, 3, 4)
"""Exit codes of commands that are given something to read; 5 is about outputs, 70 a bug, and a signal has none."""


@dataclass(frozen=True)
class Ran:
    """What a command did: its exit code, what it printed, events that no command may cause, seconds of CPU, and bytes of memory."""

    code: int
    out: str
    err: str
    events: list[str]
    seconds: float
    peak: int


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """What lies below a folder: kind, size, time of change and bytes."""
    found: dict[str, tuple[object, ...]] = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(root, name)
            status = os.lstat(path)
            content = None
            if os.path.isfile(path) and not os.path.islink(path) and status.st_size < 1 << 24:
                with open(path, "rb") as file:
                    content = file.read()
            found[path] = (status.st_mode, status.st_size if name in files else 0, status.st_mtime_ns if name in files else 0, content)
    return found


def chosen(number: int) -> tuple[str, ...]:
    """Merging and scanning for every input, and one of the other commands in turn."""
    others = [command for command in COMMANDS if command not in ("merge", "scan")]
    return ("merge", "scan", others[number % len(others)])


def run_all(places: Mapping[str, Path], work: Path) -> dict[str, dict[str, Ran]]:
    """Commands on the folder ``in`` of every place, by case and command: forks of two children, at the same time, one for each place."""
    lines = [
        (name, command, [str(places[name]), list(COMMANDS[command])]) for number, name in enumerate(places) for command in chosen(number)
    ]
    clean = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "COLUMNS", "TERM")}
    environment = {**clean, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(work / "cache")}
    halves = [lines[: len(lines) // 2], lines[len(lines) // 2 :]]
    children = []
    for number, half in enumerate(halves):
        spec, results = work / f"spec-{number}.json", work / f"results-{number}"
        spec.write_text(json.dumps([line for _, _, line in half]))
        results.mkdir()
        command = [sys.executable, "-m", "tests.hostile.child", str(spec), str(results)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        children.append((half, results, child))
    found: dict[str, dict[str, Ran]] = {}
    for half, results, child in children:
        printed, errors = child.communicate(timeout=900)
        assert child.returncode == 0, errors
        for number, ((name, command_name, _), outcome) in enumerate(zip(half, json.loads(printed), strict=True)):
            out, err, events = ((results / str(number) / part).read_bytes() for part in ("stdout", "stderr", "events"))
            seen = json.loads(events) if events else ["it ended early"]
            ran = Ran(outcome["code"], out.decode(), err.decode(), seen, outcome["seconds"], outcome["peak"])
            found.setdefault(name, {})[command_name] = ran
    return found


def check(name: str, ran: Mapping[str, Ran], folder: Path) -> None:
    """What holds for any input: an exit code that says what it is, one clear error, nothing run, nothing else written."""
    for command, each in ran.items():
        where = (name, command, each)
        assert each.code in READING, where
        assert each.events == [], where
        assert "Traceback" not in each.err, where
        assert each.seconds < SLOW, where
        assert each.peak < MOST_MEMORY, where
        assert not CONTROLS & set(each.out + each.err), where
        if each.code in (3, 4):
            errors = [line for line in each.err.splitlines() if line.startswith("error[")]
            assert len(errors) == 1 or command == "detect", where
            assert any(word in each.err for word in ("  path: ", "  tensor: ", "in/", "config.json")) or command == "detect", where
            assert len(each.err) < 4_000, where
        if each.code and command in WRITTEN:
            assert not (folder / "writes" / WRITTEN[command]).exists(), where
    left = {path.name for path in (folder / "writes").iterdir()}
    assert left <= set(WRITTEN.values()), left
    assert not list(folder.rglob("marker"))
