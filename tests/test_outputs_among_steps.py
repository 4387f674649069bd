"""Outputs under their default names, which a training that goes on would count among its steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli import progress
from ckpt_cli.cli.live import Bar, make_progress
from ckpt_cli.cli.session import Session
from ckpt_cli.progress import Silent


def trainer(run: Path, steps: tuple[int, ...], last: int, *, stopped: bool = False) -> Path:
    """Steps as the Trainer saves them, which wants ``last`` of them."""
    for number in steps:
        step = run / f"checkpoint-{number}"
        step.mkdir(parents=True)
        save_file({"a.weight": torch.ones(2, 3)}, step / "model.safetensors", metadata={"format": "pt"})
        torch.save({"last_epoch": number}, step / "scheduler.pt")
        control = {"TrainerControl": {"args": {"should_training_stop": stopped}, "attributes": {}}}
        state = {"global_step": number, "max_steps": last, "stateful_callbacks": control}
        (step / "trainer_state.json").write_text(json.dumps(state))
    return run


def accelerate(run: Path) -> Path:
    for number in range(2):
        step = run / "checkpoints" / f"checkpoint_{number}"
        step.mkdir(parents=True)
        save_file({"a.weight": torch.ones(2, 3)}, step / "model.safetensors", metadata={"format": "pt"})
        torch.save({"step": number}, step / "random_states_0.pkl")
    return run / "checkpoints"


def told(notes: Any) -> list[str]:
    return [note.text for note in notes if note.code == "output-among-steps" and note.level == "warning"]


def merged(path: Path, *output: Path, **options: Any) -> list[str]:
    return told(ckpt_cli.merge(path, *output, dry_run=True, **options).outputs[0].notes)


class TestAnOutputAmongTheStepsOfATraining:
    @pytest.mark.parametrize("step", ["", "checkpoint-100", "checkpoint-200"])
    def test_is_told_if_that_goes_on(self, step: str, tmp_path: Path) -> None:
        run = trainer(tmp_path / "run", (100, 200), 300)
        (text,) = merged(run / step)
        assert f"{step or 'checkpoint-200'}_merged" in text
        assert "step 200 of 300" in text
        assert told(ckpt_cli.extract_state(run / step, dry_run=True).notes)
        # The advice holds.
        assert not merged(run / step, tmp_path / "out")
        assert not told(ckpt_cli.extract_state(run / step, tmp_path / "out", dry_run=True).notes)
        assert not merged(run / "checkpoint-100", in_place=True, weights_name="other.safetensors")

    @pytest.mark.parametrize("stopped", [True, False])
    def test_is_not_told_if_that_is_over(self, stopped: bool, tmp_path: Path) -> None:
        run = trainer(tmp_path / "run", (100, 200), 300 if stopped else 200, stopped=stopped)
        assert not merged(run)
        assert not merged(run / "checkpoint-100")

    @pytest.mark.parametrize("content", ["", "[]", '{"global_step": "1"}', '{"global_step": 3}'])
    def test_is_not_told_where_nothing_is_known(self, content: str, tmp_path: Path) -> None:
        run = trainer(tmp_path / "run", (100,), 300)
        (run / "checkpoint-100" / "trainer_state.json").write_text(content)
        assert not merged(run)

    def test_is_told_of_steps_that_accelerate_names(self, tmp_path: Path) -> None:
        steps = accelerate(tmp_path / "run")
        (text,) = merged(steps)
        assert "total_limit" in text
        # Only what it named itself does it count.
        assert not merged(steps.rename(tmp_path / "run" / "steps"))

    def test_is_one_for_the_trainer(self, tmp_path: Path) -> None:
        rotate = pytest.importorskip("transformers.trainer_utils").rotate_checkpoints
        run = trainer(tmp_path / "run", (100, 200), 300)
        output = Path(ckpt_cli.merge(run).outputs[0].output)
        rotate(str(run), save_total_limit=2)
        assert {path.name for path in run.iterdir()} == {"checkpoint-200", output.name}


class Told(Silent):
    """What is shown, in its order."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def warning(self, code: str, text: str) -> None:
        self.shown.append(code)

    def start(self, total_bytes: int, label: str) -> None:
        self.shown.append("start")


class TestBeforeMuchIsWritten:
    @pytest.mark.parametrize("long", [True, False])
    def test_it_is_told_while_that_can_be_stopped(self, long: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if long:
            monkeypatch.setattr(progress, "LONG", 1)
        run, told_first = trainer(tmp_path / "run", (100, 200), 300), Told()
        result = ckpt_cli.merge(run, progress=told_first)
        assert told_first.shown[:1] == (["output-among-steps"] if long else ["start"])
        assert "start" in told_first.shown
        assert told(result.outputs[0].notes)  # in any case

    def test_displays_show_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        for mode, shown in (
            ("plain", "warning: where it lies\n"),
            ("json", '{"event": "warning", "code": "c", "text": "where it lies"}\n'),
        ):
            progress.stages(make_progress(Session("merge", progress=mode))).warning("c", "where it lies")  # type: ignore[arg-type]
            assert capsys.readouterr().err == shown
        Bar(Session("merge")).warning("c", "where it lies")
        assert capsys.readouterr().err == "warning: where it lies\n"
