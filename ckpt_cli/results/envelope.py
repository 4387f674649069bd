"""The envelope of `--json`: the schema, the command, its result and its errors."""

from __future__ import annotations

from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.results.checkpoint import Frozen

SCHEMA = 1


class ErrorInfo(Frozen):
    """An error as ``--json`` prints it."""

    code: str
    message: str
    hint: str | None = None
    path: str | None = None
    tensor: str | None = None
    expected: str | None = None
    details: tuple[str, ...] = ()

    @property
    def advice(self) -> str | None:
        """The hint, as an error calls what is shown."""
        return self.hint

    @classmethod
    def of(cls, error: CkptError) -> ErrorInfo:
        return cls(
            code=error.code,
            message=_clean(error.message),
            hint=_clean(error.advice),
            path=_clean(error.path),
            tensor=_clean(error.tensor),
            expected=_clean(error.expected),
            details=tuple(_clean(line) for line in error.details),
        )


def _clean(text: str | None) -> Any:
    """Text that JSON can carry: file names that are no UTF-8 are escaped."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


class Envelope(Frozen):
    """The one document that ``--json`` prints, on success and on failure."""

    schema_version: int
    command: str
    status: str
    exit_code: int
    data: dict[str, Any] | None
    errors: tuple[ErrorInfo, ...]

    def to_json(self) -> str:
        """The document as text, ASCII only, with the key "schema" for the version."""
        import json

        content = self.model_dump(mode="json")
        return json.dumps({"schema": content.pop("schema_version"), **content}, indent=2)
