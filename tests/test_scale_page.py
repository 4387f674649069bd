"""docs/scale.md: its scripts are valid, and what they run writes the output that one process writes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.cli import ROOT
from tests.pages import blocks_of, environment, run

yaml = pytest.importorskip("yaml")

PAGE = (ROOT / "docs" / "scale.md").read_text()
BLOCKS = blocks_of("docs/scale.md")
SCRIPTS = [block.text for block in BLOCKS if block.language == "bash"]
JOB = yaml.safe_load(next(block.text for block in BLOCKS if block.language == "yaml"))
RUN = ROOT / "examples" / "tiny-run"


SRUN = 'for i in 0 1 2; do SLURM_PROCID=$i SLURM_STEP_NUM_TASKS=3 "$@" || exit 1 & done\nwait\n'
"""Runs what it is given, at once."""


@pytest.fixture
def work(tmp_path: Path) -> dict[str, str]:
    """The environment in a folder with ./run."""
    (tmp_path / "run").symlink_to(RUN)
    return environment(tmp_path, srun=SRUN)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def is_the_output_of_one_process(work: dict[str, str]) -> bool:
    folder = Path(work["PWD"])
    run("ckpt merge ./run -o ./one --dtype bf16", work)
    return contents(folder / "model") == contents(folder / "one")


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_one(script: str) -> None:
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_one_allocation(work: dict[str, str]) -> None:
    run(next(script for script in SCRIPTS if "srun ckpt" in script), work)
    assert is_the_output_of_one_process(work)


@pytest.mark.slow
def test_verifying_in_one_allocation(work: dict[str, str]) -> None:
    """Three processes at once: one of them prints the result."""
    run("ckpt merge ./run -o ./model", work)
    done = run(next(script for script in SCRIPTS if "srun ckpt verify" in script), work)
    assert sorted(line.split(":")[0] for line in done.splitlines() if line.startswith(("part ", "result"))) in (
        [f"part {first} of 3", f"part {second} of 3", "result    ok"] for first, second in ((0, 1), (0, 2), (1, 2))
    )
    assert [path.name for path in Path(work["PWD"]).iterdir() if path.name.startswith(".")] == []


def test_verifying_in_an_array(work: dict[str, str]) -> None:
    """One part as a task of the array, the other as the command of an Indexed Job: the same document."""
    run("ckpt merge ./run -o ./model", work)
    for variable, task in (("SLURM_ARRAY_TASK_ID", "1"), ("JOB_COMPLETION_INDEX", "0")):
        script = next(script for script in SCRIPTS if "ckpt verify" in script and f"${variable}" in script)
        run(script.replace("/8", "/2"), {**work, variable: task, "SLURM_ARRAY_TASK_COUNT": "2"})
    gather = next(command for command in re.findall(r"--wrap '(.*?)'", PAGE) if "--gather" in command)
    assert "result    ok" in run(gather, work)


def test_an_array(work: dict[str, str]) -> None:
    script = next(script for script in SCRIPTS if "--array" in script)
    for task in (1, 0):
        run(script, {**work, "SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": "2"})
    run(re.search(r"--wrap '(.*?)'", PAGE)[1], work)  # type: ignore[index]
    assert is_the_output_of_one_process(work)


def test_an_indexed_job(work: dict[str, str]) -> None:
    template = JOB["spec"]["template"]["spec"]
    count = JOB["spec"]["completions"]
    shell, option, command = template["containers"][0]["command"]
    assert (JOB["spec"]["completionMode"], shell, option) == ("Indexed", "sh", "-c")
    assert f"$JOB_COMPLETION_INDEX/{count}" in command
    assert template["containers"][0]["volumeMounts"][0]["name"] == template["volumes"][0]["name"]
    for index in range(count):
        run(command, {**work, "JOB_COMPLETION_INDEX": str(index)})
    run("ckpt publish ./model", work)
    assert is_the_output_of_one_process(work)
