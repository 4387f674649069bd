"""Results as people read them: facts first, then tables, then warnings, and the next command as the last line.

Names from files only ever become `rich.text.Text`, with control characters escaped: markup in them means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ckpt_cli import shell
from ckpt_cli.cli import text
from ckpt_cli.cli.screens.checkpoint import checkpoint_facts, counted_tensors, passed_over
from ckpt_cli.cli.screens.comparison import base_facts, print_drift
from ckpt_cli.cli.screens.extracted import by_rank, file_label
from ckpt_cli.cli.screens.heatmap import OUTPUT
from ckpt_cli.cli.screens.verify import print_findings, source_fact
from ckpt_cli.cli.screens.widgets import (
    BAD,
    GOOD,
    REPLACED,
    ROWS,
    WARNING,
    as_cells,
    for_real,
    good,
    here,
    new_table,
    next_line,
    plain,
    print_facts,
    print_notes,
)
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few
from ckpt_cli.results.checkpoint import Checkpoint, ComponentInfo, LoraInfo, NoteInfo
from ckpt_cli.results.verify import VerifyResult
from ckpt_cli.results.written import (
    AveragedComponent,
    AverageResult,
    FileInfo,
    MergedComponent,
    MergeResult,
    PublishResult,
    PushInfo,
    WrittenFolder,
)

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from ckpt_cli.cli.session import Session

WORTH_A_RATE = 100_000_000
"""Bytes that were read; of less, most of the time goes into other things than reading."""


def merge_result(result: MergeResult, session: Session) -> None:
    """What `ckpt merge` prints, after the work or instead of it."""
    console, checkpoint = session.out(), result.checkpoint
    if session.quiet:
        for output in result.outputs:
            console.print(plain(output.output), soft_wrap=True)
        return
    for output in result.outputs:
        if output.part is not None and output.part.number:
            # The first part tells the rest, once.
            print_facts(console, _written(output, result.dry_run, result.seconds))
            console.print()
            continue
        info = next(info for info in checkpoint.components if info.name == output.component.split("+")[0])
        facts = checkpoint_facts(checkpoint, info)[:1]
        facts.append(_coverage(output, info))
        facts.append(("dtype", _dtypes(output)))
        facts.append(("kept in fp32", _kept(output)))
        facts.append(("names", _naming(output)))
        facts.append(("from base", _carried(output)))
        facts.append(("lora", _lora(output.lora)))
        facts += [("", note.text) for note in output.notes if note.code in ("lora-alone", "left-to-base")]
        facts += [("dropped", f"{name}: {why}") for name, why in output.dropped.items()]
        if output.left_out:
            facts.append(("left out", f"{text.plural(output.left_out, 'tensor')}, by --include / --exclude"))
        facts += _beside(checkpoint)
        facts.append(("assets", ", ".join(output.assets) or "none"))
        state = by_rank([FileInfo(name=name, bytes=0) for name in output.state])
        facts.append(("state", ", ".join(file_label(names) for names, _ in state)))
        facts += _written(output, result.dry_run, result.seconds)
        facts += _verified(output.verified)
        facts += _pushed(result.push, result.dry_run)
        print_facts(console, facts)
        for verified in output.verified:
            print_findings(console, verified.findings, everything=session.verbose)
        if len(output.files) > 1 and (result.dry_run or session.verbose):
            table = new_table(("file", "size"), right=(1,))
            for file in output.files:
                table.add_row(*as_cells((file.name, text.size(file.bytes))))
            console.print()
            console.print(table)
        if output.comparison is not None:
            console.print()
            print_facts(console, base_facts(output.comparison, OUTPUT, console.width))
            print_drift(output.comparison, console, OUTPUT, with_map=False)
        console.print()
    _print_notes(session, [*(note for output in result.outputs for note in output.notes), *checkpoint.notes, *_push_notes(result.push)])
    if _push_failed(session, result.push):
        return
    if result.dry_run:
        next_line(session, for_real(session, "merge", [checkpoint.run or checkpoint.path]))
    elif result.outputs[0].part is not None and not result.outputs[0].part.published:
        _next_part(session, result.outputs)
    elif any(output.verified for output in result.outputs) and not result.exit_code:
        next_line(session, f"ckpt inspect {text.argument(result.outputs[0].output)}")
    else:
        also = "".join(f" --also {text.argument(folder)}" for folder in checkpoint.also)
        written = text.argument(result.outputs[0].output)
        next_line(session, f"ckpt verify {written} --against {text.argument(checkpoint.path)}{also}")


def average_result(result: AverageResult, session: Session) -> None:
    """What `ckpt average` prints: the coefficients first, then the tensors."""
    console, checkpoint = session.out(), result.checkpoint
    if session.quiet:
        for output in result.outputs:
            console.print(plain(output.output), soft_wrap=True)
        return
    for output in result.outputs:
        if output.part is not None and output.part.number:
            print_facts(console, _written(output, result.dry_run, result.seconds))
            console.print()
            continue
        console.print(_source_table(output))
        console.print()
        mean = "sum(weight x value)" + (f" / {result.divisor:g}" if result.divisor != 1 else "")
        counted = f"{text.plural(output.averaged, 'tensor')} averaged{_copied(output)}"
        facts: list[tuple[str, str | Text]] = [
            (
                "newest",
                f"step {checkpoint.step}{passed_over(result.passed_over, result.outputs[0].component)}" if result.passed_over else "",
            ),
            ("method", f"{result.method}: {mean}, rounded once"),
            ("tensors", counted),
            ("dtype", _dtypes(output)),
            ("kept in fp32", _kept(output)),
        ]
        facts.append(("names", _naming(output)))
        facts.append(("from base", _carried(output)))
        facts += [("dropped", f"{name}: {why}") for name, why in list(output.dropped.items())[:ROWS]]
        if len(output.dropped) > ROWS:
            facts.append(("", f"... and {len(output.dropped) - ROWS} more (--json lists all)"))
        if output.left_out:
            facts.append(("left out", f"{text.plural(output.left_out, 'tensor')}, by --include / --exclude"))
        facts += _beside(checkpoint)
        facts.append(("assets", ", ".join(output.assets) or "none"))
        facts += _written(output, result.dry_run, result.seconds)
        facts += _verified(output.verified)
        facts += _pushed(result.push, result.dry_run)
        print_facts(console, facts)
        for verified in output.verified:
            print_findings(console, verified.findings, everything=session.verbose)
        console.print()
    _print_notes(
        session,
        [*(note for output in result.outputs for note in output.notes), *result.notes, *checkpoint.notes, *_push_notes(result.push)],
    )
    if _push_failed(session, result.push):
        return
    if result.dry_run:
        paths = [source.path for source in result.outputs[0].sources]
        next_line(session, for_real(session, "average", [*paths, "-o", result.outputs[0].output]))
    elif result.outputs[0].part is not None and not result.outputs[0].part.published:
        _next_part(session, result.outputs)
    else:
        next_line(session, f"ckpt verify {text.argument(result.outputs[0].output)} --full")


def publish_result(result: PublishResult, session: Session) -> None:
    """What `ckpt publish` prints."""
    console = session.out()
    if session.quiet:
        for output in result.outputs:
            console.print(plain(output.output), soft_wrap=True)
        return
    for output in result.outputs:
        size = f"{text.plural(len(output.files), 'file')}, {text.size(sum(file.bytes for file in output.files))}"
        by = f" by {text.plural(output.parts, 'part')}" if output.parts else ", already done"
        facts: list[tuple[str, str | Text]] = [("published", here(output.output, f"{size}{by}"))]
        print_facts(console, [*facts, *_verified(output.verified), *_pushed(result.push)])
        for verified in output.verified:
            print_findings(console, verified.findings, everything=session.verbose)
    console.print()
    print_notes(session, [*result.notes, *_push_notes(result.push)])
    if _push_failed(session, result.push):
        return
    next_line(session, f"ckpt verify {text.argument(result.outputs[0].output)} --full")


# -- the Hub ---------------------------------------------------------------------------------------------------------


def _verified(results: Sequence[VerifyResult]) -> list[tuple[str, str | Text]]:
    """What a verification compared: with the source, or else all values of the output."""
    facts: list[tuple[str, str | Text]] = []
    for result in results:
        told = [(source_fact(source), source.identical) for source in result.against]
        told = told or [(f"{text.plural(result.tensors, 'tensor')}, every value read", not result.exit_code)]
        facts += [("verified", good(said, GOOD if right else BAD)) for said, right in told]
    return facts


def _pushed(push: PushInfo | None, dry_run: bool = False) -> list[tuple[str, str | Text]]:
    """Where an output was, or would be, pushed."""
    if push is None or push.error is not None:
        return []
    if dry_run:
        return [("would push", here(push.url))]
    size = f"{text.plural(push.files, 'file')}, {text.size(push.bytes)} in {text.duration(push.seconds)}"
    facts: list[tuple[str, str | Text]] = [("pushed", here(push.url, size))]
    facts += [("card", "README.md of the repository was kept")] if push.card == "kept" else []
    return [*facts, *([("removed", f"files of an older output there: {few(push.removed, 3)}")] if push.removed else [])]


def _push_notes(push: PushInfo | None) -> tuple[NoteInfo, ...]:
    return push.notes if push is not None else ()


def _push_failed(session: Session, push: PushInfo | None) -> bool:
    """Show why nothing was pushed, if that is so; its hint says how to go on."""
    if push is None or push.error is None:
        return False
    session.show(push.error)
    return True


# -- parts -----------------------------------------------------------------------------------------------------------


def _next_part(session: Session, outputs: Sequence[WrittenFolder]) -> None:
    """After a part of an output: the first one that is not written, or publishing, if all are. Of a launcher, the last part does that."""
    folders = [text.argument(output.output) for output in outputs]
    parts = [output.part for output in outputs if output.part is not None]
    if parts[0].launched:
        next_line(session, f"ckpt verify {folders[0]} --full")
        return
    missing = [number for part in parts for number in range(part.count) if number not in part.done]
    if not missing:
        next_line(session, f"ckpt publish {' '.join(folders)}")
        return
    mine, other = f"{parts[0].number}/{parts[0].count}", f"{missing[0]}/{parts[0].count}"
    typed = [other if word == mine else word.replace(f"--part={mine}", f"--part={other}") for word in session.typed]
    next_line(session, shell.join(["ckpt", session.command, *typed]))


def _beside(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Notes about what is in or beside the checkpoint and is not written: no warning, but always shown."""
    said = ("extra-state", "other-weights", "other-components", "unknown-files")
    return [("left out", note.text) for note in checkpoint.notes if note.level == "info" and note.code in said]


