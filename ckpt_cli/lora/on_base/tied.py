"""What the class that was trained ties to a tensor: its output head to an embedding, whatever the two are called."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_cli.hub.classes.rules import rules_for
from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.tied_names import EMBEDDINGS, HEADS, RARE_EMBEDDINGS, SHARED, last_two
from ckpt_cli.lora.on_base.trained_class import trained_config
from ckpt_cli.names import few

LITERAL = re.compile(r"[\w.]+", re.ASCII)
"""A pattern that is a name."""

KNOWN = (*EMBEDDINGS, *RARE_EMBEDDINGS, SHARED)


def tied_to(name: str, config: Config, settings: Config) -> tuple[str, ...] | None:
    """The other names of a tensor in the model that adapters were trained on, as its class ties them.

    ``config`` is that of the model, ``settings`` are those of adapter_config.json, which may name another class: a classifier has no head
    to tie. None where the class is not known, or knows no such tensor, so that only usual names tell.
    """
    trained = trained_config(config, settings)
    rules = rules_for(trained)
    if rules is None or not ties_embeddings(trained):
        return None if rules is None else ()
    sources = {source for target, source in rules.tied.items() if re.fullmatch(f"{target}|{source}", name)}
    group = {name for source in sources for target, other in rules.tied.items() if other == source for name in (target, source)}
    if not group and rules.tied and last_two(name) in (*KNOWN, *HEADS):
        return None
    return tuple(sorted(other for other in group if other != name and LITERAL.fullmatch(other)))


def usually_tied(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """The same by usual names alone: of these ``names``, or where none of them is it, what it is usually called."""
    known = HEADS if last_two(name) in KNOWN else KNOWN if last_two(name) in HEADS else ()
    return tuple(other for other in names if last_two(other) in known) or known[:1]


def told_tie(name: str, others: Iterable[str]) -> str:
    """How what is tied to a tensor is called: an output head by what it is."""
    others = list(others)
    if last_two(name) not in KNOWN:
        return "the embedding"
    heads = [other for other in others if last_two(other) not in KNOWN]
    return "the output head" if heads or not others else few(others)
