"""What a reader saw and did not use, in any format, and what is said of it: matrices, arrays, statistics, numbers that were trained.

A reader gives the nodes that lie beside its state dicts, by key, and those that it used or named otherwise. Formats that keep tensors in
places of their own, without a pickle around them, describe each with a `Described`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_cli.files.pickle_nodes import Call, Global
from ckpt_cli.formats.torch_files.matrices import Described, NodeSearch, dimensions_of, is_float_number, is_matrix, is_trained, pairs_of
from ckpt_cli.formats.torch_files.state_dict import is_data
from ckpt_cli.formats.training_state_names import is_of_training, is_record_key, is_result_key, is_state_key, is_statistics_key
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

CODE = "beside-weights"

TEXTS = ("U", "S", "O")
"""What names of numpy's dtypes for texts and objects begin with."""

GRAD_SCALER = frozenset({"scale", "growth_factor", "_growth_tracker", "cur_scale", "loss_scale", "loss_scaler"})
"""Keys that the state of torch's GradScaler, apex and DeepSpeed have."""


@dataclass(frozen=True, slots=True)
class Unused:
    """Keys of what was not used: ``needed`` may be needed with the weights, ``numbers`` are single ones of which nothing tells that."""

    needed: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    def __add__(self, other: Unused) -> Unused:
        needed = tuple(dict.fromkeys((*self.needed, *other.needed)))
        return Unused(needed, tuple(key for key in dict.fromkeys((*self.numbers, *other.numbers)) if key not in needed))

    def below(self, prefix: str) -> Unused:
        """The same with the keys above them."""
        return Unused(tuple(f"{prefix}{key}" for key in self.needed), tuple(f"{prefix}{key}" for key in self.numbers))

    @property
    def notes(self) -> list[Note]:
        """A warning, and a note about single numbers, where there are such keys."""
        notes = []
        if self.needed:
            notes.append(Note("warning", CODE, f"left out, since they are beside the state dict: {few(list(self.needed))}"))
        if self.numbers:
            notes.append(Note("info", "numbers-beside", f"single numbers beside the state dict are left out: {few(list(self.numbers))}"))
        return notes


class DataSearch:
    """Looks for what belongs to weights: matrices anywhere, and under keys that speak of nothing else arrays, statistics, parameters.

    ``known``: nodes that are parts of some state dict, ``own`` those of the one that is read.
    """

    def __init__(self, known: Iterable[object] = (), own: Iterable[object] = ()) -> None:
        known = list(known)
        self._matrices = NodeSearch(known, is_matrix, is_state_key)
        self._arrays = NodeSearch(known, _is_array, is_of_training)
        self._numbers = NodeSearch(known, is_float_number, is_of_training)
        self._known = {id(node) for node in known}
        self._own = {id(node) for node in own}

    def keys(self, level: Mapping[Any, Any]) -> list[str]:
        """The keys of a level of a file whose entries hold such numbers; a state dict's own tensors are known."""
        return [str(key) for key, node in level.items() if not is_state_key(key) and self._is_needed(key, node)]

    def unused(self, level: Mapping[Any, Any]) -> Unused:
        """The same, and the keys of single numbers."""
        needed = self.keys(level)
        others = {key: node for key, node in level.items() if isinstance(key, str) and key not in needed and not is_of_training(key)}
        return Unused(tuple(needed), tuple(key for key, node in others.items() if self._numbers.holds(node)))

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
    """Whether a tensor or an array has one dimension or more, or is a parameter; None for what is neither."""
    dimensions = dimensions_of(node)
    if dimensions is not None:
        return dimensions > 0 or is_trained(node)
    return not (_is_scalar(node) or _is_of_texts(node)) if is_data(node) else None


def _is_of_texts(node: object) -> bool:
    """Whether an array of numpy holds texts or objects, such as the names of classes."""
    given = [*node.args, *(node.state if isinstance(node.state, tuple) else ())] if isinstance(node, Call) else []
    dtypes = (each.args[0] for each in given if isinstance(each, Call) and each.is_("numpy", "dtype") and each.args)
    return any(isinstance(dtype, str) and dtype.lstrip("<>|=")[:1] in TEXTS for dtype in dtypes)


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
    return isinstance(node, (int, float, Described)) and not isinstance(node, bool)


def _is_grad_scaler(node: object) -> bool:
    entries = pairs_of(node)
    return entries is not None and (not entries or not GRAD_SCALER.isdisjoint(map(str, entries)))
