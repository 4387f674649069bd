"""`verify --against RUN` of an output whose step the run does not have any more: no other step takes its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, NotFound


def step(run: Path, number: int) -> Path:
    folder = run / f"checkpoint-{number}"
    folder.mkdir(parents=True)
    torch.manual_seed(number)
    save_file({"layers.0.weight": torch.randn(4, 4)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "own"}')
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for number in (100, 200, 300):
        step(tmp_path / "run", number)
    return tmp_path / "run"


def test_a_step_that_is_gone_is_named(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckpt_cli.merge(run, out, step=100, checksum=True)
    assert ckpt_cli.verify(out, against=run).exit_code == 0
    shutil.rmtree(run / "checkpoint-100")
    with pytest.raises(NotFound, match="merged from step 100, which is not in this run") as error:
        ckpt_cli.verify(out, against=run)
    assert error.value.expected == "step 100; there are 200, 300"
    assert error.value.hint is not None
    assert error.value.hint.startswith("--full checks the values")
    assert ckpt_cli.verify(out, full=True).exit_code == 0
    # What is asked for is compared.
    found = ckpt_cli.verify(out, against=run, step=200)
    assert (found.exit_code, found.against[0].source) == (1, str(run / "checkpoint-200"))


def test_a_step_that_is_not_whole_is_not_replaced(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckpt_cli.merge(run, out, step=100)
    (run / "checkpoint-100" / "model.safetensors").unlink()
    with pytest.raises(CkptError) as error:
        ckpt_cli.verify(out, against=run)
    assert "checkpoint-100" in str(error.value.path)


def test_a_single_step_is_compared_as_it_is(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckpt_cli.merge(run, out, step=100)
    found = ckpt_cli.verify(out, against=run / "checkpoint-200")
    assert {item.code for item in found.findings if item.severity == "error"} == {"different-values"}
