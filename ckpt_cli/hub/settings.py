"""In what two configs differ, and what of that changes the computation although no shape shows it: rotary embedding, norms, heads, ties.

That is every entry that both have, but for those that are known to make no difference (`ckpt_cli.hub.entries.harmless`). How a version of
transformers writes the rotary embedding makes none either (`ckpt_cli.hub.dialects.rotary`). A window that ``use_sliding_window`` switches
off is null or a number.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_cli.hub.config import Config
from ckpt_cli.hub.dialects.rotary import PARAMETERS, SCALING, has_layers, plain_rotary, same_scaling
from ckpt_cli.hub.entries.harmless import LENGTH, decides_rotation, is_harmless
from ckpt_cli.hub.entries.written import plain
from ckpt_cli.names import printable
from ckpt_cli.tensors.component import Note

HEADS = re.compile(r"n_heads?|num(_\w+)?_heads|head_dim|.*_head_dim|multi_query")
"""Keys that say how rows of a projection are divided into heads: with another one, the same rows mean something else."""

IRRELEVANT = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"})
"""Keys that say nothing about the model."""

OFF = ("use_sliding_window", "is_decoder", "add_cross_attention")
"""Switches that are off where a config does not have them, in every class that knows them."""

SAME = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new"}
"""Names of one activation."""

SAID = re.compile(r"sliding_window|clip_qkv|qkv_clip|\w*soft_?cap(ping)?|use_bidirectional_attention")
"""Entries that mean something when they are null: there is none. Null in others is left to the class, which computes it."""

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """An entry in which two configs differ, at one level of both: ``key`` is written with the name of that level.

    ``is_setting``: both have it, and it may decide what weights of the same shapes mean.
    """

    key: str
    mine: object
    other: object
    is_setting: bool

    @property
    def divides_heads(self) -> bool:
        return self.is_setting and HEADS.fullmatch(self.key.rpartition(".")[2]) is not None

    def text(self, other: str) -> str:
        """Both values in words; ``other`` is where the second one is."""
        return f"{printable(self.key)} is {_shown(self.mine)}, in the {other} {_shown(self.other)}"

    @property
    def pair(self) -> str:
        """The key, with both values where they are short."""
        values = f"{_shown(self.mine)}, {_shown(self.other)}"
        fits = len(values) <= 40 and not any(isinstance(value, (Mapping, list)) for value in (self.mine, self.other))
        return f"{self.key} ({values})" if fits else self.key


def differences(config: Config, other: Config) -> list[Difference]:
    """All entries in which two configs differ, settings first. How a version of transformers writes an entry makes no difference."""
    found = [entry for level, mine, others in _pairs(config, other) for entry in _different(level, mine, others)]
    return sorted(found, key=lambda entry: (not entry.is_setting, entry.key))


def different_settings(config: Config, other: Config) -> list[Difference]:
    """The entries about the computation that both configs have and in which they differ; what one leaves to a default is not known."""
    return [entry for entry in differences(config, other) if entry.is_setting]


def settings_text(settings: list[Difference], other: str) -> str:
    """What two configs say differently, with both values; ``other`` is where the second one is."""
    more = f" and {len(settings) - SHOWN} more" if len(settings) > SHOWN else ""
    return f"{'; '.join(setting.text(other) for setting in settings[:SHOWN])}{more}"


def settings_notes(settings: list[Difference], other: str, code: str = "other-settings") -> tuple[Note, ...]:
    """A warning about two configs of weights that go together; ``other`` is where the second one is."""
    if not settings:
        return ()
    text = f"config.json and that of the {other} differ in how weights of these shapes are used: {settings_text(settings, other)}"
    return (Note("warning", code, text),)


def _pairs(config: Config, other: Config) -> Iterator[tuple[str, Config, Config]]:
    """The levels of two configs that are about the same part; a language model may be a whole on one side and a part on the other."""
    inner = [each.get("text_config") if isinstance(each.get("text_config"), dict) else None for each in (config, other)]
    if (inner[0] is None) != (inner[1] is None):
        config, other = inner[0] or config, inner[1] or other
    pending = deque([("", config, other)])
    while pending:
        level, mine, others = pending.popleft()
        parts = [key for key, value in mine.items() if _is_part(key) and isinstance(value, dict) and isinstance(others.get(key), dict)]
        yield level, _without(mine, parts), _without(others, parts)
        pending += [(f"{level}{key}.", mine[key], others[key]) for key in parts]


def _is_part(key: object) -> bool:
    """Whether what an entry holds is compared entry by entry: no labels and the like, nor a rotary embedding, which has its own rules."""
    return isinstance(key, str) and (key.endswith("_config") or not is_harmless(key)) and key not in (SCALING, PARAMETERS)


def _without(config: Config, parts: Collection[str]) -> Config:
    return {key: value for key, value in config.items() if key not in parts}


def _different(level: str, config: Config, other: Config) -> Iterator[Difference]:
    off = {key: False for key in OFF if key in config or key in other}
    layered = has_layers(config) or has_layers(other)
    mine, others = (_normal({**off, **each}, layered) for each in (config, other))
    harmless = any(is_harmless(part) for part in level.split("."))
    for key in {**mine, **others}:
        if key not in IRRELEVANT and not _same(mine.get(key), others.get(key)):
            counts = not is_harmless(key) or (key == LENGTH and any(decides_rotation(each.get("rope_scaling")) for each in (mine, others)))
            yield Difference(f"{level}{key}", mine.get(key), others.get(key), key in mine and key in others and counts and not harmless)


def _same(mine: object, other: object) -> bool:
    if isinstance(mine, Mapping) and isinstance(other, Mapping) and same_scaling(mine, other):
        return True
    return mine == other or (mine != mine and other != other) or all(each is None or each is False for each in (mine, other))


def _normal(config: Config, layered: bool) -> dict[str, Any]:
    """The entries of one level in one of the ways in which they are written; those that are null say nothing, but for `SAID`.

    ``layered``: rotary embeddings are those of kinds of layers, on this side or the other.
    """
    found = {str(key): plain(value) for key, value in config.items()}
    if found.get("use_sliding_window") is False:
        found |= {key: None for key in ("sliding_window", "max_window_layers") if key in found}
    found, rotary = plain_rotary(found, layered)
    named = {key: SAME.get(value, value) if isinstance(value, str) else value for key, value in found.items()}
    return {key: value for key, value in named.items() if value is not None or SAID.fullmatch(key)} | rotary


def _shown(value: object) -> str:
    text = printable("none" if value is None else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
