"""Whether an average in a DCP folder has begun, by the counters in its state or beside it (Lightning's callbacks)."""

from __future__ import annotations

import contextlib
from collections.abc import Container

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import is_file
from ckpt_cli.formats.dcp.groups import Group
from ckpt_cli.formats.dcp.items import ItemReader, assembled
from ckpt_cli.formats.dcp.metadata import Catalog, CatalogObject, CatalogTensor
from ckpt_cli.formats.torch_files.averages import TELLING, is_average_name
from ckpt_cli.formats.torch_files.counters import begun_notes, unbegun_note
from ckpt_cli.tensors.component import Note


def notes_of_average(catalog: Catalog, group: Group, reader: ItemReader) -> list[Note]:
    """A warning if the average that a group is has not begun. What cannot be read of its counters tells nothing."""
    if group.counters:
        return begun_notes({name: assembled(entry.name, entry, reader) for name, entry in group.counters.items() if name in TELLING})
    parts = group.key.split(".")
    if not any(map(is_average_name, parts)):
        return []
    own = {each.name for each in group.tensors.values()}  # what is said of these, any format says
    around = {group.key, ".".join(parts[:-1])}
    for counter in filter(lambda each: _counts(each, around), (each for name, each in catalog.tensors.items() if name not in own)):
        with contextlib.suppress(CkptError):
            if notes := begun_notes({counter.path[-1]: assembled(counter.path[-1], counter, reader)}):
                return notes
    for thing in filter(lambda each: _counts(each, around), catalog.objects.values()):
        if thing.stored is not None and is_file(reader.path(thing.stored.file)):
            value = reader.value(thing.stored)
            if isinstance(value, int) and not value:
                return [unbegun_note(thing.path[-1], value)]
    return []


def _counts(entry: CatalogTensor | CatalogObject, around: Container[str]) -> bool:
    """Whether an entry is called like a counter, and lies right below one of some keys."""
    return entry.path[-1] in TELLING and ".".join(entry.path[:-1]) in around
