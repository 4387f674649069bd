"""What DeepSpeed saves hold that other formats tell too: buffers of all ranks, and what is no tensor, in whichever file it is."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests.conftest import Copy
from tests.formats.test_deepspeed import changed

STEP = Path("run", "global_step3")


class TestBuffersOfStage3:
    """Every rank has the whole of them, so that they are replicas, as plain tensors in files of ranks are."""

    @pytest.fixture
    def run(self, copy: Copy) -> Path:
        folder = copy("deepspeed", "z3-bf16-w2")
        for path in (folder / STEP).glob("zero_pp_rank_1_*_model_states.pt"):
            with changed(path) as content:
                content["module"]["token_counts"] += 1
        return folder / "run"

    def test_that_differ_are_refused(self, run: Path, tmp_path: Path) -> None:
        with pytest.raises(Inconsistent, match="ranks 0 and 1 hold different values") as refused:
            ckpt_cli.merge(run, tmp_path / "out")
        assert refused.value.tensor == "token_counts"
        assert "replicas-differ" in {finding.code for finding in ckpt_cli.verify(run, full=True).findings}

    def test_are_those_of_rank_0_where_that_is_allowed(self, run: Path, tmp_path: Path) -> None:
        result = ckpt_cli.merge(run, tmp_path / "out", allow_unequal_replicas=True)
        assert "replicas-differ" in {note.code for output in result.outputs for note in output.notes}

    def test_that_one_rank_lacks_are_refused(self, run: Path, tmp_path: Path) -> None:
        for path in (run / "global_step3").glob("zero_pp_rank_1_*_model_states.pt"):
            with changed(path) as content:
                del content["module"]["token_counts"]
        with pytest.raises(Inconsistent, match="rank 1 lacks it"):
            ckpt_cli.merge(run, tmp_path / "out")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("case", "file", "name"),
    [
        ("pipe-z1-bf16-pp2", "layer_01-model_states.pt", "1.gate.bias"),
        ("moe-z2-w2-ep2", "layer_*expert_1_*_model_states.pt", "gate.bias"),
        ("tp2-z1-w2", "mp_rank_01_model_states.pt", "gate.bias"),
    ],
)
def test_what_is_no_tensor_is_told_of_every_file(case: str, file: str, name: str, copy: Copy) -> None:
    folder = copy("deepspeed", case)
    path = min((folder / STEP).glob(file))
    with changed(path) as content:
        held = content.get("module", content)
        held |= {"gate.bias": None, "running": numpy.ones(4)}
    told = [note.text for note in ckpt_cli.detect(folder / "run").checkpoint.notes if note.code == "left-out"]
    assert any(f"{name} (None)" in text for text in told), told
    assert any("running" in text for text in told), told
    assert torch.is_tensor(next(iter(ckpt_cli.load_state_dict(folder / "run").values())))


class TestStateOfEachRank:
    """What ``save_checkpoint`` is given as ``client_state`` lies in every file of model states, and may differ from rank to rank."""

    @pytest.mark.parametrize("case", ["z3-bf16-w2", "pipe-z1-bf16-pp2"])
    def test_is_kept_of_all(self, copy: Copy, tmp_path: Path, case: str) -> None:
        folder = copy("deepspeed", case)
        for number, path in enumerate(sorted((folder / STEP).glob("*mp_rank_*_model_states.pt"))):
            with changed(path) as content:
                content["position"], content["common"] = number * 10, 7
        ckpt_cli.extract_state(folder / "run", tmp_path / "out")
        extra = torch.load(tmp_path / "out" / "extra_state_merged.pt")
        second = "position_mp_rank_01" if case.startswith("pipe") else "position_rank_1"
        assert (extra["position"], extra[second], extra["common"]) == (0, 10, 7)
        assert not [name for name in extra if name.startswith("common_")]

    def test_random_states_are_those_of_ranks(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z3-bf16-w2")
        for rank in (0, 1):
            with changed(folder / STEP / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt") as content:
                content["rng_state"] = torch.full((4,), rank, dtype=torch.uint8)
        ckpt_cli.extract_state(folder / "run", tmp_path / "out")
        extra = torch.load(tmp_path / "out" / "extra_state_merged.pt")
        assert [int(extra[f"rng_rank_{rank}"]["rng_state"][0]) for rank in (0, 1)] == [0, 1]
