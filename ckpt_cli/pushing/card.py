"""The model card of an output: where its weights come from, and what was compared. It is written from the manifest and verifications.

A line in the card has the digest of the rest, by which a card that nobody changed is known; any other card belongs to people.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_cli import __version__
from ckpt_cli.discover.downloads.hub_cache import cached_model
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.manifest import Manifest
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.assets import CONFIG
from ckpt_cli.lora.config import CONFIG as ADAPTER_CONFIG
from ckpt_cli.names import plural, printable
from ckpt_cli.results.verify import VerifyResult

NAME = "README.md"
MARK = re.compile(r"<!-- written by ckpt, ([0-9a-f]{16}): it replaces this card until somebody edits it -->\n")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
MOST_SOURCES = 8


def is_own(text: str) -> bool:
    """Whether a card was written by ckpt and not changed since."""
    found = MARK.search(text)
    return found is not None and found[1] == _digest(MARK.sub("", text, count=1))


def card(folder: Path, manifest: Manifest, verified: Sequence[VerifyResult]) -> str:
    """The card of an output: YAML that the Hub reads, then the provenance as a table, and the sources."""
    base = _base_model(folder, manifest)
    library = "peft" if is_file(folder / ADAPTER_CONFIG) else "transformers" if _config(folder, CONFIG).get("architectures") else None
    tags = ["ckpt", *(["checkpoint-average"] if manifest.command == "average" else [])]
    head = {"base_model": base, "library_name": library, "tags": tags}
    front = "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items() if value is not None)
    rows = [(label, value) for label, value in _rows(manifest, base or _unproved_base(folder), verified) if value]
    table = "\n".join(f"| {label} | {_cell(value)} |" for label, value in rows)
    body = (
        f"# {_cell(_title(manifest))}\n\n"
        f"{_lead(manifest)}\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"## Sources\n\n{_sources(manifest)}\n\n"
        "`ckpt-manifest.json` has the options of the command and the checksums.\n"
    )
    before, after = f"---\n{front}---\n", f"\n{body}"
    mark = f"<!-- written by ckpt, {_digest(before + after)}: it replaces this card until somebody edits it -->\n"
    return before + mark + after


def steps_of(manifest: Manifest) -> tuple[int, ...]:
    """The steps that an output was made of, in the order in which they entered; none where nothing says which they are."""
    averaged = manifest.facts.get("averaged")
    listed = averaged if isinstance(averaged, list) else [manifest.facts]
    return tuple(item["step"] for item in listed if isinstance(item, dict) and isinstance(item.get("step"), int))


def run_of(manifest: Manifest) -> str:
    """The name of the folder that holds the (newest) checkpoint."""
    return Path(_checkpoint(manifest)).parent.name


def _checkpoint(manifest: Manifest) -> str:
    averaged = manifest.facts.get("averaged")
    newest = averaged[-1] if isinstance(averaged, list) and averaged and isinstance(averaged[-1], dict) else {}
    path = newest.get("path") or manifest.facts.get("checkpoint")
    return path if isinstance(path, str) else ""


def _title(manifest: Manifest) -> str:
    steps, run = steps_of(manifest), run_of(manifest)
    named = f"step {steps[-1]}" if len(steps) == 1 else f"average up to step {steps[-1]}" if steps else "merged checkpoint"
    return f"{run}, {named}" if run else named


def _lead(manifest: Manifest) -> str:
    made = "averaged" if manifest.command == "average" else "merged from its shards"
    return f"A training checkpoint, {made} by ckpt."


def _rows(manifest: Manifest, base: str, verified: Sequence[VerifyResult]) -> Iterator[tuple[str, str]]:
    facts, steps = manifest.facts, steps_of(manifest)
    yield "base model", base
    yield "trainer", _text(facts.get("trainer")) or "not known"
    yield "component", _text(facts.get("component"))
    yield "steps" if len(steps) > 1 else "step", ", ".join(map(str, steps))
    yield "method", _method(manifest)
    asked = manifest.options.get("dtype")
    dtypes = {code: count for one in verified for code, count in one.dtypes.items()}
    shown = ", ".join(f"{code} ({count:,} parameters)" for code, count in sorted(dtypes.items(), key=lambda item: -item[1]))
    yield "dtype", f"{shown or _text(asked)}{f', cast with --dtype {asked}' if asked not in (None, 'keep') and shown else ''}"
    yield "tensors", ", ".join(f"{one.tensors:,} of {one.component}" for one in verified)
    yield "tool", f"ckpt {_text(_mapping(facts.get('versions')).get('ckpt')) or __version__}"
    yield "plan", _text(facts.get("plan_digest"))[:16]
    for one in verified:
        yield "verified", "; ".join(compared(one))


def compared(result: VerifyResult) -> Iterator[str]:
    """What a verification compared, and what it found: a text for each."""
    for source in result.against:
        cast = f", {source.cast} of them after a cast" if source.cast else ""
        found = "identical, bit for bit" if source.identical else f"{source.different} differ"
        yield f"{plural(source.tensors, 'tensor')} with the checkpoint's {source.component}{cast}: {found}"
        if source.from_base:
            yield f"{plural(source.from_base, 'tensor')} with the base"
    if "full" in result.levels:
        checksums = f", {plural(result.checksums, 'checksum')} compared" if result.checksums else ""
        yield f"every value of {plural(result.tensors, 'tensor')} read{checksums}"
    if result.expected is not None and result.architecture is not None:
        yield f"names and shapes with the {plural(result.expected, 'tensor')} of {result.architecture}"
    errors, warnings = len(result.of_severity("error")), len(result.of_severity("warning"))
    yield f"{plural(errors, 'error')} and {plural(warnings, 'warning')}" if errors or warnings else "nothing wrong was found"


def _method(manifest: Manifest) -> str:
    averaged = manifest.facts.get("averaged")
    if not isinstance(averaged, list):
        return "merge"
    terms = [
        f"{_named(item)} x {item['coefficient']:.6g}"
        for item in averaged
        if isinstance(item, dict) and isinstance(item.get("coefficient"), (int, float))
    ]
    return f"{_text(manifest.facts.get('method'))} average: {' + '.join(terms)}, each element rounded once"


def _named(averaged: Mapping[str, Any]) -> str:
    step = averaged.get("step")
    return f"step {step}" if step is not None else os.path.basename(_text(averaged.get("path")))


def _sources(manifest: Manifest) -> str:
    """The files that the weights were read from: their names below the run, sizes in bytes, and a digest of names, sizes and times."""
    listed = manifest.facts.get("sources")
    sources = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    names = [below(_text(item.get("path")), manifest) for item in sources]
    sizes = [size if isinstance(size := item.get("size"), int) else 0 for item in sources]
    stamps = (f"{item.get('size')} {item.get('mtime_ns')}{item.get('tag', '')}" for item in sources)
    identity = "\n".join(f"{name} {stamp}" for name, stamp in zip(names, stamps, strict=True))
    lines = [f"- {_code(name)}, {size:,} bytes" for name, size in list(zip(names, sizes, strict=True))[:MOST_SOURCES]]
    more = [f"- and {len(sources) - MOST_SOURCES} more"] if len(sources) > MOST_SOURCES else []
    return "\n".join([f"{plural(len(sources), 'file')}, {sum(sizes):,} bytes, identity `{_digest(identity)}`:", "", *lines, *more])


def below(path: str, manifest: Manifest) -> str:
    """A path as others may see it: below the run, or only its name."""
    run = os.path.dirname(_checkpoint(manifest))
    return os.path.relpath(path, os.path.dirname(run)) if run and path.startswith(run + os.sep) else os.path.basename(path)


def _base_model(folder: Path, manifest: Manifest) -> str | None:
    """The Hub ID of the model that training started from: of ``--base`` in the Hub cache, or as adapter_config.json names it."""
    base = manifest.facts.get("base")
    cached = cached_model(Path(base)) if isinstance(base, str) else None
    return cached.replace("--", "/", 1) if cached is not None else _named_in(folder, ADAPTER_CONFIG, "base_model_name_or_path")


def _unproved_base(folder: Path) -> str:
    """What is said where nothing proves a Hub ID: config.json keeps what was loaded, which may as well be a folder of another machine."""
    named = _named_in(folder, CONFIG, "_name_or_path")
    return "not known" if named is None else f"not known, config.json names {named}"


def _named_in(folder: Path, config: str, key: str) -> str | None:
    """What a config names, if it has the form of a Hub ID and is no folder here."""
    name = _config(folder, config).get(key)
    return name if isinstance(name, str) and HUB_ID.fullmatch(name) and not os.path.lexists(name) else None


def _config(folder: Path, name: str) -> Mapping[str, Any]:
    try:
        return _mapping(parse_json(read_small(folder / name)))
    except CkptError:
        return {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{printable(text).replace('`', chr(39))}`"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
