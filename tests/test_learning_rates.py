"""An optimizer of another step than the scheduler beside it shows itself by its learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt_cli


def warned(folder: Path) -> dict[str, str]:
    result = ckpt_cli.extract_state(folder, folder.parent / "state", optimizer=True)
    return {note.code: note.text for note in result.notes if note.level == "warning"}


def save(folder: Path, steps: int, other: int) -> Path:
    """What a training on one device saves, with an optimizer of so many steps and a scheduler of others."""
    folder.mkdir()
    model = torch.nn.Linear(2, 2)
    for name, count in (("optimizer.pt", steps), ("scheduler.pt", other)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for _ in range(count):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            scheduler.step()
        torch.save(optimizer.state_dict() if name == "optimizer.pt" else scheduler.state_dict(), folder / name)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def test_rates_alike_are_no_news(tmp_path: Path) -> None:
    assert "rates-differ" not in warned(save(tmp_path / "run", 3, 3))


@pytest.mark.parametrize("steps", [1, 5])
def test_an_optimizer_of_another_step_is_told(tmp_path: Path, steps: int) -> None:
    assert "other learning rates" in warned(save(tmp_path / "run", steps, 3))["rates-differ"]
