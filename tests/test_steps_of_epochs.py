"""Steps whose names, or whose folders, say the epoch too: their number is the step, and the epoch comes first where steps begin anew."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.formats.step_names import counter_of, step_of
from ckpt_cli.results.checkpoint import Checkpoint
from tests import tiny


def run_of(folder: Path, *steps: str, latest: str | None = None) -> Path:
    for number, step in enumerate(steps):
        tiny.folder(folder / step, tiny.weights(number), tiny.classless())
    if latest is not None:
        (folder / "latest").write_text(latest)
    return folder


def detected(path: Path) -> Checkpoint:
    return ckpt_cli.detect(path).checkpoint


@pytest.mark.parametrize(
    ("steps", "taken", "step"),
    [
        (("epoch_1/step_10", "epoch_1/step_20", "epoch_2/step_30"), "epoch_2/step_30", 30),
        (("epoch_1/step_10", "epoch_2/step_5"), "epoch_2/step_5", 5),
        (("epoch9/checkpoint-500", "epoch10/checkpoint-40"), "epoch10/checkpoint-40", 40),
        (("epoch=3-step=200", "epoch=4-step=300"), "epoch=4-step=300", 300),
        (("e1_s20", "e2_s10"), "e2_s10", 10),
        (("epoch1_step20", "epoch2_step40"), "epoch2_step40", 40),
        (("epoch_1-step_20", "epoch_10-step_4"), "epoch_10-step_4", 4),
        (("step_20", "epoch_2_step_10"), "step_20", 20),
        (("epoch_1", "epoch_2"), "epoch_2", 2),
        *(
            (tuple(name.format(number) for number in (2, 10)), name.format(10), 10)
            for name in ("checkpoint-epoch-{}", "checkpoint_epoch_{}", "checkpoint-epoch{}", "checkpoint_epoch{}", "epoch-{}")
        ),
        (("checkpoint-epoch-1/step-10", "checkpoint-epoch-2/step-5"), "checkpoint-epoch-2/step-5", 5),
    ],
)
def test_the_newest(steps: tuple[str, ...], taken: str, step: int, tmp_path: Path) -> None:
    found = detected(run_of(tmp_path / "run", *steps))
    assert (found.step, found.path) == (step, str(tmp_path / "run" / taken))
    highest = max(each.step for each in found.steps)
    assert any("counted anew" in note.text for note in found.notes) == (step != highest)


@pytest.mark.parametrize("name", ["checkpoint-epoch-3", "checkpoint_epoch_3", "checkpoint-epoch3", "epoch-3"])
def test_a_name_that_says_epoch_counts_epochs(name: str) -> None:
    assert (step_of(Path(name)), counter_of(Path(name))) == (3, "epochs")


def test_each_way_to_a_step_in_the_folder_of_its_epoch(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "epoch_1/step_10", "epoch_1/step_20", "epoch_2/step_30")
    assert detected(run / "epoch_1").step == 20
    assert detected(run / "epoch_1" / "step_10").step == 10
    result = ckpt_cli.merge(run, tmp_path / "out", step=10)
    assert result.checkpoint.path == str(run / "epoch_1" / "step_10")


def test_an_epoch_with_weights_of_its_own_is_a_step(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "epoch_1", "epoch_1/step_10")
    assert (detected(run).step, detected(run).path) == (1, str(run / "epoch_1"))


def test_a_step_that_two_epochs_have_is_ambiguous(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "epoch_1/step_10", "epoch_2/step_10")
    with pytest.raises(ckpt_cli.CkptError, match="more than once"):
        ckpt_cli.merge(run, tmp_path / "out", step=10)


def test_config_of_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "epoch_1/step_10")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (run / "epoch_1" / "step_10" / name).rename(run / name)
    ckpt_cli.merge(run, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()
