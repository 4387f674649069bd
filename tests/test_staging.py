"""An output appears whole or not at all: after kill -9, beside other runs, and in place of an older one."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_cli
from ckpt_cli import merge
from ckpt_cli.errors import CastOverflow, NotWritable, OutputExists, OutputInUse
from ckpt_cli.output import staging
from ckpt_cli.output.interrupted import place
from ckpt_cli.output.interrupted.place import MARK, remove_leftovers
from ckpt_cli.output.staging import Staging
from ckpt_cli.progress import Silent

CHILD = """
import os, signal, sys, time
from pathlib import Path
import ckpt_cli.commands.merge, numpy, ml_dtypes
from ckpt_cli.progress import Silent
from ckpt_cli.output.interrupted import place
from ckpt_cli.output.interrupted.place import MARK

source, target, go, overwrite, pause, step = sys.argv[1:]

class Slow(Silent):
    def advance(self, count, label):
        time.sleep(float(pause))

EVENTS = {"os.mkdir", "os.truncate", "os.rename", "os.remove", "os.rmdir", "os.link", "open", "shutil.rmtree", "ctypes.dlsym"}
seen = 0

def die_at_step(event, args):
    global seen
    if event in EVENTS and (seen or (event == "os.mkdir" and MARK in str(args[0]))):
        seen += 1
        if seen == int(step):
            os.kill(os.getpid(), signal.SIGKILL)

if step != "0":
    sys.addaudithook(die_at_step)
print("ready", flush=True)
while go and not Path(go).exists():
    time.sleep(0.0005)
try:
    ckpt_cli.commands.merge.merge(source, target, jobs=2, progress=Slow(), overwrite=bool(overwrite))
except ckpt_cli.CkptError as error:
    print(error.code)
    sys.exit(error.exit_code)
"""
TENSORS = 60


def save_checkpoint(folder: Path, value: float) -> dict[str, torch.Tensor]:
    folder.mkdir()
    state = {f"layers.{i}.weight": torch.full((64, 64), value + i) for i in range(TENSORS)}
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    return state


def child(
    source: Path, target: Path, *, go: Path | None = None, overwrite: bool = False, pause: float = 0.002, step: int = 0
) -> subprocess.Popen[str]:
    """A run in a process of its own that sleeps between tensors, and kills itself at file operation number ``step``."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, source, target, str(go or ""), "yes" if overwrite else "", str(pause), str(step)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(ckpt_cli.__file__).parents[1],
    )


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if MARK in path.name)


def holds(target: Path, state: dict[str, torch.Tensor]) -> bool:
    """Whether the output is complete: manifest, and every tensor with its values."""
    manifest = json.loads((target / "ckpt-manifest.json").read_text())
    assert {path.name for path in target.iterdir()} == {"ckpt-manifest.json", "model.safetensors"}
    assert manifest["outputs"]["model.safetensors"] == (target / "model.safetensors").stat().st_size
    found = load_file(target / "model.safetensors")
    return found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def kill_during(process: subprocess.Popen[str], folder: Path, delay: float) -> None:
    """SIGKILL, ``delay`` seconds after the temporary folder appeared."""
    while not leftovers(folder) and process.poll() is None:
        time.sleep(0.0002)
    time.sleep(delay)
    process.kill()
    process.communicate()


