"""One file's state dict: which entries are tensors, which are something else, and what must not be overlooked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, Undecidable, Unsupported, reading
from ckpt_cli.formats.dtensor import Local, LocalReader
from ckpt_cli.model import Leaf
from ckpt_cli.names import check_name, few
from ckpt_cli.pickle_nodes import Call, Persistent, as_dict, describe

MAX_DEPTH = 8
MAX_NODES = 100_000
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
        if inner is None:
            inner = sole_group(entries, reader)
        elif _is_state_dict(entries, reader):
            inner = None
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
    if all(as_dict(node) is None for node in entries.values()) or _is_state_dict(entries, reader):
        return None
    sizes: dict[Any, int] = {}
    loose = 0
    for key, node in entries.items():
        inner = as_dict(node)
        if inner is not None and not NO_GROUP.fullmatch(str(key)):
            sizes[key] = sum(_elements(reader.read(value)) for value in inner.values())
        elif inner is None:
            loose += _elements(reader.read(node))
    groups = [key for key, size in sizes.items() if size > loose]
    if len(groups) > 1:
        raise Undecidable(
            f"several groups of tensors could be the model: {few([str(key) for key in groups])}",
            expected="one of them",
            hint="save the one that is meant on its own",
        )
    return groups[0] if groups else None


def _is_state_dict(entries: Mapping[Any, Any], reader: LocalReader) -> bool:
    """Whether a matrix has the name of a module's weight: what lies beside groups is a state dict as well."""
    named = (node for key, node in entries.items() if "." in str(key) and as_dict(node) is None)
    return any((local := reader.read(node)) is not None and len(local.shape) > 1 for node in named)


def _elements(local: Local | None) -> int:
    return 0 if local is None else math.prod(local.shape)


def read_state(entries: Mapping[Any, Any], reader: LocalReader, path: Path) -> tuple[dict[str, Local], tuple[Leaf, ...]]:
    """The tensors of a state dict, and its other entries as inert leaves.

    Raises Unsupported for an entry that is no tensor but holds some (a nested dict, an object of an unknown class): to
    leave it out would lose weights. Raises CorruptFile if there is no tensor at all.
    """
    held: dict[str, Local] = {}
    leaves: list[Leaf] = []
    for name, node in entries.items():
        checked = check_name(name)
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
    flat = next((name for name in held if FLAT_PARAMETER.fullmatch(name)), None)
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
