"""Scheduler and optimizer of an older save beside a newer trainer_state.json, as a copy that compares sizes alone leaves them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.discover.counters import renamed_notes
from ckpt_cli.discover.found import Found
from tests import tiny

OLDER = "trainer_state.json is of step {}, but {}"


def step(folder: Path, total: int, *, scheduler: int | None, optimizer: Sequence[float] | None, rate: float = 1e-4, **more: Any) -> Path:
    """A save of the Trainer; ``optimizer`` are the steps that it counts for each parameter."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tiny.classless()))
    torch.save({f"layers.{number}.weight": torch.randn(4, 4) for number in range(3)}, folder / "pytorch_model.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": total, "log_history": [], **more}))
    if scheduler is not None:
        torch.save({"last_epoch": scheduler, "_step_count": scheduler + 1, "_last_lr": [rate]}, folder / "scheduler.pt")
    if optimizer is not None:
        state = {number: {"step": torch.tensor(float(count)), "exp_avg": torch.zeros(4, 4)} for number, count in enumerate(optimizer)}
        group = {"lr": rate, "params": [0, 1, 2]}
        torch.save({"state": state, "param_groups": [group]}, folder / "optimizer.pt")
    return folder


def told(folder: Path, *, optimizer: bool = True) -> list[set[str]]:
    """What detect, merge with the state and extract-state with the optimizer say of it."""
    merged = ckpt_cli.merge(folder, folder.parent / "out", with_state=True, overwrite=True)
    state = ckpt_cli.extract_state(folder, folder.parent / "state", optimizer=optimizer, overwrite=True)
    notes = (ckpt_cli.detect(folder).checkpoint.notes, [*merged.checkpoint.notes, *merged.outputs[0].notes], state.notes)
    assert all(len(texts) == len(set(texts)) for texts in ([note.text for note in held if note.code == "step-differs"] for held in notes))
    return [{note.text for note in held if note.code == "step-differs" and note.level == "warning"} for held in notes]


def log(last: int, rate: float = 1e-3, *, late: int = 0) -> list[dict[str, Any]]:
    """A rate that falls, logged every 10 steps, ``late`` steps after the scheduler had it."""
    return [{"step": number, "learning_rate": rate * (1 - (number - late) / 1000), "loss": 1.0} for number in range(10, last + 1, 10)]


def rate_at(number: int) -> float:
    return 1e-3 * (1 - number / 1000)


