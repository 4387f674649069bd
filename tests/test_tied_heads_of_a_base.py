"""The output head of a base is not written beside an embedding that was trained and that the config ties it to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_cli

EMBEDDING, HEAD, EXTRA = "model.embed_tokens.weight", "lm_head.weight", "mtp.layers.0.weight"


def model(folder: Path, *names: str, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    tensors = {name: torch.randn(8, 4) for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return model(tmp_path / "run", EMBEDDING, "model.layers.0.weight", seed=1)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return model(tmp_path / "base", EMBEDDING, "model.layers.0.weight", HEAD, EXTRA)


@pytest.mark.parametrize("globs", ["*", (HEAD, "mtp.*")])
def test_it_is_not_carried(run: Path, base: Path, tmp_path: Path, globs: Any) -> None:
    result = ckpt_cli.merge(run, tmp_path / "out", base=base, carry_from_base=globs)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {EMBEDDING, "model.layers.0.weight", EXTRA}
    assert HEAD in {note.code: note.text for note in result.outputs[0].notes}["tied-head"]
    ckpt_cli.average(
        [run, model(tmp_path / "two", EMBEDDING, "model.layers.0.weight")], tmp_path / "mean", base=base, carry_from_base=globs
    )
    assert HEAD not in load_file(tmp_path / "mean" / "model.safetensors")


def test_it_does_not_fill_in_where_filters_leave_other_tensors_out(run: Path, base: Path, tmp_path: Path) -> None:
    ckpt_cli.merge(run, tmp_path / "out", base=base, match_base=True, fill_missing_from_base=True, exclude="model.layers.0.*")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written[HEAD], written[EMBEDDING])


class TestModulesThatAreCalledLikeTrainingState:
    """`dcp.save(model.state_dict())` of a model with modules called opt, scheduler and the like."""

    @pytest.mark.parametrize("name", ["opt", "optimizer", "scheduler", "rng", "llm_opt", "scheduler_head"])
    def test_are_weights(self, tmp_path: Path, name: str) -> None:
        tensors = {f"{name}.decoder.weight": torch.randn(4, 3), f"{name}.decoder.bias": torch.randn(4), "visual.weight": torch.randn(4, 3)}
        dcp.save(dict(tensors), checkpoint_id=tmp_path / "run")
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(tensors)

    @pytest.mark.parametrize("form", ["nested", "flat"])
    def test_an_optimizer_is_none(self, tmp_path: Path, form: str) -> None:
        state = {"state": {"visual.weight": {"exp_avg": torch.randn(4, 3), "step": torch.tensor(3.0)}}}
        flat = {"optimizer.state.visual.weight.exp_avg": torch.randn(4, 3)}
        content = {"visual.weight": torch.randn(4, 3), **({"optimizer": state} if form == "nested" else flat)}
        dcp.save(content, checkpoint_id=tmp_path / "run")
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"visual.weight"}
