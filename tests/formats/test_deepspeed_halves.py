"""The two halves of a DeepSpeed save, the module and the optimizer with the lists beside it, must hold the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent, MissingShard, Undecidable
from tests.conftest import Copy
from tests.formats.test_deepspeed import changed


def refused(run: Path, error: type[CkptError], match: str) -> str:
    with pytest.raises(error, match=match) as caught:
        ckpt_cli.merge(run, run.parent / "out")
    assert not (run.parent / "out").exists()
    return str(caught.value.tensor)


class TestFrozenParameters:
    """Stage 2 has them in the module, and lists them beside it with shapes and values."""

    CASE, FILE, NAME = "z2-bf16-w2-ds0.14.5", "global_step3/mp_rank_00_model_states.pt", "tower.weight"

    @pytest.mark.parametrize(
        ("change", "error", "match"),
        [
            (lambda module, name: module.pop(name), MissingShard, "lacks this frozen parameter"),
            (lambda module, name: module.update({name: None}), MissingShard, "None is in its place"),
            (lambda module, name: module.update({name: 3}), MissingShard, "3 is in its place"),
            (lambda module, name: module.update({name: module[name][:-1].clone()}), Inconsistent, "shape"),
            (lambda module, name: module.update({name: module[name].reshape(-1)}), Inconsistent, "shape"),
            (lambda module, name: module.update({name: module[name] + 1}), Inconsistent, "other values"),
        ],
    )
    def test_one_that_the_module_has_otherwise_is_refused(
        self, copy: Copy, change: Callable[[dict[str, torch.Tensor], str], Any], error: type[CkptError], match: str
    ) -> None:
        run = copy("deepspeed", self.CASE, "run")
        with changed(run / self.FILE) as content:
            change(content["module"], self.NAME)
        assert refused(run, error, match) == self.NAME

    def test_one_that_is_stored_twice_is_whole(self, copy: Copy, tmp_path: Path) -> None:
        run = copy("deepspeed", self.CASE, "run")
        with changed(run / self.FILE) as content:
            content["module"][self.NAME] = content["module"][self.NAME].clone()
        ckpt_cli.merge(run, tmp_path / "out")


class TestWeightsOfStage0:
    """The optimizer beside the module, or those of the ranks of experts, hold the fp32 weights of all that was trained."""

    def test_a_group_that_lost_weights_is_refused(self, copy: Copy) -> None:
        run = copy("deepspeed", "z0-bf16-w2", "run")
        with changed(run / "global_step3/mp_rank_00_model_states.pt") as content:
            content["optimizer"]["fp32_groups"][1].pop()
        refused(run, CorruptFile, "10 parameters, and 9 fp32 weights")

    def test_a_group_that_is_lost_is_refused(self, copy: Copy) -> None:
        run = copy("deepspeed", "z0-bf16-w2", "run")
        with changed(run / "global_step3/mp_rank_00_model_states.pt") as content:
            content["optimizer"]["fp32_groups"].pop()
        refused(run, CorruptFile, "2 groups of parameters, and fp32 weights of 1")

    def test_an_optimizer_that_lost_all_of_them_is_told(self, copy: Copy) -> None:
        run = copy("deepspeed", "z0-bf16-w2", "run")
        with changed(run / "global_step3/mp_rank_00_model_states.pt") as content:
            del content["optimizer"]["fp32_groups"]
        notes = ckpt_cli.merge(run, run.parent / "out").checkpoint.notes
        assert "lacks them (fp32_groups)" in next(note.text for note in notes if note.code == "no-masters")

    def test_an_optimizer_of_experts_that_is_empty_is_refused(self, copy: Copy) -> None:
        run = copy("deepspeed", "moe-z0-w2-ep2", "run")
        with changed(run / "global_step3/expp_rank_1_mp_rank_00_optim_states.pt") as content:
            content["optimizer"].clear()
        assert "deepspeed_experts." in refused(run, Inconsistent, "others of its layer")

    def test_one_expert_without_fp32_weights_is_refused(self, copy: Copy) -> None:
        run = copy("deepspeed", "moe-z0-w2-ep2", "run")
        with changed(run / "global_step3/expp_rank_1_mp_rank_00_optim_states.pt") as content:
            content["optimizer"]["fp32_groups"][-1].pop()
            content["optimizer"]["optimizer_state_dict"]["param_groups"][-1]["params"].pop()
        assert "deepspeed_experts." in refused(run, Inconsistent, "others of its layer")


@pytest.mark.parametrize("slot", ["exp_avg", "step"])
def test_a_stage_whose_optimizer_keeps_less_is_refused(copy: Copy, slot: str) -> None:
    run = copy("deepspeed", "pipe-z1-bf16-pp2", "run")
    name = "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    with changed(run / "global_step3" / name) as content:
        del content["optimizer_state_dict"]["base_optimizer_state"]["state"][0][slot]
    with pytest.raises(Inconsistent, match=f"keeps {slot} of group 0 in model parallel rank 0, and not in rank 1"):
        ckpt_cli.extract_state(run, run.parent / "out", optimizer=True)


def test_vectors_of_a_universal_save_without_their_shapes_are_refused(copy: Copy) -> None:
    run = copy("deepspeed", "universal-z3-w2", "run")
    for path in run.glob("*/*model_states.pt"):
        with changed(path) as content:
            content["param_shapes"] = []
    with pytest.raises(Undecidable, match="do not tell its shape"):
        ckpt_cli.merge(run / "global_step3_universal", run.parent / "out")
