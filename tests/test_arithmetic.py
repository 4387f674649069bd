"""A process that has changed how floats are computed gets no result that has lost something."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Unsupported
from ckpt_cli.tensors.arithmetic import check_arithmetic
from tests import tiny

OTHER_ROUNDINGS = {"down": 0x400, "up": 0x800, "to zero": 0xC00}
"""Those of x86."""


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tiny.folder(tmp_path / name, tiny.weights(seed), tiny.classless()) for seed, name in enumerate("ab")]


COMMANDS: dict[str, Callable[[list[Path], Path], Any]] = {
    "average": ckpt_cli.average,
    "diff": lambda folders, _: ckpt_cli.diff(*folders),
    "cast": lambda folders, out: ckpt_cli.merge(folders[0], out, dtype="bf16"),
    "fuse": lambda folders, out: ckpt_cli.merge(
        tiny.adapter(out.parent / "adapter", tiny.factors(), str(folders[0])), out, base=folders[0]
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_would_lose_subnormals_is_refused(command: str, folders: list[Path], tmp_path: Path, flushing: None) -> None:
    with pytest.raises(Unsupported, match="subnormal") as caught:
        COMMANDS[command](folders, tmp_path / "out")
    assert "torch.set_flush_denormal(False)" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
    torch.set_flush_denormal(False)
    if command != "fuse":
        COMMANDS[command](folders, tmp_path / "out")


def test_what_only_copies_is_not(folders: list[Path], tmp_path: Path, flushing: None) -> None:
    ckpt_cli.merge(folders[0], tmp_path / "out")
    ckpt_cli.merge(folders[0], tmp_path / "with base", base=folders[1])


@pytest.mark.parametrize("mode", OTHER_ROUNDINGS)
def test_another_rounding_is_refused(mode: str) -> None:
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    if library.fesetround(OTHER_ROUNDINGS[mode]) or library.fegetround() != OTHER_ROUNDINGS[mode]:
        pytest.skip("these are the numbers of another processor")
    try:
        with pytest.raises(Unsupported, match="nearest"):
            check_arithmetic()
    finally:
        library.fesetround(0)
    check_arithmetic()
