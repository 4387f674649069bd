"""The classifier of timm's models against the number and the names of classes in config.json, which may be that of a base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from tests.tensors import Tensors
from tests.tiny import folder

CODE = "class-rows"


def config(classes: int = 10, **changes: Any) -> dict[str, Any]:
    return {"architecture": "resnet18", "num_classes": classes, "num_features": 8, "pretrained_cfg": {"classifier": "fc"}, **changes}


def net(rows: int) -> Tensors:
    return {"conv1.weight": torch.ones(4, 3, 7, 7), "fc.weight": torch.ones(rows, 8), "fc.bias": torch.zeros(rows)}


def told(path: Path, out: Path, **options: Any) -> list[str]:
    merged = [note.text for note in ckpt_cli.merge(path, out, **options).outputs[0].notes if note.code == CODE]
    assert [item.message for item in ckpt_cli.verify(out).findings if item.code == CODE] == [text.partition(";")[0] for text in merged]
    return merged


@pytest.mark.parametrize("labels", [None, [f"n{number}" for number in range(10)]])
def test_of_a_base_are_told(tmp_path: Path, labels: list[str] | None) -> None:
    base = folder(tmp_path / "base", net(10), config(**({"label_names": labels} if labels else {})))
    torch.save({"epoch": 3, "arch": "resnet18", "state_dict": net(5)}, tmp_path / "last.pth.tar")
    (text,) = told(tmp_path / "last.pth.tar", tmp_path / "out", base=base)
    assert "fc.weight has 5 rows, but config.json says num_classes 10" in text


@pytest.mark.parametrize(
    ("of", "rows", "count"),
    [
        (config(), 10, 0),
        (config(0, pretrained_cfg={"classifier": ""}), 10, 0),  # features alone
        (config(label_names=["a"] * 9), 10, 1),
        (config(label_names={"a": 1}), 9, 2),
        (config(pretrained_cfg={"classifier": ["fc", "aux"]}), 9, 1),
        (config(pretrained_cfg={"classifier": 3}), 9, 0),
        (config(pretrained_cfg=[]), 9, 0),
        (config(True), 9, 0),
        ({**config(), "num_classes": "10"}, 9, 0),
    ],
)
def test_of_one_folder(tmp_path: Path, of: dict[str, Any], rows: int, count: int) -> None:
    path = folder(tmp_path / "model", net(rows), None, bare=True)
    (path / "config.json").write_text(json.dumps(of))
    assert len(told(path, tmp_path / "out")) == count