class TestFilesOfTwoSaves:
    @pytest.mark.parametrize("name", ["last-checkpoint", "checkpoint-200"])
    def test_are_told_by_every_command(self, name: str, tmp_path: Path) -> None:
        texts = told(step(tmp_path / name, 200, scheduler=100, optimizer=[100, 100, 100]))
        assert texts[0] == texts[1] == texts[2]
        (text,) = texts[0]
        assert text.startswith(OLDER.format(200, "scheduler.pt and the optimizer are of step 100"))
        assert "unless training went on at step 100 with a new optimizer" in text

    def test_of_a_newer_optimizer(self, tmp_path: Path) -> None:
        (text,) = told(step(tmp_path / "last", 100, scheduler=200, optimizer=[200, 150, 200]))[0]
        assert text.startswith(OLDER.format(100, "scheduler.pt and the optimizer are of step 200"))
        assert "unless" not in text

    def test_that_a_few_steps_lie_between(self, tmp_path: Path) -> None:
        """Saves every 25 steps: steps that were left out hardly end at the number of a save."""
        assert all(told(step(tmp_path / "last", 1000, scheduler=975, optimizer=[975] * 3, save_steps=25)))

    @pytest.mark.parametrize("late", [0, 1])
    def test_that_only_the_learning_rate_shows(self, late: int, tmp_path: Path) -> None:
        folder = step(tmp_path / "last", 200, scheduler=100, optimizer=None, rate=rate_at(100 - late), log_history=log(200, late=late))
        (text,) = told(folder, optimizer=False)[0]
        assert text.startswith(OLDER.format(200, "scheduler.pt is of step 100, by its learning rate too"))

    def test_where_the_optimizer_alone_is_older(self, tmp_path: Path) -> None:
        """Only an optimizer that is read shows it: merge reads none where nothing else is odd."""
        *others, state = told(step(tmp_path / "last", 200, scheduler=200, optimizer=[100] * 3, save_steps=100))
        assert others == [set(), set()]
        (text,) = state
        assert text.startswith(OLDER.format(200, "the optimizer has taken 100 steps"))

    def test_of_several_ranks(self, layouts: Path, tmp_path: Path) -> None:
        """The optimizer is in a DCP folder of its own, as FSDP saves it."""
        folder = shutil.copytree(layouts / "accelerate" / "run" / "checkpoint-7", tmp_path / "last")
        assert not any(told(folder))
        content = json.loads((folder / "trainer_state.json").read_text())
        (folder / "trainer_state.json").write_text(json.dumps({**content, "global_step": 107}))
        torch.save({"last_epoch": 1, "_step_count": 2}, folder / "scheduler.pt")  # the optimizer of this fixture has taken one step
        *_, state = told(folder)
        assert any(text.startswith(OLDER.format(107, "scheduler.pt and the optimizer are of step")) for text in state)

    def test_that_a_format_counts_itself(self, tmp_path: Path) -> None:
        """DeepSpeed and Megatron record a step beside the weights, where the name of the folder has none."""
        folder = step(tmp_path / "last", 200, scheduler=200, optimizer=None)
        component: Any = SimpleNamespace(step=100)
        (note,) = renamed_notes(Found(folder, None, ()), [component])
        assert note.text == "trainer_state.json is of step 200, but the files of the weights of 100: files of two saves are mixed"
        component.step = 200
        assert renamed_notes(Found(folder, None, ()), [component]) == []


class TestCountsThatDifferInOneSave:
    @pytest.mark.parametrize(
        ("scheduler", "optimizer"),
        [
            (200, [200, 200, 200]),
            (200, [200, 20, 0]),  # experts that few tokens are sent to
            (800, [200, 200, 200]),  # accelerate, on four processes
            (4, [200, 200, 200]),  # ReduceLROnPlateau counts evaluations, others epochs
            (193, [193, 193, 193]),  # gradients that overflowed
            (200, [800, 800, 800]),  # several passes over each batch
            (200, [150, 150, 150]),  # an optimizer that was started anew
            (4, [150, 150, 150]),
            (None, [150, 150, 150]),
            (200, None),
            (100, None),
        ],
    )
    def test_is_not_told(self, scheduler: int | None, optimizer: list[float] | None, tmp_path: Path) -> None:
        folder = step(tmp_path / "last", 200, scheduler=scheduler, optimizer=optimizer, save_steps=100)
        assert not any(told(folder, optimizer=optimizer is not None))

    def test_is_not_where_the_learning_rate_is_the_last_one(self, tmp_path: Path) -> None:
        """Training went on from step 100 with a new optimizer and a new schedule."""
        history = [*log(100), *({**entry, "step": entry["step"] + 100} for entry in log(100))]
        assert not any(told(step(tmp_path / "a", 200, scheduler=100, optimizer=[100] * 3, rate=rate_at(100), log_history=history)))
        history[9] = {**history[9], "learning_rate": 0.5}
        assert not any(told(step(tmp_path / "b", 200, scheduler=100, optimizer=[100] * 3, rate=rate_at(100), log_history=history)))

    def test_is_not_of_other_counters(self, tmp_path: Path) -> None:
        """Without trainer_state.json nothing says what the number of a folder counts: batches, of which several make a step."""
        folder = step(tmp_path / "step_200", 200, scheduler=100, optimizer=[100] * 3)
        (folder / "trainer_state.json").unlink()
        assert not any(told(folder))
