"""Several models of one accelerate step, their optimizers and schedulers; states of other ranks; numbers among weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckpt_cli


def codes(result: Any, level: str = "warning") -> set[str]:
    notes = result.notes if hasattr(result, "notes") else result.checkpoint.notes
    return {note.code for note in notes if note.level == level}


def two_models(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number, name in enumerate(("", "_1")):
        torch.save({"w": torch.full((2, 3), float(number))}, folder / f"pytorch_model_fsdp{name}.bin")
        slots = {"exp_avg": torch.full((2, 3), float(number)), "step": torch.tensor(1.0)}
        torch.save({"state": {"w": slots}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}, folder / f"optimizer{name}.bin")
        torch.save({"last_epoch": 3 + number}, folder / f"scheduler{name}.bin")
    return folder


class TestModels:
    def test_each_number_is_a_component(self, tmp_path: Path) -> None:
        folder = two_models(tmp_path / "checkpoint_3")
        assert [c.name for c in ckpt_cli.detect(folder).checkpoint.components] == ["model", "model_1"]
        assert "other-models" in codes(ckpt_cli.merge(folder, tmp_path / "main"))
        merged = ckpt_cli.merge(folder, type="all")
        assert "other-models" not in codes(merged)
        assert [load_file(f"{out.output}/model.safetensors")["w"][0, 0].item() for out in merged.outputs] == [0.0, 1.0]

    def test_number_zero_is_not_there(self, tmp_path: Path) -> None:
        folder = two_models(tmp_path / "checkpoint_3")
        (folder / "pytorch_model_fsdp.bin").unlink()
        result = ckpt_cli.merge(folder)
        assert result.outputs[0].component == "model_1"
        assert "no-first-model" in codes(result)

    def test_files_of_ranks(self, layouts: Path, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoint-7"
        shutil.copytree(layouts / "accelerate" / "rank_files", folder)
        for path in sorted(folder.glob("pytorch_model_fsdp_0_rank*.bin")):
            shutil.copy(path, folder / path.name.replace("_0_", "_1_"))
        result = ckpt_cli.merge(folder, tmp_path / "out", type="all")
        assert [out.component for out in result.outputs] == ["model", "model_1"]
        one = ckpt_cli.merge(folder / "pytorch_model_fsdp_1_rank1.bin", tmp_path / "one")
        assert "other-model" not in codes(one)

    def test_two_folders_of_one_component(self, layouts: Path, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoint-7"
        shutil.copytree(layouts / "accelerate" / "run" / "checkpoint-7", folder)
        shutil.copytree(folder / "pytorch_model_fsdp_0", folder / "trainer")
        assert "passed-over" in codes(ckpt_cli.merge(folder, tmp_path / "out"))


class TestStates:
    @pytest.mark.parametrize(("component", "number"), [(None, 0), ("model_1", 1)])
    def test_optimizer_and_scheduler_go_by_number(self, tmp_path: Path, component: str | None, number: int) -> None:
        folder = two_models(tmp_path / "checkpoint_3")
        result = ckpt_cli.extract_state(folder, tmp_path / "out", type=component, optimizer=True)
        assert load_file(tmp_path / "out" / "optimizer.safetensors")["state.w.exp_avg"][0, 0].item() == number
        extra = torch.load(tmp_path / "out" / "extra_state_merged.pt")
        assert extra["lr_scheduler"] == {"last_epoch": 3 + number}
        assert extra[f"scheduler_{1 - number}"] == {"last_epoch": 4 - number}
        assert ("other-optimizers" in codes(result)) == (component is None)

    def test_states_of_more_ranks(self, layouts: Path, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoint-7"
        shutil.copytree(layouts / "accelerate" / "run" / "checkpoint-7", folder)
        assert "world-sizes-differ" not in codes(ckpt_cli.extract_state(folder, tmp_path / "whole"))
        for rank in range(4, 8):
            shutil.copy(folder / "rng_state_0.pth", folder / f"rng_state_{rank}.pth")
        assert "world-sizes-differ" in codes(ckpt_cli.extract_state(folder, tmp_path / "out"))


@pytest.mark.parametrize(
    ("value", "level"), [(2.5, "info"), (3, "info"), (np.float32(2.5), "warning"), (np.array(3.0), "warning"), (None, None)]
)
def test_numbers_among_weights_are_named(tmp_path: Path, value: object, level: str | None) -> None:
    torch.save({"a": torch.ones(2, 2), "s": value}, tmp_path / "model.pt")
    notes = ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out").checkpoint.notes
    assert [note.level for note in notes if note.code == "left-out"] == ([level] if level else [])
