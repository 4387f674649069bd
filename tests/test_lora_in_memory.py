"""Adapters alone are for the model in memory: a base of the hub has its experts one by one, and is fused and compared all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.base_model.opened import open_base
from ckpt_cli.errors import Inconsistent, Undecidable
from ckpt_cli.files.source import Files
from ckpt_cli.hub.classes.in_memory.joined import joined_tensors
from ckpt_cli.hub.classes.in_memory.split import split_tensors
from ckpt_cli.hub.classes.names import hub_tensors, native_tensors
from ckpt_cli.hub.classes.rules import rules_for
from ckpt_cli.tensors.reading import elements
from tests.architectures import DENSE, MODELS, build
from tests.architectures import EXPERTS as OF_EXPERTS
from tests.tensors import load
from tests.test_older_bases import saved_while_merged

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")]

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(autouse=True)
def quiet(quiet_transformers: None) -> None:
    """transformers and peft are the oracles here."""


def base_of(kind: str, folder: Path) -> Path:
    """A model as `save_pretrained` writes it."""
    build(*MODELS[kind]).save_pretrained(folder)
    return folder


def adapted(base: Path, **options: Any) -> Any:
    """A base with random adapters on it, as PEFT makes it."""
    return with_adapters(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), **options)


def with_adapters(model: Any, **options: Any) -> Any:
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=10, **options))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return made


def assert_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert {name: tensor.shape for name, tensor in found.items()} == {name: tensor.shape for name, tensor in wanted.items()}
    for name, tensor in wanted.items():
        assert (found[name] - tensor).abs().max().item() <= 8 * 2**-23 * max(tensor.abs().max().item(), 1.0), name


@pytest.mark.usefixtures("asked_here")
class TestFusedExperts:
    @pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3", "qwen3_next", "jamba"])
    def test_go_into_the_experts_of_a_base_of_the_hub(self, kind: str, tmp_path: Path) -> None:
        base = base_of(kind, tmp_path / "base")
        model = adapted(base, target_modules=["q_proj", "o_proj"], target_parameters=EXPERTS)
        model.save_pretrained(tmp_path / "adapter")
        assert any(".experts.0." in name for name in load(base))
        result = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base, verify=True)
        assert result.exit_code == 0
        model.merge_and_unload().save_pretrained(tmp_path / "peft")
        assert_near(load(tmp_path / "out"), load(tmp_path / "peft"))
        assert load(tmp_path / "out").keys() == load(base).keys()
        assert ckpt_cli.verify(tmp_path / "out", against=tmp_path / "adapter", full=True).exit_code == 0

    def test_of_names_that_were_modules_before_are_fused_too(self, tmp_path: Path) -> None:
        """PEFT turns ``target_modules`` of transformers 4 into parameters, with another rank for those that are joined."""
        base = base_of("qwen3_moe", tmp_path / "base")
        model = adapted(base, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
        model.save_pretrained(tmp_path / "adapter")
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base)
        model.merge_and_unload().save_pretrained(tmp_path / "peft")
        assert_near(load(tmp_path / "out"), load(tmp_path / "peft"))

    def test_are_exported_for_that_base(self, tmp_path: Path) -> None:
        base = base_of("mixtral", tmp_path / "base")
        adapted(base, target_modules=["q_proj"], target_parameters=EXPERTS).save_pretrained(tmp_path / "adapter")
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base, lora="export")
        wanted, found = load(tmp_path / "adapter"), load(tmp_path / "out")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def test_that_have_no_adapter_stay_as_they_are(self, tmp_path: Path) -> None:
        base = base_of("qwen3_moe", tmp_path / "base")
        adapted(base, target_modules=["q_proj"]).save_pretrained(tmp_path / "adapter")
        result = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base)
        assert result.outputs[0].renamed == 0
        wanted, found = load(base), load(tmp_path / "out")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted if "q_proj" not in name)

    def test_are_written_as_in_memory_if_names_are(self, tmp_path: Path) -> None:
        base = base_of("qwen3_moe", tmp_path / "base")
        model = adapted(base, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
        model.save_pretrained(tmp_path / "adapter")
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base, names="native")
        assert_near(load(tmp_path / "out"), dict(model.merge_and_unload().state_dict()))

    @pytest.mark.parametrize("flaw", ["missing", "of another dtype"])
    def test_of_a_base_that_does_not_go_together_are_not_guessed(self, flaw: str, tmp_path: Path) -> None:
        base = base_of("qwen3_moe", tmp_path / "base")
        adapted(base, target_parameters=EXPERTS, target_modules=[]).save_pretrained(tmp_path / "adapter")
        tensors, name = load(base), "model.layers.0.mlp.experts.1.up_proj.weight"
        tensors = {**tensors, name: tensors[name].bfloat16()}
        if flaw == "missing":
            del tensors[name]
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
        with pytest.raises(Undecidable, match="is not here") as caught:
            ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base)
        assert "without --base" in (caught.value.hint or "")
        with pytest.raises(Inconsistent, match="3 of 4 adapters"):
            ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base, lora="export")
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", lora="export")

    def test_that_were_saved_while_merged_are_noticed(self, tmp_path: Path) -> None:
        base = base_of("qwen3_moe", tmp_path / "base")
        model = adapted(base, target_parameters=EXPERTS, target_modules=[])
        run = saved_while_merged(model, tmp_path / "run")
        with pytest.raises(Inconsistent, match="in these weights already"):
            ckpt_cli.merge(run, tmp_path / "out", base=base)


SMALL = {**DENSE, "vocab_size": 96}
PICTURES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4}
TOWER |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}

WHOLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        {"text_config": {**SMALL, **LINEAR}, "vision_config": TOWER, "image_token_id": 90, "video_token_id": 91},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        {
            "text_config": {**SMALL, **LINEAR, **OF_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
            "vision_config": TOWER,
            "image_token_id": 90,
            "video_token_id": 91,
        },
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3ForCausalLM",
        {"text_config": SMALL, "vision_config": PICTURES, "mm_tokens_per_image": 4, "image_token_index": 90},
    ),
}


def whole_and_part(kind: str, folder: Path) -> tuple[Path, Any]:
    """A vision-language folder, and its language model by its own class, with the same values."""
    whole_class, part_class, content = WHOLES[kind]
    torch.manual_seed(0)
    whole = getattr(transformers, whole_class)(transformers.AutoConfig.for_model(kind, **content))
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    whole.save_pretrained(folder)
    part = getattr(transformers, part_class)(whole.config.get_text_config())
    values = {name.replace("model.language_model.", "model."): tensor for name, tensor in whole.state_dict().items()}
    part.load_state_dict({name: values[name] for name in part.state_dict()})
    return folder, part


@pytest.mark.usefixtures("asked_here")
class TestTheLanguageModelOfAWhole:
    """`AutoModelForCausalLM` makes a model of a part of the folder, whose names lack what stands in front of it in the whole."""

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            ("qwen3_5", {"target_modules": ["q_proj", "v_proj", "in_proj_qkv", "down_proj"]}),
            ("qwen3_5", {"target_modules": r"model\.layers\.\d+\..*(q_proj|out_proj)", "modules_to_save": ["lm_head"]}),
            ("qwen3_5_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
            # The tower has modules of these names and shapes too.
            ("gemma3", {"target_modules": ["q_proj", "v_proj"]}),
        ],
    )
    def test_is_fused_into_the_whole(self, kind: str, options: dict[str, Any], tmp_path: Path) -> None:
        base, part = whole_and_part(kind, tmp_path / "base")
        model = with_adapters(part, **options)
        model.save_pretrained(tmp_path / "adapter")
        result = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base, verify=True)
        assert result.exit_code == 0
        state = model.merge_and_unload().state_dict()
        merged = {name if name == "lm_head.weight" else f"model.language_{name}": tensor for name, tensor in state.items()}
        whole_class = getattr(transformers, WHOLES[kind][0])
        wanted, found = (whole_class.from_pretrained(folder, dtype=torch.float32).state_dict() for folder in (base, tmp_path / "out"))
        assert merged.keys() <= wanted.keys()
        assert_near(dict(found), {**wanted, **merged})
        assert load(tmp_path / "out").keys() >= load(base).keys()
        told = [note.text for note in result.outputs[0].notes if note.code == "lora-base"]
        assert any(WHOLES[kind][1] in text and "model.language_model." in text for text in told)

    @pytest.mark.parametrize("kind", WHOLES)
    def test_is_exported_as_it_is(self, kind: str, tmp_path: Path) -> None:
        base, part = whole_and_part(kind, tmp_path / "base")
        with_adapters(part, target_modules=["q_proj"]).save_pretrained(tmp_path / "adapter")
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base, lora="export")
        assert load(tmp_path / "out").keys() == load(tmp_path / "adapter").keys()

    def test_of_a_type_that_other_models_have_is_refused(self, tmp_path: Path) -> None:
        """Adapters of any llama would fit into the llama of a LLaVA."""
        llama, images = {**DENSE, "model_type": "llama"}, {**PICTURES, "model_type": "clip_vision_model"}
        config = transformers.AutoConfig.for_model("llava", text_config=llama, vision_config=images, image_token_index=60)
        transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "base")
        adapted(base_of("llama", tmp_path / "llama"), target_modules=["q_proj"]).save_pretrained(tmp_path / "adapter")
        with pytest.raises(Undecidable, match="is not here"):
            ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
        with pytest.raises(Inconsistent, match="another model, or has other names: 0 of 2"):
            ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base", lora="export")


def test_two_projections_that_are_one_in_memory_are_joined_too(tmp_path: Path) -> None:
    """By the rules of the class alone: MiniMax-M3 has one layer for gate and up in memory, beside its fused experts."""
    config = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl"}
    start = "language_model.model.layers.0.block_sparse_moe"
    tensors = {f"{start}.shared_experts.{name}_proj.weight": torch.randn(6, 4) for name in ("gate", "up")}
    tensors |= {f"{start}.experts.{number}.{name}.weight": torch.randn(6, 4) for number in range(3) for name in ("w1", "w3")}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    held = open_base(tmp_path, Files(), needed=True).weights().tensors
    rules = rules_for(config)
    assert rules is not None
    joined = joined_tensors(native_tensors(held, rules), rules, config, lambda name: name.endswith("mlp.experts.gate_up_proj"))
    inner = "model.language_model.layers.0.mlp"
    assert {name: tensor.shape for name, tensor in joined.items()} == {
        f"{inner}.experts.gate_up_proj": (3, 12, 4),
        f"{inner}.shared_experts.gate_up_proj.weight": (12, 4),
    }
    shared = torch.cat([tensors[f"{start}.shared_experts.{name}_proj.weight"] for name in ("gate", "up")])
    assert elements(joined[f"{inner}.shared_experts.gate_up_proj.weight"]).tolist() == shared.flatten().tolist()
    assert hub_tensors(joined, rules, config).keys() == held.keys()


SPLIT = {**SMALL, "num_hidden_layers": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1}
ROUTED = {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}

APART: dict[str, tuple[str, dict[str, Any], str]] = {
    "hrm_text": ("HrmTextForCausalLM", SPLIT, "gqkv_proj"),
    "lara_mini": ("LaraMiniForCausalLM", {**SPLIT, **LINEAR}, "linear_attn.in_proj."),
    "bailing_hybrid": ("BailingHybridForCausalLM", {**SPLIT, **LATENT, **ROUTED}, "q_conv1d"),
    "mistral_large4": (
        "MistralLarge4ForConditionalGeneration",
        {"text_config": {**SPLIT, **LATENT, **ROUTED}, "vision_config": {**PICTURES, "head_dim": 8}},
        "attention.wq.",
    ),
}
"""Classes whose files join, turn or cut tensors: into equal parts, into parts of several sizes, and those without an adapter."""


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("kind", APART)
def test_what_files_join_is_fused_where_the_class_has_it_apart(kind: str, tmp_path: Path) -> None:
    name, options, on_hub = APART[kind]
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "base")
    assert any(on_hub in name for name in load(tmp_path / "base"))
    made = with_adapters(model, target_modules="all-linear")
    made.save_pretrained(tmp_path / "adapter")
    assert ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base", verify=True).exit_code == 0
    made.merge_and_unload().save_pretrained(tmp_path / "peft")
    assert_near(load(tmp_path / "out"), load(tmp_path / "peft"))


def test_parts_of_a_joined_tensor_are_cut_where_they_begin(tmp_path: Path) -> None:
    """Sizes of the class, or equal ones; one that is not known is the rest. Where two are not, nothing is cut."""
    config = {"architectures": ["LaraMiniForCausalLM"], "model_type": "lara_mini"}
    rules = rules_for(config)
    assert rules is not None
    start, values = "model.layers.0.linear_attn.in_proj", torch.randn(10, 3)
    save_file({f"{start}.weight": values}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = open_base(tmp_path, Files(), needed=True).weights().tensors
    sizes = {f"{start}_qkv.weight": 5, f"{start}_z.weight": 2, f"{start}_b.weight": 1}
    split = split_tensors(tensors, rules, config, lambda name: name in sizes, lambda name, axis: sizes.get(name) if axis == 0 else None)
    assert {name: tensor.shape[0] for name, tensor in split.items()} == {**sizes, f"{start}_a.weight": 2}
    cut = values.split([5, 2, 1, 2])
    assert all(elements(tensor).tolist() == part.flatten().tolist() for tensor, part in zip(split.values(), cut, strict=True))
    assert hub_tensors(split, rules, config).keys() == tensors.keys()
    sizes.popitem()
    assert split_tensors(tensors, rules, config, lambda name: name in sizes, lambda name, _: sizes.get(name)).keys() == tensors.keys()
