"""What a merge would say that is as true where the tensors are read, and nothing is written."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_cli.drafting.draft import Draft
from ckpt_cli.hub.dialects.rotary_order import ROTARY_ORDER
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few
from ckpt_cli.output.select import is_wanted
from ckpt_cli.tensors.component import Note

OF_NAMES = ("native-names", "unused-rule", ROTARY_ORDER)
"""Notes about names that are told although names are compared with a live model, or looked at, by who reads."""

OF_LACKING = ("optional-tensors", "left-out-of-base", "missing-kinds", "uneven-layers", "no-layers")
"""Warnings about tensors that a model should have, where nothing proves it."""

OF_WRITING = frozenset({
    *("header-metadata", "unloaded-name", "lora-kept", "foreign-names", "own-prefix", "dtype-kept"),
    *("vocabulary", "token-ids", "no-end", "other-end", "base-tokenizer", "generation-settings"),
    *("class-repaired", "value-head", "no-scales"),
})  # fmt: skip
"""Warnings about the folder that a merge would write: its names and headers, its tokenizer, its config.json."""


def notes_of_reading(draft: Draft) -> list[Note]:
    """All warnings about values: how adapters were fused, replicas, files that are torn, a base that is another.

    Which names a class has is not told: they are compared with the model that is filled, or with those of another checkpoint.
    """
    of_class = {note for note in draft.claim.notes if note.code not in OF_NAMES}
    told = dict.fromkeys(note for note in draft.notes if note.level == "warning" and note not in of_class)
    return [note for note in told if note.code not in OF_WRITING]


def lacking_notes(draft: Draft, include: Sequence[str], exclude: Sequence[str]) -> list[Note]:
    """Warnings about tensors of the class that are wanted and not there, for who gets a state dict: a merge refuses or tells that."""
    claim = draft.claim
    lacking = [name for name in claim.lacking if name == "*" or is_wanted(name, include, exclude)]
    filtered = include or exclude
    told = [] if filtered else [note for note in claim.notes if note.code in OF_LACKING]
    if not lacking:
        return told
    text = claim.lacking.get("*") or f"not here: {few(grouped(lacking), 3)} of {claim.named}"
    return [Note("warning", "missing-tensors", f"{text}; a merge refuses this"), *told]
