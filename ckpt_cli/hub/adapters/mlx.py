"""What mlx-lm saves of a training without LoRA: the whole weights of the layers that it trained, under the names of an adapter.

``mlx_lm.lora --fine-tune-type full`` trains the last ``num_layers`` layers, and no embedding, last norm or head (``lora.py``).
Its adapter_config.json holds the arguments of the training, and no ``peft_type``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.layers.later import CODE
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG, adapter_config
from ckpt_cli.hub.tied_names import EMBEDDINGS
from ckpt_cli.tensors.component import Note

WAY = "--base DIR with --carry-from-base '*' takes the rest from the model that training started from"


def trained_layers(homes: Iterable[Path], names: Iterable[str]) -> str | None:
    """What tensors are, if the adapter_config.json in the first of these folders is one of mlx-lm for whole layers; None otherwise.

    What has an embedding is a model, whatever lies beside it.
    """
    if any(".".join(name.split(".")[-2:]) in EMBEDDINGS for name in names):
        return None
    said: object = None
    with contextlib.suppress(CkptError, json.JSONDecodeError):  # what cannot be read is told where adapters are
        path = adapter_config(homes)
        said = parse_json(read_small(path)) if path is not None else None
    if not isinstance(said, Mapping) or "peft_type" in said or said.get("fine_tune_type") != "full":
        return None
    count = said.get("num_layers")
    which = "the layers"
    if type(count) is int and count > 0:
        which = f"the last {count} layers" if count > 1 else "the last layer"
    return f"{ADAPTER_CONFIG} says fine_tune_type full, as mlx-lm writes it: these are whole weights of {which} alone, and no model"


def trained_layers_notes(homes: Iterable[Path], names: Iterable[str]) -> list[Note]:
    """The same as a warning."""
    text = trained_layers(homes, names)
    return [Note("warning", CODE, f"{text}; {WAY}")] if text is not None else []
