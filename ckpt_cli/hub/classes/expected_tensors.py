"""Which tensors the class that a config names has: transformers builds it without memory, in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.transformers_child import NO_TORCH, asked_child, installed_version
from ckpt_cli.hub.config import Config, architecture, huge_number, with_plain_class
from ckpt_cli.names import printable

SCHEMA = 7
"""Version of the tensors that are cached; those of another version are not used."""


class Doubtful(str):
    """Why the tensors of a class are unknown, although transformers has it: a warning with this ``code``."""

    code: ClassVar[str]


class Unbuildable(Doubtful):
    """transformers knows its name, and fails to build it from this config, as loading would."""

    code = "unbuildable-config"


class Unasked(Doubtful):
    """What transformers needs to build it is not on this machine: a library, memory. What is lost passes unnoticed."""

    code = "unasked-class"


@dataclass(frozen=True, slots=True)
class Expected:
    """Shapes by name, as in memory (``native``) and as saved (``hub``).

    ``prefix`` is the name of the base model inside, which older files may lack or have. ``tied`` maps names in memory that saving leaves
    out to those that share their storage, ``hub_tied`` does so under the names of the hub; ``optional`` and ``ignored`` are expressions
    for names that a loader may lack, or find without a place for them.
    """

    origin: str
    prefix: str
    native: Mapping[str, Shape]
    hub: Mapping[str, Shape]
    tied: Mapping[str, str]
    hub_tied: Mapping[str, str]
    optional: tuple[str, ...]
    ignored: tuple[str, ...]

    def one_tensor(self, name: str, other: str) -> bool | None:
        """Whether two names in memory are one tensor of the class; None if it has no tensor of one of these names."""
        if name not in self.native or other not in self.native:
            return None
        return self.tied.get(name, name) == self.tied.get(other, other)


def expected_tensors(config: Config) -> Expected | str:
    """The tensors of the model that a config describes, or why they are unknown. Custom code is never run."""
    config = with_plain_class(config)
    kind, version = architecture(config), installed_version()
    if kind is None or not isinstance(config.get("model_type"), str):
        return "config.json names no architecture"
    if config.get("auto_map"):
        return f"{printable(kind)} is custom code, which is not run"
    if version is None:
        return "transformers is not installed"
    writer = config.get("transformers_version")
    if isinstance(writer, str) and version.startswith("4.") and writer.startswith("5."):
        # It has other names and defaults, and would not load what the newer one saved.
        return f"config.json was written by transformers {printable(writer)}, and {version} is installed"
    huge = huge_number(config)
    if huge is not None:
        return f"config.json asks for {huge}, more than any model has"
    answer = asked_child("tensors", config, SCHEMA)
    if answer is None:
        return f"transformers {version} was not asked about {printable(kind)}"
    if "unasked" in answer:
        why = f"transformers {version} could not be asked about {printable(kind)}: {printable(answer['unasked'])}"
        return why if answer["unasked"] == NO_TORCH else Unasked(why)
    if not answer.get("native"):
        reason = f": {printable(answer['reason'])}" if answer.get("reason") else ""
        why = f"transformers {version} cannot build {printable(kind)} from this config{reason}"
        return Unbuildable(why) if _is_known(config, answer.get("reason")) else why
    return Expected(
        f"transformers {answer['transformers']}",
        str(answer.get("prefix") or ""),
        _shapes(answer["native"]),
        _shapes(answer["hub"]),
        answer["tied"],
        answer["hub_tied"],
        tuple(answer["optional"]),
        tuple(answer["ignored"]),
    )


def _is_known(config: Config, reason: object) -> bool:
    """Whether transformers has the class and the model_type, by the reason for which it cannot build it."""
    if not isinstance(reason, str):
        return False
    return reason != f"KeyError: {config['model_type']!r}" and not reason.startswith("AttributeError: module transformers has no attribute")


def _shapes(listed: Mapping[str, list[int]]) -> dict[str, Shape]:
    return {name: tuple(shape) for name, shape in listed.items()}
