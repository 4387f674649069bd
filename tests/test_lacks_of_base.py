"""What only the base has, where no class says which tensors there must be: refused, unless something else explains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import MissingTensors
from tests import tiny

CUSTOM = {"architectures": ["FooForCausalLM"], "model_type": "foo", "auto_map": {"AutoModelForCausalLM": "m.FooForCausalLM"}}
QUANTISED = {"quantization_config": {"quant_method": "fp8"}}
HEAD, NORM = "lm_head.weight", "model.norm.weight"

Weights = dict[str, torch.Tensor]


def codes(notes: Any) -> list[str]:
    return [note.code for note in notes]


def untied(**config: Any) -> dict[str, Any]:
    return tiny.config(**{"tie_word_embeddings": False, **config})


def whole(seed: int = 0) -> Weights:
    weights = {**tiny.weights(seed)}
    return {**weights, HEAD: weights["model.embed_tokens.weight"] + 1}


def without(*names: str, seed: int = 1) -> Weights:
    return {name: tensor for name, tensor in whole(seed).items() if not any(part in name for part in names)}


@pytest.mark.parametrize("config", [CUSTOM, QUANTISED], ids=["custom", "quantised"])
@pytest.mark.parametrize("lost", [(HEAD, NORM), ("input_layernorm",), ("embed_tokens",)])
def test_is_refused_by_every_command(config: dict[str, Any], lost: tuple[str, ...], tmp_path: Path) -> None:
    base = tiny.folder(tmp_path / "base", whole(), untied(**config))
    run = tiny.folder(tmp_path / "run", without(*lost), untied(**config))
    absent = [name for name in whole() if any(part in name for part in lost)]
    with pytest.raises(MissingTensors, match="of the base") as caught:
        ckpt_cli.merge(run, tmp_path / "out", base=base)
    assert "--carry-from-base" in str(caught.value.hint)
    assert "--allow-missing" in str(caught.value.hint)
    with pytest.raises(MissingTensors):
        ckpt_cli.average([run, run], tmp_path / "mean", base=base)
    checked = ckpt_cli.verify(run, base=base)
    assert {item.tensor for item in checked.findings if item.code == "missing-of-base"} == {*absent}
    done = ckpt_cli.merge(run, tmp_path / "part", base=base, allow_missing=absent)
    assert "missing-allowed" in codes(done.outputs[0].notes)
    again = ckpt_cli.verify(tmp_path / "part", base=base)
    assert {item.tensor for item in again.findings if item.code == "left-out"} >= {*absent}
    assert not [item for item in again.findings if item.severity == "error"]
    ckpt_cli.merge(run, tmp_path / "out", base=base, carry_from_base=absent)
    assert "missing-of-base" not in codes(ckpt_cli.verify(tmp_path / "out", base=base).findings)


def test_is_no_matter_where_the_base_decides(tmp_path: Path) -> None:
    base = tiny.folder(tmp_path / "base", whole(), untied(**CUSTOM))
    run = tiny.folder(tmp_path / "run", without(HEAD), untied(**CUSTOM))
    ckpt_cli.merge(run, tmp_path / "filled", base=base, match_base=True, fill_missing_from_base=True)
    ckpt_cli.merge(run, tmp_path / "layers", base=base, include=["model.layers.*"])


def test_a_tied_head_and_buffers_are_none(tmp_path: Path) -> None:
    buffers = {"model.rotary_emb.inv_freq": torch.ones(2), "h.0.attn.bias": torch.ones(1, 1, 2, 2)}
    base = tiny.folder(tmp_path / "base", {**whole(), **buffers}, tiny.config(**CUSTOM, tie_word_embeddings=True))
    run = tiny.folder(tmp_path / "run", without(HEAD), tiny.config(**CUSTOM, tie_word_embeddings=True))
    assert "left-out-of-base" not in codes(ckpt_cli.merge(run, tmp_path / "out", base=base).outputs[0].notes)
    assert "left-out-of-base" not in codes(ckpt_cli.verify(run, base=base).findings)


def test_a_quantised_base_may_have_other_parts(tmp_path: Path) -> None:
    base_weights = whole()
    for name in [name for name in base_weights if "proj.weight" in name]:
        weight = base_weights.pop(name)
        base_weights |= {f"{name.removesuffix('weight')}{part}": weight.clone() for part in ("qweight", "qzeros", "scales")}
    base = tiny.folder(tmp_path / "base", base_weights, untied(**QUANTISED))
    run = tiny.folder(tmp_path / "run", whole(1), untied(**CUSTOM))
    assert "missing" not in str(codes(ckpt_cli.merge(run, tmp_path / "out", base=base).outputs[0].notes))


@pytest.mark.parametrize(
    ("more_of_run", "more_of_base", "lost"),
    [
        ({"score.weight": torch.ones(1, 8)}, {}, HEAD),
        ({}, {"mtp.fc.weight": torch.ones(8, 16)}, "mtp.fc.weight"),
    ],
    ids=["another-head", "prediction"],
)
def test_what_may_be_meant_is_a_warning(more_of_run: Weights, more_of_base: Weights, lost: str, tmp_path: Path) -> None:
    base = tiny.folder(tmp_path / "base", {**whole(), **more_of_base}, untied(**CUSTOM))
    run = tiny.folder(tmp_path / "run", {**without(lost), **more_of_run}, untied(**CUSTOM))
    notes = {note.code: note.text for note in ckpt_cli.merge(run, tmp_path / "out", base=base).outputs[0].notes}
    assert lost in notes["left-out-of-base"]
    found = {item.code: item for item in ckpt_cli.verify(tmp_path / "out", base=base).findings}
    assert found["left-out-of-base"].severity == "warning"
    assert "missing-of-base" not in found


def test_a_head_like_the_embedding_of_the_base_is_a_warning(tmp_path: Path) -> None:
    weights = whole()
    weights[HEAD] = weights["model.embed_tokens.weight"].clone()
    base = tiny.folder(tmp_path / "base", weights, untied(**CUSTOM))
    run = tiny.folder(tmp_path / "run", without(HEAD), untied(**CUSTOM))
    assert "left-out-of-base" in codes(ckpt_cli.merge(run, tmp_path / "out", base=base).outputs[0].notes)


@pytest.mark.parametrize("lost", ["language_model.model.layers.1.", "_moe_gen", "vit_model.", "pos_embed", "lm_head"])
def test_bagel_lacks_nothing_that_its_base_has(lost: str, data: Path, tmp_path: Path) -> None:
    runs = data / "layouts" / "bagel-runs"
    home = tmp_path / "run" / "0000006"
    home.mkdir(parents=True)
    weights = load_file(runs / "official" / "0000006" / "ema.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if lost not in name}, home / "ema.safetensors")
    with pytest.raises(MissingTensors, match="of the base"):
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="ema", base=runs / "base")
    save_file(weights, home / "ema.safetensors")
    ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="ema", base=runs / "base")


def test_a_config_that_transformers_cannot_build_is_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    of = tiny.config(layer_types=["full_attention"] * 7)
    note = {
        each.code: each.text
        for each in ckpt_cli.merge(tiny.folder(tmp_path / "run", tiny.weights(), of), tmp_path / "out").outputs[0].notes
    }
    assert "layer_types" in note["unbuildable-config"]
    assert "unbuildable-config" in codes(ckpt_cli.verify(tmp_path / "out").findings)
    strange = tiny.folder(tmp_path / "strange", tiny.weights(), tiny.unknown())
    assert "unbuildable-config" not in codes(ckpt_cli.verify(strange).findings)
