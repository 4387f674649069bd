"""What the numbers of checkpoints count, and what may be taken from them: their order, and how far they are apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from ckpt_cli.averaging.coefficients import ORDERED
from ckpt_cli.averaging.options import AverageOptions, Method
from ckpt_cli.averaging.path_numbers import shell_inversion
from ckpt_cli.averaging.recorded_order import recorded_order
from ckpt_cli.averaging.steps import Snapshots
from ckpt_cli.discover.found import Found, ages
from ckpt_cli.discover.newest import told_counters
from ckpt_cli.errors import UsageError
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note


def check_numbers(snapshots: Snapshots, method: Method, options: AverageOptions) -> None:
    """Raise UsageError where a method needs an order that is not there, or distances that numbers do not tell.

    Where numbers count different things, as epochs and steps, only those of one kind are compared: paths give the order then, unless
    something else is recorded, and numbers that were asked for do not.
    """
    counted = snapshots.by_counter
    if method in ORDERED and len(counted) > 1 and options.steps:
        text = f"the numbers of these steps are not of one kind, so they do not say which is older: {told_counters(counted)}"
        raise UsageError(text, hint="pass their folders, from old to new")
    is_known = sum(map(len, counted.values())) == len(snapshots.opened)
    for same in counted.values() if method in ORDERED else ():
        for run in [same] if is_known else _of_runs(same):
            _check_order(run, method, counted_anew=snapshots.counted_anew)
    if method in ORDERED and not snapshots.are_numbered_alike:
        _check_recorded(snapshots, method)
    if method != "posthoc-ema" and (method != "ema" or options.half_life is None):
        return
    hint = "pass --decay in place of --half-life" if method == "ema" else None
    if snapshots.counted_anew:
        raise UsageError("steps are counted anew in each epoch here, so their numbers do not say how far they are apart", hint=hint)
    if len(counted) > 1:
        text = f"the numbers of these checkpoints are not of one kind, so they do not say how far they are apart: {told_counters(counted)}"
        raise UsageError(text, hint=hint or "average those of one kind")


def _of_runs(found: Sequence[Found]) -> list[list[Found]]:
    """Those of each run: beside checkpoints without a number, numbers of several runs are not compared."""
    runs: dict[Path, list[Found]] = {}
    for each in found:
        runs.setdefault(each.numbered_at.parent, []).append(each)
    return list(runs.values())


def _check_order(found: Sequence[Found], method: Method, *, counted_anew: bool) -> None:
    order = list(map(ages(found), found))
    if any(a >= b for a, b in itertools.pairwise(order)):
        raise _disordered(method, [each.path.name if counted_anew else str(each.step) for each in found])


def _check_recorded(snapshots: Snapshots, method: Method) -> None:
    """The same by what is recorded of them, where names do not say it. Two of the same step may be of two trainings."""
    order = recorded_order(snapshots.opened)
    if order is not None and order.is_certain and order.inversion is not None:
        raise _disordered(method, order.names, f", by {order.by}")


def _disordered(method: Method, steps: Sequence[str], source: str = "") -> UsageError:
    text = f"the method {method} needs checkpoints ordered from old to new, but these are steps {', '.join(steps)}{source}"
    return UsageError(text, hint="pass them in order")


def order_notes(snapshots: Snapshots, method: Method) -> list[Note]:
    """That the order of a method is the one in which paths were given, where nothing tells another for certain.

    A warning if what they record, or the numbers in their paths, is in another order.
    """
    if method not in ORDERED or snapshots.are_numbered_alike:
        return []
    order, paths = recorded_order(snapshots.opened), [opened.found.path for opened in snapshots.opened]
    given = "they count from old to new in the order in which they were given"
    if order is not None and order.inversion is not None:
        first, second = order.inversion
        text = f"{paths[first]} ({order.by} {order.names[first]}) is before {paths[second]} ({order.names[second]})"
        return [Note("warning", "order-given", f"{text}, and {given}: if they are of one training, pass them from old to new")]
    if order is not None and order.tells_all:
        return []
    swapped = shell_inversion(paths)
    if swapped is not None:
        first, second = swapped
        text = f"{paths[first]} is before {paths[second]}, as a shell lists them, and {given}"
        return [Note("warning", "order-given", f"{text}: pass them by their numbers, as ls -v lists them, if these say which is older")]
    why = "nothing says" if order is None else f"what they record ({order.by} {few(order.names, 4)}) does not say"
    return [Note("info", "order-given", f"{why} which of these checkpoints is older: {given}")]


def unit_notes(snapshots: Snapshots, method: Method, options: AverageOptions) -> list[Note]:
    """What a half-life counts where the numbers are those of epochs; a warning if it is longer than all of them together span."""
    steps = snapshots.steps
    if method != "ema" or options.half_life is None or not steps:
        return []
    if "epochs" not in snapshots.by_counter:
        return []
    span, length = steps[-1] - steps[0], f"{options.half_life:g}"
    text = f"the names count epochs, so --half-life {length} is one of {length} epochs"
    if options.half_life <= span:
        return [Note("info", "half-life", text)]
    return [Note("warning", "half-life", f"{text}, and all of these are within {span}: the oldest one gets the most weight")]
