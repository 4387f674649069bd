"""The last line of a command is a command to copy: whatever is printed there runs as it stands, until nothing new is proposed."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_cli.cli import _run
from ckpt_cli.cli.text import options_again
from tests.cli import ROOT

HEAD = "next: "


def ran(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code, and what was said on stderr."""
    capsys.readouterr()
    code = _run(words)
    return code, capsys.readouterr().err


def proposed(said: str) -> str | None:
    """The command that a screen proposes; it is the last line."""
    lines = said.splitlines()
    found = [line for line in lines if line.startswith(HEAD)]
    assert found in ([], lines[-1:]), said
    return found[0].removeprefix(HEAD) if found else None


def follow(command: str, capsys: pytest.CaptureFixture[str], most: int = 6) -> list[str]:
    """All commands from this one on, each of which was run."""
    done: list[str] = []
    line: str | None = command
    while line is not None and line not in done and len(done) < most:
        program, *words = shlex.split(line)
        if program == "ls":
            assert Path(*words).is_dir()
            return [*done, line]
        code, said = ran(words, capsys)
        assert (program, code) == ("ckpt", 0), (done, line, said)
        done.append(line)
        line = proposed(said)
        assert line != done[-1], "it proposes itself"
    return done


BASE = "--base lora/base"
STARTS = (
    "detect run",
    "detect run --step 100 --type ema",
    "detect run --report",
    "inspect run --type both",
    "inspect run --type ema --step 100 --stats",
    "show run model.norm.weight --type ema --step 100",
    "show run model.norm.weight --slice :2",
    "show run model.layers.0.self_attn.q_proj.weight --slice=-4:,-4:",
    "detect run/checkpoint-100 --report",
    "detect run --report --drift --sample 50%",
    "show run model.embed_tokens.weight --step 100 --slice 0,0",
    "merge run --type both --dry-run",
    "merge run --step 100 --type ema -o 'out put' --max-shard-size 40KB --verify",
    "average run --all -o mean --dry-run",
    "extract-state run --dry-run",
    "verify run --step 100 --type ema",
    "verify run --step 100 --type ema --full",
    "scan run",
    "scan run/checkpoint-100",
    "scan one.pt",
    "diff run --steps 100,200",
    "diff run --steps 100 --type model,ema --plot map.svg",
    "diff run run/checkpoint-100 --type ema --sample 50% --include '*norm*'",
    "env",
    # -- adapters, which need a base
    "detect lora/lora_only",
    f"inspect lora/lora_only {BASE}",
    f"inspect lora/lora_only {BASE} --stats",
    f"merge lora/lora_only {BASE} --dry-run",
    f"merge lora/lora_only {BASE} --verify -o merged",
    f"merge lora/lora_only {BASE} --part 0/2 -o parts",
    "inspect lora/full",
    # -- folders of Hugging Face, several of them in a run
    "inspect hub --step 10",
    "inspect hub --step 10 --stats",
    "inspect hub/checkpoint-10",
    "verify hub --step 10",
    "diff hub --steps 10,20",
    "inspect one.pt",
    "detect two.pt --type b",
    "inspect two.pt --type b",
    "verify two.pt --type b",
    "show two.pt w --type b --slice 0",
    "merge two.pt --type b",
    "inspect grid/seven/ranks --shard-order tp-first",
    "detect zero/run",
    "inspect zero/run --stats",
)


@pytest.fixture(scope="module")
def place(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("next")
    shutil.copytree(ROOT / "examples" / "tiny-run", folder / "run")
    shutil.copytree(data / "layouts" / "verl-lora", folder / "lora")
    shutil.copytree(data / "layouts" / "mesh-grid", folder / "grid")
    shutil.copytree(data / "deepspeed" / "z3-bf16-w2", folder / "zero")
    for step in (10, 20):
        (folder / "hub" / f"checkpoint-{step}").mkdir(parents=True)
        save_file({"w": torch.full((4, 4), float(step))}, folder / "hub" / f"checkpoint-{step}" / "model.safetensors", {"format": "pt"})
    torch.save({"w": torch.ones(3)}, folder / "one.pt")
    torch.save({"model": {"w": torch.ones(3)}, "b": {"w": torch.ones(3, 3)}}, folder / "two.pt")
    return folder


@pytest.mark.parametrize("start", STARTS)
def test_it_runs_as_it_stands(start: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    shutil.copytree(place, tmp_path / "x")
    monkeypatch.chdir(tmp_path / "x")
    follow(f"ckpt {start}", capsys)


@pytest.mark.parametrize(
    ("start", "kept"),
    [
        (f"inspect lora/lora_only {BASE}", f"merge lora/lora_only {BASE}"),
        ("inspect grid/seven/ranks --shard-order tp-first", "merge grid/seven/ranks --shard-order tp-first"),
        ("show run model.norm.weight --slice : --step 100 --shard-order tp-first", "inspect run --step 100 --shard-order tp-first"),
        ("verify two.pt --type b --lora-alpha 4", "verify two.pt --type b --lora-alpha 4.0 --full"),
        ("verify two.pt --type b --lora-alpha 4 --full", "inspect two.pt --type b"),
    ],
    ids=str,
)
def test_options_that_say_how_it_is_read_are_kept(
    start: str, kept: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    code, said = ran(shlex.split(start), capsys)
    assert code == 0, said
    assert (proposed(said) or "").removeprefix("ckpt ").removesuffix(" --dry-run") == kept


def test_an_output_that_exists_is_never_replaced(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """What is proposed is copied without much thought, so nothing there is lost by it."""
    shutil.copytree(place / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert ran(["merge", "run"], capsys)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    for start in ("detect run", "detect run --report --drift --html page.html", "inspect run"):
        done = follow(f"ckpt {start}", capsys)
        assert any(line.startswith("ckpt merge") and "-o run/checkpoint-200_merged_" in line for line in done), done
        assert "--overwrite" not in " ".join(done)
    code, said = ran(["merge", "run", "--dry-run"], capsys)
    line = proposed(said) or ""
    assert (code, "--overwrite" in line, " -o " in line) == (5, False, True)
    follow(line, capsys)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_run_of_one_step_has_no_drift(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    shutil.copytree(place / "run" / "checkpoint-100", tmp_path / "one" / "checkpoint-100")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert _run(["detect", "one", "--report"]) == 0
    told = capsys.readouterr()
    assert "steps  1, which can be merged" in told.out
    assert proposed(told.err) == "ckpt detect one --report --html report.html"
    follow("ckpt detect one --report --html report.html", capsys)


def test_a_component_called_like_a_default_is_said_again() -> None:
    assert options_again(type="auto", step=None, shard_order="auto") == " --type auto"
    assert options_again(type=None, shard_order="tp-first", also=["a b", "c"]) == " --shard-order tp-first --also 'a b' --also c"
