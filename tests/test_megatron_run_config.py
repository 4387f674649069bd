"""What run_config.yaml of Megatron-Bridge says of the model is compared with config.json as arguments are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.errors import CkptError
from ckpt_cli.formats.megatron.run_config import as_arguments, section
from ckpt_cli.tensors.plain_values import Unrepresented

TEXT = """\
# a comment
checkpoint:
  save: /results
model:
  _target_: megatron.bridge.models.qwen.qwen_provider.Qwen3ModelProvider
  activation_func:
    _args_: []
    _call_: false
    _target_: torch.nn.functional.silu
  gated_linear_unit: true
  layernorm_epsilon: 1.0e-06
  # another
  moe_layer_freq:
  - 0
  - 1
  moe_router_load_balancing_type: [aux_loss, seq_aux_loss]
  normalization: RMSNorm
  num_moe_experts: null
  num_query_groups: 2
  num_attention_heads: 4
  hf_model_id: 'it''s'
  rotary_base: 1000000.0
  share_embeddings_and_output_weights: false
  window_size: !!python/tuple
  - 7
  - 0
  long: a text that
    goes on
  made:
    _target_: some.Class
    size: 3
  twice: 1
  twice: 2
optimizer:
  lr: 0.1
"""


def test_plain_entries_of_one_section_are_read() -> None:
    found = section(TEXT, "model")
    unread = {name for name, value in found.items() if isinstance(value, Unrepresented)}
    assert unread == {"long", "made", "twice"}
    assert {name: value for name, value in found.items() if name not in unread} == {
        "_target_": "megatron.bridge.models.qwen.qwen_provider.Qwen3ModelProvider",
        "activation_func": "torch.nn.functional.silu",
        "gated_linear_unit": True,
        "layernorm_epsilon": 1e-6,
        "moe_layer_freq": [0, 1],
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "normalization": "RMSNorm",
        "num_moe_experts": None,
        "num_query_groups": 2,
        "num_attention_heads": 4,
        "hf_model_id": "it's",
        "rotary_base": 1e6,
        "share_embeddings_and_output_weights": False,
        "window_size": [7, 0],
    }
    assert section(TEXT, "optimizer") == {"lr": 0.1}
    assert section(TEXT, "nothing") == {}
    assert section("model:\n", "model") == {}


def test_fields_get_the_names_of_arguments() -> None:
    found = as_arguments({**section(TEXT, "model"), "vocab_size": 64})
    assert found["swiglu"] is True
    assert found["group_query_attention"] is True
    assert found["untie_embeddings_and_output_weights"] is True
    assert found["num_experts"] is None
    assert "vocab_size" not in found
    assert as_arguments({"vocab_size": 53, "should_pad_vocab": True})["vocab_size"] == 53
    assert as_arguments({"gated_linear_unit": True, "activation_func": "torch.nn.functional.gelu"})["swiglu"] is False
    assert isinstance(as_arguments({"gated_linear_unit": True})["swiglu"], Unrepresented)
    older = as_arguments({"rope_scaling": False, "scale_factor": 32.0, "old_context_len": 8192})
    assert older["use_rope_scaling"] is True
    assert older["rope_scaling_factor"] == 32.0


PLAIN: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "layernorm_epsilon": 1e-6,
    "rotary_base": 10000.0,
    "position_embedding_type": "rope",
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "share_embeddings_and_output_weights": False,
    "num_moe_experts": None,
}
SILU = "  activation_func:\n    _call_: false\n    _target_: torch.nn.functional.silu\n"


@pytest.fixture(params=["verl2-qwen3-tp2-pp2", "qwen3-tp2-dp2-fullypar"])
def run(data: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., tuple[Path, Path]]:
    """A step without arguments, and one with them, beside which the file lies; and the base."""

    def make(extra: str = SILU, **changes: Any) -> tuple[Path, Path]:
        case = data / "megatron" / request.param
        found = sorted(path.parent for path in case.rglob(".metadata") if "extra" not in path.parts and "optimizer" not in path.parts)
        if request.param.startswith("verl"):
            (tmp_path / "has_no_arguments").touch()
        step = tmp_path / "run" / "iter_0000005"
        shutil.copytree(found[0], step)
        base = tmp_path / "base"
        base.mkdir()
        config = json.loads((case / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config))
        entries = {**PLAIN, "rotary_base": (config.get("rope_parameters") or config)["rope_theta"], **changes}
        entries |= {"share_embeddings_and_output_weights": config["tie_word_embeddings"]}
        lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in entries.items())
        (step / "run_config.yaml").write_text(f"model:\n{extra}{lines}")
        return step, base

    return make


def test_a_file_that_agrees_is_no_doubt(run: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    step, base = run()
    result = ckpt_cli.merge(step, tmp_path / "out", base=base)
    assert "arguments-not-compared" not in {note.code for note in result.outputs[0].notes}


@pytest.mark.parametrize(
    "changes", [{"rotary_base": 5e5}, {"layernorm_epsilon": 1e-5}, {"qk_l2_norm": True}, {"num_query_groups": 4}], ids=str
)
def test_other_numbers_are_refused(changes: dict[str, Any], run: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    step, base = run(**changes)
    with pytest.raises(CkptError, match="the training had"):
        ckpt_cli.merge(step, tmp_path / "out", base=base)
    assert not (tmp_path / "out").exists()


def test_what_is_not_read_is_said(run: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    step, base = run(SILU + "  window_attn_skip_freq:\n    _target_: some.Window\n    width: 8\n")
    result = ckpt_cli.merge(step, tmp_path / "out", base=base)
    texts = [note.text for note in result.outputs[0].notes if note.code == "arguments-not-compared"]
    # What the step's own arguments say is compared.
    assert texts in ([], ["what run_config.yaml gives no plain value of was not compared with config.json: window_attn_skip_freq"])
    assert bool(texts) is (step.parent.parent / "has_no_arguments").exists()


def test_no_config_is_made_of_it(run: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    step, _ = run(num_layers=2, hidden_size=24, vocab_size=53)
    if (tmp_path / "has_no_arguments").exists():
        with pytest.raises(CkptError, match=r"none is made of what run_config\.yaml says"):
            ckpt_cli.merge(step, tmp_path / "out")
