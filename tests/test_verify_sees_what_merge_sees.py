"""`verify` of a plain model folder says of downloads and of steps inside what `merge` of it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli

CODES = {"unfinished-download", "steps-inside", "second-copy", "mixed-commits"}


def model(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    save_file({f"layers.{layer}.weight": torch.randn(4, 4) for layer in range(3)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "own"}')
    return folder


def told(folder: Path, out: Path) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """What merge and verify say of the folder, of these kinds."""
    merged = ckpt_cli.merge(folder, out, dry_run=True)
    notes = [*merged.checkpoint.notes, *(note for output in merged.outputs for note in output.notes)]
    return (
        {(note.code, note.text) for note in notes if note.code in CODES},
        {(note.code, note.text) for note in ckpt_cli.verify(folder).notes if note.code in CODES},
    )


def part(suffix: str) -> Callable[[Path], object]:
    return lambda folder: (folder / f"tokenizer.json{suffix}").write_bytes(b"{")


def locked(folder: Path) -> None:
    kept = folder / ".cache" / "huggingface" / "download"
    kept.mkdir(parents=True)
    (kept / "tokenizer.json.lock").touch()


def steps(folder: Path) -> None:
    for number in (5, 10):
        model(folder / f"checkpoint-{number}", number)


def of_two_commits(folder: Path) -> None:
    kept = folder / ".cache" / "huggingface" / "download"
    kept.mkdir(parents=True)
    for name, digit in (("model.safetensors", "a"), ("config.json", "b")):
        (kept / f"{name}.metadata").write_text(f"{digit * 40}\netag\n{2e9}\n")


CASES = {
    ".incomplete": (part(".incomplete"), "unfinished-download"),
    ".aria2": (part(".aria2"), "unfinished-download"),
    ".part": (part(".part"), "unfinished-download"),
    ".crdownload": (part(".crdownload"), "unfinished-download"),
    "rclone": (part(".1a2b3c4d.partial"), "unfinished-download"),
    "lock of hf": (locked, "unfinished-download"),
    "steps": (steps, "steps-inside"),
    "second download": (lambda folder: (folder / "config (1).json").write_text("{}"), "second-copy"),
    "commits": (of_two_commits, "mixed-commits"),
}


@pytest.mark.parametrize("case", CASES)
def test_verify_says_what_merge_says(case: str, tmp_path: Path) -> None:
    make, code = CASES[case]
    folder = model(tmp_path / "model")
    make(folder)
    merged, verified = told(folder, tmp_path / "out")
    assert {kind for kind, _ in merged} == {code}
    assert verified == merged


def test_nothing_is_said_of_a_whole_folder(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (folder / "model.safetensors.part").write_bytes(b"x")  # what it was to be is there
    (folder / ".cache" / "huggingface" / "download").mkdir(parents=True)
    assert told(folder, tmp_path / "out") == (set(), set())


def test_steps_inside_of_a_step_are_told_once(tmp_path: Path) -> None:
    folder = model(tmp_path / "run" / "checkpoint-20")
    model(folder / "checkpoint-25", 1)
    assert [note.code for note in ckpt_cli.verify(folder).notes] == ["steps-inside"]
