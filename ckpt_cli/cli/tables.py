"""Tables as all results have them. Text from files only ever becomes `rich.text.Text`, with control characters escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.names import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

NARROW = 100
"""Below this many columns the tables drop what is needed least."""

ROWS = 20
"""How many rows a table of differences has."""


def table(heads: Sequence[str], right: Sequence[int] = ()) -> Table:
    """A table without lines; columns ``right`` are numbers. Long names fold, numbers never do."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, head in enumerate(heads):
        flexible = head in ("tensor", "state", "mesh", "layout", "value", "source", "")
        made.add_column(head, justify="right" if i in right else "left", overflow="fold", no_wrap=not flexible)
    return made


def cells(values: Iterable[str]) -> list[Text]:
    """A row for `table`."""
    return [plain(value) for value in values]


def plain(value: str) -> Text:
    """Text in which nothing means anything."""
    from rich.text import Text

    return Text(printable(value))
