"""An embedding that was trained as a whole in front of a head that is tied to it, of which training kept the first values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ckpt_cli.hub.classes.rules import rules_for
from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.peft_names import PeftState
from ckpt_cli.hub.tied_names import EMBEDDINGS, HEADS, last_two
from ckpt_cli.lora.settings import TYING
from ckpt_cli.lora.targets import is_end
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

LITERAL = re.compile(r"[\w.]+", re.ASCII)
"""A pattern that is a name."""

TIED_BY_PEFT = ("embed_tokens", "lm_head")
"""``EMBEDDING_LAYER_NAMES`` of peft."""


def with_untrained_heads(
    state: PeftState, base: Mapping[str, Tensor], config: Config, settings: Config
) -> tuple[PeftState, tuple[Note, ...]]:
    """The adapters alone of ``state`` with the head that their training used, where neither they nor the ``base`` store one.

    PEFT trains a copy of each module of ``modules_to_save``, and a head that was tied to the first one stays as it was, unless the
    ``settings``, those of adapter_config.json, tie the copies.
    """
    if not ties_embeddings(config) or _is_tied_by_peft(settings):
        return state, ()
    saved = [name for name in state.tensors if last_two(name) in EMBEDDINGS and name in base and _is_saved(name, state, settings)]
    if len(saved) != 1 or any(last_two(name) in HEADS for name in (*state.tensors, *base)):
        return state, ()
    name, head = saved[0], _head_of(saved[0], config)
    if head is None or state.tensors[name].shape != base[name].shape:
        text = f"{name} was trained as a whole, and not the output head, which config.json ties to it"
        text += ": the output has the trained one in both"
        return state, (Note("warning", "lora-tied", text),)
    text = f"{name} was trained as a whole, and not the output head: {head} is written as training had it, with the values of the base"
    return replace(state, tensors={**state.tensors, head: replace(base[name], name=head)}), (Note("info", "lora-tied", text),)


def _is_tied_by_peft(settings: Config) -> bool:
    """Whether PEFT tied the copies: it looks for names that it knows, whatever the model ties (peft, ``_check_tied_modules``)."""
    entries = settings.get("modules_to_save")
    named = [entry.rpartition(".")[2] for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []
    return settings.get(TYING) is True and any(name in TIED_BY_PEFT for name in named)


def _is_saved(name: str, state: PeftState, settings: Config) -> bool:
    """Whether a tensor was trained as a whole: what has no adapter is, but for resized embeddings, which PEFT saves unasked."""
    if name in state.wrapped:
        return False
    entries = settings.get("modules_to_save")
    module = name.rpartition(".")[0]
    return not settings or (isinstance(entries, list) and any(isinstance(entry, str) and is_end(module, entry) for entry in entries))


def _head_of(embedding: str, config: Config) -> str | None:
    """The name of the head that the class ties to an embedding."""
    rules = rules_for(config)
    tied = rules.tied if rules is not None else {}
    named = [head for head, source in tied.items() if re.fullmatch(source, embedding)]
    heads = [head for head in named if LITERAL.fullmatch(head) and last_two(head) in HEADS]
    return heads[0] if len(heads) == 1 else None
