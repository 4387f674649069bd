"""transformers' own tables of names and layouts on the hub, as plain data. Runs in a separate process: it imports torch.

    python -m ckpt_cli.hub.classes.compile --rules CONFIG.json     prints the rules of the model that a config describes
    python -m ckpt_cli.hub.classes.compile --tensors CONFIG.json   prints the tensors that it has, in memory and on the hub
    python -m ckpt_cli.hub.classes.compile --numbers CONFIG.json   prints which of their dimensions each number of the config decides
    python -m ckpt_cli.hub.classes.compile --all FILE              writes the rules of every architecture that transformers can build
    python -m ckpt_cli.hub.classes.compile --names FILE            writes the names of the tensors of each of these architectures

transformers converts weights while loading (`transformers/conversion_mapping.py`) and reverts that while saving
(`revert_weight_conversion`); what is written here are the reverted transforms in the order in which they apply, and the renamings of
loading ("older"), which turn names of the hub, or of transformers 4, into those in memory. Nothing of a checkpoint is executed:
custom code that a config names is not used.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckpt_cli.errors import memory_limits
from ckpt_cli.hub.classes.installed import of_version_4
from ckpt_cli.hub.classes.precision.compile_kept import kept_of_model
from ckpt_cli.hub.classes.shapes.config_numbers import numbers_that_decide
from ckpt_cli.hub.classes.transformers_child import NO_TORCH
from ckpt_cli.hub.tied_names import HEADS, KEY, SAYINGS
from ckpt_cli.name_patterns import pattern_of

MARK = "ckpt_place"
"""The attribute of a config that holds its place in the outer one."""

UNUSED = dict.fromkeys(("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"), (r"^encoder\.pooler\.",))
"""Names of tensors that models of a type have and never use: the decoder gets the last hidden state of the encoder, before its pooler."""


def compile_config(content: dict[str, Any]) -> dict[str, Any]:
    """The rules of the model that a config.json describes. Raises whatever transformers raises for configs it cannot use."""
    return compile_model(*_class_and_config(content), content)


def tensors_of(content: dict[str, Any]) -> dict[str, Any]:
    """Names and shapes of the tensors of the model that a config describes: as they are in memory, and as it would be saved.

    ``tied`` lists the names in memory that saving leaves out, with one that has the same storage, ``hub_tied`` the same under the names
    of the hub; ``optional`` are expressions for names that loading may lack, ``ignored`` for those that it may find without a place for
    them; ``prefix`` is what older files may leave out of names.
    """
    return tensors_of_model(*_class_and_config(content))


def tensors_of_model(kind: Any, config: Any) -> dict[str, Any]:
    """The same, of a model class and its config."""
    import torch

    revert, without_tied = _saving()
    with torch.device("meta"):
        model = kind(config)
    model.tie_weights()  # 5.0 leaves that to loading
    state = model.state_dict()
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    kept = without_tied(dict(state), model)
    owners = {id(of_version_4.tensor_of(model, name)): name for name in kept}
    tied = {name: owners[id(of_version_4.tensor_of(model, name))] for name in state if name not in kept}
    return {
        "native": {name: list(tensor.shape) for name, tensor in state.items()},
        "hub": {name: list(tensor.shape) for name, tensor in revert(model, dict(kept)).items()},
        "tied": tied,
        "hub_tied": _saved_names(tied, revert, model, state),
        "prefix": model.base_model_prefix,
        "optional": of_version_4.expressions(
            {*(getattr(model, "_keys_to_ignore_on_load_missing", None) or ()), *UNUSED.get(config.model_type, ())}
        ),
        "ignored": of_version_4.expressions(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
    }


def _saving() -> tuple[Callable[..., dict[str, Any]], Callable[..., dict[str, Any]]]:
    """How transformers turns a state dict into what it saves, and what it leaves out of it first."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict
    except ImportError:  # of version 4
        return of_version_4.names_on_hub, of_version_4.without_tied
    return revert_weight_conversion, remove_tied_weights_from_state_dict


