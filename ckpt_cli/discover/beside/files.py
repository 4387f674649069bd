"""What is left out beside the tensors of a component: extra state of modules, and files with other weights. All of it is reported."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from ckpt_cli.discover.beside.models import is_rounded_copy, other_adapter_values, other_values
from ckpt_cli.discover.beside.same_weights import difference_from
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders, files_in, is_folder
from ckpt_cli.files.manifest import read_manifest
from ckpt_cli.files.source import Files
from ckpt_cli.formats.placeholders import holds_nothing
from ckpt_cli.formats.registry import format_of, recognise
from ckpt_cli.formats.safetensors.leftovers import TORCH_INDEX, indexes_of_nothing
from ckpt_cli.formats.safetensors.names import INDEX_SUFFIX, OPTIMIZER, is_index, stem_of
from ckpt_cli.formats.safetensors.shards import SHARD
from ckpt_cli.formats.sets.kinds import AFTER_SUFFIX
from ckpt_cli.formats.sets.names import part_name
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.formats.torch_files.heads import is_head_alone
from ckpt_cli.formats.torch_files.reader import SUFFIXES, unmarked
from ckpt_cli.formats.torch_files.unnamed import are_weights, needed_in_state
from ckpt_cli.formats.training_state_names import is_state_file
from ckpt_cli.formats.weight_names import AVERAGED
from ckpt_cli.hub.adapters.other_kinds import other_adapters
from ckpt_cli.hub.assets import AUXILIARY
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.names import few, is_extra_state, unnumbered
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Component, Note

FOREIGN = (
    *("gguf", "ggml", "onnx", "onnx_data", "h5", "hdf5", "keras", "msgpack", "ot", "pdparams"),
    *("tflite", "mlmodel", "mindir", "engine", "pte", "nemo"),
)
"""Endings of files of other programs, which hold a whole model."""

OTHER_FORM = re.compile(
    r"consolidated([.-][0-9]+(-of-[0-9]+)?)?\.(safetensors|pth)(\.index\.json)?|(tf_model|flax_model|rust_model)([._-].*)?\.[a-z0-9_]+"
    r"|(diffusion_pytorch_model|pytorch_model|model)[._-](fp(8|16|32)|bf16|int[48]|[48]bit|quantized)([._-].*)?\.(safetensors|bin)(\.index\.json)?"
    rf"|.*\.({'|'.join(FOREIGN)})",
    re.ASCII | re.IGNORECASE,
)
"""Names that the weights of one model have in forms for other programs: half precision, other libraries, Mistral's own names."""

MODEL = re.compile(
    r"(diffusion_)?(pytorch_)?model([._-].*)?\.(bin|pt|pth|th|pth\.tar|ckpt|safetensors)(\.index\.json)?"
    r"|((.*[._-])?(checkpoint|ckpt|full_weights|consolidated|weights|last|latest|best|final|(step|iter|iteration|epoch)[._=-]?[0-9]+)[0-9]*([._=-].*)?)"
    r"\.(pt|pth|th|pth\.tar|ckpt|safetensors)"
    r"|consolidated([._-].*)?\.bin",
    re.ASCII | re.IGNORECASE,
)
"""Names of files that could be the model itself, including that of another step."""

WEIGHTS = re.compile(
    r"(.*[._-])?(v_?heads?|(value|reward|score|classifier|lm|mtp|medusa|eagle)[._-]?(heads?|model)?|critic|adapters?|adapter_model|lora|ema|"
    r"non_lora_trainables|trainable_params|projectors?|mm_projector|swa|heads?|model|weights)([._-].*)?\.(bin|pt|pth|th|ckpt|npz)",
    re.ASCII | re.IGNORECASE,
)
"""Names of pickles that hold weights; what others hold decides, unless their names are those of training state."""

FITTED = re.compile(
    r"(.*[._-])?((value|reward|score|classifier|lm|model)[._-]?heads?|heads?|classifier|model|weights)\.(pkl|pickle|joblib|npy)",
    re.IGNORECASE,
)
"""The same of what a library fits after the training, such as the classifier of SetFit; other files of these forms are of anything."""

