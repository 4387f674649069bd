"""One file's state dict: which entries are tensors, which are something else, and what must not be overlooked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, Undecidable, Unsupported, reading
from ckpt_cli.formats.dtensor import Local, LocalReader
from ckpt_cli.inert_values import NUMPY_CORES
from ckpt_cli.model import Leaf, Note
from ckpt_cli.names import check_name, few
from ckpt_cli.pickle_nodes import Call, Global, Persistent, as_dict, below, describe

MAX_SETTING = 4096
"""Bytes of an entry that may be a setting; more are data."""

EXTRA_STATE = "_extra_state"
"""What TransformerEngine keeps beside weights: state, no weight."""

MAX_LEVELS = 4

MODEL_KEYS = ("state_dict", "model", "module", "model_state_dict")
EMA_KEYS = ("ema", "ema_model", "model_ema", "ema_state_dict")
NO_GROUP = re.compile(r"optim.*|.*optimizer.*|(lr_)?sched.*|rng.*|.*random.*|dataloader.*|callbacks|loops|(.*_)?ema(_.*)?", re.IGNORECASE)
"""Keys beside a model whose dicts are not the model."""

FLAT_PARAMETER = re.compile(r"(.*\.)?(_?flat_param(_[0-9]+)?|.*_flat_param)")
"""What FSDP and fairscale call a module's parameters in one vector."""


def model_entries(root: object, keys: tuple[str, ...], reader: LocalReader) -> tuple[Mapping[Any, Any], dict[Any, Any]]:
    """The dict of tensors in a file, and what stands beside it: going down through ``keys`` that hold a dict, or the only group.

    Tensors beside such a key (a random state, a loss) do not make a state dict of what is around it. Raises CorruptFile,
    Undecidable.
    """
    above: dict[Any, Any] = {}
    node = root
    for _ in range(MAX_LEVELS):
        entries = as_dict(node)
        if entries is None:
            raise CorruptFile(f"the file holds {describe(node)}, not a state dict", expected="a dict of tensors")
        inner = next((key for key in keys if as_dict(entries.get(key)) is not None), None)
        inner = sole_group(entries, reader) if inner is None else inner
        if inner is None:
            return entries, above
        above |= {key: value for key, value in entries.items() if key != inner}
        node = entries[inner]
    raise CorruptFile("the state dict is nested too deeply")


def sole_group(entries: Mapping[Any, Any], reader: LocalReader) -> Any | None:
    """The key of the only group of tensors in a dict, if it holds more than the loose tensors beside it (a step, a queue).

    None if there is no group, or if the tensors beside it may be the model. Raises Undecidable if there are several groups and
    nothing else.
    """
    if all(as_dict(node) is None for node in entries.values()):
        return None
    sizes: dict[Any, int] = {}
    loose = 0
    for key, node in entries.items():
        inner = as_dict(node)
        if inner is not None and not NO_GROUP.fullmatch(str(key)):
            sizes[key] = sum(_elements(reader.read(value)) for value in inner.values())
        elif inner is None and (local := reader.read(node)) is not None:
            if len(local.shape) > 1 and "." in str(key):
                # A matrix with the name of a module's weight: this level is a state dict as well.
                return None
            loose += _elements(local)
    groups = [key for key, size in sizes.items() if size > loose]
    if len(groups) > 1:
        raise Undecidable(
            f"several groups of tensors could be the model: {few([str(key) for key in groups])}",
            expected="one of them",
            hint="save the one that is meant on its own",
        )
    return groups[0] if groups else None


def _elements(local: Local | None) -> int:
    return 0 if local is None else math.prod(local.shape)


def read_state(entries: Mapping[Any, Any], reader: LocalReader, path: Path) -> tuple[dict[str, Local], tuple[Leaf, ...]]:
    """The tensors of a state dict, and its other entries as inert leaves.

    Raises Unsupported for an entry that is no tensor but holds some (a nested dict, an object of an unknown class), or one of an
    unknown kind: to leave it out would lose weights. Raises CorruptFile if there is no tensor at all.
    """
    search = StorageSearch()
    held: dict[str, Local] = {}
    leaves: list[Leaf] = []
    for name, node in entries.items():
        checked = check_name(name)
        with reading(path, tensor=checked):
            local = reader.read(node)
            if local is not None:
                held[checked] = local
                continue
            unknown = _unknown_tensor(node)
            if unknown is not None:
                raise Unsupported(
                    f"this entry is a tensor that is built by {unknown}, which is not known",
                    expected="tensors of torch, as state_dict() gives them",
                    hint="save it again as a plain tensor; a newer version of ckpt may read it",
                )
            if search.holds(node):
                raise Unsupported(
                    f"this entry is no tensor but holds tensors: {describe(node)}",
                    expected="a flat dict of tensors",
                    hint="save the state dict that is in it on its own",
                )
        leaves.append(Leaf(checked, describe(node), _is_array(node) and not checked.endswith(EXTRA_STATE)))
    _refuse_flat_parameters(held)
    if not held:
        raise CorruptFile("the state dict holds no tensor", expected="a dict of tensors")
    return held, tuple(leaves)


def _refuse_flat_parameters(held: Mapping[str, Local]) -> None:
    """FSDP's LOCAL_STATE_DICT: flat vectors without the names and shapes of what is in them."""
    flat = next((name for name in held if FLAT_PARAMETER.fullmatch(name)), None)
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
        """Nodes below which there is none, by identity: the pickle that they belong to keeps them alive."""

    def holds(self, node: object) -> bool:
        """Whether a storage hangs anywhere below a node, however deep."""
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
    """Whether a storage of tensors hangs anywhere below a node."""
    return StorageSearch().holds(node)


def _is_array(node: object) -> bool:
    """Whether a node is a numpy array, or bytes that may be one: data that is no setting."""
    if isinstance(node, Call) and node.is_("_codecs", "encode") and node.args and isinstance(node.args[0], str):
        # How protocol 2 holds bytes.
        return len(node.args[0]) > MAX_SETTING
    if isinstance(node, (bytes, bytearray)):
        return len(node) > MAX_SETTING
    return isinstance(node, Call) and any(node.is_(module, "_reconstruct") for module in NUMPY_CORES)


def _unknown_tensor(node: object) -> str | None:
    """The name of what would have built a tensor in a way that is not known here; None if it is no such thing."""
    target = node.target if isinstance(node, Call) else None
    if not isinstance(target, Global):
        return None
    named = "rebuild" in target.name.lower() or target.name.endswith(("Tensor", "Parameter", "Storage"))
    return str(target) if named else None


def left_out_notes(leaves: Iterable[Leaf]) -> tuple[Note, ...]:
    """A warning that names entries with data that are no tensors and so are not written."""
    names = list(dict.fromkeys(leaf.name for leaf in leaves if leaf.holds_data))
    if not names:
        return ()
    return (Note("warning", "left-out", f"{few(names)}: no tensors of torch but arrays or bytes, which are not written"),)
