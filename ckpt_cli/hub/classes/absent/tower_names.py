"""Towers whose weights lie one module deeper in files of older versions of transformers: ``vision_tower.vision_model.encoder``.

The towers of CLIP and SigLIP held a module ``vision_model`` (or ``text_model``) with all of their weights, and so do files on the hub.
Today these are the tower's own, and loading takes the part out of the names (``PrefixChange`` for `CLIPVisionModel` in
`transformers/conversion_mapping.py` of 5.24). Which of the two a file has is told by its own names; both load, and neither is changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from ckpt_cli.hub.classes.expected_tensors import Expected
from ckpt_cli.hub.classes.known_names import ClassNames

WORDS = ("vision_model", "text_model")
FAMILIES = ("clip", "siglip")
"""Parts of the model types of which a tower is a model of its own, with nothing in front of this module."""

MODULES: Mapping[str, tuple[str, str]] = {
    "colqwen2": ("vlm", "model"),
    **dict.fromkeys(("gemma3n_text", "qwen3_5_text", "qwen3_5_moe_text", "apertus1p5_text"), ("model", "language_model")),
}
"""Model types -> a part of theirs, and a module that it has in files of other versions (ColQwen2), or in those of the larger model that a
text model is also loaded from (``PrefixChange`` for these types in the same table)."""

Value = TypeVar("Value")
Deeper = tuple[tuple[str, str], ...]


def as_spelled(known: Expected | ClassNames, names: Collection[str], model_type: object) -> Expected | ClassNames:
    """The tensors of a class under the names that a file with these ``names`` has for those of its towers."""
    parts = _deeper((*known.native, *known.hub), names, model_type)
    if not parts:
        return known
    if isinstance(known, ClassNames):
        return replace(known, native=frozenset(_set(known.native, parts)), hub=frozenset(_set(known.hub, parts)))
    tied, hub_tied = ({_spelled(name, parts): _spelled(owner, parts) for name, owner in of.items()} for of in (known.tied, known.hub_tied))
    return replace(known, native=_keys(known.native, parts), hub=_keys(known.hub, parts), tied=tied, hub_tied=hub_tied)


def _deeper(known: Collection[str], names: Collection[str], model_type: object) -> Deeper:
    """The towers that have a module of one of the `WORDS` in a file, and none in the class."""
    alone = isinstance(model_type, str) and any(family in model_type for family in FAMILIES)
    held: set[tuple[str, str]] = set()
    module = MODULES.get(model_type) if isinstance(model_type, str) else None
    if module is not None and any(f".{'.'.join(module)}." in f".{name}" for name in names):
        held.add(module)
    for name in names:
        for word in WORDS:
            before, found, _ = f".{name}".partition(f".{word}.")
            if found and (before or alone):
                held.add((before.rpartition(".")[2], word))
    dotted = [f".{name}" for name in known] if held else []
    return tuple(
        (tower, word)
        for tower, word in sorted(held)
        if any(f".{tower}." in name or not tower for name in dotted)
        and not any((f".{tower}.{word}." if tower else f".{word}.") in name for name in dotted)
    )


def _spelled(name: str, parts: Deeper) -> str:
    for tower, word in parts:
        start, found, rest = f".{name}".partition(f".{tower}.") if tower else ("", ".", name)
        if found:
            return f"{start}.{tower}.{word}.{rest}".replace("..", ".").removeprefix(".")
    return name


def _keys(shapes: Mapping[str, Value], parts: Deeper) -> dict[str, Value]:
    return {_spelled(name, parts): value for name, value in shapes.items()}


def _set(names: Iterable[str], parts: Deeper) -> set[str]:
    return {_spelled(name, parts) for name in names}