OF_TRAINER = re.compile(r"(extra_state|train(er)?([._-]state)?|training_state|stats)([._-].*)?\.(pt|pth|bin|pkl)", re.ASCII | re.IGNORECASE)
"""Names of training state in which trainers keep anything; those of optimizers, schedulers, random states and data say what is in them."""

EXPERTS = re.compile(r"([a-z0-9]+[-_.])*experts?[-_.]?(rank[-_.]?)?[0-9]+\.(safetensors|bin|pt|pth|ckpt)", re.ASCII | re.IGNORECASE)
"""Files of experts: ``experts_rank0.pt``, ``expert_1.pt``. They may be of no other model than what lies beside them."""

MOST_LOOKED_INTO = 16


def left_out_notes(found: Found, place: Place, component: Component, assets: Iterable[Path], files: Files) -> tuple[Note, ...]:
    """Notes about what is in a component but is not one of its tensors, and about what is beside it, unless a file of it was passed.

    An adapter is never all of a model: what was trained with it is told of its file too. ``assets`` are passed on with the weights.
    """
    held = (*_extra_state(component), *_other_adapters(component))
    used = {absolute(path) for path in assets} | files.given
    if not found.is_named(place):
        return (*held, *_other_files(found, place, component, used, files))
    if has_adapters(component.tensors):
        return (*held, *_trained_with(place, component, used, files))
    return (*held, *_experts_beside(place, component, used, files))


def could_be_model(name: str) -> bool:
    """Whether a weights file could be the model itself by its name, and not one of its usual other forms.

    >>> [could_be_model(name) for name in ("pytorch_model.bin", "Model.safetensors", "model.fp16.safetensors", "tf_model.h5", "v_head.pt")]
    [True, True, False, False, False]
    """
    name = unmarked(name)
    return not AVERAGED.fullmatch(name) and MODEL.fullmatch(name) is not None and OTHER_FORM.fullmatch(name) is None


def _extra_state(component: Component) -> list[Note]:
    states = list(dict.fromkeys(leaf.name for leaf in component.leaves if is_extra_state(leaf.name)))
    if not states:
        return []
    text = f"{few(states, 2)}: extra state of modules (as TransformerEngine keeps it) is not a weight and is left out"
    return [Note("info", "extra-state", text)]


def _other_adapters(component: Component) -> list[Note]:
    """A warning about adapters that are not fused here."""
    other = other_adapters(component.tensors)
    return [Note("warning", "unfused-adapters", f"{other.text}, which are not fused here")] if other is not None else []


def _trained_with(place: Place, component: Component, used: set[str], files: Files) -> list[Note]:
    """What is said of weights beside the file of an adapter that was passed. Whole models beside it are others, or its base."""
    used = used | {absolute(path) for path in (*place.match.files, *component.files)}
    folders = dict.fromkeys(path.parent for path in place.match.files)
    names = {path.name: path for folder in reversed(folders) for path in weights_in(folder, used, files)}
    heads = [name for name in names if is_head_alone(names[name], Folders())]
    others = [name for name in names if name in heads or not (could_be_model(name) or OTHER_FORM.fullmatch(name))]
    models = [name for name in names if name not in others]
    notes = _told_of_others([names[name] for name in others], place, component, files)
    if models:
        text = f"{few(models, 3)} beside the adapter of {place.name}: by name {_is_a(models)}, not read with it"
        notes.append(Note("info", "other-weights", text))
    return notes


def _experts_beside(place: Place, component: Component, used: set[str], files: Files) -> list[Note]:
    """What is said of files of experts beside a file that was passed, and that holds none itself."""
    if any(".experts." in name for name in component.tensors):
        return []
    used = used | {absolute(path) for path in (*place.match.files, *component.files)}
    folders = dict.fromkeys(path.parent for path in place.match.files)
    beside = [path for folder in folders for path in files_in(folder, EXPERTS.fullmatch) if absolute(path) not in used]
    return _told_of_others(beside, place, component, files)


