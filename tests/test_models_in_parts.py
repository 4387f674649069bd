"""Models in several parts, each a model in a folder of its own: Routers of sentence-transformers, pipelines of diffusers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, Undecidable

PARTS = ("query_0_StaticEmbedding", "document_0_Transformer")


def put(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def weights(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"linear.weight": torch.randn(4, 8)}, folder / "model.safetensors", metadata={"format": "pt"})
    put(folder / "config.json", {"model_type": "own"})
    return folder / "model.safetensors"


def router(folder: Path) -> Path:
    """A Router as sentence-transformers 5 saves it: routes of one module each, and pooling without weights."""
    kinds = {name: f"sentence_transformers.models.{name.rpartition('_')[2]}" for name in (*PARTS, "document_1_Pooling")}
    put(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}])
    put(folder / "router_config.json", {"types": kinds, "structure": {}, "parameters": {}})
    put(folder / "document_1_Pooling" / "config.json", {})
    for part in PARTS:
        weights(folder / part)
    return folder


def pipeline(folder: Path) -> Path:
    named = {"_class_name": "Own", "unet": ["diffusers", "UNet"], "text_encoder": ["transformers", "CLIPTextModel"], "safety": [None, None]}
    put(folder / "model_index.json", named)
    for part in ("unet", "text_encoder"):
        weights(folder / part)
    return folder


@pytest.mark.parametrize("make", [router, pipeline])
@pytest.mark.parametrize("step", ["model", "run/checkpoint-5"])
def test_it_is_said_to_be_one_model_in_parts(make: Any, step: str, tmp_path: Path) -> None:
    folder = make(tmp_path / step)
    for call in (lambda: ckpt_cli.merge(folder, tmp_path / "out"), lambda: ckpt_cli.average([folder, folder], tmp_path / "out")):
        with pytest.raises(Undecidable, match="is one model in 2 parts") as error:
            call()
        assert error.value.hint is not None
        assert f"ckpt verify {folder} checks all parts" in error.value.hint
    assert ckpt_cli.verify(folder).component.count("+") == 1
    assert ckpt_cli.verify(folder).exit_code == 0
    # As the hint says, parts are passed one by one.
    part = error.value.hint.partition("one by one (")[2].partition(")")[0]
    assert ckpt_cli.average([part, part], tmp_path / "mean").outputs


def test_all_parts_are_verified(tmp_path: Path) -> None:
    folder = router(tmp_path / "model")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    damaged = folder / PARTS[1] / "model.safetensors"
    result = ckpt_cli.verify(folder, against=copy)
    assert (result.tensors, result.exit_code, [one.tensors for one in result.against]) == (2, 0, [1, 1])
    weights(folder / PARTS[1])
    different = ckpt_cli.verify(folder, against=copy)
    assert [item.file for item in different.findings if item.severity == "error"] == [PARTS[1]]
    damaged.write_bytes(damaged.read_bytes()[:-4])
    found = ckpt_cli.verify(folder)
    assert found.exit_code == 1
    assert {item.file for item in found.findings if item.severity == "error"} == {f"{PARTS[1]}/model.safetensors"}


def test_what_it_lacks_is_found_once(tmp_path: Path) -> None:
    folder = router(tmp_path / "model")
    shutil.rmtree(folder / "document_1_Pooling")
    (lack,) = [item for item in ckpt_cli.verify(folder).findings if item.code == "lacks-part"]
    assert (lack.file, "document_1_Pooling" in lack.message) == ("modules.json", True)


def test_other_weights_among_the_parts_are_told_apart_as_before(tmp_path: Path) -> None:
    folder = router(tmp_path / "run" / "checkpoint-5")
    weights(folder / "third")
    with pytest.raises(CkptError, match="nothing tells which"):
        ckpt_cli.merge(folder, tmp_path / "out")
