"""One file's state dict: which entries are tensors, which are something else, and what must not be missed."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, Unsupported, reading
from ckpt_cli.files.folders import is_folder
from ckpt_cli.files.pickle_nodes import Call, Global, Persistent, as_dict, below, describe
from ckpt_cli.formats.rank_files.dtensor import Local, LocalReader
from ckpt_cli.formats.torch_files.matrices import NodeSearch, is_optimizer
from ckpt_cli.formats.training_state_names import is_of_training
from ckpt_cli.names import check_name, few, is_extra_state
from ckpt_cli.tensors.component import Leaf, Note
from ckpt_cli.tensors.plain_values import NUMPY_CORES

MAX_SETTING = 4096
"""Bytes of an entry that may be a setting; more are data."""

NUMPY_VALUES = (
    *((module, name) for module in NUMPY_CORES for name in ("_reconstruct", "scalar")),
    *((module, "_frombuffer") for module in ("numpy.core.numeric", "numpy._core.numeric")),
)
"""What rebuilds numpy's arrays and scalars; the last is that of pickles with protocol 5."""

REFERENCES = frozenset({"TensorReference", "_InternalTensorReference"})
"""What torch_xla's xser and neuronx-distributed put in the place of a tensor."""

PARAMETER = re.compile(r".+\.(weight|bias)")
"""How the names of most parameters end."""

FLAT_PARAMETER = re.compile(r"(.*\.)?(_?flat_param(_[0-9]+)?|.*_flat_param)")
"""What FSDP and fairscale call a module's parameters in one vector."""


def read_state(entries: Mapping[Any, Any], reader: LocalReader, path: Path) -> tuple[dict[str, Local], tuple[Leaf, ...]]:
    """The tensors of a state dict, and its other entries as inert leaves; extra state of modules is one of these, whatever it holds.

    Raises Unsupported for an entry that is not a tensor but holds some (a nested dict, an object of an unknown class), or one of an
    unknown kind: leaving it out would lose weights. Raises CorruptFile if there is no tensor at all.
    """
    search, arrays = StorageSearch(), array_search()
    held: dict[str, Local] = {}
    leaves: list[Leaf] = []
    for name, node in entries.items():
        checked = check_name(name)
        if is_extra_state(checked):
            leaves.append(Leaf(checked, describe(node), file=path))
            continue
        with reading(path, tensor=checked):
            local = reader.read(node)
            if local is not None:
                held[checked] = local
                continue
            unknown = _unknown_tensor(node)
            if unknown is not None:
                raise Unsupported(
                    f"this entry is a tensor built by {unknown}, which is unknown",
                    expected="tensors of torch, as state_dict() gives them",
                    hint="save it again as a plain tensor; a newer version of ckpt may read it",
                )
            if search.holds(node):
                holding = [each for each in entries.values() if search.holds(each)]
                if is_optimizer(entries) or all(is_optimizer(as_dict(each) or {}) for each in holding):
                    text = "the file holds the state of an optimizer, and no weights of a model"
                    raise Unsupported(text, expected="the file with the weights of the model")
                raise Unsupported(
                    f"this entry is not a tensor but holds tensors: {describe(node)}",
                    expected="a flat dict of tensors",
                    hint="save the state dict inside it on its own",
                )
        leaves.append(replace(leaf_of(checked, node, arrays), file=path))
    _refuse_flat_parameters(held)
    if not held:
        _refuse_references(entries, path)
        if any(map(is_array, entries.values())):
            raise Unsupported(
                "the state dict holds arrays of numpy in place of tensors", expected="tensors, as torch.from_numpy makes them"
            )
        raise CorruptFile("the state dict holds no tensor", expected="a dict of tensors")
    return held, tuple(leaves)


def _refuse_references(entries: Mapping[Any, Any], path: Path) -> None:
    """Raise Unsupported for a file whose tensors are in files of their own: ``<name>.tensors/tensor_0.pt`` and so on."""
    targets = (node.target for node in entries.values() if isinstance(node, Call) and isinstance(node.target, Global))
    classes = {target.name.rpartition(".")[2] for target in targets}
    if classes & REFERENCES:
        folder = path.with_name(f"{path.name}.tensors")
        where = f"in {folder.name}/" if is_folder(folder) else f"in {folder.name}/, which is not here"
        raise Unsupported(
            f"the tensors of {path.name} are in files of their own (xser of torch_xla), {where}",
            expected="a state dict with the tensors in it",
            hint="save it without xser (neuronx-distributed: use_xser=False), or load it with torch_xla and save that with torch.save",
        )


