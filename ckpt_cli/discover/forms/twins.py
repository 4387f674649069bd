"""Tensors of a model that are named as an average of some others would be: a class may have a module and its twin."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_cli.formats.torch_files.averages import is_average_name, split_average
from ckpt_cli.names import few, printable, unnumbered
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor


def without_twin(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of a model that an average of it can be asked for: not those that may be this average."""
    split = split_average(tensors)
    own = {id(tensor) for tensor in split.average.values()} if split is not None else set()
    return {name: tensor for name, tensor in tensors.items() if id(tensor) not in own} if own else tensors


def twin_notes(name: str, tensors: Mapping[str, Tensor]) -> list[Note]:
    """A warning if a model has what may be an average of a part of it; ``name`` is that of the component.

    Where every tensor has a partner, nearly all formats make the average a component of its own; in the others it is with the model.
    """
    split = None if is_average_name(unnumbered(name)[0]) else split_average(tensors)
    if split is None:
        return []
    shown = few([printable(prefix) for prefix in split.prefixes])
    options = " ".join(f"--exclude '{printable(prefix)}*'" for prefix in split.prefixes)
    left_out = f"{options} {'leaves' if len(split.prefixes) == 1 else 'leave'} them out"
    if not split.alone:
        text = f"{len(split.average)} tensors under {shown} are an average of the others by their names, and are written with them"
        return [Note("warning", "average-or-part", f"{text}; {left_out}")]
    text = f"{len(split.average)} tensors under {shown} could be an average (--type ema) or a part of the model: they are written with it"
    why = f"{few(list(split.alone), 3)} {'has' if len(split.alone) == 1 else 'have'} no partner there"
    return [Note("warning", "average-or-part", f"{text}, since {why}; {left_out}")]
