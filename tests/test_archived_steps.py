"""Steps that were put into archives, as people do to save inodes, are never passed over without a word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import NotFound


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (100, 200, 300, 400):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"a.weight": torch.full((2, 2), float(step))}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        torch.save({"last_epoch": step}, folder / "scheduler.pt")
    return tmp_path / "run"


def archived(run: Path, step: int, form: str, suffix: str = "") -> None:
    name = str(run / f"checkpoint-{step}")
    made = Path(shutil.make_archive(name, form, run, f"checkpoint-{step}"))
    if suffix:
        made.rename(f"{name}{suffix}")
    shutil.rmtree(name)


def skipped(notes: object) -> list[str]:
    return [note.text for note in notes if note.code == "step-skipped" and note.level == "warning"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("form", "suffix"), [("tar", ""), ("zip", ""), ("gztar", ""), ("gztar", ".tgz"), ("tar", ".tar.zst")])
def test_the_newest_is_skipped_with_a_warning(run: Path, tmp_path: Path, form: str, suffix: str) -> None:
    archived(run, 400, form, suffix)
    said = "checkpoint-400 is skipped: it is in an archive, checkpoint-400."
    merged = ckpt_cli.merge(run, tmp_path / "out")
    assert merged.checkpoint.step == 300
    for notes in (
        merged.checkpoint.notes,
        ckpt_cli.detect(run).checkpoint.notes,
        ckpt_cli.extract_state(run, tmp_path / "state").notes,
        ckpt_cli.average(run, tmp_path / "mean", last=2).notes,
    ):
        assert [text.startswith(said) for text in skipped(notes)] == [True]
    with pytest.raises(NotFound, match="this step is in an archive"):
        ckpt_cli.merge(run, tmp_path / "none", step=400)
    assert "in an archive" in str(ckpt_cli.report(run))


def test_one_between_those_of_an_average_is_told(run: Path, tmp_path: Path) -> None:
    archived(run, 300, "gztar")
    result = ckpt_cli.average(run, tmp_path / "mean", last=3)
    assert [text.split(":")[0] for text in skipped(result.notes)] == ["checkpoint-300 is skipped"]
    assert torch.equal(load_file(tmp_path / "mean" / "model.safetensors")["a.weight"], torch.full((2, 2), 700 / 3))


def test_older_ones_and_copies_of_what_is_there_are_not(run: Path, tmp_path: Path) -> None:
    archived(run, 100, "tar")
    shutil.make_archive(str(run / "checkpoint-400"), "zip", run, "checkpoint-400")
    result = ckpt_cli.merge(run, tmp_path / "out")
    assert (result.checkpoint.step, skipped(result.checkpoint.notes)) == (400, [])
    assert skipped(ckpt_cli.average(run, tmp_path / "mean", last=3).notes) == []


def test_one_that_dvc_has_elsewhere_is_told(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoint-400")
    (run / "checkpoint-400.dvc").write_text("outs:\n- md5: 0123456789abcdef0123456789abcdef.dir\n  path: checkpoint-400\n")
    (run / "checkpoint-300.dvc").write_text("outs: []\n")  # that folder was pulled
    said = ["checkpoint-400 is skipped: it is elsewhere, as checkpoint-400.dvc says: pull it with DVC, to use it"]
    assert skipped(ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes) == said
    assert skipped(ckpt_cli.average(run, tmp_path / "mean", last=2).notes) == said
    with pytest.raises(NotFound, match="this step is elsewhere, as checkpoint-400"):
        ckpt_cli.merge(run, tmp_path / "none", step=400)
    assert "elsewhere, as checkpoint-400.dvc says" in str(ckpt_cli.report(run))
