"""Processes of the ranks of a small training, forked from one that has loaded what they all need."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

NEEDED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers.modeling_utils", "transformers.generation")
"""What takes longer to import than a rank trains."""


def run_ranks(function: Callable[..., object], *arguments: Any, ranks: int) -> None:
    """Call a function with each rank and the arguments, and wait for all; the first error is raised."""
    from torch.multiprocessing import start_processes

    multiprocessing.set_forkserver_preload([*NEEDED])
    start_processes(function, arguments, ranks, start_method="forkserver")  # type: ignore[no-untyped-call]
