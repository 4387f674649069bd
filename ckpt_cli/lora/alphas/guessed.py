"""What is said of a scale that no adapter_config.json tells: alpha is known there, but not how it was used, nor for which modules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ckpt_cli.lora.config import CONFIG, FLAG, META, OF_MODEL, AdapterFacts
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

GUESSED = ("lora-alpha", "lora-plain")
"""Codes of what is said of alphas and scales, which is as true where nothing is written."""


def guessed_notes(facts: AdapterFacts, ranks: Mapping[str, int], parts: Iterable[str]) -> list[Note]:
    """Warnings about what was taken for granted of adapters with these ``ranks`` (module -> r), wrapped by PEFT in these ``parts``."""
    return [*_common_alpha(facts, ranks, tuple(parts)), *_plain_scale(facts, {*ranks.values()})]


def _common_alpha(facts: AdapterFacts, ranks: Mapping[str, int], parts: tuple[str, ...]) -> list[Note]:
    """A warning about one alpha for modules whose ranks differ: who gives them ranks of their own may give them alphas too.

    A config without ``alpha_pattern`` says that there was one alpha, but where several parts were wrapped it is that of one of them.
    """
    if facts.config.get("alpha_pattern") and facts.origin != FLAG:
        return []
    by_part = {part: sorted({rank for path, rank in ranks.items() if path.startswith(part)}) for part in parts}
    taken = f"alpha {facts.alpha:g} ({facts.origin}) is taken for all of them"
    if len(parts) > 1 and len({*map(tuple, by_part.values())}) > 1:
        said = ", ".join(f"{part.removesuffix('.') or 'the model'} with r {_listed(found)}" for part, found in by_part.items())
        text = f"PEFT wrapped several parts of the model ({said}), and {taken}: if each had its own, say so in {CONFIG}"
    elif not facts.config and len({*ranks.values()}) > 1:
        text = f"the ranks of modules differ (r {_listed(sorted({*ranks.values()}))}), there is no {CONFIG}, and {taken}"
        text += ": if some had their own, copy that file of the training into the checkpoint, or write one"
    else:
        return []
    return [Note("warning", "lora-alpha", f"{text} (lora_alpha, and alpha_pattern for the others)")]


def _plain_scale(facts: AdapterFacts, ranks: set[int]) -> list[Note]:
    """What is said where no config tells whether the scale is alpha / r or alpha / sqrt(r); for a rank of 1 they are one.

    That of verl, which leaves `META` in place of a config, is alpha / r, and so is that of a class which adds the adapters itself.
    """
    if facts.config or facts.origin == OF_MODEL or facts.alpha is None or not ranks - {0, 1}:
        return []
    if META in facts.looked_in:
        return [Note("info", "lora-plain", f"there is no {CONFIG}: the scale is taken to be alpha / r, without rank stabilisation")]
    text = f"there is no {CONFIG}: the scale is taken to be alpha / r"
    stabilised = "in a training with rank stabilisation (use_rslora) it was alpha / sqrt(r)"
    if len(ranks) > 1:
        text += f", without rank stabilisation; {stabilised}: then copy that file of the training into the checkpoint"
    else:
        (rank,) = ranks
        alpha, root = facts.alpha, math.sqrt(rank)
        text += f" = {alpha / rank:.6g}; {stabilised} = {alpha / root:.6g}: if {alpha:g} is the lora_alpha of such a training, "
        text += f"pass {FLAG} {_exact(alpha * root)} (alpha * sqrt(r))"
    return [Note("warning", "lora-plain", text)]


def _exact(value: float) -> str:
    """A number with all of its digits, since a scale is made of it."""
    return f"{value:.0f}" if value.is_integer() else repr(value)


def _listed(ranks: Iterable[int]) -> str:
    return few([str(rank) for rank in ranks])
