"""What ``--compare`` counts as changed, and what ``--match-base`` does beyond names: tied heads, replicas, quantised weights."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from decimal import Decimal, getcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.boxes import Box, contiguous_strides
from ckpt_cli.discover.open import open_checkpoint
from ckpt_cli.dtypes import BY_CODE
from ckpt_cli.errors import Inconsistent, SourceChanged, Unsupported, UsageError
from ckpt_cli.files.source import Files
from ckpt_cli.results.drift import TensorDrift
from ckpt_cli.tensors.tensor import Piece, Tensor
from ckpt_cli.verifying.drift.compare import BLOCK, compare_tensors
from ckpt_cli.verifying.drift.distances import Accumulator, Distances

BIG = 2**53
Array = np.ndarray[Any, Any]
NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
FLOATS = list(NUMPY)


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
            f"{component}.pt",
        )
        base = folder(tmp_path / "base", {each: torch.full((3, 2), 7.0) for each in self.NAMES}, self.TIED)
        if component == "ema":
            # The head beside an average is the model's own.
            torch.save(dict.fromkeys(self.NAMES, self.EMBEDDING - 9), source / "model.pt")
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


# -- the numbers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def files() -> Iterator[Files]:
    with Files() as opened:
        yield opened


def described(files: Files, path: Path, values: Array, code: str, cuts: int = 1) -> Tensor:
    """A tensor of one file, or of several that cut its last dimension."""
    pieces = []
    for i, part in enumerate(np.array_split(values, cuts, axis=-1) if cuts > 1 else [values]):
        file = path.with_name(f"{path.name}-{i}")
        file.write_bytes(np.ascontiguousarray(part).tobytes())
        start = sum(piece.box.extent[-1] for piece in pieces)
        offset = (*(0,) * (values.ndim - 1), start) if cuts > 1 else (0,) * values.ndim
        pieces.append(Piece(files.source(file), 0, contiguous_strides(part.shape), Box(offset, part.shape)))
    return Tensor("w", BY_CODE[code], values.shape, tuple(pieces))


def drift_of(files: Files, path: Path, mine: Array, base: Array, codes: tuple[str, str], **options: Any) -> TensorDrift:
    """The one tensor's drift; it must have changed."""
    cuts = options.pop("cuts", 1)
    sides = [described(files, path / side, values, code, cuts) for side, values, code in zip("ab", (mine, base), codes, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (drift,) = compare_tensors({"w": sides[0]}, {"w": sides[1]}, "base", **options).drifts
    return drift


def apart(mine: Array, base: Array, block: int = 1000) -> Distances:
    accumulator = Accumulator()
    for start in range(0, len(base), block):
        accumulator.add(mine[start : start + block], base[start : start + block])
    return accumulator.result()


def by_numpy(mine: Array, base: Array) -> dict[str, float]:
    """The definitions, with as many bits as numpy has."""
    wide = np.clongdouble if "c" in mine.dtype.kind + base.dtype.kind else np.longdouble
    a, b = (
        values.astype(np.complex128 if values.dtype.kind == "c" else np.float64 if values.dtype.kind in "fV" else wide).astype(wide).ravel()
        for values in (mine, base)
    )
    norms = [np.sqrt((np.abs(values) ** 2).sum()) for values in (a, b)]
    return {
        "max_abs": float(np.abs(a - b).max()),
        "mean_abs": float(np.abs(a - b).mean()),
        "l2": float(np.sqrt((np.abs(a - b) ** 2).sum())),
        "base_norm": float(norms[1]),
        "relative_l2": float(np.sqrt((np.abs(a - b) ** 2).sum()) / norms[1]),
        "cosine": float((a * b.conj()).sum().real / norms[0] / norms[1]),
    }


def numbers(drift: TensorDrift) -> dict[str, float | None]:
    return {name: getattr(drift, name) for name in ("max_abs", "mean_abs", "l2", "base_norm", "relative_l2", "cosine")}


def random(code: str, count: int, seed: int, scale: float = 1.0) -> Array:
    values = np.random.default_rng(seed).standard_normal(count) * scale
    return np.asarray((np.abs(values) if code == "F8_E8M0" else values).astype(NUMPY[code]))


class TestNumbersAreThoseOfNumpy:
    @pytest.mark.parametrize("code", FLOATS)
    def test_for_every_float_dtype(self, files: Files, tmp_path: Path, code: str) -> None:
        mine, base = random(code, 5000, 1), random(code, 5000, 2)
        drift = drift_of(files, tmp_path, mine, base, (code, code))
        assert numbers(drift) == pytest.approx(by_numpy(mine, base), rel=1e-12, abs=0)
        bits = [values.view(np.uint8).reshape(5000, -1) for values in (mine, base)]
        assert drift.changed == (bits[0] != bits[1]).any(axis=1).sum()

    @pytest.mark.parametrize("codes", [("F32", "BF16"), ("BF16", "F32"), ("F64", "F16"), ("F8_E4M3", "BF16"), ("F16", "F8_E5M2")])
    def test_between_two_dtypes(self, files: Files, tmp_path: Path, codes: tuple[str, str]) -> None:
        mine, base = random(codes[0], 5000, 1), random(codes[1], 5000, 2)
        assert numbers(drift_of(files, tmp_path, mine, base, codes)) == pytest.approx(by_numpy(mine, base), rel=1e-12, abs=0)

    @pytest.mark.parametrize(
        ("code", "scale"),
        [("F64", 1e307), ("F64", 1e200), ("F64", 1e-200), ("F64", 1e-310), ("F32", 3e37), ("F32", 1e-38), ("F32", 3e-44), ("BF16", 1e37)],
    )
    def test_however_large_or_small_the_values_are(self, files: Files, tmp_path: Path, code: str, scale: float) -> None:
        mine, base = random(code, 3000, 1, scale), random(code, 3000, 2, scale)
        assert numbers(drift_of(files, tmp_path, mine, base, (code, code))) == pytest.approx(by_numpy(mine, base), rel=1e-9, abs=0)

    def test_blocks_of_very_different_size_add_up(self) -> None:
        scales = np.repeat([1e-250, 1.0, 1e250, 1e-320], 1000)
        mine, base = random("F64", 4000, 1) * scales, random("F64", 4000, 2) * scales
        expected, found = by_numpy(mine, base), apart(mine, base)
        assert found.relative_l2 == pytest.approx(expected["relative_l2"], rel=1e-12, abs=0)
        assert found.max_abs == expected["max_abs"]

    @pytest.mark.parametrize(("code", "kind"), [("C64", np.complex64), ("C128", np.complex128)])
    def test_for_complex_numbers(self, files: Files, tmp_path: Path, code: str, kind: type) -> None:
        mine, base = ((random("F64", 2000, seed) + 1j * random("F64", 2000, seed + 9)).astype(kind) for seed in (1, 2))
        assert numbers(drift_of(files, tmp_path, mine, base, (code, code))) == pytest.approx(by_numpy(mine, base), rel=1e-12, abs=0)

    def test_complex_halves_are_numbers_too(self, files: Files, tmp_path: Path) -> None:
        mine, base = (random("F16", 2000, seed).reshape(1000, 2) for seed in (1, 2))
        sides = []
        for name, values in (("a", mine), ("b", base)):
            (tmp_path / name).write_bytes(values.tobytes())
            sides.append(Tensor("w", BY_CODE["C32"], (1000,), (Piece(files.source(tmp_path / name), 0, (1,), Box((0,), (1000,))),)))
        (drift,) = compare_tensors({"w": sides[0]}, {"w": sides[1]}, "base").drifts
        pairs = [values.astype(np.float32).view(np.complex64).ravel() for values in (mine, base)]
        assert numbers(drift) == pytest.approx(by_numpy(*pairs), rel=1e-12, abs=0)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.tuples(st.floats(allow_nan=False, width=64), st.floats(allow_nan=False, width=64)), min_size=1, max_size=20))
    def test_for_any_numbers_nothing_is_raised_and_ranges_hold(self, pairs: list[tuple[float, float]]) -> None:
        mine, base = (np.array(values) for values in zip(*pairs, strict=True))
        found = apart(mine, base, block=3)
        assert found.changed == np.count_nonzero(mine.view(np.uint64) != base.view(np.uint64))
        if found.cosine_distance is not None and not math.isnan(found.cosine_distance):
            assert 0 <= found.cosine_distance <= 2
        assert not found.mean_abs > found.max_abs * (1 + 1e-12)


