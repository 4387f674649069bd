"""`detect` names the trainer, the step and the components of every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt_cli

LAYOUTS = {
    "verl-run/run": ("verl", 20, ["actor"]),
    "verl-others/verl_0_4_0": ("verl", 10, ["actor"]),
    "verl-others/supervised": ("verl", 10, ["model"]),
    "verl-others/value_head": ("verl", 10, ["critic"]),
    "verl-others/easyr1": ("EasyR1", 10, ["actor"]),
    "veomni-experts/run": ("verl", 4, ["actor"]),
    "lmms-run/run": ("lmms-engine", 200, ["model", "ema"]),
    "accelerate/run": ("Hugging Face Trainer", 7, ["model"]),
    "accelerate/full": ("accelerate", None, ["model"]),
    "accelerate/rank_files": ("accelerate", None, ["model"]),
    "torchtitan/run": ("torchtitan", 5, ["model"]),
    "torchtitan/run/checkpoint": ("torchtitan", 5, ["model"]),
    "lightning/fabric": ("Lightning", 5, ["model"]),
    "lightning/fabric/step-5.ckpt": ("Lightning", 5, ["model"]),
    "lightning/trainer": ("Lightning", 5, ["model"]),
    "olmo-core/run": ("OLMo-core", 5, ["model"]),
    "composer/run": ("composer", 5, ["model"]),
    "bagel-runs/fork_dcp": ("BAGEL fork", 6, ["model", "ema"]),
    "bagel-runs/fork_ranks": ("BAGEL fork", 6, ["model", "ema"]),
    "bagel-runs/official": ("BAGEL", 6, ["model", "ema"]),
    "bagel-runs/base": ("BAGEL", None, ["model", "ema"]),
    "bagel-hybrid/run": ("BAGEL fork", 6, ["model", "ema"]),
    "dcp-options/no_collectives": ("torch DCP", None, ["model"]),
    "dcp-options/left_overs": ("torch DCP", None, ["model"]),
    "dcp-options/file_per_tensor": ("torch DCP", None, ["model"]),
    "dcp-options/safetensors_items": ("torch DCP", None, ["model"]),
    "dcp-options/zstd": ("torch DCP", None, ["model"]),
    "dcp-options/hub_shards": ("torch DCP, Hugging Face storage", None, ["model"]),
    "dcp-odd-tensors/dcp": ("torch DCP", None, ["model", "extra"]),
    "mesh-line/line/dcp": ("torch DCP", None, ["model"]),
    "mesh-line/line/ranks": ("verl family", None, ["model"]),
    "mesh-grid/tp/ranks": ("verl family", None, ["model"]),
    "experts/strided/ranks": ("verl family", None, ["model"]),
    "fake-ranks/cube": ("verl family", None, ["model"]),
    "plain-files/hub": ("Hugging Face", None, ["model"]),
    "plain-files/hub_bin": ("Hugging Face", None, ["model"]),
    "plain-files/tied": ("Hugging Face", None, ["model"]),
    "plain-files/single": ("Hugging Face", None, ["model"]),
    "plain-files/plain": ("torch.save", None, ["model"]),
    "plain-files/nested/checkpoint.pt": ("torch.save", None, ["model"]),
    "plain-files/legacy/model.pth": ("torch.save", None, ["model"]),
    "plain-files/one_gpu": ("verl", 3, ["actor"]),
}


@pytest.mark.parametrize("path", LAYOUTS)
def test_a_layout_is_named_and_found_complete(layouts: Path, path: str) -> None:
    framework, step, components = LAYOUTS[path]
    result = ckpt_cli.detect(layouts / path)
    found = result.checkpoint
    assert (found.framework, found.step, [info.name for info in found.components]) == (framework, step, components)
    assert (result.problem, result.exit_code) == (None, 0)
    assert found.components[0].elements


def test_what_cannot_be_merged_is_still_named(layouts: Path) -> None:
    result = ckpt_cli.detect(layouts / "accelerate" / "local")
    assert (result.checkpoint.framework, result.exit_code) == ("accelerate", 3)
    assert result.problem is not None
    assert "flat parameters" in result.problem


def test_other_readings_of_a_folder_are_told(layouts: Path, tmp_path: Path) -> None:
    import shutil

    checkpoint = Path(shutil.copytree(layouts / "lmms-run" / "run" / "checkpoint-200", tmp_path / "checkpoint-200"))
    ckpt_cli.merge(checkpoint, in_place=True)
    notes = {note.code: note.text for note in ckpt_cli.detect(checkpoint).checkpoint.notes}
    assert notes["passed-over"] == (
        "model was read from model_world_size_4_rank_0.pt and 3 more (rank-shards); model.safetensors (safetensors) is there too, "
        "and was not read"
    )
    run = checkpoint.parent
    (run / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    notes = {note.code: note.text for note in ckpt_cli.detect(run).checkpoint.notes}
    assert "no config.json" in notes["stray-weights"]
    shutil.copy(checkpoint / "config.json", run)
    notes = {note.code: note.text for note in ckpt_cli.detect(run).checkpoint.notes}
    assert "--step N picks one" in notes["steps-inside"]
