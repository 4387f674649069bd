"""What each checkpoint weighs: every method against its definition in the paper, worked out by other means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ckpt_cli.averaging.coefficients import METHODS, SHAPES, SMALLEST, Method, formula, gamma_of, posthoc_ema
from ckpt_cli.errors import UsageError
from ckpt_cli.lora.config import LARGEST

STEPS = (100, 200, 300, 400)
UNEVEN = (100, 150, 400, 1000)


def shares(method: str, steps: Sequence[int], **options: Any) -> list[float]:
    """What the formula says about the part that each checkpoint has in the average."""
    found = formula(method, len(steps), steps, **options)  # type: ignore[arg-type]
    return [weight / found.divisor for weight in found.weights]


def refused(method: str, count: int = 3, steps: Sequence[int] | None = (1, 2, 3), **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        formula(method, count, steps, **options)  # type: ignore[arg-type]
    assert caught.value.advice
    return caught.value


class TestWithoutTime:
    @pytest.mark.parametrize("count", [1, 2, 3, 49])
    def test_uniform_is_the_mean(self, count: int) -> None:
        found = formula("uniform", count)
        assert (found.weights, found.divisor) == ((1.0,) * count, count)

    @pytest.mark.parametrize("count", [1, 2, 7])
    def test_linear_grows_by_one_per_checkpoint(self, count: int) -> None:
        found = formula("linear", count)
        assert found.weights == tuple(range(1, count + 1))
        assert found.divisor == sum(range(1, count + 1))

    def test_weights_are_divided_by_their_sum(self) -> None:
        found = formula("weighted", 3, weights=(3, 1, -2))
        assert (found.weights, found.divisor) == ((3.0, 1.0, -2.0), 2.0)

    def test_weights_are_summed_without_rounding_on_the_way(self) -> None:
        assert formula("weighted", 10, weights=[0.1] * 10).divisor == 1.0 != sum([0.1] * 10)

    def test_weights_are_used_as_they_are_where_that_is_wanted(self) -> None:
        found = formula("weighted", 3, weights=(1, 0, -1), normalize=False)
        assert (found.weights, found.divisor) == ((1.0, 0.0, -1.0), 1.0)

    def test_weights_may_be_as_large_and_small_as_products_stay_exact(self) -> None:
        assert formula("weighted", 3, weights=(LARGEST, 0, -SMALLEST)).weights == (LARGEST, 0.0, -SMALLEST)


class TestEma:
    """E_1 = x_1, E_k = d E_(k-1) + (1 - d) x_k."""

    @staticmethod
    def recursion(decays: Sequence[Fraction]) -> list[Fraction]:
        """The shares of the checkpoints after the recursion was run, with ``decays`` from one checkpoint to the next."""
        found = [Fraction(1)]
        for decay in decays:
            found = [share * decay for share in found] + [1 - decay]
        return found

    @pytest.mark.parametrize("steps", [STEPS, UNEVEN, (7,), (1, 2)])
    @pytest.mark.parametrize("decay", [0.5, 0.8, 0.999, 1e-6])
    def test_is_the_recursion_with_a_decay_per_checkpoint(self, decay: float, steps: tuple[int, ...]) -> None:
        expected = self.recursion([Fraction(decay)] * (len(steps) - 1))
        assert shares("ema", steps, decay=decay) == pytest.approx([float(share) for share in expected], rel=1e-14)

    def test_needs_no_steps_for_a_decay_per_checkpoint(self) -> None:
        assert formula("ema", 3, None, decay=0.5).weights == (0.25, 0.25, 0.5)

    @pytest.mark.parametrize("half_life", [1.0, 100.0, 12345.6])
    def test_is_the_recursion_with_a_decay_per_gap_of_steps(self, half_life: float) -> None:
        decays = [Fraction(math.exp2(-gap / half_life)) for gap in (50, 250, 600)]
        expected = [float(share) for share in self.recursion(decays)]
        assert shares("ema", UNEVEN, half_life=half_life) == pytest.approx(expected, rel=1e-12)

    def test_has_half_of_the_older_ones_left_after_a_half_life(self) -> None:
        assert shares("ema", (0, 100, 200), half_life=100) == [0.25, 0.25, 0.5]
        assert shares("ema", (0, 200), half_life=100) == [0.25, 0.75]

    @pytest.mark.parametrize("decay", [0.5, 0.8, 0.97])
    def test_with_a_half_life_and_equal_gaps_is_the_one_with_a_decay(self, decay: float) -> None:
        half_life = 100 * math.log(0.5) / math.log(decay)
        assert shares("ema", STEPS, half_life=half_life) == pytest.approx(shares("ema", STEPS, decay=decay), rel=1e-12)


class TestWsm:
    """Checkpoint merging stands for a decay of the learning rate: weights are what the decay loses from one step to the next."""

    DECAYS: tuple[tuple[str, Callable[[float], float]], ...] = (
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: math.cos(math.pi * x / 2) ** 2),
        ("1-sqrt", lambda x: 1 - x**0.5),
    )

    @pytest.mark.parametrize(("shape", "decay"), DECAYS)
    @pytest.mark.parametrize("steps", [STEPS, UNEVEN, (10, 20)])
    def test_gives_the_update_before_a_checkpoint_the_learning_rate_of_the_decay(
        self, steps: tuple[int, ...], shape: str, decay: Callable[[float], float]
    ) -> None:
        """An update that step k saved is in checkpoint k and all later ones, so that these weigh as much as f at step k."""
        found = shares("wsm", steps, shape=shape)
        length = steps[-1] - steps[0] + (steps[-1] - steps[-2])
        for k, step in enumerate(steps):
            assert math.fsum(found[k:]) == pytest.approx(decay((step - steps[0]) / length), abs=1e-12)

    def test_is_linear_unless_another_shape_is_wanted(self) -> None:
        assert shares("wsm", UNEVEN) == shares("wsm", UNEVEN, shape="linear")
        assert {name for name, _ in self.DECAYS} == set(SHAPES)

    @pytest.mark.parametrize("steps", [STEPS, (10, 20), (5,)])
    def test_with_the_linear_shape_and_equal_gaps_is_uniform(self, steps: tuple[int, ...]) -> None:
        assert shares("wsm", steps) == pytest.approx([1 / len(steps)] * len(steps), rel=1e-12)
        assert formula("wsm", len(steps), None).weights == pytest.approx([1 / len(steps)] * len(steps), rel=1e-12)

    def test_with_the_linear_shape_weighs_by_the_gap_that_follows(self) -> None:
        assert shares("wsm", (0, 10, 40)) == pytest.approx([10 / 70, 30 / 70, 30 / 70], rel=1e-12)

    def test_with_one_minus_the_root_the_oldest_is_the_heaviest(self) -> None:
        found = shares("wsm", STEPS, shape="1-sqrt")
        assert found == sorted(found, reverse=True)
        assert found[0] == pytest.approx(0.5)

    def test_with_the_cosine_the_middle_is_the_heaviest(self) -> None:
        found = shares("wsm", (1, 2, 3, 4, 5), shape="cosine")
        assert found == pytest.approx(found[::-1])
        assert max(found) == found[2]


class TestPosthocEma:
    """Power-function averages (EDM2): the profile at step T is (gamma + 1) t^gamma / T^(gamma + 1)."""

    @staticmethod
    def profile(times: np.ndarray[Any, Any], step: float, gamma: float) -> np.ndarray[Any, Any]:
        return np.where(times <= step, (gamma + 1) * (times / step) ** gamma / step, 0.0)

    @staticmethod
    def mean(values: np.ndarray[Any, Any], times: np.ndarray[Any, Any]) -> float:
        """The integral by the midpoints of equal intervals."""
        return float(values.sum() * (times[1] - times[0]))

    @staticmethod
    def grid(step: float, count: int = 200_000) -> np.ndarray[Any, Any]:
        return (np.arange(count) + 0.5) * (step / count)

    @pytest.mark.parametrize(("sigma", "gamma"), [(0.05, 16.97), (0.1, 6.94)])
    def test_exponents_are_those_of_the_paper(self, sigma: float, gamma: float) -> None:
        assert gamma_of(sigma) == pytest.approx(gamma, abs=0.01)

    @pytest.mark.parametrize("sigma", [0.01, 0.05, 0.1, 0.2, 0.28])
    def test_a_width_is_the_standard_deviation_of_the_profile_relative_to_its_end(self, sigma: float) -> None:
        times = self.grid(1.0)
        weights = self.profile(times, 1.0, gamma_of(sigma))
        middle = self.mean(weights * times, times)
        assert self.mean(weights, times) == pytest.approx(1, rel=1e-6)
        assert math.sqrt(self.mean(weights * (times - middle) ** 2, times)) == pytest.approx(sigma, rel=1e-4)

    @pytest.mark.parametrize("steps", [STEPS, UNEVEN, (1, 2)])
    @pytest.mark.parametrize("sigma", [0.05, 0.1, 0.2])
    def test_of_the_same_width_is_the_newest_one(self, sigma: float, steps: tuple[int, ...]) -> None:
        expected = [0.0] * (len(steps) - 1) + [1.0]
        assert shares("posthoc-ema", steps, sigma_rel=sigma, source_sigma_rel=sigma) == pytest.approx(expected, abs=1e-9)

    @pytest.mark.parametrize(("saved", "wanted"), [(0.05, 0.1), (0.05, 0.2), (0.1, 0.15), (0.05, 0.07), (0.1, 0.05)])
    def test_comes_close_to_the_profile_that_was_wanted(self, saved: float, wanted: float) -> None:
        steps = tuple(range(8, 1025, 8))
        times = self.grid(steps[-1])
        found = shares("posthoc-ema", steps, sigma_rel=wanted, source_sigma_rel=saved)
        sum_of_saved = sum(share * self.profile(times, step, gamma_of(saved)) for share, step in zip(found, steps, strict=True))
        target = self.profile(times, steps[-1], gamma_of(wanted))
        newest = self.profile(times, steps[-1], gamma_of(saved))
        missed = math.sqrt(self.mean((sum_of_saved - target) ** 2, times) / self.mean(target**2, times))
        assert missed < 0.05
        assert missed < math.sqrt(self.mean((newest - target) ** 2, times) / self.mean(target**2, times)) / 10

    def test_is_the_best_combination_of_what_was_saved(self) -> None:
        """Against least squares on a grid, up to the normalisation of the sum to one."""
        times = self.grid(UNEVEN[-1])
        profiles = np.stack([self.profile(times, step, gamma_of(0.05)) for step in UNEVEN], axis=1)
        best, *_ = np.linalg.lstsq(profiles, self.profile(times, UNEVEN[-1], gamma_of(0.12)), rcond=None)
        assert shares("posthoc-ema", UNEVEN, sigma_rel=0.12, source_sigma_rel=0.05) == pytest.approx(best / best.sum(), abs=1e-5)

    def test_does_not_depend_on_the_unit_of_time(self) -> None:
        longer = [1000 * step for step in UNEVEN]
        assert posthoc_ema(longer, 0.05, 0.1) == pytest.approx(posthoc_ema(UNEVEN, 0.05, 0.1), rel=1e-9)

    def test_refuses_averages_that_are_too_much_alike(self) -> None:
        error = refused("posthoc-ema", steps=(100, 100, 200), sigma_rel=0.1, source_sigma_rel=0.2)
        assert "too similar" in error.message
        assert error.hint == "choose fewer that are further apart: --every N"


class TestEveryMethod:
    CASES: tuple[tuple[Method, dict[str, Any]], ...] = (
        ("uniform", {}),
        ("weighted", {"weights": (0.1, 0.2, 0.3, -0.15)}),
        ("linear", {}),
        ("ema", {"decay": 0.7}),
        ("ema", {"half_life": 60}),
        ("wsm", {}),
        ("wsm", {"shape": "cosine"}),
        ("wsm", {"shape": "1-sqrt"}),
        ("posthoc-ema", {"sigma_rel": 0.1, "source_sigma_rel": 0.05}),
    )

    @pytest.mark.parametrize("steps", [STEPS, UNEVEN])
    @pytest.mark.parametrize(("method", "options"), CASES)
    def test_gives_shares_that_add_up_to_one(self, method: Method, options: dict[str, Any], steps: tuple[int, ...]) -> None:
        assert math.fsum(shares(method, steps, **options)) == pytest.approx(1, abs=1e-12)

    def test_is_one_of_these(self) -> None:
        assert {method for method, _ in self.CASES} == set(METHODS)
        error = refused("median")
        assert error.message == "unknown method median"
        assert error.expected == "uniform, weighted, linear, ema, wsm, posthoc-ema"


class TestRefusals:
    OPTIONS = (
        ("--weights", "weights", (1, 2, 3), "weighted"),
        ("--decay", "decay", 0.5, "ema"),
        ("--half-life", "half_life", 10, "ema"),
        ("--decay-shape", "shape", "linear", "wsm"),
        ("--sigma-rel", "sigma_rel", 0.1, "posthoc-ema"),
        ("--source-sigma-rel", "source_sigma_rel", 0.1, "posthoc-ema"),
    )

    @pytest.mark.parametrize(("name", "option", "value", "owner"), OPTIONS)
    def test_of_options_that_belong_to_another_method(self, name: str, option: str, value: Any, owner: str) -> None:
        for method in set(METHODS) - {owner}:
            error = refused(method, **{option: value})
            assert error.message == f"{name} belongs to the method {owner}, not to {method}"
            assert error.hint == f"pass --method {owner}, or leave {name} out"

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            (None, "the method weighted needs --weights"),
            ((), "0 weights for 3 checkpoints"),
            ((1, 2), "2 weights for 3 checkpoints"),
            ((1, 2, 3, 4), "4 weights for 3 checkpoints"),
            ((1, math.nan, 2), "the weight nan is out of range"),
            ((1, math.inf, 2), "the weight inf is out of range"),
            ((1, 1e61, 2), "the weight 1e+61 is out of range"),
            ((1, -1e-61, 2), "the weight -1e-61 is out of range"),
            ((0, 0, 0), "all weights are zero"),
            ((1, 1, -2), "the weights sum to zero, so they cannot be normalised"),
        ],
    )
    def test_of_weights(self, weights: tuple[float, ...] | None, message: str) -> None:
        assert refused("weighted", weights=weights).message == message

    def test_of_weights_that_cancel_says_how_to_use_them(self) -> None:
        assert refused("weighted", weights=(1, 0, -1)).hint == "pass --no-normalize to use them as they are"

    @pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, 1.5, math.nan, math.inf])
    def test_of_decays_outside_of_0_to_1(self, decay: float) -> None:
        assert refused("ema", decay=decay).message == "--decay is out of range"

    @pytest.mark.parametrize("half_life", [0.0, -10.0, math.nan, math.inf])
    def test_of_half_lives_that_are_no_time(self, half_life: float) -> None:
        assert refused("ema", half_life=half_life).message == "--half-life is out of range"

    @pytest.mark.parametrize("options", [{}, {"decay": 0.5, "half_life": 10}])
    def test_of_an_ema_without_one_speed(self, options: dict[str, Any]) -> None:
        error = refused("ema", **options)
        assert error.message == "the method ema needs either --decay or --half-life"
        assert error.expected == "--decay 0.8 (per checkpoint) or --half-life STEPS"

    def test_of_an_unknown_decay_shape(self) -> None:
        error = refused("wsm", shape="exponential")
        assert error.message == "unknown decay shape exponential"
        assert error.expected == "linear, cosine, 1-sqrt"

    @pytest.mark.parametrize("options", [{}, {"sigma_rel": 0.1}, {"source_sigma_rel": 0.1}])
    def test_of_a_posthoc_ema_without_both_widths(self, options: dict[str, Any]) -> None:
        assert refused("posthoc-ema", **options).message == "the method posthoc-ema needs --sigma-rel and --source-sigma-rel"

    @pytest.mark.parametrize("width", [0.0, -0.1, 0.29, 1.0, math.nan])
    def test_of_widths_that_no_power_function_has(self, width: float) -> None:
        for wanted, saved in ((width, 0.1), (0.1, width)):
            error = refused("posthoc-ema", sigma_rel=wanted, source_sigma_rel=saved)
            assert error.message == f"a relative width of {width} is out of range"
            assert error.expected == "between 0.001 and 0.28"

    def test_of_power_function_averages_of_step_0(self) -> None:
        error = refused("posthoc-ema", steps=(0, 10, 20), sigma_rel=0.1, source_sigma_rel=0.05)
        assert error.hint == "leave out the checkpoint of step 0"

    @pytest.mark.parametrize(
        ("method", "options"), [("ema", {"half_life": 10}), ("posthoc-ema", {"sigma_rel": 0.1, "source_sigma_rel": 0.05})]
    )
    def test_of_checkpoints_whose_steps_are_not_known_but_needed(self, method: str, options: dict[str, Any]) -> None:
        error = refused(method, steps=None, **options)
        assert "needs to know the step of every checkpoint" in error.message
        assert error.hint == "pass runs or step folders such as checkpoint-500"
