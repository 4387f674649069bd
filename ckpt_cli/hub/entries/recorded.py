"""What a training noted of its model elsewhere than in config.json, and in what a config contradicts that.

Trainers change a model after they loaded it (LLaMA-Factory and ms-swift scale the rotary embedding, others override entries of the config),
and where they save no config.json of it, only their own settings say so: arguments, hyper-parameters, a config under another name. Such a
file is about much besides. Of a level that repeats sizes of the config, every entry counts which the config has too; of others, those of
which the name alone says what they mean.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_cli.hub.config import Config, levels
from ckpt_cli.hub.dialects.rotary import PARAMETERS, SCALING, has_layers, plain_rotary, same_scaling
from ckpt_cli.hub.entries.harmless import is_harmless
from ckpt_cli.hub.entries.marks import LABELS, PROBLEM, other_marks
from ckpt_cli.hub.entries.written import plain
from ckpt_cli.hub.layers.counts import counts_layers
from ckpt_cli.names import printable

SIZES = ("hidden_size", "intermediate_size", "n_embd", "d_model", "hidden_dim")
"""What a level that describes another model contradicts, beside numbers of layers."""

LIKE_A_MODEL = 2
"""So many of them, or of `COUNTS`, must agree for a level to describe the model."""

COUNTS = ("vocab_size", "num_attention_heads", "num_key_value_heads", "n_head", "head_dim")
OF_IMAGES, NAMED = "pretrained_cfg", "architecture"
"""What timm prepares images with, and the name of the model, of which weights are a variant after a dot."""

ROTARY = ("rope_theta", "partial_rotary_factor", SCALING, PARAMETERS, "rotary_pct", "rotary_emb_base")
TELLING = re.compile(
    r"\w*_eps(ilon)?|hidden_act(ivation)?|activation_function|num_(attention|key_value)_heads|(attn|final|attention)_\w*soft_?cap(ping)?"
    r"|(use_)?sliding_window|max_window_layers|tie_word_embeddings|(attention|mlp|qkv)_bias|(attention|embedding|residual)_multiplier"
    r"|logits_scaling|query_pre_attn_scalar|num_experts_per_tok|norm_topk_prob|routed_scaling_factor|scoring_func|topk_(group|method)"
    r"|use_bidirectional_attention|position_embedding_type|use_qk_norm|vision_feature_(layer|select_strategy)|rope_\w+",
    re.ASCII,
)
"""Entries that mean the same wherever they stand."""

OF_OTHERS = re.compile(
    r"(\w+_)?(teacher|ref|reference|judge|draft|drafter|reward|critic|value|rollout|vllm|sglang|engine|generation|tokenizer|processor"
    r"|data|datasets?|optim|optimizer|scheduler|peft|lora|adapters?|quantization|quant|eval|loss|wandb|logger|trainer|fsdp|deepspeed)(_\w+)?",
    re.ASCII,
)
"""Levels that are about another model, or none."""

MEANT_OTHERWISE = ("qk_head_dim",)
"""Entries that Megatron has for something else: the rotary part of a head is not counted there."""

UNSET = ("", "none", "null", "auto", "default")
MAX_LEVELS = 1 << 10


@dataclass(frozen=True, slots=True)
class Recorded:
    """An entry with the value that a training noted, and that of the config."""

    key: str
    noted: object
    config: object

    @property
    def text(self) -> str:
        return f"{printable(self.key)} {_shown(self.noted)} ({_shown(self.config)} in config.json)"


def contradicted(config: Config, noted: Mapping[str, Any], *, sure: bool = False) -> list[Recorded]:
    """The entries in which a config contradicts nested settings of a training.

    Null means that nothing was set. An entry that is noted at several places is contradicted only if the config has none of the values.
    ``sure``: only levels that describe this model count, not what single entries tell.

    >>> [entry.text for entry in contradicted({"rope_theta": 10000.0}, {"model": {"rope_theta": "1e6"}})]
    ['rope_theta 1e6 (10000.0 in config.json)']
    """
    found: dict[str, list[tuple[object, object, bool]]] = {}
    images = config.get(OF_IMAGES)
    parts = [*levels(config), *([images] if isinstance(images, Mapping) else [])]
    for level in _levels(noted, parts):
        is_model = sum(_is_one_of(level, key, parts) for key in (*_sizes(level), *COUNTS)) >= LIKE_A_MODEL or _names_it(level, config)
        if sure and not is_model:
            continue
        for key, value, others in (*_rotary(level, config), *_entries(level, parts, is_model)):
            found.setdefault(key, []).append((value, others[0], any(_same(value, other) for other in others)))
        said = level if is_model else {key: level[key] for key in (LABELS, PROBLEM) if key in level}
        for mark in other_marks(config, {key: value for key, value in said.items() if not _is_unset(value)}):
            found.setdefault(mark.key, []).append((mark.other, mark.mine, False))
    return [Recorded(key, *seen[0][:2]) for key, seen in found.items() if not any(same for _, _, same in seen)]


def _entries(level: Mapping[str, Any], parts: Sequence[Config], is_model: bool) -> Iterator[tuple[str, object, list[object]]]:
    """The entries of a level that count, but for the rotary embedding, with the values that a config and its parts have."""
    for key, value in level.items():
        others = [part[key] for part in parts if key in part and not _is_off(key, part)]
        is_said = not _is_unset(value) and key not in ROTARY and not isinstance(value, Mapping)
        if others and is_said and key not in MEANT_OTHERWISE and not is_harmless(key) and (is_model or TELLING.fullmatch(key)):
            yield key, value, others


def _rotary(level: Mapping[str, Any], config: Config) -> Iterator[tuple[str, object, list[object]]]:
    """The same of the rotary embedding, in the usual entries. Where kinds of layers have one each, nothing is compared."""
    said = {key: plain(value) for key, value in level.items() if key in ROTARY and not _is_unset(value)}
    text = config.get("text_config")
    mine = {str(key): plain(value) for key, value in (text if isinstance(text, Mapping) else config).items()}
    kind = said.get(SCALING)
    if isinstance(kind, str) and re.fullmatch(r"\w+", kind):
        said[SCALING] = {"rope_type": kind.lower()}
    if not said or has_layers(mine) or has_layers(said):
        return
    _, noted = plain_rotary(said, False)
    _, own = plain_rotary(mine, False)
    for key, value in noted.items():
        if value is not None and (key == SCALING or key in own):  # what a config does not say is the class's own
            yield key, value, [own.get(key)]


def _levels(noted: Mapping[str, Any], parts: Sequence[Config]) -> Iterator[Mapping[str, Any]]:
    """All levels of nested settings, but for those that are about something else, and what is below these."""
    pending = deque([noted])
    for _ in range(MAX_LEVELS):
        if not pending:
            return
        level = pending.popleft()
        if any(_is_another(level, size, parts) for size in _sizes(level)):
            continue
        yield level
        pending += [
            value for key, value in level.items() if isinstance(value, Mapping) and key not in ROTARY and not OF_OTHERS.fullmatch(str(key))
        ]


def _names_it(level: Mapping[str, Any], config: Config) -> bool:
    """Whether the arguments of timm are for the model of a config."""
    named = level.get("model")
    return isinstance(named, str) and named.rpartition("/")[2].partition(".")[0] == config.get(NAMED)


def _sizes(level: Mapping[str, Any]) -> list[str]:
    return [*SIZES, *(key for key in level if counts_layers(str(key)))]


def _is_another(level: Mapping[str, Any], size: str, parts: Sequence[Config]) -> bool:
    there = any(size in part for part in parts)
    return there and not _is_unset(level.get(size)) and not _is_one_of(level, size, parts)


def _is_one_of(level: Mapping[str, Any], key: str, parts: Sequence[Config]) -> bool:
    return not _is_unset(level.get(key)) and any(_same(level[key], part[key]) for part in parts if key in part)


def _is_off(key: str, part: Config) -> bool:
    return part.get("use_sliding_window") is False and key in ("sliding_window", "max_window_layers")


def _is_unset(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in UNSET)


def _same(noted: object, own: object) -> bool:
    noted, own = plain(noted), plain(own)
    if isinstance(noted, Mapping) and isinstance(own, Mapping):
        return same_scaling(noted, own) or noted == own
    if isinstance(noted, str) and isinstance(own, (int, float)):
        return noted.lower() == str(own).lower() or _number(noted) == own
    return noted == own or (noted is False and own is None)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _shown(value: object) -> str:
    text = printable("none" if value is None else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
