"""What ``--compare`` counts as changed, and what ``--match-base`` does beyond names: tied heads, replicas, quantised weights."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import Inconsistent, Unsupported
from ckpt_cli.report import TensorDrift

BIG = 2**53


def folder(path: Path, tensors: dict[str, torch.Tensor], config: str = "{}") -> Path:
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(config)
    return path


def run(path: Path, tensors: dict[str, torch.Tensor], config: str = "{}", name: str = "model_world_size_1_rank_0.pt") -> Path:
    path.mkdir(parents=True)
    torch.save(tensors, path / name)
    (path / "config.json").write_text(config)
    return path


def drifts(tmp_path: Path, mine: torch.Tensor, base: torch.Tensor) -> tuple[TensorDrift, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = ckpt_cli.merge(
            run(tmp_path / "run", {"w": mine}), tmp_path / "out", base=folder(tmp_path / "base", {"w": base}), compare=True
        )
    assert result.outputs[0].comparison is not None
    return result.outputs[0].comparison.drifts


class TestValues:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_is_the_same_has_not_changed(self, tmp_path: Path, value: float, dtype: torch.dtype) -> None:
        assert drifts(tmp_path, torch.tensor([value, 1.0]), torch.tensor([value, 1.0], dtype=dtype)) == ()

    def test_integers_are_not_rounded(self, tmp_path: Path) -> None:
        (drift,) = drifts(tmp_path, torch.tensor([BIG + 1, 5]), torch.tensor([BIG, 5]))
        assert drift.changed == 1

    def test_within_one_dtype_bits_decide(self, tmp_path: Path) -> None:
        (drift,) = drifts(tmp_path, torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
        assert (drift.changed, drift.max_abs) == (1, 0.0)

    def test_between_two_dtypes_values_decide(self, tmp_path: Path) -> None:
        assert drifts(tmp_path, torch.tensor([0.0, 1.5]), torch.tensor([-0.0, 1.5], dtype=torch.bfloat16)) == ()

    def test_an_imaginary_part_counts(self, tmp_path: Path) -> None:
        (drift,) = drifts(tmp_path, torch.tensor([1 + 2j, 1j]), torch.tensor([1 + 5j, 1j]))
        assert (drift.changed, drift.max_abs) == (1, 3.0)

    def test_a_value_that_became_nan_is_seen(self, tmp_path: Path) -> None:
        (drift,) = drifts(tmp_path, torch.tensor([1.0, math.nan, 3.0]), torch.tensor([2.0, 2.0, 3.0]))
        assert drift.changed == 2
        assert math.isnan(drift.max_abs)


class TestTiedHead:
    EMBEDDING = torch.arange(6.0).reshape(3, 2)
    NAMES = ("model.embed_tokens.weight", "lm_head.weight")
    TIED = '{"tie_word_embeddings": true}'

    @pytest.mark.parametrize(("component", "stale"), [("model", False), ("ema", False), ("ema", True)])
    @pytest.mark.parametrize("fill", [False, True])
    def test_a_base_that_stores_it_gets_the_run_s_own(self, tmp_path: Path, component: str, stale: bool, fill: bool) -> None:
        source = run(
            tmp_path / "run",
            dict(zip(self.NAMES, (self.EMBEDDING, self.EMBEDDING - 9 * stale), strict=True)),
            self.TIED,
            f"{component}_rank0.pt",
        )
        base = folder(tmp_path / "base", {each: torch.full((3, 2), 7.0) for each in self.NAMES}, self.TIED)
        if component == "ema":
            torch.save({each: torch.zeros(3, 2) for each in self.NAMES}, source / "model_rank0.pt")
        result = ckpt_cli.merge(
            source,
            tmp_path / "out",
            type=component,
            base=base,
            match_base=True,
            fill_missing_from_base=fill,
            weights_name=f"{component}.safetensors",
        )
        found = load_file(tmp_path / "out" / f"{component}.safetensors")
        assert set(found) == set(self.NAMES)
        assert torch.equal(found["lm_head.weight"], self.EMBEDDING)
        assert not result.outputs[0].dropped

    @pytest.mark.parametrize("fill", [False, True])
    def test_a_run_without_one_gives_its_embedding(self, tmp_path: Path, fill: bool) -> None:
        source = run(tmp_path / "run", {self.NAMES[0]: self.EMBEDDING}, self.TIED)
        base = folder(tmp_path / "base", {each: torch.full((3, 2), 7.0) for each in self.NAMES}, self.TIED)
        ckpt_cli.merge(source, tmp_path / "out", base=base, match_base=True, fill_missing_from_base=fill)
        assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"], self.EMBEDDING)

    def test_a_head_that_was_left_out_by_name_stays_the_base_s(self, tmp_path: Path) -> None:
        source = run(tmp_path / "run", dict.fromkeys(self.NAMES, self.EMBEDDING), self.TIED)
        base = folder(tmp_path / "base", {each: torch.full((3, 2), 7.0) for each in self.NAMES}, self.TIED)
        ckpt_cli.merge(source, tmp_path / "out", base=base, match_base=True, fill_missing_from_base=True, exclude=["lm_head*"])
        assert float(load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"][0, 0]) == 7.0


def test_a_base_whose_replicas_differ_is_not_filled_from(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(2), "b": torch.full((3,), float(rank))}, base / f"model_world_size_2_rank_{rank}.pt")
    source = run(tmp_path / "run", {"w": torch.zeros(2)})
    with pytest.raises(Inconsistent, match="different values"):
        ckpt_cli.merge(source, tmp_path / "out", base=base, match_base=True, fill_missing_from_base=True)


def test_quantised_weights_are_not_cast_to_the_dtypes_of_a_base(tmp_path: Path) -> None:
    source = run(tmp_path / "run", {"w": torch.zeros(2)}, '{"quantization_config": {"bits": 4}}')
    base = folder(tmp_path / "base", {"w": torch.zeros(2, dtype=torch.float16)})
    with pytest.raises(Unsupported, match="quantised"):
        ckpt_cli.merge(source, tmp_path / "out", base=base, match_base=True)
    ckpt_cli.merge(source, tmp_path / "out", base=base, match_base=True, dtype="keep")
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].dtype == torch.float32
