"""Hostile and damaged rank files, end to end: refused with a reason, and nothing is written, run or changed."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, InputError, Unreadable, Unsupported
from tests.payloads import repacked, torch_file
from tests.tensors import differences, load

NAME = "model_world_size_1_rank_0.pt"
SLOW = 10.0
"""Seconds after which a small file has taken too long."""

State = dict[str, Any]


def state() -> State:
    return {"model.embed.weight": torch.arange(12.0).reshape(3, 4), "model.norm.weight": torch.ones(4)}


def with_pickle(content: bytes) -> bytes:
    return repacked(torch_file(state()), lambda name, old: content if name.endswith("data.pkl") else old)


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """What lies below a folder: kind, size, time of change and bytes."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and status.st_size < 1 << 24 else None
        found[str(path)] = (status.st_mode, status.st_size if not path.is_dir() else 0, status.st_mtime_ns, content)
    return found


class Place:
    """A checkpoint folder to be merged, and everything around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "global_step_7"
        self.checkpoint.mkdir()
        (self.checkpoint / "config.json").write_text('{"architectures": ["X"]}')
        self.output = folder / "merged"
        self.marker = folder / "marker"
        self.shard = self.checkpoint / NAME

    def write(self, data: bytes) -> Place:
        self.shard.write_bytes(data)
        return self

    def refused(self, error: type[CkptError] = InputError, match: str | None = None) -> CkptError:
        """Merging is refused for this reason and leaves everything as it was."""
        before = snapshot(self.folder)
        start = time.process_time()
        with pytest.raises(error, match=match) as caught:
            ckpt_cli.merge(self.checkpoint, self.output)
        assert time.process_time() - start < SLOW
        assert snapshot(self.folder) == before
        assert caught.value.message
        assert len(caught.value.message) < 1_000
        assert caught.value.exit_code in (3, 4)
        assert caught.value.path is not None
        assert caught.value.path.startswith(str(self.checkpoint))
        return caught.value

    def merged(self) -> dict[str, torch.Tensor]:
        """Merging works and leaves the checkpoint as it was."""
        before = snapshot(self.checkpoint)
        ckpt_cli.merge(self.checkpoint, self.output)
        assert snapshot(self.checkpoint) == before
        assert not self.marker.exists()
        assert sorted(path.name for path in self.folder.iterdir()) == ["global_step_7", "merged"]
        return load(self.output)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class TestTheFixture:
    def test_an_honest_file_is_merged(self, place: Place) -> None:
        assert differences(place.write(torch_file(state())).merged(), state()) == []


class TestThingsThatAreNotCheckpoints:
    def test_a_file_without_bytes(self, place: Place) -> None:
        error = place.write(b"").refused(CorruptFile, "empty")
        assert error.hint

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            (b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n", "HTML"),
            (gzip.compress(torch_file(state())), "gzip"),
            (b"7z\xbc\xaf\x27\x1c" + bytes(200), "7z"),
            (bytes(10_000), "not a file of torch.save"),
            (pickle.dumps({"model.embed.weight": [1, 2]}), "not a file of torch.save"),
            (b"\x02\0\0\0\0\0\0\0{}", "not a file of torch.save"),
            (random.Random(1).randbytes(5_000), "not a file of torch.save"),
        ],
        ids=["html", "gzip", "7z", "zeros", "pickle", "safetensors", "noise"],
    )
    def test_another_kind_of_file(self, content: bytes, match: str, place: Place) -> None:
        place.write(content).refused(CorruptFile, match)

    def test_a_tar_archive(self, place: Place) -> None:
        with tarfile.open(place.shard, "w") as tar:
            tar.addfile(tarfile.TarInfo("../../evil"), io.BytesIO(b""))
        place.refused(CorruptFile, "not a file of torch.save")

    def test_a_zip_archive_that_torch_did_not_write(self, place: Place) -> None:
        with zipfile.ZipFile(place.shard, "w") as made:
            made.writestr("holiday/photo.jpg", b"\xff\xd8")
        place.refused(CorruptFile, "no data.pkl")

    def test_a_torchscript_archive(self, place: Place) -> None:
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), place.shard)
        place.refused(Unsupported, "TorchScript")

    @pytest.mark.parametrize("content", [None, 3, "text", torch.ones(2), (), torch.nn.Linear(2, 2)], ids=type)
    def test_a_file_of_torch_that_holds_no_state_dict(self, content: object, place: Place) -> None:
        place.write(torch_file(content)).refused(CorruptFile, "not a state dict")

    @pytest.mark.parametrize("content", [[torch.ones(2)], ({"w": torch.ones(2)}, 3)], ids=["tensors", "dicts"])
    def test_a_file_of_torch_that_holds_a_list(self, content: object, place: Place) -> None:
        """Nothing is wrong with the file: scripts such as DDIM's save lists."""
        place.write(torch_file(content)).refused(Unsupported, "not a state dict")

    @pytest.mark.parametrize("content", [{}, {"step": 3}], ids=["empty", "numbers"])
    def test_a_dict_without_tensors(self, content: object, place: Place) -> None:
        place.write(torch_file(content)).refused(CorruptFile, "no tensor")

    def test_weights_below_an_entry_are_refused_not_left_out(self, place: Place) -> None:
        for content in ({**state(), "model": {"weight": torch.ones(2)}}, {**state(), "more": [torch.ones(2)]}):
            place.write(torch_file(content)).refused(Unsupported, "holds tensors")


