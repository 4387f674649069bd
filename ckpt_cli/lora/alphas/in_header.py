"""PEFT's config in the header of a file of adapters, where diffusers keeps it: ``lora_adapter_metadata``, in `HEADER_KEY`.

A pipeline's file has the adapters of each of its models behind that model's name, and so are the entries called
(``transformer.lora_alpha``; diffusers, ``loaders/lora_base.py``); that of a model alone has neither (``loaders/peft.py``).
Without such an entry diffusers takes alpha = r (``get_peft_kwargs``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError, CorruptFile, reading
from ckpt_cli.files.folders import files_in
from ckpt_cli.files.safetensors_file import parse_json, read_header
from ckpt_cli.files.source import Files
from ckpt_cli.names import few

HEADER_KEY = "lora_adapter_metadata"
SUFFIX, USUAL = ".safetensors", "pytorch_lora_weights"
"""How such a file ends, and how diffusers calls it, if the user does not."""

ALPHA = "lora_alpha"


@dataclass(frozen=True, slots=True)
class HeaderConfig:
    """What the header of a file called ``name`` says of adapters: the ``config``, and the ``lead`` in front of all their names.

    ``unusable`` is what is said in place of a config, where there is none for all of them, since they are of several ``models``.
    """

    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    lead: str = ""
    unusable: str = ""
    models: int = 0


def header_config(homes: Sequence[Path]) -> HeaderConfig:
    """What the only file of safetensors in the first of these folders says of adapters; of several nothing tells which is meant.

    Raises CorruptFile for what is no config.
    """
    there: list[Path] = []
    with contextlib.suppress(CkptError):  # what cannot be listed is told elsewhere
        there = files_in(homes[0], lambda name: name.endswith(SUFFIX)) if homes else []
    if len(there) != 1:
        return HeaderConfig()
    (path,) = there
    try:
        with Files() as files:
            said = read_header(files.source(path)).metadata.get(HEADER_KEY)
    except CkptError:
        return HeaderConfig()  # a file that is damaged is told where its tensors are read
    if said is not None:
        return _config(path, said)
    none = f"the header of {path.name} says none, for which diffusers takes alpha = r"
    return HeaderConfig(path.name, unusable=none) if path.name.startswith(USUAL) else HeaderConfig()


def _config(path: Path, said: str) -> HeaderConfig:
    with reading(path):
        content = parse_json(said.encode())
        if not isinstance(content, dict):
            raise CorruptFile(f"{HEADER_KEY} in its header is not a JSON object")
    models = [key.removesuffix(ALPHA) for key in content if key == ALPHA or key.endswith(f".{ALPHA}")]
    if len(models) == 1:
        (lead,) = models
        config = {key.removeprefix(lead): value for key, value in content.items() if key.startswith(lead)}
        return HeaderConfig(path.name, config, lead)
    listed = few([f"{lead.removesuffix('.')} {content[f'{lead}{ALPHA}']}" for lead in models])
    what = f"the header of {path.name} has those of {len(models)} models ({listed})" if models else f"the header of {path.name} says none"
    return HeaderConfig(path.name, unusable=what, models=len(models))
