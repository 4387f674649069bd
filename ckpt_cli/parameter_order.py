"""Optimizers that number their parameters: which number is which name, proved from the order of the model and from shapes.

``torch.optim`` numbers parameters in the order in which it was given them: that of ``model.parameters()`` in one group, or, with
several groups, group after group, each in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_cli.geometry import Shape

NO_DECAY = ("bias", "norm")
"""What the name of a parameter contains that trainers exempt from weight decay."""


def name_parameters(shapes: Mapping[str, Shape], groups: Sequence[Sequence[int]], known: Mapping[int, Shape]) -> dict[int, str] | None:
    """Number -> name, None unless exactly one assignment fits.

    ``shapes`` are the candidates in the order of the model (parameters, and perhaps buffers); ``groups`` the numbers of each
    parameter group; ``known`` the shapes of numbers that have a state (a parameter that was never updated has none).
    """
    if len(groups) == 1:
        names = _only_embedding(list(shapes.items()), [known.get(number) for number in groups[0]])
        return None if names is None else dict(zip(groups[0], names, strict=True))
    found: list[dict[int, str]] = []
    for first in (_by_dimensions, _by_name):
        classes = [
            [(name, shape) for name, shape in shapes.items() if first(name, shape)],
            [(name, shape) for name, shape in shapes.items() if not first(name, shape)],
        ]
        for order in (classes, classes[::-1]):
            assigned: dict[int, str] = {}
            for numbers, candidates in zip(groups, order, strict=False):
                names = _only_embedding(candidates, [known.get(number) for number in numbers])
                if names is None:
                    break
                assigned |= dict(zip(numbers, names, strict=True))
            if len(groups) == len(order) and len(assigned) == sum(map(len, groups)) and assigned not in found:
                found.append(assigned)
    return found[0] if len(found) == 1 else None


def _by_dimensions(_: str, shape: Shape) -> bool:
    return len(shape) >= 2


def _by_name(name: str, _: Shape) -> bool:
    return not any(word in name.lower() for word in NO_DECAY)


def _only_embedding(candidates: Sequence[tuple[str, Shape]], wanted: Sequence[Shape | None]) -> list[str] | None:
    """The names at the only places, in order, where ``wanted`` (None: any shape) fits into ``candidates``.

    The places found from the left and from the right are the outermost ones; if they are the same, there are no others.
    """
    left = _leftmost(candidates, wanted)
    right = _leftmost(candidates[::-1], wanted[::-1])
    if left is None or right is None or left != right[::-1]:
        return None
    return left


def _leftmost(candidates: Sequence[tuple[str, Shape]], wanted: Sequence[Shape | None]) -> list[str] | None:
    names = []
    position = 0
    for shape in wanted:
        while position < len(candidates) and shape is not None and candidates[position][1] != shape:
            position += 1
        if position == len(candidates):
            return None
        names.append(candidates[position][0])
        position += 1
    return names
