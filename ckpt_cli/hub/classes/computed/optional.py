"""Tensors of a class that are not there, and that its loader makes anew without a word: what is said of them, and when they are lacking."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ckpt_cli.boxes import shape_text
from ckpt_cli.hub.classes.claims import Claim
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few, plural
from ckpt_cli.tensors.component import Note

ADVICE = "--carry-from-base takes them from the base"


def with_optional_of_base(made: Claim, base: Collection[str]) -> Claim:
    """A claim in which optional tensors are lacking like all others if the base has them: the training had values of them."""
    fit, there = made.fit, [name for name in made.computing if name in base]
    if fit is None or not there:
        return made
    lacking = {**made.lacking, **{name: shape_text(fit.optional[name]) for name in there}}
    return replace(made, fit=fit.needing(there), lacking=lacking, optional=tuple(name for name in made.optional if name not in there))


def with_optional_notes(made: Claim) -> Claim:
    """A claim with what is said of optional tensors that are neither there nor lacking."""
    computing = made.computing
    others = [name for name in made.optional if name not in computing]
    notes = []
    if computing:
        text = f"{_absent_of(made, computing)}, and loaders set them to their initial values without a word"
        notes.append(Note("warning", "optional-tensors", f"{text}; {ADVICE}"))
    if others:
        text = f"{_absent_of(made, others)}, and which make no difference: models compute them anew, count with them, or do not use them"
        notes.append(Note("info", "recomputed-tensors", text))
    return replace(made, notes=(*made.notes, *notes)) if notes else made


def _absent_of(made: Claim, names: Sequence[str]) -> str:
    return f"{made.named} has {plural(len(names), 'tensor that is', 'tensors that are')} not here: {few(grouped(names), 3)}"
