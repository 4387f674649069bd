"""Files of weights that hold none give way to a save or steps beside them: trainers leave such a file where weights were not gathered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError

LEAD = "base_model.model.layers.0.q_proj"
FACTORS = {f"{LEAD}.lora_A.weight": torch.randn(2, 4), f"{LEAD}.lora_B.weight": torch.randn(4, 2)}


def config(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def empty(file: Path, *, named: bool = False) -> None:
    """What is saved of a model whose weights are elsewhere: nothing, or, ``named``, a tensor of no elements for each."""
    held = {name: torch.empty(0) for name in FACTORS} if named else {}
    if file.suffix == ".bin":
        torch.save(held, file)
    else:
        save_file(held, file, metadata={"format": "pt"})


def zero_3(folder: Path, step: int, save: Path) -> Path:
    """A step of the Trainer whose weights DeepSpeed has in its own folder."""
    shutil.copytree(save, config(folder) / f"global_step{step}")
    (folder / "latest").write_text(f"global_step{step}")
    return folder


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save of DeepSpeed, of any stage."""
    folder = tmp_path_factory.mktemp("save")
    states = {"module": FACTORS, "ds_version": "0.16.0", "dp_world_size": 1, "mp_world_size": 1, "global_steps": 2, "optimizer": None}
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin", "model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("named", [False, True])
def test_a_file_without_tensors_gives_way_to_the_save_beside_it(name: str, named: bool, save: Path, tmp_path: Path) -> None:
    step = zero_3(tmp_path / "run" / "checkpoint-2", 2, save)
    empty(step / name, named=named)
    empty(config(tmp_path / "run") / name, named=named)
    for path in (tmp_path / "run", step):
        opened = ckpt_cli.open(path)
        assert sorted(opened) == sorted(FACTORS)
        assert all(torch.equal(opened[key].torch(), FACTORS[key]) for key in FACTORS)
    notes = ckpt_cli.detect(step).checkpoint.notes
    assert [note.level for note in notes if name in note.text] == ["info"]
    assert f"{step / name} holds no tensor, and was not read" in [note.text for note in notes]


def test_an_empty_file_in_the_root_of_a_run_gives_way_to_the_steps(tmp_path: Path) -> None:
    """alpaca-lora replaced state_dict() of the model, so that the adapter that it saved last is empty."""
    empty(config(tmp_path / "run") / "adapter_model.bin")
    step = config(tmp_path / "run" / "checkpoint-200")
    torch.save(FACTORS, step / "adapter_model.bin")
    found = ckpt_cli.detect(tmp_path / "run")
    assert Path(found.checkpoint.path) == step
    assert any(
        "adapter_model.bin beside the step folders is not read, since it holds no tensor" in note.text for note in found.checkpoint.notes
    )


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_empty_file_alone_is_refused_with_what_left_it(name: str, tmp_path: Path) -> None:
    empty(config(tmp_path / "run") / name)
    for path in (tmp_path / "run", tmp_path / "run" / name):
        with pytest.raises(CkptError, match="holds no tensor") as caught:
            ckpt_cli.merge(path, tmp_path / "out")
        assert "did not gather" in str(caught.value.expected)
        assert caught.value.exit_code == 3
    assert not ckpt_cli.detect(tmp_path / "run").checkpoint.complete
