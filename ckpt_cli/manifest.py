"""``ckpt-manifest.json``: where an output came from. Written last into every output; ``--overwrite`` trusts only it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files import Source, read_small
from ckpt_cli.safetensors_file import parse_json

NAME = "ckpt-manifest.json"
SCHEMA = 1


def build(
    command: str,
    options: Mapping[str, Any],
    sources: Sequence[Source],
    plan_digest: str,
    outputs: Mapping[str, int],
    facts: Mapping[str, Any],
) -> bytes:
    """The manifest: sources with size (bytes) and mtime (ns), plan digest, versions, options, output files with sizes."""
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
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def is_ours(folder: Path) -> bool:
    """Whether a folder was written by ckpt: it bears a manifest that says so."""
    try:
        content = parse_json(read_small(folder / NAME))
    except CkptError:
        return False
    return isinstance(content, dict) and content.get("tool") == "ckpt" and isinstance(content.get("schema"), int)


def versions() -> dict[str, str]:
    """The versions of what took part: ckpt, Python, numpy."""
    import importlib.metadata
    import platform

    from ckpt_cli import __version__

    return {"ckpt": __version__, "python": platform.python_version(), "numpy": importlib.metadata.version("numpy")}


def _text(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
