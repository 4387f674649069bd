"""Outputs in a store: those of a folder on this machine, byte for byte, complete or not at all."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, NotWritable, OutputExists, UsageError
from ckpt_cli.files.manifest import NAME, PUBLISHING
from ckpt_cli.output.sinks import upload
from tests import tiny
from tests.cli import ROOT, ckpt
from tests.remote.stores import ENVIRONMENT, SECRET, Bucket, Fault, Proxy

SHARDS = {"max_shard_size": "9KB"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "model"
    return tiny.folder(folder, tiny.weights(1), tiny.unknown())


@pytest.fixture(scope="module")
def here(model: Path) -> dict[str, bytes]:
    """What is to be in the store: the same output on this machine."""
    ckpt_cli.merge(model, model.parent / "here", **SHARDS)
    return files_of(model.parent / "here")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def merged(model: Path, bucket: Bucket, *, overwrite: bool = False) -> None:
    ckpt_cli.merge(model, f"s3://{bucket.name}/out", overwrite=overwrite, **SHARDS)


def test_an_output_is_that_of_a_folder_here(model: Path, here: dict[str, bytes], store: Proxy, bucket: Bucket, small_parts: None) -> None:
    merged(model, bucket)
    assert bucket.content("out") == here
    assert len([name for name in here if name.endswith(".safetensors")]) >= 3
    assert bucket.uploads() == []
    assert SECRET.encode() not in b"".join(here.values())
    assert json.loads(here[NAME])["checksums"]["files"], "counted as the bytes pass"
    checked = ckpt_cli.verify(f"s3://{bucket.name}/out", against=model, full=True)
    assert checked.against[0].identical
    assert not [found for found in checked.findings if found.severity == "error"]


def test_of_a_damaged_source_none_replaces_what_is_there(tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    (run := tmp_path / "run").mkdir()
    weight = torch.randn(400, 400)
    torch.save({"a.weight": weight}, run / "pytorch_model.bin")
    ckpt_cli.merge(run, f"s3://{bucket.name}/out", verify=True, dtype="bf16")
    before, data = bucket.content("out"), bytearray((run / "pytorch_model.bin").read_bytes())
    data[data.index(weight.numpy().tobytes()) + 7] ^= 1
    (run / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(CorruptFile, match="nothing was published"):
        ckpt_cli.merge(run, f"s3://{bucket.name}/out", verify=True, dtype="bf16", overwrite=True)
    assert bucket.content("out") == before


def test_with_the_sizes_of_real_parts(tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    """Stores refuse parts of less than 5 MiB; moto does, too. Three of them, a rest, and one file that is a part by itself."""
    source = tmp_path / "model"
    source.mkdir()
    save_file({"a": torch.randn(6_553_601), "b": torch.randn(200_000)}, source / "model.safetensors", {"format": "pt"})
    ckpt_cli.merge(source, tmp_path / "here", max_shard_size="27MB")
    ckpt_cli.merge(source, f"s3://{bucket.name}/out", max_shard_size="27MB")
    assert bucket.content("out") == files_of(tmp_path / "here")
    sizes = [len(data) for name, data in bucket.content("out").items() if name.endswith(".safetensors")]
    assert [size // upload.PART for size in sizes] == [3, 0]
    assert len([each for each in store.requests if "partNumber" in each.query]) == 3 + (sizes[0] % 3 > 0) + 1


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 2047, 2048, 4095, 4096, 4097, 8 << 10, (16 << 10) + 3, 40_001])
def test_files_of_any_size(size: int, store: Proxy, bucket: Bucket, small_parts: None) -> None:
    from ckpt_cli.files.remote.store import store_of
    from ckpt_cli.urls import Address

    data = os.urandom(size)
    with upload.Upload(store_of(Address("s3", bucket.name, "")), "x/file", size) as file:
        for start in range(0, size, 1500):
            file.put(start, memoryview(data)[start : start + 1500])
        file.finish()
        assert bucket.names() == []
        file.complete()
    assert bucket.content("x") == {"file": data}


def test_all_commands_that_write_folders(model: Path, data: Path, tmp_path: Path, store: Proxy, bucket: Bucket, small_parts: None) -> None:
    other = tiny.folder(tmp_path / "other", tiny.weights(2), tiny.unknown())
    address = f"s3://{bucket.name}"
    ckpt_cli.average([model, other], f"{address}/mean", **SHARDS)
    ckpt_cli.average([model, other], tmp_path / "mean", **SHARDS)
    assert bucket.content("mean") == files_of(tmp_path / "mean")
    run = data / "layouts" / "accelerate" / "rank_files"
    ckpt_cli.extract_state(run, f"{address}/state", optimizer=True)
    ckpt_cli.extract_state(run, tmp_path / "state", optimizer=True)
    assert bucket.content("state") == files_of(tmp_path / "state")
    assert bucket.uploads() == []


def test_several_outputs_appear_together(tmp_path: Path, store: Proxy, bucket: Bucket, impatient: None) -> None:
    """Or not at all: what has its name by then is removed again."""
    run = ROOT / "examples" / "tiny-run"
    ckpt_cli.merge(run, f"s3://{bucket.name}/both", type="both")
    ckpt_cli.merge(run, tmp_path / "both", type="both")
    for name in ("model", "ema"):
        assert bucket.content(f"both/{name}") == files_of(tmp_path / "both" / name)
    store.faults.append(Fault(f"again/ema/{NAME}", 999, status=503, method="PUT"))
    with pytest.raises(NotWritable, match="the server answered 503"):
        ckpt_cli.merge(run, f"s3://{bucket.name}/again", type="both")
    assert [each for each in store.of(f"again/model/{NAME}") if each.method == "PUT"], "the first one had its name"
    assert bucket.names("again") == []
    assert bucket.uploads() == []


def test_nothing_is_seen_before_everything_is_sent(
    model: Path, here: dict[str, bytes], store: Proxy, bucket: Bucket, small_parts: None
) -> None:
    """What makes the folder look like a model comes last, the manifest at the very end."""
    seen: list[tuple[int, list[str]]] = []

    def look(_: str) -> None:
        parts = len([each for each in store.requests if "partNumber" in each.query])
        seen.append((parts, [name for name in bucket.names("out/") if name != PUBLISHING]))

    store.before = look
    merged(model, bucket)
    rest = sum(len(data) > 512 for data in here.values())
    total = len([each for each in store.requests if "partNumber" in each.query])
    assert {parts for parts, names in seen if names} <= set(range(total - rest, total + 1)), "only the last bytes of files are left then"
    whole = {name for name in here if name.endswith(".safetensors")}
    for _, names in seen:
        assert "config.json" not in names or whole <= set(names)
        assert NAME not in names or set(names) == set(here)
    assert bucket.names("out/") == sorted(here)


def test_memory_is_bounded(tmp_path: Path, store: Proxy, bucket: Bucket, small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches for each file that is being written, and a few bytes for each that waits for the others."""
    source = tiny.folder(tmp_path / "large", tiny.weights(1, layers=40), tiny.unknown())
    held: list[int] = []
    hand_over = upload.Upload._hand_over

    def counted(self: upload.Upload) -> None:
        held.append(len(self._batch))
        hand_over(self)

    monkeypatch.setattr(upload.Upload, "_hand_over", counted)
    ckpt_cli.merge(source, f"s3://{bucket.name}/out", jobs=4)
    assert len(held) > 20
    assert max(held) <= 10 << 10
    times = [each for each in store.requests if "partNumber" in each.query]
    assert len(times) > 80