def _print_notes(session: Session, notes: Iterable[NoteInfo]) -> None:
    """All warnings and notes together, each once."""
    print_notes(session, dict.fromkeys(notes))


def _written(output: WrittenFolder, dry_run: bool, seconds: float) -> list[tuple[str, str | Text]]:
    """Where an output is, or would be, and its size."""
    size = f"{text.plural(len(output.files), 'file')}, {text.size(output.bytes_written)}"
    if output.part is not None and not output.part.published:
        part = output.part
        done = f"part {part.number} of {part.count} in {text.duration(seconds)}; {len(part.done)} of {part.count} parts are written"
        return [("wrote", here(output.output, done))]
    if dry_run:
        free = f", {text.size(output.disk_free)} free" if output.disk_free is not None else ""
        replaces = [("would replace", REPLACED)] if output.replaced else []
        memory = f"at most about {text.size(output.peak_memory)}"
        return [("would write", here(output.output, f"{size}{free}")), *replaces, ("memory", memory)]
    rate = f" ({text.size(output.bytes_read / seconds)}/s)" if output.bytes_read >= WORTH_A_RATE else ""
    replaced = [("replaced", REPLACED)] if output.replaced else []
    kept = [("kept", note.text) for note in output.notes if note.code == "resumed"]
    return [("wrote", here(output.output, f"{size} in {text.duration(seconds)}{rate}")), *replaced, *kept]


