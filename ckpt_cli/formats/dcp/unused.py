"""What is in a DCP folder beside its groups of weights and may be needed with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ckpt_cli.files.folders import is_file
from ckpt_cli.formats.dcp.groups import CONTAINER, Group
from ckpt_cli.formats.dcp.items import ItemReader
from ckpt_cli.formats.dcp.metadata import Catalog, CatalogObject, Stored
from ckpt_cli.formats.torch_files.matrices import Described
from ckpt_cli.formats.training_state_names import is_state_key, is_statistics_key
from ckpt_cli.formats.unused.search import DataSearch, Unused
from ckpt_cli.names import is_extra_state
from ckpt_cli.urls import is_remote

Tree = dict[str, Any]


def unused_in(catalog: Catalog, groups: Iterable[Group], reader: ItemReader, told: Collection[str] = ()) -> Unused:
    """What is in none of the ``groups``: of tensors the metadata tell what they are, of objects what is in them.

    Of what is below keys that are ``told``, something else is said.
    """
    held = {id(entry) for group in groups for entry in _of(group)}
    tree: Tree = {}
    for tensor in (tensor for tensor in catalog.tensors.values() if id(tensor) not in held):
        _put(tree, tensor.path, Described(len(tensor.shape), tensor.dtype.kind == "float"))
    objects = {id(thing): thing for thing in catalog.objects.values() if id(thing) not in held and not set(told) & set(thing.path)}
    stored = {key: place for key, thing in objects.items() if (place := _place(thing, reader)) is not None}
    reader.expect_objects(stored.values())
    for key, place in stored.items():
        if (item := reader.parsed(place)) is not None:
            _put(tree, objects[key].path, item.root)
    return _below(tree, DataSearch())


def _of(group: Group) -> list[object]:
    return [*group.tensors.values(), *group.counters.values(), *group.trained.values(), *group.objects.values()]


def _place(thing: CatalogObject, reader: ItemReader) -> Stored | None:
    """Where an object is that may hold anything: an optimizer, a scheduler or random states are not looked into.

    In a store, where each takes a request, only what is called like statistics is.
    """
    if any(is_state_key(key) or is_extra_state(key) for key in thing.path) or thing.stored is None:
        return None
    path = reader.path(thing.stored.file)
    if is_remote(path) and not any(map(is_statistics_key, thing.path)):
        return None
    return thing.stored if is_file(path) else None


def _put(tree: Tree, path: Sequence[str], node: Any) -> None:
    for key in path[:-1]:
        inner = tree.setdefault(key, {})
        if not isinstance(inner, dict):
            return  # an entry and one below it, as no library writes them
        tree = inner
    tree.setdefault(path[-1], node)


def _below(tree: Mapping[str, Any], search: DataSearch) -> Unused:
    """What is in a level of keys, and in those below keys that say nothing of what is in them."""
    inner = {key: node for key, node in tree.items() if isinstance(node, dict) and CONTAINER.fullmatch(key)}
    found = search.unused({key: node for key, node in tree.items() if key not in inner})
    for key, node in inner.items():
        found += _below(node, search).below(f"{key}.")
    return found
