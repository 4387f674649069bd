"""Which files classes of transformers read beside the weights, by the names in their source. Imports torch.

Such a name is what a class gives to ``cached_file``: a text, or a text with a place for what the user asks for (``adapter.{}.bin``).
Classes of processors and tokenizers read whole folders besides: one for each further tokenizer, and what they hand to pyctcdecode.
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

TOKENIZER = "tokenizer"

DECISIONS = ("decision.json", "decision_template.jinja")
"""What a model that decides keeps beside its config, as others do their settings for generation."""

OF_PYCTCDECODE = {
    "_LANGUAGE_MODEL_SERIALIZED_DIRECTORY": ("language_model/{}", False),
    "_ALPHABET_SERIALIZED_FILENAME": ("alphabet.json", True),
}
"""Where a decoder of pyctcdecode, which classes read by these attributes, keeps its files, and whether it does without."""


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
        own: Any = getattr(kind, "config_class", None) if type(kind).__name__ != "DummyObject" else None  # a stand-in has nothing
        decides = own is not None and hasattr(kind, "decide") and own.model_type == model_type
        for file in (*DECISIONS, *own.extra_config_files) if decides else ():
            found.setdefault(file, {})[f"{model_type}/{name}"] = False
    return {file: {"required": all(kinds.values()), "classes": sorted(kinds)} for file, kinds in sorted(found.items())}


def files_of_processors() -> dict[str, dict[str, Any]]:
    """What classes of processors and tokenizers read besides the usual files: for which types of models, and whether it is required.

    A name that ends in ``/{}`` is of a folder all of which is read.
    """
    import transformers
    from transformers.models.auto import processing_auto, tokenization_auto

    mappings = (vars(processing_auto)["PROCESSOR_MAPPING_NAMES"], tokenization_auto.TOKENIZER_MAPPING_NAMES)
    found: dict[str, dict[str, bool]] = {}
    folder = Path(str(transformers.__file__)).parent / "models"
    for path in sorted([*folder.glob("*/processing_*.py"), *folder.glob("*/tokenization_*.py")]):
        for kind in (node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)):
            if read := dict(_read_in_folders(kind)):
                found[kind.name] = read
    return {
        name: {"types": sorted({key for mapping in mappings for key, value in mapping.items() if value == name}), "read": read}
        for name, read in sorted(found.items())
    }


def _read_in_folders(kind: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """The folders that a class reads, and the files that are read with them."""
    made = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    if "Processor" in kind.name:  # a tokenizer under another name than the usual is in a folder of that name, or else in the usual place
        names = [argument.arg for each in made for argument in each.args.args]
        yield from ((f"{name}/{{}}", False) for name in names if name.endswith(f"_{TOKENIZER}") and name != f"audio_{TOKENIZER}")
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and node.attr in OF_PYCTCDECODE:
            yield OF_PYCTCDECODE[node.attr]
        if isinstance(node, ast.keyword) and node.arg == "subfolder" and isinstance(node.value, ast.Constant):
            yield from ((f"{folder}/{{}}", True) for folder in _values(node.value, {}) if folder)


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
