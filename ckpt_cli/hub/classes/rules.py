"""The rules that turn the names and layouts of a model in memory into those on the hub, and where they come from.

They are transformers' own conversion tables, reverted (see `ckpt_cli.hub.classes.compile`): ``rules.json`` has those of every
architecture that the transformers of its first line can build; others are compiled in a child process, once, and kept in
the user's cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_cli.hub.classes.absent.own_class import comparable
from ckpt_cli.hub.classes.known_names import ClassNames, class_names
from ckpt_cli.hub.classes.transformers_child import asked_child, installed_version
from ckpt_cli.hub.config import Config, architecture, with_plain_class
from ckpt_cli.name_patterns import pattern_of

FILE = Path(__file__).with_name("rules.json")
SCHEMA = 4
"""Version of compiled rule sets; cached ones of another version are not used."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """An expression, and what the match becomes.

    ``kind``: "first" (the first target), "paired" (the target of the branch that matched, only once branch 0 has matched) or
    "shifted" (a number in the name grows by ``offset``). ``scope``: prefixes (of the base model, of the part) that limit it.
    """

    match: re.Pattern[str]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    scope: tuple[str, str] | None
    kind: str = "first"
    offset: int = 0

    def inside(self, name: str) -> tuple[str, str] | None:
        """The prefixes of a name that limit it, and the rest, in which it looks for a match; None for a name without these prefixes."""
        if self.scope is None:
            return "", name
        base, part = (f"{text}." if text else "" for text in self.scope)
        found = next((start for start in (base + part, part) if name.startswith(start)), None)
        return None if found is None else (found, name[len(found) :])


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors that a renaming gathers under one name, and the operations that re-cut them, in order."""

    renaming: Renaming
    operations: tuple[Mapping[str, Any], ...]

    @property
    def splits_a_list(self) -> bool:
        """Whether files have many tensors of what is one in memory."""
        return any(operation["name"] == "SplitModulelist" for operation in self.operations)

    @property
    def turning(self) -> tuple[int, int] | None:
        """The two dimensions that a loader exchanges where a tensor has another shape than in memory, and leaves alone where it has not."""
        (operation, *more) = self.operations or ({},)
        alone = not more and operation.get("name") == "Transpose" and operation.get("check_dims") is True
        return (operation["dim0"], operation["dim1"]) if alone else None


@dataclass(frozen=True, slots=True)
class HubRules:
    """Everything for one architecture; ``origin`` says where it comes from, ``tied`` maps expressions of names.

    ``ties`` says for each of `SAYINGS` of a config whether the class ties its head ("1" or "0"). ``older`` turns names of the hub, or of
    older versions of transformers, into those in memory. Its expressions may match names in memory too: ``native`` and ``hub`` are the
    names that tell these apart, by pattern. ``kept`` finds, for a dtype of 16 bits (by its code), the names in memory of tensors that stay
    in fp32 when transformers loads the class in it.
    """

    architecture: str
    origin: str
    conversions: tuple[Conversion, ...]
    renamings: tuple[Renaming, ...]
    older: tuple[Renaming, ...]
    ignored: tuple[str, ...]
    tied: Mapping[str, str]
    ties: str
    kept: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    native: frozenset[str] = frozenset()
    hub: frozenset[str] = frozenset()

    @property
    def turning(self) -> tuple[tuple[Renaming, tuple[int, int]], ...]:
        """The renamings of tensors that files may have either way round (see `Conversion.turning`), with their two dimensions."""
        return tuple((rule.renaming, rule.turning) for rule in self.conversions if rule.turning is not None)

    def in_a_list(self, name: str) -> str | None:
        """The same name with the first number of its list, if loading makes one tensor of a list that this name of the hub is of."""
        for target in (target for rule in self.conversions if rule.splits_a_list for target in rule.renaming.targets):
            match = re.search(rf"{re.escape(target)}$".replace(r"\*", "([0-9]+)"), name) if "*" in target else None
            if match is not None:
                return f"{name[: match.start(1)]}0{name[match.end(1) :]}"
        return None

    def made_of(self, name: str) -> tuple[str, ...]:
        """The names in memory of what loading makes of a tensor: its own name, unless it is joined with others or cut."""
        for rule in self.conversions:
            for target in rule.renaming.targets:
                start = "" if target.startswith(".") else r"(?:^|(?<=\.))"
                match = re.search(rf"{start}{re.escape(target)}$".replace(r"\*", "[0-9]+"), name)
                if match is not None:
                    return tuple(name[: match.start()] + source.replace("\\", "") for source in rule.renaming.sources)
        return (name,)

    def only_on_hub(self, name: str) -> bool:
        """Whether a name is one of the hub that no tensor in memory has."""
        pattern = pattern_of(name)[0]
        return pattern in self.hub and pattern not in self.native

    def is_cut(self, name: str) -> bool:
        """Whether a name, in the words of memory, is that of what saving makes of another tensor: ``q_conv1d`` of a ``conv1d``."""
        return bool(self.native) and pattern_of(name)[0] not in self.native and self.made_of(name) != (name,)

    def in_memory(self, name: str, renamed: str) -> bool:
        """Whether a name that ``older`` would change is one in memory; where it is one of the hub too, only if the new name is none.

        So is that of a tensor of the hub which got the words of memory, but was not joined there.
        """
        pattern = pattern_of(name)[0]
        if pattern not in self.native:
            made = self.made_of(name) if self.native and pattern not in self.hub else ()
            return made not in ((), (name,)) and all(pattern_of(whole)[0] in self.native for whole in made)
        return pattern not in self.hub or pattern_of(renamed)[0] not in self.native