def _other_files(found: Found, place: Place, component: Component, assets: set[str], files: Files) -> list[Note]:
    """Files with weights in the folder of a component that no component is made of. Beside a single file there may be anything."""
    if not is_folder(place.match.root):
        return []
    used = assets | {absolute(path) for other in found.places for path in other.match.files} | set(map(absolute, component.files))
    used |= set(map(absolute, format_of(place.match).of_save(place.match, Folders())))
    # Other models of the same save are components of their own, also where a file of this one was given.
    used |= {absolute(path) for other in recognise(place.match.root) if other.number != place.match.number for path in other.files}
    folders = dict.fromkeys((place.match.root, place.home))
    paths = {path.name: path for folder in reversed(folders) for path in weights_in(folder, used, files)}
    same = [name for name in paths if OTHER_FORM.fullmatch(name) and not AVERAGED.fullmatch(name)]
    # Beside an average, other forms are those of the model.
    average = is_average_name(unnumbered(place.name)[0])
    unequal = {name: None if average else other_values(paths[name], component.tensors, files) for name in same}
    models = [name for name in paths if could_be_model(name) and not is_head_alone(paths[name], Folders())]
    told = {name: difference_from(paths[name], component.tensors, files) for name in models}
    copies = [name for name, difference in told.items() if difference is None]
    # The masters of an optimizer are the weights of the training before they were rounded.
    unlike = [name for name in told if name not in copies and format_of(place.match).in_tags]
    rounded = [name for name in unlike if is_rounded_copy(paths[name], component.tensors, files)]
    rivals = {name: difference for name, difference in told.items() if difference is not None and name not in rounded}
    rivals |= {name: f"with other values of {values[0]} (samples differ)" for name, values in unequal.items() if values}
    rounded += [name for name, values in unequal.items() if values == []]
    others = [name for name in paths if name not in (*same, *told)]
    same = [name for name in same if unequal[name] is None]
    notes = _in_training_state(folders, place, files)
    notes += _told_of_others([paths[name] for name in others], place, component, files)
    if rivals:
        read = few([path.name for path in component.files], 1)
        # What is said alike of several is said once.
        alike = {text: [name for name, each in rivals.items() if each == text] for text in rivals.values()}
        rival = "; ".join(f"{few(names, 3)} beside it could also be the model, {text}" for text, names in alike.items())
        rival += f"; {'it' if len(rivals) == 1 else 'they'} {_was(rivals)} not used"
        text = f"{read} {_was(component.files)} read for {place.name}; {rival}"
        notes.append(Note("warning", "other-model", text))
    if copies:
        text = f"{few(copies, 3)}: the same weights as {place.name} (samples of all tensors are equal), not read"
        notes.append(Note("info", "other-weights", text))
    if rounded:
        text = f"{few(rounded, 3)}: the same weights as {place.name} in another dtype (samples are equal), not read"
        notes.append(Note("info", "other-weights", text))
    if same:
        notes.append(Note("info", "other-weights", f"{few(same, 3)}: other weights beside {place.name}, not checked"))
    return notes


def _in_training_state(folders: Iterable[Path], place: Place, files: Files) -> list[Note]:
    """Warnings about training state in which averages of the weights or the like are; of all ranks' files, the first tells."""
    alike: dict[str, Path] = {}
    for path in (path for folder in folders for path in files_in(folder, OF_TRAINER.fullmatch)):
        alike.setdefault(re.sub("[0-9]+", "#", path.name), path)
    held = {path.name: keys for path in alike.values() if is_state_file(path.name) and (keys := needed_in_state(path, files))}
    text = f"beside the training state, and not part of {place.name}"
    return [Note("warning", "other-weights", f"{name} holds {few(keys, 3)} {text}: left out") for name, keys in held.items()]


def _told_of_others(paths: Iterable[Path], place: Place, component: Component, files: Files) -> list[Note]:
    """What is said of weights that are no model: those of the same adapter, of another one, and any others."""
    adapters = {path.name: other_adapter_values(path, component.tensors, files) for path in paths}
    same = [name for name, differing in adapters.items() if differing == []]
    others = [name for name, differing in adapters.items() if differing is None]
    notes = []
    if same:
        text = f"{few(same, 3)}: the same adapter as in {place.name} (samples of all tensors are equal), not read"
        notes.append(Note("info", "other-weights", text))
    for name, differing in adapters.items():
        if differing:
            text = f"{name} beside the weights of {place.name} holds its adapter with other values of {few(differing, 2)}, and is left out"
            notes.append(Note("warning", "other-weights", f"{text}: one of them may be of another step"))
    if others:
        text = f"{few(others, 3)} beside the weights of {place.name} {_is(others)} not part of them and {_is(others)} left out"
        notes.append(Note("warning", "other-weights", text))
    return notes


