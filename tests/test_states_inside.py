"""The state of a training in step folders inside of the folder that holds its final model, and that of replicas beside a step."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
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


def tensors(value: float, **more: Any) -> dict[str, Any]:
    return {"layers.0.weight": torch.full((4, 4), value), "norm.weight": torch.full((4,), value), **more}


def fault_tolerant(run: Path, *steps: int, replicas: int = 2) -> Path:
    """What torchtitan leaves with torchft: the model as ever, and the dataloader of each replica in a folder of its own."""
    for step in steps:
        name = f"step-{step}"
        dcp.save(tensors(float(step), train_state={"step": step}), checkpoint_id=str(run / "checkpoint" / name), no_dist=True)
        for replica in range(replicas):
            folder = run / "checkpoint" / f"ft-replicat-{replica}" / name
            dcp.save({"dataloader": {"dp_rank_0": b"x" * 8, "world_size": 1}}, checkpoint_id=str(folder), no_dist=True)
    return run


class TestStateOfReplicasBesideTheStep:
    @pytest.mark.parametrize("given", ["", "checkpoint", "checkpoint/step-20"])
    def test_is_told_by_what_writes_state(self, given: str, tmp_path: Path) -> None:
        run = fault_tolerant(tmp_path / "run", 10, 20)
        first = run / "checkpoint" / "ft-replicat-0" / "step-20"
        alone = told(ckpt_cli.extract_state(run / given, tmp_path / "state").notes)
        merged = told(ckpt_cli.merge(run / given, tmp_path / "out", with_state=True).outputs[0].notes)
        for notes in (alone, merged):
            text = notes["state-beside"]
            assert text.startswith("ft-replicat-0/step-20/, ft-replicat-1/step-20/ beside step-20 hold no weights, but state"), text
            assert "(dataloader)" in text
            assert text.endswith(f"ckpt extract-state {first} reads the first")
        # What is named has it, and nothing more is said of it there.
        of_replica = ckpt_cli.extract_state(first, tmp_path / "first")
        assert of_replica.step == 20
        assert (tmp_path / "first" / "dataloader_state.pt").exists()
        assert "state-beside" not in told(of_replica.notes)

    def test_is_told_where_there_is_no_other(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        dcp.save(tensors(1.0), checkpoint_id=str(run / "step-20"), no_dist=True)
        dcp.save({"dataloader": {"world_size": 1}}, checkpoint_id=str(run / "of-replica-0" / "step-20"), no_dist=True)
        for command in (ckpt_cli.extract_state, partial(ckpt_cli.merge, with_state=True)):
            with pytest.raises(NotFound) as error:
                command(run, tmp_path / "out")
            assert any(f"ckpt extract-state {run / 'of-replica-0' / 'step-20'} reads it" in text for text in error.value.details)

    def test_is_no_run_of_its_own_that_went_on(self, tmp_path: Path) -> None:
        run = fault_tolerant(tmp_path / "run", 10, 20)
        shutil.copytree(run / "checkpoint" / "ft-replicat-0" / "step-20", run / "checkpoint" / "ft-replicat-0" / "step-30")
        for notes in (ckpt_cli.detect(run).checkpoint.notes, ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes):
            ((level, text),) = [(note.level, note.text) for note in notes if note.code == "run-below"]
            assert level == "info"
            assert "ft-replicat-0/ inside of this run holds steps of its own, up to step-30, that hold no weights" in text
        averaged = ckpt_cli.average(run, tmp_path / "average", last=2)
        assert "run-below" not in told(averaged.outputs[0].notes)

    def test_is_nothing_that_has_weights(self, tmp_path: Path) -> None:
        """A copy of the run, another run, an evaluation of the step."""
        run = tmp_path / "run"
        for folder in (run, run / "copy"):
            dcp.save(tensors(1.0, train_state={"step": 20}), checkpoint_id=str(folder / "step-20"), no_dist=True)
        (run / "eval" / "step-20").mkdir(parents=True)
        (run / "eval" / "step-20" / "results.json").write_text("{}")
        assert "state-beside" not in told(ckpt_cli.extract_state(run / "step-20", tmp_path / "state").notes)
