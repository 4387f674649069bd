"""Tensors that are several on the hub and one in memory, as the one that loading makes of them: fused experts above all.

They are only joined if saving makes the same parts of the result, byte for byte, so nothing here decides what a rule means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckpt_cli.errors import CkptError
from ckpt_cli.hub.classes.names import hub_tensors, unknown_operations
from ckpt_cli.hub.classes.rules import Conversion, HubRules
from ckpt_cli.hub.config import Config
from ckpt_cli.name_patterns import pattern_of
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.views import concatenated, stacked

Parts = dict[int, dict[int, str]]
"""Target of a rule -> number in its list -> name; a target that is no list has one with the number 0."""

UNDONE = (["SplitModulelist"], ["Chunk"], ["Chunk", "SplitModulelist"])
"""The operations of saving that are undone here, in their order."""


@dataclass(frozen=True, slots=True)
class _Joining:
    """A rule of saving, read backwards: ``targets`` that are joined on ``join``, after each list was stacked on ``stack``."""

    source: str
    targets: tuple[re.Pattern[str], ...]
    join: int | None
    stack: int | None

    def place(self, name: str) -> tuple[str, int, int] | None:
        """The tensor in memory that a tensor becomes a part of, with the target and the number that it has there; None for all others."""
        for index, target in enumerate(self.targets):
            if (match := target.search(name)) is not None:
                return name[: match.start()] + self.source, index, int(match["number"]) if self.stack is not None else 0
        return None


def joined_tensors(tensors: Mapping[str, Tensor], rules: HubRules, config: Config, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Tensors by their names in memory, with those joined that are one there, if any of these is ``wanted`` by its name.

    Where some of the parts are missing, or do not go together, these stay as they are.
    """
    joinings = [] if unknown_operations(rules) else [joining for rule in rules.conversions if (joining := _read_backwards(rule))]
    found: dict[tuple[str, int], Parts] = {}
    for name in tensors if joinings else ():
        for number, joining in enumerate(joinings):
            if (place := joining.place(name)) is not None:
                whole, target, index = place
                found.setdefault((whole, number), {}).setdefault(target, {})[index] = name
                break
    found = {key: parts for key, parts in found.items() if key[0] not in tensors and _is_known(key[0], rules)}
    result = dict(tensors)
    for (whole, number), parts in found.items() if any(wanted(whole) for whole, _ in found) else ():
        named = {name: tensors[name] for numbered in parts.values() for name in numbered.values()}
        made = _joined(whole, joinings[number], parts, named)
        if made is not None and _is_saved_as(made, named, rules, config):
            for name in named:
                del result[name]
            result[whole] = made
    return result


def _is_known(name: str, rules: HubRules) -> bool:
    """Whether the class has a tensor of this name in memory, as far as its names are known."""
    return not rules.native or pattern_of(name)[0] in rules.native


def _read_backwards(rule: Conversion) -> _Joining | None:
    """How loading undoes a rule that makes several tensors of one; None for all others."""
    sources, targets = rule.renaming.sources, rule.renaming.targets
    operations = {operation["name"]: operation for operation in rule.operations}
    listed = "SplitModulelist" in operations
    if [operation["name"] for operation in rule.operations] not in UNDONE or len(sources) != 1:
        return None
    if any(target.count("*") != listed for target in targets) or (len(targets) > 1) != ("Chunk" in operations):
        return None
    if operations.get("Chunk", {}).get("num_shards_attribute") is not None:
        return None
    join, stack = (operations[name]["dim"] if name in operations else None for name in ("Chunk", "SplitModulelist"))
    return _Joining(sources[0].replace("\\", ""), tuple(re.compile(_pattern(target)) for target in targets), join, stack)


def _pattern(target: str) -> str:
    start = "" if target.startswith(".") else r"(?:^|(?<=\.))"
    return rf"{start}{re.escape(target)}$".replace(r"\*", "(?P<number>0|[1-9][0-9]*)")


def _joined(name: str, joining: _Joining, parts: Parts, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The tensor of all its parts, None if some are missing, and for tensors that do not go together."""
    counts = {len(numbered) for numbered in parts.values()}
    gaps = any(max(numbered) != len(numbered) - 1 for numbered in parts.values())
    if len(parts) != len(joining.targets) or len(counts) > 1 or gaps:
        return None
    try:
        listed = [[tensors[parts[target][number]] for number in sorted(parts[target])] for target in sorted(parts)]
        whole = [stacked(each, joining.stack) if joining.stack is not None else each[0] for each in listed]
        return replace(concatenated(whole, joining.join) if joining.join is not None else whole[0], name=name)
    except CkptError:
        return None


def _is_saved_as(whole: Tensor, parts: Mapping[str, Tensor], rules: HubRules, config: Config) -> bool:
    """Whether saving makes these parts of a tensor, under the names that they have on the hub."""
    try:
        made, wanted = hub_tensors({whole.name: whole}, rules, config), hub_tensors(parts, rules, config)
    except CkptError:
        return False
    return made.keys() == wanted.keys() and all(_content(made[name]) == _content(wanted[name]) for name in made)


def _content(tensor: Tensor) -> list[object]:
    return [tensor.dtype, tensor.shape, *(piece.same_bytes_as for piece in tensor.pieces)]
