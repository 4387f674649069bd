"""Integers and masks without which the floats beside them mean nothing: an average of such floats needs them to be equal everywhere.

Compressed weights are values and where these belong (``compressed`` and ``bitmask``, ``row_offsets``), centroids and which of them each
weight is (``centroids``, ``indices``), columns in another order (``perm``, ``g_idx``), or heads of a reduced vocabulary (``d2t``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpt_cli.tensors.tensor import Tensor

COUNTED = re.compile(r"(.*_)?(num|n|counts?|counter|steps?|updates?|tracked|seen|tokens|usage|hist(ogram)?|hits|total)(_.+)?|.*_ids")
"""Last parts of names of what training counts, and of positions: it differs from step to step, and no weight is read with it."""

COMPANION = re.compile(
    r"(.*_)?(bit)?masks?|.*idxs?|.*ind(ex|ices)|(.*_)?(inv_?)?perm(utation)?s?|(.*_)?(offsets?|codes?|packed|assignments?|meta)|[a-z]+2[a-z]+"
)
"""Last parts of names of tensors that say what others mean, or where they belong."""

PLAIN = re.compile(r"weight|(?!weight_)(.*_)?bias|running_(mean|var)")
"""Last parts of names of floats that mean something by themselves."""


def leaning(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """The first float that means nothing without a tensor of integers or truth values; None if there is none.

    By its name the tensor says what the floats of its module, and of those below, mean; under any name, what those beside it mean if
    none of them is a plain weight. Counters say nothing of the kind, and neither does one number.
    """
    module, _, leaf = name.rpartition(".")
    tensor = tensors[name]
    if tensor.dtype.kind == "float" or tensor.numel < 2 or COUNTED.fullmatch(leaf):
        return None
    floats = [other for other, held in tensors.items() if held.dtype.kind == "float"]
    beside = [other for other in floats if other.rpartition(".")[0] == module]
    if COMPANION.fullmatch(leaf):
        below = (other for other in floats if not module or other.startswith(f"{module}."))
        return beside[0] if beside else next(below, None)
    plain = any(PLAIN.fullmatch(other.rpartition(".")[2]) for other in beside)
    return beside[0] if beside and not plain else None
