"""Which files classes of transformers read beside the weights, by the names in their source. Imports torch.

Such a name is what a class gives to ``cached_file``: a text, or a text with a place for what the user asks for (``adapter.{}.bin``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.hub.classes.compile import known_classes

SILENT = "_raise_exceptions_for_missing_entries"
"""What is passed where a file need not be there."""

PLACE = re.compile(r"\{\w*\}")


def files_of_classes() -> dict[str, dict[str, Any]]:
    """The files that classes of models and of processors read from the folder of the weights: by which, and whether they are required."""
    import transformers
    from transformers.models.auto import processing_auto

    processors = dict(vars(processing_auto)["PROCESSOR_MAPPING_NAMES"])
    named = _named_in_sources(Path(str(transformers.__file__)).parent / "models")
    found: dict[str, dict[str, bool]] = {}
    for model_type, name in known_classes():
        kind: Any = getattr(transformers, name, None)
        owners = [*(each.__name__ for each in getattr(kind, "__mro__", ())), processors.get(model_type)]
        for file, required in (pair for owner in owners for pair in named.get(owner, {}).items()):
            found.setdefault(file, {})[f"{model_type}/{name}"] = required
    return {file: {"required": all(kinds.values()), "classes": sorted(kinds)} for file, kinds in sorted(found.items())}


def _named_in_sources(folder: Path) -> dict[str | None, dict[str, bool]]:
    """The names of files by the class that reads them, and whether it raises an error without."""
    found: dict[str | None, dict[str, bool]] = {}
    for path in sorted([*folder.glob("*/modeling_*.py"), *folder.glob("*/processing_*.py")]):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text) if "cached_file(" in text else ast.Module([], [])
        constants = _texts(tree.body, {})
        for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for method in (node for node in kind.body if isinstance(node, ast.FunctionDef)):
                found.setdefault(kind.name, {}).update(_named_in(method, constants))
    return found


def _named_in(method: ast.FunctionDef, constants: Mapping[str, set[str]]) -> Iterator[tuple[str, bool]]:
    arguments = method.args.args
    defaults = zip(reversed(arguments), reversed(method.args.defaults), strict=False)
    known = {**constants, **{argument.arg: _values(default, constants) for argument, default in defaults}}
    known |= _texts(list(ast.walk(method)), known)
    for call in (node for node in ast.walk(method) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id == "cached_file":
            given = [keyword.value for keyword in call.keywords if keyword.arg == "filename"] or call.args[1:2]
            silent = any(keyword.arg == SILENT for keyword in call.keywords)
            names = {PLACE.sub("{}", name) for value in given for name in _values(value, known)}
            yield from ((name, not silent and "{}" not in name) for name in names)


def _texts(nodes: list[Any], known: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The variables that are texts, with all that they are set to."""
    found: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values = _values(node.value, known)
            if values:
                found.setdefault(node.targets[0].id, set()).update(values)
    return found


def _values(node: ast.expr, known: Mapping[str, set[str]]) -> set[str]:
    """What an expression may be, if it is a text, a variable that is one, or one of these with something put in."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, ast.Name):
        return known.get(node.id, set())
    is_format = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format"
    return _values(node.func.value, known) if is_format else set()  # type: ignore[attr-defined]
