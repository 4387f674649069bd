"""One file's state dict: which entries are tensors, which are something else, and what must not be overlooked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, Unsupported, reading
from ckpt_cli.formats.dtensor import Local, LocalReader
from ckpt_cli.model import Leaf
from ckpt_cli.names import check_name, is_extra_state
from ckpt_cli.pickle_nodes import Call, Persistent, as_dict, describe

MAX_DEPTH = 8
MAX_NODES = 100_000


def read_state(entries: Mapping[Any, Any], reader: LocalReader, path: Path) -> tuple[dict[str, Local], tuple[Leaf, ...]]:
    """The tensors of a state dict, and its other entries as inert leaves; extra state of modules is one of these, whatever it holds.

    Raises Unsupported for an entry that is no tensor but holds some (a nested dict, an object of an unknown class): to
    leave it out would lose weights. Raises CorruptFile if there is no tensor at all.
    """
    held: dict[str, Local] = {}
    leaves: list[Leaf] = []
    for name, node in entries.items():
        checked = check_name(name)
        if is_extra_state(checked):
            leaves.append(Leaf(checked, describe(node)))
            continue
        with reading(path, tensor=checked):
            local = reader.read(node)
            if local is not None:
                held[checked] = local
                continue
            if holds_storage(node):
                raise Unsupported(
                    f"this entry is no tensor but holds tensors: {describe(node)}",
                    expected="a flat dict of tensors",
                    hint="save the state dict that is in it on its own",
                )
        leaves.append(Leaf(checked, describe(node)))
    _refuse_flat_parameters(held)
    if not held:
        raise CorruptFile("the state dict holds no tensor", expected="a dict of tensors")
    return held, tuple(leaves)


def _refuse_flat_parameters(held: Mapping[str, Local]) -> None:
    """FSDP's LOCAL_STATE_DICT: flat vectors without the names and shapes of what is in them."""
    flat = next((name for name in held if name.endswith("_flat_param")), None)
    if flat is not None:
        raise Unsupported(
            "these are flat parameters of FSDP (LOCAL_STATE_DICT): names and shapes of what is in them are not recorded",
            tensor=flat,
            expected="a SHARDED or FULL state dict",
            hint="load it once in the training script and save with SHARDED_STATE_DICT",
        )


def holds_storage(node: object) -> bool:
    """Whether a storage of tensors hangs anywhere below a node, within bounds."""
    pending, seen = [(node, 0)], 0
    while pending:
        current, depth = pending.pop()
        seen += 1
        if isinstance(current, Persistent):
            return True
        if depth >= MAX_DEPTH or seen > MAX_NODES:
            continue
        below: list[Any] = []
        if isinstance(current, Call):
            below = [*current.args, current.state, *(current.items or ()), *(current.pairs or {}).values()]
        elif (mapping := as_dict(current)) is not None:
            below = list(mapping.values())
        elif isinstance(current, (list, tuple)):
            below = list(current)
        pending += [(child, depth + 1) for child in below]
    return False
