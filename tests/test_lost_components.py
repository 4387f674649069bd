"""A step that lost its model, and holds what was saved beside that: a critic, a reward model, an average."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import IncompleteError
from tests import tiny

STEPS = (100, 200, 300)


def actors(run: Path) -> None:
    """verl: actor/ and critic/ in each step, with the state of the training beside the actor's weights."""
    for step in STEPS:
        home = tiny.verl(run, tiny.weights(step), step=step)
        torch.save({"lr_scheduler": {"last_epoch": step}}, home / "extra_state_world_size_1_rank_0.pt")
        home = tiny.verl(run, tiny.weights(step + 1), step=step, role="critic")
        torch.save({"lr_scheduler": {"last_epoch": -step}}, home / "extra_state_world_size_1_rank_0.pt")


def averages(run: Path) -> None:
    """BAGEL: a model and its EMA as two files."""
    for step in STEPS:
        folder = tiny.folder(run / f"{step:07}", None)
        save_file(tiny.weights(step), folder / "model.safetensors", metadata={"format": "pt"})
        save_file(tiny.weights(step + 1), folder / "ema.safetensors", metadata={"format": "pt"})


def folders(run: Path) -> None:
    """A folder of a trainer for each of model and EMA."""
    for step in STEPS:
        for name, more in (("pytorch_model_fsdp_0", 0), ("pytorch_ema_model_fsdp_0", 1)):
            home = run / f"checkpoint-{step}" / name
            home.mkdir(parents=True)
            torch.save(tiny.weights(step + more), home / "model_world_size_1_rank_0.pt")
        tiny.folder(run / f"checkpoint-{step}", None)


def several(run: Path) -> None:
    """accelerate: two models, of which the first is the main one."""
    for step in STEPS:
        for number in (0, 1):
            home = run / f"checkpoint-{step}" / f"pytorch_model_fsdp_{number}"
            home.mkdir(parents=True)
            torch.save(tiny.weights(step + number), home / "model_world_size_1_rank_0.pt")
        tiny.folder(run / f"checkpoint-{step}", None)


def without_folder(step: Path) -> None:
    shutil.rmtree(step / "actor")


def without_weights(step: Path) -> None:
    for path in (step / "actor").glob("model_*"):
        path.unlink()


def without_file(step: Path) -> None:
    (step / "model.safetensors").unlink()


def without_ranks(step: Path) -> None:
    shutil.rmtree(step / "pytorch_model_fsdp_0")
    (step / "pytorch_model_fsdp_0").mkdir()


LOST = [
    (actors, without_folder),
    (actors, without_weights),
    (averages, without_file),
    (folders, without_ranks),
    (several, without_ranks),
]


