"""An adapter_config.json beside weights that are no adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import ckpt_cli
from tests import tiny
from tests.cli import ROOT

SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def settings(folder: Path, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **more}))
    return folder


def shards(run: Path) -> Path:
    """A run of verl whose shards hold the model and its adapters; the folder of the shards."""
    tensors = {f"base_model.model.{name.replace('q_proj.', 'q_proj.base_layer.')}": each for name, each in tiny.weights().items()}
    factors = {name.replace(".weight", ".default.weight"): each for name, each in tiny.factors().items()}
    return tiny.verl(run, {**tensors, **factors})


class TestOfShards:
    """The config may lie beside the shards, in the step or in the run, and says how the adapters in the shards are scaled."""

    @pytest.mark.parametrize("where", [".", "..", "../..", "lora_adapter"], ids=["shards", "step", "run", "lora_adapter"])
    @pytest.mark.parametrize("given", ["run", "step", "shards"])
    def test_is_no_adapter_that_is_left_out(self, where: str, given: str, tmp_path: Path) -> None:
        home = shards(tmp_path / "run")
        settings((home / where).resolve())
        path = {"run": tmp_path / "run", "step": home.parent, "shards": home}[given]
        result = ckpt_cli.merge(path, tmp_path / "out", lora_alpha=8.0 if given != "run" and where == "../.." else None)
        assert result.outputs[0].lora is not None
        assert "adapters-beside" not in {note.code for note in result.checkpoint.notes}

    def test_with_an_adapter_is_told(self, tmp_path: Path) -> None:
        home = shards(tmp_path / "run")
        save_file(tiny.factors(9), settings(home) / "adapter_model.safetensors")
        (told,) = (note for note in ckpt_cli.merge(tmp_path / "run", tmp_path / "out").checkpoint.notes if note.level == "warning")
        assert (told.code, "adapter_model.safetensors" in told.text) == ("other-weights", True)

    @pytest.mark.parametrize("adapter", [False, True], ids=["alone", "with an adapter"])
    @pytest.mark.parametrize("given", [".", "checkpoint-200"])
    def test_around_the_folder_of_the_shards(self, given: str, adapter: bool, tmp_path: Path) -> None:
        run = Path(shutil.copytree(ROOT / "examples" / "tiny-run", tmp_path / "run"))
        home = settings(run / "checkpoint-200")
        if adapter:
            save_file(tiny.factors(9), home / "adapter_model.safetensors")
        notes = ckpt_cli.merge(run / given, tmp_path / "out").checkpoint.notes
        told = [note for note in notes if note.level == "warning" and "adapter" in note.text]
        assert bool(told) == adapter
