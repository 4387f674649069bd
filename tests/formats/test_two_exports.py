"""Files of two exports of one model under the same names: names and shapes are right, dtypes and sizes show it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import CkptError
from tests import tiny
from tests.tensors import Tensors

INDEX = "model.safetensors.index.json"
LAYERS = 4
Change = Callable[[str, torch.Tensor], torch.Tensor]


def exported(folder: Path, change: Change = lambda _, tensor: tensor, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A model in several files, as transformers saves it; a file ends inside of a layer."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(seed)
    config = Qwen2Config(**{key: value for key, value in tiny.config(num_hidden_layers=LAYERS).items() if key != "torch_dtype"})
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(
        folder, max_shard_size="6KB" if dtype == torch.bfloat16 else "12KB"
    )
    rewritten(folder, change)
    return folder


def rewritten(folder: Path, change: Change) -> None:
    for path in folder.glob("*.safetensors"):
        save_file({name: change(name, tensor).contiguous() for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def with_total(folder: Path, total: object = None) -> None:
    """Another total; without one, what the files hold."""
    index = json.loads((folder / INDEX).read_text())
    held = sum(tensor.nbytes for path in folder.glob("*.safetensors") for tensor in load_file(path).values())
    (folder / INDEX).write_text(json.dumps({**index, "metadata": {"total_size": held if total is None else total}}))


def told(folder: Path, out: Path) -> tuple[set[str], set[str]]:
    """The codes of what `merge` warns of, and of what `verify` does."""
    notes = ckpt_cli.merge(folder, out).checkpoint.notes
    return (
        {note.code for note in notes if note.level == "warning"},
        {item.code for item in ckpt_cli.verify(folder).findings if item.severity != "info"},
    )


class TestOfTwoDtypes:
    @pytest.mark.parametrize("number", [0, 1, -1])
    def test_one_file_of_another_export_is_told(self, number: int, tmp_path: Path) -> None:
        folder, other = exported(tmp_path / "a"), exported(tmp_path / "b", dtype=torch.float32)
        path = sorted(folder.glob("*.safetensors"))[number]
        assert len(list(folder.glob("*.safetensors"))) == len(list(other.glob("*.safetensors"))) > 3
        shutil.copy(other / path.name, path)
        merged, found = told(folder, tmp_path / "out")
        assert merged == found == {"mixed-exports", "index-total"}
        with_total(folder)
        assert told(folder, tmp_path / "again") == ({"mixed-exports"}, {"mixed-exports"})
        with pytest.raises(CkptError, match="two exports"):
            ckpt_cli.merge(folder, tmp_path / "strict", strict=True)

    @pytest.mark.parametrize("mixed", [True, False])
    def test_in_files_of_torch(self, mixed: bool, tmp_path: Path) -> None:
        folder, other = exported(tmp_path / "a"), exported(tmp_path / "b", dtype=torch.float32)
        index = json.loads((folder / INDEX).read_text())
        files = {name: file.replace("model", "pytorch_model").replace("safetensors", "bin") for name, file in index["weight_map"].items()}
        for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
            tensors = load_file(other / path.name if mixed and number == 1 else path)
            torch.save(tensors, folder / files[next(iter(tensors))])
            path.unlink()
        (folder / INDEX).unlink()
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({**index, "weight_map": files}))
        notes = ckpt_cli.merge(folder, tmp_path / "out").checkpoint.notes
        assert {note.code for note in notes if note.level == "warning"} == ({"mixed-exports", "index-total"} if mixed else set())

    def test_is_told_of_an_average_too(self, tmp_path: Path) -> None:
        folders = [exported(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
        other = exported(tmp_path / "b", dtype=torch.float32)
        for folder in folders:
            name = min(path.name for path in folder.glob("*.safetensors"))
            shutil.copy(other / name, folder / name)
        result = ckpt_cli.average(folders, tmp_path / "out")
        assert {"mixed-exports", "index-total"} <= {
            note.code for note in (*result.checkpoint.notes, *result.notes, *result.outputs[0].notes)
        }

    def test_is_told_of_a_base_whose_weights_are_written(self, tmp_path: Path) -> None:
        base, other = exported(tmp_path / "base"), exported(tmp_path / "b", dtype=torch.float32)
        parts = sorted(path.name for path in base.glob("*.safetensors"))
        shutil.copy(other / parts[0], base / parts[0])
        name = "model.layers.0.self_attn.q_proj"
        weights = [load_file(path) for path in base.glob("*.safetensors")]
        rows, columns = next(of for of in weights if f"{name}.weight" in of)[f"{name}.weight"].shape
        run = tmp_path / "run"
        run.mkdir()
        factors = {"lora_A": torch.ones(2, columns), "lora_B": torch.ones(rows, 2)}
        save_file({f"base_model.model.{name}.{of}.weight": factor for of, factor in factors.items()}, run / "adapter_model.safetensors")
        (run / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [name]}))
        notes = ckpt_cli.merge(run, tmp_path / "out", base=base).outputs[0].notes
        warned = {note.code: note.text for note in notes if note.level == "warning"}
        assert warned["mixed-exports"].startswith("the base: ")
        assert "index-total" in warned

    @pytest.mark.parametrize(
        "wide",
        [
            lambda name: "norm" in name,
            lambda name: ".0." in name or ".3." in name,
            lambda name: "layers.2.mlp" in name,
            lambda name: "embed" in name or "lm_head" in name,
        ],
        ids=["norms", "first and last layer", "parts of a layer", "around the layers"],
    )
    def test_a_model_of_several_dtypes_is_sound(self, wide: Callable[[str], bool], tmp_path: Path) -> None:
        folder = exported(tmp_path / "a", lambda name, tensor: tensor.float() if wide(name) else tensor)
        with_total(folder)
        merged, found = told(folder, tmp_path / "out")
        assert "mixed-exports" not in merged | found


class TestOfAnotherSize:
    @pytest.mark.parametrize("by", [-1000, 7, 123456])
    def test_is_told_by_both(self, by: int, tmp_path: Path) -> None:
        folder = exported(tmp_path / "a")
        with_total(folder, sum(tensor.nbytes for path in folder.glob("*.safetensors") for tensor in load_file(path).values()) + by)
        assert told(folder, tmp_path / "out") == ({"index-total"}, {"index-total"})

    @pytest.mark.parametrize(
        "total",
        [
            lambda held: sum(tensor.numel() for tensor in held.values()),
            lambda held: 4 * sum(tensor.numel() for tensor in held.values()),
            lambda held: sum(tensor.nbytes for tensor in held.values()) + held["lm_head.weight"].nbytes,
            lambda held: str(sum(tensor.nbytes for tensor in held.values())),
            lambda held: 0,
        ],
        ids=["elements", "before a cast", "a tied tensor twice", "a string", "nothing"],
    )
    def test_as_writers_of_sound_models_leave_it_is_no_doubt_of_the_weights(
        self, total: Callable[[Tensors], object], tmp_path: Path
    ) -> None:
        folder = exported(tmp_path / "a")
        held = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        with_total(folder, total(held))
        assert told(folder, tmp_path / "out") == (set(), {"index-total"})


def test_files_that_were_written_on_different_days_are_sound(tmp_path: Path) -> None:
    """A download that went on the day after has such times too."""
    import os

    folder = exported(tmp_path / "a")
    os.utime(min(folder.glob("*.safetensors")), (1.75e9, 1.75e9))
    assert told(folder, tmp_path / "out") == (set(), set())
