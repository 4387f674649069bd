"""The class that adapters were trained on, which may be another one than the base's: a classifier on a language model's folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckpt_cli.hub.classes.known_names import class_names, classes_of_type
from ckpt_cli.hub.config import Config, architecture
from ckpt_cli.hub.critics import repaired_class
from ckpt_cli.hub.tied_names import HEADS, last_two
from ckpt_cli.tensors.tensor import Tensor

CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS")
"""Tasks of PEFT whose classes have a head of their own in place of that of a language model."""

FEATURES, HEADED = "FEATURE_EXTRACTION", ("HeadModel", "HeadsModel")

ENDINGS: Mapping[str, tuple[str, ...]] = {
    "CAUSAL_LM": ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"),
    "SEQ_2_SEQ_LM": ("ForConditionalGeneration",),
    "SEQ_CLS": ("ForSequenceClassification",),
    "TOKEN_CLS": ("ForTokenClassification",),
    "QUESTION_ANS": ("ForQuestionAnswering",),
    FEATURES: ("Model",),
}
"""How the classes for a task of PEFT end (peft/utils/peft_types.py)."""


def trained_config(config: Config, settings: Config) -> Config:
    """The ``config`` of a base with the class that ``settings``, those of adapter_config.json, are for; unchanged if they do not say."""
    own, model_type = architecture(config), config.get("model_type")
    if not isinstance(model_type, str):
        return config
    kind, task = trained_class(settings), settings.get("task_type")
    if kind is None and isinstance(task, str):
        if own is not None and _is_for(task, own):
            return config
        kind = next((kind for kind, _ in classes_of_type(model_type) if _is_for(task, kind)), None)
    named = {**config, "architectures": [kind]}
    return named if kind is not None and kind != own and class_names(named) is not None else config


def heads_of_base(tensors: Mapping[str, Tensor], config: Config, settings: Config, adapted: Collection[str]) -> list[str]:
    """The output heads of a language model among tensors, where adapters trained a classifier on its base model, with a head of its own."""
    heads = [name for name in tensors if last_two(name) in HEADS and name.removesuffix(".weight") not in adapted]
    if settings.get("task_type") not in CLASSIFIERS or not heads:
        return []
    # Without them config.json must be able to say so, or loaders would make a head anew.
    named = repaired_class(config, {name: tensor.shape for name, tensor in tensors.items() if name not in heads}).get("architectures")
    return heads if named is not None and named != [architecture(config)] else []


def trained_class(settings: Config) -> str | None:
    """The class that ``settings``, those of adapter_config.json, name: only where they have no task."""
    mapped = settings.get("auto_mapping")
    kind = mapped.get("base_model_class") if isinstance(mapped, Mapping) else None
    return kind if isinstance(kind, str) else None


def other_class(settings: Config, config: Config) -> str | None:
    """The class that adapters were trained on, with its module, where it is none of transformers and not that of the ``config``.

    Such a class may compute something else with the same weights: attention in both directions, another pooling. One of FSDP2 has a prefix.
    """
    kind, mapped, own = trained_class(settings), settings.get("auto_mapping"), architecture(config)
    library = mapped.get("parent_library") if isinstance(mapped, Mapping) else None
    if kind is None or own is None or not isinstance(library, str) or library.startswith("transformers."):
        return None
    code = config.get("auto_map")
    named = [str(path).rpartition(".")[2] for path in code.values()] if isinstance(code, Mapping) else []
    return f"{kind} of {library}" if kind.removeprefix("FSDP") not in (own, *named) else None


def _is_for(task: str, kind: str) -> bool:
    """Whether a class is for a task of PEFT, by its name; no model with a head is one for features."""
    return kind.endswith(ENDINGS.get(task, ())) and not (task == FEATURES and kind.endswith(HEADED))
