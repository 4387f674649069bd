"""Draft models for speculative decoding are whole as they are: nothing that is said of them asks for the rest of what they draft for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Inconsistent, MissingTensors
from ckpt_cli.hub.classes.config_counts import mismatches
from ckpt_cli.hub.layers.stacks import has_lone_block
from tests import tiny
from tests.architectures import answered_here
from tests.tensors import Tensors, differences, load

WIDTH, ROWS, DRAFTED, INNER = 16, 64, 32, 32
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": ROWS,
    "tie_word_embeddings": False,
}
EAGLE_3 = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
AS_LLAMA = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
HEADS = {**LLAMA, "architectures": ["MedusaLlamaModel"], "num_hidden_layers": 32, "medusa_num_heads": 3}


@pytest.fixture(autouse=True)
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers answers in this process, which has it already."""
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


def layer(name: str, read: int = WIDTH) -> Tensors:
    shapes = {
        "self_attn.q_proj": (WIDTH, read),
        "self_attn.k_proj": (WIDTH // 2, read),
        "self_attn.v_proj": (WIDTH // 2, read),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
        "post_attention_layernorm": (WIDTH,),
    }
    return {f"{name}.{leaf}.weight": torch.rand(shape) for leaf, shape in shapes.items()}


def eagle(*, head: int = DRAFTED, embedding: bool = False) -> Tensors:
    """EAGLE-3: one layer without a number, which reads twice the width."""
    return {
        **layer("midlayer", 2 * WIDTH),
        "midlayer.hidden_norm.weight": torch.rand(WIDTH),
        "midlayer.input_layernorm.weight": torch.rand(WIDTH),
        "fc.weight": torch.rand(WIDTH, 3 * WIDTH),
        "norm.weight": torch.rand(WIDTH),
        "lm_head.weight": torch.rand(head, WIDTH),
        **({"embed_tokens.weight": torch.rand(ROWS, WIDTH)} if embedding else {}),
        **({"d2t": torch.zeros(head, dtype=torch.int64), "t2d": torch.ones(ROWS, dtype=torch.bool)} if head != ROWS else {}),
    }


def first_eagle() -> Tensors:
    return {"embed_tokens.weight": torch.rand(ROWS, WIDTH), "fc.weight": torch.rand(WIDTH, 2 * WIDTH), **layer("layers.0")}


def medusa() -> Tensors:
    parts = {"0.linear.weight": (WIDTH, WIDTH), "0.linear.bias": (WIDTH,), "1.weight": (ROWS, WIDTH)}
    return {f"{head}.{leaf}": torch.rand(shape) for head in range(3) for leaf, shape in parts.items()}


def notes(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes}


class TestAClassOfItsOwn:
    @pytest.mark.parametrize("embedding", [False, True], ids=["the target's embedding", "its own"])
    def test_with_a_single_layer_lacks_none(self, tmp_path: Path, embedding: bool) -> None:
        draft = tiny.folder(tmp_path / "draft", eagle(embedding=embedding), EAGLE_3)
        told = notes(ckpt_cli.merge(draft, tmp_path / "out"))
        assert "no-layers" not in told
        assert "carry-from-base" not in "".join(told.values())
        assert differences(load(tmp_path / "out"), load(draft)) == []
        assert "no-layers" not in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}

    def test_of_heads_that_a_program_adds_to_a_model_may_be_whole(self, tmp_path: Path) -> None:
        draft = tiny.folder(tmp_path / "draft", medusa(), HEADS)
        text = notes(ckpt_cli.merge(draft, tmp_path / "out"))["no-layers"]
        assert "or whole as they are, as heads and draft models are" in text
        assert "where the base has these tensors too" in text

    @pytest.mark.parametrize(
        "names",
        [
            ("projector.a.weight", "projector.a.bias", "projector.b.weight", "projector.b.bias", "head.weight"),
            ("model.projector.a.weight", "model.projector.a.bias", "model.projector.b.weight", "model.projector.b.bias", "lm_head.weight"),
            ("lm_head.weight", "model.embed_tokens.weight"),
        ],
    )
    def test_of_which_no_layer_is_there_is_still_told(self, names: tuple[str, ...]) -> None:
        found = mismatches({"num_hidden_layers": 1}, dict.fromkeys(names, (4, 4)), known=False)
        assert [item.code for item in found] == ["no-layers"]
        assert not has_lone_block(names)

    def test_with_more_layers_than_one_needs_numbers(self) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in eagle().items()}
        assert [item.code for item in mismatches({"num_hidden_layers": 2}, shapes, known=False)] == ["no-layers"]


DRAFTS = {
    "EAGLE": first_eagle,
    "EAGLE-3": eagle,
    "EAGLE-3 with an embedding": lambda: eagle(embedding=True),
    "EAGLE-3 with all rows": lambda: eagle(head=ROWS, embedding=True),
}


class TestTheConfigOfWhatItDraftsFor:
    @pytest.mark.parametrize("kind", DRAFTS)
    def test_is_refused_with_what_writes_it_as_it_is(self, tmp_path: Path, kind: str) -> None:
        draft = tiny.folder(tmp_path / "draft", DRAFTS[kind](), AS_LLAMA)
        with pytest.raises((MissingTensors, Inconsistent)) as caught:
            ckpt_cli.merge(draft, tmp_path / "out")
        assert "such as a draft model" in str(caught.value.hint)
        assert "--names native --allow-missing '*'" in str(caught.value.hint)
        result = ckpt_cli.merge(draft, tmp_path / "out", names="native", allow_missing="*")
        assert differences(load(tmp_path / "out"), load(draft)) == []
        assert "native-names" in notes(result)
        assert "unused-pattern" not in notes(result)

    def test_names_native_of_a_model_that_lacks_much_is_refused(self, tmp_path: Path) -> None:
        tensors = {**layer("model.layers.0"), "model.embed_tokens.weight": torch.rand(ROWS, WIDTH)}
        with pytest.raises(MissingTensors):
            ckpt_cli.merge(tiny.folder(tmp_path / "lost", tensors, AS_LLAMA), tmp_path / "out", names="native")
