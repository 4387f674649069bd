"""Two saves of one step in one folder, in two formats: the later one is never left behind in silence."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt_cli
from ckpt_cli.errors import Undecidable
from tests.conftest import Copy
from tests.megatron import arguments, write_legacy
from tests.tensors import Tensors, differences, load

pytestmark = pytest.mark.usefixtures("asked_here")

When = Literal["later", "earlier", "together"]
HOURS: dict[When, float] = {"later": 5, "earlier": -5, "together": 0}


def model(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {"embed.weight": torch.randn(16, 8, generator=generator), "layers.0.w.weight": torch.randn(8, 8, generator=generator)}


def written(files: list[Path], hours: float) -> None:
    """Give files the time of so many hours after a day ago."""
    seconds = time.time() + (hours - 24) * 3600
    for path in files:
        os.utime(path, (seconds, seconds))


def rank_files_and_dcp(folder: Path, other: Tensors, when: When, **more: Tensors) -> Path:
    """Files of ranks, which are read, and a DCP save of ``other`` weights."""
    step = folder / "global_step_3"
    step.mkdir(parents=True)
    torch.save(model(0), step / "model_world_size_1_rank_0.pt")
    written([step / "model_world_size_1_rank_0.pt"], 0)
    dcp.save({"model": other, **more}, checkpoint_id=str(step), no_dist=True)
    written([step / ".metadata", step / "__0_0.distcp"], HOURS[when])
    return step


def items_and_dcp(folder: Path, data: Path, when: When) -> Path:
    """Items of torch_checkpointing, which are read, and a DCP save of other weights."""
    step = Path(shutil.copytree(data / "torch-checkpointing" / "one-1" / "run" / "checkpoint" / "step-3", folder / "step-3"))
    written([path for path in step.iterdir() if path.is_file()], 0)
    others = {name: tensor + 1 for name, tensor in load_file(data / "torch-checkpointing" / "one-1" / "expected.safetensors").items()}
    dcp.save({"model": others}, checkpoint_id=str(step), no_dist=True)
    written([step / ".metadata", step / "__0_0.distcp"], HOURS[when])
    return step


def torch_dist_and_legacy(folder: Path, data: Path, when: When) -> Path:
    """A step of Megatron as torch_dist, which is read, and one in files of ranks."""
    case = data / "megatron" / "llama-tp1"
    step = Path(shutil.copytree(case / "checkpoint" / "iter_0000030", folder / "iter_0000030"))
    written(list(step.iterdir()), 0)
    weights = {name: tensor + 1 for name, tensor in load_file(case / "expected_native.safetensors").items()}
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers."))
    write_legacy(folder, weights, arguments(num_layers=layers), [[layers]], iteration=30)
    (folder / "latest_checkpointed_iteration.txt").unlink()
    written(list(step.glob("mp_rank_*/*")), HOURS[when])
    return step


SAVES = ("ranks", "items", "megatron")


def two_saves(kind: str, folder: Path, data: Path, when: When) -> Path:
    if kind == "ranks":
        return rank_files_and_dcp(folder, model(1), when)
    return items_and_dcp(folder, data, when) if kind == "items" else torch_dist_and_legacy(folder, data, when)


def notes_of(path: Path, out: Path) -> dict[str, tuple[str, str]]:
    notes = ckpt_cli.merge(path, out).checkpoint.notes
    return {note.code: (note.level, note.text) for note in notes if note.code in ("other-model", "other-weights", "passed-over")}


@pytest.mark.parametrize("kind", SAVES)
class TestOtherWeights:
    def test_that_were_saved_later_are_refused(self, kind: str, data: Path, tmp_path: Path) -> None:
        step = two_saves(kind, tmp_path / "run", data, "later")
        with pytest.raises(Undecidable, match=r"two saves are in one folder.*it was written 5 hours later") as caught:
            ckpt_cli.merge(step, tmp_path / "out")
        later = caught.value.hint.split(" for ")[0].removeprefix("pass ") if caught.value.hint else ""
        assert Path(later).is_file()
        ckpt_cli.merge(later, tmp_path / "later", names="native")
        ckpt_cli.detect(step)

    def test_that_were_saved_earlier_are_a_note(self, kind: str, data: Path, tmp_path: Path) -> None:
        level, text = notes_of(two_saves(kind, tmp_path / "run", data, "earlier"), tmp_path / "out")["passed-over"]
        assert level == "info"
        assert text.endswith("it was written 5 hours earlier")

    def test_of_the_same_time_are_a_warning(self, kind: str, data: Path, tmp_path: Path) -> None:
        level, text = notes_of(two_saves(kind, tmp_path / "run", data, "together"), tmp_path / "out")["other-model"]
        assert level == "warning"
        assert text.endswith("nothing tells which of the two was saved last")


def test_the_file_that_the_hint_names_has_the_later_weights(tmp_path: Path) -> None:
    step = rank_files_and_dcp(tmp_path / "run", model(1), "later")
    ckpt_cli.merge(step / "__0_0.distcp", tmp_path / "out")
    assert differences(load(tmp_path / "out"), model(1)) == []


def test_no_older_step_is_taken_in_place_of_two_saves(tmp_path: Path) -> None:
    step = rank_files_and_dcp(tmp_path / "run", model(1), "later")
    (step.parent / "global_step_2").mkdir()
    torch.save(model(0), step.parent / "global_step_2" / "model_world_size_1_rank_0.pt")
    with pytest.raises(Undecidable, match="two saves"):
        ckpt_cli.merge(step.parent, tmp_path / "out")


@pytest.mark.parametrize("when", ["later", "earlier"])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_same_weights_are_a_note_whenever_they_were_saved(when: When, rounded: bool, tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() if rounded else tensor for name, tensor in model(0).items()}
    step = rank_files_and_dcp(tmp_path / "run", weights, when)
    (code,) = notes_of(step, tmp_path / "out")
    assert code == "other-weights"
    assert differences(load(tmp_path / "out"), model(0)) == []


def test_a_group_of_one_form_is_not_compared_with_the_model_of_the_other(tmp_path: Path) -> None:
    """Files of ranks with a model and its average, and a DCP save of the same model alone."""
    step = tmp_path / "run" / "global_step_3"
    step.mkdir(parents=True)
    dcp.save({"model": model(0)}, checkpoint_id=str(step), no_dist=True)
    torch.save({"model": model(0), "ema": model(2)}, step / "model_world_size_1_rank_0.pt")
    assert not [note for note in ckpt_cli.merge(step, tmp_path / "out", type="ema").checkpoint.notes if note.code == "other-model"]


def test_what_cannot_be_read_of_a_later_save_is_a_warning(tmp_path: Path) -> None:
    step = rank_files_and_dcp(tmp_path / "run", model(1), "later")
    (step / "__0_0.distcp").write_bytes(b"")
    written([step / "__0_0.distcp"], 5)
    level, text = notes_of(step, tmp_path / "out")["other-model"]
    assert level == "warning"
    assert "was not compared, since it cannot be read" in text
    assert text.endswith("it was written 5 hours later")


def test_healthy_steps_have_one_form(copy: Copy, tmp_path: Path) -> None:
    for parts in (("layouts", "accelerate", "full"), ("layouts", "accelerate", "run"), ("megatron", "llama-tp2", "checkpoint")):
        assert not {"other-model", "passed-over"} & notes_of(copy(*parts), tmp_path / parts[-1] / parts[-2]).keys()


class TestStateOfTwoSaves:
    """Nothing tells which of the two a scheduler or a random state belongs to, but the weights beside it."""

    def step(self, folder: Path, when: When, other: int = 1) -> Path:
        step = rank_files_and_dcp(folder, model(other), when)
        torch.save({"lr_scheduler": {"last_epoch": 3}, "rng": {"cpu": torch.get_rng_state()}}, step / "extra_state_world_size_1_rank_0.pt")
        return step

    def test_is_refused_if_the_other_was_saved_later(self, tmp_path: Path) -> None:
        with pytest.raises(Undecidable, match="two saves are in one folder"):
            ckpt_cli.extract_state(self.step(tmp_path, "later"), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_of_the_same_time_is_a_warning(self, tmp_path: Path) -> None:
        result = ckpt_cli.extract_state(self.step(tmp_path, "together"), tmp_path / "out")
        assert [note.code for note in result.notes if note.level == "warning"] == ["other-model"]

    @pytest.mark.parametrize(("when", "other"), [("earlier", 1), ("later", 0), ("together", 0)])
    def test_is_written_if_the_other_is_older_or_the_same(self, when: When, other: int, tmp_path: Path) -> None:
        result = ckpt_cli.extract_state(self.step(tmp_path, when, other), tmp_path / "out")
        assert not [note for note in result.notes if note.level == "warning"]

    def test_is_written_if_the_weights_are_lost(self, tmp_path: Path) -> None:
        step = self.step(tmp_path, "later")
        (step / "model_world_size_1_rank_0.pt").write_bytes(b"")
        assert ckpt_cli.extract_state(step, tmp_path / "out").scheduler == {"last_epoch": 3}
