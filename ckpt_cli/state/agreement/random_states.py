"""Whether the random states of all ranks are of one form: ranks of one training save the same entries, of the same shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ckpt_cli.names import few, plural, printable
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.plain_values import TensorValue


def form_notes(randoms: Mapping[int, Any]) -> list[Note]:
    """Warnings about ranks whose random state lacks entries that others have, or holds something else in them."""
    forms = {rank: dict(_entries(value)) for rank, value in sorted(randoms.items())}
    names = dict.fromkeys(name for form in forms.values() for name in form)
    notes: list[Note] = []
    lacking: dict[tuple[str, ...], list[int]] = {}
    for rank, form in forms.items():
        absent = tuple(name for name in names if name not in form)
        if absent:
            lacking.setdefault(absent, []).append(rank)
    for absent, ranks in lacking.items():
        text = f"the random state of {_ranks(ranks)} lacks {few([printable(name) for name in absent], 3)}, others have it"
        notes.append(Note("warning", "missing-part", text))
    for name in names:
        held = {rank: form[name] for rank, form in forms.items() if name in form}
        usual = Counter(held.values()).most_common(1)[0][0]
        others = [rank for rank, said in held.items() if said != usual]
        if others:
            text = f"{printable(name)} in the random state of {_ranks(others)} is {held[others[0]]}, of other ranks {usual}"
            notes.append(Note("warning", "random-differs", text))
    return notes


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {few([str(rank) for rank in ranks])}"


def _entries(value: Any, path: str = "") -> list[tuple[str, str]]:
    """The entries of a random state. What a generator has drawn last may be a number or none; a rank may see any number of devices."""
    if isinstance(value, dict) and value:
        return [entry for key, item in value.items() for entry in _entries(item, f"{path}.{key}" if path else str(key))]
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, (dict, TensorValue)) for item in value):
        return list(dict.fromkeys(entry for item in value for entry in _entries(item, path)))
    if isinstance(value, (list, tuple)):
        inner = [item for item in value if isinstance(item, (list, tuple, TensorValue))]
        return [(path, ", ".join([plural(len(value), "value"), *(said for item in inner for _, said in _entries(item))]))]
    if isinstance(value, TensorValue):
        return [(path, f"{value.dtype} {list(value.shape)}")]
    # An empty list, dict or None is what a rank without this device saves.
    return [] if value is None or isinstance(value, (dict, list, tuple)) else [(path, "a value")]
