"""Weights under a name that nothing looks for: a merge warns, and what `verify` says of it is what transformers does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.hub.config import not_loaded
from tests.architectures import MODELS, answered_here, build

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EXPLICIT = "transformers_weights"
LOOKS = "transformers looks for model.safetensors, and does not load "
ASKED = 'transformers loads model.fp16.safetensors only if it is asked for variant="fp16"'


@pytest.fixture
def run(tmp_path: Path, quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)
    kind, model_type, options = MODELS["qwen2"]
    build(kind, model_type, options).save_pretrained(tmp_path / "run")
    return tmp_path / "run"


def loads(folder: Path, **how: Any) -> bool:
    from transformers import AutoModelForCausalLM

    try:
        AutoModelForCausalLM.from_pretrained(folder, **how)
    except OSError:
        return False
    return True


def told(folder: Path) -> list[str]:
    return [item.message for item in ckpt_cli.verify(folder).findings if item.code == "unloaded-name"]


OPTIONS: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"max_shard_size": "20KB"}, None),
    ({"weights_name": SINGLE}, None),
    ({"weights_name": "weights.safetensors"}, f"{LOOKS}weights.safetensors"),
    ({"weights_name": "weights.safetensors", "max_shard_size": "20KB"}, f"{LOOKS}weights.safetensors.index.json"),
    ({"weights_name": "diffusion_pytorch_model.safetensors"}, f"{LOOKS}diffusion_pytorch_model.safetensors"),
    ({"weights_name": "ema.safetensors"}, f"{LOOKS}ema.safetensors"),
    ({"weights_name": "model.fp16.safetensors"}, ASKED),
]


@pytest.mark.parametrize(("options", "said"), OPTIONS, ids=str)
def test_a_merge_and_verify_say_what_transformers_does(run: Path, tmp_path: Path, options: dict[str, Any], said: str | None) -> None:
    out = tmp_path / "out"
    notes = [note for note in ckpt_cli.merge(run, out, **options).outputs[0].notes if note.code == "unloaded-name"]
    assert told(out) == ([said] if said else [])
    assert [note.text for note in notes] == ([f"{said}; --weights-name {SINGLE} writes it under that name"] if said else [])
    assert loads(out) is (said is None)
    assert not ckpt_cli.verify(out).of_severity("error")
    if said == ASKED:
        assert loads(out, variant="fp16")


def test_a_config_that_names_another_file_is_told(run: Path, tmp_path: Path) -> None:
    """transformers 4.57 and newer look for that one alone."""
    content = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**content, EXPLICIT: "weights.safetensors"}))
    (note,) = [note for note in ckpt_cli.merge(run, tmp_path / "out").outputs[0].notes if note.code == "unloaded-name"]
    said = f"config.json says {EXPLICIT} weights.safetensors, so transformers does not load {SINGLE}"
    assert note.text == f"{said}; correct {EXPLICIT} in config.json"
    assert told(tmp_path / "out") == [said]
    assert not loads(tmp_path / "out")
    ckpt_cli.merge(run, tmp_path / "named", weights_name="weights.safetensors")
    assert told(tmp_path / "named") == []
    assert loads(tmp_path / "named")


def test_a_folder_of_another_program_is_told(run: Path) -> None:
    shutil.move(run / SINGLE, run / "renamed.safetensors")
    assert told(run) == [f"{LOOKS}renamed.safetensors"]


DIFFUSERS = {"_class_name": "UNet2DConditionModel"}
UNET = "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize(
    ("config", "file", "said"),
    [
        (DIFFUSERS, UNET, None),
        (DIFFUSERS, f"{UNET}.index.json", None),
        (DIFFUSERS, SINGLE, f"diffusers looks for {UNET}, and does not load {SINGLE}"),
        (DIFFUSERS, "diffusion_pytorch_model.ema.safetensors", "diffusers loads diffusion_pytorch_model.ema.safetensors only if"),
        ({}, INDEX, None),
        ({EXPLICIT: INDEX}, INDEX, None),
        ({EXPLICIT: None}, SINGLE, None),
    ],
)
def test_what_a_config_is_loaded_by(config: dict[str, Any], file: str, said: str | None) -> None:
    found = not_loaded(config, file)
    assert (found is None) if said is None else (found is not None and found[0].startswith(said))
