"""What changes a computation is whatever is not known to be harmless, so that no family's own entries pass as nothing."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.hub.entries.harmless import is_harmless
from ckpt_cli.hub.settings import different_settings
from tests import tiny

FAMILIES: list[tuple[str, Any, Any]] = [
    ("use_parallel_residual", False, True),
    ("clip_qkv", 8.0, None),
    ("no_rope_layers", [1, 1, 1, 0], [1, 1, 1, 1]),
    ("scale_depth", 1.4, 1.0),
    ("vision_feature_select_strategy", "default", "full"),
    ("an_entry_of_a_family_to_come", 1, 2),
]

COUNT = """
apply_residual_connection_post_layernorm attention_bias attention_chunk_size conv_kernel_size deepstack_visual_indexes dim_model_base
do_stable_layer_norm drop_vision_last_layer first_k_dense_replace fullatt_block_indexes image_size is_decoder layer_types mlp_ratio
mamba_expand moe_layer_start_index n_group new_decoder_architecture norm_topk_prob num_attention_heads num_experts_per_tok
num_kv_shared_layers num_register_tokens output_gate_type output_logit_soft_cap output_multiplier parallel_attn patch_size
position_embedding_type ps_version qkv_bias relative_attention_num_buckets rope_interleave routed_scaling_factor scale_depth scale_emb
scale_embedding spatial_merge_size summary_type swiglu_limit time_step_limit top_k_experts topk_method use_cls_token use_rel_pos
vision_feature_layer window_size
"""

HARMLESS = """
_attn_implementation _name_or_path activation_dropout apply_spec_augment architectures attn_impl attn_pdrop audio_start_token_id auto_map
aux_loss_alpha begin_suppress_tokens bf16 bos_token_id class_cost classifier_dropout ctc_loss_reduction decoder_layerdrop
decoder_start_token_id drop_path_rate dtype embd_pdrop encoder_no_repeat_ngram_size ep_size eos_token_id finetuning_task
freeze_mm_mlp_adapter giou_loss_coefficient gradient_checkpointing hidden_size id2label image_token_index init_std initializer_range
keys_to_ignore_at_inference label2id layer_scale_init_value max_length max_position_embeddings mm_projector_lr num_beams num_hidden_layers
num_logits_to_keep output_attentions output_router_logits pretraining_tp problem_type quantization_config return_dict router_aux_loss_coef
router_jitter_noise seq_aux slow_but_exact task_specific_params temperature tokenizer_padding_side torch_dtype transformers_version
unsloth_fixed use_cache use_flash_attn use_mamba_kernels vocab_size
"""


def keys(mine: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found, reverse = ([each.key for each in different_settings(*pair)] for pair in ((mine, other), (other, mine)))
    assert found == reverse
    return found


def test_words_are_sorted_as_they_were_read() -> None:
    assert [key for key in COUNT.split() if is_harmless(key)] == []
    assert [key for key in HARMLESS.split() if not is_harmless(key)] == []


class TestEveryCommand:
    @pytest.mark.parametrize(("key", "mine", "other"), FAMILIES, ids=[key for key, *_ in FAMILIES])
    def test_tells_an_entry_that_only_one_family_has(self, key: str, mine: Any, other: Any, tmp_path: Path) -> None:
        tiny.verl(tmp_path / "run", tiny.weights(1), tiny.classless(**{key: mine}))
        base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.classless(**{key: other}))
        made = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base).outputs[0].notes
        assert [key in note.text for note in made if note.code == "base-settings"] == [True]
        assert [key in note.text for note in ckpt_cli.diff(base, tmp_path / "out").notes if note.code == "other-settings"] == [True]
        (tmp_path / "out" / "config.json").write_text((base / "config.json").read_text())
        told = [
            item.severity for item in ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run").findings if item.code == "other-settings"
        ]
        assert told == ["error"]

    @pytest.mark.parametrize(
        ("kind", "built", "changes"),
        [
            ("GPTNeoX", {}, {"use_parallel_residual": False}),
            ("Gemma3", {"num_key_value_heads": 1, "head_dim": 8}, {"use_bidirectional_attention": True}),
            ("Olmo", {"clip_qkv": 0.001}, {"clip_qkv": None}),
            ("SmolLM3", {"num_key_value_heads": 1, "pad_token_id": 0, "no_rope_layers": [1, 0]}, {"no_rope_layers": [1, 1]}),
        ],
    )
    def test_a_live_model_that_computes_something_else(
        self, kind: str, built: dict[str, Any], changes: dict[str, Any], tmp_path: Path
    ) -> None:
        import transformers

        sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        made_of = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")
        models = [getattr(transformers, f"{kind}ForCausalLM")(made_of(**sizes, **{**built, **other})) for other in ({}, changes)]
        models[0].save_pretrained(tmp_path / "model")
        told = [[note.text for note in ckpt_cli.load_into(model, tmp_path / "model").notes] for model in models]
        assert told[0] == []
        assert [next(iter(changes)) in text for text in told[1]] == [True]


class TestHealthyPairs:
    @pytest.mark.parametrize(
        ("mine", "other"),
        [
            (
                {
                    "max_position_embeddings": 131072,
                    "eos_token_id": 151643,
                    "max_window_layers": 28,
                    "use_sliding_window": False,
                    "use_mrope": False,
                },
                {"max_position_embeddings": 32768, "eos_token_id": 151645, "max_window_layers": 28, "use_sliding_window": False},
            ),
            (
                {
                    "architectures": ["LlamaForCausalLM"],
                    "eos_token_id": 128001,
                    "torch_dtype": "bfloat16",
                    "transformers_version": "4.43.0",
                },
                {
                    "architectures": ["LlamaForTokenClassification"],
                    "eos_token_id": [128001, 128008],
                    "dtype": "float32",
                    "id2label": {"0": "LABEL_0"},
                    "transformers_version": "5.0.0",
                    "use_cache": False,
                },
            ),
            (
                {
                    "apply_spec_augment": False,
                    "mask_time_prob": 0.05,
                    "suppress_tokens": [1, 2],
                    "forced_decoder_ids": [[1, 2]],
                    "dropout": 0.0,
                },
                {"apply_spec_augment": True, "mask_time_prob": 0.1, "suppress_tokens": [], "forced_decoder_ids": None, "dropout": 0.1},
            ),
            (
                {
                    "mm_vision_tower": "openai/clip",
                    "mm_projector_lr": None,
                    "freeze_mm_mlp_adapter": False,
                    "tokenizer_padding_side": "right",
                },
                {"mm_vision_tower": "/data/clip", "mm_projector_lr": 2e-5, "freeze_mm_mlp_adapter": True, "tokenizer_padding_side": "left"},
            ),
            ({"use_bidirectional_attention": None, "is_decoder": False}, {"use_bidirectional_attention": False}),
            ({"quantization_config": {"bits": 4, "group_size": 128}}, {"quantization_config": {"bits": 8, "group_size": 64}}),
            ({"time_step_limit": [0.0, {"__float__": "Infinity"}]}, {"time_step_limit": (0.0, float("inf"))}),
            (
                {"num_nextn_predict_layers": 1, "head_dim": None, "n_inner": None},
                {"num_nextn_predict_layers": 0, "head_dim": 8, "n_inner": 64},
            ),
        ],
    )
    def test_have_no_other_settings(self, mine: dict[str, Any], other: dict[str, Any]) -> None:
        assert keys(mine, other) == []

    def test_inside_of_parts_at_any_depth(self) -> None:
        inner = {"dtype": "bfloat16", "use_cache": True, "scale_emb": 1}
        changed = {"dtype": "float32", "use_cache": False, "scale_emb": 2, "new": 1}
        for place in ("text_config", "thinker_config.text_config", "decoder", "audio_encoder.atom"):
            mine, other = ({"architectures": ["A"], **inside(place, each)} for each in (inner, changed))
            assert keys(mine, other) == [f"{place}.scale_emb"]
            assert keys(mine, inside(place, {**changed, "scale_emb": 1})) == []

    @pytest.mark.parametrize(
        ("scaling", "decides"),
        [
            (None, False),
            ({"rope_type": "linear", "factor": 2.0}, False),
            ({"rope_type": "dynamic", "factor": 2.0}, True),
            ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, False),
            ({"type": "su", "long_factor": [1.0], "short_factor": [1.0], "original_max_position_embeddings": 16}, True),
        ],
    )
    def test_of_another_length_where_the_rotation_is_not_made_of_it(self, scaling: dict[str, Any] | None, decides: bool) -> None:
        pair = [{"rope_theta": 1e4, "rope_scaling": scaling, "max_position_embeddings": length} for length in (32, 64)]
        assert keys(*pair) == (["max_position_embeddings"] if decides else [])

    @pytest.mark.slow
    def test_of_every_class_as_it_is_written_and_held(self) -> None:
        seen = 0
        for config in every_config():
            held = config.to_dict()
            for written in (config.to_json_string(), config.to_json_string(use_diff=False)):
                assert keys(json.loads(written), held) == [], type(config).__name__
                assert keys(older(json.loads(written)), held) == [], type(config).__name__
            seen += 1
        assert seen > 500


def inside(place: str, entries: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(place.split(".")):
        entries = {name: entries}
    return entries


def every_config() -> Iterator[Any]:
    """The config of every class of the installed transformers that is built without arguments."""
    import transformers.models
    from transformers import PretrainedConfig

    for module in pkgutil.walk_packages(transformers.models.__path__, "transformers.models."):
        if not module.name.rpartition(".")[2].startswith("configuration_"):
            continue
        for kind in vars(import_module(module.name)).values():
            if isinstance(kind, type) and issubclass(kind, PretrainedConfig) and kind.__module__ == module.name:
                try:
                    yield kind()
                except Exception:  # noqa: BLE001 - whatever a class raises without arguments
                    continue


def older(config: dict[str, Any]) -> dict[str, Any]:
    """A config as transformers 4 writes it."""
    found = {key: older(value) if key.endswith("_config") and isinstance(value, dict) else value for key, value in config.items()}
    found |= {"torch_dtype": found.pop("dtype", None), "transformers_version": "4.40.0", "use_cache": True}
    rope = found.get("rope_parameters")
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        del found["rope_parameters"]
        found |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor", "rope_type")}
        kind = rope.get("rope_type")
        found["rope_scaling"] = {"type": kind, **rest} if rest or kind not in (None, "default") else None
    return found
