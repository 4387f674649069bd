"""Tiny random models of many architectures, as transformers builds them: dense, tied, mixture of experts, vision-language, ..."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DENSE: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLAIN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {**PLAIN, "vocab_size": 64}
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
IMAGES = {**PLAIN, "image_size": 8, "patch_size": 2}
QWEN_IMAGES = {"depth": 2, "hidden_size": 32, "num_heads": 4, "out_hidden_size": 32, "intermediate_size": 48, "patch_size": 2}
QWEN3_IMAGES = {**QWEN_IMAGES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
QWEN_TEXT = {**DENSE, "rope_scaling": {"mrope_section": [2, 1, 1], "rope_type": "default"}}
MAMBA2 = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}

MODELS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", DENSE),
    "llama, tied": ("LlamaForCausalLM", "llama", {**DENSE, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "mistral", DENSE),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", DENSE),
    "qwen2, sequence classification": ("Qwen2ForSequenceClassification", "qwen2", DENSE),
    "qwen3, tied": ("Qwen3ForCausalLM", "qwen3", {**DENSE, "tie_word_embeddings": True}),
    "qwen3, token classification": ("Qwen3ForTokenClassification", "qwen3", DENSE),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", DENSE),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", DENSE),
    "phi3": ("Phi3ForCausalLM", "phi3", DENSE),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", DENSE),
    "glm4": ("Glm4ForCausalLM", "glm4", DENSE),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", DENSE),
    "gpt2": (
        "GPT2LMHeadModel",
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "gpt_neox", WORDS),
    "bloom": ("BloomForCausalLM", "bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "qwen2_moe", {**DENSE, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe", {**DENSE, **EXPERTS, "num_experts": 4}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {
            **DENSE,
            **EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "mixtral": ("MixtralForCausalLM", "mixtral", {**DENSE, "num_local_experts": 4}),
    "olmoe": ("OlmoeForCausalLM", "olmoe", {**DENSE, "num_experts": 4}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "deepseek_v2", {**DENSE, **EXPERTS, **GROUPS, **LATENT}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v3", {**DENSE, **EXPERTS, **GROUPS, **LATENT}),
    "glm4_moe": ("Glm4MoeForCausalLM", "glm4_moe", {**DENSE, **EXPERTS, **GROUPS}),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss", {**DENSE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": ("Llama4ForCausalLM", "llama4_text", {**DENSE, "num_local_experts": 4, "intermediate_size_mlp": 48, "moe_layers": [1]}),
    "jamba": (
        "JambaForCausalLM",
        "jamba",
        {
            **WORDS,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe", {**DENSE, "num_local_experts": 4}),
    "phimoe": ("PhimoeForCausalLM", "phimoe", {**DENSE, "num_local_experts": 4}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {
            **DENSE,
            "moe_num_experts": 4,
            "moe_intermediate_size": 24,
            "moe_k": 2,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
    ),
    "minimax": ("MiniMaxForCausalLM", "minimax", {**DENSE, "num_local_experts": 4}),
    "mamba": ("MambaForCausalLM", "mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 8}),
    "mamba2": (
        "Mamba2ForCausalLM",
        "mamba2",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    ),
    "falcon_h1": ("FalconH1ForCausalLM", "falcon_h1", {**DENSE, **MAMBA2}),
    "bert": ("BertForMaskedLM", "bert", WORDS),
    "roberta": ("RobertaForSequenceClassification", "roberta", WORDS),
    "deberta": ("DebertaV2ForMaskedLM", "deberta-v2", WORDS),
    "modernbert": ("ModernBertForMaskedLM", "modernbert", {**WORDS, "pad_token_id": 0}),
    "t5": ("T5ForConditionalGeneration", "t5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}),
    "bart": ("BartForConditionalGeneration", "bart", SEQ2SEQ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "whisper",
        {
            **SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "vit": ("ViTForImageClassification", "vit", IMAGES),
    "siglip": ("SiglipModel", "siglip", {"text_config": WORDS, "vision_config": IMAGES}),
    "clip": ("CLIPModel", "clip", {"text_config": WORDS, "vision_config": IMAGES}),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        {"text_config": QWEN_TEXT, "vision_config": {**QWEN_IMAGES, "embed_dim": 32, "mlp_ratio": 2}},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {"text_config": QWEN_TEXT, "vision_config": {**QWEN_IMAGES, "fullatt_block_indexes": [1]}},
    ),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl", {"text_config": QWEN_TEXT, "vision_config": QWEN3_IMAGES}),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        {"text_config": {**QWEN_TEXT, **EXPERTS, "num_experts": 4}, "vision_config": QWEN3_IMAGES},
    ),
    "gemma3, images": (
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {"text_config": DENSE, "vision_config": IMAGES, "mm_tokens_per_image": 4},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "llava",
        {"text_config": {**DENSE, "model_type": "llama"}, "vision_config": {**IMAGES, "model_type": "clip_vision_model"}},
    ),
    "llava_next": (
        "LlavaNextForConditionalGeneration",
        "llava_next",
        {"text_config": {**DENSE, "model_type": "llama"}, "vision_config": {**IMAGES, "model_type": "clip_vision_model"}},
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        "internvl",
        {"text_config": {**DENSE, "model_type": "qwen2"}, "vision_config": {**IMAGES, "image_size": [8, 8], "patch_size": [2, 2]}},
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        "idefics3",
        {"text_config": {**DENSE, "model_type": "llama"}, "vision_config": IMAGES},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {"text_config": {**DENSE, "model_type": "mistral"}, "vision_config": {**IMAGES, "model_type": "pixtral", "head_dim": 8}},
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        "paligemma",
        {
            "text_config": {**DENSE, "model_type": "gemma"},
            "vision_config": {**IMAGES, "model_type": "siglip_vision_model"},
            "projection_dim": 32,
        },
    ),
}
"""Name -> class, model type, and what its config says beyond the defaults."""

COMPILED: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "llava of qwen2 and siglip": (
        "LlavaForConditionalGeneration",
        "llava",
        {"text_config": {**DENSE, "model_type": "qwen2"}, "vision_config": {**IMAGES, "model_type": "siglip_vision_model"}},
    ),
    "hunyuan_moe": ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", {**DENSE, "num_experts": 4, "moe_topk": 2}),
}
"""The same for models whose rules are not shipped."""


def build(kind: str, model_type: str, options: Mapping[str, Any]) -> Any:
    """A model with random weights, always the same ones."""
    import copy

    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**copy.deepcopy(dict(options)))
    return getattr(transformers, kind)(config).eval()


def answered_here(question: str, text: str) -> dict[str, Any]:
    """What the child process that asks transformers would answer, in this process, which has transformers already."""
    from ckpt_cli.hub.classes.compile import ANSWERS, reason_of, versioned

    try:
        return versioned(ANSWERS[f"--{question}"](json.loads(text)))
    except Exception as error:  # noqa: BLE001 - as the child process does
        return versioned({"error": type(error).__name__, "reason": reason_of(error)})
