"""Optimizers that number their parameters: which number is which name, proved from the order of the model and from shapes.

``torch.optim`` numbers parameters in the order in which it was given them: group after group. Trainers give them in the order
of ``model.parameters()`` within each group. So the model's parameters, in order, are an interleaving of the groups, perhaps
with some left out (frozen ones, buffers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_cli.boxes import Shape

MAX_STATES = 20_000
"""Partial interleavings that are followed at a time; with more, nothing is proved."""


def name_parameters(shapes: Mapping[str, Shape], groups: Sequence[Sequence[int]], known: Mapping[int, Shape]) -> dict[int, str] | None:
    """Number -> name, None unless exactly one interleaving fits.

    ``shapes`` are the candidates in the order of the model (parameters, and perhaps buffers); ``groups`` the numbers of each
    parameter group; ``known`` the shapes of numbers that have a state (a parameter that was never updated has none).
    """
    # State: how many of each group are placed. Value: in how many ways (up to two), and the last step to it.
    start = tuple(0 for _ in groups)
    states: dict[tuple[int, ...], int] = {start: 1}
    history: list[dict[tuple[int, ...], int | None]] = []
    wanted = sum(map(len, groups))
    for left, (_, shape) in zip(range(len(shapes) - 1, -1, -1), shapes.items(), strict=True):
        following: dict[tuple[int, ...], int] = {}
        steps: dict[tuple[int, ...], int | None] = {}
        for state, ways in states.items():
            moves: list[tuple[tuple[int, ...], int | None]] = [(state, None)]
            for index, numbers in enumerate(groups):
                if state[index] < len(numbers) and known.get(numbers[state[index]], shape) == shape:
                    moves.append(((*state[:index], state[index] + 1, *state[index + 1 :]), index))
            for reached, step in moves:
                if wanted - sum(reached) <= left:
                    following[reached] = min(2, following.get(reached, 0) + ways)
                    steps[reached] = step
        if not following or len(following) > MAX_STATES:
            return None
        states = following
        history.append(steps)
    final = tuple(len(numbers) for numbers in groups)
    if states.get(final) != 1:
        return None
    named: dict[int, str] = {}
    state = final
    for name, reached_by in zip(reversed(list(shapes)), reversed(history), strict=True):
        group = reached_by[state]
        if group is not None:
            state = (*state[:group], state[group] - 1, *state[group + 1 :])
            named[groups[group][state[group]]] = name
    return named