class TestSmallChanges:
    @pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-9, 1e-12])
    def test_a_cosine_near_one_keeps_its_digits(self, size: float) -> None:
        base = random("F64", 200, 1)
        mine = base * (1 + size * random("F64", 200, 2))
        getcontext().prec = 80
        a, b = ([Decimal(float(value)) for value in values] for values in (mine, base))
        product = sum(x * y for x, y in zip(a, b, strict=True))
        exact = 1 - product / (sum(x * x for x in a).sqrt() * sum(y * y for y in b).sqrt())
        found = apart(mine, base, block=64)
        assert found.cosine_distance == pytest.approx(float(exact), rel=1e-6, abs=0)

    def test_scaling_alone_changes_no_angle(self) -> None:
        base = random("F64", 1000, 1)
        found = apart(base * 1.125, base)
        assert found.relative_l2 == pytest.approx(0.125, rel=1e-12, abs=0)
        assert found.cosine_distance == pytest.approx(0, abs=1e-15)

    @pytest.mark.parametrize(("mine", "expected"), [([0.0, 3.0], 1.0), ([-2.0, 0.0], 2.0), ([1e-200, 1e-200], 1 - math.sqrt(0.5))])
    def test_an_angle_far_from_zero(self, mine: list[float], expected: float) -> None:
        assert apart(np.array(mine), np.array([1.0, 0.0])).cosine_distance == pytest.approx(expected, rel=1e-12, abs=0)

    def test_one_element_of_many_is_seen(self) -> None:
        base = random("BF16", 3 * BLOCK, 1)
        mine = base.copy()
        mine[2 * BLOCK + 5] = 0.5 if float(base[2 * BLOCK + 5]) != 0.5 else 0.25
        found = apart(mine, base, BLOCK)
        assert found.changed == 1
        assert found.mean_abs == pytest.approx(found.max_abs / (3 * BLOCK), rel=1e-12, abs=0)


