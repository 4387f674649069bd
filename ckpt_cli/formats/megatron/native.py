"""From the keys of a torch_dist step to one tensor per layer and expert, under Megatron's names with global numbers.

Homogeneous layers are one tensor with a leading axis for the layers (``decoder.layers.mlp.linear_fc1.weight``), experts are one with
an axis for these (``mlp.experts.experts.linear_fc1.weight``). A key is stacked if no number follows. Virtual pipeline stages
leave no trace in keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ckpt_cli.boxes import Shape, range_boxes
from ckpt_cli.errors import CorruptFile, Inconsistent
from ckpt_cli.formats.assembly import cut_layout
from ckpt_cli.names import check_name
from ckpt_cli.tensors.tensor import Piece, Tensor
from ckpt_cli.tensors.views import unstacked

STACKS = (re.compile(r"(?P<head>(?:.*\.)?layers)\.(?P<rest>[^0-9.].*)"), re.compile(r"(?P<head>.*\.experts\.experts)\.(?P<rest>[^0-9.].*)"))
"""Names without a number where one belongs: the first axis of these counts layers, then experts."""

STATE = re.compile(
    r"(chained_[0-9]+\.)?optimizer\..*|(rng_state|rerun_state_machine_state|common_state|opt_param_scheduler|iteration)(/.*)?", re.ASCII
)
"""Keys of a step that are no weights."""


def is_state(key: str) -> bool:
    """Whether a key belongs to the training's state and not to a model."""
    return STATE.fullmatch(key) is not None


def native_tensors(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One tensor per layer and expert, in the order of layers.

    Raises Inconsistent if two get one name, or stacks differ in their layers.
    """
    layers: dict[str, tuple[int, str]] = {}
    found: dict[str, Tensor] = {}
    for key, tensor in stored.items():
        fields = STACKS[0].fullmatch(key)
        if fields is not None and tensor.shape:
            count, first = layers.setdefault(fields["head"], (tensor.shape[0], key))
            if count != tensor.shape[0]:
                text = f"it has {tensor.shape[0]} layers, {first} has {count}"
                raise Inconsistent(text, tensor=key, expected="the same number of layers", hint="files from two saves may be mixed")
        for name, part in _unstacked(key, tensor).items():
            if name in found:
                raise Inconsistent("two entries of the step have this name", tensor=name, hint="files from two saves may be mixed")
            found[check_name(name)] = part
    return in_order({name: replace(part, name=name) for name, part in found.items()})


def in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in the order of the model."""
    return {name: tensors[name] for name in sorted(tensors, key=_order)}


def _unstacked(key: str, tensor: Tensor) -> dict[str, Tensor]:
    parts = {key: tensor}
    for stack in STACKS:
        if (fields := stack.fullmatch(next(iter(parts)))) is None:
            continue
        cut: dict[str, Tensor] = {}
        for name, whole in parts.items():
            inner = stack.fullmatch(name) or fields
            if not whole.shape or not whole.numel:
                raise CorruptFile("a tensor of all layers or experts holds none", tensor=key)
            cut |= {f"{inner['head']}.{index}.{inner['rest']}": part for index, part in enumerate(unstacked(whole, 0))}
        parts = {name: _laid_out(part) for name, part in cut.items()}
    return parts


def _laid_out(tensor: Tensor) -> Tensor:
    kind, layout = cut_layout(tensor.shape, (piece.box for piece in tensor.pieces))
    return replace(tensor, kind=kind, layout=layout)


def _order(name: str) -> tuple[int, list[tuple[int, int, str]]]:
    """The embedding first, then the layers, then what follows them; numbers count as numbers."""
    place = next((place for place, word in enumerate(("embedding", "decoder.layers", "decoder", "output_layer", "mtp")) if word in name), 5)
    return place, [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def unflattened(tensor: Tensor, shape: Shape) -> Tensor:
    """A tensor that Megatron core (to 0.15) stored as a grid of flattened blocks, in its own ``shape``.

    The last axis holds a block's elements in C order, the others count blocks (``nd_reformulated_orig_global_shape``). A piece of the
    last axis becomes the boxes of its range. Raises CorruptFile if the grid does not fit the shape.
    """
    grid = tensor.shape[:-1]
    fits = len(grid) == len(shape) and all(n and length % n == 0 for n, length in zip(grid, shape, strict=True))
    local = tuple(length // n for n, length in zip(grid, shape, strict=True)) if fits else ()
    if not fits or tensor.shape[-1] != _count(local):
        text = f"shape {list(tensor.shape)} is no grid of flattened blocks of shape {list(shape)}"
        raise CorruptFile(text, tensor=tensor.name, expected="what mcore_data of the metadata says")
    pieces = tuple(part for piece in tensor.pieces for part in _blocks(piece, local, tensor.dtype.itemsize))
    return _laid_out(replace(tensor, shape=shape, pieces=pieces, copies=()))


def _count(shape: Shape) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _blocks(piece: Piece, local: Shape, itemsize: int) -> list[Piece]:
    """The pieces of the logical tensor that one stored piece holds."""
    found: list[Piece] = []
    inner = piece.strides[-1]
    steps = tuple(inner * _count(local[axis + 1 :]) for axis in range(len(local)))
    for number in range(_count(piece.box.extent[:-1])):
        place: list[int] = []
        rest = number
        for length in reversed(piece.box.extent[:-1]):
            rest, index = divmod(rest, length)
            place.insert(0, index)
        start = piece.offset + itemsize * sum(index * stride for index, stride in zip(place, piece.strides[:-1], strict=True))
        corner = [(base + index) * length for base, index, length in zip(piece.box.offset[:-1], place, local, strict=True)]
        first = 0
        for box in range_boxes(local, piece.box.offset[-1], piece.box.extent[-1]):
            moved = replace(box, offset=tuple(a + b for a, b in zip(corner, box.offset, strict=True)))
            found.append(replace(piece, offset=start + itemsize * inner * first, strides=steps, box=moved, crc=None))
            first += box.numel
    return found
