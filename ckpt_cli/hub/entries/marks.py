"""What a config says of texts and labels: where texts end and begin, what classes are called, how their scores are meant.

No shape shows any of it, and it changes no score; what ``generate`` and pipelines make of scores it does change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_cli.hub.config import Config, architecture
from ckpt_cli.hub.entries.written import plain
from ckpt_cli.hub.settings import Difference

ENDS = re.compile(r"eos_token_id|decoder_start_token_id|forced_(bos|eos)_token_id", re.ASCII)
LABELS, PROBLEM, PAD = "id2label", "problem_type", "pad_token_id"
UNNAMED = re.compile(r"LABEL_[0-9]+", re.ASCII)
"""What transformers calls classes to which nobody gave names."""

BY_LAST_TOKEN = "ForSequenceClassification"
"""Classes that score the last token which is no padding, if the model writes texts."""


def other_marks(config: Config, other: Config) -> list[Difference]:
    """Where another config says something else of texts and labels, and a config says nothing of labels, or another end."""
    return [Difference(key, config.get(key), value, True) for key, value in _marks(other) if _differs(key, config.get(key), value)]


def _marks(config: Config) -> Iterator[tuple[str, Any]]:
    of_pad = (architecture(config) or "").endswith(BY_LAST_TOKEN)
    for key, value in config.items():
        is_named = isinstance(value, Mapping) and not all(UNNAMED.fullmatch(str(name)) for name in value.values())
        is_told = ENDS.fullmatch(key) or key == PROBLEM or (key == PAD and of_pad)
        if is_named if key == LABELS else is_told and value is not None:
            yield key, value


def _differs(key: str, mine: Any, other: Any) -> bool:
    if ENDS.fullmatch(key):
        return mine is not None and _numbers(mine) != _numbers(other)
    return plain(mine) != plain(other)


def _numbers(value: Any) -> list[Any]:
    return sorted(value, key=str) if isinstance(value, (list, tuple)) else [value]
