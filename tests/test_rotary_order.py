"""Queries and keys of trainers whose rotary embedding turns neighbouring rows, renamed to a class that turns the halves of a head."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_cli
from tests.architectures import answered_here
from tests.tensors import Tensors
from tests.tiny import config, folder, weights

Rules = tuple[tuple[str, str], ...]

HEADS = {"q": 4, "k": 2}
LLAMA = config(architectures=["LlamaForCausalLM"], model_type="llama")
QWEN3 = config(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=4)
TO_META: Rules = (
    ("model.embed_tokens", "tok_embeddings"),
    ("lm_head", "output"),
    (r"model\.", ""),
    (r"self_attn\.([qkvo])_proj", r"attention.w\1"),
    (r"self_attn\.([qk]_norm)", r"attention.\1"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.up_proj", "feed_forward.w3"),
    (r"mlp\.down_proj", "feed_forward.w2"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
)


@pytest.fixture(autouse=True)
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers answers in this process, which has it already."""
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


def of_llama() -> Tensors:
    """Weights large enough for attention to matter."""
    return {name: tensor * 20 if "proj" in name else tensor for name, tensor in weights().items() if not name.endswith("bias")}


def of_qwen3() -> Tensors:
    norms = {f"model.layers.{i}.self_attn.{one}_norm.weight": torch.ones(4) for i in range(2) for one in "qk"}
    return {**of_llama(), **norms}


def neighbouring(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a tensor of transformers as Meta's models have them: row i and row i + half of a head side by side."""
    found = re.search(r"self_attn\.([qk])_proj", name)
    if found is None:
        return tensor
    return torch.cat([torch.stack(head.chunk(2), 1).flatten(0, 1) for head in tensor.chunk(HEADS[found[1]])])


def renamed(tensors: Tensors, rules: Rules, *, turned: bool) -> tuple[Tensors, dict[str, str]]:
    """Tensors of transformers under a trainer's names and in its order, and the key map back."""
    names = {}
    for name in tensors:
        other = name
        for old, new in rules:
            other = re.sub(old, new, other)
        names[name] = other
    held = {new: neighbouring(old, tensors[old]).contiguous() if turned else tensors[old] for old, new in names.items()}
    return held, {new: old for old, new in names.items()}


def run_of(place: Path, rules: Rules = TO_META, *, turned: bool = True, tensors: Tensors | None = None) -> dict[str, Any]:
    """A checkpoint of a trainer, a base and a key map: the arguments of a merge."""
    own = of_llama() if tensors is None else tensors
    held, back = renamed(own, rules, turned=turned)
    dcp.save({"model": held}, checkpoint_id=place / "step-10", no_dist=True)
    (place / "map.json").write_text(json.dumps(back))
    folder(place / "base", own, LLAMA if tensors is None else QWEN3)
    return {"path": place / "step-10", "base": place / "base", "key_map": place / "map.json"}


def texts(done: Any) -> list[str]:
    """What a result, or its only output, says of the order of rows."""
    outputs = getattr(done, "outputs", ())
    notes = [note for each in (done, *outputs) for note in getattr(each, "notes", ())]
    return [note.text for note in notes if note.code == "rotary-order"]


class TestRenamedByAKeyMap:
    def test_a_merge_of_torchtitan_warns(self, tmp_path: Path) -> None:
        done = ckpt_cli.merge(**run_of(tmp_path), output=tmp_path / "out")
        (said,) = texts(done)
        assert "self_attn.q_proj.weight" in said
        assert "self_attn.k_proj.weight" in said
        assert "LlamaForCausalLM" in said
        assert "convert_to_hf.py" in said

    def test_the_rows_move_as_the_page_says(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        ckpt_cli.merge(**run_of(tmp_path), output=tmp_path / "out")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        tokens = torch.arange(12)[None]
        assert not torch.allclose(model(tokens).logits, wanted(tokens).logits, atol=1e-5)
        for name, tensor in model.named_parameters():
            found = re.search(r"self_attn\.([qk])_proj", name)
            if found is not None:
                heads = tensor.data.chunk(HEADS[found[1]])
                tensor.data = torch.cat([torch.cat((head[0::2], head[1::2])) for head in heads])
        assert torch.equal(model(tokens).logits, wanted(tokens).logits)

    def test_newer_names_of_torchtitan_too(self, tmp_path: Path) -> None:
        newer = (*TO_META, (r"attention\.w([qkv])\.", r"attention.qkv_linear.w\1."))
        assert texts(ckpt_cli.merge(**run_of(tmp_path, newer), output=tmp_path / "out"))

    def test_a_file_of_meta_and_an_average(self, tmp_path: Path) -> None:
        given = run_of(tmp_path)
        held, _ = renamed(of_llama(), TO_META, turned=True)
        files = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            torch.save(held, tmp_path / name / "consolidated.00.pth")
            files.append(tmp_path / name / "consolidated.00.pth")
        rest = {"base": given["base"], "key_map": given["key_map"]}
        assert texts(ckpt_cli.merge(files[0], **rest, output=tmp_path / "out"))
        assert texts(ckpt_cli.average(files, **rest, output=tmp_path / "mean"))
        assert texts(ckpt_cli.open(files[0], **rest))

    def test_torchtune_is_told_by_its_norms(self, tmp_path: Path) -> None:
        tune = (
            ("model.embed_tokens", "tok_embeddings"),
            (r"model\.", ""),
            ("self_attn", "attn"),
            ("input_layernorm", "sa_norm"),
            ("sa_norm.weight", "sa_norm.scale"),
        )
        (said,) = texts(ckpt_cli.merge(**run_of(tmp_path, tune), output=tmp_path / "out"))
        assert "tune_to_hf" in said

    def test_a_live_model_is_filled_with_the_same_words(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        given = run_of(tmp_path)
        model = transformers.AutoModelForCausalLM.from_pretrained(given["base"])
        for base in (None, given["base"]):
            (said,) = texts(ckpt_cli.load_into(model, given["path"], base=base, key_map=given["key_map"]))
            assert "LlamaForCausalLM" in said


class TestNothingIsSaid:
    def test_of_a_model_that_turns_halves_under_these_names(self, tmp_path: Path) -> None:
        given = run_of(tmp_path, turned=False, tensors=of_qwen3())
        done = ckpt_cli.merge(**given, output=tmp_path / "out")
        assert not texts(done)
        assert done.outputs[0].compared is not None
        assert done.outputs[0].compared.architecture == "Qwen3ForCausalLM"

    def test_of_names_of_the_class_behind_a_prefix(self, tmp_path: Path) -> None:
        folder(tmp_path / "run", None, LLAMA)
        save_file({f"net.{name}": tensor for name, tensor in of_llama().items()}, tmp_path / "run/model.safetensors")
        assert not texts(ckpt_cli.merge(tmp_path / "run", key_map="net=", output=tmp_path / "out"))

    def test_of_other_models_with_an_attn(self, tmp_path: Path) -> None:
        given = run_of(tmp_path, (("self_attn", "attn"),), turned=False)
        assert not texts(ckpt_cli.merge(**given, output=tmp_path / "out"))
