"""Which tensors of a component are written, under which names: wrappers, key maps, filters, tied heads, replicas."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_cli.assets import tied_pair
from ckpt_cli.errors import Inconsistent, NotFound, Unsupported
from ckpt_cli.key_map import Rule, mapped_names, unused_rules
from ckpt_cli.model import Component, Note, Tensor
from ckpt_cli.model_config import ties_embeddings
from ckpt_cli.names import foreign_names, printable, stripped_names
from ckpt_cli.probe import same_values, unequal_copies

LORA = re.compile(r"(^|\.)(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer)\.")


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors to write, by output name, and what became of the others: ``dropped`` with the reason, counts for the rest.

    ``tied`` is the output head that was left out, and the embedding that it is tied to.
    """

    tensors: dict[str, Tensor]
    dropped: dict[str, str]
    renamed: int
    left_out: int
    notes: tuple[Note, ...]
    tied: tuple[str, str] | None = None

    def with_head(self, head: str, embedding: str) -> Selection:
        """With a tied output head as well, as its embedding: for a base that stores both."""
        dropped = {name: why for name, why in self.dropped.items() if name != head}
        return replace(self, tensors={**self.tensors, head: replace(self.tensors[embedding], name=head)}, dropped=dropped, tied=None)


def select_tensors(
    component: Component,
    config: Mapping[str, Any],
    *,
    rules: tuple[Rule, ...] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow_unequal_replicas: bool = False,
) -> Selection:
    """Decide names and tensors. ``include`` and ``exclude`` are globs for whole output names.

    Raises NotFound if nothing is left, Unsupported for PEFT weights (unless a filter asks for them as they are), Inconsistent
    for names that collide and replicas that differ.
    """
    notes: list[Note] = []
    dropped: dict[str, str] = {}
    names = stripped_names(component.tensors)
    mapped = mapped_names(names.values(), rules)
    notes += [_unused("rule", pattern) for pattern in unused_rules(names.values(), rules)]
    tensors: dict[str, Tensor] = {}
    for old, stripped in names.items():
        new = mapped[stripped]
        if new is None:
            dropped[stripped] = "left out by the key map"
        else:
            tensors[new] = component.tensors[old]
    kept = {name: tensor for name, tensor in tensors.items() if _wanted(name, include, exclude)}
    if not kept:
        raise NotFound("no tensor is left after --include and --exclude", hint="patterns are matched against whole names, as in '*.mlp.*'")
    patterns = (*include, *exclude)
    notes += [_unused("pattern", pattern) for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in tensors)]
    lora = next((name for name in kept if LORA.search(name)), None)
    if lora is not None and not (include or exclude):
        raise Unsupported(
            "these are weights with PEFT adapters; written as they are, no model class would load them",
            tensor=lora,
            expected="weights without adapters",
            hint="load lora_adapter/ with PEFT, or pass --include '*' to write the tensors under the names they have",
        )
    for tensor in kept.values():
        if tensor.check_copies:
            notes += compare_copies(tensor, allow_unequal_replicas)
    trainer = foreign_names(kept)
    if trainer is not None:
        text = f"these are {trainer}'s own tensor names, which no Hugging Face class loads: rename them with --key-map"
        notes.append(Note("warning", "foreign-names", text))
    tied = _tied_head(component.name, kept, config, notes)
    if tied is not None:
        dropped[tied[0]] = tied[2]
        del kept[tied[0]]
    renamed = sum(new not in component.tensors for new in kept)
    return Selection(kept, dropped, renamed, len(tensors) - len(kept) - (tied is not None), tuple(notes), tied[:2] if tied else None)


def _tied_head(component: str, kept: Mapping[str, Tensor], config: Mapping[str, Any], notes: list[Note]) -> tuple[str, str, str] | None:
    """The output head that the config ties to the embedding, the embedding, and why the head is left out."""
    pair = tied_pair(list(kept)) if ties_embeddings(config) else None
    if pair is None:
        return None
    head, embedding = pair
    if same_values(kept[head], kept[embedding]):
        return head, embedding, f"tied to {embedding}, which has the same values"
    if component == "ema":
        return head, embedding, f"tied to {embedding}; trainers average that one only, so this copy is not an average"
    text = f"config.json ties {head} to {embedding}, but their values differ: both are written, and a loader will ignore one"
    notes.append(Note("warning", "tied-heads-differ", text))
    return None


def compare_copies(tensor: Tensor, allowed: bool) -> list[Note]:
    """Notes about copies of one tensor that differ. Raises Inconsistent for them unless ``allowed``."""
    for piece, copy in unequal_copies(tensor):
        text = f"ranks {piece.rank} and {copy.rank} hold different values of what should be replicas"
        if not allowed:
            raise Inconsistent(
                text,
                tensor=tensor.name,
                expected="the same values on all ranks (files of one step)",
                hint=f"pass --allow-unequal-replicas to take those of rank {piece.rank}",
            )
        return [Note("warning", "replicas-differ", f"{printable(tensor.name)}: {text}; those of rank {piece.rank} were taken")]
    return []


def _unused(kind: str, pattern: str) -> Note:
    return Note("warning", f"unused-{kind}", f"the {kind} {printable(pattern)} matches no tensor name (it must match a whole name)")


def _wanted(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    included = not include or any(fnmatch.fnmatchcase(name, pattern) for pattern in include)
    return included and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)
