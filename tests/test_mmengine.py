"""Runs of mmengine: steps called like files, as files or, with DeepSpeed, as folders, and `last_checkpoint`, which names the newest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Undecidable
from ckpt_cli.formats.step_names import counter_of, is_like_step, step_of


def with_deepspeed(folder: Path, value: float) -> None:
    """A save of DeepSpeed, of stage 0."""
    folder.mkdir(parents=True)
    states = {"module": {"w": torch.full((2, 3), value)}, "ds_version": "0.16.0", "dp_world_size": 1, "mp_world_size": 1, "optimizer": None}
    torch.save(states, folder / "mp_rank_00_model_states.pt")


def run(folder: Path, *, deepspeed: bool, form: str = "iter_{}.pth") -> Path:
    folder.mkdir()
    for step in (500, 1000):
        path = folder / form.format(step)
        if deepspeed:
            with_deepspeed(path, float(step))
        else:
            torch.save({"meta": {"iter": step}, "state_dict": {"w": torch.full((2, 3), float(step))}}, path)
    (folder / "last_checkpoint").write_text(f"/gone/work_dirs/{form.format(1000)}")
    return folder


@pytest.mark.parametrize("deepspeed", [False, True])
@pytest.mark.parametrize("form", ["iter_{}.pth", "epoch_{}.pth"])
def test_the_newest_step_is_taken_and_all_are_averaged(deepspeed: bool, form: str, tmp_path: Path) -> None:
    path = run(tmp_path / "run", deepspeed=deepspeed, form=form)
    found = ckpt_cli.detect(path).checkpoint
    assert (found.step, [each.step for each in found.steps]) == (1000, [500, 1000])
    assert found.framework == ("mmengine with DeepSpeed" if deepspeed else "mmengine")
    assert not [note for note in found.notes if note.level == "warning"]
    assert ckpt_cli.open(path)["w"].torch().unique().item() == 1000
    ckpt_cli.average([path], tmp_path / "out", everything=True)
    assert ckpt_cli.open(tmp_path / "out")["w"].torch().unique().item() == 750


def test_a_step_that_the_tracker_names_and_is_gone_is_told(tmp_path: Path) -> None:
    path = run(tmp_path / "run", deepspeed=True)
    (path / "last_checkpoint").write_text("/gone/work_dirs/iter_1500.pth")
    (text,) = (note.text for note in ckpt_cli.detect(path).checkpoint.notes if note.code == "tracker")
    assert "1500" in text


def test_saves_that_nothing_counts_are_not_called_one_checkpoint(tmp_path: Path) -> None:
    for number, name in enumerate(("first", "second")):
        with_deepspeed(tmp_path / "run" / name, float(number))
    with pytest.raises(Undecidable, match="there are 2 saves in this folder"):
        ckpt_cli.average([tmp_path / "run"], tmp_path / "out", everything=True)


def test_a_suffix_is_no_word_of_steps() -> None:
    assert counter_of(Path("epoch_3.pth")) == "epochs"
    assert (step_of(Path("iter_40.pth")), step_of(Path("iter_40.pt"))) == (40, None)
    assert not is_like_step("model.pth")
