"""A run inside of a run: a copy that landed in the one it was meant to replace, or a training that went on there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ckpt_cli
from tests.test_inner_steps import rank_files
from tests.test_steps import HOUR, NOW, model, told
from tests.test_uncounted_steps import of_every_command

CODE = "run-below"


class TestARunInsideOfARun:
    """Its steps are not those of the run around it, and every command called the newest of these the newest of all."""

    @pytest.mark.parametrize(
        ("outer", "inner"),
        [
            ("checkpoint-100", "run/checkpoint-200"),
            ("checkpoint-100", "my-sft-run/checkpoint-200"),
            ("checkpoint-100", "lora-stage/checkpoint-200"),
            ("global_step_100", "project/experiment/global_step_200"),
            ("checkpoint-100", "stage2/epoch_2"),
        ],
    )
    def test_that_goes_further_is_named_by_every_command(self, tmp_path: Path, outer: str, inner: str) -> None:
        run = tmp_path / "run"
        for step in (outer.replace("100", "50"), outer):
            model(run / step, 1.0)
        newest = model(run / inner, 2.0)
        for command, notes in of_every_command(run, tmp_path / "out", CODE).items():
            ((level, text),) = notes
            assert level == "warning", command
            assert f"{Path(inner).parent}/ inside of this run" in text, command
            assert f"up to {newest.name}" in text, command
            assert text.endswith(f"passing {newest.parent}"), command
        # What the warning says is true.
        assert Path(ckpt_cli.detect(newest.parent).checkpoint.path) == newest

    def test_is_named_by_extract_state(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        for step, number in (("checkpoint-100", 100), ("run/checkpoint-200", 200)):
            model(run / step, 1.0, state=number)
        ((level, text),) = told(ckpt_cli.extract_state(run, tmp_path / "state").notes, CODE)
        assert (level, "checkpoint-200" in text) == ("warning", True)

    def test_that_ends_with_the_same_step_is_compared(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        for step in (100, 200):
            rank_files(run / f"checkpoint-{step}", float(step))
        shutil.copytree(run, tmp_path / "copy")
        inner = Path(shutil.move(tmp_path / "copy", run / "run"))
        ((level, text),) = told(ckpt_cli.detect(run).checkpoint.notes, CODE)
        assert (level, "the same weights" in text) == ("info", True)
        rank_files(inner / "checkpoint-200", 7.0)
        ((level, text),) = told(ckpt_cli.detect(run).checkpoint.notes, CODE)
        assert (level, "other values" in text) == ("warning", True)
        (inner / "checkpoint-200" / "model_world_size_2_rank_1.pt").unlink()
        ((level, text),) = told(ckpt_cli.detect(run).checkpoint.notes, CODE)
        assert (level, "was not compared" in text) == ("warning", True)

    def test_that_is_older_is_a_remark_unless_it_was_written_later(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-200", 1.0, time=NOW)
        inner = model(run / "run" / "checkpoint-100", 1.0, time=NOW)
        assert [level for level, _ in told(ckpt_cli.detect(run).checkpoint.notes, CODE)] == ["info"]
        os.utime(inner / "model.safetensors", (NOW + 2 * HOUR,) * 2)
        ((level, text),) = told(ckpt_cli.detect(run).checkpoint.notes, CODE)
        assert (level, "written later" in text) == ("warning", True)

    def test_whose_newest_step_cannot_be_looked_at_is_named(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-100", 1.0)
        (run / "run").mkdir()
        (run / "run" / "checkpoint-200").symlink_to(tmp_path / "nowhere")
        ((level, text),) = told(ckpt_cli.detect(run).checkpoint.notes, CODE)
        assert (level, "checkpoint-200" in text) == ("warning", True)


class TestNothingIsSaidOf:
    def test_ordinary_folders(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-100", 1.0)
        for logs in ("runs/Nov30_host", "wandb/run-1/files", "tensorboard", "logs/step_500", "eval/checkpoint-900"):
            (run / logs).mkdir(parents=True)
            (run / logs / "events.out").touch()
        model(run / "eval" / "checkpoint-900", 1.0)
        model(run / "base-model", 1.0)
        ckpt_cli.merge(run, run / "merged" / "checkpoint-900")
        (run / "this").symlink_to(run)
        assert told(ckpt_cli.detect(run).checkpoint.notes, CODE) == []

    def test_a_step_that_was_asked_for(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-100", 1.0)
        model(run / "run" / "checkpoint-200", 1.0)
        assert told(ckpt_cli.detect(run, step=100).checkpoint.notes, CODE) == []
        assert told(ckpt_cli.detect(run / "checkpoint-100").checkpoint.notes, CODE) == []

    @pytest.mark.parametrize("name", ["old_run", "backup", "ema", "critic", "reference"])
    def test_an_older_copy_or_another_model_but_a_remark(self, tmp_path: Path, name: str) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-100", 1.0)
        model(run / name / "checkpoint-900", 1.0)
        assert {level for level, _ in told(ckpt_cli.detect(run).checkpoint.notes, CODE)} <= {"info"}
