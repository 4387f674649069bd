"""Weights that fit by name and shape and have nothing in common: another base of the same size, or models that were trained apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from tests import tiny
from tests.tensors import Tensors

LAYERS = 4


def model(seed: int) -> Tensors:
    """Matrices that are large enough to be sampled, and norms, which are alike in all models."""
    random = torch.Generator().manual_seed(seed)
    found: Tensors = {"model.embed_tokens.weight": torch.randn(128, 32, generator=random) + 0.2}
    for layer in range(LAYERS):
        found[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.randn(64, 32, generator=random) * 0.02
        found[f"model.layers.{layer}.mlp.down_proj.weight"] = torch.randn(32, 64, generator=random) * 0.02
        found[f"model.layers.{layer}.norm.weight"] = torch.ones(32)
    return found


def trained(tensors: Tensors, far: float = 0.05, *, fresh: str = "") -> Tensors:
    """After a fine-tuning, in which what has ``fresh`` in its name was initialised anew."""
    random = torch.Generator().manual_seed(99)
    noise = {name: torch.randn(tensor.shape, generator=random) * tensor.std().nan_to_num() for name, tensor in tensors.items()}
    return {name: noise[name] if fresh and fresh in name else tensor + far * noise[name] for name, tensor in tensors.items()}


def folder(path: Path, tensors: Tensors) -> Path:
    return tiny.folder(path, tensors, tiny.classless())


def codes(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes}


class TestABase:
    @pytest.mark.parametrize("options", [{}, {"carry_from_base": "*embed*"}, {"dtype": "base"}], ids=["assets", "carried", "dtype"])
    def test_of_the_same_shapes_is_told_from_the_right_one(self, options: dict[str, Any], tmp_path: Path) -> None:
        run, right, wrong = (
            folder(tmp_path / "run", trained(model(0))),
            folder(tmp_path / "right", model(0)),
            folder(tmp_path / "wrong", model(1)),
        )
        if "carry_from_base" in options:
            run = folder(tmp_path / "part", {name: tensor for name, tensor in trained(model(0)).items() if "embed" not in name})
        assert "unlike-base" not in codes(ckpt_cli.merge(run, tmp_path / "a", base=right, **options))
        told = codes(ckpt_cli.merge(run, tmp_path / "b", base=wrong, **options))["unlike-base"]
        assert "8 of 8 sampled matrices" in told

    def test_is_not_called_fine_by_verify(self, tmp_path: Path) -> None:
        run, right, wrong = (
            folder(tmp_path / "run", trained(model(0))),
            folder(tmp_path / "right", model(0)),
            folder(tmp_path / "wrong", model(1)),
        )
        assert "unlike-base" not in {found.code for found in ckpt_cli.verify(run, base=right).findings}
        (found,) = [found for found in ckpt_cli.verify(run, base=wrong).findings if found.code == "unlike-base"]
        assert found.severity == "warning"
        assert "sampled matrices" in found.message

    @pytest.mark.parametrize(
        "run",
        [
            trained(model(0), 0.4),
            trained(model(0), fresh="embed"),
            trained(model(0), fresh="mlp.up"),
            {name: tensor.bfloat16() for name, tensor in trained(model(0)).items()},
            {name: -tensor for name, tensor in model(0).items()},
            {name: tensor * 0 for name, tensor in model(0).items()},
        ],
        ids=["far", "new embedding", "new half", "bf16", "negative", "zeros"],
    )
    def test_that_may_be_right_is_let_be(self, run: Tensors, tmp_path: Path) -> None:
        base = folder(tmp_path / "base", model(0))
        assert "unlike-base" not in codes(ckpt_cli.merge(folder(tmp_path / "run", run), tmp_path / "out", base=base))


class TestAnAverage:
    def test_of_models_that_were_trained_apart_warns(self, tmp_path: Path) -> None:
        paths = [folder(tmp_path / f"{seed}", model(seed)) for seed in (0, 1)]
        told = codes(ckpt_cli.average(paths, tmp_path / "out"))["unrelated-weights"]
        assert str(paths[0]) in told
        assert "8 of 8 sampled matrices" in told

    def test_names_the_one_that_is_apart(self, tmp_path: Path) -> None:
        paths = [folder(tmp_path / f"{i}", tensors) for i, tensors in enumerate([trained(model(0)), model(1), model(0)])]
        told = codes(ckpt_cli.average(paths, tmp_path / "out"))["unrelated-weights"]
        assert f"{paths[1]} and {paths[2]}" in told

    @pytest.mark.parametrize("weights", [None, (0.0, 1.0, 1.0)], ids=["same", "without the other"])
    def test_of_one_training_does_not(self, weights: Any, tmp_path: Path) -> None:
        held = [model(1) if weights else trained(model(0), 0.1), trained(model(0)), model(0)]
        paths = [folder(tmp_path / f"{i}", tensors) for i, tensors in enumerate(held)]
        assert "unrelated-weights" not in codes(ckpt_cli.average(paths, tmp_path / "out", weights=weights))

    @pytest.mark.parametrize(
        ("weights", "normalize", "level"), [((1, 1), False, "info"), ((1, 1), True, "warning"), ((0.5, 0.5), False, "warning")]
    )
    def test_of_a_model_and_a_stored_difference_is_a_note(
        self, weights: tuple[float, ...], normalize: bool, level: str, tmp_path: Path
    ) -> None:
        """What a base and a delta add up to is a model; their mean is not."""
        paths = [folder(tmp_path / "base", model(0)), folder(tmp_path / "delta", {name: 0.01 * each for name, each in model(1).items()})]
        done = ckpt_cli.average(paths, tmp_path / "out", method="weighted", weights=weights, normalize=normalize)
        (note,) = (note for note in done.outputs[0].notes if note.code == "unrelated-weights")
        assert (note.level, "an average of models" in note.text) == (level, level == "warning")


def mixed(*fresh: str) -> Tensors:
    """A trained model in which these tensors are those of another one."""
    return {name: model(7)[name] if name.startswith(fresh) else tensor for name, tensor in trained(model(0)).items()}


class TestSomeLayers:
    def test_of_another_model_are_told_by_merge_average_and_verify(self, tmp_path: Path) -> None:
        base, run = folder(tmp_path / "base", model(0)), folder(tmp_path / "run", mixed("model.layers.2.", "model.layers.3."))
        told = codes(ckpt_cli.merge(run, tmp_path / "merged", base=base))["unlike-layers"]
        assert "model.layers.2.mlp.down_proj.weight, model.layers.3.mlp.down_proj.weight (2 of 4 sampled matrices" in told
        assert "unlike-layers" in codes(ckpt_cli.average([folder(tmp_path / "other", trained(model(0))), run], tmp_path / "average"))
        found = [each.tensor for each in ckpt_cli.verify(run, base=base).findings if each.code == "unlike-layer"]
        assert found == [f"model.layers.{layer}.mlp.{kind}_proj.weight" for layer in (2, 3) for kind in ("down", "up")]

    @pytest.mark.parametrize("fresh", ["mlp", "mlp.up", "embed"])
    def test_of_a_kind_that_is_new_everywhere_are_not(self, fresh: str, tmp_path: Path) -> None:
        base, run = folder(tmp_path / "base", model(0)), folder(tmp_path / "run", trained(model(0), fresh=fresh))
        assert "unlike-layers" not in codes(ckpt_cli.merge(run, tmp_path / "merged", base=base))
        assert "unlike-layer" not in {each.code for each in ckpt_cli.verify(run, base=base).findings}

    @pytest.mark.parametrize("far", [0.0, 0.05, 0.8])
    def test_that_were_trained_are_not(self, far: float, tmp_path: Path) -> None:
        base, run = folder(tmp_path / "base", model(0)), folder(tmp_path / "run", trained(model(0), far))
        assert "unlike-layers" not in codes(ckpt_cli.merge(run, tmp_path / "merged", base=base))
        assert "unlike-layer" not in {each.code for each in ckpt_cli.verify(run, base=base).findings}

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            (lambda square: square.t().contiguous(), "with its dimensions exchanged"),
            (torch.zeros_like, "cosine 0.00"),
        ],
        ids=["transposed", "zeros"],
    )
    def test_that_a_script_spoiled_are_told(self, changed: Any, said: str, tmp_path: Path) -> None:
        squares = {f"model.layers.{layer}.o_proj.weight": torch.randn(40, 40) for layer in range(3)}
        base = folder(tmp_path / "base", {**model(0), **squares})
        name = "model.layers.1.o_proj.weight"
        run = folder(tmp_path / "run", {**trained({**model(0), **squares}), name: changed(squares[name])})
        (found,) = [each for each in ckpt_cli.verify(run, base=base).findings if each.code == "unlike-layer"]
        assert found.tensor == name
        assert said in found.message
