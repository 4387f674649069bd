"""An interrupted run goes on: files that are finished are kept, if every byte of them is still right, and all else is written again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CastOverflow, CkptError, NoSpace, NotWritable, OutputExists
from ckpt_cli.output import target as placing
from ckpt_cli.output.interrupted.place import MARK, place_of
from ckpt_cli.output.sinks import files as sinks
from ckpt_cli.progress import Silent
from tests.cli import ROOT, ckpt

SIZE = "1.5MB"
FILES = 3
"""One for each of three large tensors."""


def save(folder: Path, kind: str, factor: float = 1.0) -> Path:
    """A checkpoint of tensors that the system copies by itself (hub), whose CRC-32 is known (torch), or that are cast."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(7)
    tensors = {f"layers.{i}.weight": torch.randn(600, 600, generator=random) * factor for i in range(3)} | {"norm": torch.ones(33)}
    if kind == "hub":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / "model_world_size_1_rank_0.pt")
    (folder / "config.json").write_text(json.dumps({"model_type": "own"}))
    return folder


class Interrupting(Silent):
    """Ends a run when so many bytes are done."""

    def __init__(self, after: int, error: BaseException) -> None:
        self.left, self.error = after, error

    def advance(self, count: int, label: str) -> None:
        self.left -= count
        if self.left < 0:
            raise self.error


class Counting(Silent):
    """Which files a run writes."""

    def __init__(self) -> None:
        self.flushed = 0

    def flushing(self) -> None:
        self.flushed += 1


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def finished(target: Path) -> list[Path]:
    """The finished files that wait for the next run."""
    receipts = sorted(place_of(target).glob("*.receipts/*"))
    return [receipt.parent.with_suffix("") / receipt.name for receipt in receipts]


OPTIONS: dict[str, dict[str, Any]] = {
    "hub": {},
    "torch": {},
    "cast": {"dtype": "bf16"},
    "checksum": {"checksum": True},
    "sequential": {"write": "sequential"},
    "sequential, checksum": {"write": "sequential", "checksum": True, "jobs": 1},
}


@pytest.fixture(params=OPTIONS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"max_shard_size": "0.8MB" if request.param == "cast" else SIZE, "jobs": 2, **OPTIONS[request.param]}


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind = request.node.callspec.params.get("options", "hub") if hasattr(request.node, "callspec") else "hub"
    return save(tmp_path / "run", "torch" if kind in ("torch", "cast") else "hub")


PLAIN: dict[str, Any] = {"max_shard_size": SIZE, "jobs": 1}


@pytest.fixture
def stopped(run: Path, tmp_path: Path) -> Path:
    """An output that was interrupted when two of its files were finished."""
    with pytest.raises(KeyboardInterrupt):
        ckpt_cli.merge(run, tmp_path / "out", progress=Interrupting(3_000_000, KeyboardInterrupt()), **PLAIN)
    assert len(finished(tmp_path / "out")) == 2
    return tmp_path / "out"


def again(run: Path, target: Path, **options: Any) -> tuple[Any, int]:
    """The result of the run that goes on, and how many files it wrote."""
    counting = Counting()
    result = ckpt_cli.merge(run, target, progress=counting, **{**PLAIN, **options})
    assert [path for path in target.parent.iterdir() if MARK in path.name] == []
    return result, counting.flushed


def expected(run: Path, target: Path, **options: Any) -> dict[str, bytes]:
    """What a run writes that is never interrupted."""
    ckpt_cli.merge(run, target.with_name("expected"), **{**PLAIN, **options})
    return content(target.with_name("expected"))


