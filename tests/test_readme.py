"""What README.md shows is what the commands print."""

from __future__ import annotations

import re
import shutil
from html import unescape
from pathlib import Path

import pytest

import ckpt_cli
from tests.cli import ROOT, ckpt

README = (ROOT / "README.md").read_text()
SHOWN = [block.split("\n", 1) for block in re.findall(r"```console\n\$ (ckpt .*?)```", README, re.DOTALL)]


def untimed(text: str) -> list[str]:
    return [re.sub(r" in [\d.]+ s\b", " in # s", line).rstrip() for line in text.splitlines() if line.strip()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands of README.md run: the example, also as ``./run``, and what the first command makes of it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "examples" / "tiny-run", tmp_path / "run")
    ckpt_cli.merge(tmp_path / "examples" / "tiny-run", tmp_path / "tiny-ema", type="ema", dtype="bf16")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_screens_are_what_the_commands_print(folder: Path, command: str, shown: str) -> None:
    if command.startswith("ckpt verify"):
        ckpt_cli.merge("run", type="ema", dtype="bf16")
    outcome = ckpt(*command.split()[1:], cwd=folder)
    printed = [*untimed(outcome.out), *untimed(outcome.err)]
    wanted = untimed(shown)
    assert (outcome.code, len(wanted) > 2) == (0, True)
    # A screen may be cut short: what is shown is there, in this order.
    rest = iter(printed)
    assert [line for line in wanted if line not in rest] == []


def test_what_the_example_says(folder: Path) -> None:
    """The model of the example was trained on four sentences."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained("tiny-ema"), AutoTokenizer.from_pretrained("tiny-ema")
    said = tokenizer.decode(model.generate(**tokenizer("A checkpoint is", return_tensors="pt"), max_new_tokens=40, do_sample=False)[0])
    assert said.removesuffix("<end>") == "A checkpoint is a set of named tensors, and a tensor is a list of pieces."


def test_the_lines_of_python_run(folder: Path) -> None:
    (block,) = re.findall(r"```python\n(import ckpt_cli\n.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    assert (folder / "merged" / "model.safetensors").is_file()
    assert len(names["first"]) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["merge", "drift"])
def test_the_pictures_show_what_the_commands_print(folder: Path, name: str) -> None:
    """`python docs/pictures/make.py` draws them again."""
    for suffix in ("", "-dark"):
        picture = (ROOT / "docs" / "pictures" / f"{name}{suffix}.svg").read_text()
        said = re.sub(r"[\s\xa0]+", " ", unescape(re.sub(r"<[^>]*>", " ", picture)))
        command = ["merge", "run", "--type", "ema", "--dtype", "bf16"] if name == "merge" else ["diff", "run", "--steps", "100,200"]
        for line in untimed(ckpt(*command, cwd=folder).out):
            words = re.sub(r"\s+", " ", re.sub(r" in # s|[▁▂▃▄▅▆▇█]+", "", line)).strip()
            assert all(word in said for word in words.split(" ")), line
        shutil.rmtree(folder / "run" / "checkpoint-200_merged_ema", ignore_errors=True)
