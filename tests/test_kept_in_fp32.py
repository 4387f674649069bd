"""Tensors that transformers keeps in fp32 in a model of 16 bits: `--dtype` gives every tensor the dtype that loading and saving would."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import UsageError
from ckpt_cli.files.manifest import NAME
from tests.architectures import DENSE, EXPERTS, IMAGES, MODELS, WORDS, answered_here, build
from tests.cli import ckpt_fork
from tests.tensors import Tensors, differences, load
from tests.tiny import folder, unknown, weights
from tests.training import trained

os.environ["TOKENIZERS_PARALLELISM"] = "false"

MORE: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    **MODELS,
    "afmoe": ("AfmoeForCausalLM", "afmoe", {**DENSE, **EXPERTS, "num_experts": 4, "num_dense_layers": 1}),
    "blip-2": (
        "Blip2ForConditionalGeneration",
        "blip-2",
        {
            "vision_config": IMAGES,
            "qformer_config": {**WORDS, "encoder_hidden_size": 32},
            "text_config": {**WORDS, "model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32},
            "num_query_tokens": 4,
        },
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        "voxtral",
        {
            "text_config": {**DENSE, "model_type": "llama"},
            "audio_config": {**IMAGES, "num_mel_bins": 8, "max_source_positions": 16},
        },
    ),
    "rwkv": ("RwkvForCausalLM", "rwkv", {**WORDS, "attention_hidden_size": 32}),
    "wav2vec2": (
        "Wav2Vec2ForPreTraining",
        "wav2vec2",
        {
            **WORDS,
            "conv_dim": [16],
            "conv_stride": [2],
            "conv_kernel": [3],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "num_codevectors_per_group": 4,
            "codevector_dim": 8,
            "proj_codevector_dim": 8,
        },
    ),
    "xlnet": ("XLNetLMHeadModel", "xlnet", {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
}
"""With classes that keep norms, a Q-Former, positions of audio, or what they make in fp32 whatever is asked."""

Half = Literal["bf16", "fp16"]
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def quiet(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers is asked in this process, which has it already."""
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


def resaved(source: Path, target: Path, kind: str, dtype: Half) -> Tensors:
    """What transformers makes of a folder that it loads in a dtype and saves again."""
    import transformers

    getattr(transformers, kind).from_pretrained(source, dtype=HALVES[dtype]).save_pretrained(target)
    return load(target)


def state(folder: Path, kind: str, dtype: Half) -> Tensors:
    import transformers

    return dict(getattr(transformers, kind).from_pretrained(folder, dtype=HALVES[dtype]).state_dict())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MORE)
def test_every_architecture(tmp_path: Path, name: str, dtype: Half) -> None:
    kind = MORE[name][0]
    run = trained(build(*MORE[name]), tmp_path)
    wanted = resaved(tmp_path / "saved", tmp_path / "resaved", kind, dtype)
    result = ckpt_cli.merge(run, tmp_path / "out", dtype=dtype)
    held = load(tmp_path / "out")
    assert differences(held, wanted) == []
    assert set(result.outputs[0].kept_in_fp32) == {name for name, tensor in wanted.items() if tensor.dtype == torch.float32}
    loaded, original = state(tmp_path / "out", kind, dtype), state(tmp_path / "saved", kind, dtype)
    assert differences(loaded, original) == []
    assert ckpt_cli.verify(tmp_path / "out", full=True, against=run).against[0].identical


ROUTERS = ("model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.gate.weight")


def saved(path: Path, name: str = "deepseek_v3", seed: int = 0) -> Path:
    """A folder of a tiny model, the values of every tensor moved by the seed."""
    model = build(*MORE[name])
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(seed / 97)
    model.save_pretrained(path)
    return path


def config(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "config.json").read_text()))


def test_of_a_checkpoint_in_16_bits(tmp_path: Path) -> None:
    """What loading widens is widened: its values are the same, and no loader has to do it."""
    build(*MORE["deepseek_v3"]).to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved")[ROUTERS[1]].dtype == torch.bfloat16
    for dtype in ("bf16", "fp16"):
        wanted = resaved(tmp_path / "saved", tmp_path / f"resaved-{dtype}", "DeepseekV3ForCausalLM", dtype)
        ckpt_cli.merge(tmp_path / "saved", tmp_path / dtype, dtype=dtype)
        assert differences(load(tmp_path / dtype), wanted) == []
        assert config(tmp_path / dtype)["dtype"] == config(tmp_path / f"resaved-{dtype}")["dtype"]


