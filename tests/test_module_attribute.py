"""A prefix ``module.`` that every name has: DistributedDataParallel puts it there, and a class may have an attribute of that name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from tests.tensors import Tensors, differences, load

OWN = {"model_type": "net", "architectures": ["Net"], "auto_map": {"AutoModel": "modeling_net.Net"}}
WAY_BACK = "without module., with which every name began (--key-map =module puts it back), not compared: "


def tensors(prefix: str = "module.") -> Tensors:
    return {f"{prefix}{number}.{name}": torch.full((2, 2), float(number)) for number in range(2) for name in ("weight", "bias")}


def saved(folder: Path, file: str, held: Tensors) -> Path:
    folder.mkdir()
    save_file(held, folder / file) if file.endswith(".safetensors") else torch.save(held, folder / file)
    return folder


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_what_save_pretrained_wrote_of_a_class_that_is_not_run_keeps_its_names(file: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "in", file, tensors())
    (folder / "config.json").write_text(json.dumps(OWN))
    result = ckpt_cli.merge(folder, tmp_path / "out")
    assert differences(load(tmp_path / "out"), tensors()) == []
    assert result.outputs[0].naming == "as the training named them, not compared: Net is custom code, which is not run"
    assert result.outputs[0].renamed == 0
    assert ckpt_cli.verify(tmp_path / "out", against=folder).exit_code == 0


def test_other_wrappers_are_removed_there_too(tmp_path: Path) -> None:
    folder = saved(tmp_path / "in", "model.safetensors", tensors("_orig_mod.module."))
    (folder / "config.json").write_text(json.dumps(OWN))
    ckpt_cli.merge(folder, tmp_path / "out")
    assert differences(load(tmp_path / "out"), tensors()) == []


@pytest.mark.parametrize("file", ["checkpoint.pt", "model.safetensors", "model_world_size_1_rank_0.pt"])
def test_elsewhere_its_removal_is_said_with_the_way_back(file: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "in", file, tensors())
    naming = ckpt_cli.merge(folder, tmp_path / "out").outputs[0].naming
    assert naming == f"{WAY_BACK}there is no config.json"
    assert differences(load(tmp_path / "out"), tensors("")) == []
    ckpt_cli.merge(folder, tmp_path / "back", key_map=["=module"])
    assert differences(load(tmp_path / "back"), tensors()) == []


def test_rank_files_beside_the_config_of_such_a_class_are_no_files_of_save_pretrained(tmp_path: Path) -> None:
    folder = saved(tmp_path / "in", "model_world_size_1_rank_0.pt", tensors())
    (folder / "config.json").write_text(json.dumps(OWN))
    naming = ckpt_cli.merge(folder, tmp_path / "out").outputs[0].naming
    assert naming.startswith(WAY_BACK)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "_fsdp_wrapped_module."])
def test_names_without_it_are_those_of_the_training(prefix: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "in", "checkpoint.pt", tensors(prefix))
    naming = ckpt_cli.merge(folder, tmp_path / "out").outputs[0].naming
    assert naming == "as the training named them, not compared: there is no config.json"
