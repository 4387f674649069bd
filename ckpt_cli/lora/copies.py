"""Weights of the base that an adapter's file holds a copy of, and tied weights that a base stores once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckpt_cli.errors import Inconsistent
from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.peft_names import Adapter, PeftState
from ckpt_cli.hub.tied_names import HEADS, embeddings_in, last_two, tied_pair
from ckpt_cli.lora.config import CONFIG
from ckpt_cli.tensors.equality import same_after_cast, same_values
from ckpt_cli.tensors.tensor import Tensor


def without_copies(state: PeftState, base: Mapping[str, Tensor], config: Config, biases: Collection[str], *, has_config: bool) -> PeftState:
    """The state without the weights that the base has too. One of another shape stays: the vocabulary was resized before training.

    ``biases`` were trained and stay, ``has_config``: there is a config that says which. Training does not change any other weight under an
    adapter, so that a copy with other values is that of another model: raises Inconsistent.
    """
    pair = tied_pair([*base, *(name for name in state.wrapped if name not in base)]) if ties_embeddings(config) else None
    partners = {pair[0]: pair[1], pair[1]: pair[0]} if pair is not None else {}
    kept = dict(state.tensors)
    for name in state.wrapped:
        other = base.get(name) or base.get(partners.get(name, ""))
        if other is None or name in (*state.saved, *biases) or other.shape != kept[name].shape:
            continue
        if not same_after_cast(kept[name], other) and not same_after_cast(other, kept[name]):
            if name.endswith(".bias"):
                raise _unlike_bias(state.wrapped[name], has_config=has_config)
            raise Inconsistent(
                "the adapter's file has a copy of this weight of its base, and the base has other values",
                tensor=state.wrapped[name],
                expected="the model that the adapter was trained on",
                hint="pass that model as --base",
            )
        del kept[name]
    return replace(state, tensors=kept)


def _unlike_bias(name: str, *, has_config: bool) -> Inconsistent:
    """The error for a bias in an adapter's file that nothing says was trained."""
    said = f"{CONFIG} says bias none" if has_config else f"there is no {CONFIG} that says whether it was trained (bias)"
    return Inconsistent(
        f"the adapter's file has this bias with other values than the base, and {said}",
        tensor=name,
        expected="the model that the adapter was trained on, or a trained bias",
        hint=f"if the bias was trained, set bias to lora_only or all in {CONFIG}" if has_config else f"add the {CONFIG} of the training",
    )


def with_ties(tensors: Mapping[str, Tensor], config: Config, adapters: Sequence[Adapter] = ()) -> dict[str, Tensor]:
    """Makes a tied head an alias of its embedding, as an update of one updates both: if the format has lost that, or stores one of them.

    ``adapters``: a head is only added if one of them is for it.
    """
    if not ties_embeddings(config):
        return dict(tensors)
    pair = tied_pair(list(tensors))
    if pair is not None:
        head, embedding = (tensors[name] for name in pair)
        alike = head.alias_of is None and same_values(head, embedding)
        return {**tensors, pair[0]: replace(head, alias_of=embedding.name)} if alike else dict(tensors)
    heads = [name for adapter in adapters if last_two(name := f"{adapter.module}.weight") in HEADS and name not in tensors]
    embeddings = embeddings_in(tensors)
    if len(heads) != 1 or len(embeddings) != 1 or any(last_two(name) in HEADS for name in tensors):
        return dict(tensors)
    embedding = tensors[embeddings[0]]
    return {**tensors, heads[0]: replace(embedding, name=heads[0], alias_of=embedding.name)}