class TestSpecialValues:
    def test_what_both_have_at_one_place_enters_nothing(self) -> None:
        found = apart(np.array([math.nan, math.inf, 3.0, 1.0]), np.array([math.nan, math.inf, 4.0, 0.0]))
        assert (found.changed, found.max_abs, found.mean_abs, found.base_norm) == (2, 1.0, 0.5, 4.0)
        assert found.relative_l2 == pytest.approx(math.sqrt(2) / 4)

    def test_two_kinds_of_nan_are_a_change_without_size(self) -> None:
        mine = np.array([0x7FC00000, 0x3F800000], np.uint32).view(np.float32)
        base = np.array([0x7FC00001, 0x3F800000], np.uint32).view(np.float32)
        found = apart(mine, base)
        assert (found.changed, found.max_abs, found.relative_l2, found.cosine_distance) == (1, 0.0, 0.0, 0.0)

    @pytest.mark.parametrize(("mine", "base"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, -math.inf), (-math.inf, math.inf)])
    def test_any_other_gives_what_numpy_gives(self, mine: float, base: float) -> None:
        a, b = np.array([mine, 2.0, 3.0]), np.array([base, 2.5, 3.0])
        found = apart(a, b)
        with np.errstate(invalid="ignore"):
            delta = np.abs(a - b)
            expected = (delta.max(), delta.mean(), np.linalg.norm(a - b) / np.linalg.norm(b))
        assert (found.max_abs, found.mean_abs, found.relative_l2) == pytest.approx(expected, nan_ok=True)
        assert found.cosine_distance is not None
        assert math.isnan(found.cosine_distance)

    def test_a_base_of_zeros_is_infinitely_far_and_has_no_angle(self) -> None:
        found = apart(np.ones(3), np.zeros(3))
        assert (found.relative_l2, found.cosine_distance, found.l2) == (math.inf, None, pytest.approx(math.sqrt(3)))

    def test_a_tensor_that_became_zero_lost_all_of_it(self) -> None:
        found = apart(np.zeros(3), np.ones(3))
        assert (found.relative_l2, found.cosine_distance) == (1.0, None)

    def test_another_sign_of_zero_is_a_change_of_size_zero(self) -> None:
        found = apart(np.array([0.0, 1.0]), np.array([-0.0, 1.0]))
        assert (found.changed, found.relative_l2, found.cosine_distance) == (1, 0.0, 0.0)

    def test_a_difference_beyond_float64_is_infinite(self) -> None:
        found = apart(np.array([1.7e308]), np.array([-1.7e308]))
        assert (found.max_abs, found.relative_l2) == (math.inf, math.inf)

    def test_json_has_words_for_them(self, files: Files, tmp_path: Path) -> None:
        drift = drift_of(files, tmp_path, np.array([math.nan, 1.0]), np.array([0.0, 1.0]), ("F64", "F64"))
        text = json.dumps(drift.model_dump(mode="json"), allow_nan=False)
        assert json.loads(text)["max_abs"] == "NaN"


