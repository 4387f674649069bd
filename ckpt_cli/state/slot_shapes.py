"""Whether what an optimizer keeps of a parameter is whole: its slots are compared with the shape of the parameter.

A rank that saves its own part as a plain tensor leaves nothing that says so, and parts that are equal on all ranks (zeros before the
first step) look like replicas. So only a shape that the whole parameter gives is taken for whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from ckpt_cli.boxes import Shape
from ckpt_cli.discover.open import OpenedComponent
from ckpt_cli.errors import CkptError, Inconsistent, Undecidable
from ckpt_cli.formats.optimizer_state import is_inside
from ckpt_cli.names import few, plural, stripped_names
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

Slots = dict[tuple[str, str], Tensor]
"""Tensors by parameter (a name, or a number as text) and slot."""

FACTORED: Mapping[str, Callable[[Shape], Shape]] = {
    "exp_avg_sq_row": lambda shape: shape[:-1],
    "exp_avg_sq_col": lambda shape: (*shape[:-2], *shape[-1:]),
    "row_var": lambda shape: (*shape[:-1], 1),
    "col_var": lambda shape: (*shape[:-2], 1, *shape[-1:]),
}
"""Slots in which Adafactor keeps the rows and columns of a matrix, as transformers and torch call them, and their shapes."""

HINT = "it may be one rank's part, codes of another form, or of another model: leave out --optimizer"


def fits(slot: str, shape: Shape, parameter: Shape) -> bool:
    """Whether a slot is whole: of the parameter's shape, one number, or Adafactor's rows or columns of the whole parameter.

    >>> fits("exp_avg_sq", (4, 3), (8, 3)), fits("exp_avg_sq_row", (8,), (8, 3)), fits("exp_avg_sq_row", (4,), (8, 3))
    (False, True, False)
    """
    if shape in ((), parameter) or (slot == "step" and shape == (1,)):
        return True
    return slot in FACTORED and len(parameter) > 1 and shape == FACTORED[slot](parameter)


def is_whole(slot: str, tensor: Tensor, parameter: Shape) -> bool:
    """Whether a slot is whole, by its shape or, of one of several tensors in a slot, by who wrote it.

    Such tensors (the matrices of SOAP, PSGD and Shampoo) have a side of the parameter, of several of its sides taken as one, or of a block:
    what one process wrote, or placements put together, is whole; what several hold alike is so if its sides are sides of the parameter.
    """
    if not is_inside(slot):
        return fits(slot, tensor.shape, parameter)
    return is_cut(tensor) or not tensor.copies or {*tensor.shape} <= {1, *parameter}


def is_cut(tensor: Tensor) -> bool:
    """Whether several ranks held parts of a tensor."""
    return tensor.kind in ("sharded", "strided")


def check_shapes(slots: Slots, shapes: Mapping[str, Shape], path: Path) -> None:
    """Raise Inconsistent for a slot that does not fit its parameter; ``shapes`` are those of parameters, under names without wrappers."""
    clean = stripped_names(name for name, _ in slots)
    for (name, slot), tensor in slots.items():
        shape = shapes.get(clean[name])
        if shape is not None and not is_whole(slot, tensor, shape):
            raise Inconsistent(
                f"the optimizer's state has shape {list(tensor.shape)}, the parameter {list(shape)}",
                tensor=f"state.{clean[name]}.{slot}",
                path=path,
                expected="the parameter's shape, one number, or the rows and columns that Adafactor keeps",
                hint=HINT,
            )


def shapes_of(model: OpenedComponent) -> dict[str, Shape]:
    """The shapes of the model's tensors by name without wrappers."""
    clean = stripped_names(model.component.tensors)
    return {clean[name]: tensor.shape for name, tensor in model.component.tensors.items()}


def slot_notes(slots: Slots, described: Callable[[], OpenedComponent], path: Path, plain: Collection[tuple[str, str]] = ()) -> list[Note]:
    """Compare the slots of named parameters with the model; a warning names those that could not be compared.

    ``plain`` are the slots that several ranks saved without placements: Raises Undecidable for one of these that no parameter proves, and
    Inconsistent for any that does not fit.
    """
    try:
        shapes, why = shapes_of(described()), "the model has no tensors of these names"
    except CkptError as error:
        shapes, why = {}, f"the model could not be read ({error.message})"
    check_shapes(slots, shapes, path)
    clean = stripped_names(name for name, _ in slots)
    unproved = [key for key, tensor in slots.items() if tensor.shape and clean[key[0]] not in shapes]
    doubtful = next((key for key in unproved if key in plain), None)
    if doubtful is not None:
        raise Undecidable(
            f"the ranks hold equal tensors of shape {list(slots[doubtful].shape)}, and nothing shows that each is whole: {why}",
            tensor=f"state.{clean[doubtful[0]]}.{doubtful[1]}",
            path=path,
            expected="the weights of the same parameters beside the optimizer",
            hint="leave out --optimizer",
        )
    names = list(dict.fromkeys(clean[name] for name, _ in unproved))
    if not names:
        return []
    text = f"the shapes of the states of {plural(len(names), 'parameter')} were not compared: {why}: {few(names, 3)}"
    return [Note("warning", "states-not-compared", text)]
