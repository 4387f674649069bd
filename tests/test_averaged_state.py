"""The state of torch's ``AveragedModel`` in every format: its counter is no weight, and says whether the average has begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckpt_cli
from tests.tensors import Tensors, differences, load
from tests.tiny import classless, folder

Save = Callable[[Path, Tensors], dict[str, Any]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def averaged(updates: int) -> Tensors:
    average = AveragedModel(model())
    for _ in range(updates):
        average.update_parameters(model())
    return dict(average.state_dict())


def in_dcp(place: Path, state: Tensors) -> dict[str, Any]:
    dcp.save({"model": model().state_dict(), "ema_model": state}, checkpoint_id=place, no_dist=True)
    return {"path": place, "type": "ema"}


def alone_in_dcp(place: Path, state: Tensors) -> dict[str, Any]:
    dcp.save(state, checkpoint_id=place, no_dist=True)
    return {"path": place}


def in_safetensors(place: Path, state: Tensors) -> dict[str, Any]:
    save_file(state, place / "model.safetensors")
    return {"path": place}


def in_a_file(place: Path, state: Tensors) -> dict[str, Any]:
    torch.save(state, place / "pytorch_model.bin")
    return {"path": place}


def beside_the_model(place: Path, state: Tensors) -> dict[str, Any]:
    torch.save({"model": model().state_dict(), "swa_model": state, "epoch": 3}, place / "checkpoint.pt")
    return {"path": place, "type": "swa_model"}


def codes(done: Any) -> dict[str, str]:
    return {note.code: note.text for note in done.checkpoint.notes}


@pytest.mark.parametrize("save", [in_dcp, alone_in_dcp, in_safetensors, in_a_file, beside_the_model])
class TestAnAveragedModel:
    def test_is_the_model_in_it(self, tmp_path: Path, save: Save) -> None:
        given = save(folder(tmp_path / "step-5", None, classless()), averaged(2))
        done = ckpt_cli.merge(**given, output=tmp_path / "out")
        assert differences(load(tmp_path / "out"), dict(model().state_dict())) == []
        assert "average-not-begun" not in codes(done)
        assert ckpt_cli.verify(tmp_path / "out", against=given["path"], type=given.get("type")).exit_code == 0

    def test_that_has_not_begun_is_a_warning(self, tmp_path: Path, save: Save) -> None:
        done = ckpt_cli.merge(**save(folder(tmp_path / "step-5", None, classless()), averaged(0)), output=tmp_path / "out")
        assert codes(done)["average-not-begun"].startswith("n_averaged is 0: the average has not begun")


class TestOtherCounters:
    @pytest.mark.parametrize("begun", [True, False])
    def test_ema_pytorch_says_whether_it_has_begun(self, tmp_path: Path, begun: bool) -> None:
        own = model().state_dict()
        pair = {f"{which}_model.{name}": tensor for which in ("online", "ema") for name, tensor in own.items()}
        ema = {"initted": torch.tensor(begun), "step": torch.tensor(5), **pair}
        torch.save({"model": own, "ema": ema}, folder(tmp_path / "run", None, classless()) / "checkpoint.pt")
        done = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="ema")
        assert ("average-not-begun" in codes(done)) is not begun

    @pytest.mark.parametrize("updates", [0, 3])
    def test_of_lightning_lies_beside(self, tmp_path: Path, updates: int) -> None:
        own = {f"model.{name}": tensor for name, tensor in model().state_dict().items()}
        counter = {"n_averaged": torch.tensor(updates)}
        saved = {"state_dict": own, "current_model_state": own, "averaging_state": counter, "pytorch-lightning_version": "2.6.0"}
        torch.save(saved, folder(tmp_path / "run", None, classless()) / "last.ckpt")
        assert ("average-not-begun" in codes(ckpt_cli.merge(tmp_path / "run", tmp_path / "out"))) is (updates == 0)
        assert "average-not-begun" not in codes(ckpt_cli.merge(tmp_path / "run", tmp_path / "now", type="current"))

    def test_a_codebook_that_has_none_yet_is_no_average(self, tmp_path: Path) -> None:
        """Codebooks of lucidrains' VQ have such a buffer, too."""
        book = {"initted": torch.tensor(False), "embed.weight": torch.randn(4, 4), "embed_avg": torch.randn(4, 4)}
        torch.save({"model": dict(model().state_dict()), "codebook": book}, folder(tmp_path / "run", None, classless()) / "checkpoint.pt")
        done = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="codebook")
        assert "average-not-begun" not in codes(done)