class TestStreaming:
    @pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
    def test_borders_of_blocks_do_not_matter(self, files: Files, tmp_path: Path, count: int) -> None:
        mine, base = random("F32", count, 1), random("F32", count, 2)
        assert numbers(drift_of(files, tmp_path, mine, base, ("F32", "F32"))) == pytest.approx(by_numpy(mine, base), rel=1e-11, abs=0)

    def test_sharded_against_whole_is_whole_against_whole(self, files: Files, tmp_path: Path) -> None:
        mine, base = (random("BF16", 700 * 512, seed).reshape(700, 512) for seed in (1, 2))
        (tmp_path / "whole").mkdir()
        whole = drift_of(files, tmp_path / "whole", mine, base, ("BF16", "BF16"))
        first = described(files, tmp_path / "a", mine, "BF16", cuts=3)
        second = described(files, tmp_path / "b", base, "BF16", cuts=4)
        assert compare_tensors({"w": first}, {"w": second}, "base").drifts == (whole,)

    def test_the_number_of_threads_changes_no_digit(self, files: Files, tmp_path: Path) -> None:
        values = {(side, i): random("F32", 999, 10 * side + i) for side in (1, 2) for i in range(8)}
        mine, base = ({f"w{i}": described(files, tmp_path / f"{side}{i}", values[side, i], "F32") for i in range(8)} for side in (1, 2))
        one, many = (compare_tensors(mine, base, "base", jobs=jobs) for jobs in (1, 4))
        assert one == many

    def test_scalars_and_empty_tensors(self, files: Files, tmp_path: Path) -> None:
        drift = drift_of(files, tmp_path, np.array(3.0), np.array(2.0), ("F64", "F64"))
        assert (drift.elements, drift.max_abs, drift.relative_l2, drift.cosine) == (1, 1.0, 0.5, 1.0)
        empty = [described(files, tmp_path / side, np.zeros((0, 3)), "F64") for side in ("c", "d")]
        assert compare_tensors({"w": empty[0]}, {"w": empty[1]}, "base").unchanged == 1

    def test_packed_values_are_equal_or_not(self, files: Files, tmp_path: Path) -> None:
        mine, base = np.array([1, 2, 3, 4], np.uint8), np.array([1, 2, 7, 4], np.uint8)
        drift = drift_of(files, tmp_path, mine, base, ("F4", "F4"))
        assert (drift.changed, drift.max_abs, drift.relative_l2, drift.cosine) == (1, None, None, None)

    def test_progress_counts_the_bytes_of_both_sides(self, files: Files, tmp_path: Path) -> None:
        class Counting:
            total = done = 0
            ended = False

            def start(self, total_bytes: int, label: str) -> None:
                self.total = total_bytes

            def advance(self, count: int, label: str) -> None:
                self.done += count

            def finish(self) -> None:
                self.ended = True

        seen = Counting()
        count = 2 * BLOCK + 9
        drift_of(files, tmp_path, random("F32", count, 1), random("BF16", count, 2), ("F32", "BF16"), progress=seen, jobs=1)
        assert seen.total == seen.done == count * 6
        assert seen.ended

    def test_a_file_that_ends_early_is_told_with_the_tensor(self, files: Files, tmp_path: Path) -> None:
        sides = [described(files, tmp_path / side, np.ones(100), "F64") for side in ("a", "b")]
        with (tmp_path / "a-0").open("r+b") as file:
            file.truncate(80)
        with pytest.raises(SourceChanged) as caught:
            compare_tensors({"w": sides[0]}, {"w": sides[1]}, "base")
        assert caught.value.tensor == "w"


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_sharded_checkpoint_is_what_was_merged_from_it(layouts: Path, tmp_path: Path, jobs: int) -> None:
    run = layouts / "verl-run" / "run"
    ckpt_cli.merge(run, tmp_path / "out", names="native")
    with Files() as files:
        sharded = open_checkpoint(run, files).components[0].component
        whole = open_checkpoint(tmp_path / "out", files).components[0].component
        found = compare_tensors(sharded.tensors, whole.tensors, "merged", jobs=jobs)
        assert sum(len(tensor.pieces) > 1 for tensor in sharded.tensors.values()) > 10
    assert found.unchanged == found.common == len(whole.tensors) > 10
    assert [part.part for part in found.frozen] == ["*"]
    assert found.extra == found.missing == ()


