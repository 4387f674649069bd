"""A step behind a link of its own name: what lies around it in its run is found, wherever the link is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli

STEP = "checkpoint-2"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / STEP).mkdir(parents=True)
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "run" / STEP / "model.safetensors")
    return tmp_path / "run"


def config(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "run": name}))
    return folder


def taken(path: Path | str, out: Path, base: Path | None = None) -> str:
    ckpt_cli.merge(path, out, base=base)
    return str(json.loads((out / "config.json").read_text())["run"])


def test_the_config_of_its_run_goes_before_those_around_the_link_and_of_the_base(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(run, "its own")
    work, sister = tmp_path / "work", config(tmp_path / "sister", "the sister's")
    work.mkdir()
    save_file({"a.weight": torch.ones(2, 2)}, config(tmp_path / "base", "the base's") / "model.safetensors")
    for number, folder in enumerate((work, sister)):
        (folder / STEP).symlink_to(run / STEP)
        assert taken(folder / STEP, tmp_path / f"out{number}", tmp_path / "base") == "its own"
        monkeypatch.chdir(folder)
        assert taken(STEP, tmp_path / f"here{number}") == "its own"


def test_of_a_step_that_was_moved_to_another_disk_that_of_the_link_counts(run: Path, tmp_path: Path) -> None:
    config(run, "its own")
    (tmp_path / "disk").mkdir()
    (run / STEP).rename(tmp_path / "disk" / STEP)
    (run / STEP).symlink_to(tmp_path / "disk" / STEP)
    assert taken(run, tmp_path / "out") == taken(run / STEP, tmp_path / "again") == "its own"
