"""The names that the tensors of each class of transformers have, as the package ships them: known without asking transformers.

``known_names.json`` is made by `ckpt_cli.hub.classes.compile` from the default config of every class, so that numbers of layers and shapes
are not in it, and a name that only other settings bring along (a bias, a norm) may be absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_cli.hub.config import Config, architecture
from ckpt_cli.name_patterns import pattern_of

FILE = Path(__file__).with_name("known_names.json")

PREFERRED = ("ForConditionalGeneration", "ForCausalLM", "ForImageTextToText", "Model")
"""Endings of class names, the most likely one first, where several classes of a model type have the same tensors."""


@dataclass(frozen=True, slots=True)
class ClassNames:
    """Names in memory and as saved, ``{}`` in place of numbers; `Expected` tells what the rest means."""

    origin: str
    prefix: str
    native: frozenset[str]
    hub: frozenset[str]
    optional: tuple[str, ...]
    ignored: tuple[str, ...]


def class_names(config: Config) -> ClassNames | None:
    """The names of the class that a config names, None if the shipped file does not have them."""
    return _built(f"{config.get('model_type')}/{architecture(config)}")


def fitting_class(config: Config, names: Iterable[str]) -> str | None:
    """For a config that names no class: the class of its model type whose tensors fit ``names`` best, None if none fits."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return None
    held = {pattern_of(name)[0] for name in names}
    scores: list[tuple[int, int, str]] = []
    for kind in _classes_of(model_type):
        known = _built(f"{model_type}/{kind}")
        if known is not None and (fits := max(_agreement(held, known.native), _agreement(held, known.hub))) > 0:
            scores.append((fits, _rank(kind), kind))
    return max(scores)[2] if scores else None


def likeliest_class(model_type: str, like: str, names: Iterable[str] = ()) -> str | None:
    """The class of a model type that has the most of ``names``, None without any.

    Of several the one whose name ends as ``like`` does, then the one with the fewest other names.
    """
    held = {pattern_of(name)[0] for name in names}
    scores = []
    for kind, known in classes_of_type(model_type):
        common, others = max((len(held & side), -len(side - held)) for side in (known.native, known.hub))
        scores.append((common, _ending(kind) != "" and like.endswith(_ending(kind)), others if common else 0, _rank(kind), kind))
    return max(scores)[-1] if scores else None


def classes_of_type(model_type: str) -> Iterator[tuple[str, ClassNames]]:
    """The classes of a model type with their names, the most likely one first."""
    kinds = sorted(_classes_of(model_type), key=lambda kind: (-_rank(kind), kind))
    yield from ((kind, known) for kind in kinds if (known := _built(f"{model_type}/{kind}")) is not None)


def types_of(kind: str) -> list[str]:
    """The model types of a class, by the shipped file."""
    return [key.removesuffix(f"/{kind}") for key in _shipped()["models"] if key.endswith(f"/{kind}")]


def _ending(kind: str) -> str:
    """What a class is for, as the end of its name says: ``ForCausalLM``."""
    return kind[kind.rfind("For") :] if "For" in kind else "Model" if kind.endswith("Model") else ""


def _rank(kind: str) -> int:
    return next((len(PREFERRED) - i for i, ending in enumerate(PREFERRED) if kind.endswith(ending)), 0)


def _agreement(held: set[str], known: frozenset[str]) -> int:
    """Common names minus those that only one side has; 0 or less for sets with little in common."""
    return 2 * len(held & known) - len(held ^ known)


def _classes_of(model_type: str) -> Iterator[str]:
    for key in _shipped()["models"]:
        if key.startswith(f"{model_type}/"):
            yield key.removeprefix(f"{model_type}/")


def _built(key: str) -> ClassNames | None:
    shipped = _shipped()
    entry = shipped["models"].get(key)
    if entry is None:
        return None
    native, hub, prefix, optional, ignored = entry
    names = shipped["names"]
    listed = frozenset(names[i] for i in native)
    return ClassNames(
        f"transformers {shipped['transformers']}",
        prefix,
        listed,
        listed if hub is None else frozenset(names[i] for i in hub),
        tuple(optional),
        tuple(ignored),
    )


@cache
def _shipped() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content
