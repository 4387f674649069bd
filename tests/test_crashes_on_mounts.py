"""Real disks that are full, read-only, or lose power: on file systems that are mounted for the test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import NoSpace
from ckpt_cli.progress import Silent
from tests.cli import ROOT, ckpt

pytestmark = pytest.mark.mounts
OPTIONS = {"max_shard_size": "1.5MB", "jobs": 1}
SNAPSHOTS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tensors that fill a file each."""
    folder = tmp_path_factory.mktemp("source")
    random = torch.Generator().manual_seed(7)
    tensors = {f"layers.{i}.weight": torch.randn(600, 600, generator=random) for i in range(3)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def expected(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    ckpt_cli.merge(run, tmp_path_factory.mktemp("expected") / "out", **OPTIONS)
    return content(tmp_path_factory.getbasetemp() / "expected0" / "out")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def mounted(place: Path, *arguments: str | Path) -> bool:
    place.mkdir(exist_ok=True)
    return subprocess.run(["mount", *arguments, place], capture_output=True).returncode == 0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB in memory."""
    place = tmp_path / "small"
    if os.geteuid() or not mounted(place, "-t", "tmpfs", "-o", "size=6m", "none"):
        pytest.skip("not run: this mounts a file system, which needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_fills_up_meanwhile(small: Path, run: Path, expected: dict[str, bytes]) -> None:
    class Filling(Silent):
        def flushing(self) -> None:
            (small / "ballast").write_bytes(bytes(3_000_000))

    with pytest.raises(NoSpace) as caught:
        ckpt_cli.merge(run, small / "out", progress=Filling(), **OPTIONS)
    assert "run the same command again to go on" in (caught.value.hint or "")
    assert not (small / "out").exists()
    (small / "ballast").unlink()
    result = ckpt_cli.merge(run, small / "out", **OPTIONS)
    assert content(small / "out") == expected
    assert any(note.code == "resumed" for note in result.outputs[0].notes)
    assert [path.name for path in small.iterdir()] == ["out"]


def test_a_disk_that_is_full_at_the_start(small: Path, run: Path) -> None:
    (small / "ballast").write_bytes(bytes(3_000_000))
    done = ckpt("merge", run, "-o", small / "out")
    assert done.code == 5
    assert "error[no-space]" in done.err
    assert "hint: " in done.err
    assert [path.name for path in small.iterdir()] == ["ballast"]


def test_a_disk_that_is_read_only(small: Path, run: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    done = ckpt("merge", run, "-o", small / "out")
    assert done.code == 5
    assert "hint: choose another place with -o" in done.err
    assert list(small.iterdir()) == []


@pytest.mark.slow
def test_a_power_cut(run: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """Only what reached the disk counts: the image of a mounted disk is copied while a run writes to it, and mounted again."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(24 << 20)
    made = shutil.which("mkfs.ext4") and subprocess.run(["mkfs.ext4", "-q", image], capture_output=True).returncode == 0
    if os.geteuid() or not made or not mounted(disk, "-o", "loop", image):
        pytest.skip("not run: this mounts an image of ext4, which needs root, mkfs.ext4 and loop devices")
    try:
        command = [sys.executable, "-m", "ckpt_cli", "merge", run, "-o", disk / "out", "--max-shard-size", "1.5MB", "--jobs", "1"]
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not any(disk.glob(".out*")) and process.poll() is None:
            time.sleep(0.001)
        copies = []
        while process.poll() is None and len(copies) < SNAPSHOTS:
            process.send_signal(signal.SIGSTOP)
            copies.append(shutil.copyfile(image, tmp_path / f"copy-{len(copies)}"))
            process.send_signal(signal.SIGCONT)
            time.sleep(0.01)
        assert process.wait(60) == 0
        copies.append(shutil.copyfile(image, tmp_path / f"copy-{len(copies)}"))
    finally:
        subprocess.run(["umount", disk], check=True)
    assert len(copies) > 1
    found = []
    for copy in copies:
        assert mounted(disk, "-o", "loop", copy)
        try:
            found.append((disk / "out").exists())
            if found[-1]:
                assert content(disk / "out") == expected
            ckpt_cli.merge(run, disk / "out", overwrite=True, **OPTIONS)
            assert content(disk / "out") == expected
            assert sorted(path.name for path in disk.iterdir()) == ["lost+found", "out"]
        finally:
            subprocess.run(["umount", disk], check=True)
        copy.unlink()
    assert found[-1], "the run had ended, so its output was to stay"
    assert not found[0]
