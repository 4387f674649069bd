"""What a DCP folder holds besides weights and optimizer: schedulers, counters, random states, dataloaders, as nested values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_cli.files import Files
from ckpt_cli.formats.dcp_groups import groups_of
from ckpt_cli.formats.dcp_items import ItemReader, assembled
from ckpt_cli.formats.dcp_metadata import CatalogTensor, read_catalog
from ckpt_cli.geometry import whole
from ckpt_cli.inert_values import TensorValue, Unrepresented
from ckpt_cli.kernels import read_tile

OPTIMIZER = re.compile(r"optim(izer)?s?(_[0-9]+)?|optimizer_states?(_[0-9]+)?")
"""The nested key above an optimizer's state."""

MAX_BYTES = 64 << 20
ROOTS = ("state", "app")
"""Keys that composer and prime-rl put around everything."""


def read_dcp_state(roots: Sequence[Path], files: Files) -> dict[str, Any]:
    """Everything in a folder (of one or several nodes) that is neither weights nor optimizer, nested as it was saved.

    Raises what reading the metadata and the items raises; a data file that is missing leaves `Unrepresented` values.
    """
    catalog = read_catalog(*roots)
    reader = ItemReader(roots, files)
    groups = groups_of(catalog)
    weights = {entry.name for group in groups for entry in group.tensors.values()}
    among = {key for group in groups for key in group.objects}
    state: dict[str, Any] = {}
    for key, entry in catalog.tensors.items():
        if key not in weights and not is_optimizer(entry.path):
            _put(state, entry.path, _tensor(entry, reader))
    for key, thing in catalog.objects.items():
        if key in among or is_optimizer(thing.path):
            continue
        there = thing.stored is not None and reader.path(thing.stored.file).is_file()
        _put(state, thing.path, reader.value(thing.stored) if there and thing.stored else Unrepresented("an object whose file is missing"))
    plain: dict[str, Any] = _with_lists(state)
    for root in ROOTS:
        inner = plain.get(root)
        if isinstance(inner, dict):
            plain = {**{name: value for name, value in plain.items() if name != root}, **inner}
    return plain


def is_optimizer(path: Sequence[str]) -> bool:
    """Whether a path of nested keys belongs to an optimizer."""
    return any(OPTIMIZER.fullmatch(part) for part in path[:3])


def _tensor(entry: CatalogTensor, reader: ItemReader) -> TensorValue | Unrepresented:
    tensor = assembled(entry.name, entry, reader)
    if tensor.nbytes > MAX_BYTES:
        return Unrepresented(f"a tensor of {tensor.nbytes} bytes")
    data = bytearray(tensor.nbytes)
    if data:
        read_tile(tensor, whole(tensor.shape), data)
    return TensorValue(tensor.dtype, tensor.shape, bytes(data))


def _put(state: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        inner = state.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        state = inner
    state.setdefault(path[-1], value)


def _with_lists(value: Any) -> Any:
    """Dicts whose keys count from zero become the lists that they were."""
    if not isinstance(value, dict):
        return value
    plain = {key: _with_lists(item) for key, item in value.items()}
    if plain and set(plain) == {str(i) for i in range(len(plain))}:
        return [plain[str(i)] for i in range(len(plain))]
    return plain