class TestGoingOn:
    @pytest.mark.parametrize("after", [500_000, 1_600_000, 3_000_000, 4_320_000])
    def test_gives_the_same_bytes(self, after: int, options: dict[str, Any], run: Path, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            ckpt_cli.merge(run, tmp_path / "out", progress=Interrupting(after, KeyboardInterrupt()), **options)
        assert not (tmp_path / "out").exists()
        kept = len(finished(tmp_path / "out"))
        result, wrote = again(run, tmp_path / "out", **options)
        assert content(tmp_path / "out") == expected(run, tmp_path / "out", **options)
        if "write" not in options:
            assert wrote == len(result.outputs[0].files) - 1 - kept
        said = [note.text for note in result.outputs[0].notes if note.code == "resumed"]
        assert said == ([f"{kept} of {FILES} files from the interrupted run, read and compared"] if kept else [])

    def test_is_said_on_the_screen_and_while_it_takes_long(self, run: Path, stopped: Path) -> None:
        outcome = ckpt("merge", run, "-o", stopped, "--max-shard-size", SIZE, "--jobs", "1")
        assert re.search(r"^kept +2 of 3 files from the interrupted run, read and compared$", outcome.out, re.MULTILINE)

        said: set[str] = set()

        class Told(Silent):
            def waiting(self, what: str) -> None:
                said.add(what)

        with pytest.raises(KeyboardInterrupt):
            ckpt_cli.merge(run, stopped, overwrite=True, progress=Interrupting(3_000_000, KeyboardInterrupt()), **PLAIN)
        ckpt_cli.merge(run, stopped, overwrite=True, progress=Told(), **PLAIN)
        assert "comparing kept files" in said

    def test_of_averages_and_overflows(self, tmp_path: Path) -> None:
        runs = [save(tmp_path / "a", "hub", 1e5), save(tmp_path / "b", "hub", 2e5)]
        options = {"dtype": "fp16", "allow_overflow": True, "max_shard_size": "0.8MB", "jobs": 1}
        whole = ckpt_cli.average(runs, tmp_path / "expected", **options)
        with pytest.raises(KeyboardInterrupt):
            ckpt_cli.average(runs, tmp_path / "out", progress=Interrupting(6_000_000, KeyboardInterrupt()), **options)
        assert len(finished(tmp_path / "out")) == 2
        result = ckpt_cli.average(runs, tmp_path / "out", **options)
        assert content(tmp_path / "out") == content(tmp_path / "expected")
        assert result.outputs[0].overflows == whole.outputs[0].overflows
        assert len(whole.outputs[0].overflows) == 3

    def test_of_several_components(self, tmp_path: Path) -> None:
        for role in ("actor", "critic"):
            save(tmp_path / "run" / "global_step_1" / role, "torch")
        with pytest.raises(KeyboardInterrupt):
            ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="all", progress=Interrupting(5_000_000, KeyboardInterrupt()))
        assert len(finished(tmp_path / "out" / "actor")) == 1
        counting = Counting()
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="all", progress=counting)
        assert counting.flushed == 1
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["actor", "critic"]

    @pytest.mark.parametrize("own", [False, True], ids=["all published", "a file of its own"])
    def test_in_place_and_killed_once_all_is_there(self, own: bool, run: Path) -> None:
        """No later run will have this place, so whoever finds the output removes what is left; but nothing that has no other name."""
        before = {path.name for path in run.iterdir()}
        ckpt_cli.merge(run / "model.safetensors", in_place=True, weights_name="new.safetensors", **PLAIN)
        left = place_of(run) / "key"
        left.mkdir(parents=True)
        for path in run.iterdir():
            if path.name not in before and path.suffix == ".safetensors":
                os.link(path, left / path.name)
        if own:
            (left / "finished").write_bytes(b"1")
        here = {path.name: path.read_bytes() for path in run.iterdir()}
        with pytest.raises(OutputExists):
            ckpt_cli.merge(run / "model.safetensors", in_place=True, weights_name="new.safetensors", **PLAIN)
        assert left.exists() is own
        assert {path.name: path.read_bytes() for path in run.iterdir()} == here

    def test_a_run_whose_place_was_removed_leaves_that_of_another_alone(self, run: Path, tmp_path: Path) -> None:
        root = place_of(tmp_path / "out")

        class Removing(Silent):
            def flushing(self) -> None:
                if not (root / "another").exists():
                    shutil.rmtree(root)
                    (root / "another").mkdir(parents=True)

        with pytest.raises(NotWritable):
            ckpt_cli.merge(run, tmp_path / "out", progress=Removing(), **PLAIN)
        assert (root / "another").is_dir()
        assert not (tmp_path / "out").exists()

    def test_in_place(self, run: Path) -> None:
        interrupting = Interrupting(3_000_000, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            ckpt_cli.merge(run / "model.safetensors", in_place=True, weights_name="new.safetensors", progress=interrupting, **PLAIN)
        assert {path.name for path in run.iterdir()} == {"config.json", "model.safetensors"}
        assert len(finished(run)) == 2
        counting = Counting()
        ckpt_cli.merge(run / "model.safetensors", in_place=True, weights_name="new.safetensors", progress=counting, **PLAIN)
        assert counting.flushed == FILES - 2
        assert sum(path.name.startswith("new-") for path in run.iterdir()) == FILES


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda data: data[:50],
    lambda data: b"",
    lambda data: data.replace(b"1", b"2"),
    lambda data: b"\xff" * 99,
]


