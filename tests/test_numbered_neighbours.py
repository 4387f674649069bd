"""Files that differ in a number alone: halves and stages of one model are parts, models of several epochs are whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ckpt_cli
from ckpt_cli.errors import PartOfSet

Weights = dict[str, Tensor]


def model(seed: int = 0, layers: int = 2) -> Weights:
    """Trained weights: norms that are no longer ones."""
    torch.manual_seed(seed)
    held = {f"layers.{layer}.{name}.weight": torch.randn(64, 64) for layer in range(layers) for name in ("attn", "mlp")}
    return {**held, "embed.weight": torch.randn(96, 64), "norm.weight": 1 + torch.randn(64) / 10}


def half(number: int, dim: int = 0) -> Weights:
    return {name: value.chunk(2, dim)[number].clone() if value.ndim == 2 else value for name, value in model().items()}


def stage(number: int) -> Weights:
    return {name: value for name, value in model().items() if name.startswith(f"layers.{number}.")}


def epoch(number: int) -> Weights:
    torch.manual_seed(number + 1)
    return {name: value + torch.randn_like(value) * 0.1 * number for name, value in model().items()}


def saved(folder: Path, name: str, part: Callable[[int], Weights], count: int = 2) -> list[Path]:
    folder.mkdir()
    paths = [folder / name.format(number) for number in range(count)]
    for number, path in enumerate(paths):
        torch.save({"model": part(number)}, path)
    return paths


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.{:02d}.pt", half),
        ("weights_{}.pt", half),
        ("model-{}.bin", lambda number: half(number, 1)),
        ("stage_{}.pt", stage),
        ("trained_gpt_{}_0.pt", stage),
        ("trained_gpt_0_{}.pt", half),
        ("model_0_{}_0.pt", half),
        ("model_{}_0_0.pt", stage),
        ("checkpoint_{}.pt", stage),  # of rank and rank
        ("ckpt-{}.pth", stage),
        ("epoch_{}.pt", stage),
        ("checkpoint_{}.pt", half),
        ("net_{}.pt", lambda number: {f"{number}.weight": torch.ones(4, 4)}),  # of one nn.Sequential
        ("checkpoint_{}.pt", lambda number: {f"{'head' if number else 'embed'}.weight": torch.ones(4, 4)}),
        ("model.{:02d}.pth", lambda number: {name: value for name, value in half(number).items() if value.ndim == 2}),
        ("model.{:02d}.pt", lambda number: half(number, 1)),
    ],
)
def test_parts_are_refused(name: str, part: Callable[[int], Weights], tmp_path: Path) -> None:
    first, second = saved(tmp_path / "run", name, part)
    for path, other in ((first, second), (second, first)):
        with pytest.raises(PartOfSet) as caught:
            ckpt_cli.merge(path, tmp_path / "out")
        assert other.name in str(caught.value.expected)
        assert "rename it without the number" in str(caught.value.hint)
        assert ckpt_cli.detect(path).exit_code == 4
    with pytest.raises(PartOfSet):
        ckpt_cli.average([first, second], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.{:02d}.pt", epoch),  # of one training
        ("model.{}.pt", epoch),
        ("model.{:02d}.pt", model),  # members of an ensemble: no norm is the same
        ("seeded_{}.pt", model),  # of several: no norm is the same
        ("step_{:02d}.pt", model),
        ("trial_{}_0.pt", model),
        ("model_{}_0.pt", epoch),
        ("epoch_{:02d}.pt", half),
        ("checkpoint_{}.pt", epoch),
        ("ckpt_{}.pt", lambda _: model()),
        ("net_{}.pt", lambda number: {f"{2 * place + number}.weight": torch.ones(4, 4) for place in range(2)}),  # of two
        ("net_{}.pt", lambda number: model(number, layers=2) if number else {"generator.weight": torch.ones(4, 4)}),
    ],
)
def test_whole_models_are_read(name: str, part: Callable[[int], Weights], tmp_path: Path) -> None:
    for path in saved(tmp_path / "run", name, part):
        assert ckpt_cli.detect(path).exit_code == 0
        ckpt_cli.merge(path, tmp_path / path.stem)


def test_a_number_that_does_not_begin_with_0_says_nothing(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "run", "model_{}.pt", half)
    second.rename(second.with_name("model_2.pt"))
    first.rename(moved := first.with_name("model_1.pt"))
    ckpt_cli.merge(moved, tmp_path / "out")


def test_the_rest_of_an_inference_checkpoint_is_no_model(tmp_path: Path) -> None:
    torch.save({"embed.weight": torch.ones(4, 4)}, tmp_path / "non-tp.pt")
    torch.save({"layers.0.weight": torch.ones(4, 4)}, tmp_path / "tp_00_00.pt")
    with pytest.raises(PartOfSet, match="without the layers"):
        ckpt_cli.merge(tmp_path / "non-tp.pt", tmp_path / "out")


@pytest.mark.parametrize("key", [None, "model", "model_state_dict"])
def test_a_file_of_smp_says_itself_that_it_is_a_part(key: str | None, tmp_path: Path) -> None:
    """What `local_state_dict` returns is one rank's; a whole model may carry the same key, as the Trainer of transformers sets it."""
    path = tmp_path / "trained_gpt_0_0.pt"
    for is_part in (True, False):
        state = {**model(), "_smp_is_partial": is_part, "_smp_load_info": None}
        torch.save(state if key is None else {key: state, "step": 3}, path)
        if is_part:
            with pytest.raises(PartOfSet, match="SageMaker") as caught:
                ckpt_cli.merge(path, tmp_path / "out")
            assert "partial=False" in str(caught.value.hint)
        else:
            ckpt_cli.merge(path, tmp_path / "out")


