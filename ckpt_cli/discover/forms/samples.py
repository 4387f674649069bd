"""Steps of a run that hold no model but a file that an evaluation wrote there, such as samples or predictions in safetensors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from ckpt_cli.discover.found import Found, Target
from ckpt_cli.discover.places import MAIN
from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Match, ReadOptions
from ckpt_cli.formats.registry import describe, format_of
from ckpt_cli.formats.safetensors.names import SUFFIX
from ckpt_cli.names import plural

USUAL = re.compile(
    r"(.*[._-])?(models?|adapters?|ema|consolidated|weights|params|net(work)?|policy|actor|critic|generator|unet|transformer|lora|state_dict|"
    r"checkpoint|ckpt|snapshot|final|best|last|merged)([._-].*)?",
    re.ASCII | re.IGNORECASE,
)
"""What files of weights are called, without the ending."""

NUMBER = re.compile(r"[0-9]+", re.ASCII)

EVERYWHERE = {"weight", "bias", "model", "module", "base_model"}
SHORT = 4
"""Words of names of tensors that anything may have: those of everywhere, and those that are no longer than this many letters."""

MAX_ASKED = 2
"""How many other steps are described, the nearest ones, until one can be read."""


def sample_steps(target: Target) -> dict[Path, str]:
    """The steps of a run whose model would be a lone file of samples, each with what shows that.

    The name of the file is unusual, and it has no tensor that the nearest other step has, nor one that is named like any there. Of files
    named alike one is read, its header, and of the other step what lies where. Nothing is said where no other step can be read.
    """
    if target.run is None or len(target.checkpoints) < 2:
        return {}
    alike: dict[str, list[Found]] = {}
    for found in reversed(target.checkpoints):
        if (file := _lone_file(found)) is not None and not USUAL.fullmatch(file.stem):
            alike.setdefault(NUMBER.sub("N", file.name), []).append(found)
    doubted = {found.path for steps in alike.values() for found in steps}
    others = [found for found in target.checkpoints if found.path not in doubted]
    if not doubted or not others:
        return {}
    told: dict[Path, str] = {}
    with Files(values=False) as files:
        for first, *more in alike.values():
            near = sorted(others, key=lambda other: abs((other.step or 0) - (first.step or 0)))[:MAX_ASKED]
            nearest = next(_described(near, files), None)
            own = _tensors_of(first.places[0].match, files)
            if nearest is None or own is None or is_related(own, nearest[1]):
                continue
            other, tensors = nearest
            shown = f"has none of the {plural(len(tensors), 'tensor')} of the model in {target.label(other.path)}"
            told |= {found.path: f"its only file, {found.places[0].match.first.name}, {shown}" for found in (first, *more)}
    return told


def _lone_file(found: Found) -> Path | None:
    """The file, if the main component of a checkpoint is one safetensors file."""
    match = found.places[0].match
    file = format_of(match).single_file(match)
    return file if file is not None and file.suffix == SUFFIX and match.trouble is None and found.places[0].name in MAIN else None


def _described(others: list[Found], files: Files) -> Iterator[tuple[Found, Collection[str]]]:
    for other in others:
        if (tensors := _tensors_of(other.places[0].match, files)) is not None:
            yield other, tensors


def _tensors_of(match: Match, files: Files) -> Collection[str] | None:
    """The names of the tensors of a component; None if it cannot be read, of which others tell."""
    try:
        return describe(match, files, ReadOptions()).tensors.keys()
    except CkptError:
        return None


def is_related(names: Collection[str], others: Collection[str]) -> bool:
    """Whether tensors may be of the same model as others: by a name, or by a word of one, as adapters and prefixes leave it.

    >>> is_related(["lora_unet_q_proj.lora_up.weight"], ["layers.0.q_proj.weight"]), is_related(["latents"], ["layers.0.q_proj.weight"])
    (True, False)
    """
    if not names or set(names) & set(others):
        return True
    words = {word for word in itertools.chain.from_iterable(name.split(".") for name in others) if len(word) > SHORT}
    text = "\n".join(names)
    return any(word in text for word in words - EVERYWHERE)
