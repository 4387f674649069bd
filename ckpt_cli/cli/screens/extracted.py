"""What `ckpt extract-state` prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.checkpoint import passed_over
from ckpt_cli.cli.screens.widgets import REPLACED, ROWS, as_cells, for_real, here, new_table, next_line, plain, print_facts, print_notes
from ckpt_cli.results.written import ExtractResult, FileInfo

if TYPE_CHECKING:
    from rich.text import Text

    from ckpt_cli.cli.session import Session

RANK = r"(?<=_)[0-9]+(?=\.\w+$)"
"""The rank in the name of a file."""


def extract_result(result: ExtractResult, session: Session) -> None:
    """What `ckpt extract-state` prints: where training stood, then the files."""
    console = session.out()
    if session.quiet:
        console.print(plain(result.output), soft_wrap=True)
        return
    described = [result.framework, result.component] if result.component != "model" else [result.framework]
    described += [f"step {result.step}{passed_over(result.passed_over, result.component)}"] if result.step is not None else []
    described += [text.plural(result.ranks, "rank")] if result.ranks else []
    training, scheduler = result.training, result.scheduler or {}
    stood = [f"{name} {training[name]}" for name in ("step", "epoch") if training.get(name) is not None]
    rates = scheduler.get("_last_lr")
    schedule = [text.plural(scheduler["schedulers"], "scheduler")] if "schedulers" in scheduler else []
    schedule += [f"last_epoch {scheduler['last_epoch']}"] if "last_epoch" in scheduler else []
    schedule += [f"lr {', '.join(text.number(rate) for rate in rates)}"] if isinstance(rates, list) else []
    counters = training.get("counters") or {}
    of_ranks = f" of {text.plural(result.ranks, 'rank')}" if result.ranks > 1 else ""
    facts: list[tuple[str, str | Text]] = [
        ("checkpoint", here(result.path, ", ".join(described))),
        ("training", ", ".join(stood)),
        ("scheduler", ", ".join(schedule) or ("found" if result.scheduler is not None else "none")),
        ("random", ", ".join("python" if name == "random" else name for name in result.random) + of_ranks if result.random else "none"),
        ("counters", ", ".join(f"{name} {text.number(value)}" for name, value in counters.items())),
    ]
    if result.optimizer is not None:
        merged = result.optimizer
        counted = f"{text.plural(merged.parameters, 'parameter')} in {text.plural(merged.groups, 'group')}"
        facts.append(("optimizer", f"{counted}, {text.plural(merged.tensors, 'tensor')}, {text.size(merged.bytes)}   {merged.layout}"))
        if merged.assumed:
            which = "" if merged.assumed == merged.parameters else f" for {merged.assumed} of {merged.parameters}"
            facts.append(("names", f"given in the order of the model, which nothing proves{which}: others have the same shape"))
    else:
        facts.append(("optimizer", "not looked for; --optimizer adds its state, merged per parameter"))
    facts += [("not read", f"{lost}, which stays in the original") for lost in result.not_represented[:ROWS]]
    total = sum(file.bytes for file in result.files)
    verb = "would write" if result.dry_run else "wrote"
    facts.append(
        (verb, here(result.output, f"{text.plural(len(result.files), 'file')}, {'about ' if result.dry_run else ''}{text.size(total)}"))
    )
    facts += [("would replace" if result.dry_run else "replaced", REPLACED)] if result.replaced else []
    print_facts(console, facts)
    console.print()
    table = new_table(("file", "size", ""), right=(1,))
    for names, size in by_rank(result.files):
        count = f"{len(names)} files" if len(names) > 1 else ""
        copied = "copied as they are" if count else "copied as it is"
        remark = ", ".join(filter(None, (count, copied if names[0] in result.copied else "")))
        table.add_row(*as_cells((file_label(names), text.size(size), remark)))
    console.print(table)
    console.print()
    print_notes(session, result.notes)
    if result.dry_run:
        next_line(session, for_real(session, "extract-state", [result.path]))
    else:
        next_line(session, f"ls {text.argument(result.output)}")


def by_rank(files: Sequence[FileInfo]) -> list[tuple[list[str], int]]:
    """Names of files that differ in their rank only, and their size together."""
    groups: dict[str, list[FileInfo]] = {}
    for file in files:
        groups.setdefault(re.sub(RANK, "R", file.name), []).append(file)
    return [([file.name for file in group], sum(file.bytes for file in group)) for group in groups.values()]


def file_label(names: Sequence[str]) -> str:
    return re.sub(RANK, "R", names[0]) if len(names) > 1 else names[0]
