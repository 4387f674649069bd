"""What the files of a Hugging Face model in safetensors are called."""

from __future__ import annotations

import re
from pathlib import Path

from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.sets.names import PartName, part_name

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX_NAME = re.compile(r"(?P<stem>.+)\.safetensors\.index(?:\.(?P<variant>[^.]+))?\.json")
"""An index, also that of a variant as transformers and diffusers name it: ``model.safetensors.index.ema.json``."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OF_DIFFUSERS = "diffusion_pytorch_model"
"""What diffusers calls the weights of one part of a pipeline, often beside variants of them (``.fp16.safetensors``)."""

ADAPTER_STEM = "adapter_model"
ADAPTER = f"{ADAPTER_STEM}.safetensors"
"""What PEFT calls the weights of an adapter."""

EMA = "ema.safetensors"
"""How BAGEL names its averaged weights, alone or beside the others."""

OPTIMIZER = "optimizer.safetensors"
"""What `extract-state` writes: no model."""


OF_ACCELERATE = re.compile(r"random_states_[0-9]+\.pkl", re.ASCII)
"""What accelerate's ``save_state`` leaves beside the weights of every save."""

NEXT_MODEL = re.compile(r"(model_(?P<safe>[1-9][0-9]{0,8})\.safetensors|pytorch_model_(?P<torch>[1-9][0-9]{0,8})\.bin)", re.ASCII)
"""How accelerate calls the second and further models of a save (``checkpointing.py``, ``save_accelerator_state``)."""


def next_models(folder: Path, suffix: str, there: Folders) -> dict[int, Path]:
    """The files with this suffix of models that accelerate saved beside the first, by number; empty where it saved nothing."""
    found = {number: path for path in there.files(folder, lambda name: name.endswith(suffix)) if (number := model_number(path.name))}
    return dict(sorted(found.items())) if found and there.files(folder, OF_ACCELERATE.fullmatch) else {}


def model_number(name: str) -> int:
    """Which model of a save a file holds, by the names of accelerate: 0 for the first, and for all other names.

    >>> [model_number(name) for name in ("model.safetensors", "model_2.safetensors", "pytorch_model_1.bin")]
    [0, 2, 1]
    """
    fields = NEXT_MODEL.fullmatch(name)
    return int(fields["safe"] or fields["torch"]) if fields is not None else 0


def is_index(name: str) -> bool:
    return INDEX_NAME.fullmatch(name) is not None


def safetensors_part(name: str) -> PartName | None:
    """What the name of a part in safetensors says; None for other names."""
    part = part_name(name)
    return part if part is not None and part.suffix == SUFFIX else None


def is_whole(name: str) -> bool:
    part = safetensors_part(name)
    return part is None or part.parts == 1


def stem_of(name: str) -> str:
    """What parts of a model, its index and its only file have in common, as "model": the name of the component in them.

    >>> [stem_of(name) for name in ("model.ema-00001-of-00002.safetensors", "model.safetensors.index.ema.json", "ema.safetensors")]
    ['model.ema', 'model.ema', 'ema']
    """
    if (index := INDEX_NAME.fullmatch(name)) is not None:
        return ".".join(part for part in index.group("stem", "variant") if part)
    part = safetensors_part(name)
    return part.stem if part else name.removesuffix(SUFFIX)
