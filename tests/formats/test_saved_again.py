"""DCP saves into the folder of an earlier one that were interrupted: the metadata are still those of that, and all lengths fit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_cli
from ckpt_cli.errors import CorruptFile
from tests.tensors import Tensors, differences, load

NAMES = ("a.weight", "b.weight", "c.weight", "d.weight")


def weights(step: int) -> Tensors:
    return {name: torch.full((16, 8), float(step + at)) for at, name in enumerate(NAMES)}


def saved(folder: Path, step: int, *, moments: bool = True, counters: bool = False) -> Path:
    """A save of two files, as two writers make it."""
    slots = {name: {"exp_avg": torch.full((16, 8), float(step))} for name in NAMES}
    if counters:
        slots = {name: {**held, "step": torch.tensor(float(step))} for name, held in slots.items()}
    state = {"model": weights(step), **({"optimizer": {"state": slots}} if moments else {})}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=2), no_dist=True)
    return folder


def ends(folder: Path, key: str) -> dict[str, int]:
    """Where the last entry under a key ends, of each data file."""
    found: dict[str, int] = {}
    for index, info in dcp.FileSystemReader(folder).read_metadata().storage_data.items():
        if index.fqn.startswith(f"{key}."):
            found[info.relative_path] = max(found.get(info.relative_path, 0), info.offset + info.length)
    return found


def said(path: Path, out: Path) -> dict[str, str]:
    return {note.code: note.text for note in ckpt_cli.merge(path, out).checkpoint.notes if note.level == "warning"}


@pytest.fixture
def last(tmp_path: Path) -> Path:
    return saved(tmp_path / "last", 100)


class TestASaveThatWasInterrupted:
    def test_in_the_middle_of_weights_is_refused(self, last: Path, tmp_path: Path) -> None:
        file, end = next(iter(ends(last, "model").items()))
        os.truncate(last / file, end - 8)
        with pytest.raises(CorruptFile):
            ckpt_cli.merge(last, tmp_path / "out")

    @pytest.mark.parametrize("short", [1, 200])
    def test_behind_the_weights_of_a_file_is_a_warning(self, last: Path, tmp_path: Path, short: int) -> None:
        model, optimizer = ends(last, "model"), ends(last, "optimizer")
        file = next(file for file, end in optimizer.items() if model.get(file, end) < end - short)
        shutil.copy(saved(tmp_path / "newer", 110) / file, last / file)
        os.truncate(last / file, optimizer[file] - short)
        assert file in said(last, tmp_path / "out")["file-cut"]
        assert "file-cut" in {note.code for note in ckpt_cli.verify(last).notes}

    def test_at_a_file_of_the_optimizer_alone_is_none(self, tmp_path: Path) -> None:
        """No weights are read from it."""
        folder = tmp_path / "last"
        state = {"model": weights(1), "optimizer": {"state": {"a": {"exp_avg": torch.ones(64, 64)}}}}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False), no_dist=True)
        (file,) = ends(folder, "optimizer")
        os.truncate(folder / file, 1000)
        assert "file-cut" not in said(folder, tmp_path / "out")

    def test_between_files_is_told_by_the_counters(self, tmp_path: Path) -> None:
        last, newer = (saved(tmp_path / name, step, counters=True) for name, step in (("last", 100), ("newer", 110)))
        file = next(iter(ends(newer, "model")))
        shutil.copy(newer / file, last / file)
        assert "step-differs" in said(last, tmp_path / "out")

    @pytest.mark.parametrize(("seconds", "told"), [(7200, True), (1200, False)])
    def test_between_files_of_weights_is_told_by_hours_alone(self, tmp_path: Path, seconds: int, told: bool) -> None:
        """A file that another node had, or the last one of a copy, looks like it."""
        last, newer = (saved(tmp_path / name, step, moments=False) for name, step in (("last", 100), ("newer", 110)))
        file = next(iter(ends(newer, "model")))
        shutil.copy(newer / file, last / file)
        time = (last / ".metadata").stat().st_mtime + seconds
        os.utime(last / file, (time, time))
        assert ("written-apart" in said(last, tmp_path / "out")) is told


class TestASaveThatIsWhole:
    @pytest.mark.parametrize("moments", [True, False])
    def test_over_another_is_not_doubted(self, tmp_path: Path, moments: bool) -> None:
        saved(tmp_path / "last", 100, moments=moments)
        saved(tmp_path / "last", 110, moments=moments)
        assert said(tmp_path / "last", tmp_path / "out").keys().isdisjoint({"file-cut", "step-differs", "written-apart"})
        assert differences(load(tmp_path / "out"), weights(110)) == []

    def test_with_longer_files_is_not_doubted(self, last: Path, tmp_path: Path) -> None:
        """torch writes items that the metadata do not speak of."""
        for file in last.glob("*.distcp"):
            file.write_bytes(file.read_bytes() + bytes(100))
        assert "file-cut" not in said(last, tmp_path / "out")
