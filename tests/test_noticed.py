"""What a small change of the code would break without any other test seeing it."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

import ckpt_cli
from ckpt_cli.boxes import Box, contiguous_strides
from ckpt_cli.commands.verify import verify_written
from ckpt_cli.dtypes import BY_CODE
from ckpt_cli.errors import CkptError, CorruptFile, FindingsError, Inconsistent, Undecidable
from ckpt_cli.files.descriptors import Identity
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import StoredTensor, TorchFile
from ckpt_cli.formats.rank_files.dtensor import LocalReader
from ckpt_cli.tensors.equality import TRUSTED, same_values, unequal_copies
from ckpt_cli.tensors.tensor import Piece, Tensor
from ckpt_cli.tensors.views import interleaved, selected, sliced, stacked
from tests.test_kernels import Memory
from tests.test_placements import Laid, plain_mesh, save_ranks


def _counting(folder: Path, step: int, *, flat: bool = False) -> Path:
    """A DCP folder with an optimizer of four parameters that has counted ``step``, each tensor in a file of its own."""
    target, names = folder / f"global_step_{step}", ("a", "b", "c", "d")
    states = {name: {"step": torch.tensor(float(step)), "exp_avg": torch.ones(4)} for name in names}
    flattened = {f"state.{name}.{slot}": tensor for name, slots in states.items() for slot, tensor in slots.items()}
    state = {"model": {name: torch.ones(4) for name in names}, "optimizer": flattened if flat else {"state": states}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(target, single_file_per_rank=False), no_dist=True)
    return target


def _file_of_step(folder: Path, name: str) -> str:
    """The data file that holds the counter of a parameter."""
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data
    return next(info.relative_path for index, info in stored.items() if index.fqn.endswith(f"{name}.step"))


F32 = BY_CODE["F32"]


def piece(data: bytes, crc: int | None, rank: int = 0) -> Piece:
    """One row of floats that claims a checksum."""
    count, source = len(data) // 4, Memory(data)
    source.identity = Identity(f"rank {rank}", len(data), 0, 0, rank)
    return Piece(source, 0, (1,), Box((0,), (count,)), rank=rank, crc=crc)  # type: ignore[arg-type]


class TestChecksumsOfSmallTensors:
    """A CRC-32 is no proof; where the bytes are few they are read."""

    @pytest.mark.parametrize("nbytes", [4, 4096, TRUSTED])
    def test_are_not_trusted(self, nbytes: int) -> None:
        first, second = piece(b"\0" * nbytes, 7), piece(b"\1" * nbytes, 7, rank=1)
        tensor = Tensor("w", F32, (nbytes // 4,), (first,), (second,), check_copies=True)
        assert list(unequal_copies(tensor)) == [(first, second)]
        assert not same_values(Tensor("a", F32, (nbytes // 4,), (first,)), Tensor("b", F32, (nbytes // 4,), (second,)))

    def test_of_large_ones_are(self) -> None:
        nbytes = TRUSTED + 4
        first, second = piece(b"\0" * nbytes, 7), piece(b"\1" * nbytes, 7, rank=1)
        assert list(unequal_copies(Tensor("w", F32, (nbytes // 4,), (first,), (second,)))) == []
        other = piece(b"\1" * nbytes, 8, rank=1)
        assert list(unequal_copies(Tensor("w", F32, (nbytes // 4,), (first,), (other,)))) == [(first, other)]

    def test_do_not_hide_replicas_that_differ(self, tmp_path: Path) -> None:
        """Rank 1's record was damaged after its checksum had been made."""
        run = tmp_path / "run"
        run.mkdir()
        for rank in (0, 1):
            torch.save({"norm.weight": torch.arange(4.0) + 1}, run / f"model_world_size_2_rank_{rank}.pt")
        file = run / "model_world_size_2_rank_1.pt"
        with zipfile.ZipFile(file) as archive:
            crcs = {name: archive.getinfo(name).CRC for name in archive.namelist()}
        content = file.read_bytes()
        stored = (torch.arange(4.0) + 1).numpy().tobytes()
        assert content.count(stored) == 1
        file.write_bytes(content.replace(stored, (torch.arange(4.0) + 2).numpy().tobytes()))
        with zipfile.ZipFile(file) as archive:
            assert {name: archive.getinfo(name).CRC for name in archive.namelist()} == crcs
        with pytest.raises(Inconsistent, match="different values"):
            ckpt_cli.merge(run, tmp_path / "out")


