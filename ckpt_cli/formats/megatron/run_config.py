"""What ``run_config.yaml`` of Megatron-Bridge says of the model, under the names of Megatron-LM's arguments.

The file is the dump of nested dataclasses. Of its section ``model`` the plain scalars and lists of them are read, line by line; anything
else has no value. Nothing is built of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import reading
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.source import Files, read_small
from ckpt_cli.files.texts.yaml_text import read_yaml
from ckpt_cli.tensors.plain_values import Unrepresented

RUN_CONFIG = "run_config.yaml"
SECTION = "model"
MAX_RUN_CONFIG = 1 << 24

TARGET = "_target_"
SILU = ("silu", "swiglu")

RENAMED = {
    "num_moe_experts": "num_experts",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
OLDER_SCALING = "old_context_len"
"""Older providers of Llama 3 always scale, by ``scale_factor``."""


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
    after = lines[start + 1 :]
    end = next((number for number, line in enumerate(after) if line[:1] not in (" ", "#", "-", "") or line.startswith("---")), None)
    return {key: _flat(value) for key, value in read_yaml("\n".join(after[:end]), Unrepresented).items()}


def _flat(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return value[TARGET] if isinstance(value.get(TARGET), str) and value.get("_call_") is False else Unrepresented("a nested value")


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
