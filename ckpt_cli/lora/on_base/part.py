"""The part of a base that adapters were trained on, where it was loaded as a model of its own: one of two towers, for example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckpt_cli.errors import Undecidable
from ckpt_cli.hub.classes.in_memory.inner import InnerModel, inner_models
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.peft_names import Adapter
from ckpt_cli.lora.on_base.trained_class import trained_class
from ckpt_cli.names import few
from ckpt_cli.tensors.tensor import Tensor


def part_of(config: Config, adapters: Sequence[Adapter], tensors: Mapping[str, Tensor], settings: Config) -> InnerModel | None:
    """The part of a model with these ``tensors`` in memory that the ``adapters`` are for; None for the whole, or for no part of it.

    Of parts with the same modules it is the one of the class in ``settings``, those of adapter_config.json, or the only one whose shapes
    the factors fit. Raises Undecidable if neither tells: the adapter of one tower fits another one of its size.
    """
    modules = [adapter.module for adapter in adapters]
    known = {tuple(inner.outside(module) for module in modules): inner for inner in inner_models(config, modules, tensors)}
    if not known:
        return None
    # Not every part has a class whose names are known.
    places = dict.fromkeys([*known, *(tuple(start + module for module in modules) for start in _starts(modules, tensors))])
    named = trained_class(settings)
    of_class = [place for place, inner in known.items() if inner.kind == named]
    found = of_class or _called_like(named, places, modules) or list(places)
    if len(found) > 1:
        found = [place for place in places if _fit(adapters, place, tensors)] or found[:1]
    if len(found) > 1:
        parts = sorted(place[0].removesuffix(modules[0]).removesuffix(".") for place in found)
        raise Undecidable(
            f"the adapters fit {len(found)} parts of the base: {few(parts)}",
            tensor=adapters[0].stored,
            expected="factors that fit the modules of one part, or the class of one in auto_mapping of adapter_config.json",
            hint="pass --lora export, without --base, and fuse it with PEFT into the part that it was trained on",
        )
    return known.get(found[0]) or _of_unknown_class(config, named, found[0][0].removesuffix(modules[0]))


def _called_like(named: str | None, places: Iterable[tuple[str, ...]], modules: Sequence[str]) -> list[tuple[str, ...]]:
    """The place that the name of the trained class tells, where it is none of those whose names are known: ``SiglipTextModel``."""
    if named is None:
        return []
    called = [place for place in places if _word(place[0].removesuffix(modules[0])) in named.lower()]
    return called if len(called) == 1 else []


def _of_unknown_class(config: Config, named: str | None, outer: str) -> InnerModel | None:
    """The part of a model that ``outer`` begins, of a class whose names are not known and whose name tells the part."""
    if named is None or _word(outer) not in named.lower():
        return None
    part = config.get(f"{_word(outer)}_config")
    return InnerModel(named, {**(part if isinstance(part, Mapping) else {}), "architectures": [named]}, "", outer)


def _word(outer: str) -> str:
    """What a part is called, by the module that it lies in: ``text`` for "text_model."."""
    return outer.rstrip(".").rpartition(".")[2].removesuffix("_model")


def _starts(modules: Sequence[str], tensors: Iterable[str]) -> list[str]:
    """What the names of all ``modules`` begin with where a model has them in a part."""
    owners = {name.rpartition(".")[0] for name in tensors}
    starts = [owner.removesuffix(modules[0]) for owner in sorted(owners) if owner.endswith(f".{modules[0]}")]
    return [start for start in starts if all(start + module in owners for module in modules)]


def _fit(adapters: Sequence[Adapter], place: Sequence[str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether no factors of two axes are for another shape than that of their weight in a part."""
    pairs = [(adapter, tensors.get(f"{name}.weight")) for adapter, name in zip(adapters, place, strict=True)]
    return all(_has_shape(adapter, weight) for adapter, weight in pairs if weight is not None)


def _has_shape(adapter: Adapter, weight: Tensor) -> bool:
    if len(weight.shape) != 2 or not {"lora_A", "lora_B"} <= adapter.parts.keys() or len(adapter.a.shape) != 2 or len(adapter.b.shape) != 2:
        return True
    return sorted((adapter.b.shape[0], adapter.a.shape[1])) == sorted(weight.shape)
