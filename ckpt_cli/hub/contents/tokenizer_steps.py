"""What a tokenizer.json does with a text besides its vocabulary: normalisation, cuts, merges, what it puts around a text, and decoding."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

STATE = frozenset({"padding", "truncation", "version"})
"""What the last call left, and the version of the form."""

ON = frozenset({"use_regex", "split"})
"""Switches that are on where a step does not have them; all others are off."""

SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")
"""Entries in which steps that follow one another are kept, by what they are."""


def steps_of(content: Any) -> dict[str, str]:
    """A digest of every part of a parsed tokenizer.json that decides which tokens a text becomes, and the reverse, by its name.

    Equal are those that differ only in how versions of the library write them. Padding and truncation are left by the last call.

    >>> old, new = {"type": "Metaspace", "add_prefix_space": True}, {"type": "Metaspace", "prepend_scheme": "always", "split": True}
    >>> steps_of({"pre_tokenizer": old}) == steps_of({"pre_tokenizer": new, "truncation": {"max_length": 5}})
    True
    """
    if not isinstance(content, dict):
        return {}
    with contextlib.suppress(RecursionError):
        model, tokens = content.get("model"), content.get("added_tokens")
        found = {key: _plain(value) for key, value in content.items() if key not in STATE | {"model", "added_tokens"}}
        if isinstance(tokens, list):
            entries = [token for token in tokens if isinstance(token, dict)]
            found["added_tokens"] = {str(token.get("content")): _plain({**token, "id": None}) for token in entries} or None
        if isinstance(model, dict):
            found |= {f"model.{key}": _plain(value) for key, value in model.items() if key not in ("vocab", "merges")}
            found["merges"] = _merges(model.get("merges"))
        return {key: _digest(value) for key, value in found.items() if value is not None and value is not False}
    return {}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _merges(held: Any) -> list[str] | None:
    """Pairs, each in one text, as older versions write them, or in two."""
    pairs = held if isinstance(held, list) else []
    return [" ".join(map(str, pair)) if isinstance(pair, list) else str(pair) for pair in pairs] or None


def _plain(value: Any) -> Any:
    """A part in one of the ways in which versions write it."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, Mapping):
        return None if value == "" else value
    inner = next((value[key] for key in SEQUENCES if key in value), None)
    if value.get("type") == "Sequence" and isinstance(inner, list) and len(inner) == 1:
        return _plain(inner[0])
    held = dict(value)
    if held.get("type") == "Metaspace":
        scheme = "always" if held.pop("add_prefix_space", True) else "never"
        held = {"prepend_scheme": scheme, **{key: each for key, each in held.items() if key != "str_rep"}}
    # Offsets are no tokens.
    found = {key: _plain(each) for key, each in held.items() if key != "trim_offsets" and not (key in ON and each is True)}
    return {key: each for key, each in found.items() if each is not None and (each is not False or key in ON)}
