"""Whether a config.json is that of a model: trainers and loggers of metrics write settings of their own under this name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.config import levels
from ckpt_cli.names import few

OF_MODEL = re.compile(
    # What transformers, timm, mlx and sentence-transformers write, and sizes as others call them.
    r"model_type|architectures?|_?(transformers|diffusers)_version|(torch_)?dtype|quantization(_config)?|tie_word_embeddings|pretrained_cfg"
    r"|(word_)?embedding_(dim|dimension|size)|(in|out)_(features|channels)"
    r"|((lm|llm|vit|vision|text|audio|image|speech)_)?(vocab_size"
    r"|(d|dim|n|hidden|model|inner|ffn|embed|intermediate|head|encoder|decoder|qkv?|kv|latent|state)_(model|dim|size|embd|ff|hidden|channels)"
    r"|(num|n)_(hidden_|encoder_|decoder_|attention_|key_value_|query_|kv_|q_)?(layers?|heads?|blocks?|experts?|classes|labels))|dim|width|depth"
    r"|(encoder|decoder)_(layers|attention_heads)|id2label|rope_(theta|scaling|parameters)|max_position_embeddings"
    r"|(rms_|layer_)?norm_eps|hidden_act|\w+_token_id",
    re.ASCII,
)
"""Entries of the config of a model that its class may lack. One of them is enough where nothing is of a training."""

OF_TRAINING = re.compile(
    r"(\w+_)?(learning_rate|lr)|lr_\w+|(output|save|log|logging|checkpoint|ckpt|run|work|data|dataset)_(dir|path|root|folder)"
    r"|((num|n|max|total)_)*(train(ing)?_)?(steps|iters|iterations|epochs)|(\w+_)?batch_size(_per_\w+)?|weight_decay"
    r"|gradient_accumulation_steps|warmup\w*|optim(izer)?(_\w+)?|train(ing|er)?(_(config|args|arguments))?"
    r"|(train_|eval_)?(data|datasets?|dataloader)(_config)?|_?wandb\w*|hydra|defaults|resume\w*|model_name_or_path|seed",
    re.ASCII,
)
"""Entries of what a trainer was told, which may name sizes and the type of a model as well."""


DOUBTFUL = "neither a class nor sizes of a model"
"""What is told of one that code of the model's own may still read."""


def why_no_config(content: Mapping[str, Any]) -> str | None:
    """What a config.json holds instead of the config of a model, in a few words; None if it is one.

    >>> why_no_config({"hidden_size": 32, "num_hidden_layers": 2})
    >>> why_no_config({"vit_hidden_dim": 32, "lm_n_heads": 4})
    >>> why_no_config({"hidden_size": 32, "learning_rate": 1e-5})
    'settings of a training: learning_rate'
    """
    if not content:
        return "nothing"
    if any(map(_names_a_class, levels(content))):
        return None
    if any(isinstance(value, dict) and "value" in value for value in content.values()):
        return "what a logger noted of a run"
    settings = [str(key) for key in content if OF_TRAINING.fullmatch(key)]
    if settings:
        return f"settings of a training: {few(settings, 3)}"
    if any(OF_MODEL.fullmatch(key) for level in levels(content) for key in level):
        return None
    return f"{DOUBTFUL}: {few(list(content), 3)}"


def no_model_config(path: Path) -> str | None:
    """The same of a file. One that cannot be read, or is no JSON object, is the model's and damaged, for all that is known."""
    try:
        content = parse_json(read_small(path), path.name)
    except CkptError:
        return None
    return why_no_config(content) if isinstance(content, dict) else None


def _names_a_class(content: Mapping[str, Any]) -> bool:
    """Whether it says what loads it, as no settings of a training do."""

    def says(key: str, kind: type = str) -> bool:
        return isinstance(content.get(key), kind)

    classes, code = content.get("architectures"), content.get("auto_map")
    if isinstance(classes, list) and any(isinstance(name, str) for name in classes):
        return True
    if isinstance(code, dict) and any(isinstance(name, (str, list)) for name in code.values()):
        return True
    of_transformers = says("model_type") and says("transformers_version")
    of_timm = says("architecture") and ("num_classes" in content or "pretrained_cfg" in content)
    of_others = is_of_robot(content) or says("model_cfg", dict)
    return says("_class_name") or says("custom_pipelines", dict) or of_transformers or of_timm or of_others


def is_of_robot(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a policy of lerobot or openpi, which have no tokenizer of their own: one of the Hub makes their inputs.

    >>> is_of_robot({"type": "act", "input_features": {}}), is_of_robot({"model_type": "llama"})
    (True, False)
    """
    of_lerobot = isinstance(config.get("type"), str) and isinstance(config.get("input_features"), dict)
    return of_lerobot or all(isinstance(config.get(key), str) for key in ("paligemma_variant", "action_expert_variant"))