class TestDamagedFiles:
    @pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
    def test_cut_off_anywhere(self, legacy: bool, place: Place) -> None:
        data = torch_file(state(), _use_new_zipfile_serialization=not legacy)
        for length in [*range(120), *range(120, len(data) - 100, 61), *range(len(data) - 100, len(data))]:
            place.write(data[:length]).refused(CorruptFile)

    def test_cut_off_and_filled_with_zeros(self, place: Place) -> None:
        data = torch_file(state())
        for length in range(64, len(data) - 1, 211):
            place.write(data[:length] + bytes(len(data) - length)).refused(CorruptFile)

    def test_one_of_two_files_is_cut_off(self, place: Place) -> None:
        data = torch_file(state())
        (place.checkpoint / "model_world_size_2_rank_0.pt").write_bytes(data)
        (place.checkpoint / "model_world_size_2_rank_1.pt").write_bytes(data[: len(data) // 2])
        error = place.refused(CorruptFile, "cut off")
        assert str(error.path).endswith("rank_1.pt")

    @pytest.mark.parametrize("change", ["shorter", "longer", "missing", "empty"])
    def test_a_record_that_is_not_what_its_tensors_say(self, change: str, place: Place) -> None:
        def changed(name: str, old: bytes) -> bytes | None:
            if not name.endswith("data/0"):
                return old
            return {"shorter": old[:-1], "longer": old + b"x", "missing": None, "empty": b""}[change]

        place.write(repacked(torch_file(state()), changed))
        place.refused(CorruptFile, "storage 0")

    def test_compressed_members(self, place: Place) -> None:
        place.write(repacked(torch_file(state()), compression=zipfile.ZIP_DEFLATED)).refused(Unsupported, "compressed")

    def test_bytes_behind_the_archive(self, place: Place) -> None:
        place.write(torch_file(state()) + b"\n").refused(CorruptFile)

    def test_thousands_of_mutants_raise_nothing_but_errors_of_ours(self, place: Place) -> None:
        source, data = random.Random(3), torch_file(state())
        with zipfile.ZipFile(io.BytesIO(data)) as judge:
            original = judge.read("archive/data.pkl")
        outcomes: Counter[str] = Counter()
        for number in range(1_500):
            if number % 2:
                changed = bytearray(original)
                for _ in range(source.choice((1, 1, 2, 4))):
                    changed[source.randrange(len(changed))] = source.choice((source.randrange(256), *b"(.02NtRbQqhK}]"))
                mutant = with_pickle(bytes(changed))
            else:
                raw = bytearray(data)
                for _ in range(source.choice((1, 2, 4))):
                    raw[source.randrange(len(raw))] = source.randrange(256)
                mutant = bytes(raw)
            place.write(mutant)
            try:
                ckpt_cli.merge(place.checkpoint, place.output, dry_run=True)
                outcomes["planned"] += 1
            except CkptError as error:
                outcomes["refused"] += 1
                outcomes["silent"] += not error.message or error.path is None
        assert outcomes["silent"] == 0
        assert min(outcomes["planned"], outcomes["refused"]) > 100
        assert not place.output.exists()


class Runs:
    """Pickles as a call of ``function`` with ``args``."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


class TestFilesThatWouldRunCode:
    def payloads(self, marker: Path) -> list[object]:
        return [
            Runs(os.mkdir, str(marker)),
            Runs(os.system, f"mkdir {marker}"),
            Runs(eval, f"__import__('os').mkdir({str(marker)!r})"),
            Runs(exec, f"import os; os.mkdir({str(marker)!r})"),
            Runs(subprocess.Popen, ["mkdir", str(marker)]),
            Runs(Path.mkdir, Path(marker)),
        ]

    def test_in_the_place_of_the_state_dict(self, place: Place) -> None:
        for payload in self.payloads(place.marker):
            place.write(torch_file(payload)).refused(CorruptFile, "not a state dict")

    def test_beside_the_weights_are_left_out_and_never_run(self, place: Place) -> None:
        extras = {f"extra {i}": payload for i, payload in enumerate(self.payloads(place.marker))}
        assert differences(place.write(torch_file({**state(), **extras})).merged(), state()) == []

    def test_in_the_place_of_a_storage_a_shape_or_a_name(self, place: Place) -> None:
        run = b"cposix\nmkdir\n(" + b"X" + len(str(place.marker)).to_bytes(4, "little") + str(place.marker).encode() + b"tR"
        for content in (
            b"\x80\x02}" + run + b"K\x01s.",
            b"\x80\x02}U\x01actorch._utils\n_rebuild_tensor_v2\n(" + run + b"K\x00(K\x04t(K\x01t\x89NtRs.",
            b"\x80\x02}U\x01actorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x0ctQK\x00"
            + run
            + b"(K\x01t\x89NtRs.",
            b"\x80\x02}U\x01a(U\x07storage" + run + b"U\x010U\x03cpuK\x0ctQs.",
        ):
            place.write(with_pickle(content)).refused(InputError)

    def test_before_the_file_breaks_off(self, place: Place) -> None:
        run = b"\x80\x02cposix\nmkdir\n(X" + len(str(place.marker)).to_bytes(4, "little") + str(place.marker).encode() + b"tR"
        for content in (run, run + b"\xff\xff", run + b"N.", run[:-1]):
            place.write(with_pickle(content)).refused(CorruptFile)

    def test_in_a_legacy_file(self, place: Place) -> None:
        for payload in self.payloads(place.marker):
            place.write(torch_file(payload, _use_new_zipfile_serialization=False)).refused(CorruptFile)

    def test_an_audit_hook_sees_no_lookup_no_process_and_no_unexpected_import(self, place: Place) -> None:
        (place.folder / "evil_module.py").write_text(f"import os\nos.mkdir({str(place.marker)!r})\nclass Thing: pass\n")
        extras = {f"extra {i}": payload for i, payload in enumerate(self.payloads(place.marker))}
        content = torch_file({**state(), **extras}, pickle_protocol=2)
        evil = b"X\x04\x00\x00\x00evilcevil_module\nThing\n)R}X\x01\x00\x00\x00aK\x01sbs."
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            original = archive.read("archive/data.pkl")
        place.write(repacked(content, lambda name, old: original[:-1] + evil if name.endswith("data.pkl") else old))
        root = Path(ckpt_cli.__path__[0]).parent
        done = subprocess.run(
            [sys.executable, "-B", "-c", OBSERVER, str(place.checkpoint), str(place.output)],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": f"{root}{os.pathsep}{place.folder}"},
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert seen["events"] == []
        parent = place.output.parent
        assert set(seen["folders"]) == {str(parent), str(parent / f".{place.output.name}.ckpt-tmp-staging")}
        assert {"evil_module", "torch", "subprocess", "pickle", "transformers"} & set(seen["imports"]) == set()
        assert not place.marker.exists()
        assert differences(load(place.output), state()) == []


OBSERVER = """
import json, os, sys
import ckpt_cli
PROCESSES = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")
events, folders, imports = [], set(), []
def hook(event, args):
    if event == "pickle.find_class" or event in PROCESSES or event.startswith("socket"):
        events.append(event)
    elif event == "os.mkdir" and not os.path.exists(args[0]):
        folders.add(os.path.dirname(os.path.abspath(args[0])))
    elif event == "import":
        imports.append(args[0])
sys.addaudithook(hook)
ckpt_cli.merge(sys.argv[1], sys.argv[2])
print(json.dumps({"events": events, "folders": sorted(folders), "imports": imports}))
"""


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "\x1b[31mred\x1b[0m.weight",
            "model[/foo].weight",
            "model[red].weight",
            "a\nb\tc\rd",
            "\u202eevil",
            "../../evil",
            "a b",
            "",
            "=1+1",
            "\0",
        ],
        ids=ascii,
    )
    def test_that_are_only_dangerous_to_show_are_kept_exactly(self, name: str, place: Place) -> None:
        content = {**state(), name: torch.arange(3.0)}
        assert differences(place.write(torch_file(content)).merged(), content) == []

    @pytest.mark.parametrize(
        ("name", "match"),
        [
            ("bad \ud800 name", "not valid Unicode"),
            ("__metadata__", "__metadata__"),
            ("x" * 5_000, "5000 characters"),
            (3, "is a int"),
            (("a", 1), "is a tuple"),
            (None, "is a NoneType"),
            (b"weight", "is a (bytes|Call)"),
        ],
        ids=["surrogate", "reserved", "long", "integer", "tuple", "None", "bytes"],
    )
    def test_that_no_safetensors_file_can_hold_are_refused(self, name: object, match: str, place: Place) -> None:
        content: dict[object, object] = {name: torch.ones(3), "model.norm.weight": torch.ones(4)}
        error = place.write(torch_file(content)).refused(CorruptFile, match)
        # Whatever is shown of it can be encoded.
        f"{error.message} {error.tensor}".encode()

    def test_that_are_there_twice_are_refused(self, place: Place) -> None:
        data = torch_file({"model.a.weight": torch.ones(2), "model.b.weight": torch.zeros(2)})
        place.write(repacked(data, lambda _, content: content.replace(b"model.b.weight", b"model.a.weight")))
        place.refused(CorruptFile, "same key twice")

    def test_of_pairs_in_an_ordered_dict_that_are_there_twice_are_refused(self, place: Place) -> None:
        data = torch_file([("a.weight", torch.ones(2)), ("b.weight", torch.zeros(2))])
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            pairs = archive.read("archive/data.pkl").replace(b"b.weight", b"a.weight")
        content = b"\x80\x02ccollections\nOrderedDict\n" + pairs[2:-1] + b"\x85R."
        place.write(repacked(data, lambda name, old: content if name.endswith("data.pkl") else old)).refused(CorruptFile)


class Tagged(torch.Tensor):
    """A subclass that keeps plain data."""


def noted(value: float) -> torch.Tensor:
    tensor = torch.full((4,), value)
    tensor.note = "left by a trainer"  # type: ignore[attr-defined]
    return tensor


class TestTensorsThatAreNotWhatTheySeem:
    def test_a_huge_expanded_view(self, place: Place) -> None:
        content = {**state(), "bomb": torch.ones(1).expand(1 << 40)}
        error = place.write(torch_file(content)).refused(Unsupported, "repeats 4 stored bytes")
        assert error.tensor == "bomb"

    @pytest.mark.parametrize(
        "numel", [b"\x8a\x06\0\0\0\0\0\x01", b"\x8a\x08\0\0\0\0\0\0\0\x40", b"J\xff\xff\xff\xff", b"\x88", b"N"], ids=repr
    )
    def test_a_storage_of_any_number_of_elements(self, numel: bytes, place: Place) -> None:
        def change(name: str, old: bytes) -> bytes:
            return old.replace(b"cpuq\x06K\x0c", b"cpuq\x06" + numel) if name.endswith("data.pkl") else old

        data = torch_file(state())
        changed = repacked(data, change)
        assert len(changed) != len(repacked(data)) or numel in changed
        place.write(changed).refused(CorruptFile)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.eye(3).to_sparse(),
            lambda: torch.eye(3).to_sparse_csr(),
            lambda: torch.empty(3, device="meta"),
            lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8),
            lambda: torch.ones(2, dtype=torch.complex128),
            lambda: torch.ones(2).to(torch.complex32),
        ],
        ids=["sparse", "sparse csr", "meta", "quantised", "complex128", "complex32"],
    )
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_kinds_that_safetensors_cannot_hold_are_refused_by_name(self, make: Callable[[], torch.Tensor], place: Place) -> None:
        before = snapshot(place.write(torch_file({**state(), "odd": make()})).folder)
        with pytest.raises(Unsupported) as caught:
            ckpt_cli.merge(place.checkpoint, place.output)
        assert caught.value.tensor == "odd"
        assert snapshot(place.folder) == before

    def test_a_subclass_is_written_or_refused_but_never_left_out_in_silence(self, place: Place) -> None:
        content = {**state(), "odd": torch.arange(3.0).as_subclass(Tagged)}
        place.write(torch_file(content))
        try:
            found = place.merged()
        except CkptError as error:
            refused = error.tensor
        else:
            refused = None
            assert differences(found, {**state(), "odd": torch.arange(3.0)}) == []
        assert refused in (None, "odd")

    def test_tensors_with_attributes_keep_their_own_values(self, place: Place) -> None:
        content = {f"layer.{i}.weight": noted(float(i)) for i in range(20)}
        found = place.write(torch_file(content)).merged()
        assert {name: tensor.tolist() for name, tensor in found.items()} == {f"layer.{i}.weight": [float(i)] * 4 for i in range(20)}

    def test_a_conjugated_view_of_another_tensor_is_no_tied_weight(self, place: Place) -> None:
        values = torch.tensor([1 + 2j, 3 - 4j])
        found = place.write(torch_file({"a": values, "b": values.conj()})).merged()
        assert differences(found, {"a": values, "b": values.conj().resolve_conj()}) == []

    def test_a_conjugated_head_is_not_dropped_as_a_copy_of_its_embedding(self, place: Place) -> None:
        (place.checkpoint / "config.json").write_text('{"tie_word_embeddings": true}')
        values = torch.tensor([[1 + 2j, 3 - 4j]])
        found = place.write(torch_file({"model.embed_tokens.weight": values, "lm_head.weight": values.conj()})).merged()
        assert "lm_head.weight" in found

    def test_scalars_with_a_lazy_flag(self, place: Place) -> None:
        scalar = torch.tensor(1 - 2j).conj()
        assert place.write(torch_file({"a": scalar})).merged()["a"].item() == 1 + 2j


class TestThingsInThePlaceOfTheFile:
    def test_a_pipe_does_not_block(self, place: Place) -> None:
        os.mkfifo(place.shard)
        place.refused(Unreadable, "not a regular file")

    def test_a_folder(self, place: Place) -> None:
        place.shard.mkdir()
        place.refused(Unreadable, "not a regular file")

    def test_a_socket(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        # The name of a socket must be short, so it is bound from inside of its folder.
        monkeypatch.chdir(place.checkpoint)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(NAME)
            place.refused(Unreadable)

    def test_a_device(self, place: Place) -> None:
        place.shard.symlink_to("/dev/zero")
        place.refused(Unreadable, "not a regular file")

    def test_a_link_to_itself(self, place: Place) -> None:
        place.shard.symlink_to(place.shard)
        place.refused(InputError)

    def test_a_link_in_a_circle(self, place: Place) -> None:
        place.shard.symlink_to(place.checkpoint / "other.pt")
        (place.checkpoint / "other.pt").symlink_to(place.shard)
        place.refused(InputError)

    def test_a_link_to_nowhere(self, place: Place) -> None:
        place.shard.symlink_to(place.folder / "nowhere.pt")
        place.refused(InputError)

    def test_a_link_to_an_honest_file_is_fine(self, place: Place) -> None:
        (place.checkpoint / "real").write_bytes(torch_file(state()))
        place.shard.symlink_to("real")
        assert differences(place.merged(), state()) == []

    def test_the_file_itself_is_named_when_it_is_what_was_passed(self, place: Place) -> None:
        place.write(torch_file(state())[:100])
        with pytest.raises(CorruptFile) as caught:
            ckpt_cli.merge(place.shard, place.output)
        assert caught.value.path == str(place.shard)
        assert not place.output.exists()

    def test_a_pipe_that_was_passed_itself_does_not_block(self, place: Place) -> None:
        os.mkfifo(place.shard)
        with pytest.raises(InputError):
            ckpt_cli.merge(place.shard, place.output)


class TestFileNames:
    @pytest.mark.parametrize(
        "name",
        [
            "model_world_size_0_rank_0.pt",
            "model_world_size_1_rank_1.pt",
            "model_world_size_99999999999999999999_rank_0.pt",
            "model_world_size_1_rank_" + "9" * 200 + ".pt",
            "model_rank" + "9" * 200 + ".pt",
            "ema_rank4000000000.pt",
        ],
    )
    def test_with_impossible_ranks_and_world_sizes(self, name: str, place: Place) -> None:
        (place.checkpoint / name).write_bytes(torch_file(state()))
        place.refused(CkptError)

    def test_two_files_of_one_rank(self, place: Place) -> None:
        for name in ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt", "model_world_size_2_rank_01.pt"):
            (place.checkpoint / name).write_bytes(torch_file(state()))
        place.refused(CkptError, "same rank")

    @pytest.mark.parametrize(
        "name", ["model_world_size_\u0661_rank_\u0660.pt", "model_world_size_1_rank_\u00b2.pt", "model_world_size_1_rank_-1.pt"]
    )
    def test_with_digits_that_are_not_ascii_are_no_shards(self, name: str, place: Place) -> None:
        (place.checkpoint / name).write_bytes(torch_file(state()))
        place.refused(InputError)


class TestGraphsThatAreTraps:
    """Entries that are not weights may be of any shape; nobody walks into them."""

    @pytest.mark.parametrize(
        "trap",
        [
            b"]" * 200_000 + b"a" * 199_999,
            b")" + b"\x85" * 200_000,
            b"]"
            + b"".join(
                b"r" + (500 + i).to_bytes(4, "little") + b"0](" + (b"j" + (500 + i).to_bytes(4, "little")) * 2 + b"e" for i in range(24)
            ),
            b"]r\xf4\x01\0\0j\xf4\x01\0\0a",
            b"cfoo\nbar\n)R" * 1_000 + b"b" * 999,
        ],
        ids=["deep list", "deep tuple", "laughs that multiply", "a list of itself", "states of states"],
    )
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (b"", b""),
            (b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\n", b")NtR"),
            (b"ctorch._utils\n_rebuild_parameter\n(", b"\x88NtR"),
            (b"ctorch._utils\n_rebuild_tensor_v2\n(", b"K\x00))\x89NtR"),
        ],
        ids=["as an entry", "as the type of a tensor", "as a parameter", "as a storage"],
    )
    def test_are_left_out_or_refused(self, before: bytes, after: bytes, trap: bytes, place: Place) -> None:
        with zipfile.ZipFile(io.BytesIO(torch_file(state()))) as archive:
            original = archive.read("archive/data.pkl")
        place.write(with_pickle(original[:-1] + b"X\x04\0\0\0trap" + before + trap + after + b"s."))
        start = time.process_time()
        message = ""
        try:
            found = place.merged()
        except CkptError as error:
            message = error.message
        else:
            assert differences(found, state()) == []
        assert len(message) < 1_000
        assert time.process_time() - start < SLOW / 4