def weights_in(folder: Path, used: Collection[str], files: Files) -> list[Path]:
    """The weights of a folder but those that are ``used``: single files, and indexes in place of the parts that they list.

    Files whose names do not tell are looked into.
    """
    used = {*used, *(absolute(folder / name) for name in _merged_before(folder))}
    lost = indexes_of_nothing(folder, Folders())  # told by `leftover_index_notes`
    indexes = [index for index in files_in(folder, lambda name: is_index(name) or name.endswith(TORCH_INDEX)) if index not in lost]
    listed = {f"{stem_of(index.name)}{INDEX_SUFFIX}" if is_index(index.name) else index.name for index in indexes}
    named = [path for path in files_in(folder, holds_weights) if _index_of(path.name) not in listed] + indexes
    named = [path for path in named if absolute(path) not in used]
    found = [path for path in files_in(folder, _tells_nothing) if absolute(path) not in used and are_weights(path, files)]
    # Of what holds no tensor nothing is lost; where it stands in the place of the model, `empty_file_notes` tells.
    named = [path for path in named if path in indexes or OTHER_FORM.fullmatch(path.name) or holds_nothing(path) is None]
    return named + found


def holds_any_weights(folder: Path, used: Collection[str], files: Files) -> bool:
    """Whether a folder has weights but those that are ``used``, in a form that is read.

    Of files whose names do not tell, one is looked into of those that differ in a number, and of others a few.
    """
    paths = [path for path in files_in(folder, lambda name: _is_named(name) or _tells_nothing(name)) if absolute(path) not in used]
    if any(_is_named(path.name) for path in paths):
        return True
    alike: dict[str, Path] = {}
    for path in paths:
        alike.setdefault(re.sub("[0-9]+", "#", path.name), path)
    return any(are_weights(path, files) for path in itertools.islice(alike.values(), MOST_LOOKED_INTO))


def _is_named(name: str) -> bool:
    return holds_weights(name) and not OTHER_FORM.fullmatch(name)


def _merged_before(folder: Path) -> list[str]:
    """The files that `merge --in-place` added to a checkpoint's folder: its own weights in another form."""
    with contextlib.suppress(CkptError):
        manifest = read_manifest(folder)
        return list(manifest.outputs) if manifest is not None else []
    return []


def holds_weights(name: str) -> bool:
    """Whether a file that no component is made of is looked at as weights, by its name."""
    if AFTER_SUFFIX.fullmatch(name):
        return True
    name = unmarked(name)
    if is_state_file(name) or name in (OPTIMIZER, AUXILIARY) or SHARD.fullmatch(name):
        return False
    if name.endswith(".safetensors") or WEIGHTS.fullmatch(name) is not None or FITTED.fullmatch(name) is not None:
        return True
    return not name.endswith(".json") and (could_be_model(name) or (OTHER_FORM.fullmatch(name) is not None and _is_other(name)))


def _tells_nothing(name: str) -> bool:
    """Whether a file of torch is neither weights nor training state by its name, nor one of a set, which formats know."""
    name = unmarked(name)
    if not name.endswith(SUFFIXES) or is_state_file(name) or name == AUXILIARY or part_name(name) is not None:
        return False
    return not holds_weights(name) and not OTHER_FORM.fullmatch(name)


def _index_of(name: str) -> str | None:
    """The index that lists a part, by its name; None for files that are no part."""
    part = part_name(name)
    return f"{part.stem}{part.suffix}.index.json" if part is not None else None


def _is_other(name: str) -> bool:
    """Whether a name with one of the usual stems is that of weights, and not that of a config."""
    return name.endswith((".bin", ".pt", ".pth", ".th", ".ckpt", *(f".{ending}" for ending in FOREIGN)))


def _is_a(names: Collection[str]) -> str:
    return "a whole model" if len(names) == 1 else "whole models"


def _is(names: Iterable[object]) -> str:
    return "is" if len(list(names)) == 1 else "are"


def _was(names: Iterable[object]) -> str:
    return "was" if len(list(names)) == 1 else "were"
