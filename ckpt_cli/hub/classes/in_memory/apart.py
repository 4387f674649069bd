"""Heads that a class ties by default, under the names that files have for them where a config, or an older default, does not tie them.

The names that ship are those of default configs, whose files lack such a head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from ckpt_cli.hub.classes.names import renamed_for_hub
from ckpt_cli.hub.classes.rules import HubRules
from ckpt_cli.name_patterns import pattern_of


def heads_apart(native: frozenset[str], rules: HubRules | None) -> frozenset[str]:
    """The names by pattern, on the hub, of tensors that the rules tie; ``native`` are the patterns of the names in memory."""
    if rules is None or not rules.tied:
        return frozenset()
    numbered = _numbered(native)
    tied = {name: () for name in numbered if any(re.fullmatch(target, name) for target in rules.tied)}
    return frozenset(pattern_of(name)[0] for name in renamed_for_hub(tied, rules))


@lru_cache(maxsize=8)
def _numbered(native: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.replace("{}", "0") for name in native)
