"""Which tensors that a model class has were left out of an output on purpose, as its manifest and the user say."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from ckpt_cli.discover.beside.outputs import partial_text
from ckpt_cli.errors import CkptError
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.manifest import Manifest
from ckpt_cli.hub.classes.names import renamed_for_hub
from ckpt_cli.hub.classes.rules import rules_for
from ckpt_cli.hub.config import Config, architecture
from ckpt_cli.output.select import is_wanted
from ckpt_cli.results.verify import Finding
from ckpt_cli.verifying.config import ConfigCheck
from ckpt_cli.verifying.findings import finding

MISSING = ("missing-tensor", "missing-layers", "not-proved", "missing-of-base", "left-out-of-base", "optional-tensor", "recomputed-tensor")
"""Codes about tensors that are not there."""


def left_out(manifest: Manifest | None, config: ConfigCheck, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Finding]:
    """The findings about a config, in which tensors that were left out on purpose are not missing.

    ``include`` and ``exclude`` are the user's, in place of those in the manifest.
    """
    made = manifest.options if manifest is not None else {}
    including, excluding = include or _patterns(made.get("include")), exclude or _patterns(made.get("exclude"))
    allowed = _patterns(made.get("allow_missing"))
    dropped: frozenset[str] | None = None

    def on_purpose(name: str) -> bool:
        nonlocal dropped
        if not is_wanted(name, including, excluding) or (allowed and is_wanted(name, allowed, ())):
            return True
        if dropped is None:
            dropped = _dropped(manifest, config.config)
        return name in dropped or ("*" in name and any(fnmatch.fnmatchcase(other, name) for other in dropped))

    # Which tensors make layers uneven, and how, nobody tells: what was left out on purpose may have.
    uneven = bool(including or excluding or allowed or (manifest is not None and manifest.facts.get("dropped")))
    return [
        finding("left-out", item.message, tensor=item.tensor)
        if (item.code in MISSING and item.tensor is not None and on_purpose(item.tensor)) or (item.code == "uneven-layers" and uneven)
        else item
        for item in config.findings
    ]


def partial_output(manifest: Manifest | None, config: ConfigCheck) -> list[Finding]:
    """The finding about an output that lacks tensors of its source, unless it has all those of a known class.

    Whoever passed a filter knows that; what an output inherits from a source that was partial is a warning.
    """
    absent = any(item.code in (*MISSING, "left-out") for item in config.findings)
    text = partial_text(manifest) if config.expected is None or absent else None
    if manifest is None or text is None:
        return []
    asked = any(manifest.options.get(name) for name in ("include", "exclude", "allow_missing", "key_map", "intersect"))
    return [finding("left-out" if asked else "partial-output", text, file=MANIFEST)]


def _dropped(manifest: Manifest | None, config: Config) -> frozenset[str]:
    """Names that a key map, --intersect, --drop-extra or a tie left out: as training had them, and as the class's files have them."""
    listed = manifest.facts.get("dropped") if manifest is not None else None
    names = frozenset(listed) if isinstance(listed, dict) else frozenset()
    if not names:
        return names
    try:
        rules = rules_for(config) if architecture(config) else None
        return names if rules is None else names | frozenset(renamed_for_hub(dict.fromkeys(names, ()), rules))
    except CkptError:
        return names


def _patterns(value: object) -> tuple[str, ...]:
    return tuple(pattern for pattern in value if isinstance(pattern, str)) if isinstance(value, list) else ()
