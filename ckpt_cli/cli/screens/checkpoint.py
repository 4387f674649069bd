"""What every screen shows of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.widgets import good, here
from ckpt_cli.results.checkpoint import Checkpoint, ComponentInfo, StepInfo

if TYPE_CHECKING:
    from rich.text import Text


def checkpoint_facts(checkpoint: Checkpoint, info: ComponentInfo) -> list[tuple[str, str | Text]]:
    """What it is, whether it is complete, how much there is, and what lies beside the weights."""
    described = [checkpoint.framework, info.name] if info.name != "model" else [checkpoint.framework]
    if checkpoint.step is not None:
        described.append(f"step {checkpoint.step}{_passed_over(checkpoint, info.name)}")
    if info.world_size:
        mesh = f" (device mesh: {info.mesh})" if info.mesh else ""
        described.append(f"{text.plural(info.world_size, 'rank')}{mesh}")
    one_each = info.world_size is not None and info.files + len(info.missing_ranks) == info.world_size
    files = f"{info.files} of {info.world_size} rank files, " if one_each else f"{text.plural(info.files, 'file')}, "
    dtypes = "   ".join(
        f"{code} {text.params(count.elements)}" + (f" ({text.plural(count.tensors, 'tensor')})" if len(info.dtypes) > 1 else "")
        for code, count in sorted(info.dtypes.items(), key=lambda item: -item[1].elements)
    )
    tied = f" ({text.plural(info.tied, 'tied tensor')} counted once)" if info.tied else ""
    model = ", ".join(filter(None, (checkpoint.architecture, f"{checkpoint.layers} layers" if checkpoint.layers else None)))
    assets = f"config.json ({model})" if model else "config.json" if "config.json" in checkpoint.assets else ""
    others = [name for name in checkpoint.assets if name != "config.json"]
    lacking = [f"no {what.removeprefix('a ').removeprefix('an ')}" for what in checkpoint.lacking]
    return [
        ("checkpoint", here(checkpoint.path, ", ".join(described))),
        (
            "complete",
            good(f"{files}{counted_tensors(info)}, every element found exactly once"),
        ),
        ("size", f"{text.size(info.bytes or 0)} of tensor data   {text.params(info.elements or 0)} params{tied}   {dtypes}"),
        ("assets", ", ".join(filter(None, (assets, *others[:6], f"{len(others) - 6} more" if len(others) > 6 else "", *lacking)))),
    ]


def _passed_over(checkpoint: Checkpoint, component: str) -> str:
    """Which newer step of the run was not taken, and why."""
    at = next((at for at, step in enumerate(checkpoint.steps) if step.path == checkpoint.path), len(checkpoint.steps))
    taken = checkpoint.steps[at : at + 1]
    newer = [step for step in checkpoint.steps[at:] if step.problem and (step.step, step.label) != (taken[0].step, taken[0].label)]
    return passed_over(newer, component) if checkpoint.newest_complete else ""


def passed_over(newer: Sequence[StepInfo], component: str = "") -> str:
    """Newer steps that were not taken, and why: " (not 200: rank 2 of 4 is missing)"."""
    if not newer:
        return ""
    more = f"; {text.plural(len(newer) - 1, 'more step')} passed over" if len(newer) > 1 else ""
    return f" (not {newer[-1].called}: {(newer[-1].problem or '').removeprefix(f'{component}: ')}{more})"


def counted_tensors(info: ComponentInfo) -> str:
    """How many tensors there are of each kind: 30 tensors (27 sharded, 3 replicated)."""
    kinds = ", ".join(f"{'all' if len(info.kinds) == 1 else text.exact(count.tensors)} {kind}" for kind, count in info.kinds.items())
    return f"{text.plural(sum(count.tensors for count in info.kinds.values()), 'tensor')} ({kinds})"


def alias_text(layout: str, alias_of: str | None) -> str:
    return f"same storage as {alias_of}" if alias_of else layout
