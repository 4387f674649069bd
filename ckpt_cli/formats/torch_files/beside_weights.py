"""What is in a file beside its state dicts and may be needed with the weights: matrices, statistics of what goes in or comes out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_cli.files.pickle_nodes import Call, Global
from ckpt_cli.formats.torch_files.matrices import NodeSearch, dimensions_of, is_matrix, pairs_of
from ckpt_cli.formats.torch_files.state_dict import is_data
from ckpt_cli.formats.training_state_names import is_record_key, is_result_key, is_state_key, is_statistics_key

GRAD_SCALER = frozenset({"scale", "growth_factor", "_growth_tracker", "cur_scale", "loss_scale", "loss_scaler"})
"""Keys that the state of torch's GradScaler, apex and DeepSpeed have."""

MASTERS = frozenset(
    {"fp32_from_fp16", "fp32_from_fp16_params", "fp32_groups_flat", "fp32_groups", "fp32_params", "master_params", "master_weights"}
)
"""Where optimizers of apex and Megatron's like keep the weights in fp32."""

SLOTS = frozenset({"master_param", "master_params", "master_weight", "fp32_param"})
"""What those of TransformerEngine and apex call them in the state of each parameter."""


def masters_beside(levels: Iterable[Mapping[Any, Any]]) -> list[str]:
    """Where the optimizers beside a state dict keep weights of their own: names alone tell, and no order of parameters is known."""
    found = []
    for key, node in ((key, node) for level in levels for key, node in level.items() if is_state_key(key)):
        entries = pairs_of(node) or {}
        states = pairs_of(entries.get("state")) or {}
        slots = pairs_of(next(iter(states.values()), None)) or {}
        found += [f"{key}.{name}" for name in entries if name in MASTERS]
        found += [f"{key}.state.N.{name}" for name in slots if name in SLOTS]
    return list(dict.fromkeys(found))


class DataSearch:
    """Looks for numbers that belong to weights: matrices anywhere, arrays under keys that speak of nothing else, and statistics.

    ``known``: nodes that are parts of some state dict, ``own`` those of the one that is read.
    """

    def __init__(self, known: Iterable[object] = (), own: Iterable[object] = ()) -> None:
        known = list(known)
        self._matrices = NodeSearch(known, is_matrix, is_state_key)
        self._arrays = NodeSearch(known, _is_array, _is_of_training)
        self._known = {id(node) for node in known}
        self._own = {id(node) for node in own}

    def keys(self, level: Mapping[Any, Any]) -> list[str]:
        """The keys of a level of a file whose entries hold such numbers; a state dict's own tensors are known."""
        return [str(key) for key, node in level.items() if not is_state_key(key) and self._is_needed(key, node)]

    def _is_needed(self, key: object, node: object) -> bool:
        if self._matrices.holds(node):
            return True
        if id(node) in self._known or not isinstance(key, str):
            return False
        if is_result_key(key):
            return False
        if is_statistics_key(key):
            return not _is_grad_scaler(node) and _is_given(node) and not self._is_read(node)
        return not is_record_key(key) and self._arrays.holds(node)

    def _is_read(self, node: object) -> bool:
        """Whether all of a node is in the state dict that is read: a file may hold statistics alone."""
        entries = pairs_of(node)
        return bool(entries) and all(id(each) in self._own for each in (entries or {}).values())


def _is_array(node: object) -> bool | None:
    """Whether a tensor or an array has one dimension or more; None for what is neither."""
    dimensions = dimensions_of(node)
    if dimensions is not None:
        return dimensions > 0
    return not _is_scalar(node) if is_data(node) else None


def _is_of_training(key: object) -> bool:
    return is_state_key(key) or is_record_key(key) or is_result_key(key)


def _is_scalar(node: object) -> bool:
    """Whether a node is a scalar of numpy, which a training reports as it does numbers."""
    return isinstance(node, Call) and isinstance(node.target, Global) and node.target.name == "scalar"


def _is_given(node: object) -> bool:
    """Whether there are any numbers: a setting such as ``norm="layer"`` or ``scale=True`` is none."""
    if isinstance(node, Call):
        entries = pairs_of(node)
        if entries is not None:
            return any(map(_is_given, entries.values()))
        return not (isinstance(node.target, Global) and node.target.module in ("builtins", "pathlib", "argparse"))
    if isinstance(node, dict):
        return any(map(_is_given, node.values()))
    if isinstance(node, (list, tuple)):
        return any(map(_is_given, node))
    return isinstance(node, (int, float)) and not isinstance(node, bool)


def _is_grad_scaler(node: object) -> bool:
    entries = pairs_of(node)
    return entries is not None and (not entries or not GRAD_SCALER.isdisjoint(map(str, entries)))