def array_search() -> NodeSearch:
    """What looks for arrays of numpy below entries that are no tensors."""
    return NodeSearch((), lambda node: is_array(node) or None, is_of_training)


def leaf_of(name: str, node: object, arrays: NodeSearch) -> Leaf:
    """An entry that is no tensor and holds none; ``arrays`` is one search for all entries of a pickle."""
    number = isinstance(node, (int, float, complex)) and not isinstance(node, bool)
    parameter = (node is None or number or isinstance(node, (list, tuple))) and PARAMETER.fullmatch(name) is not None
    data = is_data(node) or (not is_of_training(name) and arrays.holds(node))
    return Leaf(name, describe(node), data, number, stands_for_a_parameter=parameter)


def _refuse_flat_parameters(held: Mapping[str, Local]) -> None:
    """FSDP's LOCAL_STATE_DICT: flat vectors without the names and shapes of what is in them."""
    flat = next((name for name in held if "flat_param" in name and FLAT_PARAMETER.fullmatch(name)), None)
    if flat is not None:
        raise Unsupported(
            "these are flat parameters of FSDP (LOCAL_STATE_DICT): names and shapes of what is in them are not recorded",
            tensor=flat,
            expected="a SHARDED or FULL state dict",
            hint="load it once in the training script and save with SHARDED_STATE_DICT",
        )


class StorageSearch:
    """Looks for storages of tensors below nodes of one pickle: exact, and linear in the size of the pickle for all nodes together."""

    def __init__(self) -> None:
        self._clean: set[int] = set()
        """Nodes known to contain none, by identity: their pickle keeps them alive."""

    def holds(self, node: object) -> bool:
        """Whether a node contains a storage at any depth."""
        pending, seen = [node], set()
        while pending:
            current = pending.pop()
            if isinstance(current, Persistent) or (isinstance(current, Call) and current.is_("torch.storage", "_load_from_bytes")):
                return True
            if isinstance(current, (list, tuple, dict, Call)) and id(current) not in self._clean and id(current) not in seen:
                seen.add(id(current))
                pending += below(current)
        self._clean |= seen
        return False


def holds_storage(node: object) -> bool:
    """Whether a node contains a storage of tensors at any depth."""
    return StorageSearch().holds(node)


def is_data(node: object) -> bool:
    """Whether a node is an array or a scalar of numpy, or bytes that may be one: data that is no setting."""
    if isinstance(node, Call) and node.is_("_codecs", "encode") and node.args and isinstance(node.args[0], str):
        # How protocol 2 holds bytes.
        return len(node.args[0]) > MAX_SETTING
    if isinstance(node, (bytes, bytearray)):
        return len(node) > MAX_SETTING
    return isinstance(node, Call) and any(node.is_(module, name) for module, name in NUMPY_VALUES)


def is_array(node: object) -> bool:
    """Whether a node is an array of numpy, and no scalar."""
    return isinstance(node, Call) and isinstance(node.target, Global) and is_data(node) and node.target.name not in ("scalar", "encode")


def _unknown_tensor(node: object) -> str | None:
    """The name of the unknown function that would have built a tensor; None for other nodes."""
    target = node.target if isinstance(node, Call) else None
    if not isinstance(target, Global):
        return None
    named = "rebuild" in target.name.lower() or target.name.endswith(("Tensor", "Parameter", "Storage"))
    return str(target) if named else None


def left_out_notes(leaves: Iterable[Leaf], written: Container[str] = ()) -> tuple[Note, ...]:
    """What is said of entries that are no tensors and so are not written: a warning for data, a note for plain numbers.

    Where a parameter's tensor is expected, by the name, anything else is a warning, unless it is ``written`` from elsewhere.
    """
    leaves = list(leaves)
    instead = {leaf.name: leaf.text for leaf in leaves if leaf.stands_for_a_parameter and leaf.name not in written}
    leaves = [leaf for leaf in leaves if leaf.name not in instead]
    data = list(dict.fromkeys(leaf.name for leaf in leaves if leaf.holds_data))
    numbers = list(dict.fromkeys(leaf.name for leaf in leaves if leaf.is_number))
    notes = []
    if instead:
        told = few([f"{name} ({text})" for name, text in instead.items()], 3)
        notes.append(Note("warning", "left-out", f"{told}: no tensor where the name is that of a parameter; not written"))
    if data:
        notes.append(Note("warning", "left-out", f"{few(data)}: numpy values or bytes, not torch tensors, are not written"))
    if numbers:
        notes.append(Note("info", "left-out", f"{few(numbers)}: plain numbers among the weights are not written"))
    return tuple(notes)