class TestWhatIsDoubtful:
    """...is written again."""

    @pytest.mark.parametrize("where", ["header", "middle", "end"])
    @pytest.mark.parametrize("number", [0, 1])
    def test_one_bit(self, where: str, number: int, stopped: Path, run: Path) -> None:
        file = finished(stopped)[number]
        status, data = file.stat(), bytearray(file.read_bytes())
        data[{"header": 30, "middle": len(data) // 2, "end": -1}[where]] ^= 4
        file.write_bytes(data)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        _, wrote = again(run, stopped)
        assert wrote == FILES - 1
        assert content(stopped) == expected(run, stopped)

    @pytest.mark.parametrize("kind", ["torch", "hub"])
    @pytest.mark.parametrize("what", ["shorter", "longer", "gone", "a link", "a folder"])
    def test_another_file(self, what: str, kind: str, tmp_path: Path) -> None:
        run, target = save(tmp_path / "run", kind), tmp_path / "out"
        with pytest.raises(KeyboardInterrupt):
            ckpt_cli.merge(run, target, progress=Interrupting(3_000_000, KeyboardInterrupt()), **PLAIN)
        file = finished(target)[1]
        data = file.read_bytes()
        file.unlink()
        if what in ("shorter", "longer"):
            file.write_bytes(data[:-1] if what == "shorter" else data + b"\0")
        elif what == "a link":
            (tmp_path / "elsewhere").write_bytes(data)
            file.symlink_to(tmp_path / "elsewhere")
        elif what == "a folder":
            file.mkdir()
        _, wrote = again(run, target)
        assert wrote == FILES - 1
        assert content(target) == expected(run, target)
        assert not any(path.is_symlink() for path in target.iterdir())

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_receipt(self, damage: Callable[[bytes], bytes], stopped: Path, run: Path) -> None:
        receipt = min(place_of(stopped).glob("*.receipts/*"))
        receipt.write_bytes(damage(receipt.read_bytes()))
        _, wrote = again(run, stopped)
        assert wrote == FILES - 1
        assert content(stopped) == expected(run, stopped)

    @pytest.mark.parametrize("keeps_mtime", [False, True])
    def test_sources_that_changed(self, keeps_mtime: bool, stopped: Path, run: Path, tmp_path: Path) -> None:
        source = run / "model.safetensors"
        status = source.stat()
        save(tmp_path / "other", "hub", 2.0)
        shutil.copyfile(tmp_path / "other" / "model.safetensors", source)
        if keeps_mtime:
            os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
        _, wrote = again(run, stopped)
        assert wrote == FILES
        assert content(stopped) == expected(run, stopped)

    @pytest.mark.parametrize("other", [{"dtype": "bf16"}, {"max_shard_size": "3MB"}, {"exclude": "norm"}, {"checksum": True}], ids=str)
    def test_another_plan(self, other: dict[str, Any], stopped: Path, run: Path) -> None:
        result, wrote = again(run, stopped, **other)
        assert wrote == sum(file.name.endswith(".safetensors") for file in result.outputs[0].files)
        assert content(stopped) == expected(run, stopped, **other)

    def test_files_that_nobody_finished(self, stopped: Path, run: Path) -> None:
        folder = finished(stopped)[0].parent
        (folder / "planted.safetensors").write_text("planted")
        (folder / "config.json").write_text("planted")
        (folder.parent / "planted").mkdir()
        again(run, stopped)
        assert content(stopped) == expected(run, stopped)


class TestErrors:
    def test_of_the_disk_say_how_to_go_on(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real, left = os.copy_file_range, [2]

        def full(*arguments: Any, **named: Any) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            return real(*arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(os, "copy_file_range", full)
            with pytest.raises(NoSpace) as caught:
                ckpt_cli.merge(run, tmp_path / "out", **PLAIN)
        assert (
            f"run the same command again to go on with the files that are finished, or give them up: rm -r {place_of(tmp_path / 'out')}"
            in (caught.value.hint or "")
        )
        _, wrote = again(run, tmp_path / "out")
        assert wrote == FILES - 2

    @pytest.mark.parametrize("error", [CastOverflow("x"), CkptError("x")], ids=lambda error: type(error).__name__)
    def test_that_the_same_command_meets_again_leave_nothing(self, error: CkptError, run: Path, tmp_path: Path) -> None:
        with pytest.raises(type(error)) as caught:
            ckpt_cli.merge(run, tmp_path / "out", progress=Interrupting(3_000_000, error), **PLAIN)
        assert caught.value.hint is None
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    def test_before_anything_is_finished_leave_nothing(self, run: Path, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            ckpt_cli.merge(run, tmp_path / "new" / "out", progress=Interrupting(100, KeyboardInterrupt()), **PLAIN)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    def test_of_an_output_of_one_file_leave_nothing(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real, calls = sinks.PositionedFile.finish, [0]

        def finish(file: sinks.PositionedFile) -> None:
            calls[0] += 1
            if calls[0] == 2:  # the one that comes after the weights
                raise OSError(28, "No space left on device")
            real(file)

        monkeypatch.setattr(sinks.PositionedFile, "finish", finish)
        with pytest.raises(NoSpace):
            ckpt_cli.merge(run, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


class TestRoom:
    def test_is_that_of_what_is_left_to_write(self, stopped: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2_000_000, "total": 1 << 40}))
        ckpt_cli.merge(run, stopped, dry_run=True, **PLAIN)
        assert len(finished(stopped)) == 2
        again(run, stopped)

    def test_without_it_there_is_not_enough(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2_000_000, "total": 1 << 40}))
        with pytest.raises(NoSpace):
            ckpt_cli.merge(run, tmp_path / "out", **PLAIN)


def test_of_one_file_nothing_is_kept_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped:
        def start(self, *_: object) -> None: ...
        def finish(self) -> None: ...
        def advance(self, *_: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("ckpt_cli.output.publish.WORTH_KEEPING", 1)
    with pytest.raises(KeyboardInterrupt) as caught:
        ckpt_cli.merge(ROOT / "examples" / "tiny-run", tmp_path / "out", progress=Stopped())
    left, told = caught.value.__notes__
    assert left == "no unfinished output is left"
    assert "--max-shard-size 1GB" in told
    assert list(tmp_path.iterdir()) == []


class TestProcesses:
    """The command line, stopped by signals of its own and of others."""

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_go_on(self, number: signal.Signals, run: Path, tmp_path: Path) -> None:
        target = tmp_path / "out"
        code = (
            "import sys, time; import ckpt_cli.tensors.parallel as p; from ckpt_cli.output.writer import _Workers; real = _Workers._copy\n"
            "def slow(self, *rest): time.sleep(0.4); real(self, *rest)\n"
            "_Workers._copy = slow; from ckpt_cli.cli import main; main(sys.argv[1:])"
        )
        command = ["merge", run, "-o", target, "--max-shard-size", SIZE, "--jobs", "1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([sys.executable, "-c", code, *command], env=environment, stderr=subprocess.PIPE, text=True)
        while len(finished(target)) < 2 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        assert not target.exists()
        if number != signal.SIGKILL:
            assert "finished files are kept" in said
            assert f"give them up: rm -r {place_of(target)}" in said
        _, wrote = again(run, target)
        assert wrote < FILES  # the newest receipt may have been on its way
        assert content(target) == expected(run, target)

    def test_in_place_files_that_were_linked_are_taken_back(self, run: Path) -> None:
        before = content(run)
        code = (
            "import os, signal, sys; seen = []\n"
            "def die(event, _):\n"
            "    if event != 'os.link': return\n"
            "    seen.append(event)\n"
            "    if len(seen) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
            "sys.addaudithook(die); from ckpt_cli.cli import main; main(sys.argv[1:])"
        )
        options = ["--in-place", "--weights-name", "new.safetensors", "--max-shard-size", SIZE]
        command = [sys.executable, "-c", code, "merge", run / "model.safetensors", *options]
        assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True).returncode == -signal.SIGKILL
        assert len(content(run)) == len(before) + 2
        assert ckpt("merge", run / "model.safetensors", *options, "--dry-run").code == 0
        assert ckpt("merge", run / "model.safetensors", *options).code == 0
        assert sum(path.name.startswith("new-") for path in run.iterdir()) == FILES
        assert before.items() <= content(run).items()
        assert [path for path in run.parent.iterdir() if MARK in path.name] == []
        # What is whole is not taken back.
        whole = content(run)
        assert ckpt("merge", run / "model.safetensors", *options).code == 5
        assert content(run) == whole