class Bystander(Silent):
    """Looks at the world at every step of a run."""

    def __init__(self, look: Callable[[str], None]) -> None:
        self.look = look

    def start(self, total_bytes: int, label: str) -> None:
        self.look("start")

    def advance(self, count: int, label: str) -> None:
        self.look("advance")

    def finish(self) -> None:
        self.look("finish")


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems that have none."""

    def refuse(folder: Path, *, shared: bool = False) -> int:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(place, "_lock", refuse)


class TestKilledRuns:
    # About 60 steps of 2 ms by two workers, then syncing and renaming: the delays reach from the first byte past the end.
    @pytest.mark.parametrize("delay", [0.01, 0.03, 0.05, 0.06, 0.065, 0.07, 0.08])
    def test_leave_no_output_or_a_complete_one(self, delay: float, tmp_path: Path) -> None:
        state = save_checkpoint(tmp_path / "run", 1.0)
        target = tmp_path / "out"
        kill_during(child(tmp_path / "run", target), tmp_path, delay)
        assert not target.exists() or holds(target, state)
        merge(tmp_path / "run", target, overwrite=True)
        assert holds(target, state)
        assert leftovers(tmp_path) == []

    def test_in_the_middle_leave_only_what_the_next_run_removes(self, tmp_path: Path) -> None:
        state = save_checkpoint(tmp_path / "run", 1.0)
        target = tmp_path / "out"
        kill_during(child(tmp_path / "run", target, pause=0.1), tmp_path, 0.1)
        assert not target.exists()
        assert len(leftovers(tmp_path)) == 1
        merge(tmp_path / "run", target)
        assert holds(target, state)
        assert leftovers(tmp_path) == []

    @pytest.mark.parametrize("step", range(1, 15))
    def test_at_any_file_operation_leave_the_old_output_or_the_new_one(self, step: int, tmp_path: Path) -> None:
        old = save_checkpoint(tmp_path / "old", 1.0)
        new = save_checkpoint(tmp_path / "new", 2.0)
        target = tmp_path / "out"
        merge(tmp_path / "old", target)
        process = child(tmp_path / "new", target, overwrite=True, pause=0, step=step)
        process.communicate(timeout=60)
        assert process.returncode in (-signal.SIGKILL, 0)  # 0: there are fewer operations than that
        assert holds(target, old) or holds(target, new)
        merge(tmp_path / "new", target, overwrite=True)
        assert holds(target, new)
        assert leftovers(tmp_path) == []


class TestRunsAtTheSameTime:
    @pytest.mark.parametrize("attempt", range(4))
    def test_exactly_one_of_two_wins_and_the_other_is_told(self, attempt: int, tmp_path: Path) -> None:
        states = [save_checkpoint(tmp_path / name, value) for name, value in (("a", 1.0), ("b", 2.0))]
        target, go = tmp_path / "out", tmp_path / "go"
        children = [child(tmp_path / name, target, go=go) for name in ("a", "b")]
        for process in children:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        go.touch()
        said = [process.communicate(timeout=60)[0] for process in children]
        codes = [process.returncode for process in children]
        assert sorted(codes) == [0, 5]
        # It meets the other at its start, or what it has written by then.
        assert said[codes.index(5)] in ("output-in-use\n", "output-exists\n")
        assert holds(target, states[codes.index(0)])
        assert leftovers(tmp_path) == []

    @pytest.mark.parametrize("options", [{}, {"dry_run": True}, {"overwrite": True}], ids=str)
    def test_the_second_is_told_at_its_start_who_writes(self, options: dict[str, Any], tmp_path: Path) -> None:
        state = save_checkpoint(tmp_path / "run", 1.0)
        save_checkpoint(tmp_path / "other", 2.0)
        errors: list[OutputInUse] = []

        def begin(now: str) -> None:
            if now == "start":
                with pytest.raises(OutputInUse) as caught:
                    merge(tmp_path / "other", tmp_path / "out", **options)
                errors.append(caught.value)

        merge(tmp_path / "run", tmp_path / "out", progress=Bystander(begin))
        assert holds(tmp_path / "out", state)
        assert leftovers(tmp_path) == []
        assert f"process {os.getpid()}, since 20" in errors[0].message
        assert errors[0].path == str(tmp_path / "out")

    @pytest.mark.usefixtures("without_locks")
    @pytest.mark.parametrize("moment", ["start", "finish"])
    def test_the_slower_one_does_not_replace_what_the_faster_one_wrote(self, moment: str, tmp_path: Path) -> None:
        save_checkpoint(tmp_path / "slow", 1.0)
        fast = save_checkpoint(tmp_path / "fast", 2.0)

        def overtake(now: str) -> None:
            if now == moment:
                merge(tmp_path / "fast", tmp_path / "out")

        with pytest.raises(OutputExists):
            merge(tmp_path / "slow", tmp_path / "out", progress=Bystander(overtake))
        assert holds(tmp_path / "out", fast)
        assert leftovers(tmp_path) == []

    def test_a_folder_that_the_user_makes_meanwhile_is_not_replaced(self, tmp_path: Path) -> None:
        save_checkpoint(tmp_path / "run", 1.0)
        target = tmp_path / "out"

        def interfere(now: str) -> None:
            if now == "finish":
                target.mkdir()
                (target / "thesis.tex").write_text("precious")

        with pytest.raises(OutputExists):
            merge(tmp_path / "run", target, progress=Bystander(interfere))
        assert (target / "thesis.tex").read_text() == "precious"
        assert leftovers(tmp_path) == []

    def test_an_empty_folder_that_the_user_fills_meanwhile_is_not_replaced(self, tmp_path: Path) -> None:
        save_checkpoint(tmp_path / "run", 1.0)
        target = tmp_path / "out"
        target.mkdir()
        with pytest.raises(OutputExists):
            merge(tmp_path / "run", target, progress=Bystander(lambda _: (target / "thesis.tex").touch()))
        assert [path.name for path in target.iterdir()] == ["thesis.tex"]
        assert leftovers(tmp_path) == []

    def test_a_fresh_folder_is_not_taken_for_a_left_over_before_it_is_locked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target, lock = tmp_path / "out", place._lock

        def late(folder: Path, *, shared: bool = False) -> int:
            monkeypatch.setattr(place, "_lock", lock)
            remove_leftovers(target)  # what another run does first
            return lock(folder)

        monkeypatch.setattr(place, "_lock", late)
        with Staging(target) as stage:
            assert stage.folder.is_dir()
            assert remove_leftovers(target) == []
            assert stage.folder.is_dir()


class TestReplacing:
    def test_keeps_the_old_output_until_the_new_one_is_complete(self, tmp_path: Path) -> None:
        old = save_checkpoint(tmp_path / "old", 1.0)
        new = save_checkpoint(tmp_path / "new", 2.0)
        target = tmp_path / "out"
        merge(tmp_path / "old", target)
        seen = []

        def look(now: str) -> None:
            if now != "advance":
                seen.append(holds(target, old))

        merge(tmp_path / "new", target, overwrite=True, progress=Bystander(look))
        assert seen == [True, True]
        assert holds(target, new)
        assert leftovers(tmp_path) == []

    def test_keeps_the_old_output_if_the_new_one_fails(self, tmp_path: Path) -> None:
        old = save_checkpoint(tmp_path / "old", 1.0)
        save_checkpoint(tmp_path / "new", 1e9)
        merge(tmp_path / "old", tmp_path / "out")
        with pytest.raises(CastOverflow):
            merge(tmp_path / "new", tmp_path / "out", overwrite=True, dtype="fp16")
        assert holds(tmp_path / "out", old)
        assert leftovers(tmp_path) == []

    def test_an_empty_folder_may_always_be_filled(self, tmp_path: Path) -> None:
        state = save_checkpoint(tmp_path / "run", 1.0)
        (tmp_path / "out").mkdir()
        merge(tmp_path / "run", tmp_path / "out")
        assert holds(tmp_path / "out", state)


@pytest.fixture(params=["renameat2", "rename"])
def renaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With what Linux has, and with what every other system has."""
    if request.param == "rename":
        monkeypatch.setattr(staging, "_renameat2", lambda *_: False)
    return str(request.param)


