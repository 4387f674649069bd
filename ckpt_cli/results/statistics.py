"""What `inspect --stats` and `show` return."""

from __future__ import annotations

from pydantic import Field

from ckpt_cli.results.checkpoint import Frozen, NoteInfo, Place
from ckpt_cli.results.inspect import InspectResult
from ckpt_cli.results.numbers import Number


class TensorStats(Frozen):
    """The values of one tensor, or of ``tensors`` whose names differ in numbers only, all together.

    ``absmax``, ``smallest``, ``largest``, ``mean`` and ``std`` (divided by n, not n - 1) are of the finite values, None if there are none,
    or if they are no real numbers. ``exponents``: how many finite values have 2^e <= |x| < 2^(e+1), by e, where a histogram was asked for.
    """

    name: str
    dtype: str
    tensors: int = 1
    elements: int
    nan: int
    infinite: int
    zeros: int
    absmax: Number = None
    smallest: Number = None
    largest: Number = None
    mean: Number = None
    std: Number = None
    exponents: dict[int, int] = Field(default_factory=dict)


class StatsResult(InspectResult):
    """What `inspect` returns, and statistics of all values: per component, of each tensor and of each group."""

    stats: dict[str, tuple[TensorStats, ...]]
    stat_groups: dict[str, tuple[TensorStats, ...]]


class HeldPart(Frozen):
    """A part of a tensor: the ``box`` (start and stop per dimension) that a rank holds in a file; ``replica`` of one listed before."""

    rank: int
    file: str
    box: tuple[tuple[int, int], ...]
    replica: bool = False


class ShowResult(Frozen):
    """A part of a tensor with its values, and which rank holds what of the whole.

    ``index`` is the slice, ``shown`` its shape, ``values`` its elements in C order: numbers, "NaN", "Infinity", "-Infinity", bools, or text
    for complex ones.
    """

    path: Place
    step: int | None
    component: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    index: str
    shown: tuple[int, ...]
    values: tuple[float | int | bool | str, ...]
    parts: tuple[HeldPart, ...]
    notes: tuple[NoteInfo, ...] = ()
