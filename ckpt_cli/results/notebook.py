"""Results as notebooks show them: fields as a table, long and nested ones folded, every text escaped; no script, no style."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from ckpt_cli.names import printable

ROWS = 50
"""Rows of a table that are shown."""

LISTED = 6
"""Items of a list that are shown in a line."""


def as_html(result: BaseModel) -> str:
    """A result with its name and all fields that hold something."""
    return f"<div><strong>{type(result).__name__}</strong>{_fields(result)}</div>"


def _fields(result: BaseModel) -> str:
    rows = [(name, _cell(value)) for name, value in result if value not in (None, "", (), {})]
    return "<table>" + "".join(f"<tr><th>{_text(name)}</th><td>{cell}</td></tr>" for name, cell in rows) + "</table>"


def _cell(value: Any) -> str:
    """A value as HTML: short ones as text, others folded."""
    if isinstance(value, BaseModel):
        return _folded(type(value).__name__, _fields(value))
    if isinstance(value, Mapping):
        if all(item is None or isinstance(item, (str, int, float)) for item in value.values()):
            return _text(_few([f"{key}: {_word(item)}" for key, item in value.items()]))
        return "".join(f"{_text(key)} {_cell(item)}" for key, item in value.items())
    if isinstance(value, (tuple, list)):
        if value and isinstance(value[0], BaseModel):
            return _folded(f"{len(value)} {type(value[0]).__name__}", _table(value))
        return _text(_few([_word(item) for item in value]))
    return _text(_word(value))


def _table(rows: Sequence[BaseModel]) -> str:
    """One row per result; columns in which all are empty are left out."""
    columns = [name for name in type(rows[0]).model_fields if any(getattr(row, name, None) not in (None, "", (), {}) for row in rows)]
    heads = "".join(f"<th>{_text(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{_cell(getattr(row, name, None))}</td>" for name in columns) + "</tr>" for row in rows[:ROWS])
    more = f"<p>... and {len(rows) - ROWS} more</p>" if len(rows) > ROWS else ""
    return f"<table><tr>{heads}</tr>{body}</table>{more}"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{content}</details>"


def _few(words: Iterable[str]) -> str:
    listed = list(words)
    return ", ".join(listed[:LISTED]) + (f" and {len(listed) - LISTED} more" if len(listed) > LISTED else "")


def _word(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _text(value: object) -> str:
    return html.escape(printable(value), quote=True)
