"""The comparison of a model with its base, as text: facts, groups with the biggest drift first, and a map of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.heatmap import drift_table, heatmap
from ckpt_cli.cli.screens.widgets import print_facts
from ckpt_cli.results.drift import BaseComparison

if TYPE_CHECKING:
    from ckpt_cli.cli.session import Session

SHOWN = 4
"""How many names of a list are shown."""


def print_comparison(comparison: BaseComparison, session: Session) -> None:
    """Everything about a comparison that was made with values."""
    console = session.out()
    print_facts(console, comparison_facts(comparison))
    if comparison.drifts:
        console.print()
        console.print(drift_table(comparison.groups, console.width))
    if comparison.drifts and comparison.heatmap is not None:
        console.print()
        for line in heatmap(comparison.heatmap, console.width, ascii_only=console.options.ascii_only):
            console.print(line, soft_wrap=True)


def comparison_facts(comparison: BaseComparison) -> list[tuple[str, str]]:
    """How an output differs from its base, in lines; empty lines are left out."""
    alike = comparison.common - len(comparison.reshaped)
    facts = [("base", f"{text.path(comparison.base)}   {text.plural(comparison.common, 'tensor')} in common, {alike} of the same shape")]
    listed = (("only in base", comparison.missing), ("only here", comparison.extra), ("other shape", comparison.reshaped))
    pairs = dict.fromkeys(f"{item.dtype} for {item.base_dtype}" for item in comparison.changes if item.dtype != item.base_dtype)
    dtypes = f" ({', '.join(list(pairs)[:SHOWN])})" if pairs else ""
    for label, names in (*listed, ("other dtype", comparison.other_dtype)):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            which = dtypes if label == "other dtype" else ""
            facts.append((label, f"{text.plural(len(names), 'tensor')}{which}: {', '.join(names[:SHOWN])}{more}"))
    if comparison.unchanged is not None:
        facts.append(("values", f"{comparison.unchanged} tensors are unchanged, {len(comparison.drifts)} differ"))
        parts = [
            f"all {part.tensors} tensors" if part.part == "*" else f"{part.part}: {part.tensors} tensors"
            for part in comparison.frozen
            if part.tensors > 1
        ]
        facts.append(("frozen", ", ".join(parts[:SHOWN]) + (f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else "")))
    return facts + [(fact.what, fact.mine if fact.mine == fact.base else f"{fact.mine}; base: {fact.base}") for fact in comparison.formats]
