"""The weight of each checkpoint in an average: one formula per method, from old to new.

=============  ===================================================================================================
method         weights of N checkpoints at steps t_1 < ... < t_N
=============  ===================================================================================================
uniform        1 each, divided by N (SWA, LAWA 2306.03241, model soups 2203.05482, PMA 2505.12082)
weighted       what the user says, divided by their sum unless normalisation is off
linear         1, 2, ..., N, divided by their sum (WMA of PMA 2505.12082)
ema            E_1 = x_1, E_k = decay E_(k-1) + (1 - decay) x_k: decay^(N-1), then (1 - decay) decay^(N-k); with a half-life in
               steps, the decay of each is 0.5^((t_k - t_(k-1)) / half-life)
wsm            for the shape f of a learning rate decay, f(0) = 1, f(1) = 0: f(x_k) - f(x_(k+1)) (WSM 2507.17634), where x_k is
               how far into the decay a step is; equal gaps give x_k = (k - 1) / N
posthoc-ema    least squares of power-function averages (EDM2 2312.02696, algorithm 3)
=============  ===================================================================================================
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from ckpt_cli.averaging.options import DecayShape, Method
from ckpt_cli.errors import UsageError
from ckpt_cli.names import plural
from ckpt_cli.tensors.weighted_sum import Formula

METHODS: tuple[Method, ...] = get_args(Method)

SHAPES: dict[DecayShape, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
}
ORDERED = ("linear", "ema", "wsm", "posthoc-ema")
"""Methods for which old and new are not the same."""

LARGEST, SMALLEST = 1e60, 1e-60
"""Bounds for the magnitude of a weight, so that products with any weight of a model are exact."""


def formula(
    method: Method,
    count: int,
    steps: Sequence[int] | None = None,
    *,
    weights: Sequence[float] | None = None,
    normalize: bool = True,
    decay: float | None = None,
    half_life: float | None = None,
    shape: DecayShape | None = None,
    sigma_rel: float | None = None,
    source_sigma_rel: float | None = None,
) -> Formula:
    """The weights of ``count`` checkpoints, old to new, and the divisor of their sum.

    ``steps`` are their training steps, None if they are not known; ``decay`` is per checkpoint, ``half_life`` in steps;
    ``sigma_rel`` are relative widths as EDM2 defines them: of the target average and of the saved ones. Raises
    UsageError for what a method cannot work with.
    """
    owners = {
        "--weights": (weights, "weighted"),
        "--no-normalize": (None if normalize else True, "weighted"),
        "--decay": (decay, "ema"),
        "--half-life": (half_life, "ema"),
        "--decay-shape": (shape, "wsm"),
        "--sigma-rel": (sigma_rel, "posthoc-ema"),
        "--source-sigma-rel": (source_sigma_rel, "posthoc-ema"),
    }
    _check_options(method, owners)
    if method == "uniform":
        return Formula((1.0,) * count, float(count))
    if method == "weighted":
        return _weighted(count, weights, normalize)
    if method == "linear":
        return Formula(tuple(float(i + 1) for i in range(count)), count * (count + 1) / 2)
    if method == "ema":
        return Formula(_noticeable(_ema(count, steps, decay, half_life)), 1.0)
    if method == "wsm":
        if shape is not None and shape not in SHAPES:
            raise UsageError(f"unknown decay shape {shape}", expected=", ".join(SHAPES))
        return Formula(_noticeable(_wsm(count, steps, SHAPES[shape or "linear"])), 1.0)
    if sigma_rel is None or source_sigma_rel is None:
        raise UsageError(
            "the method posthoc-ema needs --sigma-rel and --source-sigma-rel",
            expected="the relative width of the average to make, and of those training saved, such as 0.1 and 0.05",
        )
    return Formula(_noticeable(posthoc_ema(_known(steps, "posthoc-ema"), source_sigma_rel, sigma_rel)), 1.0)


def _noticeable(weights: tuple[float, ...]) -> tuple[float, ...]:
    """The weights, with zero for those too small to change any result."""
    return tuple(weight if abs(weight) >= SMALLEST else 0.0 for weight in weights)


def _check_options(method: Method, owners: Mapping[str, tuple[object, str]]) -> None:
    """Raise UsageError for an unknown method, and for options that belong to another one."""
    if method not in METHODS:
        raise UsageError(f"unknown method {method}", expected=", ".join(METHODS))
    for name, (value, owner) in owners.items():
        if value is not None and owner != method:
            others = any(other is not None and its_owner == method for other, its_owner in owners.values())
            hint = f"leave {name} out" if others else f"pass --method {owner}, or leave {name} out"
            raise UsageError(f"{name} belongs to the method {owner}, not to {method}", hint=hint)


def _weighted(count: int, weights: Sequence[float] | None, normalize: bool) -> Formula:
    if weights is None:
        raise UsageError("the method weighted needs --weights", expected="one weight per checkpoint, such as --weights 0.5,0.3,0.2")
    listed = tuple(float(weight) for weight in weights)
    if len(listed) != count:
        counted = plural(len(listed), "weight")
        hint = "leave --weights out for the mean of all, or choose the checkpoints with --steps; --dry-run lists them"
        expected = "one for each, oldest first or in the order of --steps, separated by commas"
        raise UsageError(
            f"{counted} for {count} checkpoints",
            expected=expected,
            hint=hint,
        )
    for weight in listed:
        if not math.isfinite(weight) or (weight and not SMALLEST <= abs(weight) <= LARGEST):
            raise UsageError(f"the weight {weight} is out of range", expected=f"0, or a magnitude of {SMALLEST:g} to {LARGEST:g}")
    if not any(listed):
        raise UsageError("all weights are zero")
    total = math.fsum(listed) if normalize else 1.0
    if abs(total) < SMALLEST:
        raise UsageError("the weights sum to zero, so they cannot be normalised", hint="pass --no-normalize to use them as they are")
    return Formula(listed, total)


def _ema(count: int, steps: Sequence[int] | None, decay: float | None, half_life: float | None) -> tuple[float, ...]:
    if decay is not None and half_life is None:
        if not 0 < decay < 1:
            raise UsageError("--decay is out of range", expected="a number between 0 and 1")
        kept = [decay] * (count - 1)
    elif half_life is not None and decay is None:
        if not 0 < half_life < math.inf:
            raise UsageError("--half-life is out of range", expected="a positive number of steps")
        known = _known(steps, "ema with a half-life")
        kept = [0.5 ** ((later - earlier) / half_life) for earlier, later in itertools.pairwise(known)]
    else:
        raise UsageError("the method ema needs either --decay or --half-life", expected="--decay 0.8 (per checkpoint) or --half-life STEPS")
    weights = []
    for k in range(count):
        entered = 1.0 if k == 0 else 1.0 - kept[k - 1]
        weights.append(entered * math.prod(kept[k:]))
    return tuple(weights)


def _wsm(count: int, steps: Sequence[int] | None, shape: Callable[[float], float]) -> tuple[float, ...]:
    times = list(range(count)) if steps is None or count < 2 else list(steps)
    last_gap = times[-1] - times[-2] if count > 1 else 1
    length = times[-1] - times[0] + last_gap
    decay = [shape((time - times[0]) / length) for time in times] + [0.0]
    return tuple(now - later for now, later in itertools.pairwise(decay))


def _known(steps: Sequence[int] | None, what: str) -> Sequence[int]:
    if steps is None:
        raise UsageError(f"{what} needs to know the step of every checkpoint", hint="pass runs or step folders such as checkpoint-500")
    return steps


# -- power-function averages (Karras et al., "Analyzing and improving the training dynamics of diffusion models") -------

MAX_SIGMA = 0.28
"""The relative width of a uniform average from the beginning is 1 / sqrt(12): no power function is wider."""

MIN_SIGMA = 0.001
MAX_CONDITION = 1e12


def gamma_of(sigma_rel: float) -> float:
    """The exponent of the power-function profile ``t^gamma`` whose relative width is ``sigma_rel`` (EDM2, algorithm 2)."""
    import numpy

    inverse = sigma_rel**-2
    return float(numpy.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def posthoc_ema(steps: Sequence[int], source_sigma_rel: float, sigma_rel: float) -> tuple[float, ...]:
    """Weights of saved averages that best approximate an average of another width at the last step (EDM2, algorithm 3).

    Raises UsageError if the saved averages are too similar to tell apart.
    """
    import numpy

    for width in (source_sigma_rel, sigma_rel):
        if not MIN_SIGMA <= width < MAX_SIGMA:
            raise UsageError(f"a relative width of {width} is out of range", expected=f"between {MIN_SIGMA} and {MAX_SIGMA}")
    times = numpy.array([*steps, steps[-1]], float)
    if times[0] <= 0:
        raise UsageError("power-function averages begin after step 0", hint="leave out the checkpoint of step 0")
    gammas = numpy.array([gamma_of(source_sigma_rel)] * len(steps) + [gamma_of(sigma_rel)])
    ratio = times[:, None] / times[None, :]
    exponent = numpy.where(times[:, None] < times[None, :], gammas[None, :], -gammas[:, None])
    products = (gammas[:, None] + 1) * (gammas[None, :] + 1) * ratio**exponent
    products /= (gammas[:, None] + gammas[None, :] + 1) * numpy.maximum(times[:, None], times[None, :])
    among, wanted = products[:-1, :-1], products[:-1, -1]
    scale = 1 / numpy.sqrt(numpy.diag(among))
    if float(numpy.linalg.cond(among * scale[:, None] * scale[None, :])) > MAX_CONDITION:
        fewer = "choose fewer that are further apart: --every N" if len(steps) > 2 else None
        raise UsageError("the saved averages are too similar to derive another one from them", hint=fewer)
    weights = numpy.linalg.solve(among, wanted)
    return tuple(float(weight) for weight in weights / weights.sum())
