"""What GR00T scales observations and actions with: copied from the step, or from the folder of the run, before that of a base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli

OF_PROCESSOR = ("statistics.json", "embodiment_id.json", "processor_config.json")
METADATA = "experiment_cfg/metadata.json"


def step_of(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"action_head.weight": torch.arange(16.0).reshape(4, 4)}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"architectures": ["GR00T_N1_5"], "model_type": "gr00t_n1_5"}))
    return folder


def scaled(folder: Path, mean: float, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"processor_class": "Gr00tN1d6Processor"} if "config" in name else {"mean": [mean]}))
    return folder


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("place", ["run", "run/checkpoint-10"])
def test_metadata_of_the_run_goes_before_that_of_the_base(place: str, with_base: bool, tmp_path: Path) -> None:
    step_of(tmp_path / "run" / "checkpoint-10")
    scaled(tmp_path / place, 5.0, METADATA)
    base = scaled(step_of(tmp_path / "base"), 0.0, METADATA) if with_base else None
    ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base)
    assert json.loads((tmp_path / "out" / METADATA).read_text()) == {"mean": [5.0]}


@pytest.mark.parametrize("with_base", [False, True])
def test_files_beside_the_processor_go_with_it(with_base: bool, tmp_path: Path) -> None:
    scaled(step_of(tmp_path / "run" / "checkpoint-10"), 5.0, *OF_PROCESSOR)
    base = scaled(step_of(tmp_path / "base"), 0.0, *OF_PROCESSOR) if with_base else None
    made = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base)
    assert {*OF_PROCESSOR} <= {*made.outputs[0].assets}
    assert [json.loads((tmp_path / "out" / name).read_text()) for name in OF_PROCESSOR[:2]] == [{"mean": [5.0]}] * 2


def test_that_differ_between_averaged_steps_are_told(tmp_path: Path) -> None:
    steps = [scaled(step_of(tmp_path / "run" / f"checkpoint-{number}"), number, *OF_PROCESSOR) for number in (10, 20)]
    made = ckpt_cli.average(steps, tmp_path / "out")
    (told,) = [note.text for note in made.outputs[0].notes if note.code == "side-files-differ"]
    assert "statistics.json" in told


def test_without_a_processor_the_names_say_nothing(tmp_path: Path) -> None:
    scaled(step_of(tmp_path / "run" / "checkpoint-10"), 5.0, *OF_PROCESSOR[:2])
    assert not {*OF_PROCESSOR} & {*ckpt_cli.merge(tmp_path / "run", tmp_path / "out").outputs[0].assets}
