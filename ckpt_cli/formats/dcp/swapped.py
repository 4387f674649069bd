"""The second model of composer's EMA in a DCP folder: that of the training, while the average stands in the model's place.

Where algorithms are a dict, its tensors are some of the folder; where they are a list, which torch does not take apart, they are in one
object with the settings of all algorithms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_cli.files.folders import is_file
from ckpt_cli.formats.dcp.items import ItemReader
from ckpt_cli.formats.dcp.metadata import Catalog, CatalogTensor
from ckpt_cli.formats.torch_files.swapped import ACTIVE, ALGORITHMS, COMPOSER, EMA_MODEL, HELD, second_model, swapped_text
from ckpt_cli.tensors.component import Note

CURRENT = "current"
"""The name of the component with the weights of the training."""


def second_tensors(tensors: Mapping[str, CatalogTensor], model: Sequence[str]) -> dict[tuple[str, ...], dict[str, CatalogTensor]]:
    """The tensors of second models beside the one below the keys ``model``: by the keys of the second model, by their keys."""
    above = (*model[:-1], ALGORITHMS)
    found: dict[tuple[str, ...], dict[str, CatalogTensor]] = {}
    for key, tensor in tensors.items():
        depth, path = len(above), tensor.path
        if path[:depth] == above and len(path) > depth + 3 and path[depth + 1] == EMA_MODEL and path[depth + 2] in HELD:
            found.setdefault(path[: depth + 2], {})[key] = tensor
    return found


def swapped_notes(catalog: Catalog, reader: ItemReader, chosen: str, main: str) -> list[Note]:
    """A warning if the group ``chosen`` is not what it is called; ``main`` is the place of the model, such as ``state.model``."""
    above = (*main.split(".")[:-1], ALGORITHMS)
    for thing in catalog.objects.values():
        if thing.stored is None or thing.path[: len(above)] != above or not is_file(reader.path(thing.stored.file)):
            continue
        rest = thing.path[len(above) :]
        if not rest and chosen == main and (item := reader.parsed(thing.stored)) is not None:
            second = second_model(item.root)
            if second is not None and second.active:
                where = f"the object {'.'.join(above)}, from which none are read"
                return [Note("warning", "averaged", swapped_text(COMPOSER, main, where))]
        elif len(rest) == 2 and rest[1] == ACTIVE:
            key = ".".join((*above, rest[0], EMA_MODEL))
            active = reader.value(thing.stored) is True
            if active and chosen == main:
                return [Note("warning", "averaged", swapped_text(COMPOSER, main, f"{key}: --type {CURRENT}"))]
            if not active and chosen == key:
                return [Note("warning", "averaged", f"{swapped_text(COMPOSER, key, main)}, since {ACTIVE} is not set")]
    return []
