"""What an optimizer keeps of a parameter is compared with its shape: a rank's part, codes or blocks are never written as if whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckpt_cli
from ckpt_cli.errors import Inconsistent, Undecidable
from ckpt_cli.results.written import ExtractResult
from tests.tensors import Tensors, differences, load

WEIGHTS = {"w": torch.ones(8, 4), "b": torch.ones(6)}

WHOLE: dict[str, Tensors] = {
    "moments": {"exp_avg": torch.zeros(8, 4), "exp_avg_sq": torch.zeros(8, 4), "step": torch.tensor(1.0)},
    "a step in a list": {"exp_avg": torch.zeros(8, 4), "step": torch.ones(1)},
    "Adafactor of transformers": {"exp_avg_sq_row": torch.zeros(8), "exp_avg_sq_col": torch.zeros(4), "RMS": torch.tensor(1.0)},
    "Adafactor of torch": {"row_var": torch.zeros(8, 1), "col_var": torch.zeros(1, 4), "step": torch.tensor(1.0)},
}

PARTIAL: dict[str, Tensors] = {
    "half of the second moment": {"exp_avg": torch.zeros(8, 4), "exp_avg_sq": torch.zeros(4, 4)},
    "half of every moment": {"exp_avg": torch.zeros(8, 2), "exp_avg_sq": torch.zeros(8, 2)},
    "a flat part": {"exp_avg": torch.zeros(16), "exp_avg_sq": torch.zeros(16)},
    "a flat whole": {"exp_avg": torch.zeros(32)},
    "one row": {"exp_avg": torch.zeros(4)},
    "8-bit blocks": {"state1": torch.zeros(8, 4, dtype=torch.uint8), "absmax1": torch.zeros(1), "qmap1": torch.zeros(256)},
    "rows of half of the parameter": {"exp_avg_sq_row": torch.zeros(4), "exp_avg_sq_col": torch.zeros(4)},
    "columns of half of the parameter": {"exp_avg_sq_row": torch.zeros(8), "exp_avg_sq_col": torch.zeros(2)},
    "rows of another slot": {"momentum": torch.zeros(8)},
}

Save = Callable[[Path, Tensors, dict[str, Any]], None]


def optimizer_of(slots: Tensors, name: str = "w") -> dict[str, Any]:
    state = {name: slots, "b": {"exp_avg": torch.zeros(6)}}
    return {"state": state, "param_groups": [{"lr": 0.5, "params": list(state)}]}


def in_rank_files(folder: Path, weights: Tensors, optimizer: dict[str, Any]) -> None:
    for rank in range(2):
        torch.save(weights, folder / f"model_world_size_2_rank_{rank}.pt")
        torch.save(optimizer, folder / f"optim_world_size_2_rank_{rank}.pt")


def in_one_file(folder: Path, weights: Tensors, optimizer: dict[str, Any]) -> None:
    torch.save(weights, folder / "model_world_size_1_rank_0.pt")
    torch.save(optimizer, folder / "optim_world_size_1_rank_0.pt")


def with_recorded_names(folder: Path, weights: Tensors, optimizer: dict[str, Any]) -> None:
    names = optimizer["param_groups"][0]["params"]
    numbered = {names.index(name): slots for name, slots in optimizer["state"].items()}
    groups = [{"lr": 0.5, "params": list(range(len(names))), "param_names": names}]
    in_one_file(folder, weights, {"state": numbered, "param_groups": groups})


def in_dcp(folder: Path, weights: Tensors, optimizer: dict[str, Any]) -> None:
    save_dcp({"model": weights, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)


def in_dcp_with_flat_keys(folder: Path, weights: Tensors, optimizer: dict[str, Any]) -> None:
    flat = {f"state.{name}.{slot}": tensor for name, slots in optimizer["state"].items() for slot, tensor in slots.items()}
    save_dcp({"model": weights, "optimizer": flat}, checkpoint_id=folder, no_dist=True)


SAVES: list[Save] = [in_rank_files, in_one_file, with_recorded_names, in_dcp, in_dcp_with_flat_keys]


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "global_step_3"
    folder.mkdir()
    return folder


def extracted(step: Path) -> ExtractResult:
    return ckpt_cli.extract_state(step, step.parent / "out", optimizer=True)


def warnings(result: ExtractResult) -> list[str]:
    return [note.text for note in result.notes if note.code == "states-not-compared"]


@pytest.mark.parametrize("save", SAVES, ids=lambda save: save.__name__)
class TestSlots:
    @pytest.mark.parametrize("kind", WHOLE)
    def test_that_fit_the_parameter_are_written(self, step: Path, save: Save, kind: str) -> None:
        save(step, WEIGHTS, optimizer_of(WHOLE[kind]))
        assert warnings(extracted(step)) == []
        wanted = {f"state.w.{slot}": tensor for slot, tensor in WHOLE[kind].items()} | {"state.b.exp_avg": torch.zeros(6)}
        assert differences(load(step.parent / "out" / "optimizer.safetensors"), wanted) == []

    @pytest.mark.parametrize("kind", PARTIAL)
    def test_of_another_shape_are_refused(self, step: Path, save: Save, kind: str) -> None:
        save(step, WEIGHTS, optimizer_of(PARTIAL[kind]))
        with pytest.raises(Inconsistent, match="has shape") as caught:
            extracted(step)
        slot = (caught.value.tensor or "").removeprefix("state.w.")
        assert slot in PARTIAL[kind]
        assert str(list(PARTIAL[kind][slot].shape)) in caught.value.message
        assert "[8, 4]" in caught.value.message
        assert not (step.parent / "out").exists()


class TestWithoutAParameter:
    def test_what_one_file_holds_is_taken_with_a_warning_that_names_them(self, step: Path) -> None:
        in_one_file(step, WEIGHTS, optimizer_of({"exp_avg": torch.zeros(4, 4)}, "inner.v"))
        (text,) = warnings(extracted(step))
        assert "inner.v" in text
        assert "no tensors of these names" in text

    def test_equal_tensors_of_several_ranks_are_refused(self, step: Path) -> None:
        in_rank_files(step, WEIGHTS, optimizer_of({"exp_avg": torch.zeros(4, 4)}, "inner.v"))
        with pytest.raises(Undecidable, match="nothing shows that each is whole") as caught:
            extracted(step)
        assert caught.value.tensor == "state.inner.v.exp_avg"

    def test_weights_that_cannot_be_read_prove_nothing(self, step: Path) -> None:
        in_rank_files(step, WEIGHTS, optimizer_of({"exp_avg": torch.zeros(8, 4)}))
        (step / "model_world_size_2_rank_1.pt").write_bytes(b"")
        with pytest.raises(Undecidable, match="the model could not be read"):
            extracted(step)

    def test_numbers_need_none(self, step: Path) -> None:
        in_rank_files(step, WEIGHTS, optimizer_of({"step": torch.tensor(1.0)}, "inner.v"))
        assert warnings(extracted(step)) == []


class TestNumbersWithoutNames:
    def test_rows_and_columns_of_the_whole_parameter_belong_to_it(self, step: Path) -> None:
        slots = [WHOLE["Adafactor of transformers"], {"exp_avg_sq": torch.zeros(6)}]
        in_one_file(step, WEIGHTS, {"state": dict(enumerate(slots)), "param_groups": [{"lr": 0.5, "params": [0, 1]}]})
        extracted(step)
        assert load(step.parent / "out" / "optimizer.safetensors")["state.w.exp_avg_sq_row"].shape == (8,)

    def test_rows_of_a_part_do_not(self, step: Path) -> None:
        slots = [PARTIAL["rows of half of the parameter"], {"exp_avg_sq": torch.zeros(6)}]
        in_one_file(step, WEIGHTS, {"state": dict(enumerate(slots)), "param_groups": [{"lr": 0.5, "params": [0, 1]}]})
        with pytest.raises(Undecidable):
            extracted(step)


def with_placements(folder: Path, weights: Tensors, more: Callable[[int], Tensors]) -> None:
    """Rank files of two ranks that hold halves of ``w`` and of its moment as DTensors, and ``more`` of it as each rank has it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))

            def half(whole: torch.Tensor, mesh: Any = mesh, rank: int = rank) -> DTensor:
                return DTensor.from_local(whole.chunk(2)[rank].clone(), mesh, [Shard(0)], run_check=False)

            state = {"w": {"state1": half(torch.zeros(8, 4, dtype=torch.uint8)), **more(rank)}}
            torch.save({"w": half(weights["w"])}, folder / f"model_world_size_2_rank_{rank}.pt")
            groups = [{"lr": 0.5, "params": ["w"]}]
            torch.save({"state": state, "param_groups": groups}, folder / f"optim_world_size_2_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


class TestWhatEachRankHasOfItsOwn:
    @pytest.mark.parametrize(
        "slots",
        [
            lambda rank: {"absmax1": torch.full((4,), 1.0 + rank)},
            lambda rank: {"absmax1": torch.full((2, 2), 1.0 + rank)},
            lambda rank: {"state2": torch.full((4, 4), 1.0 + rank)},
        ],
        ids=["block scales", "block scales in rows", "a part without placements"],
    )
    def test_is_no_replica_of_another_save(self, step: Path, slots: Callable[[int], Tensors]) -> None:
        with_placements(step, WEIGHTS, slots)
        with pytest.raises(Inconsistent, match=r"has shape .*, the parameter \[8, 4\]") as caught:
            extracted(step)
        assert caught.value.tensor in ("state.w.absmax1", "state.w.state2")
        assert "one rank's part" in str(caught.value.hint)
        assert "two saves" not in str(caught.value.hint)

    def test_what_has_the_whole_shape_may_be_of_another_save(self, step: Path) -> None:
        with_placements(step, WEIGHTS, lambda rank: {"exp_avg": torch.full((8, 4), 1.0 + rank)})
        with pytest.raises(Inconsistent, match="what should be replicas") as caught:
            extracted(step)
        assert "files from two saves may be mixed" in str(caught.value.hint)

    def test_without_placements_anywhere_both_are_said(self, step: Path) -> None:
        in_rank_files(step, WEIGHTS, optimizer_of({"exp_avg": torch.zeros(4, 4)}))
        content = torch.load(step / "optim_world_size_2_rank_1.pt", weights_only=False)
        content["state"]["w"]["exp_avg"] += 1
        torch.save(content, step / "optim_world_size_2_rank_1.pt")
        with pytest.raises(Inconsistent, match="what should be replicas") as caught:
            extracted(step)
        assert "each rank has its own part" in str(caught.value.hint)
