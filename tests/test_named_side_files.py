"""Files that other side files name go with these; what a library needs beside the weights is copied, or told."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_cli
from tests import tiny

POLICY = {"type": "act", "input_features": {"observation.state": {"type": "STATE", "shape": [4]}}, "output_features": {}}
OPENPI = {"action_dim": 32, "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
WEIGHTS = {"model.action_head.weight": torch.arange(16.0).reshape(4, 4)}


def notes(result: Any, level: str = "warning") -> dict[str, str]:
    listed = [*result.checkpoint.notes, *result.outputs[0].notes]
    return {note.code: note.text for note in listed if note.level == level}


def state_of(which: str, number: int) -> str:
    return f"policy_{which}_step_{number}_normalizer_processor.safetensors"


def processors(folder: Path, mean: float = 1.0, number: int = 3) -> Path:
    """The processors of a policy, as `PolicyProcessorPipeline.save_pretrained` of lerobot writes them."""
    for which in ("preprocessor", "postprocessor"):
        save_file({"action.mean": torch.full((4,), mean)}, folder / state_of(which, number))
        step = {"registry_name": "normalizer_processor", "config": {"eps": 1e-8}, "state_file": state_of(which, number)}
        (folder / f"policy_{which}.json").write_text(json.dumps({"name": f"policy_{which}", "steps": [step]}))
    return folder


def policy(folder: Path, *, sharded: bool = False) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(POLICY))
    if sharded:
        dcp.save(dict(WEIGHTS), checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    else:
        save_file(WEIGHTS, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class TestNumbersOfAPolicy:
    @pytest.mark.parametrize("sharded", [False, True])
    def test_go_with_the_processor_that_names_them(self, sharded: bool, tmp_path: Path) -> None:
        step = tmp_path / "run" / "checkpoints" / "000100" / "pretrained_model"
        processors(policy(step, sharded=sharded))
        merged = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert notes(merged) == {}
        for which in ("preprocessor", "postprocessor"):
            assert (tmp_path / "out" / f"policy_{which}.json").read_bytes() == (step / f"policy_{which}.json").read_bytes()
            assert load_file(tmp_path / "out" / state_of(which, 3))["action.mean"].tolist() == [1.0] * 4
        assert {found.code for found in ckpt_cli.verify(tmp_path / "out").findings} == {"not-compared"}

    def test_are_no_rival_of_the_model(self, tmp_path: Path) -> None:
        assert {found.code for found in ckpt_cli.verify(processors(policy(tmp_path / "hub"))).findings} == {"not-compared"}

    def test_are_those_of_the_folder_that_the_processor_is_from(self, tmp_path: Path) -> None:
        step, base = policy(tmp_path / "run" / "000100" / "pretrained_model", sharded=True), policy(tmp_path / "base")
        processors(base, 2.0)
        ckpt_cli.merge(tmp_path / "run", tmp_path / "of_base", base=base)
        assert load_file(tmp_path / "of_base" / state_of("preprocessor", 3))["action.mean"][0] == 2.0
        processors(step, 1.0)
        ckpt_cli.merge(tmp_path / "run", tmp_path / "own", base=base)
        assert load_file(tmp_path / "own" / state_of("preprocessor", 3))["action.mean"][0] == 1.0

    @pytest.mark.parametrize("there", ["nothing", "a pickle", "a model", "only of the base"])
    def test_that_are_not_written_are_a_warning(self, there: str, tmp_path: Path) -> None:
        step, base = processors(policy(tmp_path / "000100" / "pretrained_model")), processors(policy(tmp_path / "base"), 2.0)
        name = {"a pickle": "numbers.pkl", "a model": "model-0.safetensors"}.get(there, state_of("preprocessor", 3))
        (step / state_of("preprocessor", 3)).rename(step / name)
        (step / "policy_preprocessor.json").write_text(json.dumps({"steps": [{"state_file": name}]}))
        if there in ("nothing", "only of the base"):
            (step / name).unlink()
        merged = ckpt_cli.merge(step, tmp_path / "out", base=base if there == "only of the base" else None)
        assert f"policy_preprocessor.json does not load without {name}, which is not" in notes(merged)["lacks-asset"]
        assert not (tmp_path / "out" / name).exists()
        assert "lacks-named-file" in {found.code for found in ckpt_cli.verify(tmp_path / "out").findings}

    @pytest.mark.parametrize("name", ["../other.safetensors", "/etc/hostname", "config.json", "ckpt-manifest.json"])
    def test_are_none_outside_of_the_folder_or_of_another_meaning(self, name: str, tmp_path: Path) -> None:
        step = policy(tmp_path / "000100" / "pretrained_model")
        (step / "policy_preprocessor.json").write_text(json.dumps({"steps": [{"state_file": name}]}))
        save_file(WEIGHTS, step.parent / "other.safetensors")
        ckpt_cli.merge(step, tmp_path / "out")
        written = {path.name for path in (tmp_path / "out").iterdir()}
        assert written == {"model.safetensors", "config.json", "policy_preprocessor.json", "ckpt-manifest.json"}

    def test_of_other_programs_are_copied_too(self, tmp_path: Path) -> None:
        step = policy(tmp_path / "000100" / "pretrained_model")
        (step / "config.json").write_text(json.dumps({**POLICY, "norm_stats_path": "numbers/stats.npz"}))
        (step / "numbers").mkdir()
        (step / "numbers" / "stats.npz").write_bytes(b"PK")
        assert notes(ckpt_cli.merge(step, tmp_path / "out")) == {}
        assert (tmp_path / "out" / "numbers" / "stats.npz").read_bytes() == b"PK"


class TestTokenizersOfAPolicy:
    """In folders that its processor names: they go there, and not beside the weights, where nothing reads them."""

    @staticmethod
    def saved(folder: Path) -> Path:
        names = {"tokenizer_name": "tokenizer", "action_tokenizer_name": "action_tokenizer"}
        steps = [{"registry_name": "x", "config": {key: name}, "artifacts": {key: name}} for key, name in names.items()]
        policy(folder)
        (folder / "policy_preprocessor.json").write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
        for name in names.values():
            (folder / name).mkdir()
            for file, content in tiny.TOKENIZER.items():
                (folder / name / file).write_text(json.dumps(content))
        code = {"processor_class": "Actions", "auto_map": {"AutoProcessor": "processing_actions.Actions"}}
        (folder / "action_tokenizer" / "processor_config.json").write_text(json.dumps(code))
        (folder / "action_tokenizer" / "processing_actions.py").write_text("class Actions:\n    pass\n")
        return folder

    def test_go_with_the_processor_that_names_them(self, tmp_path: Path) -> None:
        step = self.saved(tmp_path / "run" / "000100" / "pretrained_model")
        merged = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert notes(merged) == {}
        written = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
        there = {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()}
        assert written == there | {"ckpt-manifest.json"}
        assert {found.code for found in ckpt_cli.verify(tmp_path / "out").findings} == {"not-compared"}

    def test_that_are_lost_are_a_warning(self, tmp_path: Path) -> None:
        step = self.saved(tmp_path / "000100" / "pretrained_model")
        shutil.rmtree(step / "tokenizer")
        merged = ckpt_cli.merge(step, tmp_path / "out")
        assert "policy_preprocessor.json does not load without tokenizer, which is not beside it" in notes(merged)["lacks-asset"]
        assert "lacks-named-file" in {found.code for found in ckpt_cli.verify(tmp_path / "out").findings}


class TestNumbersOfOpenpi:
    @staticmethod
    def statistics(folder: Path, *names: str) -> Path:
        for name in names:
            (folder / "assets" / name).mkdir(parents=True)
            (folder / "assets" / name / "norm_stats.json").write_text(json.dumps({"norm_stats": folder.name}))
        return folder

    @pytest.mark.parametrize("config", [OPENPI, POLICY])
    @pytest.mark.parametrize("name", ["droid", "physical-intelligence/libero"])
    def test_are_copied(self, name: str, config: dict[str, Any], tmp_path: Path) -> None:
        step = self.statistics(policy(tmp_path / "run" / "20000"), name)
        (step / "config.json").write_text(json.dumps(config))
        (step / "assets" / name / "notes.txt").write_text("")
        assert notes(ckpt_cli.merge(tmp_path / "run", tmp_path / "out")) == {}
        assert [path.name for path in (tmp_path / "out" / "assets" / name).iterdir()] == ["norm_stats.json"]

    def test_are_all_of_one_place(self, tmp_path: Path) -> None:
        step, base = (
            self.statistics(policy(tmp_path / "run" / "20000"), "mine"),
            self.statistics(policy(tmp_path / "base"), "droid", "aloha"),
        )
        ckpt_cli.merge(step, tmp_path / "out", base=base)
        assert [path.name for path in (tmp_path / "out" / "assets").iterdir()] == ["mine"]


class TestOtherLibraries:
    """What ColBERT, SetFit and others read beside the weights."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        run = tmp_path / "run"
        run.mkdir()
        save_file(WEIGHTS, run / "model.safetensors", metadata={"format": "pt"})
        (run / "config.json").write_text('{"model_type": "own"}')
        return run

    @pytest.mark.parametrize("name", ["artifact.metadata", "config_setfit.json"])
    def test_texts_are_copied(self, name: str, run: Path, tmp_path: Path) -> None:
        (run / name).write_text('{"dim": 8}')
        merged = ckpt_cli.merge(run, tmp_path / "out")
        assert (tmp_path / "out" / name).read_text() == '{"dim": 8}'
        assert "unknown-files" not in notes(merged, "info")

    @pytest.mark.parametrize("name", ["model_head.pkl", "classifier.joblib", "reward_head.npy"])
    def test_heads_are_a_warning(self, name: str, run: Path, tmp_path: Path) -> None:
        (run / name).write_bytes(pickle.dumps({"weight": 1}))
        assert notes(ckpt_cli.merge(run, tmp_path / "out"))["other-weights"].startswith(f"{name} beside the weights")

    @pytest.mark.parametrize("name", ["pca.npy", "whitening.npz", "label_encoder.pkl", "scaling.joblib", "config.yaml", "hyperparams.yaml"])
    def test_what_may_be_needed_is_named(self, name: str, run: Path, tmp_path: Path) -> None:
        (run / name).write_bytes(b"{}")
        assert notes(ckpt_cli.merge(run, tmp_path / "out"), "info")["unknown-files"].startswith(f"{name} in ")

    @pytest.mark.parametrize("name", ["pca.npy", "model_head.pkl"])
    def test_of_a_base_too(self, name: str, run: Path, tmp_path: Path) -> None:
        base = tmp_path / "base"
        base.mkdir()
        save_file(WEIGHTS, base / "model.safetensors", metadata={"format": "pt"})
        (base / name).write_bytes(b"{}")
        assert str(base / name) in notes(ckpt_cli.merge(run, tmp_path / "out", base=base), "info")["put-aside"]

    @pytest.mark.parametrize("name", ["rng_state_0.pkl", "scores.npy", "scheduler.pkl", "train.yaml", "train_losses.npy"])
    def test_what_a_training_leaves_is_quiet(self, name: str, run: Path, tmp_path: Path) -> None:
        (run / name).write_bytes(b"{}")
        merged = ckpt_cli.merge(run, tmp_path / "out")
        assert "unknown-files" not in notes(merged, "info")
        assert "other-weights" not in notes(merged)
