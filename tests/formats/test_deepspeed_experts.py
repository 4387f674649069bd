"""Experts of DeepSpeed: layers with different numbers of them (PR-MoE), groups that are split, other orders of ranks, files too many."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, MixedWorldSizes
from tests.conftest import Copy
from tests.tensors import differences, load

CASES = ("moe-pr-z2-w4", "moe-pr-z0", "moe-split-groups", "moe-data-first")


@pytest.mark.parametrize("case", CASES)
def test_every_expert_has_its_own_name(data: Path, case: str, tmp_path: Path) -> None:
    folder = data / "deepspeed" / case
    ckpt_cli.merge(folder / "run", tmp_path / "out", names="native")
    written, expected = load(tmp_path / "out"), load(folder / "expected.safetensors")
    assert differences({name: written[name] for name in expected}, expected) == []
    assert set(written) == set(expected)


@pytest.mark.parametrize("case", [case for case in CASES if case != "moe-pr-z0"])
def test_the_16_bit_weights_have_the_same_names(data: Path, case: str, tmp_path: Path) -> None:
    ckpt_cli.merge(data / "deepspeed" / case / "run", tmp_path / "out", names="native", type="weights16")
    assert set(load(tmp_path / "out")) == set(load(data / "deepspeed" / case / "expected.safetensors"))


@pytest.mark.parametrize("number", [4, 9])
def test_an_expert_beyond_the_number_of_its_layer_is_refused(copy: Copy, number: int, tmp_path: Path) -> None:
    folder = copy("deepspeed", "moe-z2-w2-ep2", "run")
    (last,) = folder.rglob("layer_0_expert_3_mp_rank_00_model_states.pt")
    more = last.with_name(f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
    content = torch.load(last, weights_only=False)
    torch.save({key.replace("experts.3.", f"experts.{number}."): value for key, value in content.items()}, more)
    with pytest.raises(CkptError) as caught:
        ckpt_cli.merge(folder, tmp_path / "out")
    assert more.name in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_file_of_another_expert_is_refused(copy: Copy, tmp_path: Path) -> None:
    folder = copy("deepspeed", "moe-z2-w2-ep2", "run")
    (last,) = folder.rglob("layer_0_expert_3_mp_rank_00_model_states.pt")
    shutil.copy(last.with_name(last.name.replace("expert_3", "expert_2")), last)
    with pytest.raises(CkptError) as caught:
        ckpt_cli.merge(folder, tmp_path / "out")
    assert last.name in str(caught.value)


def saved_over(copy: Copy, data: Path, older: str, newer: str) -> Path:
    """A step of one training whose files another training replaced, as far as it has files of their names."""
    step = next(copy("deepspeed", older, "run").glob("global_step*"))
    for path in next((data / "deepspeed" / newer / "run").glob("global_step*")).iterdir():
        shutil.copy2(path, step / path.name)
    return step


@pytest.mark.parametrize(("older", "newer"), [("moe-z2-w2-ep2", "z2-bf16-w2-bf16master"), ("moe-z0-w2-ep2", "z0-bf16-w2")])
def test_experts_that_an_older_save_left_are_refused(copy: Copy, data: Path, older: str, newer: str, tmp_path: Path) -> None:
    step = saved_over(copy, data, older, newer)
    with pytest.raises(MixedWorldSizes, match=r"mp_rank_00_model_states.pt knows of no experts") as caught:
        ckpt_cli.merge(step, tmp_path / "out")
    assert "move them to another one" in str(caught.value.hint)
    for path in step.glob("layer_*_expert_*"):
        path.unlink()
    for path in step.glob("expp_rank_*"):
        path.unlink()
    ckpt_cli.merge(step, tmp_path / "out", names="native")


def test_a_layer_of_experts_that_an_older_save_left_is_refused(copy: Copy, tmp_path: Path) -> None:
    """Model states that count experts once, for all layers, do not tell how many layers there are: their gates do."""
    step = next(copy("deepspeed", "moe-z0-w2-ep2", "run").glob("global_step*"))
    states = step / "mp_rank_00_model_states.pt"
    content = torch.load(states, weights_only=False)
    content["num_experts"] = [4]
    content["module"] = {name: tensor for name, tensor in content["module"].items() if not name.startswith("moe2.")}
    torch.save(content, states)
    with pytest.raises(MixedWorldSizes, match="knows of no experts of this layer") as caught:
        ckpt_cli.merge(step, tmp_path / "out")
    assert "moe2." in str(caught.value)


def test_layers_of_a_pipeline_that_an_older_save_left_are_refused(copy: Copy, data: Path, tmp_path: Path) -> None:
    step = saved_over(copy, data, "z0-bf16-w2", "z0-bf16-w2")
    (layer, *_) = (data / "deepspeed" / "pipe-z1-bf16-pp2" / "run").rglob("layer_*-model_states.pt")
    shutil.copy(layer, step)
    with pytest.raises(MixedWorldSizes, match="holds the whole model, and there are files of a pipeline's layers"):
        ckpt_cli.merge(step, tmp_path / "out")


def test_an_optimizer_that_an_older_save_left_is_refused(copy: Copy, data: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptError):
        ckpt_cli.merge(saved_over(copy, data, "z2-bf16-w2-bf16master", "moe-z0-w2-ep2"), tmp_path / "out")
