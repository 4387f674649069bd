"""What every screen shows of a checkpoint."""

from __future__ import annotations

from ckpt_cli.cli import text
from ckpt_cli.results.checkpoint import Checkpoint, ComponentInfo


def checkpoint_facts(checkpoint: Checkpoint, info: ComponentInfo) -> list[tuple[str, str]]:
    described = [checkpoint.framework, info.name] if info.name != "model" else [checkpoint.framework]
    if info.world_size:
        described.append(text.plural(info.world_size, "rank"))
    if info.mesh:
        described.append(f"mesh {info.mesh}")
    if checkpoint.step is not None:
        described.append(f"step {checkpoint.step}")
    one_each = info.world_size is not None and info.files + len(info.missing_ranks) == info.world_size
    files = f"{info.files} of {info.world_size} rank files, " if one_each else f"{text.plural(info.files, 'file')}, "
    counted = ", ".join(f"{count.tensors} {kind}" for kind, count in info.kinds.items())
    dtypes = "   ".join(
        f"{code} {text.params(count.elements)}" + (f" ({text.plural(count.tensors, 'tensor')})" if len(info.dtypes) > 1 else "")
        for code, count in sorted(info.dtypes.items(), key=lambda item: -item[1].elements)
    )
    model = ", ".join(filter(None, (checkpoint.architecture, f"{checkpoint.layers} layers" if checkpoint.layers else None)))
    assets = f"config.json ({model})" if model else "config.json" if "config.json" in checkpoint.assets else ""
    others = [name for name in checkpoint.assets if name != "config.json"]
    lacking = [f"no {what.removeprefix('a ')}" for what in checkpoint.lacking]
    return [
        ("checkpoint", f"{text.path(checkpoint.path)}   {', '.join(described)}"),
        (
            "complete",
            f"{files}{text.plural(sum(c.tensors for c in info.kinds.values()), 'tensor')} ({counted}), every element covered once",
        ),
        ("size", f"{text.size(info.bytes or 0)}   {text.params(info.elements or 0)} params   {dtypes}"),
        ("assets", ", ".join(filter(None, (assets, *others[:6], f"{len(others) - 6} more" if len(others) > 6 else "", *lacking)))),
    ]


def alias_text(layout: str, alias_of: str | None) -> str:
    return f"same storage as {alias_of}" if alias_of else layout
