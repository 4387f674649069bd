"""What `ckpt detect` and `ckpt inspect` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.widgets import NARROW, as_cells, new_table, next_line, plain, print_facts, print_notes
from ckpt_cli.formats.registry import format_of
from ckpt_cli.names import printable
from ckpt_cli.results.checkpoint import ComponentInfo
from ckpt_cli.results.inspect import DetectResult, InspectResult, TensorGroup

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ckpt_cli.cli.session import Session
from ckpt_cli.cli.screens.checkpoint import alias_text, checkpoint_facts


def detect_result(result: DetectResult, session: Session) -> None:
    """What `ckpt detect` prints."""
    console, checkpoint = session.out(), result.checkpoint
    if session.quiet:
        console.print(plain(checkpoint.path))
        if result.problem is not None:
            session.say(f"error[{result.error.code if result.error else 'incomplete'}]: {printable(result.problem)}", wrap=False)
        return
    main = checkpoint.components[0]
    saver = f", saved by {main.writer}" if format_of(main).tells_writer and main.elements is not None else ""
    kind = "run" if checkpoint.run else "checkpoint"
    facts = [("found", f"{checkpoint.framework} {kind}{saver}", text.path(checkpoint.run or checkpoint.path))]
    if checkpoint.run:
        named = [f"step {checkpoint.step}"] if checkpoint.step is not None else []
        why = ["the newest complete one"] if checkpoint.newest_complete else []
        facts.append(("chosen", ", ".join(named + why), text.path(checkpoint.path)))
    print_facts(console, [(label, f"{where}   {what}") for label, what, where in facts])
    console.print()
    console.print(_component_table(checkpoint.components, console))
    if len(checkpoint.steps) > 1:
        console.print()
        steps = new_table(("step", "components", "state", ""), right=(0,))
        for step in checkpoint.steps:
            chosen = "<- chosen" if step.path == checkpoint.path else ""
            steps.add_row(*as_cells((str(step.step), ", ".join(step.components), step.problem or "all files are there", chosen)))
        console.print(steps)
    console.print()
    print_notes(session, checkpoint.notes, everything=True)
    if result.problem is None:
        next_line(session, f"ckpt merge {text.argument(session.path or checkpoint.path)}{session.again} --dry-run")
    else:
        session.say(f"warning: it cannot be merged: {printable(result.problem)}", "yellow")
        next_line(session, f"ckpt merge {text.argument(checkpoint.path)} --dry-run   (says more)")


def inspect_result(result: InspectResult, session: Session, *, show_all: bool = False) -> None:
    """What `ckpt inspect` prints: facts, then one row per group of like tensors (or per tensor)."""
    console, checkpoint = session.out(), result.checkpoint
    if session.quiet:
        for info in checkpoint.components:
            for tensor in info.tensors or ():
                console.print(plain(tensor.name), soft_wrap=True)
        return
    for info in checkpoint.components:
        if info.tensors is None:
            continue
        print_facts(console, checkpoint_facts(checkpoint, info))
        console.print()
        rows = (
            [
                TensorGroup(
                    pattern=t.name,
                    count=1,
                    shape=t.shape,
                    dtype=t.dtype,
                    layout=alias_text(t.layout, t.alias_of),
                    elements=t.elements,
                    odd=False,
                )
                for t in info.tensors
            ]
            if show_all
            else result.groups[info.name]
        )
        console.print(_tensor_table(rows, console, counted=not show_all))
        if info.leaves and session.verbose:
            console.print()
            leaves = new_table(("entry that is not a tensor", "value"))
            for leaf in info.leaves:
                leaves.add_row(*as_cells((leaf.name, leaf.text)))
            console.print(leaves)
        console.print()
    print_notes(session, checkpoint.notes)
    if checkpoint.framework == "Hugging Face":
        next_line(session, f'{checkpoint.architecture or "AutoModel"}.from_pretrained("{text.path(checkpoint.path)}")')
    else:
        next_line(session, f"ckpt merge {text.argument(session.path or checkpoint.path)}{session.again} --dry-run")


def _component_table(components: Sequence[ComponentInfo], console: Console) -> Table:
    heads = ("component", "format", "files", "ranks", "mesh", "tensors", "params", "size", "state")
    shown = [head for head in heads if console.width >= NARROW or head not in ("format", "files")]
    table = new_table(shown, right=tuple(i for i, head in enumerate(shown) if head in ("files", "ranks", "tensors", "params", "size")))
    for info in components:
        tensors = sum(count.tensors for count in info.kinds.values())
        cells = {
            "component": info.name,
            "format": info.format,
            "files": str(info.files),
            "ranks": str(info.world_size or ""),
            "mesh": info.mesh or "",
            "tensors": str(tensors or ""),
            "params": text.params(info.elements) if info.elements is not None else "",
            "size": text.size(info.bytes) if info.bytes is not None else "",
            "state": info.problem or ("complete" if info.elements is not None else "all files are there"),
        }
        table.add_row(*as_cells(cells[head] for head in shown))
    return table


def _tensor_table(rows: Sequence[TensorGroup], console: Console, *, counted: bool) -> Table:
    heads = ["tensor", "count", "shape", "dtype", "layout", "params", ""]
    unwanted = {"count"} if not counted else set()
    unwanted |= {"layout"} if console.width < NARROW or not any(row.layout for row in rows) else set()
    unwanted |= {""} if not any(row.odd for row in rows) else set()
    shown = [head for head in heads if head not in unwanted]
    table = new_table(shown, right=tuple(i for i, head in enumerate(shown) if head in ("count", "params")))
    for row in rows:
        cells = {
            "tensor": row.pattern,
            "count": str(row.count),
            "shape": text.shape(row.shape),
            "dtype": row.dtype,
            "layout": row.layout,
            "params": text.params(row.elements),
            "": "<- differs from its group" if row.odd else "",
        }
        table.add_row(*as_cells(cells[head] for head in shown))
    return table
