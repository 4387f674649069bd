"""Configs that a library reads under a name of its own, where there is no config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.results.written import MergeResult
from tests import tiny


def run(folder: Path, name: str, content: Any) -> Path:
    step = folder / "checkpoint-200"
    tiny.folder(step, {"encoder.weight": torch.randn(4, 4)}, files={**tiny.TOKENIZER, name: content}, bare=True)
    (step / "trainer_state.json").write_text(json.dumps({"global_step": 200}))
    return folder


def told(result: MergeResult) -> dict[str, list[str]]:
    codes: dict[str, list[str]] = {}
    for note in (*result.checkpoint.notes, *result.outputs[0].notes):
        codes.setdefault(note.code, []).append(note.text)
    return codes


@pytest.mark.parametrize(("name", "library"), [("gliner_config.json", "GLiNER"), ("open_clip_config.json", "open_clip")])
@pytest.mark.parametrize("with_base", [False, True])
def test_is_the_config_of_the_output(name: str, library: str, with_base: bool, tmp_path: Path) -> None:
    base = tiny.folder(tmp_path / "base", {"encoder.weight": torch.randn(4, 4)}, files={name: {"max_width": 12}}, bare=True)
    result = ckpt_cli.merge(run(tmp_path / "run", name, {"max_width": 20}), tmp_path / "out", base=base if with_base else None)
    assert json.loads((tmp_path / "out" / name).read_text()) == {"max_width": 20}
    notes = told(result)
    assert "lacks-asset" not in notes
    assert "unknown-files" not in notes
    assert notes["own-config"] == [f"there is no config.json: {library} builds the model from {name}, which is beside it"]
    found = {item.code: item.severity for item in ckpt_cli.verify(tmp_path / "out").findings}
    assert "lacks-config" not in found
    assert found["no-config"] == "info"


@pytest.mark.parametrize(
    ("name", "content", "taken"),
    [
        ("params.json", {"dim": 4096, "n_layers": 32, "n_heads": 32}, True),
        ("params.json", {"lr": 1e-4, "num_epochs": 3, "dim": 4096}, False),
        ("model_config.yaml", "encoder:\n  d_model: 512\n", True),
        ("config.yaml", "trainer:\n  max_epochs: 3\n", False),
    ],
)
def test_of_a_common_name_is_taken_for_what_it_holds(name: str, content: Any, taken: bool, tmp_path: Path) -> None:
    """Programs that start runs write files of such names as well; the output still lacks a config.json."""
    result = ckpt_cli.merge(run(tmp_path / "run", name, content), tmp_path / "out")
    assert (tmp_path / "out" / name).exists() == taken
    assert "no config.json" in told(result)["lacks-asset"][0]
