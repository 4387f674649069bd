"""An adapter_config.json beside weights that are no adapter: of shards, of an output, of a model that is verified."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import UsageError
from tests import tiny
from tests.cli import ROOT
from tests.tensors import load

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


class TestOfAnOutput:
    """What is merged into a folder with an adapter_config.json would be loaded with an adapter on top."""

    def adapter(self, tmp_path: Path) -> tuple[Path, Path]:
        base = tiny.folder(tmp_path / "base", tiny.weights())
        return tiny.adapter(tmp_path / "run" / "checkpoint-10", tiny.factors(), base), base

    @pytest.mark.parametrize("more", [{}, {"max_shard_size": "9KB"}, {"dry_run": True}], ids=["one file", "several", "dry run"])
    def test_in_place_is_refused(self, more: dict[str, Any], tmp_path: Path) -> None:
        step, base = self.adapter(tmp_path)
        before = sorted(path.name for path in step.iterdir())
        with pytest.raises(UsageError, match=r"beside adapter_config\.json") as caught:
            ckpt_cli.merge(step, base=base, in_place=True, **more)
        assert (caught.value.hint, caught.value.path) == ("pass -o instead of --in-place", str(step))
        assert sorted(path.name for path in step.iterdir()) == before
        assert ckpt_cli.merge(step, tmp_path / "out", base=base).outputs[0].lora is not None

    def test_of_shards_in_place_is_refused(self, tmp_path: Path) -> None:
        home = settings(shards(tmp_path / "run"))
        with pytest.raises(UsageError, match=r"beside adapter_config\.json"):
            ckpt_cli.merge(home, in_place=True)
        assert not (home / "model.safetensors").exists()

    def test_in_place_under_a_name_that_nothing_loads_is_written(self, tmp_path: Path) -> None:
        step, base = self.adapter(tmp_path)
        ckpt_cli.merge(step, base=base, in_place=True, weights_name="fused.safetensors")
        assert (step / "fused.safetensors").exists()

    def test_in_place_without_one_is_written(self, tmp_path: Path) -> None:
        home = settings(tiny.verl(tmp_path / "run", tiny.weights()) / "lora_adapter").parent
        ckpt_cli.merge(home, in_place=True)
        assert load(home)


class TestOfAModelThatIsVerified:
    def fused(self, tmp_path: Path) -> tuple[Path, Path]:
        """An output with a fused adapter, and the folder of that adapter."""
        base = tiny.folder(tmp_path / "base", tiny.weights())
        step = tiny.adapter(tmp_path / "run" / "checkpoint-10", tiny.factors(), base)
        ckpt_cli.merge(step, tmp_path / "out", base=base)
        return tmp_path / "out", step

    def found(self, folder: Path) -> dict[str, str]:
        return {item.code: item.message for item in ckpt_cli.verify(folder).findings if item.file == "adapter_config.json"}

    def test_that_it_was_fused_into_is_an_error(self, tmp_path: Path) -> None:
        out, step = self.fused(tmp_path)
        assert not self.found(out)
        shutil.copytree(step, out, dirs_exist_ok=True)
        assert self.found(out) == {"adapter-twice": "the manifest says that the weights have the adapter of adapter_model.safetensors"}
        assert ckpt_cli.verify(out).exit_code == 1
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (out / name).unlink()
        assert not ckpt_cli.verify(out).of_severity("error")

    @pytest.mark.parametrize("other", ["adapter", "manifest"])
    def test_where_nothing_says_so_is_a_warning(self, other: str, tmp_path: Path) -> None:
        out, step = self.fused(tmp_path)
        shutil.copytree(step, out, dirs_exist_ok=True)
        if other == "manifest":
            (out / "ckpt-manifest.json").unlink()
        else:
            save_file(tiny.factors(9), out / "adapter_model.safetensors")
        told = "with PEFT installed, from_pretrained adds the adapter of adapter_model.safetensors to these weights"
        assert self.found(out) == {"adapter-on-top": told}

    @pytest.mark.parametrize("files", ["model.safetensors", "parts", "pytorch_model.bin"])
    def test_is_what_transformers_does(self, files: str, tmp_path: Path) -> None:
        """The logits of the folder are those with the adapter; without a config.json they are those of another base."""
        pytest.importorskip("peft")
        from transformers import AutoModelForCausalLM

        base = tiny.folder(tmp_path / "base", tiny.weights(5))
        folder = tiny.folder(tmp_path / "model", tiny.weights() if files == "model.safetensors" else None)
        if files == "parts":
            ckpt_cli.merge(tiny.folder(tmp_path / "whole", tiny.weights()), folder.with_name("cut"), max_shard_size="9KB")
            folder = folder.with_name("cut")
            (folder / "ckpt-manifest.json").unlink()
        elif files == "pytorch_model.bin":
            torch.save(tiny.weights(), folder / files)
        assert not self.found(folder)
        shutil.copytree(tiny.adapter(tmp_path / "adapter", tiny.factors(), base), folder, dirs_exist_ok=True)
        assert "adds the adapter of adapter_model.safetensors to these weights" in self.found(folder)["adapter-on-top"]
        query = "model.layers.0.self_attn.q_proj"
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert f"{query}.lora_A.default.weight" in loaded
        assert torch.equal(loaded[f"{query}.base_layer.weight"], tiny.weights()[f"{query}.weight"])
        (folder / "config.json").unlink()
        assert "passes over these weights for the base that it names" in self.found(folder)["adapter-on-top"]
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert torch.equal(loaded[f"{query}.base_layer.weight"], tiny.weights(5)[f"{query}.weight"])

    def test_without_weights_of_one_is_a_warning(self, tmp_path: Path) -> None:
        pytest.importorskip("peft")
        from transformers import AutoModelForCausalLM

        folder = settings(tiny.folder(tmp_path / "model", tiny.weights()), base_model_name_or_path="base")
        assert "from_pretrained fails" in self.found(folder)["adapter-on-top"]
        with pytest.raises(OSError, match="adapter_model"):
            AutoModelForCausalLM.from_pretrained(folder)

    def test_of_an_adapter_is_none(self, tmp_path: Path) -> None:
        step = tiny.adapter(tmp_path / "adapter", tiny.factors(), "base")
        ckpt_cli.merge(step, tmp_path / "out", lora="export")
        assert not [self.found(folder) for folder in (step, tmp_path / "out") if self.found(folder)]
