"""What absence can hide: lost ranks, lost stages, copies in the place of parts, entries that are not what they seem."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckpt_cli
from ckpt_cli.errors import CkptError, Inconsistent, MissingShard, NotFound, Unsupported, UsageError


def save_ranks(folder: Path, world: int, tensors: dict[str, tuple[Sequence[Any], Sequence[Placement], torch.Tensor]]) -> None:
    """Rank files of DTensors. ``tensors``: name -> mesh ranks, placements, the part of *every* rank (a rank outside has none)."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            state = {}
            for name, (ranks, placements, part) in tensors.items():
                mesh = torch.tensor(ranks)
                if rank in mesh.flatten().tolist():
                    state[name] = DTensor.from_local(part + rank, DeviceMesh("cpu", mesh), placements, run_check=False)
            torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    """Two pipeline stages: ranks 0 and 1 hold the first layer, ranks 2 and 3 the second."""
    folder = tmp_path / "global_step_1"
    parts = torch.ones(2, 3)
    save_ranks(folder, 4, {"layers.0.w": ([0, 1], [Shard(0)], parts), "layers.1.w": ([2, 3], [Shard(0)], parts)})
    return folder


class TestLostRanks:
    def test_pipeline_stages_are_put_together(self, stages: Path, tmp_path: Path) -> None:
        assert ckpt_cli.merge(stages, tmp_path / "out").outputs[0].tensors == 2

    def test_a_lost_stage_is_not_taken_for_replicas(self, stages: Path, tmp_path: Path) -> None:
        for rank in (2, 3):
            (stages / f"model_world_size_4_rank_{rank}.pt").unlink()
        with pytest.raises(MissingShard, match="what rank 2 held is in no other file"):
            ckpt_cli.merge(stages, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_lost_row_of_replicas_is_one(self, tmp_path: Path) -> None:
        folder = tmp_path / "global_step_1"
        whole = torch.ones(2, 3)
        save_ranks(folder, 4, {"w": ([[0, 1], [2, 3]], [Replicate(), Shard(0)], whole)})
        for rank in (2, 3):
            (folder / f"model_world_size_4_rank_{rank}.pt").unlink()
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert [note.code for note in result.checkpoint.notes] == ["replicas-only"]


class TestCopies:
    @pytest.mark.parametrize("checksums", [True, False])
    def test_a_file_copied_over_another_rank_is_found(self, tmp_path: Path, checksums: bool) -> None:
        folder = tmp_path / "global_step_1"
        torch.serialization.set_crc32_options(checksums)
        try:
            save_ranks(folder, 2, {"w": ([0, 1], [Shard(0)], torch.ones(2, 3))})
        finally:
            torch.serialization.set_crc32_options(True)
        shutil.copy(folder / "model_world_size_2_rank_0.pt", folder / "model_world_size_2_rank_1.pt")
        with pytest.raises(Inconsistent, match="its content says rank 0"):
            ckpt_cli.merge(folder, tmp_path / "out")


class TestEntriesThatAreNoTensors:
    @pytest.mark.parametrize(
        "entry",
        [{"weight": torch.ones(2)}, [torch.ones(2)], {"deep": {"deeper": [torch.ones(2)]}}],
        ids=["dict", "list", "nested"],
    )
    def test_are_refused_if_they_hold_tensors(self, tmp_path: Path, entry: object) -> None:
        folder = tmp_path / "global_step_1"
        folder.mkdir()
        torch.save({"w": torch.ones(2), "more": entry}, folder / "model_world_size_1_rank_0.pt")
        with pytest.raises(Unsupported, match="holds tensors") as caught:
            ckpt_cli.merge(folder, tmp_path / "out")
        assert caught.value.tensor == "more"

    def test_are_shown_if_they_hold_none(self, tmp_path: Path) -> None:
        folder = tmp_path / "global_step_1"
        folder.mkdir()
        torch.save({"w": torch.ones(2), "step": 3, "names": ["a"]}, folder / "model_world_size_1_rank_0.pt")
        leaves = ckpt_cli.inspect(folder).checkpoint.components[0].leaves
        assert {leaf.name: leaf.text for leaf in leaves} == {"step": "3", "names": "list of 1"}


class TestOutputsOfSeveralComponents:
    def test_never_share_a_folder_by_accident(self, tmp_path: Path) -> None:
        step = tmp_path / "global_step_1"
        for folder, value in ((step, 1.0), (step / "actor", 2.0)):
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({"w": torch.full((2,), value)}, folder / "model_world_size_1_rank_0.pt")
        ckpt_cli.merge(step, type="all")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", "global_step_1_merged", "global_step_1_merged_actor"]

    def test_never_leave_the_output_folder(self, tmp_path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        evil = str(tmp_path / "evil")
        folder = tmp_path / "ckpt"
        dcp.save(
            {"model": {"w": torch.ones(2)}, evil: {"w": torch.ones(3)}, "..": {"w": torch.ones(4)}}, checkpoint_id=folder, no_dist=True
        )
        result = ckpt_cli.merge(folder, tmp_path / "out", type="all")
        assert [output.component for output in result.outputs] == ["model", "other", "other_2"]
        assert all(Path(output.output).parent == tmp_path / "out" for output in result.outputs)
        assert not (tmp_path / "evil").exists()
        with pytest.raises(CkptError):
            ckpt_cli.merge(folder, tmp_path / "out2", type=evil)


class TestNodes:
    """Each node kept the files of its own ranks."""

    @pytest.fixture
    def nodes(self, tmp_path: Path) -> tuple[Path, Path]:
        whole = tmp_path / "whole" / "global_step_7" / "actor"
        save_ranks(whole, 4, {"w": ([0, 1, 2, 3], [Shard(0)], torch.ones(2, 3))})
        for node, ranks in (("node0", (0, 1)), ("node1", (2, 3))):
            folder = tmp_path / "cluster" / node / "global_step_7" / "actor"
            folder.mkdir(parents=True)
            for rank in ranks:
                shutil.copy(whole / f"model_world_size_4_rank_{rank}.pt", folder)
        shutil.rmtree(tmp_path / "whole")
        return tmp_path / "cluster" / "node0", tmp_path / "cluster" / "node1"

    def test_one_node_alone_is_refused(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        with pytest.raises(MissingShard, match="ranks 2, 3 of 4 are missing"):
            ckpt_cli.merge(nodes[0], tmp_path / "out")

    @pytest.mark.parametrize("level", ["", "global_step_7", "global_step_7/actor"])
    def test_also_adds_the_other_node_at_any_level(self, nodes: tuple[Path, Path], tmp_path: Path, level: str) -> None:
        result = ckpt_cli.merge(nodes[0] / level, tmp_path / "out", also=(nodes[1] / level,))
        assert result.outputs[0].elements == 24

    def test_the_folder_above_is_enough(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        result = ckpt_cli.merge(nodes[0].parent, tmp_path / "out")
        assert result.outputs[0].elements == 24
        assert "nodes" in [note.code for note in result.checkpoint.notes]

    def test_a_rank_that_both_have_is_refused(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        name = "global_step_7/actor/model_world_size_4_rank_1.pt"
        shutil.copy(nodes[0] / name, nodes[1] / name)
        with pytest.raises(CkptError, match="rank 1 is in both"):
            ckpt_cli.merge(nodes[0], tmp_path / "out", also=(nodes[1],))

    def test_the_output_may_lie_in_neither(self, nodes: tuple[Path, Path]) -> None:
        with pytest.raises(CkptError) as caught:
            ckpt_cli.merge(nodes[0] / "global_step_7", nodes[1] / "global_step_7" / "actor" / "out", also=(nodes[1] / "global_step_7",))
        assert caught.value.code == "output-inside-source"

    def test_a_step_that_one_node_alone_has_is_skipped(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        shutil.copytree(nodes[0] / "global_step_7", nodes[0] / "global_step_8")
        assert ckpt_cli.merge(nodes[0].parent, tmp_path / "out").checkpoint.step == 7
        assert ckpt_cli.merge(nodes[0].parent, tmp_path / "out7", step=7).outputs[0].elements == 24
        with pytest.raises(MissingShard):
            ckpt_cli.merge(nodes[0].parent, tmp_path / "out8", step=8)

    def test_another_step_is_never_taken_instead(self, tmp_path: Path) -> None:
        for step in (1, 2):
            save_ranks(tmp_path / f"global_step_{step}", 2, {"w": ([0, 1], [Shard(0)], torch.ones(2, 3))})
        with pytest.raises(UsageError, match="no part of this checkpoint"):
            ckpt_cli.merge(tmp_path / "global_step_1", tmp_path / "out", also=tmp_path / "global_step_2")
        assert not (tmp_path / "out").exists()

    def test_a_folder_that_says_no_step_may_be_a_part(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        plain = Path(shutil.copytree(nodes[1] / "global_step_7" / "actor", tmp_path / "files-of-node1"))
        result = ckpt_cli.merge(nodes[0] / "global_step_7" / "actor", tmp_path / "out", also=plain)
        assert result.outputs[0].elements == 24

    def test_two_runs_beside_each_other_are_no_nodes(self, tmp_path: Path) -> None:
        for run in ("a", "b"):
            save_ranks(tmp_path / run / "global_step_1", 2, {"w": ([0, 1], [Shard(0)], torch.ones(2, 3))})
        with pytest.raises(CkptError, match="no checkpoint was recognised"):
            ckpt_cli.merge(tmp_path, tmp_path / "out")


def save_dcp(folder: Path, content: dict[str, Any]) -> Path:
    dcp.save(content, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def save_without_collectives(folder: Path, world: int) -> Path:
    """What each rank leaves when no rank gathers the metadata: its own data and its own metadata."""
    for rank in range(world):
        alone = save_dcp(folder / f"rank{rank}", {"model": {f"w{rank}": torch.full((2, 3), float(rank))}})
        metadata = pickle.loads((alone / ".metadata").read_bytes())
        for place in metadata.storage_data.values():
            place.relative_path = f"__{rank}_0.distcp"
        (alone / "__0_0.distcp").rename(folder / f"__{rank}_0.distcp")
        (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))
        shutil.rmtree(alone)
    return folder


class TestDcpOfSeveralFolders:
    def test_two_saves_are_never_stitched_together(self, tmp_path: Path) -> None:
        first, second = (save_dcp(tmp_path / name, {"model": {"w": torch.full((2, 3), value)}}) for name, value in (("a", 1.0), ("b", 2.0)))
        with pytest.raises(Inconsistent, match="is in both"):
            ckpt_cli.merge(first, tmp_path / "out", also=second)

    def test_the_same_metadata_on_every_node_is_no_contradiction(self, tmp_path: Path) -> None:
        first = save_dcp(tmp_path / "a", {"model": {"w": torch.ones(2, 3)}})
        (tmp_path / "b").mkdir()
        shutil.copy(first / ".metadata", tmp_path / "b")
        (first / "__0_0.distcp").rename(tmp_path / "b" / "__0_0.distcp")
        assert ckpt_cli.merge(first, tmp_path / "out", also=tmp_path / "b").outputs[0].elements == 6

    @pytest.mark.parametrize("lost", [0, 1, 2])
    def test_a_rank_whose_metadata_is_gone_is_missed(self, tmp_path: Path, lost: int) -> None:
        folder = save_without_collectives(tmp_path / "save", 3)
        assert ckpt_cli.merge(folder, tmp_path / "out").outputs[0].elements == 18
        (folder / f"__{lost}.metadata").unlink()
        with pytest.raises(MissingShard, match=f"metadata of rank {lost}"):
            ckpt_cli.merge(folder, tmp_path / "out2")

    @pytest.mark.parametrize("above", [False, True])
    def test_each_node_may_keep_the_metadata_of_its_own_ranks(self, tmp_path: Path, above: bool) -> None:
        nodes = tmp_path / "nodes"
        first = save_without_collectives(nodes / "n0", 4)
        (nodes / "n1").mkdir()
        for path in [path for rank in (2, 3) for path in first.glob(f"__{rank}*")]:
            path.rename(nodes / "n1" / path.name)
        result = ckpt_cli.merge(nodes if above else first, tmp_path / "out", also=() if above else nodes / "n1")
        assert result.outputs[0].elements == 24

    @pytest.mark.parametrize("also", [False, True])
    def test_a_step_that_some_nodes_lack_is_not_believed_to_be_whole(self, tmp_path: Path, also: bool) -> None:
        for step in (10, 20):
            whole = save_without_collectives(tmp_path / "whole" / f"step_{step}", 3)
            for rank in range(3):
                for path in whole.glob(f"__{rank}*"):
                    (tmp_path / "nodes" / f"n{rank}" / whole.name).mkdir(parents=True, exist_ok=True)
                    path.rename(tmp_path / "nodes" / f"n{rank}" / whole.name / path.name)
        shutil.rmtree(tmp_path / "nodes" / "n2" / "step_20")
        nodes = sorted((tmp_path / "nodes").iterdir())
        source, more = (nodes[0], nodes[1:]) if also else (tmp_path / "nodes", [])
        result = ckpt_cli.merge(source, tmp_path / "out", also=more)
        assert (result.checkpoint.step, result.outputs[0].elements) == (10, 18)
        with pytest.raises(CkptError):
            ckpt_cli.merge(source, tmp_path / "out20", step=20, also=more)

    def test_two_steps_are_never_taken_together(self, tmp_path: Path) -> None:
        whole = save_without_collectives(tmp_path / "plain", 3)
        for rank, step in ((1, "x/step_10"), (2, "y/step_20")):
            (tmp_path / step).mkdir(parents=True)
            for path in whole.glob(f"__{rank}*"):
                path.rename(tmp_path / step / path.name)
        with pytest.raises(UsageError, match="no part of this checkpoint"):
            ckpt_cli.merge(whole, tmp_path / "out", also=(tmp_path / "x/step_10", tmp_path / "y/step_20"))


class TestDcpContents:
    @pytest.mark.parametrize("thing", [(torch.ones(2), torch.ones(2)), torch.nn.Linear(2, 2)], ids=["tuple", "module"])
    def test_an_object_among_the_weights_that_holds_tensors_is_refused(self, tmp_path: Path, thing: object) -> None:
        folder = save_dcp(tmp_path / "save", {"model": {"w": torch.ones(2, 3), "thing": thing}})
        with pytest.raises(Unsupported, match="holds tensors") as caught:
            ckpt_cli.merge(folder, tmp_path / "out")
        assert caught.value.tensor == "model.thing"

    def test_an_object_elsewhere_is_none_of_the_weights(self, tmp_path: Path) -> None:
        folder = save_dcp(tmp_path / "save", {"model": {"w": torch.ones(2, 3), "n": 3}, "extra": (torch.ones(2),)})
        assert ckpt_cli.merge(folder, tmp_path / "out").outputs[0].elements == 6

    @pytest.mark.parametrize("name", ["rng_state", "dataloader", "lr_scheduler"])
    def test_the_state_of_a_trainer_beside_the_weights_is_none_of_them(self, tmp_path: Path, name: str) -> None:
        folder = save_dcp(tmp_path / "save", {"w.weight": torch.ones(2, 3), name: (torch.ones(2),)})
        assert ckpt_cli.merge(folder, tmp_path / "out").outputs[0].elements == 6

    def test_an_object_beside_flat_weights_that_holds_tensors_is_told(self, tmp_path: Path) -> None:
        folder = save_dcp(tmp_path / "save", {"w.weight": torch.ones(2, 3), "sampler": (torch.ones(2),)})
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert "object-with-tensors" in [note.code for note in result.checkpoint.notes]

    def test_an_ema_of_another_folder_keeps_its_name(self, tmp_path: Path) -> None:
        step = save_dcp(tmp_path / "step_1", {"ema": {"w": torch.ones(2, 3)}, "other": {"w": torch.ones(5)}})
        save_dcp(step / "ema_sharded", {"model": {"w": torch.ones(5)}})
        assert ckpt_cli.merge(step, tmp_path / "out", type="ema").outputs[0].elements == 5

    def test_an_ema_alone_is_no_model(self, tmp_path: Path) -> None:
        folder = save_dcp(tmp_path / "save", {"ema": {"w": torch.ones(2)}, "optimizer": {"w": torch.ones(3)}})
        assert ckpt_cli.merge(folder, tmp_path / "out").outputs[0].component == "ema"
        with pytest.raises(NotFound):
            ckpt_cli.merge(folder, tmp_path / "model", type="model")

    def test_several_state_dicts_without_a_model_are_told(self, tmp_path: Path) -> None:
        folder = save_dcp(tmp_path / "save", {"encoder": {"w": torch.ones(2, 3)}, "decoder": {"w": torch.ones(4)}})
        result = ckpt_cli.merge(folder, tmp_path / "one")
        assert result.outputs[0].component == "encoder"
        assert "other-groups" in [note.code for note in result.checkpoint.notes]
        both = ckpt_cli.merge(folder, tmp_path / "both", type="all")
        assert [output.component for output in both.outputs] == ["encoder", "decoder"]
        assert ckpt_cli.merge(folder, tmp_path / "named", type="encoder").outputs[0].elements == 6

    def test_entries_beside_the_top_level_are_told(self, tmp_path: Path) -> None:
        folder = save_dcp(tmp_path / "save", {"top": torch.ones(2), "layers": {"w": torch.ones(4)}})
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert "other-groups" in [note.code for note in result.checkpoint.notes]
