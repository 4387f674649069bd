"""Outputs of one command appear together or not at all; a dry run refuses what the run would refuse; what appears is durable."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt_cli import average, extract_state, merge, verify
from ckpt_cli.errors import CastOverflow, CkptError, NoSpace, NotWritable, OutputExists, Unreadable
from ckpt_cli.output import staging
from ckpt_cli.output import target as placing
from ckpt_cli.output.interrupted.place import MARK
from ckpt_cli.output.staging import Staging
from ckpt_cli.progress import Silent

Tree = dict[str, bytes]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps, each with a model and an EMA in folders of their own."""
    for step in (1, 2):
        save_step(tmp_path / "run" / f"global_step_{step}", float(step), 10.0 * step)
    return tmp_path / "run"


def save_step(folder: Path, actor: float, critic: float) -> None:
    for name, number in (("actor", actor), ("critic", critic)):
        place = folder / name
        place.mkdir(parents=True)
        torch.save({"a.weight": torch.full((64, 64), number)}, place / "model_world_size_1_rank_0.pt")


def tree(folder: Path) -> Tree:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def hidden(folder: Path) -> list[Path]:
    """Temporary folders, and outputs that were put aside."""
    return [path for path in folder.rglob("*") if MARK in path.name or staging.ASIDE in path.name]


def visible(folder: Path) -> Tree:
    return {name: content for name, content in tree(folder).items() if MARK not in name and staging.ASIDE not in name}


def kept(error: BaseException) -> list[Path]:
    """The folders of finished files that an error names, with what to do."""
    text = error.hint if isinstance(error, CkptError) else error.__notes__[-1]
    told, _, folders = (text or "").partition("rm -r ")
    assert "run the same command again to go on" in told
    return [Path(folder) for folder in shlex.split(folders)]


@pytest.fixture(params=["renameat2", "rename"])
def renaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With what Linux has, and with what every other system has."""
    if request.param == "rename":
        monkeypatch.setattr(staging, "_renameat2", lambda *_: False)
    return str(request.param)


def fail_publication(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Let the publication with this number fail, after all of its output was written."""
    real, calls = Staging.publish, 0

    def publish(self: Staging, *, replace: bool) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        real(self, replace=replace)

    monkeypatch.setattr(Staging, "publish", publish)


COMMANDS: dict[str, Callable[..., Any]] = {
    "merge": lambda run, out, **options: merge(run, out, type="all", **options),
    "average": lambda run, out, **options: average(run, out, everything=True, type="all", **options),
}


