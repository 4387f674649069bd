"""Layers are counted and named in many ways, and compared in all of them where no class is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import ckpt_cli
from ckpt_cli.boxes import Shape
from ckpt_cli.discover.beside.final_model import stray_files
from ckpt_cli.errors import MissingTensors
from ckpt_cli.formats.registry import recognise
from ckpt_cli.hub.classes.config_counts import mismatches
from ckpt_cli.hub.layers.counts import layer_count, layer_counts
from tests import tiny

LEAVES = ("attn.qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight", "norm.weight")

ONE_STACK: dict[str, tuple[dict[str, Any], str]] = {
    "ChatGLM2": ({"num_layers": 8, "seq_length": 8, "padded_vocab_size": 64}, "transformer.encoder.layers"),
    "ChatGLM": ({"num_layers": 8, "inner_hidden_size": 7}, "transformer.layers"),
    "Qwen 1": ({"num_hidden_layers": 8}, "transformer.h"),
    "Baichuan": ({"num_hidden_layers": 8, "num_attention_heads": 7}, "model.layers"),
    "MPT": ({"n_layers": 8, "n_heads": 7}, "transformer.blocks"),
    "Falcon 1": ({"n_layer": 8, "n_head": 7}, "transformer.h"),
    "Phi 1": ({"n_layer": 8}, "layers"),
    "OpenELM": ({"num_transformer_layers": 8, "num_query_heads": [2] * 8}, "transformer.layers"),
    "nomic": ({"n_layer": 8, "n_inner": 7}, "encoder.layers"),
    "jina": ({"num_hidden_layers": 8}, "roberta.encoder.layers"),
    "BERT": ({"num_hidden_layers": 8}, "bert.encoder.layer"),
    "DistilBERT": ({"n_layers": 8, "dim": 7}, "distilbert.transformer.layer"),
    "CTRL": ({"n_layer": 8}, "transformer.h"),
    "DeciLM": ({"num_hidden_layers": 8, "num_key_value_heads_per_layer": [4, 2, 1, 1, 2, 2, 4, 4]}, "model.layers"),
    "Arctic": ({"num_hidden_layers": 8, "moe_layer_frequency": 2}, "model.layers"),
    "Yi-VL": ({"num_hidden_layers": 8, "mm_vision_tower": "vit"}, "model.layers"),
    "camelCase": ({"numLayers": 8}, "decoder.layers"),
    "deep": ({"depth": 8, "patch_size": 7}, "trunk.resblocks"),
    "ViT": ({"model_type": "vit", "num_hidden_layers": 8}, "vit.encoder.layer"),
    "sentences": ({"num_hidden_layers": 8}, "0.auto_model.encoder.layer"),
    "llm": ({"llm_config": {"num_hidden_layers": 8}}, "language_model.model.layers"),
    "prompted": ({"num_layers": 8, "pre_seq_len": 7}, "transformer.encoder.layers"),
}

INTERN = {"llm_config": {"num_hidden_layers": 8}, "vision_config": {"num_hidden_layers": 6}, "select_layer": -1, "use_thumbnail": True}
SEVERAL: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "InternVL": (INTERN, {"language_model.model.layers": 8, "vision_model.encoder.layers": 6}),
    "CogVLM": (
        {"num_hidden_layers": 8, "vision_config": {"num_hidden_layers": 6}},
        {"model.layers": 8, "model.vision.transformer.layers": 6},
    ),
    "MiniCPM-V": (
        {"num_hidden_layers": 8, "vision_config": {"num_hidden_layers": 6}},
        {"llm.model.layers": 8, "vpm_vit.encoder.layers": 6},
    ),
    "Ovis": ({"llm_config": {"num_layers": 8}, "visual_tokenizer_config": {"backbone_config": {"depth": 6}}}, {"llm.layers": 8}),
    "T5": ({"num_layers": 8, "num_decoder_layers": 6}, {"encoder.block": 8, "decoder.block": 6}),
    "T5, alike": ({"num_layers": 8, "num_decoder_layers": 8}, {"encoder.block": 8, "decoder.block": 8}),
    "BART": (
        {"encoder_layers": 8, "decoder_layers": 6, "num_hidden_layers": 8},
        {"model.encoder.layers": 8, "model.decoder.layers": 6},
    ),
    "audio": ({"audio_config": {"encoder_layers": 8}, "text_config": {"n_layer": 6}}, {"audio_tower.layers": 8, "model.layers": 6}),
}


def stack(name: str, numbers: Iterable[int]) -> dict[str, Shape]:
    return {f"{name}.{number}.{leaf}": (8, 8) for number in numbers for leaf in LEAVES}


def model(stacks: Mapping[str, int], *, lost: Mapping[str, Iterable[int]] | None = None) -> dict[str, Shape]:
    found: dict[str, Shape] = {"embed.word_embeddings.weight": (64, 8), "projector.0.weight": (8, 8), "projector.2.weight": (8, 8)}
    for name, length in stacks.items():
        found |= stack(name, sorted({*range(length)} - {*(lost or {}).get(name, ())}))
    return found


def codes(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> list[str]:
    return [item.code for item in mismatches(config, shapes, known=False)]


@pytest.mark.parametrize("dialect", ONE_STACK)
class TestTheLayersOfAModel:
    def test_are_all_there(self, dialect: str) -> None:
        config, name = ONE_STACK[dialect]
        assert codes(config, model({name: 8})) == []

    @pytest.mark.parametrize("lost", [(7,), (6, 7), (4, 5, 6, 7), (3,), (2, 3)], ids=str)
    def test_are_missing(self, dialect: str, lost: tuple[int, ...]) -> None:
        config, name = ONE_STACK[dialect]
        (item,) = mismatches(config, model({name: 8}, lost={name: lost}), known=False)
        assert (item.code, item.lacking) == ("missing-layers", tuple(f"{name}.{number}.*" for number in lost))

    @pytest.mark.parametrize("names", [("embed.weight",), ("transformer.prefix_encoder.embedding.weight",), ("mm.0.weight", "mm.2.weight")])
    def test_are_not_there_at_all(self, dialect: str, names: tuple[str, ...]) -> None:
        assert codes(ONE_STACK[dialect][0], dict.fromkeys(names, (64, 16))) == ["no-layers"]

    def test_are_counted(self, dialect: str) -> None:
        assert layer_count(ONE_STACK[dialect][0]) == 8


@pytest.mark.parametrize("dialect", SEVERAL)
class TestSeveralStacks:
    def test_are_all_there(self, dialect: str) -> None:
        config, stacks = SEVERAL[dialect]
        assert "missing-layers" not in codes(config, model(stacks))
        assert "no-layers" not in codes(config, model(stacks))

    def test_lack_layers_in_one_of_them(self, dialect: str) -> None:
        config, stacks = SEVERAL[dialect]
        for name, length in stacks.items():
            for lost in ((length - 1,), tuple(range(length // 2, length)), (2,)):
                items = mismatches(config, model(stacks, lost={name: lost}), known=False)
                assert [glob for item in items for glob in item.lacking] == [f"{name}.{number}.*" for number in lost], name


class TestNothingIsSaid:
    @pytest.mark.parametrize(
        ("config", "stacks"),
        [
            ({"architecture": "resnet50", "num_classes": 10, "num_features": 2048}, {"layer3": 6, "layer4": 3}),
            ({"depths": [3, 3, 9, 3]}, {"stages": 4}),
            ({"num_hidden_layers": 12, "num_hidden_groups": 1}, {"albert.encoder.groups": 1}),
            ({"n_layer": 12, "n_recurrent_layers": 4}, {"backbone.layers": 6}),
            ({"num_hidden_layers": 12, "layer_sharing": True}, {"model.layers": 6}),
            ({"num_hidden_layers": 8, "adapter_layers": 4}, {"model.layers": 8, "model.aligner.layers": 3}),
            ({"num_hidden_layers": 8, "max_window_layers": 28, "moe_layers": [*range(7)]}, {"model.layers": 8}),
            ({"model_type": "mask2former", "decoder_layers": 10}, {"decoder.layers": 9}),
            ({"num_hidden_layers": 8}, {"model.layers": 8, "head.blocks": 2}),
            ({}, {"model.layers": 8}),
        ],
        ids=str,
    )
    def test_of_what_may_be_whole(self, config: dict[str, Any], stacks: dict[str, int]) -> None:
        assert codes(config, model(stacks)) == []

    def test_of_a_first_layer_without_a_norm(self) -> None:
        shapes = {name: shape for name, shape in model({"model.layers": 8}).items() if name != "model.layers.0.norm.weight"}
        assert codes({"num_hidden_layers": 8}, shapes) == []
        lost = {name: shape for name, shape in shapes.items() if name != "model.layers.0.mlp.up.weight"}
        assert codes({"num_hidden_layers": 8}, lost) == ["uneven-layers"]

    def test_of_layers_of_another_kind_at_regular_places(self) -> None:
        shapes = {name: shape for name, shape in model({"h": 16}).items() if name not in {f"h.{i}.attn.qkv.weight" for i in (3, 7, 11, 15)}}
        assert codes({"n_layer": 16}, shapes) == []

    def test_of_experts_of_another_kind(self) -> None:
        lists = {f"layers.0.mlp.experts.{number}.up.weight": (4, 4) for number in range(6)}
        own = {f"layers.0.mlp.experts.{number}.down.weight": (4, 4) for number in range(4)}
        assert codes({"n_routed_experts": 4, "zero_expert_num": 2}, lists | own) == []
        assert codes({"moe_num_experts": 3, "moe_intermediate_size": [8, 4]}, lists) == []
        assert codes({"n_routed_experts": 4}, lists | own) == ["extra-experts"]


class TestAModelThatWritesTexts:
    def test_has_the_layers_of_its_language_model(self) -> None:
        tower = model({"vision_model.encoder.layers": 6})
        assert codes({**INTERN, "architectures": ["OwnForConditionalGeneration"]}, tower) == ["no-layers"]
        assert codes({**INTERN, "architectures": ["OwnVisionModel"]}, tower) == []


class TestCounts:
    def test_say_which_layers_are_meant(self) -> None:
        config = {"vision_config": {"depth": 2}, "text_config": {"num_decoder_layers": "3"}, "layer_norm_eps": 1e-5, "n_head": 4}
        found = [(count.name, count.number, count.tower, set(count.words)) for count in layer_counts(config)]
        assert found == [("vision_config.depth", 2, "vision", set()), ("text_config.num_decoder_layers", 3, None, {"decoder"})]

    @pytest.mark.parametrize("config", [{"num_layers": True}, {"n_layer": None}, {"num_hidden_layers": "4"}, {"hidden_layer_size": 4}])
    def test_are_whole_numbers(self, config: dict[str, Any]) -> None:
        assert layer_count(config) is None


class TestACommand:
    """refuses what lacks layers, and warns of what may be a part, whatever they are called."""

    OWN: ClassVar[dict[str, Any]] = {"model_type": "chatglm", "architectures": ["ChatGLMModel"], "num_layers": 8, "hidden_size": 8}

    def run(self, folder: Path, shapes: Mapping[str, Shape], config: Mapping[str, Any] = OWN) -> Path:
        tensors = {name: torch.full(shape, 0.5) for name, shape in shapes.items()}
        return tiny.folder(folder, tensors, config)

    def test_of_custom_code(self, tmp_path: Path) -> None:
        whole = self.run(tmp_path / "whole", model({"transformer.encoder.layers": 8}))
        assert ckpt_cli.merge(whole, tmp_path / "out").exit_code == 0
        lost = self.run(tmp_path / "lost", model({"transformer.encoder.layers": 6}))
        with pytest.raises(MissingTensors, match=r"transformer\.encoder\.layers has 6: layers 6, 7 are missing"):
            ckpt_cli.merge(lost, tmp_path / "half")
        prefix = self.run(tmp_path / "prefix", {"transformer.prefix_encoder.embedding.weight": (16, 32)})
        merged = ckpt_cli.merge(prefix, tmp_path / "part")
        assert "no-layers" in {note.code for output in merged.outputs for note in output.notes}
        assert "no-layers" in {item.code for item in ckpt_cli.verify(prefix).findings}

    def test_without_transformers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("expected_tensors", "rules", "transformers_child"):
            monkeypatch.setattr(f"ckpt_cli.hub.classes.{module}.installed_version", lambda: None)
        config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "num_layers": 4, "num_decoder_layers": 4}
        run = self.run(tmp_path / "run", T5 | {"shared.weight": (64, 8)}, config)
        assert "missing-layers" not in {item.code for item in ckpt_cli.verify(run).findings}
        half = {name: shape for name, shape in T5.items() if int(name.split(".")[2]) < 2}
        run = self.run(tmp_path / "half", half | {"shared.weight": (64, 8)}, config)
        found = {item.tensor for item in ckpt_cli.verify(run).findings if item.code == "missing-layers"}
        assert found == {f"{side}.block.{number}.*" for side in ("encoder", "decoder") for number in (2, 3)}


T5 = {
    f"{side}.block.{number}.layer.{layer}.{leaf}.weight": (8,) if leaf == "layer_norm" else (8, 8)
    for side, kinds in (("encoder", ("SelfAttention", "")), ("decoder", ("SelfAttention", "EncDecAttention", "")))
    for number in range(4)
    for layer, kind in enumerate(kinds)
    for leaf in ("layer_norm", *([f"{kind}.{each}" for each in "qkvo"] if kind else ["DenseReluDense.wi", "DenseReluDense.wo"]))
}


@pytest.mark.parametrize(
    ("config", "name", "is_stray"),
    [
        ({"num_hidden_layers": 4, "num_hidden_groups": 1}, "albert.encoder.albert_layer_groups.0.albert_layers", False),
        ({"num_layers": 4}, "encoder.block", True),
        ({"num_layers": 1}, "encoder.block", False),
    ],
    ids=["layers that are used several times", "too few", "enough"],
)
def test_weights_beside_steps_are_the_final_model(tmp_path: Path, config: dict[str, Any], name: str, is_stray: bool) -> None:
    tensors = {name: torch.full(shape, 0.5) for name, shape in model({name: 1}).items()}
    run = tiny.folder(tmp_path / "run", tensors, {"model_type": "own", "hidden_size": 8, **config})
    assert (stray_files(run, recognise(run)) is not None) == is_stray
