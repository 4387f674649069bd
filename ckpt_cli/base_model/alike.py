"""The tensors of a base as an output has them: the names that loading takes for the same tensor, re-cut, and the same way round.

Files of one model may have the names of several times, or of a class with another head: BERT's norms are gamma and beta in its first files,
and those of GPT-2 lack the name of the model inside. All that compares with a base, or takes from it, asks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.expected_tensors import Expected
from ckpt_cli.hub.classes.fit import KnownClass, known_class
from ckpt_cli.hub.classes.in_memory.joined import joined_tensors
from ckpt_cli.hub.classes.in_memory.loaded import LoadedNames, loaded_names
from ckpt_cli.hub.classes.names import hub_tensors, unknown_operations
from ckpt_cli.hub.classes.shapes.turned import Turned, turned_alike
from ckpt_cli.hub.config import Config
from ckpt_cli.names import Naming
from ckpt_cli.tensors.tensor import Tensor


def laid_out_alike(
    base: Mapping[str, Tensor], mine: Mapping[str, Tensor], kind: KnownClass | str, naming: Naming, configs: tuple[Config, Config]
) -> tuple[Mapping[str, Tensor], Turned]:
    """The tensors of a base, named and cut like those of an output (``mine``), and which of them were turned for it.

    ``configs`` are those of the output and of the base. Raises what `hub_tensors` raises.
    """
    held = named_alike(base, mine, kind, naming, configs[0])
    of_class: Mapping[str, Shape] = MappingProxyType({})
    if isinstance(kind, KnownClass) and isinstance(kind.known, Expected):
        of_class = kind.known.hub
    return turned_alike(held, mine, *configs, of_class)


def named_alike(
    base: Mapping[str, Tensor], mine: Mapping[str, Tensor], kind: KnownClass | str, naming: Naming, config: Config
) -> Mapping[str, Tensor]:
    """The tensors of a base named and cut like those of an output, as the class has them where the output has none of that name."""
    known = loaded_names(kind)
    if known is None or base.keys() == mine.keys():
        return base
    names = known.of(base)
    held = {names[name]: tensor for name, tensor in base.items()}
    if not unknown_operations(known.rules):
        cut = hub_tensors(held, known.rules, config) if naming == "hub" else None
        held = joined_tensors(held, known.rules, config, mine.__contains__) if cut is None else cut
    return spelled_alike(held, mine, known)


def seen_alike(
    others: Mapping[str, Tensor], mine: Mapping[str, Tensor], configs: tuple[Config, Config]
) -> tuple[Mapping[str, Tensor], Turned]:
    """Tensors that are compared with ``mine``, of this cut, under the names that these have for them, and which of them were turned.

    ``configs`` are those of ``mine`` and of the others; a side without one uses that of the other.
    """
    known = loaded_names(known_class(configs[0] or configs[1], {name: tensor.shape for name, tensor in mine.items()}))
    return turned_alike(spelled_alike(others, mine, known), mine, *configs)


def spelled_alike(others: Mapping[str, Tensor], mine: Mapping[str, Tensor], known: LoadedNames | None) -> Mapping[str, Tensor]:
    """The others under those names of ``mine`` that are the same in memory; those that mine has not keep their own."""
    if known is None or others.keys() == mine.keys():
        return others
    spelled = {new: name for name, new in known.of(mine).items()}
    return {spelled.get(new, name): others[name] for name, new in known.of(others).items()}


def only_renamed(base: Mapping[str, Tensor], alike: Mapping[str, Tensor]) -> bool:
    """Whether tensors that were named alike are those of the base, under whichever names, and none was cut or joined."""
    stored = {id(tensor) for tensor in base.values()}
    return all(id(tensor) in stored for tensor in alike.values())
