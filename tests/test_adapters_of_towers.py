"""Adapters of one tower of a model with two, trained on the tower as a model of its own: never fused into the other one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import ckpt_cli
from ckpt_cli.errors import Undecidable
from tests.tensors import load

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")),
    pytest.mark.usefixtures("quiet_transformers", "asked_here"),
]

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"vocab_size": 32, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VISION = {"image_size": 8, "patch_size": 4}


def two_towers(kind: str, text: dict[str, int] | None = None, vision: dict[str, int] | None = None) -> Any:
    towers = {"text_config": {**SIZES, **TEXT, **(text or {})}, "vision_config": {**SIZES, **VISION, **(vision or {})}}
    config = getattr(transformers, f"{kind}Config")(**towers)
    torch.manual_seed(1)
    return getattr(transformers, f"{kind}Model")(config)


def adapter_of(tower: str, base: Path, folder: Path, **settings: Any) -> None:
    torch.manual_seed(2)
    chosen = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)
    peft.get_peft_model(getattr(transformers, tower).from_pretrained(base), chosen).save_pretrained(folder)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    two_towers("CLIP").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def changed(base: Path, merged: Path) -> set[str]:
    before, after = load(base), load(merged)
    assert before.keys() == after.keys()
    return {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(("tower", "part"), [("CLIPVisionModel", "vision_model"), ("CLIPTextModel", "text_model")])
def test_the_class_that_was_trained_tells_the_tower(base: Path, tower: str, part: str, tmp_path: Path) -> None:
    adapter_of(tower, base, tmp_path / "adapter")
    ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base)
    assert changed(base, tmp_path / "out") == {part}
    whole = getattr(transformers, tower).from_pretrained(base)
    expected = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").merge_and_unload().state_dict()
    merged = getattr(transformers, tower).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.allclose(merged[name], tensor, atol=1e-6) for name, tensor in expected.items())


@pytest.mark.parametrize(("tower", "part"), [("CLIPVisionModel", "vision_model"), ("CLIPTextModel", "text_model")])
def test_a_base_that_names_no_class_is_known_by_its_tensors(base: Path, tower: str, part: str, tmp_path: Path) -> None:
    adapter_of(tower, base, tmp_path / "adapter")
    config = json.loads((base / "config.json").read_text())
    del config["architectures"]
    (base / "config.json").write_text(json.dumps(config))
    ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base)
    assert changed(base, tmp_path / "out") == {part}


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
@pytest.mark.parametrize("tower", ["VisionModel", "TextModel"])
def test_without_its_class_towers_of_one_size_are_refused(kind: str, tower: str, tmp_path: Path) -> None:
    two_towers(kind).save_pretrained(tmp_path / "base")
    adapter_of(f"{kind}{tower}", tmp_path / "base", tmp_path / "adapter", task_type="FEATURE_EXTRACTION")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["auto_mapping"] is None
    with pytest.raises(Undecidable, match="fit 2 parts of the base: text_model, vision_model") as caught:
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert "pass --lora export, without --base" in caught.value.advice
    ckpt_cli.merge(tmp_path / "adapter", tmp_path / "exported", lora="export")  # as the hint says


@pytest.mark.parametrize("kind", ["SiglipTextModel", "CLIPTextModelWithProjection"])
def test_a_class_without_known_names_says_the_part_by_its_own(kind: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    two_towers(kind.partition("Text")[0]).save_pretrained(base)
    adapter_of(kind, base, tmp_path / "adapter")
    ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base)
    assert changed(base, tmp_path / "out") == {"text_model"}
    whole = getattr(transformers, kind).from_pretrained(base)
    expected = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").merge_and_unload().state_dict()
    merged = getattr(transformers, kind).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.allclose(merged[name], tensor, atol=1e-6) for name, tensor in expected.items())


def test_a_class_whose_name_says_no_part_is_no_sign(tmp_path: Path) -> None:
    two_towers("Siglip").save_pretrained(tmp_path / "base")
    adapter_of("SiglipTextModel", tmp_path / "base", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["auto_mapping"]["base_model_class"] = "SiglipForImageClassification"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(Undecidable, match="fit 2 parts of the base"):
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")


@pytest.mark.parametrize(("tower", "part"), [("CLIPVisionModel", "vision_model"), ("CLIPTextModel", "text_model")])
@pytest.mark.parametrize("settings", [{}, {"task_type": "FEATURE_EXTRACTION"}], ids=["class", "task"])
def test_towers_of_two_sizes_are_told_apart(tower: str, part: str, settings: dict[str, Any], tmp_path: Path) -> None:
    two_towers("CLIP", vision={"hidden_size": 32}).save_pretrained(tmp_path / "base")
    adapter_of(tower, tmp_path / "base", tmp_path / "adapter", **settings)
    ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert changed(tmp_path / "base", tmp_path / "out") == {part}


def test_a_tower_with_more_layers_is_the_only_one_that_has_them(tmp_path: Path) -> None:
    two_towers("Siglip", vision={"num_hidden_layers": 3}).save_pretrained(tmp_path / "base")
    adapter_of("SiglipVisionModel", tmp_path / "base", tmp_path / "adapter", task_type="FEATURE_EXTRACTION")
    ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert changed(tmp_path / "base", tmp_path / "out") == {"vision_model"}


def test_modules_that_several_parts_have_are_all_named(tmp_path: Path) -> None:
    """The classes of FLAVA's parts have no names in the tables."""
    sizes = {**SIZES, "vocab_size": 32, "image_size": 8, "patch_size": 4}
    parts = {f"{part}_config": sizes for part in ("image", "text", "multimodal")}
    codebook = {"hidden_size": 8, "num_groups": 1, "num_blocks_per_group": 1, "vocab_size": 16}
    config = transformers.FlavaConfig(**parts, image_codebook_config=codebook, projection_dim=8)
    transformers.FlavaModel(config).save_pretrained(tmp_path / "base")
    torch.manual_seed(2)
    chosen = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    peft.get_peft_model(transformers.FlavaTextModel.from_pretrained(tmp_path / "base"), chosen).save_pretrained(tmp_path / "adapter")
    with pytest.raises(Undecidable) as caught:
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert all(f"{part}_model.encoder.layer.0.attention.attention.query" in caught.value.advice for part in ("image", "text", "multimodal"))
