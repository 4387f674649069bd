"""Square weights under adapters that are stored as [in, out], as GPT-2's layers are, in models that have plain linear layers as well."""

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
from ckpt_cli.errors import Undecidable
from tests.tensors import load

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")),
    pytest.mark.usefixtures("quiet_transformers", "asked_here"),
]

GPT2 = {"model_type": "gpt2"}
PICTURES_AND_GPT2 = {"model_type": "vision-encoder-decoder", "encoder": {"model_type": "vit"}, "decoder": GPT2}


def saved(folder: Path, weights: dict[str, tuple[bool, int, int]], model: dict[str, Any], flag: bool | None) -> Path:
    """A model with adapters: of each module whether its weight is stored as [in, out], how many outputs and how many inputs it has."""
    torch.manual_seed(0)
    state = {}
    for name, (turned, out, inner) in weights.items():
        state[f"base_model.model.{name}.base_layer.weight"] = torch.randn(*((inner, out) if turned else (out, inner)))
        state[f"base_model.model.{name}.lora_A.default.weight"] = torch.randn(2, inner)
        state[f"base_model.model.{name}.lora_B.default.weight"] = torch.randn(out, 2)
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model))
    settings = {} if flag is None else {"fan_in_fan_out": flag}
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, **settings}))
    return folder


CASES: dict[str, tuple[dict[str, tuple[bool, int, int]], dict[str, Any], bool | None]] = {
    "GPT-2": ({"h.0.c_proj": (True, 5, 5)}, GPT2, None),
    "another type": ({"h.0.c_proj": (False, 5, 5)}, {"model_type": "llama"}, None),
    "no type": ({"h.0.c_proj": (False, 5, 5)}, {}, None),
    "no type, but the config of the adapter": ({"h.0.m": (True, 5, 5)}, {}, True),
    "a plain layer of GPT-2's": ({"h.0.c_proj": (True, 5, 5), "score": (False, 5, 5)}, GPT2, True),
    "no layer of GPT-2's": ({"conditioning.v_proj": (False, 5, 5)}, {"model_type": "clvp"}, False),
    "a part, the last one plain": ({"decoder.h.0.c_proj": (True, 5, 5), "encoder.0.query": (False, 5, 5)}, PICTURES_AND_GPT2, False),
    "a part, the last one GPT-2's": ({"encoder.0.query": (False, 5, 5), "decoder.h.0.c_proj": (True, 5, 5)}, PICTURES_AND_GPT2, True),
    "no type, others of the name": (
        {"h.0.attn.c_proj": (True, 5, 5), "h.0.mlp.c_proj": (True, 5, 7), "q": (False, 5, 7), "v.q": (False, 5, 5)},
        {},
        False,
    ),
    "no type, others of one kind": ({"h.0.c_attn": (True, 15, 5), "h.0.c_proj": (True, 5, 5)}, {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_are_told_one_by_one(case: str, tmp_path: Path) -> None:
    weights, model, flag = CASES[case]
    run = saved(tmp_path / "run", weights, model, flag)
    held = load(run)
    ckpt_cli.merge(run, tmp_path / "out")
    for name, (turned, _, _) in weights.items():
        w, a, b = (held[f"base_model.model.{name}.{end}.weight"].double() for end in ("base_layer", "lora_A.default", "lora_B.default"))
        assert torch.equal(load(tmp_path / "out")[f"{name}.weight"], (w + ((b @ a).T if turned else b @ a)).float()), name


@pytest.mark.parametrize(
    ("weights", "flag"),
    [
        ({"a.first": (True, 7, 5), "a.second": (False, 7, 5), "a.third": (False, 5, 5)}, True),
        ({"a.first": (False, 7, 5), "a.third": (True, 5, 5)}, True),
        ({"a.first": (True, 7, 5), "a.third": (False, 5, 5)}, False),
    ],
)
def test_that_nothing_tells_are_refused(weights: dict[str, tuple[bool, int, int]], flag: bool, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", weights, {}, flag)
    with pytest.raises(Undecidable, match=r"nothing tells whether a\.third is stored as \[in, out\]") as caught:
        ckpt_cli.merge(run, tmp_path / "out")
    assert "pass --lora export" in caught.value.advice
    ckpt_cli.merge(run, tmp_path / "exported", lora="export")  # as the hint says


@pytest.mark.parametrize("targets", [["c_proj", "q_proj"], ["q_proj", "c_attn", "c_proj"]], ids=str)
def test_of_pictures_and_gpt2_are_what_peft_merges(targets: list[str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    text = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=32, n_positions=8, bos_token_id=1, eos_token_id=2)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    torch.manual_seed(1)
    transformers.VisionEncoderDecoderModel(config).save_pretrained(tmp_path / "base")
    model = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    result = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base", verify=True)
    assert result.exit_code == 0
    wanted = model.merge_and_unload().state_dict()
    found = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.allclose(found[name], tensor, atol=1e-5) for name, tensor in wanted.items())
