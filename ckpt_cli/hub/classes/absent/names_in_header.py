"""Names that a tensor has besides the one that it is stored under, as headers of safetensors files tell them.

`safetensors.torch.save_model` stores what several names of a module share once, under the name that sorts first, and notes the others:
``__metadata__`` has ``{left out: stored}``. Where a module is held under two names, that may leave out all names of the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpt_cli.errors import Inconsistent
from ckpt_cli.hub.classes.fit import KnownClass
from ckpt_cli.hub.classes.prefixes import UNCHANGED, class_of, common_prefix
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import Naming, few, is_extra_state, stripped_names
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.tensor import Tensor


def other_names(metadata: Mapping[str, str], stored: Mapping[str, object]) -> dict[str, str]:
    """Entries of a header that say of a name which is not stored under which one its tensor is."""
    return {name: kept for name, kept in metadata.items() if kept in stored and name not in stored and not is_extra_state(name)}


def with_names_of_class(component: Component, config: Config, naming: Naming) -> tuple[Component, list[Note]]:
    """Tensors whose stored name the class of the config does not have, under the name in the header that it has; and a note about it.

    All other tensors stay as they are: a tied head that is stored in the place of an embedding is a name of the class too.
    """
    stored = component.tensors
    noted = other_names(component.metadata, stored)
    if not noted or has_adapters(stored):
        return component, []
    try:
        stripped = stripped_names([*stored, *noted])
    except Inconsistent:
        return component, []
    shapes = {new: stored[noted.get(old, old)].shape for old, new in stripped.items()}
    kind = class_of(config, shapes)
    if not isinstance(kind, KnownClass):
        return component, []
    change = common_prefix(kind, shapes) if naming == "hub" else UNCHANGED
    placed = {old for old, new in stripped.items() if kind.count({change.of(new): shapes[new]})}
    names: dict[str, list[str]] = {kept: [] for kept in noted.values() if kept not in placed}
    for name, kept in noted.items():
        if kept in names and name in placed:
            names[kept].append(name)
    names = {kept: fitting for kept, fitting in names.items() if fitting}
    if not names:
        return component, []
    tensors: dict[str, Tensor] = {}
    for kept, tensor in stored.items():
        first, *more = names.get(kept, [kept])
        tensors[first] = tensor
        tensors |= {name: replace(tensor, name=name, alias_of=first) for name in more}
    stored_as = few(grouped(list(names)), 1)
    text = (
        f"{len(names)} of the tensors are stored under other names than those of {kind.kind} ({stored_as}): the header of the file, as "
        "save_model writes it, says that they are the same tensors"
    )
    return replace(component, tensors=tensors), [Note("info", "names-in-header", text)]
