"""An embedding that was trained as a whole in front of a head that is tied to it, of which training kept the first values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.peft_names import PeftState
from ckpt_cli.hub.tied_names import HEADS, embeddings_in, last_two
from ckpt_cli.lora.on_base.tied import tied_to, told_tie
from ckpt_cli.lora.settings import TYING
from ckpt_cli.lora.targets import is_end
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import same_after_cast
from ckpt_cli.tensors.tensor import Tensor

TIED_BY_PEFT = ("embed_tokens", "lm_head")
"""``EMBEDDING_LAYER_NAMES`` of peft."""


def with_untrained_heads(
    state: PeftState, base: Mapping[str, Tensor], config: Config, settings: Config
) -> tuple[PeftState, tuple[Note, ...]]:
    """The adapters of ``state`` with the head that their training used, where neither they nor the ``base`` store one.

    PEFT trains a copy of each module of ``modules_to_save``, and a head that was tied to the first one stays as it was, unless the
    ``settings``, those of adapter_config.json, tie the copies.
    """
    if not ties_embeddings(config) or _is_tied_by_peft(settings):
        return state, ()
    saved = {name: tied_to(name, config, settings) for name in state.tensors if name in base and _is_saved(name, state, settings)}
    stored = {*state.tensors, *base}
    by_name = embeddings_in(state.tensors) if not any(last_two(name) in HEADS for name in stored) else []
    # Where the class is not known, usual names tell what may be tied, but not what the head is called.
    meant = {name: others or () for name, others in saved.items() if (name in by_name if others is None else others)}
    meant = {name: others for name, others in meant.items() if stored.isdisjoint(others)}
    if len(meant) != 1:
        return state, ()
    ((name, others),) = meant.items()
    if len(others) != 1 or state.tensors[name].shape != base[name].shape:
        if state.tensors[name].shape == base[name].shape and same_after_cast(state.tensors[name], base[name]):
            return state, ()  # a copy that no part of the model used, as of T5's shared embedding
        text = f"{name} was trained as a whole, and not {told_tie(name, others)}, which config.json ties to it"
        text += ": the output has the trained one in both"
        return state, (Note("warning", "lora-tied", text),)
    (head,) = others
    level: Literal["info", "warning"] = "info" if settings else "warning"  # without a config, PEFT may have tied the copies
    text = f"{name} was trained as a whole, and not the output head: {head} is written as training had it, with the values of the base"
    return replace(state, tensors={**state.tensors, head: replace(base[name], name=head)}), (Note(level, "lora-tied", text),)


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
