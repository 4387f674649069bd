"""docs/tutorial.md: its commands are run from top to bottom, and print what the page shows."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli import ROOT
from tests.pages import Block, blocks_of, environment, run, without_numbers

tomllib = pytest.importorskip("tomllib")

BLOCKS = blocks_of("docs/tutorial.md")
OFFLINE = {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
SERVE = (
    f'exec {sys.executable} -c \'import sys; from transformers.cli.transformers import main; sys.argv[0] = "transformers"; main()\' "$@"\n'
)


def marked(mark: str) -> Block:
    (block,) = [block for block in BLOCKS if block.mark == mark]
    return block


def test_what_it_installs_is_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"\.\[([\w,]+)\]", marked("install").text)
    assert set(named.split(",")) <= set(extras)


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the commands; its ``PWD`` is the folder in which all blocks ran that neither start a server nor watch."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "examples").mkdir()
    for name in ("train.py", "evaluate.py"):
        shutil.copy(ROOT / "examples" / name, folder / "examples")
    variables = {**environment(folder, transformers=SERVE), **OFFLINE}
    for block in BLOCKS[: BLOCKS.index(marked("live"))]:
        if block.language == "console":
            compare(block, variables)
        elif not block.mark:
            run(block.text, variables)
    return variables


def compare(block: Block, variables: dict[str, str]) -> None:
    """What is shown is printed, in this order; a screen may be cut short."""
    command, shown = block.text.removeprefix("$ ").split("\n", 1)
    printed = iter(without_numbers(run(command, variables)))
    assert [line for line in without_numbers(shown) if line not in printed] == [], command


@pytest.mark.slow
def test_the_server_answers_what_the_page_says(variables: dict[str, str]) -> None:
    pytest.importorskip("fastapi")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    script = marked("serve").text
    assert script.count("8000") == 2
    answer = run(script.replace("8000", port), variables)
    (promised,) = re.findall(r'The answer has `"text": ("[^`]*")`', (ROOT / "docs" / "tutorial.md").read_text())
    (given,) = re.findall(r'^\{"id".*\}', answer, re.MULTILINE)
    assert json.loads(given)["choices"][0]["text"] == json.loads(promised)


@pytest.mark.slow
def test_a_live_run_gives_a_metric_for_every_step(variables: dict[str, str]) -> None:
    """The watch is ended as by Ctrl-C when all steps of the training have a metric."""
    folder = Path(variables["PWD"])
    script = marked("live").text.replace("ckpt watch", "exec ckpt watch")
    watching = subprocess.Popen(["bash", "-ec", script], cwd=folder, env=variables)
    journal, metrics, end = folder / "live_merged" / "watch.jsonl", {}, time.monotonic() + 240
    try:
        while len(metrics) < 2 and time.monotonic() < end and watching.poll() is None:
            events = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
            metrics = {event["step"]: event["metrics"]["loss"] for event in events if event["event"] == "ran"}
            time.sleep(0.2)
    finally:
        watching.send_signal(signal.SIGINT)
        watching.wait(60)
    assert metrics.keys() == {80, 160}
    assert metrics[160] < metrics[80] < 1
    compare(BLOCKS[BLOCKS.index(marked("live")) + 1], variables)
