"""Whether weights beside step folders are a model of their own: the final model of a training, or a stray file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ckpt_cli.discover.beside.models import comparison_with_form
from ckpt_cli.discover.found import Target
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import Files, read_small
from ckpt_cli.formats.base import Match, ReadOptions
from ckpt_cli.formats.registry import describe, format_of, recognise
from ckpt_cli.formats.safetensors.leftovers import leftover_text
from ckpt_cli.formats.safetensors.names import is_index
from ckpt_cli.hub.assets import CONFIG
from ckpt_cli.hub.beside.model_config import no_model_config
from ckpt_cli.hub.layers.counts import layer_count, may_loop
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG
from ckpt_cli.tensors.component import Component, Note

NUMBER = re.compile(r"(?:^|\.)([0-9]{1,6})(?=\.)", re.ASCII)
USUAL = re.compile(
    r"(diffusion_)?(pytorch_)?model\.(safetensors|bin)(\.index\.json)?|(ema|adapter_model)\.(safetensors|bin|pt)", re.ASCII | re.IGNORECASE
)
"""Names under which loaders look for a model."""


def stray_files(folder: Path, matches: Sequence[Match]) -> tuple[str, str] | None:
    """The name of weights right in a run's folder that are no model, and why not; None if they are one, or other than single files.

    Trainers write the last model with its config beside the step folders. A file without a config, or without the layers that
    the config counts, is something else: whoever passes the folder means the steps.
    """
    if not matches or any(format_of(match).is_sharded or match.first.parent != folder for match in matches):
        return None
    main = matches[0]
    name = main.first.name
    if main.lists_nothing:
        return name, leftover_text(main.first) if main.first.suffix == ".json" else "it holds no tensor"
    if name.startswith("adapter_model."):
        return None if is_file(folder / ADAPTER_CONFIG) else (name, f"there is no {ADAPTER_CONFIG} beside it")
    if not is_file(folder / CONFIG) or no_model_config(folder / CONFIG) is not None:
        # BAGEL has a config per part.
        return None if is_file(folder / "llm_config.json") else (name, f"there is no {CONFIG} beside it")
    try:
        config: Any = parse_json(read_small(folder / CONFIG))
        layers = layer_count(config) if isinstance(config, dict) and not may_loop(config) else None
        if main.trouble is not None:
            return None
        if not layers:
            return None if USUAL.fullmatch(name) else (name, f"nothing says that it is the model of {CONFIG}")
        with Files() as files:
            names = describe(main, files, ReadOptions()).tensors
    except CkptError:
        return None  # a model that cannot be read is refused, and no other takes its place
    if any(int(number) == layers - 1 for each in names for number in NUMBER.findall(each)):
        return None
    return name, f"it lacks the {layers} layers of {CONFIG}"


def stray_notes(target: Target) -> list[Note]:
    """What is said about a weights file beside the steps that is no model, which does not hide them; it was compared with nothing."""
    return [Note("warning", "stray-weights", _stray_text(*target.stray))] if target.stray is not None else []


def compared_stray_notes(target: Target, components: Iterable[Component], files: Files) -> list[Note]:
    """The same where ``components`` were read: DeepSpeed's ``save_16bit_model`` writes such a file, of the same weights as the model."""
    model = next((component for component in components if component.name == "model"), None)
    if target.stray is None or model is None:
        return stray_notes(target)
    match = next((match for match in recognise(target.path / target.stray[0]) if match.trouble is None), None)
    if match is None:
        return stray_notes(target)
    comparison = comparison_with_form(match, model.tensors, {}, files)
    return [Note(comparison.level, "stray-weights", f"{_stray_text(*target.stray)}; {comparison.text}")]


def _stray_text(name: str, why: str) -> str:
    text = f"{name} beside the step folders is not read, since {why}"
    return text if is_index(name) and "lists" in why else f"{text}: the steps are used; to read it, pass the file itself"
