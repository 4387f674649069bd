"""Averages of the weights in a folder of their own: read where it holds one file of torch, no rival of the model, named otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli import shell
from ckpt_cli.errors import NoComponent, Unsupported
from tests.tensors import Tensors, load


def state(value: float) -> Tensors:
    return {"a.weight": torch.full((2, 3), value), "a.bias": torch.full((2,), value)}


def step(path: Path, folder: str = "transformer") -> Path:
    """A step of a trainer for diffusion models, with the model in a folder."""
    return placed(path, folder, lambda file: save_file(state(1), file), "diffusion_pytorch_model.safetensors").parent


def placed(path: Path, folder: str, write: Callable[[Path], None], name: str) -> Path:
    (path / folder).mkdir(parents=True, exist_ok=True)
    (path / folder / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    write(path / folder / name)
    return path / folder


def value(out: Path) -> float:
    return float(load(out)["a.weight"][0, 0])


@pytest.mark.parametrize(("folder", "name"), [("transformer_ema", "ema_model.pt"), ("ema", "ema_model.pth"), ("ema", "unet_ema.bin")])
def test_one_file_of_torch_is_read(tmp_path: Path, folder: str, name: str) -> None:
    path = step(tmp_path / "checkpoint-100")
    placed(path, folder, lambda file: torch.save(state(2), file), name)
    assert [each.name for each in ckpt_cli.detect(path).checkpoint.components] == ["model", "ema"]
    ckpt_cli.merge(path, tmp_path / "out")
    ckpt_cli.merge(path, tmp_path / "average", type="ema")
    assert (value(tmp_path / "out"), value(tmp_path / "average")) == (1, 2)


@pytest.mark.parametrize("key", ["shadow_params", "ema_parameters"])
def test_one_without_names_is_told_as_that(tmp_path: Path, key: str) -> None:
    path = step(tmp_path / "checkpoint-100")
    folder = placed(path, "transformer_ema", lambda file: torch.save({"decay": 0.9, key: list(state(2).values())}, file), "ema_model.pt")
    for asked, name in ((path, "ema"), (folder / "ema_model.pt", None)):
        with pytest.raises(Unsupported, match="is a list of tensors without names"):
            ckpt_cli.merge(asked, tmp_path / "out", type=name)


@pytest.mark.parametrize("kind", ["model", "ema"])
def test_other_values_of_an_average_are_no_doubt(tmp_path: Path, kind: str) -> None:
    """lerobot saves both as folders of models; the warning that one of them was not used came with every merge."""
    path = step(tmp_path / "checkpoints" / "000200", "pretrained_model")
    placed(path, "pretrained_model_ema", lambda file: save_file(state(2), file), "model.safetensors")
    (path / "training_state").mkdir()
    report = ckpt_cli.merge(path, tmp_path / "out", type=kind)
    assert value(tmp_path / "out") == (1 if kind == "model" else 2)
    assert "was not used" not in str(report)
    # Another copy of the model is one still.
    placed(path, "huggingface", lambda file: save_file(state(3), file), "model.safetensors")
    assert "huggingface/" in str(ckpt_cli.inspect(path, type=kind))


@pytest.mark.parametrize(
    "name", ["ema_checkpoint-100/diffusion_pytorch_model.safetensors", "checkpoint-100/ema_model.pt", "checkpoint-100/ema/ema_model.pt"]
)
def test_what_is_called_like_one_is_named_where_there_is_none(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    path = run / "checkpoint-100"
    path.mkdir(parents=True)
    save_file(state(1), path / "model.safetensors")
    file = run / name
    file.parent.mkdir(exist_ok=True)
    (torch.save if file.suffix == ".pt" else save_file)(state(2), file)
    with pytest.raises(NoComponent) as raised:
        ckpt_cli.merge(run if name.startswith("ema_") else path, tmp_path / "out", type="ema")
    meant = file if file.parent == path else file.parent
    assert raised.value.hint == f"{meant} is called like an average: pass it"
    ckpt_cli.merge(meant, tmp_path / "out")
    assert value(tmp_path / "out") == 2


@pytest.mark.parametrize(
    ("name", "level"),
    [("epoch=1-step=200-EMA.ckpt", "info"), ("epoch=1-step=200-v1.ckpt", "warning"), ("epoch=2-step=300-EMA.ckpt", "warning")],
)
def test_the_file_of_an_average_beside_that_of_its_step_is_no_newer_save(tmp_path: Path, name: str, level: str) -> None:
    """NeMo writes one beside each, so that every merge of such a run was warned of them."""
    run = tmp_path / "run" / "checkpoints"
    run.mkdir(parents=True)
    for number, each in enumerate(("epoch=0-step=100.ckpt", "epoch=1-step=200.ckpt", name)):
        torch.save({"state_dict": state(number), "pytorch-lightning_version": "2.2", "global_step": 100}, run / each)
    (note,) = [note for note in ckpt_cli.inspect(tmp_path / "run").checkpoint.notes if note.code == "uncounted"]
    assert (note.level, name in note.text) == (level, True)
    if name.endswith("-EMA.ckpt"):
        with pytest.raises(NoComponent) as raised:
            ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="ema")
        assert raised.value.hint == f"{shell.path(run / name)} is called like an average: pass it"


@pytest.mark.parametrize(("asked", "level"), [(None, "info"), ("all", "warning"), ("model", None)])
def test_one_that_is_no_component_is_told(tmp_path: Path, asked: str | None, level: str | None) -> None:
    """An adapter's average is no component of the step: `--type all` left it out without a word."""
    path = step(tmp_path / "checkpoint-100")
    (path / "ema").mkdir()
    (path / "ema" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["a"]}')
    save_file(
        {"base_model.model.a.lora_A.weight": torch.ones(2, 3), "base_model.model.a.lora_B.weight": torch.ones(2, 2)},
        path / "ema/adapter_model.safetensors",
    )
    told = [note for note in ckpt_cli.merge(path, tmp_path / "out", type=asked).checkpoint.notes if "called like an average" in note.text]
    assert [note.level for note in told] == ([] if level is None else [level])


def test_one_that_is_a_component_is_not_told_as_unread(tmp_path: Path) -> None:
    path = step(tmp_path / "checkpoint-100")
    placed(path, "transformer_ema", lambda file: torch.save(state(2), file), "ema_model.pt")
    for asked in (None, "all"):
        result = ckpt_cli.merge(path, tmp_path / f"out-{asked}", type=asked)
        assert not [note for note in result.checkpoint.notes if "called like an average" in note.text]