def test_of_a_class_whose_config_names_custom_code(tmp_path: Path) -> None:
    """As of DeepSeek-V3, which transformers has itself; one that only the code has is not known, and all of it is cast."""
    saved(tmp_path / "saved")
    content = config(tmp_path / "saved")
    content["auto_map"] = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    (tmp_path / "saved" / "config.json").write_text(json.dumps(content))
    assert ckpt_cli.merge(tmp_path / "saved", tmp_path / "out", dtype="bf16").outputs[0].kept_in_fp32 == ROUTERS
    content |= {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}
    (tmp_path / "saved" / "config.json").write_text(json.dumps(content))
    result = ckpt_cli.merge(tmp_path / "saved", tmp_path / "own", dtype="bf16")
    assert result.outputs[0].kept_in_fp32 == ()
    assert {tensor.dtype for tensor in load(tmp_path / "own").values()} == {torch.bfloat16}


def test_of_a_class_that_nobody_knows(tmp_path: Path) -> None:
    folder(tmp_path / "saved", {**weights(), ROUTERS[0]: torch.randn(4)}, unknown())
    result = ckpt_cli.merge(tmp_path / "saved", tmp_path / "out", dtype="bf16")
    assert result.outputs[0].kept_in_fp32 == ()
    assert load(tmp_path / "out")[ROUTERS[0]].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [None, "keep", "fp32"])
def test_of_other_dtypes_nothing_is_said(tmp_path: Path, dtype: str | None) -> None:
    saved(tmp_path / "saved")
    assert ckpt_cli.merge(tmp_path / "saved", tmp_path / "out", dtype=dtype).outputs[0].kept_in_fp32 == ()
    assert load(tmp_path / "out")[ROUTERS[0]].dtype == torch.float32


