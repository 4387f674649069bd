"""What `ckpt detect` and `ckpt inspect` print."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.checkpoint import alias_text, checkpoint_facts
from ckpt_cli.cli.screens.tensor_rows import SAME, WHOLE, TensorTable
from ckpt_cli.cli.screens.widgets import (
    BAD,
    DIM,
    GAP,
    GOOD,
    WARNING,
    again,
    as_cells,
    fitted,
    good,
    here,
    hidden,
    new_table,
    next_line,
    plain,
    planned_merge,
    print_facts,
    print_notes,
)
from ckpt_cli.formats.base import MEANINGS
from ckpt_cli.formats.registry import format_of
from ckpt_cli.names import few
from ckpt_cli.results.checkpoint import Checkpoint, ComponentInfo
from ckpt_cli.results.inspect import DetectResult, InspectResult, TensorGroup

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ckpt_cli.cli.session import Session

LAYOUTS = {
    r"\bShard\(": "Shard(D) xN: cut along dimension D, counted from 0, into N parts",
    r"\bdim [0-9]": "dim D xN: cut along dimension D, counted from 0, into N parts",
    r"\bflat x": "flat xN: cut where the flat vectors of N ranks end",
    r"\bReplicate\b": "Replicate xN: the same on N ranks",
}
"""What the words of layouts mean."""

COMPLETE = "complete"
UNKNOWN = "-"
NUMBERS = ("files", "ranks", "tensors", "params", "size")
LEAST_NEEDED = ("format", "files", "device mesh", "ranks", "params")
LEAST_ROOM = 30
"""Columns that a long state leaves to the others, or has itself."""

WIDEST = 160
"""Columns of a remark where the width is not limited."""


def detect_result(result: DetectResult, session: Session) -> None:
    """What `ckpt detect` prints."""
    console, checkpoint = session.out(), result.checkpoint
    if session.quiet:
        console.print(plain(checkpoint.path))
        if result.problem is not None:
            session.labelled(f"error[{result.error.code if result.error else 'incomplete'}]", BAD, result.problem)
        return
    main = checkpoint.components[0]
    saver = f", saved by {main.writer}" if format_of(main).tells_writer and main.elements is not None else ""
    kind = "run" if checkpoint.run else "checkpoint"
    facts = [("result", _verdict(result))]
    facts.append(("found", here(checkpoint.run or checkpoint.path, f"{checkpoint.framework} {kind}{saver}")))
    if checkpoint.run:
        named = [f"step {checkpoint.step}"] if checkpoint.step is not None else []
        opened = few([info.name for info in checkpoint.components if info.elements is not None])
        newest = "the newest complete one" if checkpoint.complete else f"the newest with {opened} complete"
        why = [newest] if checkpoint.newest_complete else []
        facts.append(("chosen", here(checkpoint.path, ", ".join(named + why))))
    print_facts(console, facts)
    console.print()
    _print_components(checkpoint.components, checkpoint.framework, console, result.problem)
    if len(checkpoint.steps) > 1:
        console.print()
        console.print(_step_table(checkpoint))
    console.print()
    # What the last line says is not said twice.
    said = f"{result.problem}, "
    print_notes(session, [note for note in checkpoint.notes if not note.text.startswith(said)], everything=True)
    if result.problem is None:
        next_line(session, planned_merge(session, checkpoint.path))
    else:
        session.labelled("warning", "yellow", f"it cannot be merged: {result.problem}")
        if result.error is not None and result.error.hint is not None:
            session.labelled("hint", "dim", result.error.hint)


def _verdict(result: DetectResult) -> Text:
    """Whether what was opened can be merged, and which of the other components cannot, as far as names tell."""
    if result.problem is not None:
        return good("cannot be merged", BAD)
    components = result.checkpoint.components
    broken = [info.name for info in components if info.problem]
    if not broken:
        return good("can be merged")
    return good(f"{few([info.name for info in components if info.elements is not None])} can be merged, {few(broken)} cannot", WARNING)


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
        rows = TensorTable(_single_rows(info) if show_all else result.groups[info.name], counted=not show_all)
        print_facts(console, [*checkpoint_facts(checkpoint, info), *(rows.facts() if console.is_terminal else ())])
        console.print()
        if console.is_terminal:
            for line in rows.lines(console.width, ascii_only=console.options.ascii_only):
                console.print(line, soft_wrap=True)
        else:
            console.print(_tensor_table(rows.rows, counted=not show_all))
        for said in text.wrapped(_layout_legend(info), min(console.width, WIDEST), "  "):
            console.print(good(said, DIM), soft_wrap=True)
        if info.leaves and session.verbose:
            console.print()
            leaves = new_table(("entry that is not a tensor", "value"))
            for leaf in info.leaves:
                leaves.add_row(*as_cells((leaf.name, leaf.text)))
            console.print(leaves)
        console.print()
    print_notes(session, checkpoint.notes)
    if checkpoint.framework == "Hugging Face":
        next_line(session, f"ckpt verify {text.argument(session.path or checkpoint.path)}{again(session, 'verify')} --full")
    else:
        next_line(session, planned_merge(session, checkpoint.path))


def _layout_legend(info: ComponentInfo) -> str:
    """What the words of layouts mean; nothing if none occurs."""
    layouts = " ".join({tensor.layout for tensor in info.tensors or ()})
    return "; ".join(meaning for words, meaning in LAYOUTS.items() if re.search(words, layouts))


def _single_rows(info: ComponentInfo) -> tuple[TensorGroup, ...]:
    return tuple(
        TensorGroup(
            pattern=t.name, count=1, shape=t.shape, dtype=t.dtype, layout=alias_text(t.layout, t.alias_of), elements=t.elements, odd=False
        )
        for t in info.tensors or ()
    )


def _step_table(checkpoint: Checkpoint) -> Table:
    """The steps of a run; which one is taken stands beside its state, however wide the screen is."""
    several = any(step.trainer for step in checkpoint.steps)
    steps = new_table(("step", *(["run of"] if several else []), "components", "files"), right=(0,))
    for step in checkpoint.steps:
        chosen = step.path == checkpoint.path
        # What was chosen is whole in a part that was asked for.
        state = good(step.problem or COMPLETE, GOOD if step.problem is None else WARNING if chosen and checkpoint.newest_complete else BAD)
        state.append("  <- chosen" if chosen else "", style=GOOD)
        run = [plain(step.trainer or "")] if several else []
        steps.add_row(plain(step.called), *run, plain(", ".join(step.components)), state)
    return steps


def _print_components(components: Sequence[ComponentInfo], framework: str, console: Console, problem: str | None) -> None:
    """A row for each component, and what its cells do not say: columns without room, components that were not opened, odd names.

    On a terminal, the ``problem`` that is said below the tables in full is not said in a column too.
    """
    states = []
    for info in components:
        below = console.is_terminal and info.problem is not None and info.problem == problem
        states.append("cannot be merged" if below else info.problem or COMPLETE)
    cells = [_cells(info) for info in components]
    columns = {head: [row[head] for row in cells] for head in cells[0] if any(row[head].strip(UNKNOWN) for row in cells)}
    room = console.width - GAP - (max(map(len, states)) if console.is_terminal else 0)
    fit = fitted(columns, LEAST_NEEDED, room if room >= LEAST_ROOM else console.width - GAP - LEAST_ROOM)
    for said in fit.heading("every component" if len(components) > 1 else "", console.width):
        console.print(said, soft_wrap=True)
    table = new_table((*fit.shown, "state"), right=[i for i, head in enumerate(fit.shown) if head in NUMBERS])
    for info, row, state in zip(components, cells, states, strict=True):
        table.add_row(*as_cells(row[head] for head in fit.shown), good(state, BAD if info.problem else GOOD))
    console.print(table)
    closed = [info.name for info in components if info.elements is None and not info.problem]
    remarks = [f"{UNKNOWN}: not opened, only its files were counted; --type {closed[0]} opens it"] if closed else []
    remarks += [
        f"{info.name}: {text.plural(info.tied, 'tensor')} tied to others, counted once in params and size"
        for info in components
        if info.tied
    ]
    words = dict.fromkeys([framework, *(word for info in components for word in (info.name, info.format))])
    remarks += [f"{word}: {MEANINGS[word]}" for word in words if word in MEANINGS]
    if "device mesh" in fit.shown or "device mesh" in fit.same:
        remarks.append("device mesh: the dimensions in which the ranks are arranged")
    for remark in remarks:
        for line in text.wrapped(remark, min(console.width, WIDEST), "  "):
            console.print(good(line, DIM), soft_wrap=True)
    for said in hidden(fit.dropped, console.width):
        console.print(said, soft_wrap=True)


def _cells(info: ComponentInfo) -> dict[str, str]:
    tensors = sum(count.tensors for count in info.kinds.values())
    opened = info.elements is not None
    unknown = UNKNOWN if not info.problem else ""
    return {
        "component": info.name,
        "format": info.format,
        "files": str(info.files),
        "ranks": str(info.world_size or ""),
        "device mesh": (info.mesh or "") if opened else unknown,
        "tensors": str(tensors) if opened else unknown,
        "params": text.params(info.elements or 0) if opened else unknown,
        "size": text.size(info.bytes or 0) if opened else unknown,
    }


def _tensor_table(rows: Sequence[TensorGroup], *, counted: bool) -> Table:
    """Every column and every name in full: for files and pipes."""
    heads = ["tensor", "count", "shape", "dtype", "layout", "params", ""]
    unwanted = {"count"} if not counted else set()
    unwanted |= {"layout"} if not any(row.layout for row in rows) else set()
    unwanted |= {""} if not any(row.odd for row in rows) else set()
    shown = [head for head in heads if head not in unwanted]
    whole = WHOLE if any(row.layout and not row.layout.startswith(SAME) for row in rows) else ""
    table = new_table(shown, right=tuple(i for i, head in enumerate(shown) if head in ("count", "params")))
    for row in rows:
        cells = {
            "tensor": row.pattern,
            "count": text.exact(row.count),
            "shape": text.shape(row.shape),
            "dtype": row.dtype,
            "layout": row.layout or whole,
            "params": text.params(row.elements),
            "": "<- differs from its group" if row.odd else "",
        }
        table.add_row(*as_cells(cells[head] for head in shown))
    return table
