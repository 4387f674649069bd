"""What versions of transformers from 4.45 to 5.0 save of many models: found whole, written under the names that each gives its files.

The table has names, shapes and configs, as `tests/data/transformers_versions.py` took them from these versions; the values are made here.
"""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.hub.classes import expected_tensors, rules
from tests.data import transformers_versions
from tests.tensors import load

transformers = pytest.importorskip("transformers")

TABLE = Path(transformers_versions.__file__).with_name("transformers-versions.json.xz")
ASSETS = {"lacks-asset", "lacks-processor", "lacks-tokenizer", "token-ids"}
LOST = {("5.0.0", "qwen3_vl_moe")}
"""Files that this version cut wrongly, so that no later one loads them; its checkpoints of a training are whole."""

TODAY = {("4.57.6", "colqwen2")}
"""Tensors that a version saves and today's class has no place for: the unused head."""


@cache
def table() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(lzma.decompress(TABLE.read_bytes()))
    return content


def cases() -> list[tuple[str, str]]:
    """Each model of each version, unless the version before saves it alike."""
    found: list[tuple[str, str]] = []
    seen: set[str] = set()
    for version, models in table().items():
        for name, entry in models.items():
            text = json.dumps([name, entry["files"], entry["memory"], entry["shared"], entry["config"].get("tie_word_embeddings")])
            if text not in seen:
                seen.add(text)
                found.append((version, name))
    return found


@pytest.fixture(autouse=True)
def _answers(asked_here: None) -> None:
    pass


def values(shapes: dict[str, list[int]], integers: list[str]) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        name: torch.zeros(shape, dtype=torch.int64) if name in integers else torch.randn(shape, generator=made)
        for name, shape in shapes.items()
    }


def folders(root: Path, entry: dict[str, Any]) -> tuple[Path, Path]:
    """A folder as the version saves it, and what a training with it leaves."""
    saved, trained = root / "saved", root / "trained"
    for folder in (saved, trained):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(entry["config"]))
    save_file(values(entry["files"], entry["integers"]), saved / "model.safetensors", {"format": "pt"})
    state = values(entry["memory"], entry["integers"])
    torch.save(state | {name: state[owner] for name, owner in entry["shared"].items()}, trained / "pytorch_model.bin")
    return saved, trained


def warned(items: Any) -> set[str]:
    return {item.code for item in items if getattr(item, "level", getattr(item, "severity", None)) in ("warning", "error")} - ASSETS


@pytest.mark.parametrize(("version", "name"), cases(), ids="/".join)
def test_is_found_whole_and_keeps_the_names_of_its_version(version: str, name: str, tmp_path: Path) -> None:
    entry = table()[version][name]
    saved, trained = folders(tmp_path, entry)
    ok = {"extra-tensor", "extra-tensors"} if (version, name) in TODAY else set()
    if (version, name) not in LOST:
        assert not warned(ckpt_cli.verify(saved).findings) - ok
        assert not warned(ckpt_cli.merge(saved, tmp_path / "a").outputs[0].notes) - ok
        assert load(tmp_path / "a").keys() == entry["files"].keys()
    assert not warned(ckpt_cli.merge(trained, tmp_path / "b").outputs[0].notes) - ok
    assert not warned(ckpt_cli.verify(tmp_path / "b").findings) - ok
    if (version, name) not in LOST:
        assert load(tmp_path / "b").keys() == entry["files"].keys()


@pytest.mark.parametrize(("version", "name"), cases(), ids="/".join)
def test_has_the_same_names_without_transformers(version: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = table()[version][name]
    _, trained = folders(tmp_path, entry)
    for module in (expected_tensors, rules):
        monkeypatch.setattr(module, "installed_version", lambda: None)
    result = ckpt_cli.merge(trained, tmp_path / "b").outputs[0]
    if "not compared" not in result.naming and (version, name) not in LOST:
        assert load(tmp_path / "b").keys() == entry["files"].keys()


@pytest.mark.parametrize(("version", "name"), [case for case in cases() if case not in LOST][::3], ids="/".join)
def test_a_tensor_that_is_lost_is_told(version: str, name: str, tmp_path: Path) -> None:
    entry = table()[version][name]
    names = [each for each in entry["files"] if each not in entry["integers"]]
    lost = names[len(names) // 2]
    saved, _ = folders(tmp_path, {**entry, "files": {each: shape for each, shape in entry["files"].items() if each != lost}})
    assert warned(ckpt_cli.verify(saved).findings)
