"""Averages that were registered with accelerate: told, read where their file is passed, and never replaced by the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.discover.components import with_ema_of_model
from ckpt_cli.discover.locate import locate
from ckpt_cli.errors import NoComponent, UsageError
from tests import tiny
from tests.tensors import differences, load

NAME = "custom_checkpoint_0.pkl"


def saved(folder: Path, content: Any) -> Path:
    """A folder of ``save_state`` with an object that was registered."""
    tiny.folder(folder, tiny.weights())
    torch.save(content, folder / NAME)
    return folder


def told(folder: Path) -> list[str]:
    return [note.text for note in ckpt_cli.detect(folder).checkpoint.notes if note.code == "other-weights"]  # type: ignore[union-attr]


@pytest.mark.parametrize("inside", ["module", "shadow", None])
def test_an_average_by_names_is_told_and_read(tmp_path: Path, inside: str | None) -> None:
    average = tiny.weights(5)
    folder = saved(tmp_path / "checkpoint_1", {inside: average, "step": 3} if inside else average)
    (note,) = told(folder)
    assert f"pass {folder / NAME}" in note
    with pytest.raises(UsageError, match="may have an EMA") as caught:
        ckpt_cli.merge(folder, tmp_path / "out", type="ema", ema_from_model=True)
    assert str(folder / NAME) in str(caught.value.hint)
    with pytest.raises(NoComponent) as missed:
        ckpt_cli.merge(folder, tmp_path / "out", type="ema")
    assert missed.value.hint == f"{NAME} (registered with accelerate) holds weights: pass {folder / NAME} if that is it"
    ckpt_cli.merge(folder / NAME, tmp_path / "ema", base=folder)
    assert differences(load(tmp_path / "ema"), average) == []
    ckpt_cli.merge(folder, tmp_path / "model")
    assert differences(load(tmp_path / "model"), tiny.weights()) == []


def test_an_average_without_names_is_told(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint_1", {"decay": 0.9, "shadow_params": list(tiny.weights(5).values())})
    (note,) = told(folder)
    assert "without names" in note
    with pytest.raises(UsageError, match="may have an EMA") as caught:
        ckpt_cli.merge(folder, tmp_path / "out", type="ema", ema_from_model=True)
    assert "no names" in str(caught.value.hint)
    with pytest.raises(NoComponent) as missed:
        ckpt_cli.merge(folder, tmp_path / "out", type="ema")
    assert "without names, as averages do" in str(missed.value.hint)


@pytest.mark.parametrize("content", [{"global_step": 7}, {"last_epoch": 1, "base_lrs": [0.1]}, {"x": {"weight": torch.ones(3, 3)}}, [1]])
def test_other_objects_are_not_told(tmp_path: Path, content: Any) -> None:
    folder = saved(tmp_path / "checkpoint_1", content)
    assert told(folder) == []
    if "x" not in content:
        with pytest.raises(NoComponent) as missed:
            ckpt_cli.merge(folder, tmp_path / "out", type="ema")
        assert missed.value.hint == "leave out --type: model is all that is here"
    ckpt_cli.merge(folder, tmp_path / "out", type="ema", ema_from_model=True)
    assert differences(load(tmp_path / "out"), tiny.weights()) == []


def test_the_model_is_no_third_of_two_averages(tmp_path: Path) -> None:
    (found,) = locate(tiny.folder(tmp_path / "checkpoint_1", tiny.weights())).checkpoints
    several = replace(found, places=(*found.places, *(replace(found.places[0], name=name) for name in ("fast_ema", "slow_ema"))))
    assert with_ema_of_model(several) is several
    assert [place.name for place in with_ema_of_model(found).places] == ["model", "ema"]
