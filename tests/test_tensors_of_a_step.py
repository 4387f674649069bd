"""Tensors that one step lost, cut or stores otherwise than its neighbours, where no class tells it, and steps that are copies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from tests import tiny
from tests.tensors import Tensors
from tests.test_unrelated_weights import mixed, model, trained

NAME = "model.layers.1.mlp.up_proj.weight"


def run_of(path: Path, *steps: int) -> Path:
    for step in steps:
        tiny.folder(path / f"checkpoint-{step}", tiny.weights(step), tiny.unknown())
    return path


def changed(file: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def told(result: Any, code: str = "step-tensors") -> list[str]:
    notes = [*getattr(result, "notes", ()), *(result.checkpoint.notes if hasattr(result, "checkpoint") else ())]
    return [note.text for note in notes if note.code == code]


CHANGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "lost": (lambda held: [held.pop(name) for name in list(held) if "up_proj" in name], "without model.layers.0.mlp.up_proj.weight"),
    "cut": (lambda held: held.update({NAME: held[NAME][:-1].clone()}), f"with another shape of {NAME}"),
    "cast": (lambda held: held.update({NAME: held[NAME].half()}), f"with another dtype of {NAME}"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_step_of_an_unknown_class_is_told_from_its_neighbours(kind: str, tmp_path: Path) -> None:
    run, (change, said) = run_of(tmp_path / "run", 100, 200), CHANGES[kind]
    changed(run / "checkpoint-200" / "model.safetensors", change)
    for result in (ckpt_cli.merge(run, tmp_path / "out"), ckpt_cli.verify(run / "checkpoint-200")):
        (text,) = told(result)
        assert f"is not what checkpoint-100 has: {said}" in text


@pytest.mark.parametrize("kind", CHANGES)
def test_a_step_in_files_of_ranks_is_told_too(kind: str, tmp_path: Path) -> None:
    change, said = CHANGES[kind]
    for step in (1, 2):
        tensors = tiny.weights(step)
        if step == 2:
            assert told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out1")) == []
            change(tensors)
        tiny.verl(tmp_path / "run", tensors, tiny.unknown(), step=step)
    (text,) = told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out2"))
    assert f"is not what global_step_1 has: {said}" in text


@pytest.mark.parametrize("change", [lambda held: held.update({name: each.half() for name, each in held.items()}), lambda held: None])
def test_what_all_tensors_have_is_no_fault(change: Callable[[Tensors], object], tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 100, 200, 300)
    changed(run / "checkpoint-200" / "model.safetensors", change)
    for step in (200, 300):
        assert told(ckpt_cli.merge(run, tmp_path / f"out{step}", step=step)) == []


def test_neighbours_that_lack_the_same_are_no_fault(tmp_path: Path) -> None:
    """A layer that is saved from some step on, or no longer."""
    run = run_of(tmp_path / "run", 100, 200, 300)
    for step in (200, 300):
        changed(run / f"checkpoint-{step}" / "model.safetensors", CHANGES["lost"][0])
    assert told(ckpt_cli.verify(run / "checkpoint-200")) == []


def test_weights_of_another_run_are_told(tmp_path: Path) -> None:
    for step, tensors in ((100, model(0)), (200, trained(model(0))), (300, trained(model(0), 0.1))):
        tiny.folder(tmp_path / "run" / f"checkpoint-{step}", tensors, tiny.classless())
    assert told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out")) == []
    for number, (tensors, said) in enumerate(((model(1), "the weights have"), (mixed("model.layers.2."), "some layers have"))):
        tiny.folder(tmp_path / "run" / "checkpoint-300", tensors, tiny.classless())
        (text,) = told(ckpt_cli.merge(tmp_path / "run", tmp_path / f"out{number}"))
        assert f"is not what checkpoint-200 has: {said} nothing in common" in text


def test_a_layer_that_an_adapter_lost_is_told_where_it_is_exported(tmp_path: Path) -> None:
    tiny.folder(tmp_path / "base", tiny.weights())
    run = tmp_path / "run"
    for step in (100, 200):
        tiny.adapter(run / f"checkpoint-{step}", tiny.factors(step), tmp_path / "base")
    assert told(ckpt_cli.merge(run, tmp_path / "whole", lora="export")) == []
    changed(
        run / "checkpoint-200" / "adapter_model.safetensors", lambda held: [held.pop(name) for name in list(held) if "layers.0" in name]
    )
    (text,) = told(ckpt_cli.merge(run, tmp_path / "out", lora="export"))
    assert "without base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in text


class TestACopy:
    @pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
    def test_of_another_step_is_told_whatever_its_time(self, name: str, tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", 100, 200)
        if name.endswith(".bin"):
            for step in (100, 200):
                folder = run / f"checkpoint-{step}"
                torch.save(load_file(folder / "model.safetensors"), folder / name)
                (folder / "model.safetensors").unlink()
        assert told(ckpt_cli.merge(run, tmp_path / "out"), "other-step") == []
        shutil.copyfile(run / "checkpoint-100" / name, run / "checkpoint-200" / name)
        for result in (ckpt_cli.merge(run, tmp_path / "out2"), ckpt_cli.merge(run, tmp_path / "out3", step=100)):
            (text,) = told(result, "other-step")
            assert "are those of checkpoint-" in text

    def test_is_none_where_one_tensor_was_trained(self, tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", 100)
        shutil.copytree(run / "checkpoint-100", run / "checkpoint-200")
        changed(run / "checkpoint-200" / "model.safetensors", lambda held: held[NAME].add_(1e-3))
        assert told(ckpt_cli.merge(run, tmp_path / "out"), "other-step") == []

    @pytest.mark.parametrize("frozen", [False, True])
    def test_of_one_shard_is_told_if_it_was_trained(self, frozen: bool, tmp_path: Path) -> None:
        """A shard that is the same in all steps holds what is not trained."""
        run = tmp_path / "run"
        for step in (100, 200, 300):
            folder = tiny.folder(run / f"checkpoint-{step}", None, tiny.unknown())
            held = [{name: each for name, each in tiny.weights(step).items() if ("layers.0" in name) == first} for first in (True, False)]
            held[0] = {name: tiny.weights(100)[name] for name in held[0]} if frozen else held[0]
            names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
            for name, tensors in zip(names, held, strict=True):
                save_file(tensors, folder / name, metadata={"format": "pt"})
            index = {name: file for file, tensors in zip(names, held, strict=True) for name in tensors}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        assert told(ckpt_cli.merge(run, tmp_path / "out"), "other-step") == []
        shutil.copyfile(run / "checkpoint-200" / names[0], run / "checkpoint-300" / names[0])
        found = told(ckpt_cli.merge(run, tmp_path / "out2"), "other-step")
        assert [names[0] in text and "checkpoint-300 and checkpoint-200" in text for text in found] == ([] if frozen else [True])
