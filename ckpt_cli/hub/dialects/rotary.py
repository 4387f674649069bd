"""The rotary embedding that a config describes, in one of the ways in which versions of transformers write it.

These are ``rope_theta`` and ``rope_scaling`` (``type``, then ``rope_type``), and since 5.0 ``rope_parameters`` with both, also one for each
kind of layers. Where there are several, transformers 5 takes a ``rope_scaling`` that is not empty for the whole, then ``rope_parameters``,
and entries beside them only for what these lack (``modeling_rope_utils.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_cli.hub.config import Config

SCALING, PARAMETERS = "rope_scaling", "rope_parameters"
BESIDE = ("rope_theta", "partial_rotary_factor")
"""Entries of a rotary embedding that may stand beside it."""

SPELT = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor", "global_rope_theta": "rope_theta"}
"""Names of these in single families."""

LOCAL = ("rope_local_base_freq", "local_rope_theta")
"""The base of layers with a window, where it stands alone."""

GLOBAL_LAYERS, LOCAL_LAYERS = "full_attention", "sliding_attention"

PLAIN = ("default", "mrope", None)
"""Kinds that are not scaled; the second says that its parts are divided among axes."""

KINDS = {"su": "longrope"}
"""Older names of kinds."""

TRAINED = "original_max_position_embeddings"
OF_A_LENGTH = ("llama3", "yarn", "longrope")
"""Kinds that are scaled from the length that was trained, which is the whole length where nothing says it."""

UNSAID: Mapping[str, Mapping[str, object]] = {"yarn": {"beta_fast": 32, "beta_slow": 1, "truncate": True}}
"""What a kind means by entries that it lacks."""


def has_layers(config: Config) -> bool:
    """Whether a config has a rotary embedding for each kind of layers."""
    return any(config.get(key) is not None for key in LOCAL) or bool(_layers(_of(config, SCALING)) or _layers(_of(config, PARAMETERS)))


def plain_rotary(config: Config, layered: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A level of a config without its rotary embedding, and this as ``rope_theta``, ``partial_rotary_factor`` and ``rope_scaling``.

    The last is None without scaling. ``layered``: those of every kind of layers, with its name in front; one for all layers is that
    of the layers without a window.
    """
    rest = dict(config)
    for key, usual in SPELT.items():
        value = rest.pop(key, None)
        if value is not None:
            rest.setdefault(usual, value)
    says = any(key in rest for key in (SCALING, PARAMETERS, "rope_theta"))
    scaling, parameters = (dict(_of(rest, key)) for key in (SCALING, PARAMETERS))
    beside = {key: rest[key] for key in BESIDE if rest.get(key) is not None}
    local = next((rest[key] for key in LOCAL if rest.get(key) is not None), None)
    for key in (SCALING, PARAMETERS, *BESIDE, *LOCAL):
        rest.pop(key, None)
    length = rest.get("max_position_embeddings")
    if not layered:
        trained = rest.get(TRAINED)
        found = _one("", {**beside, **(scaling or parameters)}, length, trained, says)
        if trained is not None and TRAINED in (found.get(SCALING) or {}):
            del rest[TRAINED]
        return rest, found
    layers = _layers(scaling) or _layers(parameters)
    if not _layers(scaling):
        layers[GLOBAL_LAYERS] = {**(layers.get(GLOBAL_LAYERS) or ({} if layers else parameters)), **scaling}
    if local is not None:
        layers[LOCAL_LAYERS] = {"rope_theta": local, **layers.get(LOCAL_LAYERS, {})}
    found = {}
    for kind, entries in layers.items():
        found |= _one(f"{PARAMETERS}.{kind}.", {**beside, **entries}, length, None, says or bool(entries))
    return rest, found


def same_scaling(mine: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two ways to scale may be one: both are of one kind, and what both say is the same."""
    kind = mine.get("rope_type")
    if not isinstance(kind, str) or other.get("rope_type") != kind:
        return False
    unsaid = UNSAID.get(kind, {})
    mine, other = {**unsaid, **mine}, {**unsaid, **other}
    return all(mine[key] == other[key] for key in mine if key in other)


def _one(prefix: str, entries: Mapping[str, Any], length: object, trained: object, says: bool) -> dict[str, Any]:
    """One rotary embedding in the usual entries; ``trained`` is the length beside it, ``length`` the whole one."""
    held = {key: value for key, value in entries.items() if value is not None}
    found = {f"{prefix}{key}": held.pop(key) for key in BESIDE if key in held}
    older = held.pop("type", None)
    kind = held.pop("rope_type", older)
    kind = KINDS.get(kind, kind) if isinstance(kind, str) else kind
    if kind in OF_A_LENGTH:
        known = next((value for value in (trained, held.get(TRAINED), length) if value is not None), None)
        held |= {TRAINED: known} if known is not None else {}
    if says or entries:
        found[f"{prefix}{SCALING}"] = {**({} if kind in PLAIN else {"rope_type": kind}), **held} or None
    return found


def _of(config: Config, key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _layers(rope: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The rotary embeddings of kinds of layers, by their names; empty if it is one for all layers."""
    return {key: dict(value) for key, value in rope.items() if isinstance(value, Mapping)}
