"""A part of a model that is loaded as a model of its own: the language model of a vision-language folder, as its own class names it.

Where its tensors lie in the whole is told by the names of both classes, never by shapes: two towers may have one width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from ckpt_cli.hub.classes.known_names import ClassNames, class_names, classes_of_type
from ckpt_cli.hub.config import Config, levels


@dataclass(frozen=True, slots=True)
class InnerModel:
    """A class (``kind``, with its ``config``) whose names that begin with ``own`` begin with ``outer`` in the whole model."""

    kind: str
    config: Config
    own: str
    outer: str
    beside: frozenset[str] = field(default_factory=frozenset)
    """Its other tensors, which both classes call the same: an output head."""

    def inside(self, name: str) -> str | None:
        """What the class calls a tensor of the whole model, None for one of another part."""
        if name.startswith(self.outer):
            return self.own + name.removeprefix(self.outer)
        return name if name in self.beside else None

    def outside(self, name: str) -> str:
        """What the whole model calls a tensor, or a module, of the class."""
        return self.outer + name.removeprefix(self.own) if name.startswith(self.own) and name not in self.beside else name


def inner_models(config: Config, modules: Iterable[str], tensors: Collection[str]) -> list[InnerModel]:
    """The classes of parts of a model whose ``modules`` these may be, one of each part; none if they are those of the whole.

    ``tensors`` are the names of the whole in memory. Only a part of a type that there is for this model alone counts: of any other one,
    such as llama, there are models with the same modules and other weights. Two towers may have the same modules.
    """
    whole, model_type, modules = class_names(config), config.get("model_type"), set(modules)
    if whole is None or not isinstance(model_type, str) or not modules:
        return []
    parts = [part for part in levels(config)[1:] if _is_type_of_part(part.get("model_type"), model_type)]
    there = _modules_of(tensors) if parts else set()
    if modules <= there:
        return []
    found = (inner for part in parts for inner in _classes_within(config, part, whole))
    fitting = [inner for inner in found if {inner.outside(module) for module in modules} <= there]
    return list({inner.outer: inner for inner in reversed(fitting)}.values())[::-1]


def _is_type_of_part(part: object, whole: str) -> bool:
    return isinstance(part, str) and part.startswith(f"{whole}_")


def _modules_of(names: Iterable[str]) -> set[str]:
    """All modules that hold tensors, themselves or in modules of theirs."""
    found: set[str] = set()
    for name in names:
        while (name := name.rpartition(".")[0]) and name not in found:
            found.add(name)
    return found


def _classes_within(config: Config, part: Config, whole: ClassNames) -> Iterator[InnerModel]:
    """The classes of the type of a part whose tensors all lie in the whole under one beginning of names."""
    for kind, known in classes_of_type(str(part["model_type"])):
        prefix = f"{known.prefix}."
        own = prefix if any(name.startswith(prefix) for name in known.native) else ""
        rests = [name.removeprefix(own) for name in known.native if name.startswith(own)]
        outers = {name.removesuffix(rests[0]) for name in whole.native if f".{name}".endswith(f".{rests[0]}")} if rests else set()
        outers = {outer for outer in outers - {own} if all(outer + rest in whole.native for rest in rests)}
        if len(outers) == 1:
            ties = {key: config[key] for key in ("tie_word_embeddings",) if key in config and key not in part}
            inner = {**part, **ties, "architectures": [kind]}
            yield InnerModel(kind, inner, own, outers.pop(), known.native & whole.native - {own + rest for rest in rests})
