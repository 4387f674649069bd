"""Which modules adapter_config.json names: PEFT's own rules (peft 0.21, ``check_target_module_exists``, ``_inject_parameters``).

PEFT loads the factors of these modules and leaves out all others that a file holds, without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_cli.hub.peft_names import PREFIX
from ckpt_cli.hub.tied_names import MODULES
from ckpt_cli.lora.expressions import Expression
from ckpt_cli.lora.settings import TYING

ALL_LINEAR, DUMMY = "all-linear", "dummy-target-modules"
"""What no name tells: every linear module, and a stand-in for modules that are told elsewhere."""

PLAIN = re.compile(r"[\w.-]+", re.ASCII)
"""Names without operators of expressions, and so quick to match."""


class Targets:
    """The modules and parameters that a config names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        said = config.get("target_modules")
        self.names = _names(said)
        self.parameters = _names(config.get("target_parameters"))
        self.is_all_linear = isinstance(said, str) and said.lower() == ALL_LINEAR
        self.expression = Expression(said) if isinstance(said, str) and said and not self.is_all_linear and said != DUMMY else None
        self._listed = frozenset(self.names) if isinstance(said, list) else None
        excluded = config.get("exclude_modules")
        self._excluded = frozenset(_names(excluded))
        self._excluding = Expression(excluded) if isinstance(excluded, str) and excluded else None
        self._saved = _names(config.get("modules_to_save"))
        layers = config.get("layers_to_transform")
        self._layers = [layers] if type(layers) is int else layers
        patterns = config.get("layers_pattern")
        self._patterns = [patterns] if isinstance(patterns, str) and patterns else _names(patterns)
        self._ties = config.get(TYING) is True

    @property
    def by_name(self) -> bool:
        """Whether the config names modules in a way that names decide."""
        return self._listed is not None or self.expression is not None

    def leaves_out(self, module: str) -> str | None:
        """The setting that leaves a module out; "" for a module that the config names, None where its name does not decide."""
        name = _in_model(module)
        named = self._named(name)
        verdicts = {
            "target_modules": named,
            "exclude_modules": _not(self.excludes(name)),
            "modules_to_save": _not(self._is_saved(name)),
            # PEFT looks at layers only where a list names the end of a module's name.
            "layers_to_transform": self._in_layers(name) if named and self._listed is not None and name not in self._listed else True,
        }
        out = next((setting for setting, verdict in verdicts.items() if verdict is False), None)
        if out == "target_modules" and self._ties and name.rpartition(".")[2] in MODULES:
            return None  # with its twin, which the config names by a name of its own
        return out if out is not None else None if None in verdicts.values() else ""

    def names_parameter(self, module: str, parameter: str | None) -> bool:
        """Whether a parameter of this module is named; ``parameter`` is its full name, None if it is not known."""
        if parameter is not None:
            return any(is_end(parameter, target) for target in self.parameters)
        return any(not (owner := target.rpartition(".")[0]) or is_end(module, owner) for target in self.parameters)

    def excludes(self, name: str) -> bool | None:
        """Whether ``exclude_modules`` means this name."""
        if self._excluding is not None:
            return self._excluding.matches(name)
        return any(end in self._excluded for end in ends(name))

    def _named(self, name: str) -> bool | None:
        if self._listed is not None:
            return any(end in self._listed for end in ends(name))
        return self.expression.matches(name) if self.expression is not None else None

    def _is_saved(self, name: str) -> bool | None:
        """Whether a module is, or lies in, one that was trained as a whole."""
        if all(PLAIN.fullmatch(saved) for saved in self._saved):
            return any(re.match(rf"(^|.*\.){saved}($|\..*)", name) for saved in self._saved)
        return None

    def _in_layers(self, name: str) -> bool | None:
        """Whether a module lies in one of ``layers_to_transform``: its first number, or in old versions of PEFT its last."""
        if self._layers is None or self._layers == []:
            return True
        patterns = self._patterns or [r"[^.]*"]
        if not isinstance(self._layers, list) or not all(PLAIN.fullmatch(pattern) for pattern in self._patterns):
            return None
        verdicts = set()
        for start in (r"(?:^|.*?\.)" if self._patterns else r".*?\.", r"(?:^|.*\.)" if self._patterns else r".*\."):
            found = (re.match(rf"{start}{pattern}\.(?P<layer>[0-9]+)\.", name) for pattern in patterns)
            first = next((match for match in found if match is not None), None)
            verdicts.add(first is not None and int(first["layer"]) in self._layers)
        return verdicts.pop() if len(verdicts) == 1 else None


def ends(name: str) -> Iterator[str]:
    """A name, and what is left of it without its first parts.

    >>> list(ends("layers.0.q_proj"))
    ['layers.0.q_proj', '0.q_proj', 'q_proj']
    """
    while name:
        yield name
        name = name.partition(".")[2]


def is_end(name: str, end: str) -> bool:
    """Whether a name is, or ends with, these parts."""
    return name == end or name.endswith(f".{end}")


def _in_model(module: str) -> str:
    """The name that PEFT knows a module by: within the model that it wrapped, which may be a part of the one that was saved."""
    return module.rpartition(PREFIX)[2]


def _not(verdict: bool | None) -> bool | None:
    return None if verdict is None else not verdict


def _names(said: object) -> list[str]:
    return [name for name in said if isinstance(name, str) and name] if isinstance(said, list) else []
