"""Commands that write are killed, and their calls fail, at chosen points: `python -m tests.crashes` does it at every point.

After each: no output or the right one, what was there as it was, an error that says what to do, and a next run that succeeds and leaves
nothing behind.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.cli import ROOT
from tests.crashes import campaign as crashing
from tests.crashes.driver import Report, Scenario, Stage

TRACED = (
    "pwrite64,write,fsync,fdatasync,ftruncate,copy_file_range,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,unlink,unlinkat,rmdir"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = crashing.library(tmp_path_factory.mktemp("library"))
    if made is None:
        pytest.skip("calls that fail need a C compiler and LD_PRELOAD on Linux")
    return made


@pytest.fixture(scope="module")
def report(library: Path) -> Report:
    # In memory if possible: a disk would sync some thousand files.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as work:
        return crashing.campaign(Path(work).resolve(), library, every=449, limits=(20_000,), halved=True)


class TestTheShortForm:
    def test_finds_nothing(self, report: Report) -> None:
        assert report.faults == []

    def test_looked_at_something(self, report: Report) -> None:
        assert report.runs > 30
        assert report.codes[str(-signal.SIGKILL)] >= 2
        assert report.codes["5"] > 10
        wanted = {"pwrite", "write", "fsync", "ftruncate", "copy_file_range", "create", "mkdir", "rename", "renameat2", "link", "unlink"}
        assert wanted <= report.calls.keys()


def test_what_is_counted_is_what_the_system_is_asked_for(library: Path, tmp_path: Path) -> None:
    """No call that changes anything passes by the library."""
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-o", os.devnull, "true"], capture_output=True).returncode:
        pytest.skip("this needs strace, and the right to use it")
    place = tmp_path / "place"
    place.mkdir()
    scenario = next(each for each in crashing.scenarios(tmp_path) if each["name"] == "front to back")
    code = (
        f"from tests.crashes.driver import *; print(len(run(Scenario(**{scenario!r}), Path({str(tmp_path / 'place')!r}), Point()).calls))"
    )
    command = [strace, "-f", "-y", "-o", tmp_path / "trace", "-e", f"trace={TRACED}", sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True)
    calls = re.findall(rf"^[0-9]+ +([a-z_0-9]+)\(.*{re.escape(str(place))}[/>]", (tmp_path / "trace").read_text(), re.MULTILINE)
    asked = Counter(re.sub(r"64$|at2?$", "", name) for name in calls)
    logged = (tmp_path / "calls").read_text().split("\n")[:-1]
    counted = Counter(re.sub(r"at2$", "", line.split()[1]) for line in logged)
    asked["unlink"] += asked.pop("rmdir", 0)
    counted["unlink"] += counted.pop("rmdir", 0)
    for name in ("create", "open", "read-open"):
        counted.pop(name, None)
    assert asked == counted
    assert sum(asked.values()) > 40


class TestTheJudge:
    """It notices what it is there for."""

    @pytest.fixture
    def stage(self, tmp_path: Path) -> Stage:
        stage = Stage.__new__(Stage)
        stage.scenario, stage.place, stage.before = Scenario("", [], str(tmp_path)), tmp_path, tmp_path
        stage.old, stage.new = {"out/a": b"old"}, {"out/a": b"new"}
        return stage

    @pytest.mark.parametrize(
        ("now", "killed", "intact"), [(b"old", False, True), (b"new", False, False), (b"new", True, True), (b"?", True, False)]
    )
    def test_compares_with_what_was_there_and_what_should_be(self, now: bytes, killed: bool, intact: bool, stage: Stage) -> None:
        assert stage.is_intact({"out/a": now}, "", killed=killed, forever=False) is intact
