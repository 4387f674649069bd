"""Names of files as loading brings them to those of a class in memory: older words, and the base model's prefix more or less.

What transformers does with each name (``rename_source_key`` of `core_model_loading.py`), told by the names that the class has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ckpt_cli.hub.classes.absent.own_class import comparable
from ckpt_cli.hub.classes.fit import KnownClass
from ckpt_cli.hub.classes.in_memory.older_words import todays_words
from ckpt_cli.hub.classes.known_names import class_names
from ckpt_cli.hub.classes.names import native_names
from ckpt_cli.hub.classes.rules import HubRules, rules_for
from ckpt_cli.hub.config import Config
from ckpt_cli.name_patterns import NUMBER, pattern_of


@dataclass(frozen=True)
class LoadedNames:
    """The names of a class in memory: ``patterns`` with ``{}`` in place of numbers, and ``prefix``, that of the base model inside."""

    rules: HubRules
    prefix: str
    patterns: frozenset[str]

    @cached_property
    def modules(self) -> frozenset[str]:
        """The modules that hold these tensors, themselves or in modules of theirs."""
        found: set[str] = set()
        for name in self.patterns:
            while (name := name.rpartition(".")[0]) and name not in found:
                found.add(name)
        return frozenset(found)

    def has_module_of(self, name: str) -> bool:
        """Whether the class has the module that a tensor of this name in memory lies in."""
        return pattern_of(name)[0].rpartition(".")[0] in self.modules

    def has_part_of(self, name: str) -> bool:
        """The same, where settings may bring along any module of a layer: those are taken to be there."""
        return "{}" in pattern_of(name)[0] or self.has_module_of(name)

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Each name as in memory; those of which two would become one, and those that the class does not know, stay as they are."""
        names = list(names)
        loaded = {name: self._loaded(new) for name, new in native_names(names, self.rules).items()}
        if not any(self._has(new) for new in loaded.values()) and (part := self._part_of(loaded.values())):
            loaded = {name: self._loaded(new.removeprefix(part)) for name, new in loaded.items()}
        counts = Counter(loaded.values())
        return {name: loaded[name] if counts[loaded[name]] == 1 else name for name in names}

    def beside(self, names: Iterable[str]) -> dict[str, str]:
        """Of names that are one in memory, all but one -> that one, which is called as in memory if one is."""
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self._loaded(name), []).append(name)
        several = {new: group for new, group in found.items() if len(group) > 1 and self._has(new)}
        owners = {new: new if new in group else group[0] for new, group in several.items()}
        return {name: owners[new] for new, group in several.items() for name in group if name != owners[new]}

    def _has(self, name: str) -> bool:
        return NUMBER.sub("{}", name) in self.patterns

    def _part_of(self, names: Iterable[str]) -> str:
        """What begins the names of the part of a larger model that is this class: of CLIP's two towers, ``text_model.``; empty for none.

        Behind it are at least half of the names that the class has.
        """
        behind: dict[str, set[str]] = {}
        for name in names:
            start, dot, rest = name.partition(".")
            if self._has(rest):
                behind.setdefault(start + dot, set()).add(pattern_of(rest)[0])
        most = max(map(len, behind.values()), default=0)
        parts = [start for start, found in behind.items() if len(found) == most and 2 * most >= len(self.patterns)]
        return parts[0] if len(parts) == 1 else ""

    @cached_property
    def _changing(self) -> dict[str, bool]:
        """Whether names change, by their patterns: of most, of which there are thousands, that is all that is asked."""
        return {}

    def _loaded(self, name: str) -> str:
        """A name as in memory. One that the settings of a model bring along goes with the others of its module."""
        pattern = NUMBER.sub("{}", name)
        changes = self._changing.get(pattern)
        if changes is False:
            return name
        new = self._changed(name)
        self._changing[pattern] = new != name
        return new

    def _changed(self, name: str) -> str:
        if self._has(name):
            return name
        start, word = f"{self.prefix}." if self.prefix else "", todays_words(name)
        changed = [new for each in (name, word) for new in (each, each.removeprefix(start), start + each)]
        exact = next((new for new in changed if self._has(new)), None)
        return exact or next((new for new in changed[:3] if self.has_module_of(new)), name)


def loaded_names(kind: KnownClass | str) -> LoadedNames | None:
    """The names of a class that tensors are compared with, None where it is not known."""
    if isinstance(kind, str) or kind.rules is None:
        return None
    return LoadedNames(kind.rules, kind.known.prefix, frozenset(pattern_of(name)[0] for name in kind.known.native))


def loaded_names_of(config: Config) -> LoadedNames | None:
    """The names of the class that a config names, as far as the shipped file has them."""
    config = comparable(config)
    rules, known = rules_for(config), class_names(config)
    return LoadedNames(rules, known.prefix, known.native) if rules is not None and known is not None else None
