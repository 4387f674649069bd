"""Making ``ckpt-manifest.json``: where an output came from. It is written last into every output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.files.descriptors import Identity
from ckpt_cli.files.manifest import SCHEMA, SIDE_SIZES
from ckpt_cli.files.source import Watched, size_of
from ckpt_cli.output.plan import Plan
from ckpt_cli.output.writer import Written
from ckpt_cli.urls import shown


def build(
    command: str,
    plan: Plan,
    written: Written,
    *,
    options: Mapping[str, Any],
    side_files: Mapping[str, bytes | Path],
    facts: Mapping[str, Any],
) -> bytes:
    """The manifest: sources with size (bytes), times (ns) and tag, plan digest, versions, options, output files and side files with sizes.

    Checksums are CRC-32: of tensors, by file and name, of the headers of weights files, and of whole side files. Of those of ``side_files``
    that were there before neither size nor checksum is known.
    """
    index = [plan.index_name] if plan.index_name else []
    content = {
        "tool": "ckpt",
        "schema": SCHEMA,
        "versions": versions(),
        "command": command,
        "options": dict(options),
        **facts,
        "plan_digest": plan.digest,
        "sources": listed(plan.sources),
        "outputs": dict(written.files),
        "side_files": sorted({*side_files, *index}),
        SIDE_SIZES: {name: _size(side_files[name]) for name in sorted(written.side_files)},
        "checksums": {
            "algorithm": "crc32",
            "files": {file: {name: f"{crc:08x}" for name, crc in sorted(known.items())} for file, known in written.checksums.items()},
            "headers": {name: f"{crc:08x}" for name, crc in sorted(plan.header_checksums.items())},
            "side_files": {name: f"{crc:08x}" for name, crc in sorted(written.side_files.items())},
        },
    }
    return shown(json.dumps(content, indent=2) + "\n").encode()


def _size(content: bytes | Path) -> int:
    return size_of(content) if isinstance(content, Path) else len(content)


def listed(files: Iterable[Watched]) -> list[dict[str, Any]]:
    """What files are, sorted by path: size (bytes), mtime and ctime (ns), and tag; the last two where there are any."""
    known = sorted({each.identity for each in files}, key=lambda each: each.path)
    return [{"path": _text(each.path), "size": each.size, "mtime_ns": each.mtime_ns, **_more(each)} for each in known]


def _more(each: Identity) -> dict[str, Any]:
    return {**({"ctime_ns": each.ctime_ns} if each.ctime_ns else {}), **({"tag": each.tag} if each.tag else {})}


def versions() -> dict[str, str]:
    """The versions of ckpt, Python and numpy."""
    import importlib.metadata
    import platform

    from ckpt_cli import __version__

    return {"ckpt": __version__, "python": platform.python_version(), "numpy": importlib.metadata.version("numpy")}


def _text(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
