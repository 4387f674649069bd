"""What screens are made of: facts, tables, notes, and the next command.

Names from files only ever become `rich.text.Text`, with control characters escaped: markup in them means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_cli import shell
from ckpt_cli.cli import text
from ckpt_cli.cli.words.elsewhere import beside
from ckpt_cli.cli.words.hints import own_options
from ckpt_cli.names import printable
from ckpt_cli.results.checkpoint import NoteInfo

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ckpt_cli.cli.session import Session

BOLD, DIM = "bold", "dim"
ACCENT = "cyan"
"""Paths and commands."""

GOOD, WARNING, BAD = "green", "yellow", "red"
"""Complete, ok, identical; warnings and odd ones; errors."""

REPLACED = "the folder of this name that was there before"

ROWS = 20
"""How many rows a table of differences has."""

GAP = 2
"""Spaces between columns."""

NARROW, NARROWER = 100, 80
"""Below this many columns the tables drop what is needed least."""


def print_facts(console: Console, facts: Iterable[tuple[str, str | Text]]) -> None:
    """Labels and values; a fact without a value is left out."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=BOLD, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in facts:
        if value:
            grid.add_row(plain(label), value if not isinstance(value, str) else plain(value))
    console.print(grid)


def print_notes(session: Session, notes: Iterable[NoteInfo], *, everything: bool = False) -> None:
    """Warnings, and notes on request, on stderr."""
    for note in notes:
        if note.level == "warning":
            session.labelled("warning", WARNING, note.text)
        elif session.verbose or everything:
            session.labelled("note", DIM, note.text)


def for_real(session: Session, command: str, arguments: Sequence[str]) -> str:
    """The command that does what was planned: as it was typed, without --dry-run."""
    typed = [word for word in session.typed if word != "--dry-run"]
    return f"ckpt {command} {shell.join(typed) or text.words_again(arguments)}".rstrip()


def next_line(session: Session, command: str) -> None:
    """The last line of every command: the command to copy next, after the error that it goes past."""
    if session.refused is not None:
        session.show(session.refused)
    session.labelled("next", DIM, command, style=ACCENT, wrap=False)


def again(session: Session, command: str) -> str:
    """The options of this command that say what is read and how, without those that the next one does not have."""
    words = shell.split(session.again)
    known = own_options(command)
    return "".join(f" {name} {text.argument(value)}" for name, value in zip(words[::2], words[1::2], strict=True) if name in known)


def planned_merge(session: Session, checkpoint: str) -> str:
    """The command that plans a merge of what was looked at, with a name for the output where that which it has by default is taken."""
    options = again(session, "merge")
    other = beside(checkpoint, options)
    output = "" if other is None else f" -o {text.argument(other)}"
    return f"ckpt merge {text.argument(session.path or checkpoint)}{options}{output} --dry-run"


def here(path: str, *more: str) -> Text:
    """A path, and what is said about it."""
    from rich.text import Text

    return Text.assemble((text.path(path), ACCENT), *(f"   {printable(each)}" for each in more if each))


def good(value: str, style: str = GOOD) -> Text:
    """Text in a colour: green if nothing else is said."""
    from rich.text import Text

    return Text(printable(value), style=style)


def new_table(heads: Sequence[str], right: Sequence[int] = ()) -> Table:
    """An empty table without lines; the columns ``right`` are numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, head in enumerate(heads):
        flexible = head in ("name", "in", "tensor", "state", "files", "mesh", "layout", "value", "source", "entry that is not a tensor", "")
        table.add_column(head, justify="right" if i in right else "left", overflow="fold", no_wrap=not flexible)
    return table


@dataclass(frozen=True, slots=True)
class Fitted:
    """Columns on a screen: those ``shown``, the value of those that are the same in every row, and those without room."""

    shown: tuple[str, ...]
    same: Mapping[str, str]
    dropped: tuple[str, ...]

    def heading(self, rows: str, width: int) -> list[Text]:
        """The lines above the table that say what all ``rows`` share; without a name for them where there is one row."""
        said = ", ".join(f"{head} {value}" for head, value in self.same.items())
        return [plain(line) for line in text.wrapped(f"{rows}: {said}" if rows else said, width, "  ")] if self.same else []


def fitted(columns: Mapping[str, Sequence[str]], least_needed: Sequence[str], width: int) -> Fitted:
    """Which columns fit into ``width``.

    If not all do, those of ``least_needed`` leave, in this order: first what is the same in every row, which is said once, then the others.
    """
    taken = {head: max(len(head), *map(len, cells)) + GAP for head, cells in columns.items()}
    same: dict[str, str] = {}
    dropped: list[str] = []
    for once in (True, False):
        for head in least_needed:
            if head not in taken or sum(taken.values()) - GAP <= width or (once and len(set(columns[head])) > 1):
                continue
            del taken[head]
            if once:
                same[head] = columns[head][0]
            else:
                dropped.append(head)
    return Fitted(tuple(taken), same, tuple(dropped))


def hidden(columns: Sequence[str], width: int) -> list[Text]:
    """The lines below a table that name the columns for which there was no room, and how to see them; none if all are shown."""
    said = f"not shown at this width: {', '.join(columns)} (--json has all)"
    return [good(line, DIM) for line in text.wrapped(said, width, "  ")] if columns else []


def as_cells(values: Iterable[str]) -> list[Text]:
    """The cells of a row."""
    return [plain(value) for value in values]


def plain(value: str) -> Text:
    """Text in which nothing is markup, safe for a terminal."""
    from rich.text import Text

    return Text(printable(value))
