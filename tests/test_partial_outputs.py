"""Outputs that were written without some tensors, as sources of further ones: what a manifest says is never forgotten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import ckpt_cli
from tests import tiny
from tests.cli import ckpt_fork as ckpt
from tests.tensors import load

NORMS = {name for name in tiny.shapes() if "norm" in name}


def warnings(result: Any) -> list[str]:
    return [note.text for note in result.outputs[0].notes if note.code == "partial-output"]


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """An output without norms, of a class that nobody knows."""
    tiny.verl(tmp_path / "run", tiny.weights(1), tiny.unknown())
    ckpt_cli.merge(tmp_path / "run", tmp_path / "part", exclude="*norm*")
    return tmp_path / "part"


class TestAPartialOutput:
    def test_is_told_by_every_command(self, part: Path, tmp_path: Path) -> None:
        for command in ("detect", "inspect", "merge"):
            options = ("-o", tmp_path / "out") if command == "merge" else ()
            assert "left out (--exclude *norm*): model.layers.{0..1}.input_layernorm.weight" in ckpt(command, part, *options).err
        assert any(item.code == "left-out" and "--exclude *norm*" in item.message for item in ckpt_cli.verify(part).findings)

    def test_stays_one_in_what_is_made_of_it(self, part: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(part, tmp_path / "cast", dtype="bf16")
        assert len(warnings(ckpt_cli.merge(tmp_path / "cast", tmp_path / "again"))) == 1
        assert set(json.loads((tmp_path / "again/ckpt-manifest.json").read_text())["left_out"]) == NORMS
        assert any(item.code == "partial-output" for item in ckpt_cli.verify(tmp_path / "again").findings)

    def test_is_told_in_an_average_and_by_its_output(self, part: Path, tmp_path: Path) -> None:
        second = tiny.folder(
            tmp_path / "b", {name: tensor for name, tensor in tiny.weights(2).items() if name not in NORMS}, tiny.unknown()
        )
        result = ckpt_cli.average([part, second], tmp_path / "mean")
        assert warnings(result)
        assert any(item.code == "partial-output" for item in ckpt_cli.verify(tmp_path / "mean").findings)

    def test_is_whole_again_with_what_the_base_has(self, part: Path, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.unknown())
        assert not warnings(ckpt_cli.merge(part, tmp_path / "out", base=base, carry_from_base="*norm*"))
        assert load(tmp_path / "out").keys() == tiny.shapes().keys()
        assert not warnings(ckpt_cli.merge(tmp_path / "out", tmp_path / "again"))

    @pytest.mark.parametrize("options", [{"include": "*mlp*"}, {"key_map": True}], ids=["include", "key map"])
    def test_is_one_whatever_left_tensors_out(self, options: dict[str, Any], tmp_path: Path) -> None:
        tiny.verl(tmp_path / "run", tiny.weights(1), tiny.unknown())
        if "key_map" in options:
            (tmp_path / "map.json").write_text(json.dumps({"rules": [{"match": r".*norm.*", "drop": True}]}))
            options = {"key_map": tmp_path / "map.json"}
        ckpt_cli.merge(tmp_path / "run", tmp_path / "part", **options)
        assert warnings(ckpt_cli.merge(tmp_path / "part", tmp_path / "out"))

    def test_with_what_may_be_missing_is_one(self, tmp_path: Path) -> None:
        lacking = {name: tensor for name, tensor in tiny.weights(1).items() if name != "model.norm.weight"}
        tiny.verl(tmp_path / "run", lacking)
        ckpt_cli.merge(tmp_path / "run", tmp_path / "part", allow_missing="model.norm.weight")
        assert "model.norm.weight" in warnings(ckpt_cli.merge(tmp_path / "part", tmp_path / "out", allow_missing="model.norm.weight"))[0]

    def test_of_an_older_version_is_known_by_its_options(self, part: Path, tmp_path: Path) -> None:
        manifest = json.loads((part / "ckpt-manifest.json").read_text())
        del manifest["left_out"]
        (part / "ckpt-manifest.json").write_text(json.dumps(manifest))
        assert "some were left out (--exclude *norm*)" in warnings(ckpt_cli.merge(part, tmp_path / "out"))[0]


class TestAWholeOutput:
    def test_is_none(self, tmp_path: Path) -> None:
        tiny.verl(tmp_path / "run", tiny.weights(1), tiny.unknown())
        ckpt_cli.merge(tmp_path / "run", tmp_path / "whole")
        assert not warnings(ckpt_cli.merge(tmp_path / "whole", tmp_path / "out"))
        assert not any(item.code == "partial-output" for item in ckpt_cli.verify(tmp_path / "whole").findings)

    def test_of_a_known_class_is_whole_whatever_else_was_left_out(self, tmp_path: Path) -> None:
        tiny.verl(tmp_path / "run", {**tiny.weights(1), "value_head.weight": tiny.weights(1)["model.norm.weight"]})
        ckpt_cli.merge(tmp_path / "run", tmp_path / "whole", exclude="value_head*")
        assert not any(item.code == "partial-output" for item in ckpt_cli.verify(tmp_path / "whole").findings)
        assert not warnings(ckpt_cli.merge(tmp_path / "whole", tmp_path / "out"))

    def test_of_another_program_in_the_same_folder_is_not_meant(self, part: Path, tmp_path: Path) -> None:
        """The manifest is of files that are gone."""
        (part / "model.safetensors").unlink()
        save_file(tiny.weights(2), part / "pytorch_model.safetensors", metadata={"format": "pt"})
        assert not warnings(ckpt_cli.merge(part / "pytorch_model.safetensors", tmp_path / "out"))
