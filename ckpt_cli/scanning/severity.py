"""How dangerous a name in a pickle is: expected, unknown or dangerous.

Deny-lists of scanners were passed by modules that they did not list. Here what is *allowed* is listed: names that torch, numpy and
common trainers write. Everything else in Python's standard library is dangerous, whatever it is; of other packages, what is known to
run code or to open files, and everything that is reached through a module in a name with dots. The rest is unknown.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from ckpt_cli.dtypes import BY_STORAGE, BY_TORCH
from ckpt_cli.scanning.trace import EXTENSION, FOLLOWED, Name

Severity = Literal["dangerous", "unknown", "expected"]

NAMES = json.loads((Path(__file__).parent / "names.json").read_text())
"""``expected``: by module, names that were seen in checkpoints, or that pickling values of these kinds writes; none runs what a file says.
``running``: packages, and what in them runs code, loads files or reaches the network, with everything below it. ``anywhere``: parts of
names that are such functions, or lead to them, wherever they are defined or imported. ``modules``: those that others import, so that
they are found there as well. ``gone``: modules of other versions of Python, which must not decide what is dangerous.
"""

STANDARD = frozenset(sys.stdlib_module_names).union(NAMES["gone"])
ALLOWED = {f"{module}.{name}" for module, names in NAMES["expected"].items() for name in names}
ALLOWED |= {f"torch.{name}" for name in (*BY_TORCH, *BY_STORAGE)} | {f"torch.cuda.{name}" for name in BY_STORAGE}
RUNNING = {f"{package}.{name}".strip(".") for package, names in NAMES["running"].items() for name in names}
ANYWHERE, MODULES = frozenset(NAMES["anywhere"]), frozenset(NAMES["modules"])

CLASSES = re.compile(
    r"(accelerate\.utils\.dataclasses|megatron\.core\.(transformer\.(enums|transformer_config)|enums|model_parallel_config)"
    r"|megatron\.core\.optimizer\.optimizer_config|peft\.(utils\.peft_types|tuners\.\w+\.config)"
    r"|transformers\.(integrations\.deepspeed|trainer_pt_utils|trainer_utils|training_args(_seq2seq)?)"
    r"|trl\.trainer\.\w+_config|torch\.distributed\.fsdp\.api|torch\.optim\.(\w+\.)?lr_scheduler|torch\.ao\.quantization\.\w+)\.[A-Z]\w*",
    re.ASCII,
)
"""Classes of settings and enums, in modules of trainers that hold nothing else."""

ONLY: dict[str, Callable[[Any], bool]] = {
    # How a ShardedTensor names the class of its process group (torch/distributed/_shard/sharded_tensor/api.py).
    "builtins.getattr": lambda args: (
        len(args) == 2 and _is(args[0], "torch.distributed._shard.sharded_tensor.api.ShardedTensor") and args[1] == "ProcessGroupState"
    ),
    # The class of None and of other singletons; with three arguments it makes classes.
    "builtins.type": lambda args: len(args) == 1,
    # How protocols before 3 keep bytes; other codecs compute.
    "_codecs.encode": lambda args: len(args) == 2 and args[1] in ("latin1", "latin-1"),
    # A tensor in a pickle that torch.save did not write: the bytes are a file of torch.save, which is followed on its own.
    "torch.storage._load_from_bytes": lambda args: len(args) == 1 and args[0] is FOLLOWED,
}
"""Names that are expected if each of their uses is a call with these arguments, and dangerous otherwise."""


def severity(name: Name) -> Severity:
    """How dangerous it is to look this name up, and to call it as the pickle would."""
    if name.module == EXTENSION or not (name.module or name.name) or name.changed:
        return "dangerous"
    return max((_of_path(name, path) for path in _paths(name)), key=("expected", "unknown", "dangerous").index)


def shown(name: Name) -> str:
    """A name as people know it, also if it is only known when the pickle runs."""
    if name.module == EXTENSION:
        return f"{EXTENSION} {name.name}"
    return f"{name.module}.{name.name}" if name.name or name.module else "(a name that is computed)"


def is_plausible(name: Name) -> bool:
    """Whether both parts could be names in Python: bytes that are no pickle seldom spell any.

    The number of an extension is none: without a call that registers it, every loader fails there.
    """
    return not (name.module or name.name) or all(part.isidentifier() for part in f"{name.module}.{name.name}".split("."))


def _of_path(name: Name, path: str) -> Severity:
    if path in ONLY:
        return "expected" if name.calls and all(isinstance(args, tuple) and ONLY[path](args) for args in name.calls) else "dangerous"
    if path in ALLOWED or CLASSES.fullmatch(path):
        return "expected"
    parts = path.split(".")
    inside = path[len(path) - len(name.name) :].split(".")
    if parts[0] in STANDARD or any(".".join(parts[:count]) in RUNNING for count in range(1, len(parts) + 1)):
        return "dangerous"
    # Loaders of protocol 4 walk along the dots of a name, so a module that was imported somewhere leads to what it holds.
    if any(part in ANYWHERE or part in (MODULES if len(inside) == 1 else STANDARD) for part in inside):
        return "dangerous"
    return "unknown"


def _paths(name: Name) -> Iterator[str]:
    """The name as it is, and as Python 3 calls it if it is one of Python 2: which one a loader takes depends on the protocol."""
    from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

    mapped = NAME_MAPPING.get((name.module, name.name)) or (IMPORT_MAPPING.get(name.module, name.module), name.name)
    if mapped == (name.module, name.name) or name.module not in ("__builtin__", "copy_reg"):
        yield f"{name.module}.{name.name}"
    yield ".".join(mapped)


def _is(value: Any, path: str) -> bool:
    return isinstance(value, Name) and f"{value.module}.{value.name}" == path