@pytest.mark.usefixtures("renaming")
class TestPublish:
    def test_gives_the_folder_its_name(self, tmp_path: Path) -> None:
        with Staging(tmp_path / "out") as stage:
            (stage.folder / "a").write_text("new")
            assert not (tmp_path / "out").exists()
            stage.publish(replace=False)
        assert (tmp_path / "out" / "a").read_text() == "new"
        assert leftovers(tmp_path) == []

    def test_without_it_nothing_remains(self, tmp_path: Path) -> None:
        with Staging(tmp_path / "out") as stage:
            (stage.folder / "a").write_text("new")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("what", ["folder", "file", "link", "dangling link"])
    def test_replaces_nothing_unasked(self, what: str, tmp_path: Path) -> None:
        target = tmp_path / "out"
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "b").write_text("old")
        if what == "folder":
            target.mkdir()
            (target / "b").write_text("old")
        elif what == "file":
            target.write_text("old")
        else:
            target.symlink_to(tmp_path / "elsewhere" if what == "link" else tmp_path / "nowhere")
        before = sorted(str(path) for path in tmp_path.rglob("*"))
        with Staging(target) as stage:
            (stage.folder / "a").write_text("new")
            with pytest.raises(OutputExists):
                stage.publish(replace=False)
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before

    def test_swaps_an_old_folder_out(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "b").write_text("old")
        with Staging(tmp_path / "out") as stage:
            (stage.folder / "a").write_text("new")
            assert (tmp_path / "out" / "b").read_text() == "old"
            stage.publish(replace=True)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
        assert leftovers(tmp_path) == []


class TestSwappingWithoutExchange:
    def test_puts_the_old_folder_back_if_the_new_one_cannot_take_its_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "b").write_text("old")
        monkeypatch.setattr(staging, "_renameat2", lambda *_: False)
        real, calls = os.rename, 0

        def fail(old: Path, new: Path) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise OSError(errno.EIO, "Input/output error")
            real(old, new)

        with Staging(tmp_path / "out") as stage:
            (stage.folder / "a").write_text("new")
            monkeypatch.setattr(os, "rename", fail)
            with pytest.raises(NotWritable):
                stage.publish(replace=True)
        assert (tmp_path / "out" / "b").read_text() == "old"
        assert leftovers(tmp_path) == []


