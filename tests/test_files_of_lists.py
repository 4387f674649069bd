"""Files of scripts that keep what they save in lists: what is said of these is true, and leads nowhere that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import NoComponent, Unsupported

STATE = {"a.weight": torch.randn(3, 4), "a.bias": torch.randn(3)}
LIST = [torch.randn(3, 4), torch.randn(3)]


@pytest.mark.parametrize("kind", ["model", "ema", "optim", None])
def test_what_is_in_a_list_of_state_dicts_is_not_known(kind: str | None, tmp_path: Path) -> None:
    """DDIM and NCSN: model, optimizer, epoch, step, average."""
    torch.save([STATE, {"state": {}, "param_groups": []}, 3, 1000, STATE], tmp_path / "ckpt.pth")
    with pytest.raises(Unsupported, match="a list of 5, not a state dict") as caught:
        ckpt_cli.merge(tmp_path / "ckpt.pth", tmp_path / "out", type=kind)
    assert "save the state dict of the model" in str(caught.value.hint)


@pytest.mark.parametrize("average", [LIST, {"decay": 0.999, "shadow_params": LIST}])
def test_an_average_without_names_is_told_without_an_option(average: object, tmp_path: Path) -> None:
    torch.save({"model": STATE, "ema": average, "step": 5}, tmp_path / "model.pt")
    result = ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out")
    (text,) = (note.text for note in result.checkpoint.notes if note.code == "other-components")
    assert "ema, which has no names and is not read" in text
    assert "--type" not in text


def test_a_component_that_is_not_there_leads_to_the_only_one(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    with pytest.raises(NoComponent) as caught:
        ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out", type="critic")
    assert (caught.value.expected, caught.value.hint) == ("model", "leave out --type: model is all that is here")
