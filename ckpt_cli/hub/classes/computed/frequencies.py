"""The frequencies of rotary embeddings: those that a config describes, and those that a stored table holds.

Element i of n is ``theta ** (-i / n)``, whatever part of a head is turned; scaling divides all of them (linear) or the slow ones (llama3).
Formulas of other kinds (yarn, longrope) are left out: only what no scaling explains is told of these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_cli.hub.config import Config, levels, model_type
from ckpt_cli.hub.dialects.rotary import SCALING, TRAINED, has_layers, plain_rotary
from ckpt_cli.names import printable
from ckpt_cli.tensors.reading import elements
from ckpt_cli.tensors.tensor import Tensor

if TYPE_CHECKING:
    from ckpt_cli.tensors.reading import Array

TABLE = re.compile(r"(.+_)?inv_freq|freqs_cis|sin_cached", re.ASCII)
"""Last parts of names of tables from which frequencies can be read; ``cos_cached`` lies beside a table of sines."""

MOST = 1 << 12
"""More frequencies than any head has."""

USUAL = 10000.0
UNSAID = frozenset({"llama", "mistral", "gpt_neox", "qwen2"})
"""Model types whose classes take `USUAL` where an older config names no base, and whose older checkpoints hold the table."""

SLOWED = ("yarn", "longrope")
"""Kinds that no table without scaling has another base of: none, or the config's, where it is scaled after the training."""

SAME, OTHER = 0.01, 0.1
"""Relative differences up to which rounding to 16 bits may explain them, and from which on no rounding does, nor powers in 16 bits."""

LEAST = 1.2e-7
"""Two steps of the smallest numbers of fp16, in which slow frequencies are hardly to be told apart."""

TRIES = 3
"""Digits of a base that a table is tried with."""

MOST_DIGITS = 1e15
"""Larger bases are written with an exponent."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary embedding as a config describes it: its base, and how it is scaled."""

    theta: float
    scaling: Mapping[str, Any]

    @property
    def kind(self) -> object:
        return self.scaling.get("rope_type")

    @property
    def text(self) -> str:
        factor = _number(self.scaling.get("factor"))
        times = f" by {factor:g}" if factor is not None else ""
        return f"rope_theta {_exact(self.theta)}" + (f", scaled{times} ({printable(self.kind)})" if self.kind is not None else "")

    @property
    def plain(self) -> bool:
        """Whether all that its tables may hold is known."""
        return self.kind in (None, "linear", "llama3")

    def tables(self, count: int) -> list[Array]:
        """The tables of so many frequencies that code for this may hold: older code divides positions, and not the table (linear)."""
        plain, factor = _geometric(self.theta, count), _number(self.scaling.get("factor"))
        if self.kind in (None, "dynamic"):
            return [plain]
        if self.kind == "linear" and factor is not None:
            return [plain / factor, plain]
        numbers = [_number(self.scaling.get(key)) for key in ("factor", "low_freq_factor", "high_freq_factor", TRAINED)]
        if self.kind == "llama3" and None not in numbers:
            return [_of_llama_3(plain, *(number for number in numbers if number is not None))]
        return []


def described(config: Config) -> list[Rotary]:
    """The rotary embeddings of a config, of all its parts and kinds of layers."""
    found = []
    for level in levels(config):
        _, said = plain_rotary(level, has_layers(level))
        if model_type(level) in UNSAID and not any(key.endswith("rope_theta") for key in said):
            said = {**said, "rope_theta": USUAL}
        for key, value in said.items():
            theta, prefix = _number(value), key.removesuffix("rope_theta")
            if prefix != key and theta is not None and theta > 1:
                found.append(Rotary(theta, said.get(f"{prefix}{SCALING}") or {}))
    return found


def stored_frequencies(leaf: str, tensor: Tensor) -> Array | None:
    """The frequencies that a table of this name holds, from fast to slow; None if it does not look like one.

    Of tables with a row for each position the row of position 1 tells them: these are angles of at most 1.
    """
    import numpy

    shape = tuple(size for size in tensor.shape if size != 1)
    pairs = tensor.dtype.kind == "float" and len(shape) == 3 and shape[-1] == 2
    if leaf.endswith("inv_freq") and tensor.dtype.kind == "float" and len(shape) == 1 and 2 <= shape[0] <= MOST:
        values = elements(tensor).astype(numpy.float64)
    elif leaf == "freqs_cis" and (pairs or (tensor.dtype.kind == "complex" and len(shape) == 2)) and shape[0] > 1 < shape[1] <= MOST:
        width = shape[1] * (2 if pairs else 1)
        row = elements(tensor, width, width)
        values = numpy.arctan2(row[1::2], row[::2]) if pairs else numpy.angle(row)
        values = values.astype(numpy.float64)
    elif leaf == "sin_cached" and tensor.dtype.kind == "float" and len(shape) == 2 and shape[0] > 1 and 4 <= shape[1] <= MOST:
        row = elements(tensor, shape[1], shape[1]).astype(numpy.float64)
        values = numpy.arcsin(numpy.clip(row, -1, 1))
    else:
        return None
    values = numpy.sort(values)[::-1]
    twice = leaf == "sin_cached" and len(values) % 2 == 0 and bool((values[::2] == values[1::2]).all())
    return values[::2] if twice else values


