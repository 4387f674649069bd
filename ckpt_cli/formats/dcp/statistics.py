"""What is in a DCP folder beside its groups of weights and is applied to the inputs or outputs of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckpt_cli.files.folders import is_file
from ckpt_cli.formats.dcp.groups import Group
from ckpt_cli.formats.dcp.items import ItemReader
from ckpt_cli.formats.dcp.metadata import Catalog, CatalogObject, CatalogTensor
from ckpt_cli.formats.training_state_names import is_record_key, is_result_key, is_state_key, is_statistics_key
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.plain_values import TensorValue, Unrepresented


def statistics_notes(catalog: Catalog, groups: Iterable[Group], reader: ItemReader) -> list[Note]:
    """A warning about statistics that are in none of ``groups``: scalars, and values that are no tensors."""
    held = {id(entry) for group in groups for entry in (*group.tensors.values(), *group.counters.values(), *group.objects.values())}
    entries: tuple[CatalogTensor | CatalogObject, ...] = (*catalog.tensors.values(), *catalog.objects.values())
    found = dict.fromkeys(_statistics([entry for entry in entries if id(entry) not in held], reader))
    return [Note("warning", "beside-weights", f"left out, since they are beside the state dict: {few(list(found))}")] if found else []


def _statistics(entries: Sequence[CatalogTensor | CatalogObject], reader: ItemReader) -> Iterator[str]:
    for entry in entries:
        place = next((place for place, key in enumerate(entry.path) if is_statistics_key(key)), None)
        if place is None or any(is_state_key(key) or is_record_key(key) or is_result_key(key) for key in entry.path[:place]):
            continue
        if not is_result_key(entry.path[place]) and (isinstance(entry, CatalogTensor) or _has_numbers(entry, reader)):
            yield ".".join(entry.path[: place + 1])


def _has_numbers(thing: CatalogObject, reader: ItemReader) -> bool:
    """Whether an object is a number, an array or of a class of its own; a setting such as ``norm="layer"`` is none."""
    if thing.stored is None or not is_file(reader.path(thing.stored.file)):
        return False
    return _is_given(reader.value(thing.stored))


def _is_given(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_given, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_given, value))
    if isinstance(value, Unrepresented):
        return value.what.startswith("object(")
    return isinstance(value, (int, float, TensorValue)) and not isinstance(value, bool)
