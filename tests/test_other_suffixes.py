"""A file under the suffix of the other format is told as what it is: nothing is wrong with its content."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError
from tests import tiny


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_file_of_torch_called_safetensors(legacy: bool, tmp_path: Path) -> None:
    run = tiny.folder(tmp_path / "run", tiny.weights(), tiny.config())
    torch.save(tiny.weights(), run / "model.safetensors", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CkptError, match=r"this is a file of torch\.save") as caught:
        ckpt_cli.merge(run, tmp_path / "out")
    assert ".bin" in str(caught.value.hint)
    found = next(item for item in ckpt_cli.verify(run).findings if item.severity == "error")
    assert "this is a file of torch.save" in found.message


def test_a_file_of_safetensors_called_as_torchs(tmp_path: Path) -> None:
    run = tiny.folder(tmp_path / "run", tiny.weights(), tiny.config())
    (run / "model.safetensors").rename(run / "pytorch_model.bin")
    with pytest.raises(CkptError, match="this is a safetensors file") as caught:
        ckpt_cli.merge(run, tmp_path / "out")
    assert ".safetensors" in str(caught.value.hint)
