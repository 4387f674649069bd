"""Writing: the same bytes whatever way they take, and nothing at all when something goes wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckpt_cli
from ckpt_cli import merge
from ckpt_cli.boxes import Box, Shape, contiguous_strides, whole
from ckpt_cli.dtypes import BY_CODE
from ckpt_cli.errors import CastOverflow, CkptError, CorruptFile, InputError, NoSpace, NotWritable, SourceChanged
from ckpt_cli.files.source import Files
from ckpt_cli.output import plan as planning
from ckpt_cli.output.interrupted.place import MARK
from ckpt_cli.output.plan import make_plan
from ckpt_cli.output.publish import refuse_overflows
from ckpt_cli.output.sinks.files import CANNOT_COPY
from ckpt_cli.output.staging import Staging
from ckpt_cli.output.writer import Written, execute, write_bytes
from ckpt_cli.progress import Progress, Silent
from ckpt_cli.tensors.parallel import default_jobs
from ckpt_cli.tensors.tensor import Piece, Tensor

SHARD = "model_world_size_1_rank_0.pt"


class Sources:
    """Tensors cut over real files, and what they hold."""

    def __init__(self, folder: Path, files: Files) -> None:
        self.folder = folder
        self.files = files
        self.tensors: dict[str, Tensor] = {}
        self.expected: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor, *, axis: int = 0, parts: int = 1) -> None:
        """Store ``values`` in ``parts`` files, cut along ``axis``."""
        code = next(dtype for dtype in BY_CODE.values() if dtype.torch == str(values.dtype).removeprefix("torch."))
        shape: Shape = tuple(values.shape)
        pieces = []
        start = 0
        for i, part in enumerate(values.chunk(parts, axis) if values.dim() else [values]):
            path = self.folder / f"{name}.{i}.bin"
            path.write_bytes(b"padding" + raw(part))
            offset = tuple(start if d == axis else 0 for d in range(len(shape)))
            box = Box(offset, tuple(part.shape)) if shape else whole(shape)
            if part.numel():
                pieces.append(Piece(self.files.source(path), 7, contiguous_strides(tuple(part.shape)), box))
            start += part.shape[axis] if shape else 0
        self.tensors[name] = Tensor(name, code, shape, tuple(pieces))
        self.expected[name] = values


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sources]:
    """Whole rows (copied), columns (assembled), other dtypes, an empty tensor and a scalar; the work comes in many small steps."""
    monkeypatch.setattr(planning, "COPY_STEP", 100_000)
    monkeypatch.setattr(planning, "TILE", 30_000)
    monkeypatch.setattr(planning, "WORTH_COPYING", 50_000)
    folder = tmp_path / "sources"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    with Files() as files:
        made = Sources(folder, files)
        made.add("rows", torch.randn(600, 256, generator=generator), parts=3)
        made.add("columns", torch.randn(128, 300, generator=generator), axis=1, parts=4)
        made.add("brain", torch.randn(500, 100, generator=generator).bfloat16(), parts=2)
        made.add("mask", torch.randn(999, generator=generator) > 0, parts=2)
        made.add("ids", torch.arange(20_000).reshape(100, 200), parts=2)
        made.add("none", torch.empty(0, 4))
        made.add("scalar", torch.tensor(3.25, dtype=torch.float64))
        yield made


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write(
    sources: Sources,
    target: Path,
    *,
    dtype: str = "keep",
    jobs: int | None = None,
    progress: Progress | None = None,
    allow_overflow: bool = False,
    side_files: dict[str, bytes | Path] | None = None,
    last_file: Callable[[Written], tuple[str, bytes]] | None = None,
) -> Written:
    with Staging(target) as staging:
        written = execute(
            make_plan(sources.tensors, dtype=dtype),
            staging,
            side_files or {},
            jobs=jobs,
            approve=None if allow_overflow else refuse_overflows,
            progress=progress,
            last_file=last_file,
        )
        staging.publish(replace=False)
    return written


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def assert_nothing_written(folder: Path, target: Path) -> None:
    assert not target.exists()
    assert [path.name for path in folder.iterdir() if MARK in path.name] == []


class TestTheBytes:
    def test_are_those_of_the_sources(self, sources: Sources, tmp_path: Path) -> None:
        written = write(sources, tmp_path / "out")
        assert_same(load_file(tmp_path / "out" / "model.safetensors"), sources.expected)
        assert written.files == {"model.safetensors": (tmp_path / "out" / "model.safetensors").stat().st_size}
        assert (written.overflows, written.non_finite) == ({}, {})

    @pytest.mark.parametrize(("dtype", "cast"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)])
    def test_are_cast_where_they_are_floats(self, sources: Sources, tmp_path: Path, dtype: str, cast: torch.dtype) -> None:
        write(sources, tmp_path / "out", dtype=dtype)
        expected = {name: value.to(cast) if value.is_floating_point() else value for name, value in sources.expected.items()}
        assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)

    @pytest.mark.parametrize("dtype", ["keep", "bf16"])
    def test_do_not_depend_on_the_number_of_workers(self, sources: Sources, tmp_path: Path, dtype: str) -> None:
        contents = set()
        for jobs in (1, 2, 8):
            write(sources, tmp_path / f"out{jobs}", dtype=dtype, jobs=jobs)
            contents.add((tmp_path / f"out{jobs}" / "model.safetensors").read_bytes())
        assert len(contents) == 1

    def test_are_all_reported_to_the_progress(self, sources: Sources, tmp_path: Path) -> None:
        class Counting(Silent):
            total = done = finished = 0

            def start(self, total_bytes: int, label: str) -> None:
                self.total = total_bytes

            def advance(self, count: int, label: str) -> None:
                assert label == "model.safetensors"
                self.done += count

            def finish(self) -> None:
                self.finished += 1

        progress = Counting()
        write(sources, tmp_path / "out", progress=progress, jobs=1)
        assert progress.total == progress.done == sum(len(raw(value)) for value in sources.expected.values())
        assert progress.finished == 1


Copy = Callable[..., int]


class TestWithoutCopyFileRange:
    """The fast way is one that file systems, containers and macOS may lack, at any moment."""

    @pytest.fixture(params=["as it is", "missing", "refused", "short", "nothing", "refused later"])
    def way(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        real: Copy | None = getattr(os, "copy_file_range", None)
        calls = 0

        def refused(*_: int) -> int:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        def short(origin: int, target: int, count: int, *offsets: int) -> int:
            return real(origin, target, min(count, 1 + count // 3), *offsets) if real else 0

        def later(origin: int, target: int, count: int, *offsets: int) -> int:
            nonlocal calls
            calls += 1
            return short(origin, target, count, *offsets) if calls % 3 else refused()

        if request.param == "missing":
            monkeypatch.delattr(os, "copy_file_range", raising=False)
        elif request.param != "as it is":
            way = {"refused": refused, "short": short, "nothing": lambda *_: 0, "refused later": later}[request.param]
            monkeypatch.setattr(os, "copy_file_range", way, raising=False)
        return str(request.param)

    @pytest.mark.parametrize("jobs", [1, 3])
    def test_the_bytes_are_the_same(self, way: str, jobs: int, sources: Sources, tmp_path: Path) -> None:
        write(sources, tmp_path / "out", jobs=jobs)
        assert_same(load_file(tmp_path / "out" / "model.safetensors"), sources.expected)

    @pytest.mark.parametrize("number", sorted(CANNOT_COPY))
    def test_every_error_that_means_it_cannot_falls_back(
        self, number: int, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: int) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "copy_file_range", fail, raising=False)
        write(sources, tmp_path / "out")
        assert_same(load_file(tmp_path / "out" / "model.safetensors"), sources.expected)

    def test_a_full_disk_is_no_reason_to_try_again(self, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "copy_file_range", fail, raising=False)
        with pytest.raises(NoSpace):
            write(sources, tmp_path / "out")
        assert_nothing_written(tmp_path, tmp_path / "out")


class TestModes:
    @pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002])
    def test_follow_the_umask(self, mask: int, tmp_path: Path) -> None:
        run = tmp_path / "run"
        run.mkdir()
        torch.save({"a": torch.ones(300), "b": torch.ones(300)}, run / SHARD)
        (run / "config.json").write_text('{"model_type": "own"}')
        # The mode of a source says nothing about the output: shards are often private to the trainer.
        (run / "config.json").chmod(0o600)
        (run / SHARD).chmod(0o600)
        before = os.umask(mask)
        try:
            merge(run, tmp_path / "out", max_shard_size=1200)
        finally:
            os.umask(before)
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
        assert modes == dict.fromkeys(
            [
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
                "config.json",
                "ckpt-manifest.json",
            ],
            0o666 & ~mask,
        )
        assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def rewrite(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(b"\x01" * size)
    os.utime(path, ns=(2, 2))


def shorten(path: Path) -> None:
    os.truncate(path, 8)


def substitute(path: Path) -> None:
    status = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def remove(path: Path) -> None:
    path.unlink()


class TestSourcesThatChange:
    @pytest.mark.parametrize("change", [touch, rewrite, substitute, remove])
    @pytest.mark.parametrize("moment", ["start", "finish"])
    def test_are_noticed_and_nothing_is_published(
        self, change: Callable[[Path], None], moment: str, sources: Sources, tmp_path: Path
    ) -> None:
        victim = tmp_path / "sources" / "rows.1.bin"
        with pytest.raises(SourceChanged) as caught:
            write(sources, tmp_path / "out", progress=At(moment, lambda: change(victim)))
        assert caught.value.path == str(victim)
        assert_nothing_written(tmp_path, tmp_path / "out")

    @pytest.mark.parametrize("name", ["rows.1.bin", "columns.2.bin"])
    @pytest.mark.parametrize("moment", ["start", "finish"])
    def test_a_file_that_gets_shorter_is_refused_by_name(self, name: str, moment: str, sources: Sources, tmp_path: Path) -> None:
        victim = tmp_path / "sources" / name
        with pytest.raises((SourceChanged, CorruptFile)) as caught:
            write(sources, tmp_path / "out", progress=At(moment, lambda: shorten(victim)))
        assert caught.value.path == str(victim)
        assert_nothing_written(tmp_path, tmp_path / "out")

    def test_are_noticed_with_few_descriptors_too(self, sources: Sources, tmp_path: Path) -> None:
        victim = tmp_path / "sources" / "ids.1.bin"
        with Files(limit=1) as few:
            for path in sorted((tmp_path / "sources").iterdir()):
                few.source(path)
            poor = Sources(tmp_path / "sources", few)
            poor.tensors = {
                name: Tensor(
                    name,
                    tensor.dtype,
                    tensor.shape,
                    tuple(Piece(few.source(p.source.identity.path), p.offset, p.strides, p.box) for p in tensor.pieces),
                )
                for name, tensor in sources.tensors.items()
            }
            write(poor, tmp_path / "first")
            assert_same(load_file(tmp_path / "first" / "model.safetensors"), sources.expected)
            with pytest.raises(SourceChanged):
                write(poor, tmp_path / "out", progress=At("start", lambda: substitute(victim)))
        assert_nothing_written(tmp_path, tmp_path / "out")


class At(Silent):
    """Calls something at one moment of a run."""

    def __init__(self, moment: str, action: Callable[[], None]) -> None:
        self.moment = moment
        self.action = action

    def start(self, total_bytes: int, label: str) -> None:
        if self.moment == "start":
            self.action()

    def finish(self) -> None:
        if self.moment == "finish":
            self.action()


class TestOverflow:
    @pytest.fixture
    def large(self, sources: Sources) -> Sources:
        values = torch.tensor([1.0, 65504.0, 1e5, -1e6, math.inf, math.nan] * 9000)
        sources.add("large", values, parts=2)
        return sources

    def test_is_refused_and_counted(self, large: Sources, tmp_path: Path) -> None:
        with pytest.raises(CastOverflow) as caught:
            write(large, tmp_path / "out", dtype="fp16")
        assert caught.value.tensor == "large"
        assert "18,000 finite values in 1 tensor" in caught.value.message
        assert_nothing_written(tmp_path, tmp_path / "out")

    def test_is_written_if_that_is_allowed(self, large: Sources, tmp_path: Path) -> None:
        written = write(large, tmp_path / "out", dtype="fp16", allow_overflow=True, jobs=4)
        assert written.overflows == {"large": 18_000}
        found = load_file(tmp_path / "out" / "model.safetensors")["large"][:6].tolist()
        assert found[:5] == [1.0, 65504.0, math.inf, -math.inf, math.inf]
        assert math.isnan(found[5])

    def test_is_none_where_the_range_is_large_enough(self, large: Sources, tmp_path: Path) -> None:
        assert write(large, tmp_path / "out", dtype="bf16").overflows == {}

    def test_of_the_largest_float32_in_bfloat16_is_refused_as_well(self, sources: Sources, tmp_path: Path) -> None:
        sources.add("large", torch.tensor([torch.finfo(torch.float32).max, 1.0]))
        with pytest.raises(CastOverflow):
            write(sources, tmp_path / "out", dtype="bf16")
        assert_nothing_written(tmp_path, tmp_path / "out")


class TestErrorsInWorkers:
    @pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("jobs", [1, 4])
    def test_end_the_run_and_every_worker(self, kind: type[BaseException], jobs: int, sources: Sources, tmp_path: Path) -> None:
        class Failing(Silent):
            calls = finished = 0

            def advance(self, count: int, label: str) -> None:
                self.calls += 1
                raise kind("from a worker")

            def finish(self) -> None:
                self.finished += 1

        progress = Failing()
        with pytest.raises(kind, match="from a worker"):
            write(sources, tmp_path / "out", jobs=jobs, progress=progress)
        assert progress.calls <= jobs
        assert progress.finished == 1
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ckpt")] == []
        assert_nothing_written(tmp_path, tmp_path / "out")

    def test_of_reading_name_the_file_or_the_tensor(self, sources: Sources, tmp_path: Path) -> None:
        os.truncate(tmp_path / "sources" / "columns.0.bin", 100)
        with pytest.raises(InputError) as caught:
            write(sources, tmp_path / "out", jobs=8)
        assert caught.value.path == str(tmp_path / "sources" / "columns.0.bin")
        assert caught.value.tensor == "columns"


class TestDisksThatFail:
    @pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, NotWritable)])
    @pytest.mark.parametrize("after", [0, 1, 5])
    def test_leave_nothing(
        self, number: int, kind: type[CkptError], after: int, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, calls = os.pwrite, 0

        def fail(fd: int, data: memoryview, offset: int) -> int:
            nonlocal calls
            calls += 1
            if calls > after:
                raise OSError(number, os.strerror(number))
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", fail)
        with pytest.raises(kind) as caught:
            write(sources, tmp_path / "out")
        assert caught.value.path == str(tmp_path / "out")
        assert caught.value.exit_code == 5
        assert_nothing_written(tmp_path, tmp_path / "out")

    def test_writes_that_are_cut_short_are_continued(self, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[: 1 + len(data) // 2], offset))
        write(sources, tmp_path / "out", dtype="bf16")
        expected = {name: v.bfloat16() if v.is_floating_point() else v for name, v in sources.expected.items()}
        assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)

    def test_a_limit_on_file_sizes_is_an_output_error_that_leaves_nothing(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        run.mkdir()
        torch.save({"a": torch.ones(100_000)}, run / SHARD)
        script = (
            "import resource, sys, ckpt_cli\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
            "try: ckpt_cli.merge(sys.argv[1], sys.argv[2])\n"
            "except ckpt_cli.CkptError as error: print(error.code, error.hint); sys.exit(error.exit_code)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, run, tmp_path / "deep" / "er" / "out"],
            capture_output=True,
            text=True,
            cwd=Path(ckpt_cli.__file__).parents[1],
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (5, "")
        assert done.stdout.startswith("no-space ")
        # Not even the folders that had to be made for it.
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


class TestFilesBesideTheWeights:
    def test_are_written_from_memory_or_copied(self, sources: Sources, tmp_path: Path) -> None:
        tokenizer = tmp_path / "tokenizer.json"
        tokenizer.write_bytes(os.urandom(3_000_000))
        write(sources, tmp_path / "out", side_files={"config.json": b"{}\n", "tokenizer.json": tokenizer, "empty": b""})
        assert (tmp_path / "out" / "config.json").read_bytes() == b"{}\n"
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
        assert (tmp_path / "out" / "empty").read_bytes() == b""

    def test_the_last_one_is_made_from_what_was_written(self, sources: Sources, tmp_path: Path) -> None:
        def last_file(written: Written) -> tuple[str, bytes]:
            return "manifest.json", json.dumps(written.files).encode()

        write(sources, tmp_path / "out", last_file=last_file)
        listed = json.loads((tmp_path / "out" / "manifest.json").read_text())
        assert listed == {"model.safetensors": (tmp_path / "out" / "model.safetensors").stat().st_size}

    def test_never_replace_anything(self, tmp_path: Path) -> None:
        write_bytes(tmp_path / "x", b"first")
        with pytest.raises(FileExistsError):
            write_bytes(tmp_path / "x", b"second")
        assert (tmp_path / "x").read_bytes() == b"first"

    def test_one_that_vanished_is_an_input_error(self, sources: Sources, tmp_path: Path) -> None:
        with pytest.raises(InputError):
            write(sources, tmp_path / "out", side_files={"config.json": tmp_path / "gone.json"})
        assert_nothing_written(tmp_path, tmp_path / "out")


class TestMemory:
    def test_is_bounded_by_the_buffers_and_not_by_the_tensor(self, tmp_path: Path) -> None:
        import tracemalloc

        with Files() as files:
            big = Sources(tmp_path, files)
            big.add("w", torch.zeros(2048, 8192), axis=1, parts=2)
            plan = make_plan(big.tensors, dtype="bf16")
            with Staging(tmp_path / "out") as staging:
                tracemalloc.start()
                execute(plan, staging, {}, jobs=2)
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
        assert plan.bytes_read == 64 << 20
        assert peak < 2 * 4 * planning.TILE

    def test_jobs_default_to_a_few(self) -> None:
        assert 2 <= default_jobs() <= 8


def test_numpy_reads_what_was_written_at_its_offsets(sources: Sources, tmp_path: Path) -> None:
    write(sources, tmp_path / "out")
    plan = make_plan(sources.tensors)
    content = np.memmap(tmp_path / "out" / "model.safetensors", mode="r")
    for output in plan.tensors:
        assert content[output.offset : output.offset + output.nbytes].tobytes() == raw(sources.expected[output.name])
