"""A folder per pipeline stage: one of them alone is no model, whatever format it is in and whatever it is called."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_cli
from ckpt_cli.errors import CkptError, PartOfSet
from tests import tiny
from tests.cli import ckpt_fork as ckpt
from tests.tensors import Tensors


def parts() -> list[Tensors]:
    """The embedding and the first layer, the second layer and the head."""
    weights = tiny.weights(1)
    first = {name: tensor for name, tensor in weights.items() if "embed" in name or ".layers.0." in name}
    return [first, {name: tensor for name, tensor in weights.items() if name not in first}]


def as_dcp(folder: Path, tensors: Tensors) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)


def as_safetensors(folder: Path, tensors: Tensors) -> None:
    tiny.folder(folder, tensors, bare=True)


def as_ranks(folder: Path, tensors: Tensors) -> None:
    folder.mkdir(parents=True)
    torch.save(tensors, folder / "model_world_size_1_rank_0.pt")


def as_torch(folder: Path, tensors: Tensors) -> None:
    folder.mkdir(parents=True)
    torch.save(tensors, folder / "pytorch_model.bin")


FORMATS = [as_dcp, as_safetensors, as_ranks, as_torch]
NAMES = ["pp_{}", "pp{}", "pipeline_stage_{}", "pp_rank_0{}", "model-pp-stage-{}"]


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("name", [*NAMES, "stage{}", "stage_{}", "part-of-four-{}"])
def test_one_of_them_is_refused_by_every_command(name: str, write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for number, tensors in enumerate(parts()):
        write(tmp_path / "step-5" / name.format(number), tensors)
    for number in (0, 1):
        path = tmp_path / "step-5" / name.format(number)
        for command in (lambda path: ckpt_cli.merge(path, tmp_path / "out"), ckpt_cli.inspect, ckpt_cli.verify):
            if command is ckpt_cli.verify and write is as_safetensors:
                continue  # a folder of a model is verified as it is: see below
            with pytest.raises(PartOfSet, match=name.format(number)) as caught:
                command(path)
            # Single files in folders of ranks were known before, by the same names.
            assert name.format(1 - number) in str(caught.value.expected) or "model parallelism" in caught.value.message
        assert name.format(number) in str(ckpt_cli.detect(path).problem)
    with pytest.raises(PartOfSet):
        ckpt_cli.average([tmp_path / "step-5" / name.format(number) for number in (0, 1)], tmp_path / "out")


@pytest.mark.parametrize("write", FORMATS)
def test_the_folder_of_all_is_refused_without_a_false_suggestion(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for number, tensors in enumerate(parts()):
        write(tmp_path / "all" / f"pp_{number}", tensors)
    outcome = ckpt("merge", tmp_path / "all", "-o", tmp_path / "out")
    assert outcome.code == 4
    assert "pp_0 holds one part of a parallel model" in outcome.err
    assert "did you mean" not in outcome.err


@pytest.mark.parametrize("name", NAMES)
def test_one_that_was_moved_away_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    as_dcp(tmp_path / name.format(0), parts()[0])
    with pytest.raises(PartOfSet) as caught:
        ckpt_cli.merge(tmp_path / name.format(0), tmp_path / "out")
    assert "if it is a whole model, rename the folder" in str(caught.value.hint)
    (tmp_path / name.format(0)).rename(tmp_path / "whole")
    ckpt_cli.merge(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("name", ["pp_{}", "stage{}"])
def test_a_model_folder_of_one_stage_is_a_finding(name: str, tmp_path: Path) -> None:
    for number, tensors in enumerate(parts()):
        as_safetensors(tmp_path / name.format(number), tensors)
    found = ckpt_cli.verify(tmp_path / name.format(0)).findings
    assert any(item.code == "part-of-set" and item.severity == "error" for item in found)


class TestWholeModels:
    """Other folders that differ in a number."""

    @pytest.mark.parametrize("write", FORMATS)
    @pytest.mark.parametrize("name", ["stage{}", "tp{}", "run_pp{}", "epoch_{}", "qwen-{}", "ep{}", "expert{}"])
    def test_of_the_same_names_are_read(self, name: str, write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        for number in (1, 2):
            write(tmp_path / name.format(number), tiny.weights(number))
        ckpt_cli.merge(tmp_path / name.format(1), tmp_path / "out")

    def test_of_other_modules_are_read(self, tmp_path: Path) -> None:
        as_dcp(tmp_path / "stage1", {"generator.conv.weight": torch.ones(2, 2)})
        as_dcp(tmp_path / "stage2", {"layers.0.weight": torch.ones(2, 2)})
        ckpt_cli.merge(tmp_path / "stage1", tmp_path / "out")

    def test_beside_what_cannot_be_read_are_read(self, tmp_path: Path) -> None:
        as_dcp(tmp_path / "stage1", tiny.weights(1))
        (tmp_path / "stage2").mkdir()
        (tmp_path / "stage2" / ".metadata").write_bytes(b"no pickle")
        with pytest.raises(CkptError):
            ckpt_cli.inspect(tmp_path / "stage2")
        ckpt_cli.merge(tmp_path / "stage1", tmp_path / "out")
