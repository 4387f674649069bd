"""Tensors that a model works as well without: what it computes anew, what it only counts, and what it never uses."""

from __future__ import annotations

import re

from ckpt_cli.boxes import Shape

BUFFER = re.compile(
    r"(.+\.)?((original_)?inv_freq|(cos|sin)_cached|masked_bias|position_ids|token_type_ids|num_batches_tracked|(\w+_)?num_updates|attn\.bias)",
    re.ASCII,
)
"""What models compute anew, or count, and older files hold. Biases of this name are causal masks if they have four dimensions."""

UNUSED = re.compile(r"(.+\.)?swin\.layernorm\.(weight|bias)|encoder\.pooler\..+", re.ASCII)
"""Of what a class may lack: the last norm of a backbone, of which only the layers before it are used, and the pooler of an encoder
whose decoder reads its last hidden state."""


def is_recomputed(name: str, shape: Shape) -> bool:
    """Whether a tensor holds nothing that the training taught, by its name."""
    return BUFFER.fullmatch(name) is not None and (not name.endswith("attn.bias") or len(shape) == 4)


def is_idle(name: str, shape: Shape) -> bool:
    """Whether a tensor that its class may lack makes no difference where it is not there."""
    return is_recomputed(name, shape) or UNUSED.fullmatch(name) is not None
