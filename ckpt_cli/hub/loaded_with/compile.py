"""transformers' own tables of what its classes read besides weights, as plain data. Imports torch.

    python -m ckpt_cli.hub.loaded_with.compile FILE    writes the table that is shipped as loaded_with.json

``types`` has the class of the tokenizer of each model type (null: any that the `tokenizers` library reads), ``distrusted`` the types whose
own class counts more than what a folder names. ``tokenizers``: the files that a class needs, and whether a tokenizer.json does instead.
``needs``: for classes of models, by type, what has to be there to make their inputs; a class that is not listed needs a tokenizer alone.
``beside``: the files of other names that some models, or the processors of their types, read from the folder of the weights.
``processors``: what classes of processors and tokenizers read in folders below, whichever model they are of.
Packages that are not installed hide some tokenizers (sentencepiece): the table is written where they are.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckpt_cli.hub.classes.compile import known_classes
from ckpt_cli.hub.loaded_with.compile_files import files_of_classes, files_of_processors

TEXT = re.compile(r".*input_ids|task_inputs")
"""Arguments of a model that tokens are given to."""

MEDIA = re.compile(r".*(pixel|image|video|audio|input_features|input_values|patches|speech|waveform|spectrogram).*")
NO_MEDIA = re.compile(r".*(_mask|position|grid|output|embed|_ids|_sizes|labels|alignment|lengths?$|use_).*")
"""What is said about media, or computed from them, is no input."""

OPTIONAL = frozenset({"tokenizer_file", "tokenizer_config_file", "normalizer_file", "entity_vocab_file", "spm_file", "target_vocab_file"})
"""Roles of files that a tokenizer does without if it has a default for them: what they hold is in others then."""

PROCESSORS = ("image_processor", "feature_extractor", "audio_processor", "video_processor")
TOKENIZER = "tokenizer"


def loaded_with() -> dict[str, Any]:
    """All of the table."""
    import transformers
    from transformers.models.auto import configuration_auto, tokenization_auto

    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    types = {kind: names.get(kind) for kind in sorted({*_mapping(configuration_auto, "CONFIG"), *names})}
    return {
        "transformers": transformers.__version__,
        "types": types,
        "distrusted": sorted(tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS),
        "tokenizers": tokenizers(sorted({name for name in types.values() if name is not None})),
        "needs": _grouped(needs()),
        "beside": files_of_classes(),
        "processors": files_of_processors(),
    }


def tokenizers(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What each class of a tokenizer needs, of those that can be imported."""
    from transformers import TokenizersBackend
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    found: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            kind: Any = tokenizer_class_from_name(name)
            roles = dict(kind.vocab_files_names)
        except (AttributeError, ImportError):
            continue
        arguments = inspect.signature(kind.__init__).parameters
        asked = {role for role, argument in arguments.items() if argument.default is inspect.Parameter.empty}
        files = sorted({file for role, file in roles.items() if role not in OPTIONAL or role in asked})
        found[name] = {"files": files, "json": issubclass(kind, TokenizersBackend)}
    return found


def needs() -> dict[str, tuple[str, ...]]:
    """What each class of a model needs, by ``type/class``."""
    import transformers

    taken: dict[str, dict[str, tuple[bool, bool, bool]]] = {}
    for model_type, name in known_classes():
        kind = getattr(transformers, name, None)
        if kind is not None and _is_there(kind):
            taken.setdefault(model_type, {})[name] = _taken(kind, name)
    found = {}
    for model_type, classes in taken.items():
        own = processors_of(model_type)
        # What is made of text by a processor alone, as where no class takes tokens, needs a tokenizer too.
        always = TOKENIZER in own and not any(text for text, _, _ in classes.values())
        for name, (text, media, whole) in classes.items():
            kinds = [each for each in own if each != TOKENIZER] if media or whole else []
            found[f"{model_type}/{name}"] = (*([TOKENIZER] if text or always else []), *kinds)
    return found


def _is_there(kind: Any) -> bool:
    """Whether a class is itself, and no stand-in that says which package is missing."""
    return type(kind).__name__ != "DummyObject"


def _taken(kind: Any, name: str) -> tuple[bool, bool, bool]:
    """Whether a class takes or writes text, whether it takes media, and whether only ``generate`` says what it takes."""
    arguments = list(inspect.signature(kind.forward).parameters)
    reads = any(map(TEXT.fullmatch, arguments))
    writes = bool(getattr(kind, "can_generate", bool)()) or name.endswith("CTC")
    media = any(MEDIA.fullmatch(each) and not NO_MEDIA.fullmatch(each) for each in arguments)
    return reads or writes, media, writes and not reads and not media


def processors_of(model_type: str) -> tuple[str, ...]:
    """What a processor of a model type is made of; of a type without one, what makes inputs of images, sounds or videos."""
    from transformers.models.auto import feature_extraction_auto, image_processing_auto, processing_auto, video_processing_auto

    name = _mapping(processing_auto, "PROCESSOR").get(model_type)
    if name is not None:
        return tuple(each for each in _parts_of(name) if each == TOKENIZER or each in PROCESSORS)
    if model_type in _mapping(image_processing_auto, "IMAGE_PROCESSOR"):
        return ("image_processor",)
    if model_type in _mapping(feature_extraction_auto, "FEATURE_EXTRACTOR"):
        return ("feature_extractor",)
    return ("video_processor",) if model_type in _mapping(video_processing_auto, "VIDEO_PROCESSOR") else ()


def _mapping(module: Any, kind: str) -> dict[str, Any]:
    """What a module of auto classes has for each model type."""
    return dict(getattr(module, f"{kind}_MAPPING_NAMES"))


def _parts_of(name: str) -> list[str]:
    """The arguments of a processor, from its source where packages are missing that it needs."""
    import transformers

    kind: Any = getattr(transformers, name)
    if _is_there(kind):
        return [str(each) for each in kind.get_attributes()]
    for path in Path(str(transformers.__file__)).parent.glob("models/*/processing_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                made = (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__")
                return [argument.arg for each in made for argument in each.args.args]
    return []


def _grouped(found: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """What is needed besides a tokenizer alone, each once with all that need it."""
    grouped: dict[str, list[str]] = {}
    for name, kinds in sorted(found.items()):
        if kinds != (TOKENIZER,):
            grouped.setdefault("+".join(sorted(kinds)), []).append(name)
    return dict(sorted(grouped.items()))


def main(arguments: list[str]) -> None:
    warnings.filterwarnings("ignore")
    importlib.import_module("transformers").logging.set_verbosity_error()
    lines = [f"{json.dumps(key)}: {json.dumps(value, indent=0)}" for key, value in loaded_with().items()]
    Path(arguments[0]).write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