PASSING = [
    Fault(r"safetensors\?.*partNumber=2", 2, status=503, method="PUT"),
    Fault(r"safetensors\?.*partNumber=2", 2, status=429, method="PUT"),
    Fault(r"safetensors\?", 3, status=500, method="PUT"),
    Fault(r"safetensors\?", 2, hang_up="before", method="PUT"),
    Fault(r"safetensors\?", 2, hang_up="after", method="PUT"),
    Fault(r"safetensors\?uploadId", 2, status=503, method="POST"),
    Fault(r"safetensors\?uploads", 2, status=503, method="POST"),
    Fault(r"json\?", 2, status=503, method="PUT"),
    Fault(r"\?delete", 1, status=503, method="POST"),
    Fault(r"", 200, delay=0.01, method="PUT"),
]


@pytest.mark.parametrize("fault", PASSING, ids=str)
def test_what_passes_is_tried_again(
    fault: Fault, model: Path, here: dict[str, bytes], store: Proxy, bucket: Bucket, small_parts: None
) -> None:
    store.faults.append(Fault(**vars(fault)))
    merged(model, bucket)
    assert store.faults[0].times == 0 or fault.delay
    assert bucket.content("out") == here
    assert bucket.uploads() == []


STAYING = [
    (Fault(r"safetensors\?.*partNumber=2", 999, status=503, method="PUT"), "writing failed: the server answered 503.*after 2 retries"),
    (Fault(r"00002.*safetensors\?.*partNumber=1&", 999, status=403, method="PUT"), r"writing failed: access was denied \(403"),
    (Fault(r"safetensors\?", 999, hang_up="before", method="PUT"), "writing failed: there is no connection"),
    (Fault(r"00003.*safetensors\?uploads", 999, status=403, method="POST"), "writing failed: access was denied"),
    (Fault(r"00002.*safetensors\?uploadId", 999, status=500, method="POST"), "the file cannot be completed: the server answered 500"),
    (Fault(r"config.json", 999, status=403, method="PUT"), "access was denied"),
    (Fault(NAME, 999, status=503, method="PUT"), "the server answered 503"),
    (Fault(PUBLISHING, 999, status=503, method="PUT"), "the server answered 503"),
    (Fault(r"^\?out/", 999, status=403), "the contents of the output folder cannot be determined.*access was denied"),
]


