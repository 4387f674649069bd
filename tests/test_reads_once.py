"""What is asked of the file system: a folder is listed once, files of other steps stay untouched, metadata are read once per command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.discover.locate import locate
from tests.cli import ROOT

STEPS, FILES = 400, 24


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 400 steps, each with 24 files of 8 ranks."""
    run = tmp_path_factory.mktemp("long") / "run"
    for step in range(1, STEPS + 1):
        folder = run / f"global_step_{step}" / "actor"
        folder.mkdir(parents=True)
        for rank in range(8):
            for kind in ("model", "optim", "extra_state"):
                (folder / f"{kind}_world_size_8_rank_{rank}.pt").touch()
    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the system was asked what stands at a path, or what is in a folder."""
    count: Counter[str] = Counter()

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            count[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("stat", "lstat", "scandir", "listdir"):
        counted(name)
    return count


class TestLocatingALongRun:
    def test_with_a_step_looks_into_that_step_only(self, long_run: Path, asked: Counter[str]) -> None:
        target = locate(long_run, step=STEPS)
        assert [found.step for found in target.checkpoints] == [STEPS]
        assert len(target.checkpoints[0].places[0].match.files) == 8
        assert asked.total() < 40

    def test_without_one_lists_every_folder_once(self, long_run: Path, asked: Counter[str]) -> None:
        assert len(locate(long_run).checkpoints) == STEPS
        assert asked["scandir"] <= 1 + 2 * STEPS + 10
        assert asked.total() < 5 * STEPS

    def test_a_step_that_is_not_there_names_those_that_are(self, long_run: Path) -> None:
        with pytest.raises(ckpt_cli.CkptError) as caught:
            locate(long_run, step=STEPS + 1)
        assert "399, 400" in str(caught.value.expected)


COMMANDS = {
    "detect": "ckpt_cli.detect(run)",
    "inspect": "ckpt_cli.inspect(run)",
    "merge": "ckpt_cli.merge(run, out)",
    "merge of all": "ckpt_cli.merge(run, out, type='all')",
    "verify": "ckpt_cli.verify(run, full=True)",
    "extract-state": "ckpt_cli.extract_state(run, out)",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("layout", ["accelerate/run", "lightning/fabric", "torchtitan/run", "composer/run"])
def test_the_metadata_of_a_dcp_folder_are_opened_once(layouts: Path, tmp_path: Path, command: str, layout: str) -> None:
    run = Path(shutil.copytree(layouts / layout, tmp_path / "run"))
    script = (
        "import sys, pathlib, ckpt_cli\n"
        "run, out = map(pathlib.Path, sys.argv[1:])\n"
        "opened = []\n"
        "def hook(event, arguments):\n"
        "    if event == 'open' and str(arguments[0]).endswith('.metadata'): opened.append(arguments[0])\n"
        "sys.addaudithook(hook)\n"
        f"try: {COMMANDS[command]}\n"
        "except ckpt_cli.CkptError as error: print(error, file=sys.stderr)\n"
        "print(*opened, sep='\\n')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script, run, tmp_path / "out"], capture_output=True, text=True, env=environment)
    opened = done.stdout.split()
    assert opened, done.stderr
    assert max(Counter(opened).values()) == 1, opened
