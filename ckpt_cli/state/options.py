"""The options of `extract_state`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from ckpt_cli.names import ShardOrder, Write


@dataclass(frozen=True, slots=True)
class ExtractOptions:
    """The options of `extract_state`, with the meaning that ``ckpt extract-state --help`` gives them."""

    optimizer: bool = False
    overwrite: bool = False
    dry_run: bool = False
    jobs: int | None = None
    shard_order: ShardOrder = "auto"
    strict: bool = False
    write: Write = "auto"


class ExtractKeywords(TypedDict, total=False):
    """The keyword arguments of `extract_state` besides paths: `ExtractOptions` as callers may give them."""

    optimizer: bool
    overwrite: bool
    dry_run: bool
    jobs: int | None
    shard_order: ShardOrder
    strict: bool
    write: Write
