"""Outputs on file systems that only append to files: the same bytes, front to back, also where folders cannot be renamed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import UsageError
from ckpt_cli.output.sinks.files import SequentialFile
from ckpt_cli.tensors.parallel import Stop, in_threads
from tests.cli import Outcome
from tests.cli import ckpt_fork as ckpt

LIBRARY = Path(__file__).parent / "appending.c"
NEVER = ("pwrite", "pwritev", "ftruncate", "posix_fallocate", "copy_file_range")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes files append-only, for processes that are started with it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not os.path.isdir("/proc/self/fd"):
        pytest.skip("append-only files need a C compiler and LD_PRELOAD on Linux")
    made = tmp_path_factory.mktemp("library") / "appending.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, LIBRARY, "-ldl"], check=True)
    return made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with tensors that are copied (large ones), assembled (cut in columns), and cast."""
    folder = tmp_path / "run"
    folder.mkdir()
    random = torch.Generator().manual_seed(1)
    big = {f"layers.{i}.weight": torch.randn(700, 1000, generator=random) for i in range(6)}
    torch.save({**big, "norm": torch.ones(33), "ids": torch.arange(7), "mask": torch.tensor([True, False, True])}, folder / "model.pt")
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "torch_dtype": "float32"}))
    return folder


def appended(library: Path, mount: Path, *arguments: str | Path, **more: str) -> Outcome:
    mount.mkdir(exist_ok=True)
    return ckpt(*arguments, LD_PRELOAD=str(library), APPENDING=str(mount), **more)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


OPTIONS = [(), ("--dtype", "bf16"), ("--max-shard-size", "3MB", "--jobs", "8"), ("--checksum", "--max-shard-size", "6MB", "--jobs", "1")]


class TestTheSameBytes:
    @pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
    @pytest.mark.parametrize("renames", ["all", "files"])
    def test_where_files_only_append(self, options: tuple[str, ...], renames: str, run: Path, library: Path, tmp_path: Path) -> None:
        assert ckpt("merge", run, "-o", tmp_path / "out", *options).code == 0
        done = appended(library, tmp_path / "mount", "merge", run, "-o", tmp_path / "mount" / "out", *options, RENAMES=renames)
        assert done.code == 0, done.err
        # All of it, with the manifest and its checksums.
        assert content(tmp_path / "mount" / "out") == content(tmp_path / "out")
        assert (done.out + done.err).count("front to back") == 1
        assert [path.name for path in (tmp_path / "mount").iterdir()] == ["out"]

    def test_averages_and_state(self, run: Path, library: Path, data: Path, tmp_path: Path) -> None:
        mount = tmp_path / "mount"
        for command in (("average", run, run), ("extract-state", data / "layouts/accelerate/rank_files", "--optimizer")):
            assert ckpt(*command, "-o", tmp_path / command[0]).code == 0
            done = appended(library, mount, *command, "-o", mount / command[0], RENAMES="files")
            assert done.code == 0, done.err
            assert content(mount / command[0]) == content(tmp_path / command[0])

    def test_by_request_nothing_is_written_at_a_position(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ckpt_cli.merge(run, tmp_path / "out", max_shard_size="3MB", checksum=True)

        def never(*_: object) -> int:
            raise AssertionError("a write at a position")

        for name in NEVER:
            monkeypatch.setattr(os, name, never, raising=False)
        result = ckpt_cli.merge(run, tmp_path / "again", max_shard_size="3MB", checksum=True, write="sequential", jobs=6)
        assert content(tmp_path / "again") == content(tmp_path / "out")
        # Only what was not asked for is said.
        assert not [note for note in result.outputs[0].notes if note.code == "sequential"]


class TestFailures:
    @pytest.mark.parametrize("after", [100, 3_000_000, 12_000_000])
    @pytest.mark.parametrize("renames", ["all", "files"])
    def test_leave_nothing_but_what_is_finished(self, after: int, renames: str, run: Path, library: Path, tmp_path: Path) -> None:
        mount = tmp_path / "mount"
        options = ("--max-shard-size", "3MB", "--jobs", "8")
        done = appended(library, mount, "merge", run, "-o", mount / "out", *options, FAIL_AFTER=str(after), RENAMES=renames)
        assert done.code == 5, done.err
        assert "Input/output error" in done.err
        if not list(mount.iterdir()):
            assert after < 12_000_000
            return
        # Several files are filled at once: one may be done by then.
        assert after > 100
        assert f"run the same command again to go on with the files that are finished, or give them up: rm -r {mount}/.out" in done.err
        again = appended(library, mount, "merge", run, "-o", mount / "out", *options, "-v", RENAMES=renames)
        assert after < 12_000_000 or "from the interrupted run" in again.out
        assert [path.name for path in mount.iterdir()] == ["out"]
        assert ckpt("merge", run, "-o", tmp_path / "out", *options).code == 0
        assert content(mount / "out") == content(tmp_path / "out")

    def test_nothing_begins_where_nothing_could_be_published(self, run: Path, library: Path, tmp_path: Path) -> None:
        mount = tmp_path / "mount"
        done = appended(library, mount, "merge", run, "-o", mount / "out", RENAMES="none")
        assert done.code == 5
        assert "cannot be renamed" in done.err
        assert "hint: write to a local disk" in done.err
        assert list(mount.iterdir()) == []

    def test_an_output_that_cannot_be_replaced_in_one_step_stays(self, run: Path, library: Path, tmp_path: Path) -> None:
        mount = tmp_path / "mount"
        assert appended(library, mount, "merge", run, "-o", mount / "out", RENAMES="files").code == 0
        before = content(mount / "out")
        done = appended(library, mount, "merge", run, "-o", mount / "out", "--dtype", "bf16", "--overwrite", RENAMES="files")
        assert done.code == 5
        assert "replaced in one step" in done.err
        assert content(mount / "out") == before
        done = appended(library, mount, "merge", run, "-o", mount / "out", "--dtype", "bf16", "--overwrite", RENAMES="all")
        assert done.code == 0, done.err

    def test_parts_are_refused(self, run: Path, library: Path, tmp_path: Path) -> None:
        done = appended(library, tmp_path / "mount", "merge", run, "-o", tmp_path / "mount" / "out", "--part", "0/2")
        assert done.code == 5
        assert "leave out --part" in done.err
        with pytest.raises(UsageError, match="positions"):
            ckpt_cli.merge(run, tmp_path / "out", part="0/2", write="sequential")
        assert "positioned, sequential" in ckpt("merge", run, "--write", "backwards").err


def test_ranges_wait_for_their_turn_and_for_errors(tmp_path: Path) -> None:
    stop = Stop()

    def put(number: int) -> None:
        if number == 7:
            raise ValueError("the eighth")
        sink.put(number * 3, memoryview(bytes([number]) * 3))

    with SequentialFile(tmp_path / "file", stop) as sink:
        in_threads(put, [6, 5, 3, 4, 0, 2, 1], 7, stop)
        assert (tmp_path / "file").read_bytes() == b"".join(bytes([n]) * 3 for n in range(7))
        with pytest.raises(ValueError, match="the eighth"):
            in_threads(put, [9, 8, 7], 3, stop)