@pytest.mark.parametrize(("fault", "message"), STAYING, ids=str)
def test_what_stays_is_an_error_and_leaves_nothing(
    fault: Fault, message: str, model: Path, store: Proxy, bucket: Bucket, small_parts: None, impatient: None
) -> None:
    store.faults.append(Fault(**vars(fault)))
    with pytest.raises(NotWritable, match=message) as caught:
        merged(model, bucket)
    store.faults.clear()
    assert bucket.names() == []
    assert bucket.uploads() == []
    assert caught.value.exit_code == 5
    assert caught.value.hint
    assert SECRET not in str(caught.value) + repr(caught.value)
    assert isinstance(caught.value.__cause__, CkptError | None), "the original has URLs and headers in it"


def test_the_last_bytes_of_a_file(model: Path, tmp_path: Path, store: Proxy, bucket: Bucket, small_parts: None, impatient: None) -> None:
    """They go with the completion. If they are refused for good, nobody can give the upload up, which is said."""
    ckpt_cli.merge(model, tmp_path / "here")
    size = (tmp_path / "here" / "model.safetensors").stat().st_size
    parts = size // upload.PART
    assert size % (size // parts)
    store.faults.append(Fault(rf"safetensors\?partNumber={parts + 1}&", 999, status=503, method="PUT"))
    with pytest.raises(NotWritable, match="the file cannot be completed: the server answered 503") as caught:
        ckpt_cli.merge(model, f"s3://{bucket.name}/out")
    assert "an unfinished upload of it may stay in the store" in str(caught.value)
    assert bucket.names() == []
    store.faults.clear()
    ckpt_cli.merge(model, f"s3://{bucket.name}/out")
    assert bucket.content("out") == files_of(tmp_path / "here")


def test_errors_while_the_weights_are_read(model: Path, tmp_path: Path, store: Proxy, bucket: Bucket, small_parts: None) -> None:
    tensors = tiny.weights(1)
    tensors["model.norm.weight"][0] = 1e30
    source = tiny.folder(tmp_path / "large", tensors, tiny.unknown())
    with pytest.raises(CkptError, match="too large for the requested dtype"):
        ckpt_cli.merge(source, f"s3://{bucket.name}/out", dtype="fp16", **SHARDS)
    assert [each for each in store.requests if each.method == "PUT"], "it was found when all was sent"
    assert bucket.names() == []
    assert bucket.uploads() == []


class TestOverwriting:
    """The rules are those of folders here; a store only cannot exchange two."""

    def test_an_output_is_kept(self, model: Path, here: dict[str, bytes], store: Proxy, bucket: Bucket) -> None:
        merged(model, bucket)
        with pytest.raises(OutputExists, match="the output folder exists") as caught:
            merged(model, bucket)
        assert caught.value.hint == "pass --overwrite to replace it, or choose another -o"
        assert bucket.content("out") == here

    def test_an_output_is_replaced(self, model: Path, here: dict[str, bytes], store: Proxy, bucket: Bucket, small_parts: None) -> None:
        """Also by one of fewer files, so that none of the old ones stays."""
        ckpt_cli.merge(model, f"s3://{bucket.name}/out", max_shard_size="3KB", dtype="bf16")
        assert set(bucket.names("out/")) - set(here)
        merged(model, bucket, overwrite=True)
        assert bucket.content("out") == here

    @pytest.mark.parametrize("name", ["notes.txt", "sub/notes.txt"])
    @pytest.mark.parametrize("ours", [False, True])
    def test_what_ckpt_did_not_write_is_kept(self, name: str, ours: bool, model: Path, store: Proxy, bucket: Bucket) -> None:
        if ours:
            merged(model, bucket)
        bucket.put(f"out/{name}", b"mine")
        with pytest.raises(OutputExists, match="holds more than ckpt wrote" if ours else "was not written by ckpt"):
            merged(model, bucket, overwrite=True)
        assert bucket.content("out")[name] == b"mine"

    def test_a_file_of_that_name(self, model: Path, store: Proxy, bucket: Bucket) -> None:
        bucket.put("out", b"mine")
        with pytest.raises(OutputExists, match="is a file"):
            merged(model, bucket, overwrite=True)
        assert bucket.names() == ["out"]

    @pytest.mark.parametrize(
        "fault",
        [
            Fault(r"safetensors\?.*partNumber=2", 999, status=503, method="PUT"),
            Fault(PUBLISHING, 999, status=503, method="PUT"),
            Fault(r"\?delete", 1, status=403, method="POST"),
        ],
        ids=str,
    )
    def test_before_anything_was_replaced_the_old_one_stays(
        self, fault: Fault, model: Path, store: Proxy, bucket: Bucket, small_parts: None, impatient: None
    ) -> None:
        ckpt_cli.merge(model, f"s3://{bucket.name}/out", dtype="bf16")
        old = bucket.content("out")
        store.faults.append(Fault(**vars(fault)))
        with pytest.raises(NotWritable):
            merged(model, bucket, overwrite=True)
        assert bucket.content("out") == old
        assert bucket.uploads() == []

    def test_something_else_came_to_stand_there(self, model: Path, store: Proxy, bucket: Bucket, small_parts: None) -> None:
        def put(_: str) -> None:
            if any("partNumber" in each.query for each in store.requests):
                bucket.put("out/config.json", b"mine")

        store.before = put
        with pytest.raises(OutputExists, match="was not written by ckpt"):
            merged(model, bucket)
        assert bucket.content("out") == {"config.json": b"mine"}
        assert bucket.uploads() == []

    def test_a_source_is_no_place_for_an_output(self, model: Path, store: Proxy, bucket: Bucket) -> None:
        address = bucket.fill(model, "run/model")
        for place in (address, f"{address}/out", f"s3://{bucket.name}/run"):
            with pytest.raises(CkptError, match=r"the output would be inside the input|the output folder contains the input"):
                ckpt_cli.merge(address, place, overwrite=True)


def command(model: Path, bucket: Bucket, *more: str) -> list[str]:
    words = ["merge", str(model), "-o", f"s3://{bucket.name}/out", "--max-shard-size", "9MB", *more]
    return [sys.executable, "-m", "ckpt_cli", *words]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of 8 MB, so that parts have the size that they really have."""
    folder = tmp_path_factory.mktemp("large") / "model"
    folder.mkdir()
    save_file({f"layer.{i}": torch.full((2_050_001,), float(i)) for i in range(4)}, folder / "model.safetensors", {"format": "pt"})
    ckpt_cli.merge(folder, folder.parent / "here", max_shard_size="9MB")
    return folder


def interrupted(model: Path, bucket: Bucket, store: Proxy, number: int, pattern: str) -> subprocess.CompletedProcess[str]:
    """A run that gets a signal when a request that matches has come to the store, which is slow."""
    store.faults += [Fault(NAME, 9, delay=2, method="PUT"), Fault("", 9999, delay=0.1, method="PUT")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **ENVIRONMENT, "AWS_ENDPOINT_URL": store.url}
    with subprocess.Popen(
        command(model, bucket), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        for _ in range(1200):
            if any(re.search(pattern, f"{each.method} {each.path}?{each.query}") for each in list(store.requests)):
                break
            time.sleep(0.01)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    store.faults.clear()
    return subprocess.CompletedProcess([], process.returncode, out, err)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("pattern", ["PUT .*partNumber=1", pytest.param("POST .*00001.*uploadId", marks=pytest.mark.slow)])
def test_a_signal_leaves_nothing(number: int, code: int, pattern: str, large: Path, store: Proxy, bucket: Bucket) -> None:
    done = interrupted(large, bucket, store, number, pattern)
    assert done.returncode == code, done.stderr
    assert bucket.uploads() == []
    assert bucket.names() == []
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "pattern",
    [
        "POST .*uploadId",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("PUT .*partNumber=1", f"PUT .*{re.escape(PUBLISHING)}", "PUT .*index.json")
        ),
    ],
)
def test_after_a_kill_the_next_run_writes_the_same(pattern: str, large: Path, store: Proxy, bucket: Bucket) -> None:
    """Also if it came while the files got their names: the run does not take them for somebody else's."""
    done = interrupted(large, bucket, store, signal.SIGKILL, pattern)
    assert done.returncode == -signal.SIGKILL
    assert NAME not in bucket.names("out/")
    again = ckpt(*command(large, bucket)[3:], **ENVIRONMENT, AWS_ENDPOINT_URL=store.url)
    assert again.code == 0, again.err
    assert bucket.content("out") == files_of(large.parent / "here")


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"part": "1/2"}, "part writes to positions in files"),
            ({"engine": "ray"}, "engine ray writes to positions in files"),
            ({"write": "positioned"}, "write positioned writes to positions in files"),
        ],
        ids=str,
    )
    def test_ways_that_stores_do_not_have(self, options: dict[str, str], message: str, model: Path) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            ckpt_cli.merge(model, "s3://bucket/out", **options)  # type: ignore[arg-type]
        assert "leave out" in str(caught.value)

    def test_in_place(self, model: Path, store: Proxy, bucket: Bucket) -> None:
        address = bucket.fill(model, "run")
        with pytest.raises(NotWritable, match="on disks only") as caught:
            ckpt_cli.merge(address, in_place=True)
        assert caught.value.hint == "pass -o instead of --in-place"
        assert sorted(bucket.content("run")) == sorted(files_of(model))

    @pytest.mark.parametrize(
        ("address", "hint"),
        [
            ("hf://org/name", "then: hf upload org/name FOLDER"),
            ("https://huggingface.co/org/name", "then: hf upload org/name FOLDER"),
            ("https://host/x", "write to a local folder, and copy it there"),
            ("hdfs://host/x", "write to a local folder, and copy it there"),
            ("memory://x", "write to a local folder, and copy it there"),
            ("s3:/bucket/x", "write it as s3://bucket/x"),
            ("s3://key:secret@bucket/x", "pass credentials in the environment"),
        ],
    )
    def test_addresses(self, address: str, hint: str, model: Path) -> None:
        with pytest.raises(UsageError) as caught:
            ckpt_cli.merge(model, address)
        assert hint in str(caught.value)

    def test_a_watch_and_single_files(self, model: Path) -> None:
        with pytest.raises(UsageError, match="local files only"):
            ckpt_cli.watch(model, "s3://bucket/out")
        with pytest.raises(UsageError, match="local files only"):
            ckpt_cli.verify(model, plot="s3://bucket/x.png")

    def test_a_bucket_that_is_not_there(self, model: Path, tmp_path: Path, store: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
        """No folder is made here, either."""
        monkeypatch.chdir(tmp_path)
        for address in ("s3://bucket-that-is-not-there/out", Path("s3://bucket-that-is-not-there/out")):
            for command in (ckpt_cli.merge, ckpt_cli.extract_state):
                with pytest.raises(CkptError):
                    command(model, address)
            with pytest.raises(NotWritable, match="there is no such bucket"):
                ckpt_cli.merge(model, address)
        assert list(tmp_path.iterdir()) == []


def test_a_dry_run_only_looks(model: Path, store: Proxy, bucket: Bucket) -> None:
    result = ckpt_cli.merge(model, f"s3://{bucket.name}/out", dry_run=True)
    assert result.outputs[0].output == f"s3://{bucket.name}/out"
    assert result.outputs[0].disk_free is None
    assert result.outputs[0].peak_memory > 2 * upload.BATCH
    assert {each.method for each in store.requests} <= {"GET", "HEAD"}


def test_a_copy_in_the_store_is_another_file(model: Path, store: Proxy, bucket: Bucket) -> None:
    """Their tags are equal, as those of S3 are checksums."""
    first, second = bucket.fill(model, "first"), bucket.fill(model, "second")
    assert ckpt_cli.verify(first, against=second).against[0].identical
    averaged = ckpt_cli.average([first, second], f"s3://{bucket.name}/mean")
    assert "same-twice" not in [note.code for note in averaged.notes]
