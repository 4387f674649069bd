"""Whether a base is the model that training started from: how many names both have, and how many of these in one shape.

Both sides are compared under hub names, if their configs determine these.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import CkptError
from ckpt_cli.hub.adapters.other_kinds import other_adapters
from ckpt_cli.hub.classes.absent.moved_names import moved_names
from ckpt_cli.hub.classes.in_memory.loaded import LoadedNames, loaded_names_of
from ckpt_cli.hub.classes.names import hub_tensors, unknown_operations
from ckpt_cli.hub.classes.rules import rules_for
from ckpt_cli.hub.classes.shapes.turned import turned_names
from ckpt_cli.hub.config import Config, architecture, is_quantised
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.names import few, printable, stripped_names
from ckpt_cli.tensors.tensor import Tensor

ENOUGH = 0.9
"""The share of the smaller side's tensors that both have in one shape, from which on they are one model.

Fine-tuning changes the shape of an embedding and a head, or adds some: of 300 tensors 298 stay. Two families of one size (Llama 3 8B and
Qwen3 8B) share 66%, two sizes of one family next to nothing.
"""

FEW = 2
"""So many tensors may differ however few there are: an embedding and a head that were resized."""

UNDER_OTHER_NAMES = 0.95
"""The share of shapes, whatever the names, from which on the names alone are others."""

QUANTISED = re.compile(r".*\.(qweight|qzeros|g_idx|absmax|quant_map|weight_packed|weight_scale_inv|SCB|quant_state\..*)", re.ASCII)
SIZES = ("hidden_size", "intermediate_size", "d_model", "n_embd")
"""Numbers of a config that no fine-tuning changes."""


@dataclass(frozen=True, slots=True)
class Resemblance:
    """Tensors of a model and of its base in numbers: ``common`` names, ``alike`` in shape too; ``renamed``: other names, the same shapes.

    ``moved`` are more tensors that both have in one shape, with other parts in front of the name;
    ``doubt`` is a reason against the base although names and shapes fit.
    """

    mine: int
    base: int
    common: int
    alike: int
    renamed: bool = False
    comparable: bool = True
    doubt: str | None = None
    moved: int = 0

    @property
    def same_model(self) -> bool:
        """Whether the base may be the model that training started from."""
        smaller = min(self.mine, self.base)
        both = self.alike + self.moved
        near = self.alike > 0 and smaller - both <= FEW
        return not self.comparable or (self.doubt is None and (near or both >= ENOUGH * smaller))

    @property
    def undecided(self) -> bool:
        """Whether nothing but the number of common names speaks against the base: it has no other shapes, and most of the names."""
        return not self.same_model and self.doubt is None and self.alike == self.common and 2 * self.alike >= min(self.mine, self.base)

    @property
    def why(self) -> str:
        """The reason against the base, with numbers."""
        return self.numbers if self.doubt is None else f"{self.doubt} ({self.numbers})"

    @property
    def numbers(self) -> str:
        """What was compared, in words."""
        alike = "none of them in the same shape" if not self.alike else f"{self.alike} of them in the same shape"
        moved = f", {self.moved} more with another prefix" if self.moved else ""
        return f"{self.common} of {self.mine} tensors have a name that is in the base ({self.base} tensors), {alike}{moved}"


def resemblance(
    mine: Mapping[str, Tensor], base: Mapping[str, Tensor], config: Config, base_config: Config, *, kinds_known: bool = True
) -> Resemblance:
    """Compare names and shapes of a model with those of a base; a side without a config uses that of the other.

    ``kinds_known``: both configs belong to their own sides, so they can be compared.
    """
    own, others = config or base_config, base_config or config
    held: dict[str, Shape] = {name: tensor.shape for name, tensor in mine.items()}
    there: dict[str, Shape] = {name: tensor.shape for name, tensor in base.items()}
    if sum(there.get(name) == shape for name, shape in held.items()) < ENOUGH * min(len(held), len(there)):
        # Names as trained, or of older files, on one side or on both.
        known = loaded_names_of(own) if own.get("model_type") == others.get("model_type") else None
        held, there = _hub_shapes(mine, own, known), _hub_shapes(base, others, known)
    if is_quantised(others) or any(QUANTISED.fullmatch(name) for name in base):
        # Of a quantised base only norms and biases are what they were.
        held, there = _vectors(held), _vectors(there)
    there = _turned(there, held, own)
    common = [name for name in held if name in there]
    alike = [name for name in common if held[name] == there[name]]
    shapes = [Counter(shape for shape in side.values() if len(shape) > 1) for side in (held, there)]
    shared, smaller = (shapes[0] & shapes[1]).total(), min(shapes[0].total(), shapes[1].total())
    renamed = len(common) * 2 < min(len(held), len(there)) and smaller > 0 and shared >= UNDER_OTHER_NAMES * smaller
    comparable = not (_holds_adapters(mine) or _holds_adapters(base) or not held or not there) and not renamed
    smaller_side = held if len(held) <= len(there) else there
    doubt = _doubt(own, others, [name for name in smaller_side if held.get(name) != there.get(name)]) if kinds_known else None
    ours = {name: shape for name, shape in held.items() if name not in there}
    moved = moved_names({name: shape for name, shape in there.items() if name not in held}, ours)
    return Resemblance(len(held), len(there), len(common), len(alike), renamed, comparable, doubt, len(moved))


def _turned(there: dict[str, Shape], held: Mapping[str, Shape], config: Config) -> dict[str, Shape]:
    """Shapes of a base the same way round as those that are ``held``, where versions of transformers have tensors otherwise."""
    others = {name: shape for name, shape in there.items() if held.get(name, shape) != shape and sorted(held[name]) == sorted(shape)}
    rules = rules_for(config) if others else None
    return there | {name: held[name] for name in turned_names(others, held, rules).names}


def _holds_adapters(tensors: Mapping[str, Tensor]) -> bool:
    """Whether there are adapters of PEFT, or others and nothing else."""
    other = other_adapters(tensors)
    return has_adapters(tensors) or (other is not None and other.alone)


def config_doubt(config: Config, base_config: Config) -> str | None:
    """A difference between two configs that no training explains, for a base without weights; None if there is no such difference."""
    kinds = config.get("model_type"), base_config.get("model_type")
    if all(isinstance(kind, str) for kind in kinds) and kinds[0] != kinds[1]:
        return f"config.json says model_type {printable(kinds[0])}, the base's says {printable(kinds[1])}"
    inner = [each.get("text_config") for each in (config, base_config)]
    pairs: list[tuple[Config, Config]] = [(config, base_config)]
    if isinstance(inner[0], Mapping) and isinstance(inner[1], Mapping):
        pairs.append((inner[0], inner[1]))
    for mine, base in pairs:
        for key in SIZES:
            if type(mine.get(key)) is int and type(base.get(key)) is int and mine[key] != base[key]:
                return f"config.json says {key} {mine[key]}, the base's says {base[key]}"
    return None


def _vectors(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if len(shape) == 1}


def _doubt(config: Config, base_config: Config, different: list[str]) -> str | None:
    """Two families may differ in an embedding only (Llama 3 8B and Mistral 7B): then the configs decide.

    A model of another type that has all tensors of the other raises no doubt: a language model with an image tower.
    """
    kinds = config.get("model_type"), base_config.get("model_type")
    if different and all(isinstance(kind, str) for kind in kinds) and kinds[0] != kinds[1]:
        return (
            f"the configs say {printable(kinds[0])} and {printable(kinds[1])}; missing or of another shape on one side: {few(different, 2)}"
        )
    return None


def _hub_shapes(tensors: Mapping[str, Tensor], config: Config, known: LoadedNames | None) -> dict[str, Shape]:
    """Shapes under hub names, or under their own names if these are unknown; ``known`` is the class whose files both should be."""
    try:
        native = {new: tensors[old] for old, new in stripped_names(tensors).items()}
        known = known or loaded_names_of(config)
        native = {new: native[old] for old, new in known.of(native).items()} if known is not None else native
        rules = rules_for(config) if architecture(config) else None
        if rules is not None and not unknown_operations(rules):
            ignored = set(rules.ignored)
            native = hub_tensors({name: tensor for name, tensor in native.items() if name not in ignored}, rules, config)
    except CkptError:
        native = dict(tensors)
    return {name: tensor.shape for name, tensor in native.items()}