def test_of_an_average(tmp_path: Path) -> None:
    """The mean of what is kept is not rounded to 16 bits either, and is what transformers keeps of the mean in fp32."""
    folders = [saved(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    ckpt_cli.average(folders, tmp_path / "fp32")
    result = ckpt_cli.average(folders, tmp_path / "out", dtype="bf16")
    assert result.outputs[0].kept_in_fp32 == ROUTERS
    assert differences(load(tmp_path / "out"), resaved(tmp_path / "fp32", tmp_path / "resaved", "DeepseekV3ForCausalLM", "bf16")) == []


@pytest.mark.parametrize("more", [["--cast-all"], []])
def test_of_ranks_as_trained(tmp_path: Path, more: list[str]) -> None:
    """Also under the names in memory; `verify` of the output knows what was kept, from its manifest."""
    run = trained(build(*MORE["deepseek_v3"]), tmp_path)
    out = ckpt_fork("merge", run, "-o", tmp_path / "out", "--dtype", "bf16", "--names", "native", "--verify", *more)
    assert out.code == 0, out.err
    assert ("kept in fp32  2 tensors, as transformers does" in out.out) == (not more)
    assert {load(tmp_path / "out")[name].dtype for name in ROUTERS} == {torch.bfloat16 if more else torch.float32}
    again = ckpt_fork("verify", tmp_path / "out", "--against", run)
    assert again.code == 0, again.out


def test_in_place_and_in_parts(tmp_path: Path) -> None:
    run = trained(build(*MORE["deepseek_v3"]), tmp_path)
    ckpt_cli.merge(run, tmp_path / "out", dtype="fp16")
    for number in range(2):
        ckpt_cli.merge(run, tmp_path / "parts", dtype="fp16", part=f"{number}/2")
    ckpt_cli.publish(tmp_path / "parts")
    ckpt_cli.merge(run, in_place=True, dtype="fp16", weights_name="half.safetensors")
    assert differences(load(tmp_path / "parts"), load(tmp_path / "out")) == []
    assert ckpt_cli.verify(tmp_path / "parts", against=run).exit_code == 0
    from safetensors.torch import load_file

    assert differences(load_file(run / "half.safetensors"), load(tmp_path / "out")) == []


def test_an_output_of_before_is_still_what_it_should_be(tmp_path: Path) -> None:
    """Its manifest does not say what was kept, since everything was cast."""
    run = trained(build(*MORE["deepseek_v3"]), tmp_path)
    ckpt_cli.merge(run, tmp_path / "out", dtype="bf16", cast_all=True)
    path = tmp_path / "out" / NAME
    content = json.loads(path.read_text())
    del content["kept_in_fp32"], content["options"]["cast_all"]
    path.write_text(json.dumps(content))
    assert ckpt_cli.verify(tmp_path / "out", against=run).against[0].identical


def test_another_dtype_than_was_kept_is_a_finding(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    run = trained(build(*MORE["deepseek_v3"]), tmp_path)
    ckpt_cli.merge(run, tmp_path / "out", dtype="bf16")
    tensors = load(tmp_path / "out")
    save_file({**tensors, ROUTERS[0]: tensors[ROUTERS[0]].bfloat16()}, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    found = [item for item in ckpt_cli.verify(tmp_path / "out", against=run).findings if item.code == "different-dtype"]
    assert [item.tensor for item in found] == [ROUTERS[0]]


@pytest.mark.parametrize("cast_all", [False, True])
def test_lazy_tensors_and_state_dicts(tmp_path: Path, cast_all: bool) -> None:
    saved(tmp_path / "saved")
    ckpt_cli.merge(tmp_path / "saved", tmp_path / "out", dtype="bf16", cast_all=cast_all)
    held = ckpt_cli.load_state_dict(tmp_path / "saved", dtype="bf16", cast_all=cast_all)
    assert differences(held, load(tmp_path / "out")) == []


def test_the_config_names_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    """Also where most elements are kept; `verify` does not take these for the dtype of the model."""
    options = {**DENSE, **EXPERTS, "n_routed_experts": 512, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    options |= {"moe_intermediate_size": 1, "intermediate_size": 1, "vocab_size": 4, "kv_lora_rank": 8, "q_lora_rank": 8}
    options |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4, "n_shared_experts": 1}
    model = build("DeepseekV3ForCausalLM", "deepseek_v3", options)
    model.save_pretrained(tmp_path / "saved")
    kept = {name for name in model.state_dict() if ".mlp.gate." in name}
    result = ckpt_cli.merge(tmp_path / "saved", tmp_path / "out", dtype="bf16", exclude=["*.mlp.experts.*"], allow_missing="*")
    assert set(result.outputs[0].kept_in_fp32) == kept
    assert result.outputs[0].dtypes["F32"] > result.outputs[0].dtypes["BF16"]
    assert config(tmp_path / "out")["dtype"] == "bfloat16"
    assert "config-dtype" not in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_are_cast_as_a_whole(tmp_path: Path) -> None:
    """PEFT loads them without regard to the class: "wo" is a name of T5 that is kept, and of a module with an adapter."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build(*MORE["t5"]), LoraConfig(r=2, target_modules=["wo"]))
    model.save_pretrained(tmp_path / "adapter")
    result = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", dtype="fp16")
    assert set(result.outputs[0].dtypes) == {"F16"}


def test_all_is_cast_on_request_only_where_something_is_kept(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    for dtype in (None, "fp32", "keep", "base"):
        with pytest.raises(UsageError, match=r"cast.all"):
            ckpt_cli.merge(tmp_path / "saved", tmp_path / "out", dtype=dtype, cast_all=True, base=tmp_path / "saved")
    with pytest.raises(UsageError, match=r"cast.all"):
        ckpt_cli.open(tmp_path / "saved", cast_all=True)


def test_of_steps_that_are_watched(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run / "checkpoint-1")
    ckpt_cli.watch(run, tmp_path / "out", dtype="bf16", once=True, settle=0)
    ckpt_cli.watch(run, tmp_path / "all", dtype="bf16", cast_all=True, once=True, settle=0)
    outputs = [next((tmp_path / name).glob("*/model.safetensors")).parent for name in ("out", "all")]
    assert [load(path)[ROUTERS[0]].dtype for path in outputs] == [torch.float32, torch.bfloat16]
