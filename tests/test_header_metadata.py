"""What headers of safetensors files say besides tensors, which loaders read: it is written as long as it is true of the output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckpt_cli

TENSORS = {
    "blocks.0.q.weight_qdata": torch.arange(6, dtype=torch.int8).reshape(2, 3),
    "blocks.0.q.weight_scale": torch.ones(2, 1),
    "blocks.0.norm.weight": torch.ones(3, dtype=torch.bfloat16),
}
PACKED = {"blocks.0.q.weight": json.dumps({"_type": "Int8Tensor", "_data": {"block_size": [1, 3]}}), "format": "pt"}
"""As torchao writes it, by the names of the tensors that codes become."""

LISTED = {"_quantization_metadata": json.dumps({"layers": {"blocks.0.q": {"format": "int8"}}})}
"""As ComfyUI does, with modules in the value."""

DESCRIBED = {"config": json.dumps({"transformer": {"num_layers": 1}}), "modelspec.title": "a model", "format": "pt"}
"""As LTX-Video and others do: nothing of it is about single tensors."""

KINDS = {"packed": PACKED, "listed": LISTED, "described": DESCRIBED}
ABOUT = ("packed", "listed")


def source(folder: Path, metadata: Mapping[str, str]) -> Path:
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors", metadata=dict(metadata))
    return folder


def said(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
    return found


def levels(result: ckpt_cli.MergeResult) -> list[str]:
    return [note.level for note in result.outputs[0].notes if note.code == "header-metadata"]


@pytest.mark.parametrize("kind", KINDS)
class TestWhatHeadersSay:
    def test_is_written_with_the_tensors_of_which_it_is_said(self, kind: str, tmp_path: Path) -> None:
        result = ckpt_cli.merge(source(tmp_path / "run", KINDS[kind]), tmp_path / "out")
        assert said(tmp_path / "out" / "model.safetensors") == {**KINDS[kind], "format": "pt"}
        assert not levels(result)

    def test_is_in_every_shard(self, kind: str, tmp_path: Path) -> None:
        ckpt_cli.merge(source(tmp_path / "run", KINDS[kind]), tmp_path / "out", max_shard_size=8)
        shards = list((tmp_path / "out").glob("*.safetensors"))
        assert len(shards) > 1
        assert all(said(path) == {**KINDS[kind], "format": "pt"} for path in shards)

    def test_is_passed_on_from_shards(self, kind: str, tmp_path: Path) -> None:
        ckpt_cli.merge(source(tmp_path / "run", KINDS[kind]), tmp_path / "shards", max_shard_size=8)
        ckpt_cli.merge(tmp_path / "shards", tmp_path / "out")
        assert said(tmp_path / "out" / "model.safetensors") == {**KINDS[kind], "format": "pt"}

    def test_is_left_out_where_names_differ(self, kind: str, tmp_path: Path) -> None:
        run = source(tmp_path / "run", KINDS[kind])
        result = ckpt_cli.merge(run, tmp_path / "out", key_map="blocks=layers")
        assert said(tmp_path / "out" / "model.safetensors") == {"format": "pt"}
        assert levels(result) == ["warning" if kind in ABOUT else "info"]

    def test_is_left_out_of_averages(self, kind: str, tmp_path: Path) -> None:
        runs = [source(tmp_path / name, KINDS[kind]) for name in ("a", "b")]
        result = ckpt_cli.average(runs, tmp_path / "out")
        assert said(tmp_path / "out" / "model.safetensors") == {"format": "pt"}
        assert [note.level for note in result.outputs[0].notes if note.code == "header-metadata"] == [
            "warning" if kind in ABOUT else "info"
        ]

    def test_stays_with_a_part_of_the_tensors(self, kind: str, tmp_path: Path) -> None:
        ckpt_cli.merge(source(tmp_path / "run", KINDS[kind]), tmp_path / "out", exclude="*norm*")
        assert said(tmp_path / "out" / "model.safetensors") == {**KINDS[kind], "format": "pt"}


def test_is_left_out_where_values_are_cast(tmp_path: Path) -> None:
    run = source(tmp_path / "run", DESCRIBED)
    assert levels(ckpt_cli.merge(run, tmp_path / "out", dtype="fp16", include="*norm*")) == ["info"]


def test_in_which_files_disagree_is_a_warning(tmp_path: Path) -> None:
    run = source(tmp_path / "run", DESCRIBED)
    ckpt_cli.merge(run, tmp_path / "shards", max_shard_size=8)
    first = min((tmp_path / "shards").glob("*.safetensors"))
    with safe_open(first, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, first, metadata={**DESCRIBED, "modelspec.title": "another"})
    result = ckpt_cli.merge(tmp_path / "shards", tmp_path / "out")
    (told,) = [note for note in result.checkpoint.notes if note.code == "header-metadata"]
    assert told.level == "warning"
    assert "modelspec.title" in told.text
    assert said(tmp_path / "out" / "model.safetensors") == {"config": DESCRIBED["config"], "format": "pt"}