def test_files_of_two_saves_may_hold_different_models(tmp_path: Path) -> None:
    paths = saved(tmp_path / "run", "model_{}.pt", lambda number: {f"{'generator' if number else 'judge'}.weight": torch.ones(4, 4)})
    with pytest.raises(PartOfSet):
        ckpt_cli.merge(paths[0], tmp_path / "out")
    os.utime(paths[0], (0, 0))
    ckpt_cli.merge(paths[0], tmp_path / "out")


def told(path: Path, output: Path) -> list[str]:
    return [note.text for note in ckpt_cli.merge(path, output).checkpoint.notes if note.code == "lone-part"]


@pytest.mark.parametrize("name", ["model_0_0_0.pt", "model_1_0_0.pt", "trained_gpt_0_0.pt"])
def test_a_part_of_one_rank_alone_is_told_by_its_name(name: str, tmp_path: Path) -> None:
    torch.save(model(), tmp_path / name)
    (text,) = told(tmp_path / name, tmp_path / "out")
    assert text.startswith(f"{name} is called as SageMaker's model parallelism calls the part of one rank")
    (tmp_path / "config.json").write_text('{"model_type": "own", "architectures": ["Own"]}')
    assert not told(tmp_path / name, tmp_path / "again")


@pytest.mark.parametrize("name", ["model.pt", "model_0.pt", "trial_0_1.pt", "epoch_3_0.pt", "fold_0_0.pt", "model-2.pt"])
def test_other_names_are_not(name: str, tmp_path: Path) -> None:
    torch.save(model(), tmp_path / name)
    assert not told(tmp_path / name, tmp_path / "out")


def test_members_of_an_ensemble_are_passed_one_by_one(tmp_path: Path) -> None:
    paths = saved(tmp_path / "run", "model_{}.pt", model, 3)
    with pytest.raises(PartOfSet, match="how many ranks") as caught:
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    assert f"pass one of them, such as {paths[-1]}" in str(caught.value.hint)
    ckpt_cli.merge(paths[-1], tmp_path / "out")  # as the hint says
