"""State files whose names do not say of how many ranks they are: the last ones leave no gap when they are lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli


class Processes:
    """Like the state of accelerate, which is pickled with the arguments of transformers' Trainer."""

    def __init__(self, count: object) -> None:
        self.num_processes = count


class Arguments:
    def __init__(self, count: object) -> None:
        self.distributed_state = Processes(count)


def told(path: Path, tmp_path: Path, **options: object) -> tuple[list[str], int]:
    result = ckpt_cli.extract_state(path, tmp_path / "out", **options)  # type: ignore[arg-type]
    codes = ("missing-rank", "world-sizes-differ")
    return [note.text.partition(":")[0] for note in result.notes if note.code in codes], result.ranks


def whole_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(3, 2)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def randoms(folder: Path, ranks: int, name: str = "rng_state_{}.pth") -> None:
    for rank in range(ranks):
        torch.save({"cpu": torch.get_rng_state()}, folder / name.format(rank))


class TestAreCountedAgainst:
    @pytest.mark.parametrize("rank", [3, 1])
    @pytest.mark.parametrize("optimizer", [False, True])
    def test_the_ranks_that_wrote_a_dcp_folder(self, copy: Callable[..., Path], tmp_path: Path, rank: int, optimizer: bool) -> None:
        run = copy("layouts", "accelerate", "run")
        (run / "checkpoint-7" / f"rng_state_{rank}.pth").unlink()
        text = f"rank {rank} of 4 is missing from the training state"
        assert told(run, tmp_path, step=7, optimizer=optimizer) == ([text], 4)

    def test_its_metadata_and_not_files_of_another_save(self, copy: Callable[..., Path], tmp_path: Path) -> None:
        run = copy("layouts", "accelerate", "run")
        weights = run / "checkpoint-7" / "pytorch_model_fsdp_0"
        shutil.copy(weights / "__0_0.distcp", weights / "__7_0.distcp")
        assert told(run, tmp_path, step=7) == ([], 4)

    def test_the_sizes_that_deepspeed_records(self, copy: Callable[..., Path], tmp_path: Path) -> None:
        run = copy("deepspeed", "hf-trainer-z3-w2", "run")
        (run / "checkpoint-4" / "rng_state_1.pth").unlink()
        assert told(run, tmp_path) == (["rank 1 of 2 is missing from the training state"], 2)

    @pytest.mark.parametrize(("case", "ranks"), [("pipe-z1-bf16-pp2", 2), ("z0-bf16-w2", 2), ("mics-z3-w4", 4)])
    def test_those_of_pipelines_and_of_shards_that_are_replicated(
        self, copy: Callable[..., Path], tmp_path: Path, case: str, ranks: int
    ) -> None:
        run = copy("deepspeed", case, "run")
        (tag,) = run.glob("global_step*")
        randoms(tag, ranks)
        assert told(tag, tmp_path) == ([], ranks)
        (tag / f"rng_state_{ranks - 1}.pth").unlink()
        assert told(tag, tmp_path / "less") == ([f"rank {ranks - 1} of {ranks} is missing from the training state"], ranks)

    @pytest.mark.parametrize(("there", "texts"), [(4, []), (3, ["rank 3 of 4 is missing from the training state"])])
    def test_the_arguments_of_the_training(self, tmp_path: Path, there: int, texts: list[str]) -> None:
        step = whole_model(tmp_path / "run" / "checkpoint-3")
        randoms(step, there)
        torch.save(Arguments(4), step / "training_args.bin")
        assert told(step, tmp_path) == (texts, 4)

    def test_arguments_that_tell_of_fewer(self, tmp_path: Path) -> None:
        step = whole_model(tmp_path / "run" / "checkpoint-3")
        randoms(step, 4)
        torch.save(Arguments(2), step / "training_args.bin")
        assert told(step, tmp_path) == (["the state is of 4 ranks, training_args.bin is of 2"], 4)

    @pytest.mark.parametrize("count", ["4", None, -1, True, 1 << 40])
    def test_no_arguments_that_tell_nothing(self, tmp_path: Path, count: object) -> None:
        step = whole_model(tmp_path / "run" / "checkpoint-3")
        randoms(step, 3)
        torch.save(Arguments(count), step / "training_args.bin")
        assert told(step, tmp_path) == ([], 3)

    def test_the_files_of_the_optimizer(self, tmp_path: Path) -> None:
        step = whole_model(tmp_path / "run" / "checkpoint-3")
        randoms(step, 3, "random_states_{}.pkl")
        for rank in range(4):
            torch.save({}, step / f"optimizer_world_size_4_rank_{rank}.pt")
        assert told(step, tmp_path) == (["rank 3 of 4 is missing from the training state"], 4)

    def test_the_folder_of_the_optimizer(self, copy: Callable[..., Path], tmp_path: Path) -> None:
        step = copy("layouts", "accelerate", "run") / "checkpoint-7"
        shutil.rmtree(step / "pytorch_model_fsdp_0")
        save_file({"w": torch.ones(3, 2)}, step / "model.safetensors", metadata={"format": "pt"})
        (step / "rng_state_3.pth").unlink()
        assert told(step, tmp_path) == (["rank 3 of 4 is missing from the training state"], 4)

    def test_no_optimizer_of_one_file(self, tmp_path: Path) -> None:
        step = whole_model(tmp_path / "run" / "checkpoint-3")
        randoms(step, 3)
        torch.save({}, step / "optimizer.pt")
        assert told(step, tmp_path) == ([], 3)

    def test_files_of_another_kind(self, tmp_path: Path) -> None:
        step = whole_model(tmp_path / "run" / "checkpoint-3")
        randoms(step, 2)
        (step / "dataloader").mkdir()
        for rank in range(4):
            torch.save({"epoch": 1}, step / "dataloader" / f"rank_{rank}.pt")
        assert told(step, tmp_path) == (["ranks 2, 3 of 4 are missing from the training state"], 4)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("dataloader/rank_{}.pt", "rank 3 of 4 is missing among dataloader/rank_R.pt"),
            ("extra_state/extra_state_rank_{}.pt", "rank 3 of 4 is missing from the training state"),
            ("random_states_{}.pkl", "rank 3 of 4 is missing from the training state"),
            ("dataloader_state/dataloader_state_world_size_2_rank_{}.pt", "dataloader_state_world_size_2_rank_R.pt is of 2 ranks"),
        ],
    )
    def test_files_of_every_kind(self, copy: Callable[..., Path], tmp_path: Path, name: str, text: str) -> None:
        step = copy("layouts", "accelerate", "run") / "checkpoint-7"
        for file in step.glob("rng_state_*"):
            file.unlink()
        (step / name).parent.mkdir(exist_ok=True)
        for rank in range(2 if "world_size_2" in name else 3):
            torch.save({"epoch": 1}, step / name.format(rank))
        texts, _ = told(step, tmp_path)
        assert [each.partition(",")[0] for each in texts] == [text]

    def test_the_mesh_in_files_of_ranks(self, copy: Callable[..., Path], tmp_path: Path) -> None:
        step = copy("layouts", "verl-run", "run") / "global_step_20" / "actor"
        for file in step.glob("*"):
            if file.name.startswith("model_world_size_4_rank_"):
                file.rename(step / f"pytorch_model_fsdp_{file.name.partition('4_')[2].replace('_', '').replace('.pt', '.bin')}")
            elif file.is_file() and file.suffix == ".pt":
                file.unlink()
        randoms(step, 3)
        (step / "pytorch_model_fsdp_rank3.bin").unlink()
        assert told(step, tmp_path) == (["rank 3 of 4 is missing from the training state"], 4)
