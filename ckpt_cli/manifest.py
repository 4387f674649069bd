"""``ckpt-manifest.json``: where an output came from. Written last into every output; ``--overwrite`` trusts only it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files import Source, entries_in, read_small
from ckpt_cli.safetensors_file import parse_json

NAME = "ckpt-manifest.json"
SCHEMA = 1


def build(
    command: str,
    options: Mapping[str, Any],
    sources: Sequence[Source],
    plan_digest: str,
    outputs: Mapping[str, int],
    side_files: Sequence[str],
    facts: Mapping[str, Any],
) -> bytes:
    """The manifest: sources with size (bytes) and mtime (ns), plan digest, versions, options, output files with sizes, side files."""
    content = {
        "tool": "ckpt",
        "schema": SCHEMA,
        "versions": versions(),
        "command": command,
        "options": dict(options),
        **facts,
        "plan_digest": plan_digest,
        "sources": [
            {"path": _text(source.path), "size": source.size, "mtime_ns": source.identity.mtime_ns}
            for source in sorted(sources, key=lambda source: source.path)
        ],
        "outputs": dict(outputs),
        "side_files": sorted(side_files),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def foreign_entries(folder: Path) -> list[str] | None:
    """What is in a folder besides what its manifest lists; None if it bears no manifest of a whole output of ours."""
    try:
        content = parse_json(read_small(folder / NAME))
    except CkptError:
        return None
    if not isinstance(content, dict) or content.get("tool") != "ckpt" or not isinstance(content.get("schema"), int):
        return None
    options, outputs, side = content.get("options"), content.get("outputs"), content.get("side_files")
    if not isinstance(options, dict) or options.get("in_place") or not isinstance(outputs, dict) or not isinstance(side, list):
        return None
    listed = {NAME, *outputs, *(name for name in side if isinstance(name, str))}
    return [entry.name for entry in entries_in(folder) if entry.name not in listed or not os.path.isfile(entry)]


def versions() -> dict[str, str]:
    """The versions of what took part: ckpt, Python, numpy."""
    import importlib.metadata
    import platform

    from ckpt_cli import __version__

    return {"ckpt": __version__, "python": platform.python_version(), "numpy": importlib.metadata.version("numpy")}


def _text(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
