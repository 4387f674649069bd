"""What tells BAGEL checkpoints apart that hold the same model: the form of the patch embedding, and query and key norms.

BAGEL trains a NaViT: patches come flattened, so SigLIP's convolution [out, channels, height, width] was turned into a linear
layer [out, height * width * channels] (``convert_conv2d_to_linear``, ByteDance-Seed/Bagel, modeling/bagel/siglip_navit.py).
Its language model has query and key norms, and a second set of weights for generation whose names end in ``_moe_gen``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_cli.boxes import Shape

PATCH_EMBEDDING = "patch_embedding.weight"
"""A convolution [out, in, height, width] in SigLIP, a linear layer [out, height * width * in] in BAGEL."""

QK_NORMS = ("q_norm", "k_norm")
MARKS = frozenset({"llm2vae", "vae2llm", "vit_pos_embed", "latent_pos_embed"})
"""First parts of names that no other model has."""

TWIN = "_moe_gen"


def bagel_facts(mine: Mapping[str, Shape], base: Mapping[str, Shape]) -> tuple[tuple[str, str, str], ...]:
    """What the patch embedding and the query and key norms are on both sides: (what, mine, base); nothing if neither is a BAGEL model."""
    if not any(name.split(".")[0] in MARKS for names in (mine, base) for name in names):
        return ()
    return (
        ("patch embedding", _patch_embedding(mine), _patch_embedding(base)),
        ("qk-norm", _norms(mine), _norms(base)),
    )


def _patch_embedding(shapes: Mapping[str, Shape]) -> str:
    found = [shape for name, shape in shapes.items() if name.endswith(PATCH_EMBEDDING)]
    if not found:
        return "none"
    kind = {2: "NaViT linear", 4: "convolution"}.get(len(found[0]), "unknown form")
    return f"{kind} {list(found[0])}"


def _norms(shapes: Mapping[str, Shape]) -> str:
    parts = [part for name in shapes for part in name.split(".")]
    own, twins = sum(part in QK_NORMS for part in parts), sum(part in {norm + TWIN for norm in QK_NORMS} for part in parts)
    if not own and not twins:
        return "none"
    return f"{own} tensors, {twins} of {TWIN}" if twins else f"{own} tensors, none of {TWIN}"
