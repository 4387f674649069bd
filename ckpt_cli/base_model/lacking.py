"""What an output lacks that its base has: the only evidence of whole parts where no class says which tensors there must be."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ckpt_cli.base_model.resemblance import resemblance
from ckpt_cli.boxes import shape_text
from ckpt_cli.errors import CkptError
from ckpt_cli.hub.classes.absent.moved_names import moved_names
from ckpt_cli.hub.classes.claims import Claim
from ckpt_cli.hub.classes.computed.recomputed import is_recomputed
from ckpt_cli.hub.classes.prediction import PART, of_prediction
from ckpt_cli.hub.config import Config, architecture
from ckpt_cli.hub.tied_names import tied_pair
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few, plural
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import same_values
from ckpt_cli.tensors.tensor import Tensor

OF_QUANTISED = re.compile(
    r"(?P<module>.+)\.(qweight|qzeros|scales|g_idx|SCB|absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+|weight\.(absmax|"
    r"quant_map|nested_\w+|quant_state\..+)|weight_(packed|shape|scale(_inv|_2)?|g_idx|zero_point|format)|(input|output|k|v|q)_(global_)?"
    r"(scale|zero_point)|input_scale(_ub)?)",
    re.ASCII,
)
"""What stands in a quantised model for the weight of a module, or beside it."""


@dataclass(frozen=True, slots=True)
class LacksOfBase:
    """``surely``: tensors that only the base has, and what it has; ``perhaps``: those of which something says that they may be missing.

    ``why`` is that reason.
    """

    surely: Mapping[str, str]
    perhaps: tuple[str, ...] = ()
    why: str = ""

    @property
    def shortage(self) -> str:
        """In one sentence, what is surely missing."""
        there = plural(len(self.surely), "tensor of the base is", "tensors of the base are")
        return f"{there} missing: {few(grouped(list(self.surely)), 3)}" if self.surely else ""

    @property
    def text(self) -> str:
        """A warning about what may be missing."""
        there = plural(len(self.perhaps), "tensor that is", "tensors that are")
        return f"the base has {there} not here: {few(grouped(list(self.perhaps)), 3)}; {self.why}"


def lacks_of_base(
    held: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    config: Config,
    base_config: Config,
    together: Mapping[str, str],
    besides: Collection[str] = (),
) -> LacksOfBase:
    """What a base of the same model, under the names of the output, has and the output lacks.

    ``together`` says what tied names have in common; ``besides`` are names that are not looked for. No error is made of what another
    class, other names, or a head that may be tied explain.
    """
    present = {together[name] for name in held if name in together}
    modules = {name.rpartition(".")[0] for name in held}
    absent = {
        name: tensor
        for name, tensor in base.items()
        if name not in held
        and name not in besides
        and together.get(name) not in present
        and not is_recomputed(name, tensor.shape)
        and not _other_form(name, modules, held, base)
    }
    plain = {f"{found['module']}.weight" for found in map(OF_QUANTISED.fullmatch, base) if found is not None}
    others = {
        name: tensor.shape for name, tensor in held.items() if name not in base and name not in plain and not OF_QUANTISED.fullmatch(name)
    }
    moved = moved_names({name: tensor.shape for name, tensor in absent.items()}, others)
    absent = {name: tensor for name, tensor in absent.items() if name not in moved}
    asked = {*of_prediction(config, absent)}
    absent = {name: tensor for name, tensor in absent.items() if name not in asked}  # the comparison with the config tells of them
    foreign = others.keys() - moved.values()
    kinds = architecture(config), architecture(base_config)
    if foreign or (None not in kinds and kinds[0] != kinds[1]):
        why = f"these are not in the base: {few(grouped(sorted(foreign)), 3)}" if foreign else "its config.json names another class"
        return LacksOfBase({}, tuple(absent), why)
    predicting = [name for name in absent if PART.search(name)]
    head = _head_as_embedding(absent, base)
    perhaps = [*predicting, *([head] if head is not None else [])]
    why = "the base has the same values in its embedding" if head is not None and len(perhaps) == 1 else "models work without them"
    surely = {name: f"the base has it, {shape_text(tensor.shape)}" for name, tensor in absent.items() if name not in perhaps}
    return LacksOfBase(surely, tuple(perhaps), why)


def may_lack(mine: Mapping[str, Tensor], base: Mapping[str, Tensor], config: Config, base_config: Config) -> bool:
    """Whether names of a model can be looked for in a base: it is this model, under these names."""
    found = resemblance(mine, base, config, base_config)
    return found.same_model and found.comparable


def of_one_class(own: str, base_config: Config) -> bool:
    """Whether a class that transformers lacks is also that of a base: it tells better what such models have than that of their type."""
    return bool(own) and architecture(base_config) == own


def with_lacks(claim: Claim, lacks: LacksOfBase) -> Claim:
    """A claim in which tensors that only the base has are lacking too, besides those that its config counts."""
    surely = {name: what for name, what in lacks.surely.items() if not any(fnmatch.fnmatchcase(name, glob) for glob in claim.lacking)}
    notes = (*claim.notes, *((Note("warning", "left-out-of-base", lacks.text),) if lacks.perhaps else ()))
    shortage = claim.shortage or ("" if claim.lacking else lacks.shortage)
    return replace(claim, lacking={**claim.lacking, **surely}, notes=notes, shortage=shortage)


def _other_form(name: str, modules: Collection[str], held: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> bool:
    """Whether a name of a quantised base belongs to a module whose weights the output has in another form."""
    found = OF_QUANTISED.fullmatch(name)
    if found is None:
        return False
    weight = f"{found['module']}.weight"
    if weight in held and weight in base and held[weight].dtype == base[weight].dtype:
        return False  # as quantised as that of the base, and it means nothing without its scales
    return found["module"] in modules


def _head_as_embedding(absent: Collection[str], base: Mapping[str, Tensor]) -> str | None:
    """The output head, if it is absent and the base has the same values in its embedding, to which loaders may tie it."""
    pair = tied_pair(list(base))
    if pair is None or pair[0] not in absent or pair[1] in absent:
        return None
    try:
        return pair[0] if same_values(base[pair[0]], base[pair[1]]) else None
    except CkptError:
        return None  # what cannot be read proves nothing; whatever needs it says so
