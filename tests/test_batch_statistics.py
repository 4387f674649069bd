"""Running statistics of batch normalisation in averages: they are those of one model each, and none of their average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_cli
from ckpt_cli.errors import CkptError
from tests.tensors import load


def network(seed: int, norm: Any) -> nn.Module:
    """A network that has seen ``seed`` batches."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 2, 3))
    made.train()
    for _ in range(seed):
        made(torch.randn(2, 3, 8, 8))
    return made


def without_counter() -> nn.Module:
    """Like the frozen norms of torchvision and others, which keep statistics and count nothing."""
    norm = nn.BatchNorm2d(4)
    norm.num_batches_tracked = None
    return norm


def saved(folder: Path, seed: int, norm: Any) -> Path:
    torch.save(network(seed, norm).state_dict(), folder / f"{seed}.pt")
    return folder / f"{seed}.pt"


def warnings(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes if note.level == "warning"}


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm2d(4), lambda: nn.BatchNorm2d(4, momentum=None)])
def test_statistics_are_named_and_counters_are_not_averaged(make: Any, tmp_path: Path) -> None:
    paths = [saved(tmp_path, seed, make()) for seed in (2, 5)]
    result = ckpt_cli.average(paths, tmp_path / "out")
    assert "1.running_mean, 1.running_var" in warnings(result)["batch-statistics"]
    assert "update_bn" in warnings(result)["batch-statistics"]
    assert "1.num_batches_tracked" in warnings(result)["newest-taken"]
    assert load(tmp_path / "out")["1.num_batches_tracked"] == 5


def test_are_refused_with_strict(tmp_path: Path) -> None:
    paths = [saved(tmp_path, seed, nn.BatchNorm2d(4)) for seed in (2, 5)]
    with pytest.raises(CkptError):
        ckpt_cli.average(paths, tmp_path / "out", strict=True, exclude="*num_batches_tracked")
    assert not (tmp_path / "out").exists()


def test_the_recipe_gives_the_statistics_of_the_average(tmp_path: Path) -> None:
    paths = [saved(tmp_path, seed, nn.BatchNorm2d(4)) for seed in (2, 5)]
    ckpt_cli.average(paths, tmp_path / "out")
    model = network(0, nn.BatchNorm2d(4))
    model.load_state_dict(load(tmp_path / "out"))
    batches = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    torch.optim.swa_utils.update_bn(batches, model)
    with torch.no_grad():
        seen = torch.stack([model[0](batch).mean(dim=(0, 2, 3)) for batch in batches])
    assert torch.allclose(model[1].running_mean, seen.mean(0), atol=1e-5)
    assert not torch.allclose(load(tmp_path / "out")["1.running_mean"], seen.mean(0), atol=1e-3)


@pytest.mark.parametrize("make", [lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm2d(4, track_running_stats=False)])
def test_other_norms_have_none(make: Any, tmp_path: Path) -> None:
    paths = [saved(tmp_path, seed, make()) for seed in (2, 5)]
    assert "batch-statistics" not in warnings(ckpt_cli.average(paths, tmp_path / "out"))


def test_statistics_that_are_equal_or_of_one_checkpoint_alone_are_no_average(tmp_path: Path) -> None:
    """A frozen norm, and a checkpoint of weight 1 beside others of weight 0."""
    paths = [saved(tmp_path, seed, nn.BatchNorm2d(4)) for seed in (2, 5)]
    assert "batch-statistics" not in warnings(ckpt_cli.average(paths, tmp_path / "one", method="weighted", weights=(0, 1)))
    for path, value in zip(paths, (1.0, 2.0), strict=True):
        state = torch.load(path)
        state |= {"1.running_mean": torch.ones(4), "1.running_var": torch.ones(4), "0.bias": torch.full((4,), value)}
        torch.save(state, path)
    assert "batch-statistics" not in warnings(ckpt_cli.average(paths, tmp_path / "out"))