def contradiction(stored: Array, rotaries: Sequence[Rotary]) -> str | None:
    """What frequencies say otherwise than every rotary embedding of a config; empty if they are those of one, None if nothing is sure."""
    import numpy

    if not numpy.isfinite(stored).all() or stored[0] <= 0:
        return f"the frequencies stored are none of a rotary embedding ({_shown(stored)}), and config.json says {rotaries[0].text}"
    if any(_within(stored, table, SAME) for rotary in rotaries for table in rotary.tables(len(stored))):
        return ""
    theta, divided = _meaning(stored)
    for rotary in rotaries:
        if rotary.plain:
            tables = rotary.tables(len(stored))
            if not tables or any(_within(stored, table, OTHER) for table in tables):
                return None
        elif rotary.kind not in SLOWED or theta is None or divided != 1 or _within(stored, _geometric(rotary.theta, len(stored)), OTHER):
            return None
    said = f"config.json says {rotaries[0].text}"
    if theta is not None:
        by = f", divided by {_digits(divided)}" if divided != 1 else ""
        said += " without scaling" if by and rotaries[0].kind is None else ""
        return f"the frequencies stored are those of rope_theta {_digits(theta)}{by}, and {said}"
    if not math.isclose(stored[0], 1, rel_tol=SAME):
        return None  # yarn and llama3 keep the fastest one: this may be a table of something else
    tables = rotaries[0].tables(len(stored))
    there = f" ({_shown(tables[0])})" if tables else ""
    return f"the frequencies stored ({_shown(stored)}) are those of no rope_theta without scaling, and {said}{there}"


def _meaning(stored: Array) -> tuple[float | None, float]:
    """The base of a table without scaling, None if there is none, and by what all frequencies are divided."""
    import numpy

    count = len(stored)
    last = int(numpy.flatnonzero(stored > stored[0] * 1e-4)[-1])
    if last == 0:
        return None, 1.0
    theta, divided = float((stored[0] / stored[last]) ** (count / last)), float(1 / stored[0])
    divided = 1.0 if math.isclose(divided, 1, rel_tol=SAME) else divided
    if not (math.isfinite(theta) and theta > 1 and _within(stored, _geometric(theta, count) / divided, 2 * SAME)):
        return None, 1.0
    return theta, divided


def _geometric(theta: float, count: int) -> Array:
    import numpy

    table: Array = theta ** -(numpy.arange(count, dtype=numpy.float64) / count)
    return table


def _of_llama_3(plain: Array, factor: float, low: float, high: float, trained: float) -> Array:
    """Slow frequencies are divided, fast ones are kept, and those between are mixed (transformers' modeling_rope_utils)."""
    import numpy

    turns = trained * plain / (2 * math.pi)
    kept = numpy.clip((turns - low) / (high - low), 0, 1) if high != low else (turns > low).astype(numpy.float64)
    table: Array = (1 - kept) * plain / factor + kept * plain
    return table


def _within(stored: Array, table: Array, relative: float) -> bool:
    import numpy

    expected = numpy.sort(table)[::-1]
    return bool((numpy.abs(stored - expected) <= relative * expected + LEAST).all())


def _number(value: object) -> float | None:
    """A number above 0."""
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
    return float(value) if right else None  # type: ignore[arg-type]


def _digits(value: float) -> str:
    """A number in as few digits as say it to a hundredth: a table of 16 bits tells no more."""
    tried = (float(f"{value:.{digits}g}") for digits in range(1, TRIES + 1))
    return _exact(next((each for each in tried if math.isclose(each, value, rel_tol=SAME)), value))


def _exact(value: float) -> str:
    return f"{value:.0f}" if value == round(value) and value < MOST_DIGITS else f"{value:g}"


def _shown(table: Array) -> str:
    return ", ".join(f"{value:.3g}" for value in table[:3]) + (", ..." if len(table) > 3 else "")
