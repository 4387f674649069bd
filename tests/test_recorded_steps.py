"""A step that files record beside the weights is compared with the name of their folder or file, in every command that opens them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckpt_cli

WEIGHTS = {"a.weight": torch.arange(12.0).reshape(4, 3)}


def told(path: Path, out: Path) -> list[str]:
    both = (ckpt_cli.detect(path).checkpoint.notes, ckpt_cli.merge(path, out).checkpoint.notes)
    texts = [[note.text for note in notes if note.code == "step-differs" and note.level == "warning"] for notes in both]
    assert texts[0] == texts[1]
    return texts[0]


def deepspeed(folder: Path, step: int) -> Path:
    """Stage 0 of DeepSpeed, one rank."""
    folder.mkdir(parents=True)
    content = {
        "module": WEIGHTS, "ds_version": "0.18.0", "ds_config": {}, "dp_world_size": 1, "mp_world_size": 1, "skipped_steps": 0,
        "global_steps": step, "global_samples": 8, "param_shapes": None, "buffer_names": [], "frozen_param_shapes": None,
        "frozen_param_fragments": None, "shared_params": {}, "optimizer": None, "lr_scheduler": None,
    }  # fmt: skip
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize("said", [4, 2])
def test_files_of_deepspeed_in_a_step_of_the_trainer(tmp_path: Path, said: int) -> None:
    deepspeed(tmp_path / "run" / "checkpoint-4" / "global_step4", said)
    (tmp_path / "run" / "checkpoint-4" / "latest").write_text("global_step4")
    assert told(tmp_path / "run", tmp_path / "out") == (["the folder says step 4, the state in it says 2"] if said == 2 else [])


@pytest.mark.parametrize(
    ("tag", "counter"),
    [("checkpoints/checkpoint_0/pytorch_model", "saves"), ("checkpoint_1/pytorch_model", "saves"), ("epoch_2/global_step9", "epochs")],
)
def test_folders_that_count_something_else_contradict_no_step(tmp_path: Path, tag: str, counter: str) -> None:
    deepspeed(tmp_path / "run" / tag, 9)
    (tmp_path / "run" / tag).with_name("latest").write_text(Path(tag).name)
    assert told(tmp_path / "run", tmp_path / "out") == []
    texts = [note.text for note in ckpt_cli.detect(tmp_path / "run").checkpoint.notes if note.code == "step-differs"]
    assert [text.partition(" is ")[2] for text in texts] == [f"numbered by {counter}; the state in it says step 9"]


@pytest.mark.parametrize(("name", "counter"), [("checkpoint_0", "saves"), ("epoch_0", "epochs"), ("checkpoint-0", None)])
def test_no_manifest_calls_another_number_a_step(tmp_path: Path, name: str, counter: str | None) -> None:
    first = tmp_path / "run" / name
    for number in (0, 1):
        folder = first.with_name(f"{name[:-1]}{number}")
        folder.mkdir(parents=True)
        torch.save({key: value + number for key, value in WEIGHTS.items()}, folder / "pytorch_model.bin")
        torch.save({"last_epoch": 9}, folder / "scheduler.pt")
    ckpt_cli.merge(first, tmp_path / "out")
    ckpt_cli.average([first, first], tmp_path / "mean")
    ckpt_cli.extract_state(first, tmp_path / "state")
    merged, mean, state = (json.loads((tmp_path / out / "ckpt-manifest.json").read_text()) for out in ("out", "mean", "state"))
    wanted = {"step": 0} if counter is None else {"step": None, counter: 0}
    for facts in (merged, *mean["averaged"], state):
        assert {key: facts.get(key) for key in wanted} == wanted
    verified = ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run")
    assert verified.against[0].identical
    assert verified.made_at == wanted["step"]


def test_of_two_tags_neither_is_said_to_be_the_only_one(tmp_path: Path) -> None:
    for step, tag in enumerate(("one", "two")):
        deepspeed(tmp_path / "run" / tag, step)
    (tmp_path / "run" / "latest").write_text("two")
    notes = {note.code: note.text for note in ckpt_cli.detect(tmp_path / "run").checkpoint.notes}
    assert notes["between"] == "model was read from two/"
    assert "one/ could be model too" in notes["passed-over"]
    assert "unread" not in notes, "one warning is enough"


@pytest.mark.parametrize("said", [77, 3])
def test_a_tag_of_deepspeed(tmp_path: Path, said: int) -> None:
    deepspeed(tmp_path / "run" / "global_step77", said)
    (tmp_path / "run" / "latest").write_text("global_step77")
    assert told(tmp_path / "run", tmp_path / "out") == (["the folder says step 77, the state in it says 3"] if said == 3 else [])


@pytest.mark.parametrize("said", [20, 10])
def test_a_counter_beside_a_state_dict(tmp_path: Path, said: int) -> None:
    for step, number in ((10, 10), (20, said)):
        path = tmp_path / "run" / f"checkpoint-{step}" / "pytorch_model.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"epoch": 0, "global_step": number, "state_dict": WEIGHTS}, path)
    assert told(tmp_path / "run", tmp_path / "out") == (["the folder says step 20, the state in it says 10"] if said == 10 else [])
