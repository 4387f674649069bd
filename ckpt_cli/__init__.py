"""ckpt: inspect sharded training checkpoints, merge and average them into Hugging Face folders.

    >>> import ckpt_cli
    >>> result = ckpt_cli.merge("run", dtype="bf16")          # doctest: +SKIP
    >>> ckpt_cli.inspect("run").checkpoint.components[0].elements  # doctest: +SKIP
    >>> ckpt_cli.open("run")["model.norm.weight"][:8].numpy()  # doctest: +SKIP

Everything is loaded on first use. transformers is never imported by these functions, torch only for what is made of its tensors.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
"""As in typing, which takes longer to load than all of this: until then, a command cannot be interrupted without a traceback."""

if TYPE_CHECKING:
    from typing import Any

    from ckpt_cli.commands.average import average as average
    from ckpt_cli.commands.diff import diff as diff
    from ckpt_cli.commands.extract_state import extract_state as extract_state
    from ckpt_cli.commands.inspect import detect as detect
    from ckpt_cli.commands.inspect import inspect as inspect
    from ckpt_cli.commands.inspect import report as report
    from ckpt_cli.commands.merge import merge as merge
    from ckpt_cli.commands.opening import load_into as load_into
    from ckpt_cli.commands.opening import load_state_dict as load_state_dict
    from ckpt_cli.commands.opening import open as open
    from ckpt_cli.commands.publish import publish as publish
    from ckpt_cli.commands.scan import scan as scan
    from ckpt_cli.commands.show import show as show
    from ckpt_cli.commands.verify import verify as verify
    from ckpt_cli.commands.verify import verify_part as verify_part
    from ckpt_cli.commands.watch import watch as watch
    from ckpt_cli.errors import CkptError as CkptError
    from ckpt_cli.loading.lazy import LazyCheckpoint as LazyCheckpoint
    from ckpt_cli.loading.lazy import LazyTensor as LazyTensor
    from ckpt_cli.results.checkpoint import Checkpoint as Checkpoint
    from ckpt_cli.results.diff import DiffResult as DiffResult
    from ckpt_cli.results.inspect import DetectResult as DetectResult
    from ckpt_cli.results.inspect import InspectResult as InspectResult
    from ckpt_cli.results.inspect import ReportResult as ReportResult
    from ckpt_cli.results.loading import LoadResult as LoadResult
    from ckpt_cli.results.scan import ScanResult as ScanResult
    from ckpt_cli.results.statistics import ShowResult as ShowResult
    from ckpt_cli.results.statistics import StatsResult as StatsResult
    from ckpt_cli.results.verify import VerifyPart as VerifyPart
    from ckpt_cli.results.verify import VerifyResult as VerifyResult
    from ckpt_cli.results.watch import WatchResult as WatchResult
    from ckpt_cli.results.written import AverageResult as AverageResult
    from ckpt_cli.results.written import ExtractResult as ExtractResult
    from ckpt_cli.results.written import MergeResult as MergeResult
    from ckpt_cli.results.written import PublishResult as PublishResult

__version__ = "0.1.0"

_HOMES = {
    "AverageResult": "results.written",
    "Checkpoint": "results.checkpoint",
    "CkptError": "errors",
    "DetectResult": "results.inspect",
    "DiffResult": "results.diff",
    "ExtractResult": "results.written",
    "InspectResult": "results.inspect",
    "LazyCheckpoint": "loading.lazy",
    "LazyTensor": "loading.lazy",
    "LoadResult": "results.loading",
    "MergeResult": "results.written",
    "PublishResult": "results.written",
    "ReportResult": "results.inspect",
    "ScanResult": "results.scan",
    "ShowResult": "results.statistics",
    "StatsResult": "results.statistics",
    "VerifyPart": "results.verify",
    "VerifyResult": "results.verify",
    "WatchResult": "results.watch",
    "average": "commands.average",
    "detect": "commands.inspect",
    "diff": "commands.diff",
    "extract_state": "commands.extract_state",
    "inspect": "commands.inspect",
    "load_into": "commands.opening",
    "load_state_dict": "commands.opening",
    "merge": "commands.merge",
    "open": "commands.opening",
    "publish": "commands.publish",
    "report": "commands.inspect",
    "scan": "commands.scan",
    "show": "commands.show",
    "verify": "commands.verify",
    "verify_part": "commands.verify",
    "watch": "commands.watch",
}

__all__ = [
    "AverageResult",
    "Checkpoint",
    "CkptError",
    "DetectResult",
    "DiffResult",
    "ExtractResult",
    "InspectResult",
    "LazyCheckpoint",
    "LazyTensor",
    "LoadResult",
    "MergeResult",
    "PublishResult",
    "ReportResult",
    "ScanResult",
    "ShowResult",
    "StatsResult",
    "VerifyPart",
    "VerifyResult",
    "WatchResult",
    "__version__",
    "average",
    "detect",
    "diff",
    "extract_state",
    "inspect",
    "load_into",
    "load_state_dict",
    "merge",
    "open",
    "publish",
    "report",
    "scan",
    "show",
    "verify",
    "verify_part",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
