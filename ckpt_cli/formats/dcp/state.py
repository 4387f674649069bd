"""What a DCP folder holds besides weights and optimizer: schedulers, counters, random states, dataloaders, as nested values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, Inconsistent
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.source import Files
from ckpt_cli.formats.dcp.groups import Group, groups_of
from ckpt_cli.formats.dcp.items import ItemReader, assembled
from ckpt_cli.formats.dcp.metadata import CatalogTensor, read_catalog
from ckpt_cli.formats.optimizer_state import OPTIMIZER
from ckpt_cli.tensors.plain_values import MAX_DEPTH, TensorValue, Unrepresented
from ckpt_cli.tensors.reading import element_bytes
from ckpt_cli.tensors.records import Records

MAX_BYTES = 64 << 20
SPARE, SPREAD = 64, 16
"""How much longer a list may be than its existing items; with higher numbers it is not a list."""

ROOTS = ("state", "app")
"""Keys that composer and prime-rl put around everything."""


def read_dcp_state(roots: Sequence[Path], files: Files) -> dict[str, Any]:
    """Everything in a folder (of one or several nodes) that is neither weights nor optimizer, nested as it was saved.

    Raises what reading the metadata and the items raises; a data file that is missing leaves `Unrepresented` values.
    """
    catalog = read_catalog(roots, files)
    reader = ItemReader(roots, files)
    groups = [group for index, group in enumerate(groups_of(catalog)) if index == 0 or _is_model(group)]
    weights = {entry.name for group in groups for held in (group.tensors, group.trained, group.counters) for entry in held.values()}
    among = {key for group in groups for key in group.objects}
    state: dict[Any, Any] = {}
    for key, entry in catalog.tensors.items():
        if key not in weights and (not is_optimizer(entry.path) or (is_alone(entry.path) and not entry.shape)):
            put(state, entry.keys, tensor_value(entry, reader))
    for key, thing in catalog.objects.items():
        if key in among or (is_optimizer(thing.path) and not is_alone(thing.path)):
            continue
        there = thing.stored is not None and is_file(reader.path(thing.stored.file))
        if is_optimizer(thing.path) and thing.stored is not None and reader.holds_tensors(thing.stored):
            continue
        put(state, thing.keys, reader.value(thing.stored) if there and thing.stored else Unrepresented("an object whose file is missing"))
    plain: dict[str, Any] = with_lists(state)
    for root in ROOTS:
        inner = plain.get(root)
        if isinstance(inner, dict):
            plain = {**{name: value for name, value in plain.items() if name != root}, **inner}
    return plain


def is_optimizer(path: Sequence[str]) -> bool:
    """Whether a path of nested keys belongs to an optimizer."""
    return any(OPTIMIZER.fullmatch(part) for part in path[:3])


def is_alone(path: Sequence[str]) -> bool:
    """Whether such a path ends with the key of the optimizer: that of a counter or a setting, ``optimizer_steps``, or of one object."""
    return not is_optimizer(path[:-1])


def _is_model(group: Group) -> bool:
    """Whether a group beside the model holds weights: counters and scales have no matrices, and orders of samples no floats."""
    return any(len(entry.shape) > 1 and entry.dtype.kind == "float" for entry in group.tensors.values())


def tensor_value(entry: CatalogTensor, reader: ItemReader) -> TensorValue | Unrepresented:
    """A small tensor by value."""
    tensor = assembled(entry.name, entry, reader)
    if tensor.nbytes > MAX_BYTES:
        return Unrepresented(f"a tensor of {tensor.nbytes} bytes")
    return TensorValue(tensor.dtype, tensor.shape, bytes(element_bytes(tensor, records=Records())))


def put(state: dict[Any, Any], keys: Sequence[str | int], value: Any) -> None:
    """Place a value in nested dicts. Raises Inconsistent if something is there, CorruptFile for endless nesting."""
    if len(keys) > MAX_DEPTH:
        raise CorruptFile("the keys of the metadata are nested too deeply")
    place: Any = state
    for key in keys[:-1]:
        place = place.setdefault(key, {}) if isinstance(place, dict) else None
    if not isinstance(place, dict) or keys[-1] in place:
        raise Inconsistent(f"two entries of the metadata have the same place: {'.'.join(map(str, keys))[:200]}")
    place[keys[-1]] = value


def with_lists(value: Any) -> Any:
    """A value whose dicts came of the keys of metadata. Numbered keys become lists again; items that no rank saved are None."""
    if not isinstance(value, dict):
        return value
    plain = {key: with_lists(item) for key, item in value.items()}
    numbers = [key for key in plain if isinstance(key, int)]
    if numbers and len(numbers) == len(plain) and min(numbers) >= 0 and max(numbers) < SPARE + SPREAD * len(numbers):
        return [plain.get(index) for index in range(max(numbers) + 1)]
    named = {str(key): item for key, item in plain.items()}
    if len(named) < len(plain):
        raise Inconsistent("keys of the metadata are numbers and the same numbers as text")
    return named
