"""Two sets of tensors compared, as text: facts, groups with the biggest drift first, and a map of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.heatmap import HERE, SHORTEST, Sides, drift_table, heatmap, table_legend
from ckpt_cli.cli.screens.widgets import WARNING, good, print_facts
from ckpt_cli.names import few
from ckpt_cli.results.drift import BaseComparison
from ckpt_cli.verifying.drift.groups import covered_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ckpt_cli.cli.session import Session

SHOWN = 4
"""How many names of a list are shown."""

LABELS = 13
"""Columns of the labels, with the space behind them."""


def print_comparison(comparison: BaseComparison, session: Session) -> None:
    """Everything about a comparison with a base that was made with values."""
    console = session.out()
    print_facts(console, base_facts(comparison, HERE, console.width))
    print_drift(comparison, console, HERE)


def print_drift(comparison: BaseComparison, console: Console, sides: Sides, *, with_map: bool = True) -> None:
    """The table of what changed, what its heads mean, and the map; nothing if no number can be told."""
    if not any(group.changed and group.kind == "floating" for group in comparison.groups):
        return
    console.print()
    console.print(drift_table(comparison.groups, console.width))
    for line in table_legend(console.width, sides):
        console.print(line, soft_wrap=True)
    if with_map and comparison.heatmap is not None:
        console.print()
        for line in heatmap(comparison.heatmap, console.width, sides, ascii_only=console.options.ascii_only):
            console.print(line, soft_wrap=True)


def base_facts(comparison: BaseComparison, sides: Sides, width: int) -> list[tuple[str, str | Text]]:
    """The base, how many tensors differ from it, and `comparison_facts`."""
    alike = comparison.common - len(comparison.reshaped)
    named = f"{text.path(comparison.base)}   {text.plural(comparison.common, 'tensor')} in common, {alike} of the same shape"
    said = "" if comparison.unchanged is None else comparison.counted
    return [("base", named), ("drift", said), *comparison_facts(comparison, sides, width)]


def comparison_facts(comparison: BaseComparison, sides: Sides, width: int) -> list[tuple[str, str | Text]]:
    """What could not be compared, how much was, and what is in no distance; empty values are left out by `print_facts`."""
    pairs = dict.fromkeys(
        f"{sides.base} {item.base_dtype}, {sides.mine} {item.dtype}" for item in comparison.changes if item.dtype != item.base_dtype
    )
    facts: list[tuple[str, str | Text]] = [
        (f"only in {sides.base}", _named(comparison.missing)),
        (f"only {sides.mine}" if sides is HERE else f"only in {sides.mine}", _named(comparison.extra)),
        ("other shape", _named(comparison.reshaped)),
        ("other dtype", f"{_named(comparison.other_dtype)} ({'; '.join(list(pairs)[:SHOWN])})" if comparison.other_dtype else ""),
        ("compared", good(covered_text(comparison, sides.base, sides.place), WARNING)),
        ("integers", _without_distance(comparison, "integer")),
        ("packed", _without_distance(comparison, "packed")),
        ("unchanged", _unchanged(comparison, max(width - LABELS, SHORTEST))),
    ]
    return facts + [
        (fact.what, fact.mine if fact.mine == fact.base else f"{sides.base} {fact.base}, {sides.mine} {fact.mine}")
        for fact in comparison.formats
    ]


def _named(names: tuple[str, ...]) -> str:
    return f"{text.plural(len(names), 'tensor')}: {few(names, SHOWN)}" if names else ""


def _without_distance(comparison: BaseComparison, kind: str) -> str:
    """How many tensors of a kind that has no distance differ, and which."""
    count = sum(group.tensors for group in comparison.groups if group.kind == kind)
    changed = [drift.name for drift in comparison.drifts if drift.kind == kind]
    verb = "differs" if len(changed) == 1 else "differ"
    return f"{len(changed)} of {text.plural(count, 'tensor')} {verb}, without a distance: {few(changed, SHOWN)}" if changed else ""


def _unchanged(comparison: BaseComparison, width: int) -> str:
    """All tensors in which no bit changed: the largest parts of the model by name, the rest as a number."""
    if not comparison.unchanged or not comparison.drifts:
        return ""
    parts = comparison.frozen[:SHOWN]
    counts = [f" ({text.exact(part.tensors)})" if part.tensors > 1 else "" for part in parts]
    listed = [f"{text.elided(part.part, max(width - len(count) - 1, SHORTEST))}{count}" for part, count in zip(parts, counts, strict=True)]
    rest = comparison.unchanged - sum(part.tensors for part in parts)
    more = f" and {text.exact(rest)} more" if rest else ""
    return f"{text.plural(comparison.unchanged, 'tensor')}: {', '.join(listed)}{more}"
