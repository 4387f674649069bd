"""Configs among the objects of a DCP folder: every entry of a dict is an object of its own there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_cli.files.folders import is_file
from ckpt_cli.formats.dcp.items import ItemReader
from ckpt_cli.formats.dcp.metadata import Catalog, CatalogObject, Stored
from ckpt_cli.formats.kept_configs import CLASS, CONTENT, SETTINGS, TYPE, KeptConfig, is_config, kept_config

MAX_ENTRIES = 1 << 10
_Objects = Mapping[tuple[str, ...], CatalogObject]
SMALL = 1 << 16
"""Bytes of an entry: settings are small."""


def configs_among(catalog: Catalog, reader: ItemReader) -> list[KeptConfig]:
    """The configs, and settings under names of such, that the objects make up. Raises CorruptFile for what cannot be read."""
    found = []
    by_path = {thing.path: thing for thing in catalog.objects.values()}
    for path in (path for path in by_path if path and path[-1] == TYPE):
        prefix = path[:-1]
        own = {name[len(prefix) :]: thing for name, thing in by_path.items() if name[: len(prefix)] == prefix}
        is_part = any((*prefix[:depth], TYPE) in by_path for depth in range(len(prefix)))
        if is_part or len(own) > MAX_ENTRIES or not is_config({TYPE: "", **{name[0]: "" for name in own}}):
            continue
        named = by_path.get((*prefix[:-1], CLASS)) if prefix and prefix[-1] == CONTENT else None
        read = _values([*own.values(), *([named] if named is not None else [])], reader)
        values = _nested(own, read)
        if is_config(values):
            found.append(kept_config(prefix, values, None if named is None else read[named.path]))
    return [*found, *_settings_among(by_path, [tuple(kept.where.split(".")) for kept in found], reader)]


def _settings_among(by_path: _Objects, configs: Sequence[tuple[str, ...]], reader: ItemReader) -> Iterator[KeptConfig]:
    """What the objects under names of settings make up, but for whole configs."""
    held: dict[tuple[str, ...], dict[tuple[str, ...], CatalogObject]] = {}
    for path, thing in by_path.items():
        depth = next((depth for depth, key in enumerate(path[:-1], 1) if SETTINGS.fullmatch(key)), 0)
        if depth and not any(path[: len(config)] == config for config in configs):
            held.setdefault(path[:depth], {})[path[depth:]] = thing
    for prefix, own in held.items():
        if len(own) <= MAX_ENTRIES:
            values = kept_config(prefix, _nested(own, _values(list(own.values()), reader)), None).config
            yield KeptConfig(".".join(prefix), values, True, is_config=False)


def _nested(own: _Objects, read: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The values of objects by the rests of their paths as nested dicts. What an object and a dict have the name of is the dict."""
    values: dict[str, Any] = {}
    for keys, thing in sorted(own.items(), key=lambda item: len(item[0])):
        level = values
        for key in keys[:-1]:
            inner = level.get(key)
            below: dict[str, Any] = inner if isinstance(inner, dict) else {}
            level[key] = below
            level = below
        level[keys[-1]] = read[thing.path]
    return values


def _values(things: Sequence[CatalogObject], reader: ItemReader) -> dict[tuple[str, ...], Any]:
    """The values of objects by path, read in the order in which they lie. Of one that is large, or not here, a mere object."""
    here: list[tuple[CatalogObject, Stored]] = []
    for thing in things:
        stored = thing.stored
        if stored is not None and stored.length <= SMALL and is_file(reader.path(stored.file)):
            here.append((thing, stored))
    here.sort(key=lambda pair: (pair[1].file, pair[1].offset))
    reader.expect_objects(stored for _, stored in here)
    nothing: dict[tuple[str, ...], Any] = {thing.path: object() for thing in things}
    return nothing | {thing.path: reader.value(stored) for thing, stored in here}
