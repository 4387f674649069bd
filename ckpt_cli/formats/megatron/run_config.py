"""What ``run_config.yaml`` of Megatron-Bridge says of the model, under the names of Megatron-LM's arguments.

The file is the dump of nested dataclasses. Of its section ``model`` the plain scalars and lists of them are read, line by line; anything
else has no value. Nothing is built of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import reading
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.source import Files, read_small
from ckpt_cli.tensors.plain_values import Unrepresented

RUN_CONFIG = "run_config.yaml"
SECTION = "model"
MAX_RUN_CONFIG = 1 << 24

ENTRY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_][A-Za-z0-9_]*):(?: +(?P<value>\S.*))?")
ITEM = re.compile(r"(?P<indent> *)-(?: +(?P<value>\S.*))?")
TARGET = "_target_"
SILU = ("silu", "swiglu")

RENAMED = {
    "num_moe_experts": "num_experts",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
OLDER_SCALING = "old_context_len"
"""Older providers of Llama 3 always scale, by ``scale_factor``."""

WORDS: Mapping[str, Any] = {"null": None, "~": None, "true": True, "false": False}
NUMBER = re.compile(r"[-+]?([0-9]+|[0-9]+\.[0-9]*([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)")
PLAIN = re.compile(r"[A-Za-z0-9_./+-]([A-Za-z0-9_./+ -]*[A-Za-z0-9_./+-])?")


def run_settings(folder: Path, files: Files) -> dict[str, Any]:
    """The arguments that the file in a step's folder stands for; empty without one. Raises CorruptFile for one that is no text."""
    path = folder / RUN_CONFIG
    if not is_file(path):
        return {}
    files.source(path)  # what it says must hold until the end
    with reading(path):
        text = read_small(path, MAX_RUN_CONFIG).decode(errors="replace")
    model = section(text, SECTION)
    return {**as_arguments(model), RUN_CONFIG: True}


def with_settings(arguments: Mapping[str, Any], folder: Path, files: Files) -> dict[str, Any]:
    """The arguments of a run, and what `run_settings` says, which Megatron-Bridge trained with."""
    settings = run_settings(folder, files)
    if not arguments:
        return settings
    return {**arguments, **{name: value for name, value in settings.items() if not isinstance(value, Unrepresented)}}


def section(text: str, name: str) -> dict[str, Any]:
    """The entries of one section at the top. What is neither a plain scalar nor a list of them is Unrepresented.

    Of a nested mapping that names a function, which is not called, the name is the value.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.rstrip() == f"{name}:"), None)
    if start is None:
        return {}
    body: list[str] = []
    for line in lines[start + 1 :]:
        if line[:1] not in (" ", "#", "-", "") or line.startswith("---"):
            break
        if line.strip() and not line.lstrip().startswith("#"):
            body.append(line.rstrip())
    return _entries(body)


def _entries(body: list[str]) -> dict[str, Any]:
    first = ENTRY.fullmatch(body[0]) if body else None
    if first is None:
        return {}
    width = len(first["indent"])
    found: dict[str, Any] = {}
    number = 0
    while number < len(body):
        fields = ENTRY.fullmatch(body[number])
        number += 1
        if fields is None or len(fields["indent"]) != width:
            continue
        nested: list[str] = []
        while number < len(body) and _belongs(body[number], width):
            nested.append(body[number])
            number += 1
        key = fields["key"]
        # A key that is there twice has no value that everyone reads.
        found[key] = Unrepresented("a value twice") if key in found else _value(fields["value"], nested)
    return found


def _belongs(line: str, width: int) -> bool:
    """Whether a line is part of the value of an entry with some indentation; items of a list may have the entry's own."""
    indent = len(line) - len(line.lstrip(" "))
    return indent > width or (indent == width and ITEM.fullmatch(line) is not None)


def _value(text: str | None, nested: list[str]) -> Any:
    if text is not None and not nested:
        return _flow(text) if text.startswith("[") else _scalar(text)
    if text in (None, "!!python/tuple"):
        items = [ITEM.fullmatch(line) for line in nested]
        if nested and all(item is not None and item["value"] is not None for item in items):
            return _all_plain([_scalar(item["value"]) for item in items if item is not None])
        if text is None and not nested:
            return None
        inner = _entries(nested) if text is None else {}
        if isinstance(inner.get(TARGET), str) and inner.get("_call_") is False:
            return inner[TARGET]
    return Unrepresented("a nested value")


def _flow(text: str) -> Any:
    """A list in brackets."""
    if not text.endswith("]"):
        return Unrepresented("a nested value")
    inner = text[1:-1].strip()
    return _all_plain([_scalar(part.strip()) for part in inner.split(",")]) if inner else []


def _all_plain(values: list[Any]) -> Any:
    return Unrepresented("a nested value") if any(isinstance(value, Unrepresented) for value in values) else values


def _scalar(text: str) -> Any:
    text = re.sub(r"\s+#.*", "", text)
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[-+]?[0-9]{1,18}", text) else float(text)
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            return json.loads(text)
        except ValueError:
            return Unrepresented("a quoted value")
    return text if PLAIN.fullmatch(text) else Unrepresented("a value of another kind")


def as_arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model's config under the names of Megatron-LM's arguments, where these differ."""
    found = {RENAMED.get(name, name): value for name, value in model.items()}
    derived: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
        "group_query_attention": ("num_query_groups", lambda value: value is not None),
        "untie_embeddings_and_output_weights": ("share_embeddings_and_output_weights", lambda value: not value),
    }
    for name, (source, made) in derived.items():
        if source in model:
            held = model[source]
            found[name] = held if isinstance(held, Unrepresented) else made(held)
    if "gated_linear_unit" in model:
        found["swiglu"] = _gated_silu(model["gated_linear_unit"], model.get("activation_func", Unrepresented("no value")))
    if OLDER_SCALING in model and "scale_factor" in model:
        found |= {"use_rope_scaling": True, "rope_scaling_factor": model["scale_factor"]}
    if model.get("should_pad_vocab") is not True:
        # The size may be that of the padded vocabulary.
        found.pop("vocab_size", None)
    return found


def _gated_silu(gated: Any, function: Any) -> Any:
    """Whether the activation is a gated silu, as far as it is said."""
    if gated is False or not isinstance(function, str):
        return False if gated is False else Unrepresented("a function")
    return function.rsplit(".", 1)[-1] in SILU
