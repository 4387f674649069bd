"""A base's tensors as the model that was trained has them in memory: by the names of its class, joined, and of the part that it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.absent.own_class import with_class
from ckpt_cli.hub.classes.expected_tensors import expected_tensors
from ckpt_cli.hub.classes.in_memory.inner import InnerModel
from ckpt_cli.hub.classes.in_memory.joined import joined_tensors
from ckpt_cli.hub.classes.in_memory.loaded import LoadedNames, loaded_names_of
from ckpt_cli.hub.classes.in_memory.split import SizeOf, split_tensors
from ckpt_cli.hub.classes.names import native_tensors
from ckpt_cli.hub.classes.rules import rules_for
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.peft_names import Adapter
from ckpt_cli.lora.on_base.part import part_of
from ckpt_cli.lora.on_base.trained_class import trained_config
from ckpt_cli.tensors.tensor import Tensor


@dataclass(frozen=True, slots=True)
class SeenBase:
    """A base's tensors as the model that was trained has them in memory, by its ``config``; ``known`` are the names of its class.

    ``of_base`` are those of the base's class, where that is another one. If the model is a part of the base, loaded as a model of
    its own (``inner``), ``others`` are those of the other parts.
    """

    tensors: dict[str, Tensor]
    config: Config
    inner: InnerModel | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    known: LoadedNames | None = None
    of_base: LoadedNames | None = None

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The base with these tensors of the model that was trained, by the names of the base's class."""
        if self.inner is not None:
            return {**self.others, **{self.inner.outside(name): tensor for name, tensor in tensors.items()}}
        names = self.of_base.of(tensors) if self.of_base is not None else {}
        return {names.get(name, name): tensor for name, tensor in tensors.items()}

    def of_the_model(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of these tensors that the model which was trained has, as far as its class is known: not the head of another class."""
        known = self.known
        return {name: tensor for name, tensor in tensors.items() if known is None or known.has_part_of(name)}


def as_in_memory(tensors: Mapping[str, Tensor], config: Config, adapters: Iterable[Adapter], settings: Config) -> SeenBase:
    """A base's tensors under the names that the model of these ``adapters`` has in memory; what they are for also in the form there.

    ``settings`` are those of adapter_config.json. Names of adapters may begin with what a trainer calls the model. Raises Undecidable if
    the adapters may be for one part of the model as well as for another.
    """
    config = with_class(config, tensors)
    rules = rules_for(config)
    if rules is None:
        return SeenBase(dict(tensors), config)
    adapters = list(adapters)
    modules = [adapter.module for adapter in adapters]
    own, other = loaded_names_of(config), trained_config(config, settings)
    trained = own if other is config else loaded_names_of(other)
    named = _best_named(tensors, [known for known in (trained, own) if known is not None], modules)
    known, held = named if named is not None else (None, native_tensors(tensors, rules))
    inner = part_of(config, adapters, held, settings)
    split = [(inner.outside(module) if inner is not None else module).split(".") for module in modules]
    wanted = {".".join(parts[start:]) for parts in split for start in range(len(parts))}

    def is_wanted(name: str) -> bool:
        return name.rpartition(".")[0] in wanted

    joined = joined_tensors(held, rules, config, is_wanted)
    joined = split_tensors(joined, rules, config, is_wanted, _sizes(config, adapters, inner))
    if inner is None:
        return SeenBase(joined, config, known=known, of_base=own if known is not own else None)
    part = {name: seen for name in joined if (seen := inner.inside(name)) is not None}
    others = {name: tensor for name, tensor in joined.items() if name not in part}
    return SeenBase({seen: joined[name] for name, seen in part.items()}, inner.config, inner, others, loaded_names_of(inner.config))


def _sizes(config: Config, adapters: Iterable[Adapter], inner: InnerModel | None) -> SizeOf:
    """How long tensors are in memory, by their class, or else by the factors of the adapters on them."""
    rows = {
        adapter.module: adapter.b.shape[0] for adapter in adapters if not adapter.embedding and {"lora_A", "lora_B"} <= adapter.parts.keys()
    }

    @cache
    def of_class() -> Mapping[str, Shape]:
        expected = expected_tensors(config)
        return {} if isinstance(expected, str) else expected.native

    def size_of(name: str, axis: int) -> int | None:
        shape = of_class().get(name)
        if shape is not None:
            return shape[axis] if axis < len(shape) else None
        seen = inner.inside(name) if inner is not None else name
        parts = (seen or name).rpartition(".")[0].split(".")
        owners = (".".join(parts[start:]) for start in range(len(parts)))
        return next((rows[owner] for owner in owners if owner in rows), None) if axis == 0 else None

    return size_of


def _best_named(
    tensors: Mapping[str, Tensor], classes: Iterable[LoadedNames], modules: Sequence[str]
) -> tuple[LoadedNames, Mapping[str, Tensor]] | None:
    """The tensors by the names of that one of the ``classes`` by which most of the ``modules`` are there, the first of several."""
    found: list[tuple[int, LoadedNames, Mapping[str, Tensor]]] = []
    for known in classes:
        names = known.of(tensors)
        owners = {name.rpartition(".")[0] for name in names.values()}
        held = {names[name]: tensor for name, tensor in tensors.items()}
        found.append((sum(module in owners for module in modules), known, held))
    return max(found, key=lambda each: each[0])[1:] if found else None
