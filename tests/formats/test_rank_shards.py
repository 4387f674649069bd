"""One file of torch.save per rank: the families of names, and files that are missing, mixed, renamed, copied or ambiguous."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import struct
import zipfile
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed.tensor

import ckpt_cli
from ckpt_cli.errors import CkptError, IncompleteError, Inconsistent, MissingShard, MixedWorldSizes, Undecidable
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.rank_files.reader import RankShards
from ckpt_cli.names import ShardOrder
from ckpt_cli.results.written import MergeResult
from tests import tiny
from tests.conftest import Copy
from tests.formats.conformance import Example, FormatConformance
from tests.tensors import Tensors, differences, load
from tests.test_torch_versions import every_save


class TestVerlWithFsdp2(FormatConformance):
    reader = RankShards()

    def example(self, data: Path) -> Example:
        return Example(data / "torch-2.13.0" / "fsdp2", data / "torch-2.13.0" / "fsdp2" / "expected.safetensors")


class TestVerlWithFsdp2AndTensorParallelism(FormatConformance):
    reader = RankShards()

    def example(self, data: Path) -> Example:
        return Example(data / "torch-2.9.1" / "fsdp2_tp", data / "torch-2.9.1" / "fsdp2_tp" / "expected.safetensors")


class TestVerlWithShardedTensors(FormatConformance):
    reader = RankShards()

    def example(self, data: Path) -> Example:
        return Example(
            data / "torch-2.4.1" / "fsdp1_sharded_tensor", data / "torch-2.4.1" / "fsdp1_sharded_tensor" / "expected.safetensors"
        )


class TestOneGpu(FormatConformance):
    reader = RankShards()

    def example(self, data: Path) -> Example:
        layout = data / "layouts" / "plain-files"
        return Example(layout / "one_gpu" / "global_step_3" / "actor", layout / "expected-one_gpu.safetensors")

    def test_a_missing_file_is_refused_by_name(self, folder: Path) -> None:
        (file,) = self.files_of(folder)
        file.unlink()
        assert self.reader.recognise(folder, Folders()) == []


class TestAccelerate(FormatConformance):
    reader = RankShards()

    def example(self, data: Path) -> Example:
        return Example(data / "layouts" / "accelerate" / "rank_files", data / "layouts" / "accelerate" / "expected-rank_files.safetensors")


class TestBagelFork(FormatConformance):
    reader = RankShards()

    def example(self, data: Path) -> Example:
        layout = data / "layouts" / "bagel-runs"
        return Example(layout / "fork_ranks" / "0000006", layout / "expected-fork_ranks-model.safetensors")


class TestBagelForkEma(FormatConformance):
    reader = RankShards()
    component = "ema"

    def example(self, data: Path) -> Example:
        layout = data / "layouts" / "bagel-runs"
        return Example(layout / "fork_ranks" / "0000006", layout / "expected-fork_ranks-ema.safetensors")


def rank_file(folder: Path, rank: int, ranks: int = 4) -> Path:
    return folder / f"model_world_size_{ranks}_rank_{rank}.pt"


def swap(folder: Path, first: int, second: int) -> None:
    aside = folder / "aside"
    rank_file(folder, first).rename(aside)
    rank_file(folder, second).rename(rank_file(folder, first))
    aside.rename(rank_file(folder, second))


def warnings_of(result: MergeResult) -> dict[str, str]:
    """What was said about the shards: that a config or a tokenizer is lacking is another matter."""
    notes = (*result.checkpoint.notes, *(note for output in result.outputs for note in output.notes))
    return {note.code: note.text for note in notes if note.level == "warning" and note.code != "lacks-asset"}


class TestMissingRanks:
    @pytest.mark.parametrize("mode", ["fsdp1_hsdp", "fsdp2_hsdp"])
    @pytest.mark.parametrize("lost", [(2, 3), (0, 1), (0, 3), (1, 2)])
    def test_a_row_of_replicas_can_be_spared_with_a_warning(self, copy: Copy, tmp_path: Path, mode: str, lost: tuple[int, int]) -> None:
        folder = copy("torch-2.13.0", mode)
        for rank in lost:
            rank_file(folder, rank).unlink()
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(folder / "expected.safetensors")) == []
        assert f"ranks {lost[0]}, {lost[1]} " in warnings_of(result)["replicas-only"]

    @pytest.mark.parametrize("mode", ["fsdp1_hsdp", "fsdp2_hsdp"])
    @pytest.mark.parametrize("lost", [(0, 2), (1, 3)])
    def test_all_replicas_of_a_part_cannot(self, copy: Copy, tmp_path: Path, mode: str, lost: tuple[int, int]) -> None:
        folder = copy("torch-2.13.0", mode)
        for rank in lost:
            rank_file(folder, rank).unlink()
        with pytest.raises(MissingShard) as caught:
            ckpt_cli.merge(folder, tmp_path / "out")
        assert caught.value.expected == str(rank_file(folder, lost[0]))

    def test_a_complete_checkpoint_warns_of_nothing(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("torch-2.13.0", "fsdp2_hsdp")
        (folder / "expected.safetensors").unlink()
        assert warnings_of(ckpt_cli.merge(folder, tmp_path / "out")) == {}

    @pytest.mark.parametrize("lost", [0, 3])
    def test_a_row_can_be_spared_where_names_do_not_tell_the_world_size(self, copy: Copy, layouts: Path, tmp_path: Path, lost: int) -> None:
        folder = copy("layouts", "bagel-hybrid", "run", "0000006")
        (folder / f"model_rank{lost:05d}.pt").unlink()
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(layouts / "bagel-hybrid" / "expected.safetensors")) == []
        assert f"rank {lost} " in warnings_of(result)["replicas-only"]


class TestMixedFiles:
    @pytest.mark.parametrize("others", [1, 2, 3, 8])
    def test_files_of_two_world_sizes_are_refused(self, copy: Copy, others: int) -> None:
        folder = copy("torch-2.13.0", "fsdp2")
        for rank in range(others):
            shutil.copyfile(rank_file(folder, rank % 4), rank_file(folder, rank, others))
        with pytest.raises(MixedWorldSizes) as caught:
            ckpt_cli.inspect(folder)
        counted = f"{others} ({others} file{'s' if others > 1 else ''})"
        assert f"4 (4 files) and {counted}" in caught.value.message or f"{counted} and 4 (4 files)" in caught.value.message
        assert caught.value.path == str(folder)

    def test_files_that_claim_a_smaller_world_than_their_mesh_are_refused(self, copy: Copy) -> None:
        folder = copy("torch-2.13.0", "fsdp2")
        for rank in (0, 1):
            rank_file(folder, rank).rename(rank_file(folder, rank, 2))
        for rank in (2, 3):
            rank_file(folder, rank).unlink()
        with pytest.raises(MixedWorldSizes, match="written by 4 ranks, not 2"):
            ckpt_cli.inspect(folder)

    def test_two_files_of_one_rank_are_refused(self, copy: Copy) -> None:
        folder = copy("torch-2.13.0", "fsdp2")
        shutil.copyfile(rank_file(folder, 1), folder / "model_world_size_4_rank_01.pt")
        with pytest.raises(IncompleteError, match=r"rank_01\.pt"):
            ckpt_cli.inspect(folder)

    def test_a_file_of_another_model_is_refused(self, copy: Copy, data: Path) -> None:
        folder = copy("torch-2.13.0", "fsdp2")
        shutil.copyfile(rank_file(data / "torch-2.13.0" / "fsdp2_bf16", 2), rank_file(folder, 2))
        with pytest.raises(Inconsistent, match="dtype"):
            ckpt_cli.inspect(folder)


class TestRenamedAndCopiedFiles:
    @every_save
    @pytest.mark.parametrize(("first", "second"), [(1, 2), (0, 3)])
    def test_two_swapped_files_are_found(self, copy: Copy, version: str, mode: str, first: int, second: int) -> None:
        folder = copy(f"torch-{version}", mode)
        swap(folder, first, second)
        with pytest.raises(Inconsistent):
            ckpt_cli.inspect(folder)

    @every_save
    @pytest.mark.parametrize(("kept", "lost"), [(1, 2), (3, 0)])
    def test_a_file_copied_over_another_is_found(self, copy: Copy, version: str, mode: str, kept: int, lost: int) -> None:
        folder = copy(f"torch-{version}", mode)
        shutil.copyfile(rank_file(folder, kept), rank_file(folder, lost))
        with pytest.raises(Inconsistent):
            ckpt_cli.inspect(folder)

    @pytest.mark.parametrize("layout", ["fake-ranks/line", "fake-ranks/cube"])
    def test_a_copy_is_found_where_no_file_knows_its_rank(self, copy: Copy, layout: str) -> None:
        # torch's fake process group, which plays all ranks in turn, records the coordinate of rank 0 in all files.
        folder = copy("layouts", *layout.split("/"))
        shutil.copyfile(rank_file(folder, 1, 12), rank_file(folder, 10, 12))
        with pytest.raises(Inconsistent):
            ckpt_cli.inspect(folder)

    @pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
    def test_swapped_files_are_found_by_their_rank_alone(
        self, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, second: int
    ) -> None:
        """Sizes that divide evenly and replicas that are equal leave nothing but the recorded coordinate to tell the files apart."""
        caplog.set_level(logging.ERROR, logger="torch.distributed.device_mesh")  # it warns that there is no process group
        source = data / "torch-2.13.0" / "fsdp2_tp_even"
        folder = tmp_path / "even"
        folder.mkdir()
        for rank in range(4):
            state = torch.load(rank_file(source, rank), weights_only=False)
            kept = {name: t for name, t in state.items() if name.split(".")[-2] in ("q_proj", "k_proj", "down_proj", "norm")}
            kept["model.norm.weight"].to_local().fill_(1)
            torch.save(kept, rank_file(folder, rank))
        expected = load(source / "expected.safetensors")
        ckpt_cli.merge(folder, tmp_path / "right")
        merged = load(tmp_path / "right")
        assert differences({**merged, "model.norm.weight": expected["model.norm.weight"]}, {name: expected[name] for name in merged}) == []
        swap(folder, first, second)
        with pytest.raises(Inconsistent):
            ckpt_cli.inspect(folder)


def rename_mesh_dimension(file: Path, old: bytes, new: bytes) -> None:
    """Patch data.pkl in place and its CRC wherever the archive repeats it; offsets stay."""
    assert len(old) == len(new)
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        content, crc = archive.read(name), archive.getinfo(name).CRC
    text = [b"X" + struct.pack("<I", len(word)) + word for word in (old, new)]
    patched = content.replace(*text)
    assert patched != content
    raw = file.read_bytes().replace(content, patched)
    file.write_bytes(raw.replace(struct.pack("<I", crc), struct.pack("<I", zipfile.crc32(patched))))
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None


class TestOldTensorParallelism:
    """torch <= 2.4 cut a dimension by tp first and by fsdp then, and recorded only that both cut it."""

    @pytest.fixture
    def unnamed(self, copy: Copy) -> Path:
        """A checkpoint whose mesh has no dimension called tp."""
        folder = copy("torch-2.3.1", "fsdp2_tp_even")
        for rank in range(4):
            rename_mesh_dimension(rank_file(folder, rank), b"tp", b"xx")
        return folder

    @staticmethod
    def left_to_right(data: Path) -> Tensors:
        """The weights with their rows as they would be, had fsdp cut first: the two parts in the middle change places."""
        folder = data / "torch-2.3.1" / "fsdp2_tp_even"
        component = ckpt_cli.inspect(folder).checkpoint.components[0]
        assert component.tensors is not None
        twice_cut = {tensor.name for tensor in component.tensors if tensor.layout == "Shard(0) x2, Shard(0) x2"}
        assert "model.layers.0.self_attn.q_proj.weight" in twice_cut
        expected = load(folder / "expected.safetensors")
        return {
            name: torch.cat([tensor.chunk(4)[i] for i in (0, 2, 1, 3)]) if name in twice_cut else tensor
            for name, tensor in expected.items()
        }

    def test_a_dimension_named_tp_was_cut_first(self, data: Path, tmp_path: Path) -> None:
        folder = data / "torch-2.3.1" / "fsdp2_tp_even"
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(folder / "expected.safetensors")) == []
        assert "tp-first" in {note.code for note in result.checkpoint.notes}

    def test_without_that_name_nobody_can_know(self, unnamed: Path) -> None:
        with pytest.raises(Undecidable) as caught:
            ckpt_cli.inspect(unnamed)
        assert caught.value.exit_code == 4
        assert "fsdp, xx" in caught.value.message
        assert "--shard-order" in (caught.value.hint or "")

    def test_shard_order_decides(self, data: Path, unnamed: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(unnamed, tmp_path / "out", shard_order="left-to-right")
        assert differences(load(tmp_path / "out"), self.left_to_right(data)) == []

    def test_shard_order_overrides_the_name(self, data: Path, tmp_path: Path) -> None:
        folder = data / "torch-2.3.1" / "fsdp2_tp_even"
        result = ckpt_cli.merge(folder, tmp_path / "left", shard_order="left-to-right")
        told = {note.code: (note.level, note.text) for note in result.checkpoint.notes}
        assert told["order-contradicted"][0] == "warning"
        assert "cuts by fsdp first, but the files name a mesh dimension tp (of fsdp, tp)" in told["order-contradicted"][1]
        result = ckpt_cli.merge(folder, tmp_path / "tp", shard_order="tp-first")
        assert "order-contradicted" not in {note.code for note in result.checkpoint.notes}
        assert differences(load(tmp_path / "left"), self.left_to_right(data)) == []
        assert differences(load(tmp_path / "tp"), load(folder / "expected.safetensors")) == []

    def test_shard_order_of_a_mesh_without_a_name_is_believed(self, unnamed: Path) -> None:
        codes = {note.code for note in ckpt_cli.inspect(unnamed, shard_order="left-to-right").checkpoint.notes}
        assert not {"order-contradicted", "shard-order"} & codes

    @pytest.mark.parametrize("order", ["left-to-right", "tp-first"])
    def test_shard_order_changes_nothing_where_the_order_is_recorded(self, data: Path, tmp_path: Path, order: ShardOrder) -> None:
        folder = data / "torch-2.13.0" / "fsdp2_tp"
        result = ckpt_cli.merge(folder, tmp_path / "out", shard_order=order)
        assert differences(load(tmp_path / "out"), load(folder / "expected.safetensors")) == []
        told = next(note for note in result.checkpoint.notes if note.code == "shard-order")
        assert f"--shard-order {order} has no effect on tensors whose files record the order" in told.text
        assert told.level == "warning"

    @pytest.mark.parametrize("kind", ["torch-2.13.0/fsdp2", "dcp/2.13.0/fsdp2", "torch-2.3.1/fsdp2", "safetensors"])
    def test_shard_order_where_no_tensor_was_cut_twice_is_a_warning(self, data: Path, tmp_path: Path, kind: str) -> None:
        """Of every format: files without placements have nothing to be put in order."""
        folder = data / kind
        if kind == "safetensors":
            folder = tiny.folder(tmp_path / "hub", tiny.weights(), tiny.config())
        told = [note for note in ckpt_cli.inspect(folder, shard_order="left-to-right").checkpoint.notes if note.code == "shard-order"]
        assert [note.level for note in told] == ["warning"]
        assert "has no effect here: no tensor was cut by two mesh dimensions of torch <= 2.4" in told[0].text
        assert "shard-order" not in {note.code for note in ckpt_cli.inspect(folder).checkpoint.notes}

    def test_shard_order_that_local_shapes_contradict_is_refused_with_what_fits(self, data: Path) -> None:
        with pytest.raises(Inconsistent) as caught:
            ckpt_cli.inspect(data / "torch-2.3.1" / "fsdp2_tp", shard_order="left-to-right")
        assert (caught.value.hint or "").startswith("leave out --shard-order left-to-right")


class TestExpertsCutByHand:
    """verl with VeOmni: files of different expert ranks hold different tensors under one name."""

    @pytest.fixture
    def actor(self, copy: Copy) -> Path:
        return copy("layouts", "veomni-experts", "run") / "global_step_4" / "actor"

    @pytest.fixture
    def expected(self, layouts: Path) -> Tensors:
        return load(layouts / "veomni-experts" / "expected.safetensors")

    @staticmethod
    def set_experts(config: Path, count: int) -> None:
        content = json.loads(config.read_text())
        assert content["num_local_experts"] != count
        config.write_text(json.dumps({**content, "num_local_experts": count}))

    def test_the_config_tells_how_many_there_are(self, actor: Path, expected: Tensors, tmp_path: Path) -> None:
        ckpt_cli.merge(actor, tmp_path / "out", names="native")
        assert differences(load(tmp_path / "out"), expected) == []

    def test_without_a_config_nobody_can_know(self, actor: Path) -> None:
        (actor / "huggingface" / "config.json").unlink()
        with pytest.raises(Undecidable) as caught:
            ckpt_cli.inspect(actor)
        assert "experts" in (caught.value.tensor or "")
        assert "--base" in (caught.value.hint or "")

    def test_the_config_of_a_base_does_as_well(self, actor: Path, expected: Tensors, tmp_path: Path) -> None:
        base = tmp_path / "base"
        base.mkdir()
        (actor / "huggingface" / "config.json").rename(base / "config.json")
        ckpt_cli.merge(actor, tmp_path / "out", base=base, names="native")
        assert differences(load(tmp_path / "out"), expected) == []

    def test_a_config_of_another_model_is_refused(self, actor: Path) -> None:
        self.set_experts(actor / "huggingface" / "config.json", 6)
        with pytest.raises(Inconsistent, match="6 experts"):
            ckpt_cli.inspect(actor)

    @pytest.mark.parametrize("lost", list(itertools.combinations(range(4), 2)))
    def test_experts_of_missing_ranks_are_missed(self, actor: Path, lost: tuple[int, int]) -> None:
        for rank in lost:
            rank_file(actor, rank).unlink()
        with pytest.raises(MissingShard):
            ckpt_cli.inspect(actor)


class TestPlainTensors:
    """A plain tensor in the files of several ranks is a replica, which is proved, not believed."""

    @staticmethod
    def save(folder: Path, *states: Tensors, config: dict[str, object] | None = None) -> Path:
        folder.mkdir()
        for rank, state in enumerate(states):
            torch.save(state, rank_file(folder, rank, len(states)))
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    def test_equal_replicas_are_written_once(self, tmp_path: Path) -> None:
        state = {"bias": torch.arange(5.0), "count": torch.tensor(7), "gaps": torch.tensor([float("nan"), -0.0])}
        folder = self.save(tmp_path / "run", state, {name: tensor.clone() for name, tensor in state.items()})
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert differences(load(tmp_path / "out"), state) == []
        assert warnings_of(result) == {}

    def test_replicas_may_be_stored_with_other_strides(self, tmp_path: Path) -> None:
        weight = torch.arange(12.0).reshape(3, 4)
        folder = self.save(tmp_path / "run", {"weight": weight}, {"weight": weight.T.contiguous().T})
        ckpt_cli.merge(folder, tmp_path / "out")
        assert differences(load(tmp_path / "out"), {"weight": weight}) == []

    def test_unequal_replicas_are_refused_by_tensor_and_ranks(self, tmp_path: Path) -> None:
        bias = torch.arange(5.0)
        folder = self.save(tmp_path / "run", {"bias": bias}, {"bias": bias}, {"bias": bias + 1})
        with pytest.raises(Inconsistent, match="ranks 0 and 2") as caught:
            ckpt_cli.merge(folder, tmp_path / "out")
        assert caught.value.tensor == "bias"
        assert "--allow-unequal-replicas" in (caught.value.hint or "")
        assert not (tmp_path / "out").exists()

    def test_unequal_replicas_can_be_allowed_and_are_warned_of(self, tmp_path: Path) -> None:
        bias = torch.arange(5.0)
        folder = self.save(tmp_path / "run", {"bias": bias}, {"bias": bias - 1})
        result = ckpt_cli.merge(folder, tmp_path / "out", allow_unequal_replicas=True)
        assert differences(load(tmp_path / "out"), {"bias": bias}) == []
        assert (
            warnings_of(result)["replicas-differ"]
            == "bias: ranks 0 and 1 hold different values of what should be replicas; those of rank 0 were used"
        )

    def test_replicas_of_other_shapes_are_refused_even_when_unequal_ones_are_allowed(self, tmp_path: Path) -> None:
        folder = self.save(tmp_path / "run", {"bias": torch.zeros(5)}, {"bias": torch.zeros(6)})
        with pytest.raises(Inconsistent, match="shape"):
            ckpt_cli.merge(folder, tmp_path / "out", allow_unequal_replicas=True)

    def test_a_tensor_that_one_rank_lacks_is_refused(self, tmp_path: Path) -> None:
        folder = self.save(tmp_path / "run", {"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.zeros(2)})
        with pytest.raises(Inconsistent) as caught:
            ckpt_cli.inspect(folder)
        assert caught.value.tensor == "b"
        assert caught.value.path == str(rank_file(folder, 1, 2))


class TestTiedHeads:
    TIED: ClassVar[dict[str, object]] = {"tie_word_embeddings": True, "architectures": ["Qwen3ForCausalLM"]}

    def test_a_tied_head_with_the_same_values_is_left_out(self, layouts: Path, tmp_path: Path) -> None:
        result = ckpt_cli.merge(layouts / "lmms-run" / "run", tmp_path / "out")
        assert "same values" in result.outputs[0].dropped["lm_head.weight"]
        assert "lm_head.weight" not in load(tmp_path / "out")
        assert warnings_of(result).keys() == {"extra-tensors"}

    def test_the_head_beside_an_average_is_left_out_although_it_differs(self, layouts: Path, tmp_path: Path) -> None:
        """Trainers average the embedding and store the live head, so its values differ from those of the averaged embedding."""
        result = ckpt_cli.merge(layouts / "lmms-run" / "run", tmp_path / "out", type="ema")
        assert "not an average" in result.outputs[0].dropped["lm_head.weight"]
        assert "lm_head.weight" not in load(tmp_path / "out")

    def test_a_head_that_differs_is_kept_with_a_warning(self, tmp_path: Path) -> None:
        state = {"model.embed_tokens.weight": torch.zeros(4, 2), "lm_head.weight": torch.ones(4, 2)}
        folder = TestPlainTensors.save(tmp_path / "run", state, config=self.TIED)
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert differences(load(tmp_path / "out"), state) == []
        assert "lm_head.weight" in warnings_of(result)["tied-heads-differ"]

    def test_an_equal_head_is_kept_where_the_config_does_not_tie_it(self, tmp_path: Path) -> None:
        state = {"model.embed_tokens.weight": torch.zeros(4, 2), "lm_head.weight": torch.zeros(4, 2)}
        folder = TestPlainTensors.save(tmp_path / "run", state, config={**self.TIED, "tie_word_embeddings": False})
        ckpt_cli.merge(folder, tmp_path / "out")
        assert differences(load(tmp_path / "out"), state) == []


def test_ranks_are_ordered_as_numbers(layouts: Path) -> None:
    (match,) = RankShards().recognise(layouts / "fake-ranks" / "line", Folders())
    with Files() as files:
        component = RankShards().describe(match, files, ReadOptions())
    assert [file.name for file in component.files] == [f"model_world_size_12_rank_{rank}.pt" for rank in range(12)]


def test_a_gap_in_the_ranks_of_a_crowd_is_told_briefly(copy: Copy) -> None:
    folder = copy("layouts", "fake-ranks", "line")
    for rank in (3, 10):
        rank_file(folder, rank, 12).unlink()
    with pytest.raises(CkptError, match="ranks 3, 10") as caught:
        ckpt_cli.inspect(folder)
    assert caught.value.code == "missing-shard"
    assert caught.value.expected == str(rank_file(folder, 3, 12))