@pytest.fixture(params=LOST, ids=lambda pair: f"{pair[0].__name__} {pair[1].__name__}")
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run whose newest step lost its model."""
    make, lose = request.param
    make(tmp_path / "run")
    lose(max((tmp_path / "run").iterdir(), key=lambda path: path.name))
    return tmp_path / "run"


def newest(run: Path) -> Path:
    return max(run.iterdir(), key=lambda path: path.name)


def second(run: Path) -> str:
    """The component that is left."""
    (name,) = (info.name for info in ckpt_cli.detect(newest(run)).checkpoint.components)
    return name


def skipped(notes: Any) -> list[str]:
    return [note.text for note in notes if note.code == "step-skipped"]


def is_step(out: Path, step: int) -> bool:
    held, expected = load_file(next(out.glob("*.safetensors"))), tiny.weights(step)
    return held.keys() == expected.keys() and all(torch.equal(held[name], expected[name]) for name in held)


@pytest.mark.parametrize("type", [None, "model", "regular"])
def test_merge_takes_the_newest_step_that_has_one(run: Path, tmp_path: Path, type: str | None) -> None:
    done = ckpt_cli.merge(run, tmp_path / "out", type=type)
    (text,) = skipped(done.checkpoint.notes)
    assert newest(run).name in text
    assert is_step(tmp_path / "out", 200)


def test_the_step_itself_is_refused(run: Path, tmp_path: Path) -> None:
    """By its folder and by its number: what lies beside it shows what it lacks."""
    for ask in (lambda: ckpt_cli.merge(newest(run), tmp_path / "out"), lambda: ckpt_cli.merge(run, tmp_path / "out", step=300)):
        with pytest.raises(IncompleteError, match="the main component is missing") as caught:
            ask()
        assert "--type " in (caught.value.hint or "") or "type=" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_taken_if_asked_for(run: Path, tmp_path: Path) -> None:
    name = second(run)
    ckpt_cli.merge(run, tmp_path / "out", type=name)
    assert is_step(tmp_path / "out", 301)
    if name == "critic":
        ckpt_cli.merge(newest(run) / "critic", tmp_path / "by-folder")
        assert is_step(tmp_path / "by-folder", 301)


@pytest.mark.parametrize("type", ["all", "both"])
def test_neither_are_all_of_its_components(run: Path, tmp_path: Path, type: str) -> None:
    if type == "both" and second(run) != "ema":
        pytest.skip("there is no EMA")
    done = ckpt_cli.merge(run, tmp_path / "out", type=type)
    assert skipped(done.checkpoint.notes)
    assert "+".join(output.component for output in done.outputs) in ("actor+critic", "model+ema", "model+model_1")


def test_an_average_leaves_it_out(run: Path, tmp_path: Path) -> None:
    done = ckpt_cli.average(run, tmp_path / "out", everything=True)
    assert [newest(run).name in text for text in skipped((*done.notes, *done.checkpoint.notes))] == [True]
    assert {each.step for each in done.outputs[0].sources} == {100, 200}
    with pytest.raises(IncompleteError, match="the main component is missing"):
        ckpt_cli.average(run, tmp_path / "other", steps=[200, 300])


def test_the_other_commands_say_so(run: Path, tmp_path: Path) -> None:
    found = ckpt_cli.detect(run).checkpoint
    assert found.step == 200
    assert skipped(found.notes)
    assert found.steps[-1].problem
    alone = ckpt_cli.detect(newest(run))
    assert (alone.exit_code, alone.problem is None) == (4, False)
    with pytest.raises(IncompleteError):
        ckpt_cli.inspect(newest(run))


def test_the_state_is_that_of_the_step_whose_model_is_there(tmp_path: Path) -> None:
    actors(tmp_path / "run")
    without_folder(tmp_path / "run" / "global_step_300")
    done = ckpt_cli.extract_state(tmp_path / "run", tmp_path / "state")
    assert (done.component, done.step) == ("actor", 200)
    assert skipped(done.notes)


@pytest.mark.parametrize("lose", [without_folder, without_weights])
def test_runs_that_save_nothing_else_lost_nothing(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    """A critic alone, without a folder of the actor in any step."""
    actors(tmp_path / "run")
    for step in STEPS:
        without_folder(tmp_path / "run" / f"global_step_{step}")
    done = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    assert not skipped(done.checkpoint.notes)
    assert is_step(tmp_path / "out", 301)


def test_a_single_step_with_an_empty_folder_of_its_actor(tmp_path: Path) -> None:
    actors(tmp_path / "run")
    for step in STEPS[:2]:
        shutil.rmtree(tmp_path / "run" / f"global_step_{step}")
    without_weights(tmp_path / "run" / "global_step_300")
    with pytest.raises(IncompleteError, match="the main component is missing: actor, whose folder holds no weights"):
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")


def test_another_training_beside_it_is_no_sign(tmp_path: Path) -> None:
    """Steps of other names are those of another run."""
    averages(tmp_path / "run")
    for step in STEPS:
        without_file(tmp_path / "run" / f"{step:07}")
    tiny.verl(tmp_path / "run", tiny.weights(1), step=50)
    done = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    assert is_step(tmp_path / "out", 301)
    assert not skipped(done.checkpoint.notes)


def test_all_components_are_fewer_than_those_of_the_step_before(tmp_path: Path) -> None:
    """A critic may be saved less often; that it is not among all is told."""
    actors(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "global_step_300" / "critic")
    done = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="all")
    (text,) = [note.text for note in done.checkpoint.notes if note.code == "fewer-components"]
    assert text == "global_step_300 has no critic, which global_step_200 has"
    assert not [note for note in ckpt_cli.merge(tmp_path / "run", tmp_path / "other").checkpoint.notes if note.code == "fewer-components"]


class TestAStepWithAnAverageMergedInPlace:
    """`merge --in-place --type ema` writes model.safetensors; without the shards, that is the EMA and no model of the training."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        folders(tmp_path / "run")
        ckpt_cli.merge(tmp_path / "run", type="ema", in_place=True)
        return tmp_path / "run"

    def slimmed(self, run: Path) -> Path:
        for name in ("pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0"):
            shutil.rmtree(run / "checkpoint-300" / name)
        return run

    def test_beside_the_shards_changes_nothing(self, run: Path, tmp_path: Path) -> None:
        for name, more in (("model", 0), ("ema", 1)):
            ckpt_cli.merge(run, tmp_path / name, type=name)
            assert torch.equal(
                load_file(tmp_path / name / "model.safetensors")["lm_head.weight"], tiny.weights(300 + more)["lm_head.weight"]
            )

    def test_is_an_average_alone(self, run: Path, tmp_path: Path) -> None:
        self.slimmed(run)
        assert [place.name for place in ckpt_cli.detect(run / "checkpoint-300", type="ema").checkpoint.components] == ["ema"]
        for asked in (None, "model"):
            with pytest.raises(IncompleteError, match="main component is missing"):
                ckpt_cli.merge(run / "checkpoint-300", tmp_path / "out", type=asked)
        result = ckpt_cli.merge(run, tmp_path / "model", type="model")
        assert (result.checkpoint.step, [note.code for note in result.checkpoint.notes if note.code == "step-skipped"]) == (
            200,
            ["step-skipped"],
        )
        ckpt_cli.merge(run, tmp_path / "ema", type="ema")
        assert torch.equal(load_file(tmp_path / "ema" / "model.safetensors")["lm_head.weight"], tiny.weights(301)["lm_head.weight"])

    def test_alone_is_still_merged_where_no_component_is_named(self, run: Path, tmp_path: Path) -> None:
        alone = self.slimmed(run).joinpath("checkpoint-300").rename(tmp_path / "alone")
        assert ckpt_cli.merge(alone, tmp_path / "out").outputs[0].component == "ema"
