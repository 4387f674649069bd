"""A file of DeepSpeed's model states: the weights of the module, and which parameters the optimizer's partitions are made of.

Keys, read in files of DeepSpeed 0.14 to 0.19: ``module`` (name -> tensor; at stage 3 every parameter is an empty placeholder, in a
pipeline it is None), ``buffer_names``, ``param_shapes`` (per group, in the order in which the partitions hold them),
``frozen_param_shapes`` and ``frozen_param_fragments`` (stages 2 and 3, None if frozen parameters were left out), ``shared_params``
(alias -> kept name, only in the file of rank 0), and counters, scheduler and whatever the caller gave, all in the same dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import CorruptFile, Inconsistent, Unsupported, reading
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import StoredTensor, TorchFile, dimensions
from ckpt_cli.formats.deepspeed.names import is_deepspeed_name
from ckpt_cli.formats.rank_files.dtensor import Local, LocalReader
from ckpt_cli.formats.torch_files.state_dict import read_state
from ckpt_cli.names import check_name
from ckpt_cli.tensors.component import Leaf

MODULE = "module"
WEIGHTS = (
    *(MODULE, "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "optimizer"),
    *("universal_checkpoint_info", "num_experts", "ds_autoep_layers", "sparse_tensor_module_names", "ds_config"),
)
"""The keys that speak of weights, of the optimizer or of the setting: everything else is training state."""


@dataclass(frozen=True, slots=True)
class ModelStates:
    """What one file says. ``module`` is None where the weights are in files of layers; ``groups`` is None if nothing is partitioned.

    ``entries`` is everything in the file, as nodes.
    """

    path: Path
    file: TorchFile
    entries: Mapping[Any, Any]
    module: Mapping[str, StoredTensor] | None
    leaves: tuple[Leaf, ...]
    buffers: frozenset[str]
    groups: tuple[Mapping[str, Shape], ...] | None
    frozen: Mapping[str, Shape]
    fragments: Mapping[str, StoredTensor]
    shared: Mapping[str, str]

    def number(self, key: str) -> int | None:
        """A counter or a size; None if the file does not have it."""
        value = self.entries.get(key)
        return value if type(value) is int and value >= 0 else None


def read_model_states(path: Path, files: Files) -> ModelStates:
    """One file of model states. Raises CorruptFile, Unsupported, Inconsistent for a renamed file."""
    file = files.parsed(path, TorchFile)
    with reading(path):
        check_stem(file, path)
        entries = as_dict(file.root)
        if entries is None or MODULE not in entries:
            raise CorruptFile("this is no file of DeepSpeed's model states", expected="a dict with the key module")
        module: dict[str, StoredTensor] | None = None
        leaves: tuple[Leaf, ...] = ()
        if entries[MODULE] is not None:
            held = as_dict(entries[MODULE])
            if held is None:
                raise CorruptFile("the module is no dict of tensors")
            if held:
                local, leaves = read_state(held, LocalReader(file, 0), path)
                module = plain_tensors(local)
            else:
                module = {}
        shapes = entries.get("param_shapes")
        groups = None if shapes is None else tuple(_shapes(group) for group in (shapes if isinstance(shapes, (list, tuple)) else [shapes]))
        frozen = _shapes(entries.get("frozen_param_shapes") or {})
        fragments = {}
        for name, node in _dict(entries.get("frozen_param_fragments") or {}).items():
            stored = file.tensor(node)
            if stored is None:
                raise CorruptFile("a frozen parameter is no tensor", tensor=str(name)[:200])
            fragments[check_name(name)] = stored
        shared = _dict(entries.get("shared_params") or {})
        buffers = entries.get("buffer_names") or []
        if not isinstance(buffers, (list, tuple)):
            raise CorruptFile("the names of the buffers are no list")
        return ModelStates(
            path,
            file,
            entries,
            module,
            leaves,
            frozenset(check_name(name) for name in buffers),
            groups,
            frozen,
            fragments,
            {check_name(alias): check_name(kept) for alias, kept in shared.items()},
        )


def placeholder_twins(states: ModelStates) -> dict[str, str]:
    """Other names at stage 3, as ``shared_params`` has them, from the placeholders in the module.

    ``shared_params`` lacks a module or a parameter that one parent has under two names. torch writes a storage once, however many tensors
    have it, and DeepSpeed gives every parameter a placeholder of its own: two names of one storage are one parameter. (Nothing is concluded
    if parameters that are listed, and hence differ, share one.)
    """
    empty = {name: stored.storage.key for name, stored in (states.module or {}).items() if stored.shape == (0,)}
    listed = [name for shapes in (*(states.groups or ()), states.frozen) for name in shapes if name in empty]
    owners = {empty[name]: name for name in listed}
    if len(owners) < len(listed):
        return {}
    twins = {name: owners[key] for name, key in empty.items() if key in owners and name not in states.buffers}
    return {name: owner for name, owner in twins.items() if name != owner}


def plain_tensors(held: Mapping[str, Local]) -> dict[str, StoredTensor]:
    """Tensors of a module, which are plain ones. Raises Unsupported for distributed tensors."""
    plain = {}
    for name, local in held.items():
        if not isinstance(local, StoredTensor):
            raise Unsupported("distributed tensors in a DeepSpeed save are not known", tensor=name)
        plain[name] = local
    return plain


def check_stem(file: TorchFile, path: Path) -> None:
    """The folder in an archive is called like the file that torch wrote. Raises Inconsistent if that was another part of a save."""
    stem = file.stem
    if stem is not None and stem != path.stem and is_deepspeed_name(f"{stem}.pt"):
        raise Inconsistent(
            f"the file was written as {stem}.pt",
            path=path,
            hint="it may have been renamed or copied over another one: get it again from where it was written",
        )


def _shapes(node: object) -> dict[str, Shape]:
    return {check_name(name): dimensions(shape) for name, shape in _dict(node).items()}


def _dict(node: object) -> Mapping[Any, Any]:
    found = as_dict(node)
    if found is None:
        raise CorruptFile("shapes or names of parameters are no dict", expected="what DeepSpeed writes")
    return found