class TestAnAverageBesideItsModel:
    """`AveragedModel` averages parameters, and its buffers are a copy of those of the start, or follow the model's."""

    @staticmethod
    def kept(path: Path, *, norm: Any = None, moved: float = 1.0, **changed: torch.Tensor) -> Path:
        model = network(3, norm or nn.BatchNorm2d(4)).state_dict()
        average = {f"module.{name}": value + moved if name.endswith(("weight", "bias")) else value.clone() for name, value in model.items()}
        average |= {f"module.{name.replace('_', '.', 1)}": value for name, value in changed.items()}
        torch.save({"model": model, "model_ema": {"n_averaged": torch.tensor(3), **average}}, path)
        return path

    @staticmethod
    def told(path: Path, **options: Any) -> list[str]:
        return [
            note.text for note in ckpt_cli.merge(path, path.parent / "out", **options).checkpoint.notes if note.code == "batch-statistics"
        ]

    def test_statistics_of_the_model_are_named(self, tmp_path: Path) -> None:
        (text,) = self.told(self.kept(tmp_path / "both.pt"), type="ema")
        assert text.startswith("1.running_mean, 1.running_var: ")
        assert "update_bn" in text

    def test_of_torch_itself(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        optimizer, average = torch.optim.SGD(model.parameters(), 0.1), torch.optim.swa_utils.AveragedModel(model)
        buffered = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        for _ in range(4):
            model(torch.randn(2, 3, 8, 8)).pow(2).mean().backward()
            optimizer.step()
            average.update_parameters(model)
            buffered.update_parameters(model)
        for name, swa in {"parameters": average, "buffers": buffered}.items():
            torch.save({"state_dict": model.state_dict(), "swa_model": swa.state_dict()}, tmp_path / f"{name}.pt")
        assert len(self.told(tmp_path / "parameters.pt", type="swa_model")) == 1
        again = ckpt_cli.merge(tmp_path / "buffers.pt", tmp_path / "two", type="swa_model")
        assert "batch-statistics" not in {note.code for note in again.checkpoint.notes}

    def test_the_model_itself_is_as_it_should_be(self, tmp_path: Path) -> None:
        assert not self.told(self.kept(tmp_path / "both.pt"))

    def test_statistics_that_norms_begin_with_are_named(self, tmp_path: Path) -> None:
        """As Lightning's StochasticWeightAveraging leaves them, which averages parameters alone."""
        fresh = {f"1_{name}": value for name, value in nn.BatchNorm2d(4).state_dict().items() if name not in ("weight", "bias")}
        (text,) = self.told(self.kept(tmp_path / "both.pt", **fresh), type="ema")
        assert text.startswith("1.running_mean: statistics of activations in ema are those that norms begin with")
        assert "update_bn" in text

    @pytest.mark.parametrize(
        "how",
        [
            {"moved": 0.0},
            {"1_running_mean": torch.ones(4)},
            {"norm": nn.BatchNorm2d(4, track_running_stats=False)},
            {"norm": without_counter()},
            {"1_num_batches_tracked": torch.tensor(0)},
        ],
        ids=["no update yet", "own statistics", "none", "frozen", "never counted"],
    )
    def test_others_are_not(self, how: dict[str, Any], tmp_path: Path) -> None:
        assert not self.told(self.kept(tmp_path / "both.pt", **how), type="ema")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_extrapolated_variance_below_zero_is_told(tmp_path: Path, dtype: torch.dtype) -> None:
    """Batch normalisation makes NaN of it."""
    paths = []
    for value in (1.0, 3.0):
        held = {"w": torch.ones(3, 3), "1.running_var": torch.full((4,), value).to(dtype), "1.running_mean": torch.full((4,), -value)}
        paths.append(tmp_path / f"{value}.pt")
        torch.save(held, paths[-1])
    said = warnings(ckpt_cli.average(paths, tmp_path / "beyond", method="weighted", weights=[2, -1]))
    assert "1.running_var: with these weights a running variance is below 0" in said["negative-variance"]
    found = {item.code: item for item in ckpt_cli.verify(tmp_path / "beyond", full=True).findings}
    assert (found["negative-variance"].tensor, found["negative-variance"].severity) == ("1.running_var", "warning")
    for number, weights in enumerate(([1, 1], [-0.1, 1.1])):
        assert "negative-variance" not in warnings(ckpt_cli.average(paths, tmp_path / f"{number}", method="weighted", weights=weights))
        assert "negative-variance" not in {item.code for item in ckpt_cli.verify(tmp_path / f"{number}", full=True).findings}
