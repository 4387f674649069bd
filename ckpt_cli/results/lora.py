"""What was done with the LoRA adapters of a component."""

from __future__ import annotations

from ckpt_cli.results.checkpoint import Frozen


class LoraInfo(Frozen):
    """The result for LoRA adapters: "fused", "exported" or "kept"; ranks and scales that occur, and where alpha comes from."""

    outcome: str
    modules: int
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    alpha: float | None
    origin: str
    dora: bool = False
