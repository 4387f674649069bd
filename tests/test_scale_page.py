"""docs/scale.md: its scripts are valid, and what they run writes the output that one process writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import ROOT, ckpt

yaml = pytest.importorskip("yaml")

PAGE = (ROOT / "docs" / "scale.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
SCRIPTS = [block for language, block in BLOCKS if language == "bash"]
JOB = yaml.safe_load(next(block for language, block in BLOCKS if language == "yaml"))
RUN = ROOT / "examples" / "tiny-run"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with ./run, and programs called ckpt, srun and sbatch on its PATH: the last two run what they are given, at once."""
    (tmp_path / "run").symlink_to(RUN)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ckpt").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m ckpt_cli "$@"\n')
    (programs / "srun").write_text('#!/bin/sh\nfor i in 0 1 2; do SLURM_PROCID=$i SLURM_NTASKS=3 "$@" || exit 1 & done\nwait\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return tmp_path


def run(script: str, work: Path, **environment: str) -> str:
    path = f"{work / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e"], input=script, text=True, cwd=work, env={**os.environ, "PATH": path, **environment}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def expected(work: Path) -> dict[str, bytes]:
    assert ckpt("merge", "./run", "-o", "./one", "--dtype", "bf16", cwd=work).code == 0
    return contents(work / "one")


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_one(script: str) -> None:
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_one_allocation(work: Path) -> None:
    run(next(script for script in SCRIPTS if "srun ckpt" in script), work)
    assert contents(work / "model") == expected(work)


@pytest.mark.slow
def test_verifying_in_one_allocation(work: Path) -> None:
    """Three processes at once: one of them prints the result."""
    assert ckpt("merge", "./run", "-o", "./model", cwd=work).code == 0
    done = run(next(script for script in SCRIPTS if "srun ckpt verify" in script), work)
    assert sorted(line.split(":")[0] for line in done.splitlines() if line.startswith(("part ", "result"))) in (
        [f"part {first} of 3", f"part {second} of 3", "result    ok"] for first, second in ((0, 1), (0, 2), (1, 2))
    )
    assert [path.name for path in work.iterdir() if path.name.startswith(".")] == []


def test_verifying_in_an_array(work: Path) -> None:
    """One part as a task of the array, the other as the command of an Indexed Job: the same document."""
    assert ckpt("merge", "./run", "-o", "./model", cwd=work).code == 0
    for variable, task in (("SLURM_ARRAY_TASK_ID", "1"), ("JOB_COMPLETION_INDEX", "0")):
        script = next(script for script in SCRIPTS if "ckpt verify" in script and f"${variable}" in script)
        run(script.replace("/8", "/2"), work, **{variable: task, "SLURM_ARRAY_TASK_COUNT": "2"})
    gather = next(command for command in re.findall(r"--wrap '(.*?)'", PAGE) if "--gather" in command)
    assert "result    ok" in run(gather, work)


def test_an_array(work: Path) -> None:
    script = next(script for script in SCRIPTS if "--array" in script)
    for task in (1, 0):
        run(script, work, SLURM_ARRAY_TASK_ID=str(task), SLURM_ARRAY_TASK_COUNT="2")
    run(re.search(r"--wrap '(.*?)'", PAGE)[1], work)  # type: ignore[index]
    assert contents(work / "model") == expected(work)


def test_an_indexed_job(work: Path) -> None:
    template = JOB["spec"]["template"]["spec"]
    count = JOB["spec"]["completions"]
    shell, option, command = template["containers"][0]["command"]
    assert (JOB["spec"]["completionMode"], shell, option) == ("Indexed", "sh", "-c")
    assert f"$JOB_COMPLETION_INDEX/{count}" in command
    assert template["containers"][0]["volumeMounts"][0]["name"] == template["volumes"][0]["name"]
    for index in range(count):
        run(command, work, JOB_COMPLETION_INDEX=str(index))
    run("ckpt publish ./model", work)
    assert contents(work / "model") == expected(work)
