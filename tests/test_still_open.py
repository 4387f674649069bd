"""Files that a process has open on a network file system, which cannot be removed: nothing is lost, and what is said is true."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.errors import NotWritable
from ckpt_cli.files.leftovers.still_open import is_still_open, who_has
from ckpt_cli.output import staging
from tests import tiny
from tests.tensors import differences, load

ROOM = ".nfs{:016x}00000001"


class Network:
    """Deleting a file that is ``held`` gives it another name, which cannot be deleted, as NFS does it; a folder around it neither."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._held: dict[int, Any] = {}
        real = os.unlink

        def unlink(path: Any, *, dir_fd: int | None = None) -> None:
            status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
            if status.st_ino not in self._held:
                real(path, dir_fd=dir_fd)
                return
            folder, name = os.path.split(os.fspath(path))
            if is_still_open(name):
                raise OSError(errno.EBUSY, "Device or resource busy", os.fspath(path))
            os.rename(path, os.path.join(folder, ROOM.format(status.st_ino)), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

        monkeypatch.setattr(os, "unlink", unlink)
        monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: unlink(path) if not missing_ok or path.exists() else None)

    def hold(self, path: Path) -> None:
        file = path.open("rb")
        self._held[os.fstat(file.fileno()).st_ino] = file

    def let_go(self, below: Path) -> None:
        """As the client of NFS does when the last process closes it."""
        for file in self._held.values():
            file.close()
        self._held.clear()
        for path in below.rglob(".nfs*"):
            path.unlink()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    made = Network(monkeypatch)
    yield made
    made.let_go(Path("/nowhere"))


@pytest.fixture(params=["renameat2", "rename"])
def renaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what Linux has on a disk, and with what it has on NFS."""
    if request.param == "rename":
        monkeypatch.setattr(staging, "_renameat2", lambda *_: False)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".out"))


def said(made: ckpt_cli.MergeResult) -> list[str]:
    return [note.text for note in made.outputs[0].notes if note.code == "still-open"]


@pytest.mark.usefixtures("renaming")
def test_an_old_output_that_is_open_stands_in_no_way(network: Network, tmp_path: Path) -> None:
    steps = [tiny.folder(tmp_path / f"step{number}", tiny.weights(seed=number)) for number in range(4)]
    out = tmp_path / "out"
    assert said(ckpt_cli.merge(steps[0], out)) == []
    for number in (1, 2, 3):
        network.hold(out / "model.safetensors")
        (text,) = said(ckpt_cli.merge(steps[number], out, overwrite=True))
        assert f"process {os.getpid()} (" in text
        assert str(tmp_path) in text
        assert differences(load(steps[number]), load(out)) == []
        assert not [path for path in out.iterdir() if is_still_open(path.name)]
    assert left(tmp_path)
    network.let_go(tmp_path)
    assert said(ckpt_cli.merge(steps[0], out, overwrite=True)) == []
    assert left(tmp_path) == []
    assert differences(load(steps[0]), load(out)) == []


def test_a_deleted_file_in_an_output_is_nobodys(network: Network, tmp_path: Path) -> None:
    """Somebody removed a file of the output while a server read it."""
    model, out = tiny.folder(tmp_path / "model", tiny.weights()), tmp_path / "out"
    ckpt_cli.merge(model, out)
    network.hold(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    assert [path.name for path in out.iterdir() if is_still_open(path.name)]
    ckpt_cli.merge(model, out, overwrite=True)
    assert differences(load(model), load(out)) == []
    assert not [path for path in out.iterdir() if is_still_open(path.name)]


def test_other_files_in_an_output_are_somebodys(tmp_path: Path) -> None:
    model, out = tiny.folder(tmp_path / "model", tiny.weights()), tmp_path / "out"
    ckpt_cli.merge(model, out)
    (out / ".nfs").write_text("mine")
    with pytest.raises(ckpt_cli.CkptError, match="holds more than ckpt wrote there"):
        ckpt_cli.merge(model, out, overwrite=True)


@pytest.mark.parametrize("known", [True, False])
def test_where_it_cannot_be_put_aside_the_file_and_its_process_are_named(
    known: bool, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [tiny.folder(tmp_path / f"step{number}", tiny.weights(seed=number)) for number in range(2)]
    out = tmp_path / "out"
    ckpt_cli.merge(steps[0], out)
    network.hold(out / "model.safetensors")
    ckpt_cli.merge(steps[0], out, overwrite=True)
    (stuck,) = tmp_path.glob(".out*/**/.nfs*")
    real = os.rename

    def rename(old: Any, new: Any, **more: Any) -> None:
        if "left-" in os.fspath(new):
            raise OSError(errno.EBUSY, "Device or resource busy", os.fspath(old))
        real(old, new, **more)

    monkeypatch.setattr(os, "rename", rename)
    if not known:
        monkeypatch.setattr("ckpt_cli.output.interrupted.emptied.who_has", lambda _: [])
    with pytest.raises(NotWritable, match="what an earlier run left where the output is built cannot be removed") as caught:
        ckpt_cli.merge(steps[1], out, overwrite=True)
    assert caught.value.path == str(stuck)
    by = rf"process {os.getpid()} \(.+\) has it open" if known else rf"lsof {stuck} names the process that has it open"
    assert re.match(by + ": end that, or choose another place with -o$", str(caught.value.hint))
    assert differences(load(steps[0]), load(out)) == []
    network.let_go(tmp_path)
    ckpt_cli.merge(steps[1], out, overwrite=True)
    assert left(tmp_path) == []


def test_who_has_a_file_open(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    assert who_has(tmp_path / "a") == []
    with (tmp_path / "a").open():
        assert who_has(tmp_path / "a")[0].startswith(f"process {os.getpid()} (")
    assert who_has(tmp_path / "gone") == []
