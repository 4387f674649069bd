"""One checkpoint in two forms counts twice in an average, which is said whatever the forms are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.formats.deepspeed.agreement import agrees
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.views import concatenated, sliced
from tests.test_agreeing import held

SOURCES = (
    "megatron/llama-tp2/checkpoint",
    "megatron/mixtral-ep2/checkpoint",
    "megatron/legacy-qwen2-te-tp2/checkpoint",
    "dcp/2.13.0/fsdp2",
    "torch-2.13.0/fsdp2_tp",
    "torch-2.13.0/fsdp1_sharded_tensor",
    "torch-checkpointing/fsdp-4/run",
)


def warnings(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in (*result.notes, *result.outputs[0].notes) if note.level == "warning"}


@pytest.mark.parametrize("source", SOURCES)
def test_a_checkpoint_and_its_own_export(source: str, data: Path, tmp_path: Path) -> None:
    ckpt_cli.merge(data / source, tmp_path / "export")
    for number, paths in enumerate(((data / source, tmp_path / "export"), (tmp_path / "export", data / source))):
        told = warnings(ckpt_cli.average(paths, tmp_path / f"mean{number}"))
        assert "hold the same weights" in told["same-twice"]
        assert str(tmp_path / "export") in told["same-twice"]


def test_one_run_as_rank_files_and_as_dcp(data: Path, tmp_path: Path) -> None:
    told = warnings(ckpt_cli.average([data / "torch-2.13.0" / "fsdp2", data / "dcp" / "2.13.0" / "fsdp2"], tmp_path / "mean"))
    assert "hold the same weights" in told["same-twice"]


def test_only_what_enters_the_sum_counts(data: Path, tmp_path: Path) -> None:
    source = data / SOURCES[0]
    ckpt_cli.merge(source, tmp_path / "export")
    result = ckpt_cli.average([source, tmp_path / "export", tmp_path / "export"], tmp_path / "mean", method="weighted", weights=(1, 0, 0))
    assert "hold the same weights" not in warnings(result).get("same-twice", "")


def test_other_values_in_one_tensor_are_another_checkpoint(data: Path, tmp_path: Path) -> None:
    source = data / SOURCES[0]
    ckpt_cli.merge(source, tmp_path / "export")
    file = tmp_path / "export" / "model.safetensors"
    held = load_file(file)
    held["model.norm.weight"] = held["model.norm.weight"] + 1
    save_file(held, file, {"format": "pt"})
    assert "same-twice" not in warnings(ckpt_cli.average([source, tmp_path / "export"], tmp_path / "mean"))


@pytest.mark.parametrize("row", [1, 70, 299])
def test_samples_of_masters_are_of_every_piece(row: int) -> None:
    """A tensor in 300 pieces of which one differs from the weights that were rounded from it."""
    weights = torch.arange(300 * 100, dtype=torch.float32).reshape(300, 100)
    master = weights.clone()
    master[row, 0] = -1

    def in_pieces(values: torch.Tensor) -> Tensor:
        whole = held({"w": values})["w"]
        return concatenated([sliced(whole, 0, row, row + 1) for row in range(300)], 0)

    assert agrees(in_pieces(weights), held({"w": weights.to(torch.bfloat16)})["w"])
    assert not agrees(in_pieces(master), held({"w": weights.to(torch.bfloat16)})["w"])
