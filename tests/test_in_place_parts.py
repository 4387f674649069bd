"""A part of a model is never written beside its config under the name of the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import UsageError
from tests import tiny
from tests.tensors import load


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tiny.verl(tmp_path / "run", {**tiny.weights(1), "value_head.weight": torch.ones(1, 16)})
    return tmp_path / "run"


@pytest.mark.parametrize("options", [{"include": "*mlp*"}, {"exclude": "*norm*"}, {"key_map": r".*norm.*"}], ids=str)
@pytest.mark.parametrize("of", [tiny.config(), tiny.unknown()], ids=["known", "unknown"])
def test_in_place_it_needs_a_name(options: dict[str, Any], of: dict[str, Any], tmp_path: Path) -> None:
    home = tiny.verl(tmp_path / "run", tiny.weights(1), of)
    if "key_map" in options:
        (tmp_path / "map.json").write_text(json.dumps({"rules": [{"match": options["key_map"], "drop": True}]}))
        options = {"key_map": tmp_path / "map.json"}
    there = sorted(home.iterdir())
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=r"without [0-9]+ tensors of the model") as caught:
            ckpt_cli.merge(tmp_path / "run", in_place=True, dry_run=dry_run, **options)
    assert sorted(home.iterdir()) == there
    assert "--weights-name" in str(caught.value.hint)
    ckpt_cli.merge(tmp_path / "run", in_place=True, weights_name="part.safetensors", **options)
    assert (home / "part.safetensors").exists()
    assert not (home / "model.safetensors").exists()


def test_the_whole_needs_none(run: Path) -> None:
    ckpt_cli.merge(run, in_place=True, exclude="value_head*")
    assert load(run / "global_step_1" / "actor" / "model.safetensors").keys() == tiny.shapes().keys()


def test_a_folder_of_its_own_is_the_user_s(run: Path, tmp_path: Path) -> None:
    ckpt_cli.merge(run, tmp_path / "out", include="*mlp*")
    assert all("mlp" in name for name in load(tmp_path / "out"))
