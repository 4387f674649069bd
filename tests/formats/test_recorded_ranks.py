"""The rank that a file records is that in its name: files of ranks and of DeepSpeed that were exchanged or copied over each other."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from ckpt_cli.files.source import Files
from ckpt_cli.formats.assembly import RankState
from ckpt_cli.formats.rank_files.reader import check_rank_files, read_rank_file
from ckpt_cli.formats.sets.recorded import Recorded, refuse_exchanged
from tests.conftest import Copy


def change(path: Path, **more: Any) -> None:
    torch.save({**torch.load(path, weights_only=False), **more}, path)


class TestRising:
    @pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 8, 16, 24), (None, 4, None, 6), (0, 0, 0, 0), (None,) * 4])
    def test_ranks_are_no_doubt(self, ranks: tuple[int | None, ...]) -> None:
        refuse_exchanged([Recorded(f"f{n}", Path(f"f{n}"), rank) for n, rank in enumerate(ranks)])

    @pytest.mark.parametrize(
        ("ranks", "told"),
        [
            ((1, 0, 2, 3), "f0 was written by rank 1, f1 by rank 0: they are in each other's place"),
            ((0, 0, 2, 3), "f0 and f1 were both written by rank 0"),
            ((0, None, 3, 2), "f2 was written by rank 3, f3 by rank 2: they are in each other's place"),
            ((3, 1, 2, 0), "f0 was written by rank 3, f3 by rank 0: they are in each other's place"),
            ((2, 1, 0), "f0 was written by rank 2, f2 by rank 0: they are in each other's place"),
            ((0, 4, 2, 3, 1), "f1 was written by rank 4, f4 by rank 1: they are in each other's place"),
            ((1, 2, 0), "f0 was written by rank 1, f1 by rank 2: their names are in another order"),
            ((0, 2, 2), "f1 and f2 were both written by rank 2"),
            ((0, 1, 0), "f0 and f2 were both written by rank 0"),
        ],
    )
    def test_others_are_refused(self, ranks: tuple[int | None, ...], told: str) -> None:
        with pytest.raises(Inconsistent) as caught:
            refuse_exchanged([Recorded(f"f{n}", Path(f"f{n}"), rank) for n, rank in enumerate(ranks)])
        assert caught.value.message == told

    @pytest.mark.parametrize("ranks", [(0, 1, 3, 3), (0, 0, 2, 3), (0, 2, 2, 3), (3, 1, 2, 3), (0, 1, 3, 2), (0, 3, 2, 1)])
    def test_files_of_two_axes(self, ranks: tuple[int, ...]) -> None:
        """Files of a grid of two by two: one that was copied over its neighbour leaves a line of one rank, which others show."""
        first, second, third, fourth = (Recorded(f"f{n}", Path(f"f{n}"), rank) for n, rank in enumerate(ranks))
        with pytest.raises(Inconsistent):
            refuse_exchanged([first, second], [third, fourth], [first, third], [second, fourth])
        refuse_exchanged(*([Recorded(f"f{n}", Path(f"f{n}"), n) for n in line] for line in ((0, 1), (2, 3), (0, 2), (1, 3))))


class TestDeepSpeed:
    """Megatron-DeepSpeed keeps its arguments in the model states."""

    def step(self, copy: Copy, *ranks: int) -> Path:
        run = copy("deepspeed", "tp2-z1-w2", "run")
        for path, rank in zip(sorted(run.rglob("mp_rank_0?_model_states.pt")), ranks, strict=True):
            change(path, args=argparse.Namespace(rank=rank, lr=1.0))
        return run

    @pytest.mark.parametrize("ranks", [(0, 1), (0, 4), (0, 0)])
    def test_ranks_that_rise(self, ranks: tuple[int, int], copy: Copy, tmp_path: Path) -> None:
        ckpt_cli.merge(self.step(copy, *ranks), tmp_path / "out")

    @pytest.mark.parametrize("command", ["merge", "extract_state"])
    def test_exchanged_ones(self, command: str, copy: Copy, tmp_path: Path) -> None:
        with pytest.raises(Inconsistent, match="written by rank 1") as caught:
            getattr(ckpt_cli, command)(self.step(copy, 1, 0), tmp_path / "out")
        assert caught.value.exit_code == 4

    def test_exchanged_ones_of_data_parallel_ranks(self, copy: Copy) -> None:
        run = copy("deepspeed", "z3-bf16-w2", "run")
        for number, path in enumerate(sorted(run.rglob("*_model_states.pt"))):
            change(path, args={"rank": 3 - number})
        with pytest.raises(Inconsistent, match="written by rank 3"):
            ckpt_cli.inspect(run)


class TestRankFiles:
    @pytest.mark.parametrize("mode", ["fsdp1_sharded_tensor", "fsdp2"])
    @pytest.mark.parametrize("version", ["torch-2.4.1", "torch-2.9.1", "torch-2.13.0"])
    def test_renamed_files(self, version: str, mode: str, copy: Copy, tmp_path: Path) -> None:
        first, second = sorted(copy(version, mode).glob("*.pt"))[1:3]
        first.rename(tmp_path / "between")
        second.rename(first)
        (tmp_path / "between").rename(second)
        with pytest.raises(Inconsistent, match=r"from rank 2|says rank 2"):
            ckpt_cli.merge(first.parent, tmp_path / "out")

    def test_what_torch_called_a_file_is_what_it_records(self, copy: Copy) -> None:
        path = copy("torch-2.13.0", "fsdp2") / "model_world_size_4_rank_1.pt"
        moved = path.rename(path.with_name("model_world_size_4_rank_3.pt"))
        assert read_rank_file(3, moved, Files(), "model", None, "model").state.recorded == 1

    def test_a_rank_beside_the_state_dict_is_what_it_records(self, tmp_path: Path) -> None:
        path = tmp_path / "model_world_size_4_rank_3.pt"
        torch.save({"model": {"w": torch.ones(2, 2)}, "rank": 2}, path)
        assert read_rank_file(3, path, Files(), "model", None, "model").state.recorded == 2

    @pytest.mark.parametrize("recorded", [(0, 1, 2, 3), (0, 1, 0, 1), (0, 0, 0, 0), (None, None, 2, None)])
    def test_ranks_of_the_run_of_a_node_or_of_one_process_are_no_doubt(self, recorded: tuple[int | None, ...]) -> None:
        check_rank_files([RankState(rank, Path(f"{rank}"), {}, recorded=said) for rank, said in enumerate(recorded)], 4)

    @pytest.mark.parametrize("recorded", [(0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 1, 3), (None, None, 3, None)])
    def test_others_are_refused(self, recorded: tuple[int | None, ...]) -> None:
        with pytest.raises(Inconsistent, match="its content says rank"):
            check_rank_files([RankState(rank, Path(f"{rank}"), {}, recorded=said) for rank, said in enumerate(recorded)], 4)
