"""What a second component of a checkpoint lacks that the model beside it has: the only comparison where no class is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_cli.hub.config import Config, ties_embeddings
from ckpt_cli.hub.tied_names import tied_pair
from ckpt_cli.name_patterns import grouped, pattern_of
from ckpt_cli.names import few, stripped_names
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor


def lacking_of_model(mine: Mapping[str, Tensor], model: Mapping[str, Tensor], config: Config, *, average: bool) -> tuple[str, ...]:
    """Names (without wrappers) of floating tensors that the model has and a second component has not, in the order of the model.

    An ``average`` is of one model, so that it has all of its tensors. Another component may be a model of its own, with another head:
    of that, only what it has elsewhere (the same module of another layer) counts, and only if it has the shapes of the model. Empty if
    fewer than half of the names are alike, as then the two cannot be compared.
    """
    own, others = _named(mine), _named(model)
    if not own.keys() & others.keys():
        own, others = _without_prefix(own), _without_prefix(others)
    common = own.keys() & others.keys()
    if 2 * len(common) < len(own):
        return ()
    if not average and any(own[name].shape != others[name].shape for name in common):
        return ()
    stored = {others[name].alias_of or others[name].name for name in common}
    pair = tied_pair(list(others)) if ties_embeddings(config) else None
    partners = {pair[0]: pair[1], pair[1]: pair[0]} if pair is not None else {}
    kinds = {pattern_of(name)[0] for name in own}
    return tuple(
        name
        for name, tensor in others.items()
        if name not in own
        and tensor.dtype.kind == "float"
        and (tensor.alias_of or tensor.name) not in stored
        and partners.get(name) not in own
        and (average or pattern_of(name)[0] in kinds)
    )


def lacking_notes(component: str, lacking: Sequence[str], total: int) -> list[Note]:
    """A warning about tensors that a second component lacks, of the ``total`` that the model beside it has."""
    if not lacking:
        return []
    text = f"{component} lacks {len(lacking)} of the {total} tensors of the model beside it: {few(grouped(lacking))}"
    return [Note("warning", "lacks-tensors", text)]


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {new: tensors[old] for old, new in stripped_names(tensors).items()}


def _without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the part, ending in a dot, with which all names begin: a module that holds the model (``model.``, ``module.``)."""
    named = dict(tensors)
    while len(starts := {name.partition(".")[0] for name in named}) == 1 and all("." in name for name in named):
        start = f"{starts.pop()}."
        named = {name.removeprefix(start): tensor for name, tensor in named.items()}
    return named