class TestChecksumsOfParts:
    """The CRC-32 of a record is that of all of its bytes in their order, and of nothing else."""

    @pytest.fixture
    def tensor(self) -> Tensor:
        data = torch.arange(24.0).numpy().tobytes()
        part = Piece(Memory(data), 0, contiguous_strides((4, 6)), Box((0, 0), (4, 6)), crc=7)  # type: ignore[arg-type]
        return Tensor("w", F32, (4, 6), (part,))

    def test_are_not_those_of_the_whole(self, tensor: Tensor) -> None:
        for view in (
            sliced(tensor, 0, 0, 3),
            sliced(tensor, 0, 1, 4),
            sliced(tensor, 1, 0, 5),
            sliced(tensor, 0, 0, 4, 2),
            selected(tensor, 0, 1),
        ):
            assert [part.crc for part in view.pieces] == [None]
        assert {part.crc for part in interleaved(tensor, 0).pieces} == {None}
        assert {part.crc for part in interleaved(tensor, 1, inverse=True).pieces} == {None}

    def test_of_all_of_it_are(self, tensor: Tensor) -> None:
        assert sliced(tensor, 0, 0, 4).pieces[0].crc == 7
        assert [part.crc for part in stacked([tensor, tensor], 0).pieces] == [7, 7]

    def test_of_a_record_that_several_tensors_share(self, tmp_path: Path) -> None:
        whole = torch.arange(12.0)
        torch.save({"whole": whole, "half": whole[:6], "rows": whole.reshape(3, 4)[1:]}, tmp_path / "model.pt")
        with Files() as files:
            file = TorchFile(files.source(tmp_path / "model.pt"))
            reader = LocalReader(file, 0)
            held: dict[str, Any] = {name: reader.read(node) for name, node in file.root.items()}
        assert all(isinstance(local, StoredTensor) for local in held.values())
        assert held["whole"].record_crc is not None
        assert (held["half"].record_crc, held["rows"].record_crc) == (None, None)

    def test_are_what_the_manifest_says(self, tmp_path: Path) -> None:
        """Fused experts of a file with checksums are written one by one: each has its own."""
        run = tmp_path / "run"
        run.mkdir()
        experts = {"gate_up_proj": torch.randn(4, 6, 3), "down_proj": torch.randn(4, 3, 3)}
        torch.save({f"model.layers.0.mlp.experts.{name}": value for name, value in experts.items()}, run / "pytorch_model.bin")
        config: dict[str, object] = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
        config |= {"hidden_size": 3, "moe_intermediate_size": 3, "num_hidden_layers": 1}
        (run / "config.json").write_text(json.dumps(config))
        ckpt_cli.merge(run, tmp_path / "out", checksum=True, allow_missing="*")
        listed = json.loads((tmp_path / "out" / "ckpt-manifest.json").read_text())["checksums"]["files"]["model.safetensors"]
        assert len(listed) == len(set(listed.values())) == 12
        result = ckpt_cli.verify(tmp_path / "out", full=True, against=run)
        assert result.against[0].identical
        assert "wrong-checksum" not in {item.code for item in result.findings}


