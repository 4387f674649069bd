"""Experts of DeepSpeed: layers with different numbers of them (PR-MoE), groups that are split, other orders of ranks, files too many."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError
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
