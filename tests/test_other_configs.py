"""A file named config.json that is none of a model takes the place of no config: settings of trainers, what loggers write, nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import MissingTensors
from ckpt_cli.hub.beside.model_config import why_no_config
from tests import tiny

ARGUMENTS = {"model_name_or_path": "Qwen/Qwen2", "learning_rate": 1e-5, "max_steps": 9, "hidden_size": 16, "model_type": "qwen2"}
OTHERS: dict[str, Any] = {
    "arguments": ARGUMENTS,
    "wandb": {"_wandb": {"value": {}}, **{key: {"desc": None, "value": value} for key, value in tiny.config().items()}},
    "hydra": {"model": tiny.config(), "trainer": {"max_steps": 9}, "dim": 16, "n_layers": 2},
    "nothing": {},
    "unknown": {"flavor": "small"},
}


def told(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in (*result.checkpoint.notes, *result.outputs[0].notes)}


def run(folder: Path, other: object, tensors: dict[str, torch.Tensor], *, of_step: bool) -> Path:
    tiny.verl(folder, tensors)
    huggingface = folder / "global_step_1" / "actor" / "huggingface"
    for path in huggingface.iterdir():
        path.unlink()
    ((huggingface if of_step else folder) / "config.json").write_text(json.dumps(other))
    return folder


class TestSettingsOfAnother:
    @pytest.mark.parametrize("of_step", [True, False])
    @pytest.mark.parametrize("other", OTHERS)
    def test_do_not_hide_the_config_of_the_base(self, other: str, of_step: bool, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", tiny.weights(1))
        made = ckpt_cli.merge(run(tmp_path / "run", OTHERS[other], tiny.weights(), of_step=of_step), tmp_path / "out", base=base)
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == tiny.config()
        assert "config of a model" in told(made)["no-model-config"]
        assert "lacks-asset" not in told(made)
        assert not ckpt_cli.verify(tmp_path / "out").of_severity("warning")

    @pytest.mark.parametrize("other", OTHERS)
    def test_of_a_step_do_not_hide_the_config_of_the_run(self, other: str, tmp_path: Path) -> None:
        folder = run(tmp_path / "run", OTHERS[other], tiny.weights(), of_step=True)
        tiny.folder(folder, None)
        ckpt_cli.merge(folder, tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == tiny.config()

    def test_do_not_make_warnings_of_refusals(self, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", tiny.weights(1))
        part = {name: tensor for name, tensor in tiny.weights().items() if ".layers.1." not in name}
        with pytest.raises(MissingTensors):
            ckpt_cli.merge(run(tmp_path / "run", ARGUMENTS, part, of_step=False), tmp_path / "out", base=base)

    @pytest.mark.parametrize("other", OTHERS)
    def test_are_not_written_and_verify_tells_of_them(self, other: str, tmp_path: Path) -> None:
        made = ckpt_cli.merge(run(tmp_path / "run", OTHERS[other], tiny.weights(), of_step=False), tmp_path / "out")
        assert {"no-model-config", "lacks-asset"} <= told(made).keys()
        assert not (tmp_path / "out" / "config.json").exists()
        (tmp_path / "out" / "config.json").write_text(json.dumps(OTHERS[other]))
        assert "no-model-config" in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}


@pytest.mark.parametrize(
    "content",
    [
        tiny.config(),
        {"model_type": "own"},
        {"architectures": ["Own"], "learning_rate": 1e-5},
        {"text_config": {"auto_map": {"AutoModel": "modeling_own.Own"}}},
        {"_class_name": "UNet2DModel"},
        {"architecture": "resnet50", "num_classes": 1000},
        {"hidden_size": 16, "num_hidden_layers": 2},
        {"n_embd": 16, "n_layer": 2},
        {"d_model": 16},
        {"dim": 16, "n_heads": 4},
        {"type": "act", "input_features": {}, "optimizer_lr": 1e-5},
        {"word_embedding_dimension": 384},
        {"llm_config": {"hidden_size": 16}},
    ],
    ids=str,
)
def test_a_config_of_a_model_is_one(content: Any) -> None:
    assert why_no_config(content) is None


def test_sizes_of_parts_are_those_of_a_model(tmp_path: Path) -> None:
    """As nanoVLM writes them beside its weights: the config was left out, and its loader reads nothing without."""
    sizes = {"vit_hidden_dim": 16, "lm_n_heads": 4, "lm_vocab_size": 64, "mp_pixel_shuffle_factor": 4, "vlm_checkpoint_path": "out"}
    made = ckpt_cli.merge(tiny.folder(tmp_path / "run", tiny.weights(), sizes), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**sizes, "torch_dtype": "float32"}
    assert "no-model-config" not in told(made)
    assert "learning_rate" in str(why_no_config({**sizes, "learning_rate": 1e-5}))
