"""Configs among the objects of a DCP folder: every entry of a dict is an object of its own there."""

from __future__ import annotations

from typing import Any

from ckpt_cli.files.folders import is_file
from ckpt_cli.formats.dcp.items import ItemReader
from ckpt_cli.formats.dcp.metadata import Catalog, CatalogObject
from ckpt_cli.formats.kept_configs import CLASS, CONTENT, TYPE, KeptConfig, is_config, kept_config

MAX_ENTRIES = 1 << 10
SMALL = 1 << 16
"""Bytes of an entry: settings are small."""


def configs_among(catalog: Catalog, reader: ItemReader) -> list[KeptConfig]:
    """The configs that the objects make up. Raises CorruptFile for what cannot be read."""
    found = []
    by_path = {thing.path: thing for thing in catalog.objects.values()}
    for path in (path for path in by_path if path and path[-1] == TYPE):
        prefix = path[:-1]
        own = {name[len(prefix) :]: thing for name, thing in by_path.items() if name[: len(prefix)] == prefix}
        is_part = any((*prefix[:depth], TYPE) in by_path for depth in range(len(prefix)))
        if is_part or len(own) > MAX_ENTRIES or not is_config({TYPE: "", **{name[0]: "" for name in own}}):
            continue
        values: dict[str, Any] = {}
        for keys, thing in own.items():
            level = values
            for key in keys[:-1]:
                level = level.setdefault(key, {})
            level[keys[-1]] = _value(thing, reader)
        named = by_path.get((*prefix[:-1], CLASS)) if prefix and prefix[-1] == CONTENT else None
        if is_config(values):
            found.append(kept_config(prefix, values, None if named is None else _value(named, reader)))
    return found


def _value(thing: CatalogObject, reader: ItemReader) -> Any:
    """The value of an object; an object that says nothing if it is large, or not here."""
    stored = thing.stored
    is_here = stored is not None and stored.length <= SMALL and is_file(reader.path(stored.file))
    return reader.value(stored) if stored is not None and is_here else object()
