"""Arguments of Megatron that no shape shows are compared with config.json: other numbers are refused, what it does not say is a warning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, Inconsistent, Unsupported
from ckpt_cli.hub.megatron.config import check_config, config_from, padding_note
from ckpt_cli.hub.megatron.settings import SETTINGS
from ckpt_cli.hub.megatron.settings import YARN as YARN_NUMBERS
from tests.megatron import arguments, write_legacy
from tests.tensors import differences, load

LLAMA: dict[str, Any] = {"rotary_percent": 1.0, "use_rope_scaling": False, "window_size": None, "rotary_interleaved": False, "spec": None}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_expert_capacity_factor": None,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 24, "hidden_act": "silu"}
CONFIG: dict[str, Any] = {"model_type": "llama", **HEADS, "rms_norm_eps": 1e-5, "rope_parameters": ROPE, "tie_word_embeddings": False}
MIXTRAL = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
QWEN = {**CONFIG, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
DEEPSEEK = {
    **CONFIG,
    "model_type": "deepseek_v3",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "scoring_func": "sigmoid",
    "kv_lora_rank": 16,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
LATENT = {"multi_latent_attention": True, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16, "rotary_scaling_factor": 1.0}
SIGMOID = {**EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 2}
DEEP = {**SIGMOID, **LATENT, "moe_router_group_topk": 1}
YARN = {**ROPE, "rope_type": "yarn", "factor": 40.0}
LLAMA3 = {**ROPE, "rope_type": "llama3", "factor": 8.0}
SCALED = {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}
YARNED = {**DEEP, "rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}
BY_POSITION = {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
LONG = {**CONFIG, "rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}
LINEAR = {**ROPE, "rope_type": "linear", "factor": 4.0}
GLM = {**CONFIG, "model_type": "glm4"}

FITS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (CONFIG, LLAMA),
    ({**CONFIG, "vocab_size": 64}, {"vocab_size": 53}),
    ({**CONFIG, "rope_parameters": None, "rope_theta": 10000}, LLAMA),
    (
        {**CONFIG, "rope_parameters": None, "rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 4}},
        {"rotary_seq_len_interpolation_factor": 4},
    ),
    ({**CONFIG, "rope_parameters": LLAMA3}, {"use_rope_scaling": True}),
    ({**CONFIG, "rope_parameters": LINEAR}, {"rotary_seq_len_interpolation_factor": 4}),
    ({**CONFIG, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}, {"rotary_percent": 0.25}),
    ({**CONFIG, "model_type": "mistral", "sliding_window": 8}, {"window_size": (8, 0)}),
    ({**CONFIG, "model_type": "mistral", "sliding_window": 8}, {"window_size": [7, 0]}),
    ({**CONFIG, "model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, LLAMA),
    (GLM, {**LLAMA, "rotary_percent": 0.5, "rotary_interleaved": True}),
    (MIXTRAL, {**EXPERTS, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}),
    (QWEN, {**EXPERTS, "moe_router_pre_softmax": True}),
    ({**QWEN, "norm_topk_prob": True}, EXPERTS),
    (DEEPSEEK, DEEP),
    ({**DEEPSEEK, "rope_parameters": YARN}, {**DEEP, "rotary_scaling_factor": 40}),
    ({**CONFIG, "rope_parameters": {**LLAMA3, "factor": 32.0}}, {"use_rope_scaling": True, "rope_scaling_factor": 32}),
    (CONFIG, {"use_rope_scaling": False, "rope_scaling_factor": 8.0}),
    (DEEPSEEK, {**DEEP, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}),
    (DEEPSEEK, {**DEEP, "rope_type": "rope", "rotary_scaling_factor": 40.0, "mscale_all_dim": 0.0, "beta_fast": 7}),
    ({**DEEPSEEK, "rope_parameters": SCALED}, {**YARNED, "rope_type": "yarn", "beta_fast": 32.0, "original_max_position_embeddings": 4096}),
    ({**DEEPSEEK, "rope_parameters": YARN}, {**YARNED, "rope_type": None, "mscale_all_dim": 0.0, "beta_slow": 1}),
    (LONG, BY_POSITION),
    (CONFIG, {"softmax_scale": 8**-0.5}),
    (
        {**DEEPSEEK, "routed_scaling_factor": 1, "n_group": 1},
        {**DEEP, "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None, "moe_router_group_topk": None},
    ),
]
DIFFERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (CONFIG, {"rotary_base": 500000}),
    (CONFIG, {"layernorm_epsilon": 1e-6}),
    (CONFIG, {"rotary_percent": 0.5}),
    (CONFIG, {"rotary_seq_len_interpolation_factor": 4}),
    (CONFIG, {"use_rope_scaling": True}),
    ({**CONFIG, "rope_parameters": LLAMA3}, {"use_rope_scaling": False}),
    ({**CONFIG, "hidden_act": "gelu"}, {"swiglu": True}),
    (CONFIG, {"swiglu": False}),
    ({**CONFIG, "sliding_window": 8}, {"window_size": (16, 0)}),
    (GLM, {"rotary_percent": 0.5, "rotary_interleaved": False}),
    ({**GLM, "model_type": "glm4_moe"}, {"rotary_percent": 0.5, "rotary_interleaved": True}),
    ({**MIXTRAL}, {**EXPERTS, "moe_router_topk": 1}),
    (MIXTRAL, {**EXPERTS, "moe_router_pre_softmax": True}),
    (MIXTRAL, {**EXPERTS, "moe_router_score_function": "sigmoid"}),
    (MIXTRAL, {**EXPERTS, "moe_router_topk_scaling_factor": 2.5}),
    (MIXTRAL, {**EXPERTS, "moe_router_load_balancing_type": "sinkhorn"}),
    (MIXTRAL, {**EXPERTS, "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}),
    (QWEN, EXPERTS),
    ({**QWEN, "norm_topk_prob": True}, {**EXPERTS, "moe_router_pre_softmax": True}),
    (QWEN, {**EXPERTS, "moe_router_pre_softmax": True, "moe_router_group_topk": 2}),
    (DEEPSEEK, {**DEEP, "moe_router_topk_scaling_factor": None}),
    (DEEPSEEK, {**DEEP, "moe_router_score_function": "softmax"}),
    (DEEPSEEK, {**DEEP, "moe_router_num_groups": None}),
    (DEEPSEEK, {**DEEP, "qk_head_dim": 8}),
    (DEEPSEEK, {**DEEP, "rotary_scaling_factor": 40}),
    ({**DEEPSEEK, "rope_parameters": YARN}, DEEP),
    (DEEPSEEK, {**DEEP, "num_attention_heads": 8}),
    ({**CONFIG, "rope_parameters": LLAMA3}, {"use_rope_scaling": True, "rope_scaling_factor": 32.0}),
    ({**CONFIG, "rope_parameters": {**LLAMA3, "factor": 32.0}}, {"use_rope_scaling": True}),
    ({**CONFIG, "rope_parameters": {**LLAMA3, "high_freq_factor": 2.0}}, {"use_rope_scaling": True}),
    ({**DEEPSEEK, "rope_parameters": SCALED}, {**YARNED, "rope_type": "rope"}),
    (DEEPSEEK, {**YARNED, "rope_type": "yarn"}),
    (DEEPSEEK, {**YARNED, "rope_type": "rope"}),
    ({**DEEPSEEK, "rope_parameters": {**LINEAR}}, {**DEEP, "rope_type": "rope"}),
    *(({**DEEPSEEK, "rope_parameters": SCALED}, {**YARNED, name: 0.5}) for name in YARN_NUMBERS),
    *((LONG, {**BY_POSITION, f"yarn_{name}": 0.5}) for name in YARN_NUMBERS),
    (LONG, {**BY_POSITION, "yarn_correction_range_round_to_int": False}),
    (LONG, LLAMA),
    (LONG, {"position_embedding_type": "rope"}),
    (CONFIG, BY_POSITION),
    (CONFIG, {"softmax_scale": 0.1}),
    ({**CONFIG, "vocab_size": 53}, {"vocab_size": 60}),
]
UNKNOWN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({**CONFIG, "rope_parameters": None}, {"rotary_base": 10000}),
    ({key: value for key, value in CONFIG.items() if key != "rms_norm_eps"}, {"layernorm_epsilon": 1e-5}),
    (CONFIG, {"spec": ["my_layers", "get_spec"]}),
    (CONFIG, {"window_attn_skip_freq": 2}),
    ({**CONFIG, "sliding_window": 8}, {"window_size": None}),
    (MIXTRAL, {**EXPERTS, "moe_expert_capacity_factor": 1.0}),
    ({**DEEPSEEK, "norm_topk_prob": False}, DEEP),
    ({**DEEPSEEK, "rope_parameters": YARN}, {**YARNED, "mscale_all_dim": 0.0, "original_max_position_embeddings": 4096}),
    (LONG, {"position_embedding_type": "yarn"}),
    (CONFIG, {"yaml_cfg": "model.yaml"}),
    ({**DEEPSEEK, "routed_scaling_factor": None}, DEEP),
]


def checked(config: dict[str, Any], changes: dict[str, Any]) -> list[str]:
    return [note.text for note in check_config(config, vars(arguments(**changes)))]


@pytest.mark.parametrize(("config", "changes"), FITS)
def test_what_a_config_says_too_is_no_doubt(config: dict[str, Any], changes: dict[str, Any]) -> None:
    assert checked(config, changes) == []


@pytest.mark.parametrize(("config", "changes"), DIFFERS)
def test_other_numbers_are_refused(config: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises((Inconsistent, Unsupported)):
        checked(config, changes)


@pytest.mark.parametrize(("config", "changes"), UNKNOWN)
def test_what_a_config_does_not_say_is_a_warning(config: dict[str, Any], changes: dict[str, Any]) -> None:
    (text,) = checked(config, changes)
    assert "not compared" in text


@pytest.mark.parametrize("row", [row for row in SETTINGS if row.said is None and not row.seen and not row.doubt], ids=lambda row: row.name)
def test_what_no_class_has_is_refused_with_every_config(row: Any) -> None:
    for config in (MIXTRAL, {**QWEN, "norm_topk_prob": True}):
        with pytest.raises(Unsupported, match=row.name):
            checked(config, {**EXPERTS, row.name: "something else"})


def test_a_config_that_is_made_of_arguments_agrees_with_them() -> None:
    for more in (
        {},
        {"add_qkv_bias": True},
        {"qk_layernorm": True},
        EXPERTS,
        {**EXPERTS, "qk_layernorm": True, "moe_router_pre_softmax": True},
    ):
        held = vars(arguments(**LLAMA, **more))
        made = config_from(held)
        assert isinstance(made, dict)
        assert check_config(made, held) == []


# -- in every command that gives Megatron's tensors the names of the hub -----------------------------------------------


@pytest.fixture
def folder(data: Path, tmp_path: Path) -> Callable[..., Path]:
    """A run with some arguments; a model folder with the config and the weights that it would become lies in ``base``."""

    def make(**changes: Any) -> Path:
        case = data / "megatron" / "llama-tp2"
        config = {**json.loads((case / "config.json").read_text()), **changes.pop("config", {})}
        (tmp_path / "base").mkdir()
        (tmp_path / "base" / "config.json").write_text(json.dumps(config))
        save_file(load(case / "expected_hf.safetensors"), tmp_path / "base" / "model.safetensors", {"format": "pt"})
        write_legacy(tmp_path / "run", load(case / "expected_native.safetensors"), arguments(num_layers=3, **{**LLAMA, **changes}), [[3]])
        return tmp_path / "run"

    return make


COMMANDS: dict[str, Callable[[Path, Path], Any]] = {
    "merge": lambda run, base: ckpt_cli.merge(run, run.parent / "out", base=base),
    "average": lambda run, base: ckpt_cli.average([run, base], run.parent / "out"),
    "average-newest": lambda run, base: ckpt_cli.average([base, run], run.parent / "out"),
    "verify": lambda run, base: ckpt_cli.verify(base, against=run),
}
CHANGES: list[dict[str, Any]] = [
    {"rotary_percent": 0.5},
    {"position_embedding_type": "none"},
    {"quick_geglu": True},
    {"apply_residual_connection_post_layernorm": True},
    {"qk_l2_norm": True},
    {"use_rope_scaling": True},
    {"rotary_base": 500000},
    {"config": {"rms_norm_eps": 1e-3}},
]

MADE = CHANGES[-2:]
"""A config.json can say what these training had, so that one is made for a run alone; the tensors are the same."""


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_go_on_with_equal_ones(command: str, folder: Callable[..., Path]) -> None:
    run = folder()
    COMMANDS[command](run, run.parent / "base")
    if command == "merge":
        assert differences(load(run.parent / "out"), load(run.parent / "base")) == []


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_commands_refuse_other_ones(command: str, changes: dict[str, Any], folder: Callable[..., Path]) -> None:
    run = folder(**changes)
    if command == "verify" and changes in MADE:
        found = ckpt_cli.verify(run.parent / "base", against=run)
        assert found.exit_code == 1
        assert "the training had" in next(item.message for item in found.findings if item.code == "other-arguments")
        return
    with pytest.raises(CkptError) as caught:
        COMMANDS[command](run, run.parent / "base")
    assert caught.value.exit_code in (3, 4)
    # Without a config nothing but the arguments says what the weights are.
    alone = f"the argument {next(iter(changes))} is" if command == "verify" else "the training had"
    assert alone in caught.value.message or "the training had" in caught.value.message
    assert not (run.parent / "out").exists()


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_names_of_megatron_are_written_all_the_same(changes: dict[str, Any], folder: Callable[..., Path]) -> None:
    run = folder(**changes)
    ckpt_cli.merge(run, run.parent / "out", names="native")


@pytest.mark.parametrize(("tokenizer", "padded", "said"), [("NullTokenizer", 64, True), ("NullTokenizer", 53, False), ("Other", 64, False)])
def test_the_row_of_the_end_of_a_document_is_not_left_out_without_a_word(tokenizer: str, padded: int, said: bool) -> None:
    held = vars(arguments(tokenizer_type=tokenizer, padded_vocab_size=padded))
    made = config_from(held)
    assert isinstance(made, dict)
    assert [note.code for note in padding_note(made, held)] == ["end-of-document"] * said
    assert padding_note({**made, "vocab_size": 54}, held) == []
