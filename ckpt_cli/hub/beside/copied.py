"""The names that programs give to a second download or a copy of a file."""

from __future__ import annotations

import re

AFTER = re.compile(r"(?P<name>.+?)\.(?:[0-9]{1,2}|~[0-9]+~|new)", re.ASCII | re.IGNORECASE)
"""wget counts behind the whole name, as backups of coreutils do; ``.new`` is what was not given its name yet."""

BEFORE = re.compile(r"copy(?: \([0-9]+\))? of (?P<name>.+)", re.ASCII | re.IGNORECASE)

INSIDE = re.compile(
    r"(?P<stem>.+?)(?: ?\([0-9]+\)| ?-? copy(?: \(?[0-9]+\)?)?| [0-9]{1,2}| \([^()]*conflicted copy[^()]*\)|\.sync-conflict-[0-9A-Z-]+)"
    r"(?P<suffix>\.[^. ]+)?",
    re.ASCII | re.IGNORECASE,
)
"""Browsers and file managers put a number or a word before the last suffix; programs that synchronise folders name a conflict there."""


def copied_name(name: str) -> str | None:
    """The name of which a file's name is that of a second download or a copy; None for all other names.

    >>> [copied_name(name) for name in ("model.pt.1", "Copy of model.pt", "config (1).json", "config - Copy.json", "model 2.safetensors")]
    ['model.pt', 'model.pt', 'config.json', 'config.json', 'model.safetensors']
    >>> [copied_name(name) for name in ("model.sync-conflict-20240102-030405-ABCDEFG.pt", "model.safetensors", "model.pt.bak")]
    ['model.pt', None, None]
    """
    for form in (AFTER, BEFORE, INSIDE):
        match = form.fullmatch(name)
        if match is not None:
            found = match.groupdict()
            return found["name"] if "name" in found else f"{found['stem']}{found['suffix'] or ''}"
    return None