@pytest.mark.usefixtures("renaming")
@pytest.mark.parametrize("command", COMMANDS)
class TestAllOrNone:
    def test_a_second_output_that_overflows_takes_the_first_along(self, command: str, run: Path, tmp_path: Path) -> None:
        for step in (1, 2):
            torch.save({"a.weight": torch.full((64, 64), 1e9)}, run / f"global_step_{step}" / "critic" / "model_world_size_1_rank_0.pt")
        with pytest.raises(CastOverflow):
            COMMANDS[command](run, tmp_path / "out", dtype="fp16")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]

    @pytest.mark.parametrize("error", [NotWritable, KeyboardInterrupt])
    def test_a_second_output_that_gets_no_name_takes_that_of_the_first(
        self, command: str, error: type[BaseException], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = tree(tmp_path)
        with monkeypatch.context() as patch:
            fail_publication(patch, 2, error("no"))
            with pytest.raises(error) as caught:
                COMMANDS[command](run, tmp_path / "deep" / "out")
        assert {name for name, content in visible(tmp_path).items() if content} == {name for name, content in before.items() if content}
        # What is finished waits for the same command, which goes on with it.
        assert sorted(kept(caught.value)) == sorted(path for path in tmp_path.rglob("*") if path.name.endswith(f"{MARK}staging"))
        COMMANDS[command](run, tmp_path / "deep" / "out")
        assert hidden(tmp_path) == []

    def test_what_stood_there_stands_there_again(self, command: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        COMMANDS[command](run, tmp_path / "out")
        for step in (1, 2):
            for name in ("actor", "critic"):
                file = run / f"global_step_{step}" / name / "model_world_size_1_rank_0.pt"
                torch.save({"a.weight": torch.full((64, 64), -5.0)}, file)
        before = tree(tmp_path)
        with monkeypatch.context() as patch:
            fail_publication(patch, 2, NotWritable("no"))
            with pytest.raises(NotWritable):
                COMMANDS[command](run, tmp_path / "out", overwrite=True)
        assert visible(tmp_path) == before
        COMMANDS[command](run, tmp_path / "out", overwrite=True)
        for name in ("actor", "critic"):
            assert set(load_file(tmp_path / "out" / name / "model.safetensors")["a.weight"].unique().tolist()) == {-5.0}
        assert hidden(tmp_path) == []

    def test_a_file_that_comes_to_stand_in_the_way_of_the_second_keeps_both_away(self, command: str, run: Path, tmp_path: Path) -> None:
        class Interfering(Silent):
            def finish(self) -> None:
                (tmp_path / "out" / "critic").mkdir(parents=True, exist_ok=True)
                (tmp_path / "out" / "critic" / "thesis.tex").write_text("precious")

        with pytest.raises(OutputExists):
            COMMANDS[command](run, tmp_path / "out", progress=Interfering())
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["critic"]
        assert (tmp_path / "out" / "critic" / "thesis.tex").read_text() == "precious"


class TestFusedAndExported:
    def test_appear_together(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        names = {"base_layer.weight": (8, 8), "lora_A.default.weight": (2, 8), "lora_B.default.weight": (8, 2)}
        state = {f"base_model.model.layers.0.q_proj.{name}": torch.ones(shape) for name, shape in names.items()}
        torch.save(state, folder / "model_world_size_1_rank_0.pt")
        with monkeypatch.context() as patch:
            fail_publication(patch, 2, NotWritable("no"))
            with pytest.raises(NotWritable) as caught:
                merge(folder, tmp_path / "out", lora="both", lora_alpha=2)
        assert sorted(path for path in tmp_path.iterdir() if path != folder) == sorted(kept(caught.value))
        merge(folder, tmp_path / "out", lora="both", lora_alpha=2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out_adapter", "run"]


class TestAComparison:
    def test_that_fails_leaves_no_output(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        merge(run, tmp_path / "base")

        def fail(*_: object, **__: object) -> None:
            raise Unreadable("reading failed")

        monkeypatch.setattr("ckpt_cli.commands.merge.compare_with_base", fail)
        with pytest.raises(Unreadable):
            merge(run, tmp_path / "out", base=tmp_path / "base", compare=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


class TestRoom:
    def test_is_counted_for_all_outputs_of_a_disk(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        free = merge(run, tmp_path / "out", type="actor", dry_run=True).outputs[0].bytes_written * 3 // 2
        monkeypatch.setattr(placing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free, "total": 1 << 40}))
        merge(run, tmp_path / "out", type="actor", dry_run=True)
        for options in ({"dry_run": True}, {}):
            with pytest.raises(NoSpace):
                merge(run, tmp_path / "out", type="all", **options)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    @pytest.mark.parametrize(("total", "is_full"), [(0, False), (1 << 40, True)])
    def test_is_not_known_of_a_mount_that_answers_zeros(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, is_full: bool
    ) -> None:
        """FUSE answers ``statfs`` so where its file system has no answer; a disk that is full has a size."""
        monkeypatch.setattr(placing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0, "total": total}))
        with pytest.raises(NoSpace) if is_full else contextlib.nullcontext():
            assert merge(run, tmp_path / "out", type="actor").outputs[0].disk_free is None


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions count, also for root, who has them all: `os.access` judges by the bits of the owner."""
    real = os.access

    def access(path: Any, mode: int, **options: Any) -> bool:
        bits = os.stat(path).st_mode
        wanted = (stat.S_IWUSR if mode & os.W_OK else 0) | (stat.S_IXUSR if mode & os.X_OK else 0)
        return real(path, mode, **options) and bits & wanted == wanted

    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr(os, "supports_effective_ids", {*os.supports_effective_ids, access})


@pytest.mark.usefixtures("unprivileged")
@pytest.mark.parametrize("dry_run", [True, False])
class TestADryRunRefusesWhatTheRunRefuses:
    """Each is asked with and without --dry-run, and leaves everything as it was."""

    def refused(self, kind: type[CkptError], folder: Path, act: Callable[[], object]) -> CkptError:
        before = tree(folder)
        with pytest.raises(kind) as caught:
            act()
        assert tree(folder) == before
        assert caught.value.path
        return caught.value

    def test_a_folder_without_permission_above_the_output(self, dry_run: bool, run: Path, tmp_path: Path) -> None:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o555)
        for output in (closed / "out", closed / "new" / "out"):
            error = self.refused(NotWritable, tmp_path, lambda output=output: merge(run, output, dry_run=dry_run))
            assert "permission" in error.message
            self.refused(NotWritable, tmp_path, lambda output=output: average(run, output, everything=True, dry_run=dry_run))

    def test_an_output_that_may_not_be_replaced(self, dry_run: bool, run: Path, tmp_path: Path) -> None:
        merge(run, tmp_path / "out")
        (tmp_path / "out").chmod(0o555)
        self.refused(NotWritable, tmp_path, lambda: merge(run, tmp_path / "out", overwrite=True, dry_run=dry_run))

    def test_a_checkpoint_folder_without_permission_in_place(self, dry_run: bool, run: Path, tmp_path: Path) -> None:
        place = run / "global_step_2" / "actor"
        place.chmod(0o555)
        self.refused(NotWritable, tmp_path, lambda: merge(run, in_place=True, dry_run=dry_run))
        place.chmod(0o755)
        place.parent.chmod(0o555)
        self.refused(NotWritable, tmp_path, lambda: merge(run, in_place=True, dry_run=dry_run))

    def test_a_file_of_the_same_name_in_place(self, dry_run: bool, run: Path, tmp_path: Path) -> None:
        (run / "global_step_2" / "actor" / "model.safetensors").write_text("mine")
        self.refused(OutputExists, tmp_path, lambda: merge(run, in_place=True, dry_run=dry_run))

    def test_a_mount_point(self, dry_run: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        mount = tmp_path / "mount"
        mount.mkdir()
        place = run / "global_step_2" / "actor"
        real = os.path.ismount
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) in (mount, place) or real(path))
        error = self.refused(NotWritable, tmp_path, lambda: merge(run, mount, dry_run=dry_run))
        assert str(mount / "model") in (error.hint or "")
        self.refused(NotWritable, tmp_path, lambda: merge(run, in_place=True, dry_run=dry_run))
        merge(run, mount / "model", dry_run=dry_run)

    def test_the_current_folder(self, dry_run: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        for output in (".", tmp_path / "here", "../here"):
            self.refused(NotWritable, tmp_path, lambda output=output: merge(run, output, dry_run=dry_run))
        merge(run, "./model", dry_run=dry_run)

    def test_a_file_above_the_output(self, dry_run: bool, run: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        (tmp_path / "link").symlink_to("nowhere")
        for output in (tmp_path / "file" / "out", tmp_path / "link" / "a" / "out"):
            self.refused(NotWritable, tmp_path, lambda output=output: merge(run, output, dry_run=dry_run))

    def test_a_name_that_is_too_long_for_its_temporary_folder(self, dry_run: bool, run: Path, tmp_path: Path) -> None:
        for output in (tmp_path / ("x" * 250), tmp_path / ("x" * 300) / "out"):
            self.refused(NotWritable, tmp_path, lambda output=output: merge(run, output, dry_run=dry_run))

    def test_a_folder_of_someone_else_in_a_shared_one(
        self, dry_run: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shared = tmp_path / "shared"
        (shared / "out").mkdir(parents=True)
        shared.chmod(0o1777)
        monkeypatch.setattr(os, "geteuid", lambda: os.stat(shared).st_uid + 1)
        self.refused(NotWritable, tmp_path, lambda: merge(run, shared / "out", dry_run=dry_run))

    def test_a_side_file_that_cannot_be_read(self, dry_run: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for step in (1, 2):
            (run / f"global_step_{step}" / "actor" / "tokenizer.json").write_text("{}")
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode, **o: Path(path).name != "tokenizer.json" and access(path, mode, **o))
        error = self.refused(Unreadable, tmp_path, lambda: merge(run, tmp_path / "out", dry_run=dry_run))
        assert error.path == str(run / "global_step_2" / "actor" / "tokenizer.json")
        self.refused(Unreadable, tmp_path, lambda: average(run, tmp_path / "out", everything=True, dry_run=dry_run))

    def test_a_place_for_state(self, dry_run: bool, layouts: Path, tmp_path: Path) -> None:
        (tmp_path / "closed").mkdir(mode=0o555)
        source = layouts / "verl-run" / "run"
        self.refused(NotWritable, tmp_path, lambda: extract_state(source, tmp_path / "closed" / "out", dry_run=dry_run))


@pytest.mark.usefixtures("unprivileged")
class TestAPlot:
    """It is drawn at the end of a long comparison: what keeps it from being written is said before."""

    @pytest.mark.parametrize("place", ["nowhere/plot.html", "closed/plot.html"])
    def test_that_cannot_be_written_is_refused_before_the_comparison(self, place: str, run: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        (tmp_path / "closed").mkdir(mode=0o555)
        seen: list[str] = []

        class Watching(Silent):
            def start(self, total_bytes: int, label: str) -> None:
                seen.append(label)

        with pytest.raises(NotWritable):
            verify(run, base=run, plot=tmp_path / place, progress=Watching())
        assert seen == []


class TestInPlaceWithoutHardLinks:
    """exFAT, many network and object file systems."""

    @pytest.fixture
    def place(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        def link(*_: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)
        return run / "global_step_2" / "actor"

    def test_adds_the_files(self, place: Path, run: Path) -> None:
        merge(run, in_place=True)
        assert sorted(path.name for path in place.iterdir()) == [
            "ckpt-manifest.json",
            "model.safetensors",
            "model_world_size_1_rank_0.pt",
        ]
        assert json.loads((place / "ckpt-manifest.json").read_text())["tool"] == "ckpt"
        assert [path for path in run.rglob("*") if MARK in path.name] == []

    def test_replaces_nothing_that_came_meanwhile_and_undoes_itself(self, place: Path, run: Path) -> None:
        class Interfering(Silent):
            def finish(self) -> None:
                (place / "ckpt-manifest.json").write_text("mine")

        with pytest.raises(OutputExists):
            merge(run, in_place=True, progress=Interfering())
        assert sorted(path.name for path in place.iterdir()) == ["ckpt-manifest.json", "model_world_size_1_rank_0.pt"]
        assert (place / "ckpt-manifest.json").read_text() == "mine"

    def test_undoes_itself_when_interrupted(self, place: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def replace(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            merge(run, in_place=True)
        assert [path.name for path in place.iterdir()] == ["model_world_size_1_rank_0.pt"]


class TestDurability:
    @pytest.fixture
    def synced(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        """Folders in the order in which they were synced."""
        real, seen = os.fsync, []

        def fsync(fd: int) -> None:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                seen.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        return seen

    def test_new_parent_folders_are_synced_up_to_the_first_that_was_there(self, run: Path, tmp_path: Path, synced: list[Path]) -> None:
        merge(run, tmp_path / "a" / "b" / "c" / "out")
        for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
            assert folder in synced
        assert tmp_path.parent not in synced

    def test_the_folder_is_synced_before_it_gets_its_name_and_the_name_after(self, run: Path, tmp_path: Path, synced: list[Path]) -> None:
        merge(run, tmp_path / "out")
        assert MARK in str(synced[-2])
        assert synced[-1] == tmp_path

    def test_so_are_those_above_each_of_several_outputs(self, run: Path, tmp_path: Path, synced: list[Path]) -> None:
        merge(run, tmp_path / "new" / "out", type="all")
        assert {tmp_path, tmp_path / "new", tmp_path / "new" / "out"} <= set(synced)

    def test_in_place_the_folder_itself_is(self, run: Path, synced: list[Path]) -> None:
        merge(run, in_place=True)
        assert synced[-1] == run / "global_step_2" / "actor"

    def test_a_folder_that_may_be_written_and_not_read_is_no_obstacle(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.open

        def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if Path(path) == tmp_path:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, flags, *rest, **named)

        monkeypatch.setattr(os, "open", refuse)
        merge(run, tmp_path / "new" / "out")
        merge(run, tmp_path / "out")
        assert (tmp_path / "out" / "ckpt-manifest.json").is_file()

    def test_a_disk_that_reports_an_error_then_leaves_no_output(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = staging.sync_folder

        def fail(folder: Path) -> None:
            if folder == tmp_path and (tmp_path / "out").exists():
                raise OSError(errno.EIO, "Input/output error")
            real(folder)

        monkeypatch.setattr(staging, "sync_folder", fail)
        with pytest.raises(NotWritable):
            merge(run, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
