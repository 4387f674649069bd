"""What a reader saw and did not use is said, whatever the format: beside the state dicts, in folders, in files of other programs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

import ckpt_cli
from ckpt_cli.errors import PartOfSet
from ckpt_cli.results.checkpoint import NoteInfo
from tests.formats.test_megatron_legacy import model
from tests.megatron import arguments, write_legacy

MODEL = {"lin.weight": torch.ones(4, 4), "lin.bias": torch.ones(4)}
Write = Callable[[Path, dict[str, Any], Path], Path]


def file(folder: Path, beside: dict[str, Any], data: Path) -> Path:
    torch.save({"model": MODEL, **beside}, folder / "model.pt")
    return folder


def ranks(folder: Path, beside: dict[str, Any], data: Path) -> Path:
    for rank in range(2):
        torch.save({"model": MODEL, **beside}, folder / f"model_world_size_2_rank_{rank}.pt")
    return folder


def store(folder: Path, beside: dict[str, Any], data: Path) -> Path:
    save({"model": MODEL, **beside}, checkpoint_id=str(folder), no_dist=True)
    return folder


def deepspeed(folder: Path, beside: dict[str, Any], data: Path) -> Path:
    (folder / "global_step3").mkdir()
    content = {
        "module": MODEL,
        "buffer_names": [],
        "optimizer": None,
        "ds_version": "0.15",
        "global_steps": 3,
        "dp_world_size": 1,
        **beside,
    }
    torch.save(content, folder / "global_step3" / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step3")
    return folder


def items(folder: Path, beside: dict[str, Any], data: Path) -> Path:
    shutil.copytree(data / "torch-checkpointing" / "one-1" / "run", folder, dirs_exist_ok=True)
    step = next(folder.rglob("model_0.pt")).parent
    for name, value in beside.items():
        torch.save(value, step / f"{name}_0.pt")
    return folder


def megatron(folder: Path, beside: dict[str, Any], data: Path) -> Path:
    shutil.copytree(data / "megatron" / "llama-tp1" / "checkpoint", folder, dirs_exist_ok=True)
    common = next(folder.rglob("common.pt"))
    torch.save({"iteration": 30, **beside}, common)
    return folder


def legacy(folder: Path, beside: dict[str, Any], data: Path) -> Path:
    step = write_legacy(folder, model(2), arguments(num_layers=2), [[2]])
    (path,) = step.rglob("model_optim_rng.pt")
    torch.save({**torch.load(path, weights_only=False), **beside}, path)
    return folder


WRITERS: list[Write] = [file, ranks, store, deepspeed, items, megatron, legacy]


def notes(path: Path) -> list[NoteInfo]:
    return list(ckpt_cli.detect(path).checkpoint.notes)


def told(path: Path, word: str) -> list[tuple[str, str]]:
    return [(note.level, note.code) for note in notes(path) if word in note.text]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    "beside",
    [
        {"pair": (torch.ones(3, 4), {"x": torch.ones(2, 2)})},
        {"nest": {"a": [{"b": (torch.ones(3, 4),)}]}},
        {"table": np.ones((3, 4), np.float32)},
        {"arrays": {"mu": np.ones(4, np.float32)}},
        {"y_std": {"low": 0.1, "high": 0.5}},
        {"reward_head": {"l.weight": torch.ones(1, 4)}},
    ],
    ids=["a tuple", "nested lists", "an array", "a dict of arrays", "statistics", "a state dict"],
)
def test_what_lies_beside_the_model_is_told_once(write: Write, beside: dict[str, Any], tmp_path: Path, data: Path) -> None:
    (key,) = beside
    run = write(tmp_path, beside, data)
    assert len(told(run, key)) == 1


@pytest.mark.parametrize("write", WRITERS)
def test_single_numbers_are_a_note(write: Write, tmp_path: Path, data: Path) -> None:
    run = write(tmp_path, {"log_alpha": torch.tensor(0.3), "seen": torch.tensor(4), "best_psnr": torch.tensor(31.5)}, data)
    assert told(run, "log_alpha") == [("info", "numbers-beside")]
    assert told(run, "seen") == told(run, "best_psnr") == []


@pytest.mark.parametrize("write", [file, ranks, deepspeed])
@pytest.mark.parametrize("number", [torch.nn.Parameter(torch.tensor(0.3)), torch.tensor(0.3, requires_grad=True)])
def test_a_number_that_was_trained_is_a_warning(write: Write, number: torch.Tensor, tmp_path: Path, data: Path) -> None:
    assert told(write(tmp_path, {"log_alpha": number}, data), "log_alpha") == [("warning", "beside-weights")]


@pytest.mark.parametrize("write", WRITERS)
def test_the_state_of_a_training_is_no_news(write: Write, tmp_path: Path, data: Path) -> None:
    before = {(note.level, note.code) for note in notes(write(make(tmp_path / "bare"), {}, data))}
    state = {
        "opt_param_scheduler": {"lr": 0.1, "steps": torch.tensor(4.0)},
        "rng_state": [{"cpu": torch.zeros(64, dtype=torch.uint8)}],
        "optimizer": {"state": {0: {"exp_avg": torch.ones(4, 4)}}, "param_groups": []},
        "train_stats": {"lr": 0.1},
        "meta": {"palette": np.ones((3, 3)), "classes": ["a", "b"]},
        "idx_to_class": np.array(["cat", "dog"]),
        "dataloader": {"order": torch.arange(4)},
    }
    assert {(note.level, note.code) for note in notes(write(make(tmp_path / "full"), state, data))} <= before


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_arrays_inside_of_an_entry_of_the_state_dict_are_told(tmp_path: Path) -> None:
    torch.save({**MODEL, "centers": {"mu": np.ones(4)}, "args": {"mean": np.ones(3)}}, tmp_path / "pytorch_model.bin")
    assert told(tmp_path, "centers") == [("warning", "left-out")]
    assert told(tmp_path, "args") == []


def test_tensors_at_the_top_level_of_a_store_are_named(tmp_path: Path) -> None:
    store(tmp_path, {"mean_std": torch.ones(2, 4)}, tmp_path)
    assert told(tmp_path, "mean_std at the top level (--type flat)") == [("warning", "other-groups")]


# -- files and folders -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.save(MODEL, make(tmp_path / "run") / "pytorch_model.bin")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["heads/value.bin", "audio/encoder.pt", "projector/projector.bin", "mm/weights.npz", "a/b/c.pth"])
def test_a_folder_inside_with_weights_of_any_name_is_told(name: str, run: Path) -> None:
    (run / name).parent.mkdir(parents=True)
    torch.save({"l.weight": torch.ones(3, 4)}, run / name)
    assert told(run, str(Path(name).parent)) == [("warning", "other-folders")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cache/a.pt", torch.ones(3, 4)),
        ("onnx/decoder.bin", {"l.weight": torch.ones(3, 4)}),
        ("exports/m.gguf", torch.ones(3, 4)),
        ("states/all.pt", {"step": 3, "rng": torch.zeros(9, dtype=torch.uint8)}),
        ("dataloader/rank_0.pt", {"order": torch.ones(3, 4)}),
    ],
)
def test_other_folders_inside_are_no_news(name: str, content: Any, run: Path) -> None:
    (run / name).parent.mkdir()
    torch.save(content, run / name)
    assert [note for note in notes(run) if note.level == "warning"] == []


def test_a_folder_inside_of_that_of_a_role_is_told(tmp_path: Path) -> None:
    actor = tmp_path / "global_step_3" / "actor"
    actor.mkdir(parents=True)
    ranks(actor, {}, tmp_path)
    make(actor / "heads")
    torch.save({"l.weight": torch.ones(3, 4)}, actor / "heads" / "value.bin")
    assert told(tmp_path, "heads") == [("warning", "other-folders")]


@pytest.mark.parametrize("name", ["model.pdparams", "codebook.npy", "norm_stats.npz", "model.nemo"])
def test_files_of_other_forms_are_named(name: str, run: Path) -> None:
    (run / name).write_bytes(b"0" * 64)
    ((level, _),) = told(run, name)
    assert level == "info"


def test_state_that_is_a_state_dict_itself_is_told(run: Path) -> None:
    torch.save({"l.weight": torch.ones(3, 4), "step": 3}, run / "stats.pt")
    assert told(run, "stats.pt") == [("warning", "other-weights")]


def test_a_lone_safetensors_does_not_take_the_place_of_lightnings_last(tmp_path: Path) -> None:
    torch.save({"state_dict": MODEL, "global_step": 3, "pytorch-lightning_version": "2.0"}, tmp_path / "last.ckpt")
    save_file({"l.weight": torch.ones(3, 4)}, tmp_path / "projector.safetensors")
    assert set(ckpt_cli.open(tmp_path)) == set(MODEL)
    assert ("warning", "other-weights") in told(tmp_path, "projector.safetensors")


def test_files_of_tutel_are_told_and_refused_alone(run: Path, tmp_path: Path) -> None:
    alone = make(tmp_path / "alone")
    for name in ("ckpt.pth.global", "ckpt.pth.rank0", "ckpt.pth.rank1"):
        for folder in (run, alone):
            torch.save({"model": MODEL}, folder / name)
    assert told(run, "ckpt.pth.rank0") == [("warning", "other-weights")]
    for path in (alone, alone / "ckpt.pth.global", alone / "ckpt.pth.rank1"):
        with pytest.raises(PartOfSet, match="file of a set"):
            ckpt_cli.merge(path, tmp_path / "out")


def test_what_ranks_share_is_no_model_without_their_experts(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint_2-shared.pt"
    torch.save({"model": {**MODEL, "layers.1.moe_layer.gate.wg.weight": torch.ones(2, 4)}}, path)
    with pytest.raises(PartOfSet, match="router"):
        ckpt_cli.merge(path, tmp_path / "out")
    torch.save({"model": {**MODEL, "layers.1.mlp.gate_proj.weight": torch.ones(2, 4)}}, path)
    ckpt_cli.merge(path, tmp_path / "out")


@pytest.mark.parametrize("name", ["value_head.bin", "mm_projector.bin", "extra.pt", "model_ema.pth", "prototypes.pt", "m.onnx"])
def test_verify_names_what_lies_beside_a_plain_folder(name: str, tmp_path: Path) -> None:
    save_file(MODEL, tmp_path / "model.safetensors")
    torch.save({"l.weight": torch.ones(3, 4)}, tmp_path / name)
    (found,) = (item for item in ckpt_cli.verify(tmp_path).findings if item.file == name)
    assert (found.code, found.severity) == ("other-weights", "info")


def test_verify_names_no_state_beside_a_plain_folder(tmp_path: Path) -> None:
    save_file(MODEL, tmp_path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"state": {0: {"exp_avg": torch.ones(3, 4)}}, "param_groups": []}, tmp_path / name)
    assert [item.code for item in ckpt_cli.verify(tmp_path).findings if item.code == "other-weights"] == []
