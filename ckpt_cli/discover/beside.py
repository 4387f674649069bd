"""What is left out beside the tensors of a component: extra state of modules, and files with other weights. All of it is said."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import files_in, is_folder
from ckpt_cli.files.manifest import read_manifest
from ckpt_cli.formats.safetensors.folder import OPTIMIZER, SINGLE, safetensors_part
from ckpt_cli.formats.safetensors.shards import SHARD
from ckpt_cli.formats.training_state_names import is_state_file
from ckpt_cli.hub.assets import AUXILIARY
from ckpt_cli.names import few, is_extra_state
from ckpt_cli.tensors.component import Component, Note

SAME_WEIGHTS = re.compile(
    r"(consolidated|pytorch_model|tf_model|flax_model|rust_model|model|diffusion_pytorch_model)([._-].*)?\.[a-z0-9_]+|.*\.(gguf|onnx|h5|msgpack|ot)",
    re.ASCII | re.IGNORECASE,
)
"""Names that the weights of one model have in other forms: half precision, other libraries.

``model.safetensors`` beside an index is none of these: loaders read it instead of the parts.
"""

WEIGHTS = re.compile(
    r"(.*[._-])?(v_?heads?|(value|reward|score|classifier|lm|mtp|medusa|eagle)[._-]?(heads?|model)?|critic|adapters?|adapter_model|lora|ema|"
    r"non_lora_trainables|trainable_params|projectors?|mm_projector|swa|heads?|model|weights)([._-].*)?\.(bin|pt|pth|ckpt|npz)",
    re.ASCII | re.IGNORECASE,
)
"""Names of pickles that hold weights; other pickles in a checkpoint are training state."""

AVERAGED = re.compile(r"(.*[._-])?(ema|swa|averaged?)([._-].*)?", re.ASCII | re.IGNORECASE)


def left_out_notes(found: Found, place: Place, component: Component) -> tuple[Note, ...]:
    """What lies in a component, or beside it, and is not one of its tensors."""
    return (*_extra_state(component), *_other_files(found, place, component))


def _extra_state(component: Component) -> list[Note]:
    states = list(dict.fromkeys(leaf.name for leaf in component.leaves if is_extra_state(leaf.name)))
    if not states:
        return []
    text = f"{few(states, 2)}: extra state of modules (as TransformerEngine keeps it) is no weight, and is left out"
    return [Note("info", "extra-state", text)]


def _other_files(found: Found, place: Place, component: Component) -> list[Note]:
    """Files with weights in the folder of a component that no component is made of. Beside a single file anything may lie."""
    if not is_folder(place.match.root):
        return []
    used = {os.path.abspath(path) for other in found.places for path in other.match.files} | set(map(os.path.abspath, component.files))
    folders = dict.fromkeys((place.match.root, place.home))
    used |= {os.path.abspath(folder / name) for folder in folders for name in _merged_before(folder)}
    names = [path.name for folder in folders for path in files_in(folder, _holds_weights) if os.path.abspath(path) not in used]
    same = [name for name in dict.fromkeys(names) if SAME_WEIGHTS.fullmatch(name) and not AVERAGED.fullmatch(name) and name != SINGLE]
    others = [name for name in dict.fromkeys(names) if name not in same]
    notes = []
    if others:
        text = f"{few(others, 3)} beside the weights of {place.name} {_is(others)} no part of them and {_is(others)} left out"
        notes.append(Note("warning", "other-weights", text))
    if same:
        notes.append(Note("info", "other-weights", f"{few(same, 3)}: weights beside those of {place.name}, which were not looked at"))
    return notes


def _merged_before(folder: Path) -> list[str]:
    """The files that `merge --in-place` added to a checkpoint's folder: its own weights in another form."""
    with contextlib.suppress(CkptError):
        manifest = read_manifest(folder)
        return list(manifest.outputs) if manifest is not None else []
    return []


def _holds_weights(name: str) -> bool:
    if is_state_file(name) or name in (OPTIMIZER, AUXILIARY) or safetensors_part(name) or SHARD.fullmatch(name):
        return False
    if name.endswith(".safetensors") or WEIGHTS.fullmatch(name) is not None:
        return True
    return SAME_WEIGHTS.fullmatch(name) is not None and _is_other(name)


def _is_other(name: str) -> bool:
    """Whether a name with one of the usual stems is that of weights, and not that of a config."""
    return name.endswith((".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".ot"))


def _is(names: Iterable[str]) -> str:
    return "is" if len(list(names)) == 1 else "are"
