"""`ckpt inspect --stats` and `ckpt show`: numbers judged by numpy and exact fractions, slices by numpy, ranks by torch's own files."""

from __future__ import annotations

import json
import math
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.cli.screens.show import show_result
from ckpt_cli.cli.screens.stats import elided, stats_result
from ckpt_cli.errors import NotFound, UsageError
from ckpt_cli.results.statistics import StatsResult, TensorStats
from ckpt_cli.verifying.drift.compare import BLOCK
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt
from tests.golden_screens import WIDTHS, check_golden, screen

EXAMPLE = ROOT / "examples" / "tiny-run"


def stats(path: Path, **options: Any) -> dict[str, TensorStats]:
    result = ckpt_cli.inspect(path, stats=True, **options)
    assert isinstance(result, StatsResult)
    (found,) = result.stats.values()
    return {each.name: each for each in found}


def exact(values: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of finite values, with fractions."""
    known = [Fraction(value) for value in values.flatten().tolist() if math.isfinite(value)]
    mean = sum(known, Fraction()) / len(known)
    variance = sum(((value - mean) ** 2 for value in known), Fraction()) / len(known)
    unit = Fraction(2) ** ((variance.numerator.bit_length() - variance.denominator.bit_length()) // 2)
    return float(mean), float(Fraction(math.sqrt(variance / unit**2)) * unit)


class TestStats:
    def test_are_those_of_numpy_for_every_tensor_of_a_run(self, layouts: Path) -> None:
        for place, file in (("lmms-run/run", "lmms-run/expected"), ("mesh-grid/tp/ranks", "mesh-grid/expected-tp")):
            wanted, found = load_file(layouts / f"{file}.safetensors"), stats(layouts / place)
            assert found.keys() >= wanted.keys() - {"lm_head.weight"}
            for name, tensor in wanted.items():
                if name not in found:
                    continue
                values, each = tensor.double().numpy(), found[name]
                assert (each.elements, each.zeros, each.nan, each.infinite) == (values.size, (values == 0).sum(), 0, 0)
                assert (each.absmax, each.smallest, each.largest) == (abs(values).max(), values.min(), values.max())
                assert each.mean == pytest.approx(values.mean(), rel=1e-12, abs=1e-15)
                assert each.std == pytest.approx(values.std(), rel=1e-9, abs=1e-15)

    @settings(max_examples=60, deadline=None)
    @given(
        values=st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf]), min_size=1, max_size=40),
        dtype=st.sampled_from([torch.float64, torch.float32]),
        scale=st.sampled_from([1.0, 1e-300, 1e300]),
    )
    def test_are_exact_for_any_values(
        self, tmp_path_factory: pytest.TempPathFactory, values: list[float], dtype: torch.dtype, scale: float
    ) -> None:
        tensor = torch.tensor(values, dtype=torch.float64)
        tensor = tensor * scale if dtype == torch.float64 else tensor.to(dtype)
        path = tmp_path_factory.mktemp("exact") / "model.safetensors"
        save_file({"a": tensor}, path)
        found = stats(path)["a"]
        finite = tensor[tensor.isfinite()]
        assert (found.nan, found.infinite) == (int(tensor.isnan().sum()), int(tensor.isinf().sum()))
        assert found.zeros == int((finite == 0).sum())
        if not len(finite):
            assert (found.absmax, found.mean, found.std) == (None, None, None)
            return
        mean, deviation = exact(tensor)
        assert found.absmax == finite.abs().max().item()
        assert found.mean == pytest.approx(mean, rel=1e-9, abs=1e-13 * (found.absmax or 0))
        assert found.std == pytest.approx(deviation, rel=1e-7, abs=1e-13 * (found.absmax or 0))

    def test_small_deviations_from_a_large_mean_survive(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        tensor = 1e8 + torch.randn(3 * BLOCK + 17, dtype=torch.float64)
        save_file({"a": tensor}, tmp_path / "model.safetensors")
        found = stats(tmp_path / "model.safetensors")["a"]
        assert found.std == pytest.approx((tensor - tensor.mean()).numpy().std(), rel=1e-9)
        assert found.mean == pytest.approx(tensor.mean().item(), rel=1e-15)

    @pytest.mark.parametrize(
        "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int64, torch.bool], ids=str
    )
    def test_of_every_dtype(self, dtype: torch.dtype, tmp_path: Path) -> None:
        tensor = torch.arange(-4, 12).to(dtype)
        save_file({"a": tensor}, tmp_path / "model.safetensors")
        found, values = stats(tmp_path / "model.safetensors", histogram=True)["a"], tensor.double().numpy()
        assert (found.absmax, found.mean, found.zeros) == (abs(values).max(), values.mean(), (values == 0).sum())
        powers = numpy.floor(numpy.log2(abs(values[values != 0]))).astype(int)
        assert found.exponents == {int(power): int(count) for power, count in zip(*numpy.unique(powers, return_counts=True), strict=True)}

    def test_of_complex_numbers_are_those_of_their_sizes(self, tmp_path: Path) -> None:
        save_file({"a": torch.tensor([3 + 4j, complex("nan"), 0j])}, tmp_path / "model.safetensors")
        found = stats(tmp_path / "model.safetensors")["a"]
        assert (found.absmax, found.mean, found.nan, found.zeros) == (5.0, None, 1, 1)

    def test_of_a_group_are_those_of_its_tensors_together(self) -> None:
        result = ckpt_cli.inspect(EXAMPLE, stats=True)
        assert isinstance(result, StatsResult)
        group = next(each for each in result.stat_groups["model"] if each.name == "model.layers.{0..1}.mlp.up_proj.weight")
        state = ckpt_cli.load_state_dict(EXAMPLE)
        both = numpy.concatenate([state[f"model.layers.{i}.mlp.up_proj.weight"].double().numpy().ravel() for i in (0, 1)])
        assert (group.tensors, group.elements) == (2, both.size)
        assert group.std == pytest.approx(both.std(), rel=1e-12)
        assert group.absmax == abs(both).max()

    def test_a_tensor_that_shares_its_storage_is_read_once(self) -> None:
        assert "lm_head.weight" not in stats(EXAMPLE)

    def test_memory_does_not_grow_with_the_tensor(self, tmp_path: Path) -> None:
        save_file({"a": torch.zeros(16 << 20)}, tmp_path / "model.safetensors")
        stats(EXAMPLE)
        tracemalloc.start()
        found = stats(tmp_path / "model.safetensors", jobs=1)["a"]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found.zeros == 16 << 20
        assert peak < 12 << 20

    def test_on_the_command_line(self, tmp_path: Path) -> None:
        save_file({"bad": torch.tensor([1.0, math.nan, math.inf]), "good": torch.ones(4)}, tmp_path / "model.safetensors")
        outcome = ckpt("inspect", tmp_path / "model.safetensors", "--stats")
        assert outcome.code == 0
        assert "1 NaN and 1 infinite, in 1 tensor" in outcome.out
        document = json.loads(ckpt("inspect", tmp_path / "model.safetensors", "--stats", "-v", "--json").out)["data"]
        assert [each["name"] for each in document["stats"]["model"]] == ["bad", "good"]
        assert document["stats"]["model"][1]["exponents"] == {"0": 4}
        assert "stats" not in json.loads(ckpt("inspect", tmp_path / "model.safetensors", "--json").out)["data"]
        assert ckpt("inspect", EXAMPLE, "--stats", "--jobs", "0").code == 2

    def test_long_names_are_cut_in_their_middle(self) -> None:
        assert len(elided("x" * 100, 24)) == 24
        assert elided("short", 24) == "short"


class TestShow:
    @pytest.mark.parametrize("part", ["0:4,:8", "-1", "...,0", ":,3", "300:", "5,7", "::50,::5", "[0:2, 1:3]"])
    def test_values_are_those_of_numpy(self, part: str) -> None:
        found = ckpt_cli.show(EXAMPLE, "model.embed_tokens.weight", part=part)
        whole = ckpt_cli.open(EXAMPLE)["model.embed_tokens.weight"].numpy()
        wanted = eval(f"whole[{part.strip('[]')}]", {"whole": whole})
        assert found.shown == wanted.shape
        assert list(found.values) == wanted.ravel().tolist()

    def test_without_a_slice_it_is_a_corner(self) -> None:
        found = ckpt_cli.show(EXAMPLE, "model.embed_tokens.weight")
        assert (found.index, found.shown) == ("0:8,0:8", (8, 8))
        assert ckpt_cli.show(EXAMPLE, "model.norm.weight", step=100).shown == (8,)

    def test_ranks_hold_what_their_files_hold(self, layouts: Path) -> None:
        """The boxes of a run are those of the local tensors that torch saved."""
        run = layouts / "lmms-run" / "run"
        whole = ckpt_cli.open(run)["model.embed_tokens.weight"].torch()
        found = ckpt_cli.show(run, "model.embed_tokens.weight")
        rows = [part.box[0] for part in found.parts]
        assert [part.rank for part in found.parts] == [0, 1, 2, 3]
        assert rows == [(i * 10, min(i * 10 + 10, 37)) for i in range(4)]
        for part in found.parts:
            name = next((run / "checkpoint-200").rglob(part.file))
            assert part.file == f"model_world_size_4_rank_{part.rank}.pt"
            assert whole[slice(*part.box[0])].numpy().tobytes() in name.read_bytes()

    def test_replicas_are_marked(self, layouts: Path) -> None:
        found = ckpt_cli.show(layouts / "lmms-run" / "run", "model.token_counts")
        assert [(part.rank, part.replica) for part in found.parts] == [(0, False), (1, True), (2, True), (3, True)]
        assert all(isinstance(value, int) for value in found.values)

    def test_names_of_the_hub_and_of_wrappers(self, tmp_path: Path) -> None:
        torch.save({"module._orig_mod.a.weight": torch.arange(6.0).reshape(2, 3)}, tmp_path / "model.pt")
        assert ckpt_cli.show(tmp_path / "model.pt", "a.weight", part="1").values == (3.0, 4.0, 5.0)
        assert ckpt_cli.show(tmp_path / "model.pt", "module._orig_mod.a.weight", part="1,2").values == (5.0,)

    def test_values_that_json_has_no_word_for(self, tmp_path: Path) -> None:
        values = {"a": torch.tensor([math.nan, math.inf, -math.inf, -0.0]), "b": torch.tensor(True), "c": torch.tensor([1 + 2j])}
        save_file({**values, "empty": torch.ones(0, 3)}, tmp_path / "model.safetensors")
        path = tmp_path / "model.safetensors"
        document = json.loads(ckpt("show", path, "a", "--json").out)
        assert document["data"]["values"] == ["NaN", "Infinity", "-Infinity", -0.0]
        assert ckpt_cli.show(path, "b").values == (True,)
        assert ckpt_cli.show(path, "c").values == ("(1+2j)",)
        assert "(no elements)" in ckpt("show", path, "empty").out

    def test_quiet_prints_values_that_round_trip(self) -> None:
        outcome = ckpt("show", EXAMPLE, "model.embed_tokens.weight", "--slice", "-2:,:4", "-q")
        printed = numpy.array([line.split() for line in outcome.out.splitlines()], dtype=numpy.float32)
        assert numpy.array_equal(printed, ckpt_cli.open(EXAMPLE)["model.embed_tokens.weight"][-2:, :4].numpy())

    def test_what_is_not_there_and_what_is_no_slice(self) -> None:
        with pytest.raises(NotFound) as caught:
            ckpt_cli.show(EXAMPLE, "model.norm.weigth")
        assert caught.value.hint == "did you mean model.norm.weight?"
        for part in ("a", "0:1:2:3", "0,0,0", "", "::-1", "1000", ":,:,:"):
            with pytest.raises(UsageError):
                ckpt_cli.show(EXAMPLE, "model.embed_tokens.weight", part=part)

    def test_a_slice_that_nobody_reads_is_refused(self, tmp_path: Path) -> None:
        save_file({"a": torch.zeros(300, 300)}, tmp_path / "model.safetensors")
        with pytest.raises(UsageError, match="the slice has 90000 elements"):
            ckpt_cli.show(tmp_path / "model.safetensors", "a", part=":")

    @pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
    def test_the_next_command_works(self, name: str) -> None:
        outcome = ckpt("show", EXAMPLE, name)
        (line,) = [line for line in outcome.err.splitlines() if line.startswith("next: ckpt ")]
        assert "--slice" in line
        assert ckpt(*line.removeprefix("next: ckpt ").split()).code == 0


@pytest.mark.parametrize("width", WIDTHS, ids=str)
class TestScreens:
    @pytest.fixture(autouse=True)
    def beside_the_run(self, layouts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(layouts / "lmms-run")

    def test_stats(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = ckpt_cli.inspect("run", stats=True, histogram=True)
        assert isinstance(result, StatsResult)
        check_golden("stats", width, screen(monkeypatch, width, lambda s: stats_result(result, s)))

    def test_show(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = ckpt_cli.show("run", "model.layers.0.self_attn.o_proj.weight")
        check_golden("show", width, screen(monkeypatch, width, lambda s: show_result(result, s)))
