"""What the headers of safetensors files say besides tensors, on its way into those of an output.

Loaders read it: torchao keeps there how codes become tensors again, ComfyUI which layers are quantised, others the config of a model
(``__metadata__`` of the format, a map of strings). It stays true as long as the tensors are those of the source, by name and dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckpt_cli.hub.classes.absent.names_in_header import other_names
from ckpt_cli.lora.alphas.in_header import HEADER_KEY
from ckpt_cli.names import few
from ckpt_cli.output.plan import OutputTensor, Plan
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def carried_metadata(metadata: Mapping[str, str], stored: Mapping[str, Tensor], plan: Plan) -> tuple[dict[str, str], list[Note]]:
    """What an output says besides tensors, and a note about what it does not; ``stored`` are the tensors of the source."""
    if not metadata or all(_is_as_stored(output, stored.get(output.name)) for output in plan.tensors):
        return dict(metadata), []
    names = other_names(metadata, stored)  # true as long as the tensors that they are of have their names
    same = {output.name for output in plan.tensors if output.name in stored and output.tensor.pieces == stored[output.name].pieces}
    kept = {key: value for key, value in names.items() if value in same and not any(output.name == key for output in plan.tensors)}
    # Adapters were fused, or have it in a file.
    metadata = {key: value for key, value in metadata.items() if key not in names and key != HEADER_KEY}
    if not metadata:
        return kept, []
    about = [key for key, value in metadata.items() if _is_about(key, value, stored)]
    lost = few(about or list(metadata))
    text = f"the headers of the source say more of its tensors ({lost}), which is not written: names, dtypes or values of the output differ"
    return kept, [Note("warning" if about else "info", "header-metadata", text)]


def _is_as_stored(output: OutputTensor, stored: Tensor | None) -> bool:
    same = stored is not None and output.combination is None and not output.is_cast
    return same and stored is not None and output.tensor.pieces == stored.pieces


def _is_about(key: str, value: str, tensors: Iterable[str]) -> bool:
    """Whether an entry of a header names a tensor, or a module of one: as its key, or quoted in its value."""
    said = {key, *QUOTED.findall(value)}
    return any(name in said or any(part in said for part in _above(name)) for name in tensors)


def _above(name: str) -> list[str]:
    """The modules that a tensor lies in, but for the outermost, whose names are words; and the name before a suffix of codes."""
    parts = name.split(".")
    modules = [".".join(parts[:end]) for end in range(2, len(parts))]
    leaf = parts[-1].split("_")
    return modules + [".".join((*parts[:-1], "_".join(leaf[:end]))) for end in range(1, len(leaf))]
