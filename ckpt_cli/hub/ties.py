"""Tied weights: which names of a model refer to a tensor that another name also refers to."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, replace

from ckpt_cli.hub.classes.expected_tensors import Expected
from ckpt_cli.hub.classes.fit import KnownClass
from ckpt_cli.hub.classes.names import native_names
from ckpt_cli.hub.classes.rules import HubRules
from ckpt_cli.hub.classes.tying import own_head, says_tied, ties_embeddings
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.tied_names import HEADS, last_two, tied_pair
from ckpt_cli.names import Naming, printable, stripped_names, unnumbered
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import same_after_cast, same_values
from ckpt_cli.tensors.tensor import Tensor

Live = Callable[[], Mapping[str, Tensor] | None]
"""The tensors of the model that an EMA is the average of, described when they are asked for; None if they cannot be."""


@dataclass(frozen=True, slots=True)
class Tie:
    """``name`` is not written, since ``partner`` is what a loader ties it to; ``reason`` for the user."""

    name: str
    partner: str
    reason: str


def find_ties(
    component: str,
    tensors: Mapping[str, Tensor],
    config: Config,
    rules: HubRules | None,
    kind: KnownClass | str = "",
    live: Live | None = None,
) -> tuple[list[Tie], list[tuple[str, str]]]:
    """The tied tensors of a component, under its names: those of the model in memory, or of the hub.

    ``rules`` know which names an architecture may tie, without them an output head and an embedding are looked for. Where the tensors
    of the class, ``kind``, are known, it decides which names are one tensor, otherwise the config does. Only
    equal values are tied, but for an EMA of which one of the two was not averaged: it is the ``live`` model's own. A head that the
    config, or the version that wrote it, meant to be one of its own is not tied. The second list are pairs that are tied and whose
    values differ.
    """
    expected = kind.known if isinstance(kind, KnownClass) and isinstance(kind.known, Expected) else None
    said = ties_embeddings(config)
    apart = said and own_head(config) is not None
    # A folder of the hub may call its tensors otherwise than the model, by whose names the class tells what is tied.
    stored = {new: name for name, new in native_names(tensors, rules).items()} if rules is not None else {name: name for name in tensors}
    tensors = {new: tensors[name] for new, name in stored.items()}
    found: list[Tie] = []
    differing: list[tuple[str, str]] = []
    for name, partner in _pairs(tensors, rules, said):
        one = expected.one_tensor(name, partner) if expected is not None else None
        ties = (said if one is None else one) and not (apart and name.endswith(HEADS))
        if any(tie.name in (name, partner) for tie in found):
            continue
        if same_values(tensors[name], tensors[partner]):
            shared = tensors[name].alias_of is not None or tensors[partner].alias_of is not None
            if ties or (one is None and shared and not name.endswith(HEADS)):
                found.append(Tie(name, partner, f"tied to {partner}, which has the same values"))
        elif ties and unnumbered(component)[0] == "ema" and (reason := _not_averaged(tensors[name], name, partner, live)) is not None:
            found.append(Tie(name, partner, f"tied to {partner}; {reason}"))
        elif ties:
            differing.append((name, partner))
    named = [Tie(stored[tie.name], stored[tie.partner], tie.reason.replace(tie.partner, stored[tie.partner])) for tie in found]
    return named, [(stored[name], stored[partner]) for name, partner in differing]


def tied_together(names: Collection[str], config: Config, kind: KnownClass | str, naming: Naming) -> dict[str, str]:
    """What names that are one tensor of the model have in common, for each that may be one of these; as on the hub or as trained."""
    if isinstance(kind, KnownClass) and isinstance(kind.known, Expected):
        tied = kind.known.tied if naming == "native" else kind.known.hub_tied
        return {name: tied.get(name, name) for name in names if name in tied or name in tied.values()}
    if not ties_embeddings(config):
        return {}
    rules = kind.rules if isinstance(kind, KnownClass) else None
    if rules is None or not rules.tied:
        pair = tied_pair(list(names))
        return dict.fromkeys(pair, pair[1]) if pair is not None else {}
    native = native_names(names, rules)
    return {name: source for name in names for target, source in rules.tied.items() if re.fullmatch(f"{target}|{source}", native[name])}


def differing_notes(differing: Mapping[str, str], written: Container[str], config: Config) -> list[Note]:
    """Notes about tensors that the config ties to others with different values, once it is decided what is written."""
    who = "config.json" if says_tied(config) else "the class, by default,"
    notes: list[Note] = []
    for name, partner in differing.items():
        if name in written and partner in written:
            outcome = ": both are written, of which transformers 5 keeps both and other loaders ignore one"
        elif partner in written:
            outcome = f", and only {printable(partner)} is written: a loader uses it for both"
        elif name in written:
            outcome = f", and only {printable(name)} is written: a loader looks for the other one"
        else:
            continue
        text = f"{who} ties {printable(name)} to {printable(partner)}, but their values differ{outcome}"
        notes.append(Note("warning", "tied-heads-differ", text))
    return notes


def _not_averaged(tensor: Tensor, name: str, partner: str, live: Live | None) -> str | None:
    """Why, of two tied tensors of an EMA, the one that loaders ignore is not an average; None if it may be one."""
    model = live() if live is not None else None
    ends = {last_two(each) for each in (name, partner, tensor.name)}
    short = stripped_names(model or {})
    alike = [other for stored, other in (model or {}).items() if last_two(short[stored]) in ends and other.shape == tensor.shape]
    if not alike:
        return "not compared with the model's own, which is not here: trainers that average only one of the two average that one"
    mine = replace(tensor, alias_of=None)  # aliases name tensors of their own component
    if any(same_after_cast(replace(other, alias_of=None), mine) for other in alike):
        return "this copy is the model's own, so it is not an average"
    return None


def _pairs(tensors: Mapping[str, Tensor], rules: HubRules | None, ties: bool) -> Iterator[tuple[str, str]]:
    """Names that may be tied, each with the first name of the other side that has its shape."""
    if rules is None or not rules.tied:
        pair = tied_pair(list(tensors)) if ties else None
        yield from [pair] if pair is not None else []
        return
    for target, source in rules.tied.items():
        for name in [name for name in tensors if re.fullmatch(target, name)]:
            alike = [other for other in tensors if other != name and re.fullmatch(source, other)]
            partner = next((other for other in alike if tensors[other].shape == tensors[name].shape), None)
            if partner is not None:
                yield name, partner
