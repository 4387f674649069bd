"""Entries of a config that change nothing of what a model computes with its weights, or that its tensors show themselves.

All others do: a list of what counts would lack the entries of the next family. The words are those of all configs of transformers, read
one by one, and those that trainers and code of other loaders add.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

HARMLESS: Mapping[str, tuple[str, ...]] = {
    "how the folder was written": (
        r"architectures|model_type|auto_map|(torch_)?dtype|\w*name_or_path|_class_name|_commit_hash|(_?(transformers|diffusers|torch|peft|model|library)_)?version",
        r"quantization_config|compression_config|quantization_bit|transformers\.js_config|sentence_transformers|unsloth_\w+",
        r"for_llm_compressor|is_training|verbose|repo_id|push_to_hub|private|license|tags|pretrained_path|device|(mm_)?vision_tower",
    ),
    "tokens": (
        r"(\w+_)?token_(id|ids|index|indices|idx)|(begin_)?suppress_tokens|forced_decoder_ids|bad_words_ids",
        r"(?!\w*use_)(\w+_)?((bos|eos|pad|unk|sep|cls|mask)_(id|ids|idx|index|token)|(start|end|newline)_(id|ids|token))|use_mask_token",
        r"image_patch_id|tokenizer_\w+|template",
    ),
    "labels and tasks": (
        r"id2label|label2id|num_labels|problem_type|label_names|finetuning_task|task_specific_params|prefix|(\w+_)?ignore_index",
    ),
    "training": (
        r"(\w+_)?drop(out|path|_path|_rate|_\w+_rate)(_\w+)?|(\w+_)?dropout|(\w+_)?pdrop|(\w+_)?layer_?drop",
        r"(\w+_)?(init|initializer|xavier)_(range|std|factor|scheme|device|config|values?)(_\w+)?|initializer\w*|init_(std|xavier_std|range)",
        r"(\w+_)?(layer_scale|layerscale|logit_scale|temperature)_(init_)?value|alpha_initializer|w_init_variance_scale",
        r"(\w+_)?loss(_\w+)?|aux_\w+|seq_aux|(router_|moe_)?jitter_\w+|(\w+_)?jitter_noise|auxiliary_loss\w*|label_(smoothing|noise_ratio)",
        r"(\w+_)?(loss|aux|eos|router)\w*_coef(ficient)?|(class|bbox|giou|mask|dice)_cost|(class|mask|dice|no_object|cross_entropy)_weight",
        r"matcher_\w+|focal_(alpha|gamma)|box_noise_scale|train_\w+|(oversample|importance_sample)_ratio|norm_pix_loss",
        r"mask_(time|feature)_(prob|length|min_masks)|apply_spec_augment|ctc_\w+|num_negatives|(feat_quantizer|contrastive)_\w+",
        r"(un)?freeze(_\w+)?|tune_\w+|\w+_tunable_parts|use_\w+_lora|gradient_\w+|stop_gradient\w*|batch_norm_momentum|rescale_prenorm_residual",
        r"(\w+_)?lr|optimizer_\w+|scheduler_\w+|train_expert_only|use_pretrained_backbone|use_timm_backbone|sparse_pred\w*|seed",
    ),
    "how far a training is": (
        r"(global|current|cur|last|best|trained|ema|optimization)_(step|epoch|iteration|iter)s?|step|epoch|iteration|num_updates",
        r"total_flos|best_metric|cur_decay_value|update_after_step|use_ema_warmup|inv_gamma",
    ),
    "what is returned": (
        r"use_cache\w*|output_(attentions|hidden_states|router_logits|scores|past|a3_attentions|retrieved)|return_\w+|use_return_dict",
        r"torchscript|cache_implementation|keys_to_ignore_at_inference|num_logits_to_keep|chunk_size_feed_forward|onnx_\w+",
    ),
    "generation": (
        r"(max|min)_(new_tokens|length)|do_sample|early_stopping|num_beams|num_beam_groups|temperature|top_[kp]|typical_p|(\w+_)?penalty",
        r"(encoder_)?no_repeat_ngram_size|num_return_sequences|remove_invalid_values|is_assistant|median_filter_width",
    ),
    "how it is computed": (
        r"(\w+_)?attn_impl(ementation)?(_\w+)?|_\w+_implementation|_?(use_)?flash_attn\w*|use_flash_attention\w*|deterministic_flash_attn",
        r"pretraining_tp|ep_size|tp_size|model_parallel_size|use_mamba_kernels|use_mambapy|use_mem_eff_path|use_associative_scan|disable_custom_kernels",
        r"slow_but_exact|fp16|bf16|fp32|use_bfloat16|use_xformers|(use_)?fused?_\w+|(\w+_)?softmax_in_fp32|residual_in_fp32",
        r"reorder_and_upcast_attn|reference_compile|compile\w*|torch_compile\w*|(chunkwise|sequence|step)_kernel|repad_logits_with_grad",
    ),
    "limits": (
        r"(\w+_)?max_(\w+_)?position_embeddings|max_(seq|sequence)_(len|length)|max_(source|target)_positions|seq_length|model_max_length",
        r"n_positions|n_ctx|(max|min)_dynamic_patch",
    ),
    "sizes": (
        r"(\w+_)?vocab_size|(\w+_)?(hidden|intermediate)_size|(encoder_|decoder_)?ffn_dim|d_model|d_ff|n_embd",
        r"(num_)?(encoder_|decoder_|hidden_)?layers|n_layers?|num_(nextn_predict|mtp)_layers|(moe_)?num_(local_)?experts|n_(routed|shared)_experts",
        r"input_features|output_features",
    ),
}
"""What entries are about, and their names as expressions; the last ones are shown by the shapes and numbers of tensors."""

LENGTH = "max_position_embeddings"
FROM_LENGTH = ("yarn", "longrope")
"""Kinds of rotary embeddings whose factor is that of the lengths where none is written."""


def is_harmless(key: str) -> bool:
    """Whether an entry says nothing about what is computed with weights of the same shapes.

    >>> [is_harmless(key) for key in ("attention_dropout", "eos_token_id", "clip_qkv", "output_multiplier")]
    [True, True, False, False]
    """
    return _expression().fullmatch(key) is not None


def decides_rotation(scaling: object) -> bool:
    """Whether the length of a model, which is a limit otherwise, changes this scaled rotary embedding."""
    if not isinstance(scaling, Mapping):
        return False
    kind = scaling.get("rope_type")
    return kind == "dynamic" or (kind in FROM_LENGTH and scaling.get("factor") is None)


@cache
def _expression() -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{names})" for about in HARMLESS.values() for names in about))