def numbers_of(content: dict[str, Any]) -> dict[str, Any]:
    """Which dimensions of which tensors each number decides, in the config that a config.json describes: defaults are numbers too."""
    kind, config = _class_and_config(content)
    tensors, full = _sides(kind, config), config.to_dict()

    def built(other: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
        return _sides(kind, type(config).from_dict(other))

    # A config from which transformers builds another model once it was written out in full: its defaults cannot be varied, so that only
    # the numbers that the file has are.
    written = full if built(copy.deepcopy(full)) == tensors else content
    return {"numbers": numbers_that_decide(written, tensors, built)}


def _sides(kind: Any, config: Any) -> dict[str, dict[str, list[int]]]:
    tensors = tensors_of_model(kind, config)
    return {"native": tensors["native"], "hub": tensors["hub"]}


def _saved_names(tied: Mapping[str, str], revert: Any, model: Any, state: Mapping[str, Any]) -> dict[str, str]:
    """Tied names and those that they are tied to, as files of the hub would have them if both were saved."""
    try:
        saved = {id(tensor): name for name, tensor in revert(model, dict(state)).items()} if tied else {}
    except Exception:  # noqa: BLE001 - what transformers cannot save together keeps its names in memory
        saved = {}
    return {saved.get(id(state[name]), name): saved.get(id(state[owner]), owner) for name, owner in tied.items()}


def _class_and_config(content: dict[str, Any]) -> tuple[Any, Any]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[content["model_type"]]
    decode = getattr(kind, "_decode_special_floats", lambda unchanged: unchanged)
    return getattr(transformers, content["architectures"][0]), kind.from_dict(decode(content))


def compile_model(kind: Any, config: Any, content: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The rules of one model class with one config, of this ``content``; the model is built without memory for its weights."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    _mark(config)
    with torch.device("meta"):
        model = kind(config)
    # As in transformers' saving: prefixes that only loading may have changed are left alone.
    transforms = [entry for entry in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(entry, PrefixChange)]
    reverted = [entry.reverse_transform() for entry in transforms[::-1]]
    return {
        "converters": [_converter(entry) for entry in reverted if isinstance(entry, WeightConverter)],
        "renamings": [_renaming(entry) for entry in reverted if not isinstance(entry, WeightConverter)],
        "older": [_renaming(entry) for entry in transforms if not isinstance(entry, WeightConverter)],
        "ignored": sorted(getattr(model, "_keys_to_ignore_on_save", None) or ()),
        "tied": dict(_tied(model)),
        "kept": kept_of_model(kind, config),
        "ties": "".join("1" if answer else "0" for answer in _ties(model, config, content)),
        "parts": dict(_parts(config)),
    }


def _renaming(entry: Any) -> dict[str, Any]:
    kinds = {"WeightRenaming": "first", "GroupWeightRename": "paired", "Inkling2IndexOffsetWeightRename": "shifted"}
    kind = kinds.get(type(entry).__name__, "unknown")
    if type(entry).__name__ == "LayerPairCollapse":
        kind = "none"
    return {**_patterns(entry), "kind": kind, "offset": getattr(entry, "offset", 0)}


def _converter(entry: Any) -> dict[str, Any]:
    return {**_patterns(entry), "operations": [_operation(operation) for operation in entry.operations]}


def _patterns(entry: Any) -> dict[str, Any]:
    scope = None if entry.scope_prefix is None else [entry.base_model_prefix or "", entry.scope_prefix]
    return {"match": entry.compiled_sources.pattern, "sources": entry.source_patterns, "targets": entry.target_patterns, "scope": scope}


def _operation(operation: Any) -> dict[str, Any]:
    return {"name": type(operation).__name__, **{key: value for key, value in vars(operation).items() if not key.startswith("_")}}


def _tied(model: Any) -> Iterator[tuple[str, str]]:
    """Expressions for names that are tied -> for the names that they are tied to, of all parts of a model."""
    from transformers import PreTrainedModel

    for prefix, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            start = f"{prefix}." if prefix else ""
            for target, source in (getattr(module, "_tied_weights_keys", None) or {}).items():
                yield f"{start}{target}", f"{start}{source}"


def _mark(config: Any, place: tuple[str, ...] = ()) -> None:
    """Mark a config, and those inside of it, with their places: models keep copies of them."""
    setattr(config, MARK, place)
    for name in getattr(config, "sub_configs", None) or {}:
        if hasattr(part := getattr(config, name, None), "sub_configs"):
            _mark(part, (*place, name))


def _ties(model: Any, config: Any, content: Mapping[str, Any]) -> Iterator[bool]:
    """Whether the model ties, for each of `SAYINGS` in its config.

    transformers asks the config of each part that has tied names (``get_expanded_tied_weights_keys``). The parts with an output head
    decide; where none has tied names, what the config says of its language model.
    """
    deciding = _deciding(model)
    text: Any = getattr(config, "text_config", None)
    for outer, inner in SAYINGS:
        said = {name: value for name, value in content.items() if name != KEY} | ({} if outer is None else {KEY: outer})
        if hasattr(text, "to_dict"):
            part = content.get("text_config") or text.to_dict()
            part = {name: value for name, value in part.items() if name != KEY}
            said["text_config"] = part | ({} if inner is None else {KEY: inner})
        told = type(config).from_dict(said)
        if deciding:
            yield any(_flag(told, place) for place in deciding)
        else:
            yield outer if outer is not None else bool(getattr(told.get_text_config(decoder=True), KEY, False))


def _deciding(model: Any) -> set[tuple[str, ...]]:
    """The places of the configs that decide whether a head is tied, or without a head whether anything is."""
    from transformers import PreTrainedModel

    heads: set[tuple[str, ...]] = set()
    others: set[tuple[str, ...]] = set()
    for module in model.modules():
        tied = getattr(module, "_tied_weights_keys", None) if isinstance(module, PreTrainedModel) else None
        if tied:
            is_head = any(name.endswith(HEADS) for pair in tied.items() for name in pair)
            (heads if is_head else others).add(getattr(module.config, MARK))
    return heads or others


def _flag(config: Any, place: tuple[str, ...]) -> bool:
    for name in place:
        config = getattr(config, name)
    return bool(getattr(config, KEY, False))


def _parts(config: Any) -> Iterator[tuple[str, str]]:
    """Name -> model type of the configs inside of a config: they decide which classes a composed model has."""
    for name in getattr(config, "sub_configs", None) or {}:
        inner = getattr(config, name, None)
        if inner is not None and getattr(inner, "model_type", None):
            yield name, inner.model_type


def known_classes() -> list[tuple[str, str]]:
    """The model types and classes that transformers' auto classes know."""
    from transformers.models.auto import modeling_auto

    classes: set[tuple[str, str]] = set()
    for name in dir(modeling_auto):
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES"):
            for model_type, kinds in getattr(modeling_auto, name).items():
                classes |= {(model_type, kind) for kind in (kinds if isinstance(kinds, (tuple, list)) else [kinds])}
    return sorted(classes)


def names_of_all() -> dict[str, Any]:
    """For all architectures that can be built from their default configs: the names of their tensors, ``{}`` in place of numbers.

    ``names`` has each name once; ``models`` maps an architecture to the positions of its names in memory, of those on the hub where
    they are others (else None), its prefix, and expressions for names that may be missing, or there without a place for them.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: dict[str, tuple[set[str], set[str], dict[str, Any]]] = {}
    for model_type, name in known_classes():
        try:
            tensors = tensors_of_model(getattr(transformers, name), CONFIG_MAPPING[model_type]())
        except Exception:  # noqa: BLE001 - whatever keeps a class from being built, nothing is known of its names
            continue
        native, hub = ({pattern_of(key)[0] for key in tensors[side]} for side in ("native", "hub"))
        found[f"{model_type}/{name}"] = (native, hub, tensors)
    names = sorted({name for native, hub, _ in found.values() for name in native | hub})
    place = {name: position for position, name in enumerate(names)}
    models = {
        key: [
            sorted(place[name] for name in native),
            sorted(place[name] for name in hub) if hub - native else None,
            tensors["prefix"],
            tensors["optional"],
            tensors["ignored"],
        ]
        for key, (native, hub, tensors) in found.items()
    }
    return {"transformers": transformers.__version__, "names": names, "models": models}


def compile_all() -> dict[str, Any]:
    """The rules of all architectures that can be built from their default configs, equal ones stored once; None for the others."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    rules: list[dict[str, Any]] = []
    models: dict[str, list[Any] | None] = {}
    for model_type, name in known_classes():
        models[f"{model_type}/{name}"] = None
        try:
            compiled = compile_model(getattr(transformers, name), CONFIG_MAPPING[model_type]())
        except Exception:  # noqa: BLE001 - whatever keeps a class from being built, its rules are made when they are needed
            continue
        entry = {key: compiled.pop(key) for key in ("ties", "parts")}
        if compiled not in rules:
            rules.append(compiled)
        models[f"{model_type}/{name}"] = [rules.index(compiled), entry["ties"], entry["parts"]]
    return {"transformers": transformers.__version__, "rules": rules, "models": models}


ANSWERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "--rules": compile_config,
    "--tensors": tensors_of,
    "--numbers": numbers_of,
}
"""Questions about a config, as the command line names them."""


def versioned(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer with the version of transformers that gave it."""
    import transformers

    return {"transformers": transformers.__version__, **answer}


def _end_with_parent() -> None:
    """End with the parent process (on Linux): nobody would read the answer."""
    import ctypes
    import os
    import signal

    if sys.platform == "linux":
        parent = os.environ.get("CKPT_PARENT")
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of sys/prctl.h
        if parent is not None and parent != str(os.getppid()):
            sys.exit(1)  # it ended before that


def main(arguments: list[str]) -> None:
    _end_with_parent()
    warnings.filterwarnings("ignore")
    if arguments[:1] == ["--all"]:
        content = compile_all()
        lines = [f'"transformers": {json.dumps(content["transformers"])}']
        lines.append('"rules": [\n' + ",\n".join(json.dumps(rule) for rule in content["rules"]) + "\n]")
        lines.append('"models": {\n' + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in content["models"].items()) + "\n}")
        Path(arguments[1]).write_text("{" + ",\n".join(lines) + "}\n")
    elif arguments[:1] == ["--names"]:
        content = names_of_all()
        lines = [f'"transformers": {json.dumps(content["transformers"])}', f'"names": {json.dumps(content["names"], indent=0)}']
        entries = (f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in content["models"].items())
        lines.append('"models": {\n' + ",\n".join(entries) + "\n}")
        Path(arguments[1]).write_text("{" + ",\n".join(lines) + "}\n")
    else:
        sys.stdout.write(json.dumps(answer_to(arguments[0], Path(arguments[1]))) + "\n")


def answer_to(question: str, path: Path) -> dict[str, Any]:
    """The answer to a question about the config in a file, {"error": ...} if the config is to blame that there is none.

    {"unasked": ...} if this machine is, so that the answer is not to be kept.
    """
    try:
        import transformers

        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        return versioned(ANSWERS[question](json.loads(path.read_text())))
    except (ImportError, MemoryError, OSError, SystemError) as error:
        return {"unasked": reason_here(error)}
    except Exception as error:  # noqa: BLE001 - it raises anything, and lack of memory has many names in compiled code
        return {"unasked": reason_of(error)} if memory_limits() else versioned({"error": type(error).__name__, "reason": reason_of(error)})


def reason_here(error: Exception) -> str:
    """Why this machine has no answer, which the config is not to blame for: a library that it lacks, memory, a file."""
    if importlib.util.find_spec("torch") is None:
        return NO_TORCH
    if isinstance(error, MemoryError):
        return "it ran out of memory"
    if isinstance(error, ImportError):
        # transformers says in a first sentence what it lacks, and goes on with how to install it in notebooks.
        return next((line.strip() for line in str(error).splitlines() if line.strip()), "ImportError").partition(". ")[0][:160]
    return reason_of(error)


def reason_of(error: Exception) -> str:
    """The last line of an exception's text, trimmed: the lines above it introduce it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
    return line if len(line) <= 160 else line[:157] + "..."


if __name__ == "__main__":
    main(sys.argv[1:])