class TestPublishInto:
    @pytest.fixture
    def stage(self, tmp_path: Path) -> Iterator[Staging]:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "shard.pt").write_text("source")
        with Staging(tmp_path / "run") as stage:
            for name in ("a", "b", "c"):
                (stage.folder / name).write_text("new")
            yield stage

    def test_adds_all_files(self, stage: Staging, tmp_path: Path) -> None:
        stage.publish_into(tmp_path / "run")
        assert {path.name: path.read_text() for path in (tmp_path / "run").iterdir()} == {
            "a": "new",
            "b": "new",
            "c": "new",
            "shard.pt": "source",
        }

    @pytest.mark.parametrize("name", ["a", "b", "c"])
    def test_replaces_no_file_and_undoes_itself(self, name: str, stage: Staging, tmp_path: Path) -> None:
        (tmp_path / "run" / name).write_text("old")
        with pytest.raises(OutputExists) as caught:
            stage.publish_into(tmp_path / "run")
        assert caught.value.path == str(tmp_path / "run" / name)
        assert {path.name: path.read_text() for path in (tmp_path / "run").iterdir()} == {name: "old", "shard.pt": "source"}

    def test_undoes_itself_after_any_other_error(self, stage: Staging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.link

        def fail(old: Path, new: Path) -> None:
            if Path(new).name == "c":
                raise OSError(errno.ENOSPC, "No space left on device")
            real(old, new)

        monkeypatch.setattr(os, "link", fail)
        with pytest.raises(NotWritable):
            stage.publish_into(tmp_path / "run")
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["shard.pt"]

    def test_an_interrupt_undoes_it_as_well(self, stage: Staging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.link

        def interrupt(old: Path, new: Path) -> None:
            if Path(new).name == "c":
                raise KeyboardInterrupt
            real(old, new)

        monkeypatch.setattr(os, "link", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stage.publish_into(tmp_path / "run")
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["shard.pt"]


class TestLeftovers:
    def test_are_removed_by_the_next_run_for_the_same_target(self, tmp_path: Path) -> None:
        for name in (f".out{MARK}0123456789ab", f".out{MARK}0123456789ab-old", f".other{MARK}0123456789ab", f"out{MARK}mine"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "weights").write_text("half")
        with Staging(tmp_path / "out") as stage:
            assert leftovers(tmp_path) == sorted([stage.folder.parent.name, f".other{MARK}0123456789ab", f"out{MARK}mine"])

    def test_those_of_a_living_run_stay(self, tmp_path: Path) -> None:
        with Staging(tmp_path / "out") as first:
            (first.folder / "weights").write_text("half")
            with pytest.raises(OutputInUse), Staging(tmp_path / "out"):
                pass
            assert remove_leftovers(tmp_path / "out") == []
            assert (first.folder / "weights").read_text() == "half"

    @pytest.mark.usefixtures("without_locks")
    def test_without_locks_nothing_is_taken_for_one(self, tmp_path: Path) -> None:
        with Staging(tmp_path / "out") as first, Staging(tmp_path / "out") as second:
            assert first.folder.is_dir()
            assert second.folder.is_dir()
        assert leftovers(tmp_path) == []

    @pytest.mark.parametrize("what", ["link", "file", "of others"])
    def test_a_name_that_is_taken_by_something_else_is_left_alone(self, what: str, tmp_path: Path) -> None:
        taken, precious = tmp_path / f".out{MARK}staging", tmp_path / "precious"
        precious.mkdir()
        (precious / "thesis.tex").write_text("precious")
        if what == "link":
            taken.symlink_to(precious)
        elif what == "file":
            taken.write_text("mine")
        else:
            taken.mkdir()
            taken.chmod(0o777)
        with Staging(tmp_path / "out", key="key") as stage:
            assert not stage.resumable
            assert stage.folder.parent != taken
            (stage.folder / "a").write_text("new")
            stage.publish(replace=False)
        assert (precious / "thesis.tex").read_text() == "precious"
        assert os.path.lexists(taken) or what == "of others"  # what nobody holds is a left-over
        assert (tmp_path / "out" / "a").read_text() == "new"

    def test_a_name_with_glob_characters_means_itself(self, tmp_path: Path) -> None:
        (tmp_path / f".a{MARK}0123456789ab").mkdir()
        (tmp_path / f".[ab]{MARK}0123456789ab").mkdir()
        assert [path.name for path in remove_leftovers(tmp_path / "[ab]")] == [f".[ab]{MARK}0123456789ab"]

    def test_a_link_that_looks_like_one_is_not_followed(self, tmp_path: Path) -> None:
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / "thesis.tex").write_text("precious")
        (tmp_path / f".out{MARK}0123456789ab").symlink_to(precious)
        remove_leftovers(tmp_path / "out")
        assert (precious / "thesis.tex").read_text() == "precious"


class TestPlacesWhereNothingCanBeMade:
    def test_are_an_output_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(NotWritable) as caught, Staging(tmp_path / "file" / "out"):
            pass
        assert caught.value.path == str(tmp_path / "file" / "out")
