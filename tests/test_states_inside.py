"""The state of a training in step folders inside of the folder that holds its final model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import NotFound
from tests.tiny import classless

STEPS = ["checkpoint-700", "last-checkpoint"]


def model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(classless(num_hidden_layers=1)))
    save_file({"model.layers.0.weight": torch.ones(2, 3)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def saved(run: Path, step: str, *, arguments: bool = True) -> Path:
    """What `save_model` or `push_to_hub` leaves in the folder of a run, with the last step in it."""
    inner = model(model(run) / step)
    (inner / "trainer_state.json").write_text(json.dumps({"global_step": 700, "max_steps": 700}))
    torch.save({"last_epoch": 700}, inner / "scheduler.pt")
    torch.save({"state": {}, "param_groups": []}, inner / "optimizer.pt")
    if arguments:
        torch.save({}, run / "training_args.bin")
    return run


def told(notes: object) -> dict[str, str]:
    return {note.code: note.text for note in notes if note.level == "warning"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", STEPS)
class TestStateInAStepFolder:
    def test_is_told_where_the_folder_around_it_is_read(self, step: str, tmp_path: Path) -> None:
        run = saved(tmp_path / "run", step)
        alone = ckpt_cli.extract_state(run, tmp_path / "state", dry_run=True)
        assert str(run / step) in told(alone.notes)["state-inside"]
        merged = ckpt_cli.merge(run, tmp_path / "out", with_state=True, dry_run=True)
        assert str(run / step) in told(merged.outputs[0].notes)["state-inside"]
        assert "state-inside" not in told(ckpt_cli.merge(run, tmp_path / "out", dry_run=True).outputs[0].notes)
        # What is named has it.
        assert "state-inside" not in told(ckpt_cli.extract_state(run / step, tmp_path / "state", dry_run=True).notes)

    @pytest.mark.parametrize("arguments", [True, False])
    def test_is_where_an_optimizer_may_be(self, step: str, arguments: bool, tmp_path: Path) -> None:
        run = saved(tmp_path / "run", step, arguments=arguments)
        with pytest.raises(NotFound) as error:
            ckpt_cli.extract_state(run, tmp_path / "state", optimizer=True)
        assert f"pass {run / step}, which holds training state" in str(error.value.hint)
        # Without the option there is something to write only where there is some state.
        assert ("leave out --optimizer" in str(error.value.hint)) == arguments
        if not arguments:
            with pytest.raises(NotFound) as error:
                ckpt_cli.extract_state(run, tmp_path / "state")
            assert error.value.hint == f"pass {run / step}, which holds training state"


def test_step_folders_without_state_are_told_as_by_merge(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", STEPS[0])
    for name in ("trainer_state.json", "scheduler.pt", "optimizer.pt"):
        (run / STEPS[0] / name).unlink()
    merged = told(ckpt_cli.merge(run, tmp_path / "out", dry_run=True).checkpoint.notes)["steps-inside"]
    assert told(ckpt_cli.extract_state(run, tmp_path / "state", dry_run=True).notes)["steps-inside"] == merged


def test_outputs_of_ckpt_are_no_state_of_the_training(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", STEPS[0])
    ckpt_cli.extract_state(run / STEPS[0], run / "checkpoint-700_state")
    shutil.rmtree(run / STEPS[0])
    assert "state-inside" not in told(ckpt_cli.extract_state(run, tmp_path / "state", dry_run=True).notes)


def test_the_last_save_is_named_in_a_report(tmp_path: Path) -> None:
    alone = saved(tmp_path / "alone", STEPS[1])
    assert "last-checkpoint/" in told(ckpt_cli.report(alone).notes)["state-inside"]
    beside = saved(tmp_path / "beside", STEPS[1])
    saved(beside, STEPS[0])
    (beside / "model.safetensors").unlink()
    assert "last-checkpoint/" in told(ckpt_cli.report(beside).notes)["uncounted"]
    shutil.rmtree(beside / STEPS[1])
    assert not told(ckpt_cli.report(beside).notes)
