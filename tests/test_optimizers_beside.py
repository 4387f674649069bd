"""What lies beside the state of an optimizer's parameters: other optimizers, settings, and what the optimizer keeps of no parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_cli
from ckpt_cli.errors import Unsupported

MODEL = {"w": torch.ones(3, 2), "b": torch.ones(2)}


def adam(**more: Any) -> dict[str, Any]:
    state = {name: {"exp_avg": torch.ones_like(tensor)} for name, tensor in MODEL.items()}
    return {"state": state, "param_groups": [{"lr": 1e-3, "params": list(MODEL)}], **more}


def in_one_file(folder: Path, content: dict[str, Any]) -> Path:
    torch.save({"model": MODEL, **content}, folder / "model.pt")
    return folder / "model.pt"


def in_dcp(folder: Path, content: dict[str, Any]) -> Path:
    dcp.save({"model": dict(MODEL), **content}, checkpoint_id=folder / "run", no_dist=True)
    return folder / "run"


@pytest.mark.parametrize("layout", [in_one_file, in_dcp])
def test_several_optimizers_are_not_one(layout: Any, tmp_path: Path) -> None:
    path = layout(tmp_path, {"optimizer_G": adam(), "optimizer_D": adam()})
    with pytest.raises(Unsupported, match="several optimizers: optimizer_G, optimizer_D"):
        ckpt_cli.extract_state(path, tmp_path / "out", optimizer=True)


def test_one_under_two_keys_is_one(tmp_path: Path) -> None:
    held = adam()
    path = in_one_file(tmp_path, {"optimizer": held, "optimizer_state_dict": held})
    ckpt_cli.extract_state(path, tmp_path / "out", optimizer=True)


@pytest.mark.parametrize("layout", [in_one_file, in_dcp])
def test_what_it_keeps_of_no_parameter_is_told(layout: Any, tmp_path: Path) -> None:
    path = layout(tmp_path, {"optimizer": adam(slow_state={"w": torch.ones(3, 2)}, nothing={})})
    (note,) = [note for note in ckpt_cli.extract_state(path, tmp_path / "out", optimizer=True).notes if note.code == "unread-states"]
    assert (note.level, "slow_state" in note.text, "nothing" in note.text) == ("warning", True, False)


@pytest.mark.parametrize("layout", [in_one_file, in_dcp])
def test_a_usual_one_is_no_news(layout: Any, tmp_path: Path) -> None:
    notes = ckpt_cli.extract_state(layout(tmp_path, {"optimizer": adam(), "epoch": 3}), tmp_path / "out", optimizer=True).notes
    assert "unread-states" not in {note.code for note in notes}


@pytest.mark.parametrize("layout", [in_one_file, in_dcp])
def test_counters_and_settings_called_like_it_are_state(layout: Any, tmp_path: Path) -> None:
    content = {"optimizer_name": "adam", "optimizer_steps": torch.tensor(12), "optimizer": adam()}
    ckpt_cli.extract_state(layout(tmp_path, content), tmp_path / "out", optimizer=True)
    extra = torch.load(tmp_path / "out" / "extra_state_merged.pt")
    assert (extra["optimizer_name"], int(extra["optimizer_steps"]), "optimizer" in extra) == ("adam", 12, False)


@pytest.mark.parametrize("layout", [in_one_file, in_dcp])
def test_an_order_of_samples_is_state(layout: Any, tmp_path: Path) -> None:
    path = layout(tmp_path, {"sampler": {"order": torch.arange(8).reshape(2, 4), "position": 5}})
    ckpt_cli.extract_state(path, tmp_path / "out")
    assert torch.load(tmp_path / "out" / "extra_state_merged.pt")["sampler"]["order"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
