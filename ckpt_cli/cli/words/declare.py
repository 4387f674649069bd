"""Commands made of their options: the fields of an ``...Options`` class and the output options are parameters of a command.

What `cli.options` declares is thereby written once: a command lists only what is its own, such as paths.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from types import ModuleType
from typing import Any

import typer

from ckpt_cli.cli import options
from ckpt_cli.cli.session import TYPED, Session

PRINTED = (("json", False), ("quiet", 0), ("verbose", False), ("debug", False), ("color", "auto"), ("progress", "auto"))


def command(
    kind: type | None = None, *, name: str | None = None, variant: str = "", own_options: ModuleType | None = None
) -> Callable[[Callable[..., int]], Callable[..., None]]:
    """Make a command of a function: it gets a `Session`, its own parameters, and the fields of ``kind`` that were given.

    The function returns the exit code. A field of ``kind`` is the option of the same name in `cli.options`;
    where that has another meaning for a command, ``variant`` stands before the name, or it is in the module ``own_options``.
    """

    def declare(function: Callable[..., int]) -> Callable[..., None]:
        called = name or function.__name__
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        of_kind = [] if kind is None else [_parameter(field.name, _default(field), variant, own_options) for field in fields(kind)]
        shown = [_parameter(*each) for each in PRINTED]
        if not any(parameter.name == "strict" for parameter in of_kind):
            shown.append(_parameter("strict", False, "Reading"))

        def run(context: typer.Context, **given: Any) -> None:
            display = {parameter.name: given.pop(parameter.name) for parameter in shown}
            session = Session(called, typed=context.meta.get(TYPED, ()), **{"strict": given.get("strict", False), **display})
            raise typer.Exit(function(session, **{key: value for key, value in given.items() if value is not None}))

        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own[1:], *of_kind, *shown)]
        parameters.insert(0, inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return declare


def _parameter(name: str, default: Any, variant: str = "", own: ModuleType | None = None) -> inspect.Parameter:
    declared = "".join(map(str.capitalize, name.split("_")))
    annotation = getattr(own, declared, None) or getattr(options, variant + declared, None) or getattr(options, declared)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default(field: Field[Any]) -> Any:
    """The default of a field; several values and none are None on the command line."""
    return None if field.default in (MISSING, ()) else field.default