class TestSample:
    def test_it_reads_a_share_that_lies_evenly(self, files: Files, tmp_path: Path) -> None:
        mine, base = random("F32", 20 * BLOCK, 1), random("F32", 20 * BLOCK, 2)
        drift = drift_of(files, tmp_path, mine, base, ("F32", "F32"), sample=0.1)
        assert (drift.elements, drift.compared) == (20 * BLOCK, 2 * BLOCK)
        read = np.r_[0:BLOCK, 10 * BLOCK : 11 * BLOCK]
        expected = by_numpy(mine[read], base[read])
        assert (drift.max_abs, drift.relative_l2) == pytest.approx((expected["max_abs"], expected["relative_l2"]), rel=1e-11, abs=0)
        assert drift.base_norm == pytest.approx(expected["base_norm"] * math.sqrt(10), rel=1e-11, abs=0)

    def test_small_tensors_are_read_whole(self, files: Files, tmp_path: Path) -> None:
        drift = drift_of(files, tmp_path, random("F32", 100, 1), random("F32", 100, 2), ("F32", "F32"), sample=0.01)
        assert drift.compared == 100

    @pytest.mark.parametrize("share", [0.0, -1.0, 1.5, math.nan])
    def test_a_share_out_of_range_is_refused(self, share: float) -> None:
        with pytest.raises(UsageError, match="share"):
            compare_tensors({}, {}, "base", sample=share)


class TestForms:
    def test_both_shapes_and_dtypes_are_told(self, files: Files, tmp_path: Path) -> None:
        mine = {
            "a": described(files, tmp_path / "a", np.ones((2, 3)), "F64"),
            "b": described(files, tmp_path / "b", np.ones(2), "F64"),
            "only": described(files, tmp_path / "c", np.ones(2), "F64"),
        }
        base = {
            "a": described(files, tmp_path / "d", np.ones((3, 2)), "F64"),
            "b": described(files, tmp_path / "e", np.ones(2, np.float32), "F32"),
            "lost": described(files, tmp_path / "f", np.ones(2), "F64"),
        }
        found = compare_tensors(mine, base, "base", values=False)
        assert (found.missing, found.extra, found.reshaped, found.other_dtype) == (("lost",), ("only",), ("a",), ("b",))
        assert [(change.name, change.shape, change.base_shape, change.dtype, change.base_dtype) for change in found.changes] == [
            ("a", (2, 3), (3, 2), "F64", "F64"),
            ("b", (2,), (2,), "F64", "F32"),
        ]
        assert (found.unchanged, found.heatmap) == (None, None)
        assert compare_tensors(mine, base, "base").unchanged == 1
