"""What `load_into` returns."""

from __future__ import annotations

from ckpt_cli.results.checkpoint import Frozen, NoteInfo, Place


class LoadResult(Frozen):
    """What was loaded into a model, as seen by this process.

    ``tensors`` and ``elements`` count the whole model, ``local_elements`` and ``bytes_read`` what this rank holds and read; ``cast``
    tensors have another dtype in the model than in the checkpoint. ``naming``: under which names both have the same tensors.
    ``missing`` tensors of the model were left as they are, ``unexpected`` ones of the checkpoint are not in the model.
    """

    path: Place
    step: int | None
    component: str
    naming: str
    tensors: int
    elements: int
    local_elements: int
    bytes_read: int
    cast: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    overflowed: int = 0
    notes: tuple[NoteInfo, ...] = ()
    seconds: float