class TestDoubtfulFlatParameters:
    """FSDP1 pads flat parameters: what is smaller than the padding may be in one or not, and its size does not tell."""

    def write(self, run: Path, sizes: dict[str, int], units: list[list[str]]) -> Path:
        """Two ranks with whole tensors, and one flat state per unit."""
        run.mkdir()
        for rank in (0, 1):
            torch.save({name: torch.full((size,), 2.0) for name, size in sizes.items()}, run / f"model_world_size_2_rank_{rank}.pt")
            parts = [-(-sum(sizes[name] for name in unit) // 2) for unit in units]
            state = {
                number: {"exp_avg": torch.full((part,), float(number)), "step": torch.tensor(1.0)} for number, part in enumerate(parts)
            }
            optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(range(len(units)))}]}
            torch.save(optimizer, run / f"optim_world_size_2_rank_{rank}.pt")
        return run

    def test_are_refused_by_name(self, tmp_path: Path) -> None:
        """Seven elements or eight: two ranks have four each, whether the running mean is a parameter or a buffer."""
        run = self.write(tmp_path / "run", {"a.weight": 7, "a.mean": 1}, [["a.weight", "a.mean"]])
        with pytest.raises(Undecidable) as caught:
            ckpt_cli.extract_state(run, tmp_path / "out", optimizer=True)
        assert caught.value.tensor == "a.mean"
        assert "padded" in caught.value.message
        assert not (tmp_path / "out").exists()

    def test_are_not_doubtful_where_sizes_tell(self, tmp_path: Path) -> None:
        run = self.write(tmp_path / "run", {"a.weight": 7, "a.bias": 3}, [["a.weight", "a.bias"]])
        result = ckpt_cli.extract_state(run, tmp_path / "out", optimizer=True)
        assert result.optimizer is not None
        assert result.optimizer.layout == "FSDP1 flat parameters"

    def test_that_are_wrapped_in_two_ways_are_refused(self, tmp_path: Path) -> None:
        """Two modules of the same size beside each other: either may be the unit of its own."""
        sizes = {"a.weight": 6, "b.weight": 6}
        run = self.write(tmp_path / "run", sizes, [["a.weight"], ["b.weight"]])
        with pytest.raises(Undecidable):
            ckpt_cli.extract_state(run, tmp_path / "out", optimizer=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
class TestDcpMetadataOfAnotherSave:
    """Nothing in an item says its step; what the metadata themselves tell is compared."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        for step in (100, 200):
            folder = tmp_path / "run" / f"global_step_{step}" / "model_sharded"
            folder.mkdir(parents=True)
            dcp.save({"model": {"a": torch.full((8, 4), float(step)), "b": torch.ones(3)}}, checkpoint_id=folder)
        return tmp_path / "run"

    @staticmethod
    def warnings(path: Path, out: Path) -> dict[str, str]:
        notes = ckpt_cli.merge(path, out).checkpoint.notes
        return {note.code: note.text for note in notes if note.level == "warning"}

    def test_that_names_another_step_is_told(self, run: Path, tmp_path: Path) -> None:
        shutil.copy(run / "global_step_100" / "model_sharded" / ".metadata", run / "global_step_200" / "model_sharded" / ".metadata")
        told = self.warnings(run, tmp_path / "out")
        assert "step 200" in told["step-differs"]
        assert "global_step_100" in told["step-differs"]
        assert "step-differs" not in self.warnings(run / "global_step_100", tmp_path / "older")
        assert "step-differs" in {note.code for note in ckpt_cli.verify(run / "global_step_200").notes}
        torch.save({"last_epoch": 200}, run / "global_step_200" / "scheduler.pt")
        assert "step-differs" in {note.code for note in ckpt_cli.extract_state(run, tmp_path / "state").notes}

    @pytest.mark.parametrize("to", ["global_step_200", "moved", "best"])
    def test_a_save_that_was_moved_is_no_reason_to_warn(self, run: Path, tmp_path: Path, to: str) -> None:
        place = tmp_path / "elsewhere" / to
        shutil.copytree(run / "global_step_200", place)
        assert self.warnings(place, tmp_path / "out").keys().isdisjoint({"step-differs", "written-apart"})

    def test_that_was_written_hours_apart_is_told(self, run: Path, tmp_path: Path) -> None:
        metadata = run / "global_step_200" / "model_sharded" / ".metadata"
        os.utime(metadata, (metadata.stat().st_mtime - 7200,) * 2)
        assert ".metadata is 2 hours older" in self.warnings(run, tmp_path / "out")["written-apart"]

    @pytest.mark.parametrize(("seconds", "told"), [(3700, "1 hour older"), (3 * 86400, "3 days older"), (3000, None)])
    def test_a_length_of_time_is_said_as_one(self, run: Path, tmp_path: Path, seconds: int, told: str | None) -> None:
        metadata = run / "global_step_200" / "model_sharded" / ".metadata"
        os.utime(metadata, (metadata.stat().st_mtime - seconds,) * 2)
        said = self.warnings(run, tmp_path / "out").get("written-apart", "")
        assert (told or "") in said
        assert bool(said) == (told is not None)

    @pytest.mark.parametrize("flat", [True, False])
    def test_a_file_of_another_step_is_told_by_what_the_optimizer_counted(self, flat: bool, tmp_path: Path) -> None:
        """As if two ranks had saved: rank 1's items are in a file of their own. Times are minutes apart."""

        one, two = _counting(tmp_path, 100, flat=flat), _counting(tmp_path, 110, flat=flat)
        assert "step-differs" not in self.warnings(one, tmp_path / "whole")
        of_b = _file_of_step(one, "b")
        shutil.copy(two / _file_of_step(two, "b"), one / of_b)
        told = self.warnings(one, tmp_path / "out")["step-differs"]
        assert "the optimizer has counted 100 steps in" in told
        assert f"and 110 in {of_b}" in told
        state = ckpt_cli.extract_state(one, tmp_path / "state", optimizer=True)
        assert told in {note.text for note in state.notes}

    def test_also_in_a_folder_of_its_own_beside_files_of_ranks(self, tmp_path: Path) -> None:
        """What is said of weights says nothing of an optimizer that lies elsewhere."""
        home = tmp_path / "checkpoint_100"
        home.mkdir()
        torch.save({name: torch.ones(4) for name in "abcd"}, home / "pytorch_model_fsdp.bin")
        torch.save({"last_epoch": 100}, home / "scheduler.bin")
        one, two = _counting(tmp_path / "saved", 100), _counting(tmp_path / "saved", 110)
        shutil.copytree(one, home / "optimizer_0")

        def told() -> set[str]:
            return {note.code for note in ckpt_cli.extract_state(home, optimizer=True, dry_run=True).notes}

        assert told().isdisjoint({"step-differs", "written-apart"})
        metadata = home / "optimizer_0" / ".metadata"
        os.utime(metadata, (metadata.stat().st_mtime - 7200,) * 2)
        assert "written-apart" in told()
        shutil.copy(two / _file_of_step(two, "b"), home / "optimizer_0" / _file_of_step(one, "b"))
        assert "step-differs" in told()

    def test_the_file_that_is_named_holds_the_count_that_is_said_of_it(self, tmp_path: Path) -> None:
        """Two files are each of another save: only one that holds the usual count agrees with the rest."""
        one = _counting(tmp_path, 1)
        held = {_file_of_step(one, name): name for name in "abcd"}
        counts = dict(zip(sorted(held), (300, 200, 1, 1), strict=True))
        for file, step in counts.items():
            if step > 1:
                other = tmp_path / f"global_step_{step}"
                other = other if other.exists() else _counting(tmp_path, step)
                shutil.copy(other / _file_of_step(other, held[file]), one / file)
        told = self.warnings(one, tmp_path / "out")["step-differs"]
        found = re.search(r"has counted 1 step in (\S+) and (\d+) in (\S+): ", told)
        assert found is not None, told
        assert (counts[found[1]], counts[found[3]]) == (1, int(found[2]))

    @pytest.mark.parametrize("lacking", ["a", "abcd"])
    def test_counters_that_lie_nowhere_are_passed_over(self, lacking: str, tmp_path: Path) -> None:
        one = _counting(tmp_path, 1)
        metadata = dcp.FileSystemReader(one).read_metadata()
        for name, entry in metadata.state_dict_metadata.items():
            if name in {f"optimizer.state.{each}.step" for each in lacking}:
                entry.chunks = []
        (one / ".metadata").write_bytes(pickle.dumps(metadata))
        assert "step-differs" not in self.warnings(one, tmp_path / "out")
        with pytest.raises(CkptError) as refused:
            ckpt_cli.extract_state(one, tmp_path / "state", optimizer=True)
        assert refused.value.code != "internal-error"

    @pytest.mark.parametrize("shape", [(4, 8), (8, 5)])
    def test_items_that_are_not_what_it_says_are_refused(self, run: Path, tmp_path: Path, shape: tuple[int, int]) -> None:
        folder = run / "global_step_100" / "model_sharded"
        dcp.save({"model": {"a": torch.zeros(shape), "b": torch.ones(3)}}, checkpoint_id=folder)
        shutil.copy(folder / ".metadata", run / "global_step_200" / "model_sharded" / ".metadata")
        with pytest.raises(CkptError):
            ckpt_cli.merge(run / "global_step_200", tmp_path / "out")


def assert_not_published(run: Path, out: Path, tensor: str, file: str, **how: Any) -> None:
    """A merge with ``verify`` of a damaged source leaves nothing, names what is damaged, and an output that was there stays."""
    sound = {path.name: path.read_bytes() for path in out.iterdir()} if out.exists() else None
    with pytest.raises(CorruptFile) as caught:
        ckpt_cli.merge(run, out, verify=True, overwrite=sound is not None, **how)
    assert caught.value.exit_code == 3
    assert any(tensor in line and file in line for line in (*caught.value.details, f"{caught.value.tensor} {caught.value.path}"))
    assert sound == ({path.name: path.read_bytes() for path in out.iterdir()} if out.exists() else None)
    assert not [path for path in out.parent.iterdir() if path.name.startswith(".")]


class TestASourceThatIsDamaged:
    """is copied byte for byte, so that comparing the output with it shows nothing: its own checksums do."""

    def damaged(self, run: Path, name: str, tensors: dict[str, torch.Tensor], file: Path) -> None:
        """One byte of a tensor in a file is another one than was saved."""
        stored = tensors[name].numpy().tobytes()
        content = file.read_bytes()
        assert content.count(stored) == 1
        at = content.index(stored) + len(stored) // 2
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])

    def saved(self, run: Path) -> dict[str, torch.Tensor]:
        run.mkdir()
        tensors = {"a.weight": torch.randn(6, 4), "b.weight": torch.randn(4, 6), "c.weight": torch.randn(8)}
        torch.save(tensors, run / "pytorch_model.bin")
        return tensors

    @pytest.mark.parametrize("how", [{}, {"part": "0/1"}, {"jobs": 1}, {"verify": True}, {"dtype": "bf16", "checksum": True}], ids=str)
    def test_is_refused(self, tmp_path: Path, how: dict[str, Any]) -> None:
        run, sound = tmp_path / "run", tmp_path / "sound"
        tensors = self.saved(run)
        shutil.copytree(run, sound)
        self.damaged(run, "a.weight", tensors, run / "pytorch_model.bin")
        with pytest.raises(CorruptFile, match="not those that were saved") as caught:
            ckpt_cli.merge(run, tmp_path / "out", **how)
        assert (caught.value.path, caught.value.tensor, caught.value.exit_code) == (str(run / "pytorch_model.bin"), "a.weight", 3)
        assert not (tmp_path / "out").exists()
        with pytest.raises(CorruptFile, match="not those that were saved"):
            ckpt_cli.average([sound, run], tmp_path / "mean")

    @pytest.mark.parametrize("cut", [0, 1])
    @pytest.mark.parametrize("storage", ["contiguous", "transposed"])
    def test_is_refused_however_it_is_cut(self, tmp_path: Path, cut: int, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each tile has some rows of both ranks' pieces, and each part some tiles: the part that begins a piece compares all of it."""
        monkeypatch.setattr("ckpt_cli.output.plan.TILE", 128)
        run, whole = tmp_path / "run", torch.randn(30, 20)
        save_ranks(run, plain_mesh(2), {"a.weight": Laid(whole, (Shard(cut),), storage)})
        for number, how in enumerate(({}, {"dtype": "bf16"})):
            assert ckpt_cli.merge(run, tmp_path / f"sound{number}", verify=True, **how).exit_code == 0
        local = whole.chunk(2, cut)[1]
        stored = local.movedim(0, -1).contiguous() if storage == "transposed" else local.contiguous()
        self.damaged(run, "a.weight", {"a.weight": stored}, run / "model_world_size_2_rank_1.pt")
        for how in ({}, {"dtype": "bf16", "checksum": True}):
            with pytest.raises(CorruptFile):
                ckpt_cli.merge(run, tmp_path / "out", **how)
        refused = 0
        for part in range(4):
            try:
                ckpt_cli.merge(run, tmp_path / "out", part=f"{part}/4")
            except CorruptFile:
                refused += 1
        assert refused == 1

    def test_that_is_copied_in_the_kernel_is_found_in_the_output(self, tmp_path: Path) -> None:
        """Its bytes do not pass through memory. The manifest has the checksum of the source."""
        (run := tmp_path / "run").mkdir()
        tensors = {"a.weight": torch.randn(400, 400)}
        torch.save(tensors, run / "pytorch_model.bin")
        self.damaged(run, "a.weight", tensors, run / "pytorch_model.bin")
        ckpt_cli.merge(run, tmp_path / "out")
        assert "wrong-checksum" in {item.code for item in ckpt_cli.verify(tmp_path / "out", full=True).findings}
        for how in ({"checksum": True}, {"checksum": True, "dtype": "bf16"}):
            with pytest.raises(CorruptFile) as caught:
                ckpt_cli.merge(run, tmp_path / "other", **how)
            assert caught.value.path == str(run / "pytorch_model.bin")
        assert_not_published(run, tmp_path / "verified", "a.weight", "pytorch_model.bin")
        assert_not_published(run, tmp_path / "verified", "a.weight", "pytorch_model.bin", dtype="bf16")

    def test_does_not_replace_a_sound_output(self, tmp_path: Path) -> None:
        (run := tmp_path / "run").mkdir()
        tensors = {"a.weight": torch.randn(400, 400)}
        torch.save(tensors, run / "pytorch_model.bin")
        ckpt_cli.merge(run, tmp_path / "out", verify=True)
        self.damaged(run, "a.weight", tensors, run / "pytorch_model.bin")
        for how in ({}, {"dtype": "bf16"}):
            assert_not_published(run, tmp_path / "out", "a.weight", "pytorch_model.bin", **how)

    def test_is_withdrawn_from_the_checkpoint_itself(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        tensors = self.saved(run)
        self.damaged(run, "a.weight", tensors, run / "pytorch_model.bin")
        before = sorted(os.listdir(run))
        with pytest.raises(CorruptFile):
            ckpt_cli.merge(run, in_place=True, verify=True, dtype="bf16")
        assert sorted(os.listdir(run)) == before

    def test_says_what_a_disk_did_to_the_output(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Bytes that change after they were written: the source is right, the output has no name yet."""
        self.saved(run := tmp_path / "run")

        def changing(folder: Path, *rest: Any, **more: Any) -> Any:
            data = bytearray((folder / "model.safetensors").read_bytes())
            data[-3] ^= 64
            (folder / "model.safetensors").write_bytes(data)
            return verify_written(folder, *rest, **more)

        monkeypatch.setattr("ckpt_cli.commands.merge.verify_written", changing)
        with pytest.raises(FindingsError, match="the output has 1 error: nothing was published") as caught:
            ckpt_cli.merge(run, tmp_path / "out", verify=True)
        assert (caught.value.exit_code, caught.value.path) == (1, str(tmp_path / "out"))
        assert [line.partition(":")[0] for line in caught.value.details] == ["different-values"]
        assert os.listdir(tmp_path) == ["run"]

    def test_is_refused_where_the_kernel_cannot_copy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
        (run := tmp_path / "run").mkdir()
        tensors = {"a.weight": torch.randn(400, 400)}
        torch.save(tensors, run / "pytorch_model.bin")
        self.damaged(run, "a.weight", tensors, run / "pytorch_model.bin")
        with pytest.raises(CorruptFile):
            ckpt_cli.merge(run, tmp_path / "out")

    @pytest.mark.parametrize("how", [{}, {"dtype": "bf16"}], ids=str)
    def test_is_an_error_of_verify(self, tmp_path: Path, how: dict[str, Any]) -> None:
        """The output was made before."""
        run = tmp_path / "run"
        tensors = self.saved(run)
        ckpt_cli.merge(run, tmp_path / "out", **how)
        self.damaged(run, "a.weight", tensors, run / "pytorch_model.bin")
        errors = [item for item in ckpt_cli.verify(tmp_path / "out", against=run).findings if item.file == "pytorch_model.bin"]
        assert "wrong-checksum" in {item.code for item in errors if item.message.startswith("damaged in the source: CRC-32 is ")}

    @pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: torch.as_strided(t, (6, 4), (1, 4)), lambda t: t[2:, 1:]], ids=range(3))
    def test_is_none_where_a_tensor_is_a_view(self, tmp_path: Path, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        torch.save({"a.weight": view(torch.randn(6, 4))}, tmp_path / "model.pt")
        for how in ({}, {"dtype": "bf16"}, {"checksum": True}):
            assert ckpt_cli.merge(tmp_path / "model.pt", tmp_path / f"out{len(str(how))}", **how).exit_code == 0

    def test_is_none_where_the_tensor_is_left_out(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        self.damaged(run, "a.weight", self.saved(run), run / "pytorch_model.bin")
        assert ckpt_cli.merge(run, tmp_path / "out", verify=True, exclude="a.*").exit_code == 0

    def test_is_none_where_nothing_is(self, tmp_path: Path) -> None:
        self.saved(tmp_path / "run")
        assert ckpt_cli.merge(tmp_path / "run", tmp_path / "out", verify=True).exit_code == 0

    def test_is_one_where_the_output_is_cut_anew(self, tmp_path: Path) -> None:
        """Fused experts are written one by one: no part has a checksum of its own."""
        from tests.architectures import MODELS, build

        kind, model_type, options = MODELS["qwen3_moe"]
        model = build(kind, model_type, options)
        run = tmp_path / "run"
        model.config.save_pretrained(run)
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "architectures": [kind]}))
        tensors = {name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}
        torch.save(tensors, run / "pytorch_model.bin")
        name = next(name for name in tensors if name.endswith("gate_up_proj"))
        assert ckpt_cli.merge(run, tmp_path / "sound", verify=True).exit_code == 0
        self.damaged(run, name, tensors, run / "pytorch_model.bin")
        assert_not_published(run, tmp_path / "out", name, "pytorch_model.bin")

    def test_is_one_in_a_dcp_item(self, tmp_path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        run = tmp_path / "run"
        tensors = {"a.weight": torch.randn(6, 4), "b.weight": torch.randn(4, 6)}
        dcp.save({"model": tensors}, checkpoint_id=run)
        (file,) = run.glob("*.distcp")
        self.damaged(run, "b.weight", tensors, file)
        with pytest.raises(CorruptFile) as caught:
            ckpt_cli.merge(run, tmp_path / "out")
        assert (caught.value.path, caught.value.tensor) == (str(file), "b.weight")