def _source_table(output: AveragedComponent) -> Table:
    table = new_table(("step", "source", "component", "size", "weight", "share"), right=(0, 3, 4, 5))
    for source in output.sources:
        weight = f"{source.weight:.6g}"
        step = "" if source.step is None else str(source.step)
        table.add_row(
            *as_cells((step, text.path(source.path), source.component, text.size(source.bytes), weight, text.share(source.coefficient)))
        )
    return table


def _coverage(output: MergedComponent, info: ComponentInfo) -> tuple[str, Text]:
    """How many elements the files hold of those that the tensors have, and how many of them are written."""
    whole = output.covered_elements == output.source_elements
    of = "all" if whole else f"{text.exact(output.covered_elements)} of"
    found = f"{of} {text.exact(output.source_elements)} elements of {counted_tensors(info)} found"
    written = "" if output.elements == output.source_elements else f"; {text.exact(output.elements)} are written"
    return ("complete", good(f"{found}{written}")) if whole else ("incomplete", good(f"{found}{written}", WARNING))


def _dtypes(output: WrittenFolder) -> str:
    listed = ", ".join(f"{code} {text.params(count)}" for code, count in sorted(output.dtypes.items(), key=lambda item: -item[1]))
    cast = "" if not output.cast else ", all cast" if output.cast == output.tensors else f", {output.cast} of them cast"
    return f"{listed} in {text.plural(output.tensors, 'tensor')}{cast}"


def _kept(output: WrittenFolder) -> str:
    """What is in fp32 although the rest was cast."""
    kept = output.kept_in_fp32
    return f"{text.plural(len(kept), 'tensor')}, as transformers does: {few(grouped(list(kept)), 3)}" if kept else ""


def _naming(output: WrittenFolder) -> str:
    renamed = f", {text.plural(output.renamed, 'tensor')} renamed" if output.renamed else ""
    return f"{output.naming}{renamed}"


def _carried(output: WrittenFolder) -> str:
    """What was taken from the base."""
    return f"{text.plural(len(output.carried), 'tensor')}: {few(output.carried, 3)}" if output.carried else ""


def _copied(output: AveragedComponent) -> str:
    """What is not averaged, and the checkpoint that it was taken from."""
    last = output.sources[-1]
    origin = f"step {last.step}" if last.step is not None else text.path(last.path)
    return f", {output.copied} copied from {origin}: {few(output.copied_names, 3)}" if output.copied else ""


def _lora(info: LoraInfo | None) -> str:
    """The result for LoRA adapters."""
    if info is None:
        return ""
    if not info.modules:
        return "no factors; modules that were trained as a whole are in the weights"
    ranks, alphas, scales = map(text.extent, (info.ranks, info.alphas, info.scales))
    kind = "DoRA" if info.dora else "LoRA"
    return f"{text.plural(info.modules, 'module')} {info.outcome} ({kind}), r {ranks}, alpha {alphas} ({info.origin}), scale {scales}"
