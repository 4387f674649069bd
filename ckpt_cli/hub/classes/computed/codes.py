"""Matrices of integers in the place of a weight, and the floats that such codes mean nothing without, wherever their library puts these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from ckpt_cli.tensors.tensor import Tensor

COUNTERS = re.compile(r"num_batches_tracked|(.+_)?(position|token_type)_ids|.*_num_updates")
COUNTS = re.compile(rf"{COUNTERS.pattern}|relative_position_index|tid2eid|.*idxs?|.*ind(ex|ices)|.*mask")
"""Last parts of names of counters and lookup tables: the only tensors of classes that are not floats, except masks.

Under the names of tables, quantised weights have their codes too.
"""

LATTICE = re.compile(r"Qidxs.*")
"""What QuIP# calls its codes."""

SCALES = re.compile(
    r"(.*_)?(w?[ct]?scales?|scale_inv|scale_[0-9]+|zeros?|qzeros|zero_point|absmax|amax|scb|g_idx|quant_map|quant_state.*)", re.IGNORECASE
)
"""Last parts of names of tensors without which quantised weights mean nothing."""

PLAIN = re.compile(r"weight|(.*_)?bias|running_(mean|var)")
"""Last parts of names of floats that mean something by themselves."""

MOST_BITS = 32
"""Wider integers are counters and tables more often than codes: beside these, only what is called a scale is one."""


def scaled_codes(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Matrices of integers -> the floats that scale them: beside them, in modules below, or in the module around that of the codes.

    Where no weight of floats is beside codes of at most 32 bits, floats of any name are their scales (``B`` and ``s`` of Marlin);
    elsewhere their names tell. Tables and counters have none, by their own names.
    """
    coded = [name for name, tensor in tensors.items() if _may_be_codes(name, tensor)]
    if not coded:
        return {}
    floats: dict[str, list[str]] = {}
    below: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "float":
            module = _module(name)
            floats.setdefault(module, []).append(name)
            while SCALES.fullmatch(_leaf(name)) and module:
                module = _module(module)
                below.setdefault(module, []).append(name)
    found = {name: list(dict.fromkeys(_scales_of(name, tensors[name], floats, below))) for name in coded}
    return {name: scales for name, scales in found.items() if scales}


def is_table(name: str) -> bool:
    """Whether integers count something or are a lookup table, and no codes, by the last part of their name."""
    leaf = _leaf(name)
    return COUNTS.fullmatch(leaf) is not None and LATTICE.fullmatch(leaf) is None


def _may_be_codes(name: str, tensor: Tensor) -> bool:
    return tensor.dtype.kind == "int" and len(tensor.shape) > 1 and tensor.numel > 1 and not is_table(name)


def _scales_of(name: str, tensor: Tensor, floats: Mapping[str, list[str]], below: Mapping[str, list[str]]) -> Iterator[str]:
    """The scales of codes, of ``floats`` by their module; ``below``: those that are called scales by the modules around their own."""
    module = _module(name)
    beside = floats.get(module, [])
    if any(_leaf(other) == "weight" for other in beside):
        return  # the weight of this module are floats
    if tensor.dtype.bits <= MOST_BITS or LATTICE.fullmatch(_leaf(name)):
        yield from (other for other in beside if not PLAIN.fullmatch(_leaf(other)))
    else:
        yield from _called_scales(beside)
    if _leaf(name).endswith("weight") and module:
        yield from below.get(module, ())
    around = floats.get(_module(module), []) if module and not beside else []
    if not any(_leaf(other) == "weight" for other in around):
        yield from _called_scales(around)


def _called_scales(names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if SCALES.fullmatch(_leaf(name)))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
