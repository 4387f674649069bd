"""Empty tensors in place of weights that are elsewhere, as DeepSpeed's ZeRO stage 3 leaves them in a module."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import CorruptFile, Gap
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Component

WEIGHT = re.compile(r"(?!.*lora_[AB])(.*\.)?(weight|\w+_proj|in_proj_weight)", re.DOTALL)
"""Names of tensors that are never empty in a model: matrices of layers, norms, experts. Factors of LoRA are judged by their ranks."""

NOTHING = (0,)
"""The shape of ``torch.empty(0)``; a genuine empty tensor mostly keeps its other dimensions."""


def placeholders(shapes: Mapping[str, Shape]) -> list[str]:
    """The names of tensors that are placeholders for weights; empty for a model whose few empty tensors are its own.

    Those are all tensors where none has an element, otherwise vectors of no elements that have the names of weights, or that are most.
    """
    if shapes and all(0 in shape for shape in shapes.values()):
        return list(shapes)
    vectors = [name for name, shape in shapes.items() if shape == NOTHING]
    if len(vectors) > 1 and len(vectors) * 2 > len(shapes):
        return vectors
    return [name for name in vectors if WEIGHT.fullmatch(name)]


def refuse_placeholders(component: Component) -> None:
    """Raise Gap for a component whose weights are placeholders, CorruptFile for one that has no tensor at all."""
    if not component.tensors:
        raise CorruptFile("the files hold no tensor", path=component.root, expected="weights")
    empty = placeholders({name: tensor.shape for name, tensor in component.tensors.items()})
    if empty:
        raise Gap(
            f"{len(empty)} of {len(component.tensors)} tensors have no elements: {few(empty, 3)}",
            tensor=empty[0],
            path=component.root,
            expected="weights; such empty placeholders are what a model under DeepSpeed ZeRO stage 3 has outside of its forward pass",
            hint="save with stage3_gather_16bit_weights_on_model_save, or use the ZeRO checkpoint (zero_pp_rank_* files) of the same step",
        )