def rules_for(config: Config) -> HubRules | None:
    """The rules of the architecture that a config names; None if neither the shipped file nor transformers knows it."""
    config = comparable(with_plain_class(config))
    name, model_type = architecture(config), config.get("model_type")
    if name is None or not isinstance(model_type, str):
        return None
    shipped, key, entry = _shipped(), f"{model_type}/{name}", _entry(config)
    if entry is not None:
        rules = shipped["rules"][entry[0]]
        return _built(name, f"transformers {shipped['transformers']}", {**rules, "ties": entry[1]}, class_names(config))
    version = installed_version()
    if version is None or config.get("auto_map") or (key not in shipped["models"] and version == shipped["transformers"]):
        # Custom code is never run, and a class of transformers that has its name is another one.
        return None
    compiled = asked_child("rules", config, SCHEMA)
    return (
        None
        if compiled is None or "converters" not in compiled
        else _built(name, f"transformers {compiled['transformers']}, compiled for this config", compiled, class_names(config))
    )


def ties_of(config: Config, *, ask: bool) -> str | None:
    """`HubRules.ties` of the architecture that a config names; None if it is not known, ``ask``: to transformers either."""
    entry = _entry(config)
    if entry is not None:
        return str(entry[1])
    rules = rules_for(config) if ask else None
    return rules.ties if rules is not None else None


def knows(model_type: object, name: str) -> bool:
    """Whether transformers has a class of this name for a model type, by the shipped file."""
    return f"{model_type}/{name}" in _shipped()["models"]


def _entry(config: Config) -> Sequence[Any] | None:
    """What the shipped file has of the architecture that a config names, if its parts are of the same types."""
    entry: Sequence[Any] | None = _shipped()["models"].get(f"{config.get('model_type')}/{architecture(config)}")
    return entry if entry is not None and _same_parts(entry[2], config) else None


def _same_parts(parts: Mapping[str, str], config: Config) -> bool:
    """Whether the parts of a composed model are of the types for which the rules were made.

    transformers 4 gave some parts, such as the vision towers of Qwen's models, the type of the whole model, or none.
    """
    inner = {name: part for name in parts if isinstance(part := config.get(name), Mapping)}
    of_old = ("", _type(config))
    return all(_type(part, parts[name]) in (_type({}, parts[name]), *of_old) for name, part in inner.items())


def _type(config: Config, usual: object = "") -> str:
    """A model type, however it is spelled: one part was called ``Glm4vMoe_text``."""
    return str(config.get("model_type", usual)).replace("_", "").lower()


EARLIER = {"ColPaliForRetrieval": ("vlm.model.", "vlm.")}
"""Classes -> what began the names in memory of transformers 4.52 to 4.57, and begins those of today. Loading does not know of it.

Files of these versions have the names that they have today: only checkpoints of a training know the others.
"""


def _earlier(name: str) -> tuple[Renaming, ...]:
    before, today = EARLIER.get(name, ("", ""))
    return (Renaming(re.compile(f"(?P<g0>^{re.escape(before)})"), (before,), (today,), None),) if before else ()


def _built(name: str, origin: str, content: Mapping[str, Any], names: ClassNames | None) -> HubRules:
    return HubRules(
        name,
        origin,
        tuple(Conversion(_renaming(entry), tuple(entry["operations"])) for entry in content["converters"]),
        tuple(_renaming(entry) for entry in content["renamings"] if entry["kind"] != "none"),
        _earlier(name) + tuple(_renaming(entry) for entry in content["older"] if entry["kind"] != "none"),
        tuple(content["ignored"]),
        content["tied"],
        content["ties"],
        {code: re.compile("|".join(f"(?:{text})" for text in texts)) for code, texts in content["kept"].items() if texts},
        *((names.native, names.hub) if names is not None else ()),
    )


def _renaming(entry: Mapping[str, Any]) -> Renaming:
    base, part = entry["scope"] or ("", "")
    scope = None if entry["scope"] is None else (base, part)
    return Renaming(
        re.compile(entry["match"]),
        tuple(entry["sources"]),
        tuple(entry["targets"]),
        scope,
        entry.get("kind", "first"),
        entry.get("offset", 0),
    )


@cache
def _shipped() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content
