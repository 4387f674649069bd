"""The settings of PEFT's adapter_config.json: which are followed, which change nothing in a merge, and which are refused.

Names as peft 0.21 has them (`tuners/lora/config.py`, `config.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYING = "ensure_weight_tying"
"""Whether PEFT ties the adapters, and trained copies, of tied modules; those of ``target_modules`` only in newer versions."""

FOLLOWED = frozenset(
    {
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        TYING,
        "exclude_modules",
        "fan_in_fan_out",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_dora",
        "use_rslora",
    }
)

WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)
"""What concerns training, loading or an initialisation that ``init_lora_weights`` names."""

REFUSED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "megatron_config",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
"""Other arithmetic than that of LoRA or DoRA, or other modules than those that the names say."""

OF_OTHERS = frozenset(
    {"enable_lora", "lora_B_layout", "lora_dtype", "lorap_emb_lr", "lorap_lr_ratio", "merge_weights", "unsloth_fused_expert_lora"}
)
"""Settings of other programs and of PEFT's first versions, which are followed or change nothing."""

SAME_BASE = ("eva", "gaussian", "mica", "orthogonal", "true", "false")
"""Values of ``init_lora_weights`` that leave the weights of the base as they are.

PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change these, and the adapter alone does not have what they became. PEFT can convert an adapter
while it saves (``path_initial_model_for_weight_conversion``); ``init_lora_weights`` is then true.
"""


def changed_base(config: Mapping[str, Any]) -> str | None:
    """The initialisation that changed the base's weights, or may have, None for the usual ones."""
    said = config.get("init_lora_weights")
    return said if isinstance(said, str) and said.lower() not in SAME_BASE else None


def unknown_settings(config: Mapping[str, Any]) -> list[str]:
    """Settings with a value that no version of PEFT up to 0.21 has."""
    return sorted(key for key, value in config.items() if value and key not in {*FOLLOWED, *WITHOUT_EFFECT, *REFUSED, *OF_OTHERS})
