"""Which checkpoints an average is made of, from old to new: paths, or steps of runs, and never fewer than was asked for in silence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_cli.averaging.steps import CHOICES, StepChoice, open_snapshots
from ckpt_cli.errors import CkptError, CorruptFile, MissingShard, NotFound, UsageError
from ckpt_cli.files.source import Files
from tests.conftest import Copy

SKIPPED = "global_step_30 is left out: rank 2 of 4 is missing"


class Chosen:
    """The checkpoints that were opened, by their paths and ``steps``; ``notes`` by code."""

    def __init__(self, *paths: Path, type: str | None = None, also: tuple[Path, ...] = (), **choice: Any) -> None:
        with Files() as files:
            found = open_snapshots(list(paths), StepChoice(**choice), files, type=type, base=None, also=also, shard_order="auto")
        self.paths = [opened.found.path for opened in found.opened]
        self.steps = found.steps
        self.components = [opened.components[0].name for opened in found.opened]
        self.levels = {note.level for note in found.notes}
        self.notes: dict[str, list[str]] = {}
        for note in found.notes:
            self.notes.setdefault(note.code, []).append(note.text)


def refused(*paths: Path, **options: Any) -> CkptError:
    with pytest.raises(CkptError) as caught:
        Chosen(*paths, **options)
    assert caught.value.advice or caught.value.expected
    return caught.value


@pytest.fixture
def run(layouts: Path) -> Path:
    """Steps 10, 20 and 30; rank 2 of step 30 is missing; only step 10 has a critic."""
    return layouts / "verl-run" / "run"


@pytest.fixture
def long_run(tmp_path: Path) -> Path:
    """Steps 10, 20, 30, 40 and 100."""
    for step in (10, 20, 30, 40, 100):
        folder = tmp_path / "long" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": torch.full((2,), float(step))}, folder / "model.safetensors")
    return tmp_path / "long"


class TestStepsOfARun:
    @pytest.mark.parametrize(
        ("choice", "steps"),
        [
            ({"everything": True}, [10, 20, 30, 40, 100]),
            ({"last": 2}, [40, 100]),
            ({"last": 5}, [10, 20, 30, 40, 100]),
            ({"begin": 30}, [30, 40, 100]),
            ({"end": 30}, [10, 20, 30]),
            ({"begin": 15, "end": 45}, [20, 30, 40]),
            ({"begin": 20, "end": 30}, [20, 30]),
            ({"every": 30}, [10, 40, 100]),
            ({"every": 20, "end": 40}, [10, 30]),
            ({"begin": 0, "every": 20}, [20, 40, 100]),
            ({"begin": 20, "end": 100, "every": 20}, [20, 40, 100]),
            ({"steps": (30, 100)}, [30, 100]),
            ({"steps": (100, 10, 30)}, [10, 30, 100]),
        ],
        ids=str,
    )
    def test_are_chosen_from_old_to_new(self, long_run: Path, choice: dict[str, Any], steps: list[int]) -> None:
        chosen = Chosen(long_run, **choice)
        assert chosen.steps == steps
        assert chosen.paths == [long_run / f"checkpoint-{step}" for step in steps]
        assert chosen.notes == {}

    @pytest.mark.parametrize("choice", [{"everything": True}, {"last": 2}, {"begin": 10}, {"begin": 10, "end": 30, "every": 10}], ids=str)
    def test_that_are_incomplete_are_passed_over_with_a_warning(self, run: Path, choice: dict[str, Any]) -> None:
        chosen = Chosen(run, **choice)
        assert chosen.steps == [10, 20]
        assert chosen.components == ["actor", "actor"]
        assert chosen.notes == {"step-skipped": [SKIPPED]}
        assert chosen.levels == {"warning"}

    def test_that_were_not_chosen_are_not_looked_into(self, run: Path, long_run: Path) -> None:
        assert Chosen(run, end=20).notes == {}
        (long_run / "checkpoint-30" / "model.safetensors").write_bytes(b"")
        assert Chosen(long_run, last=2).steps == [40, 100]

    def test_that_are_damaged_are_passed_over_like_incomplete_ones(self, long_run: Path) -> None:
        (long_run / "checkpoint-40" / "model.safetensors").write_bytes(b"")
        chosen = Chosen(long_run, last=3)
        assert chosen.steps == [20, 30, 100]
        (text,) = chosen.notes["step-skipped"]
        assert text.startswith("checkpoint-40 is left out: ")
        with pytest.raises(CorruptFile):
            Chosen(long_run, steps=(30, 40))

    def test_that_are_fewer_than_wanted_are_taken_with_a_warning(self, run: Path) -> None:
        chosen = Chosen(run, last=3)
        assert chosen.steps == [10, 20]
        assert chosen.notes == {"step-skipped": [SKIPPED], "fewer-steps": ["only 2 complete steps were found, not 3"]}

    def test_that_lack_the_component_are_passed_over(self, copy: Copy) -> None:
        run = copy("layouts", "verl-run", "run")
        shutil.copytree(run / "global_step_10" / "critic", run / "global_step_30" / "critic")
        chosen = Chosen(run, type="critic", everything=True)
        assert (chosen.steps, chosen.components) == ([10, 30], ["critic", "critic"])
        (text,) = chosen.notes["step-skipped"]
        assert text == "global_step_20 is left out: no component critic"

    def test_of_ema_are_those_of_the_component(self, layouts: Path) -> None:
        chosen = Chosen(layouts / "lmms-run" / "run", type="ema", everything=True)
        assert (chosen.steps, chosen.components) == ([100, 200], ["ema", "ema"])

    def test_that_lie_on_two_nodes_are_joined(self, copy: Copy, tmp_path: Path) -> None:
        run = copy("layouts", "verl-run", "run")
        for step in (10, 20):
            folder = tmp_path / "node" / f"global_step_{step}" / "actor"
            folder.mkdir(parents=True)
            for rank in (2, 3):
                (run / f"global_step_{step}" / "actor" / f"model_world_size_4_rank_{rank}.pt").rename(
                    folder / f"model_world_size_4_rank_{rank}.pt"
                )
        assert refused(run, everything=True).message.startswith("an average needs at least two checkpoints; found 0")
        assert Chosen(run, also=(tmp_path / "node",), steps=(10, 20)).steps == [10, 20]


class TestStepsByNumber:
    def test_must_be_complete(self, run: Path) -> None:
        error = refused(run, steps=(10, 30))
        assert isinstance(error, MissingShard)
        assert error.expected == str(run / "global_step_30" / "actor" / "model_world_size_4_rank_2.pt")
        assert "--step " not in (error.hint or ""), "the average has no such option"

    def test_must_be_there(self, run: Path) -> None:
        error = refused(run, steps=(10, 15, 40))
        assert isinstance(error, NotFound)
        assert error.message == "there is no step 15"
        assert error.expected == "one of the steps 10, 20, 30"


class TestSeveralPaths:
    def test_are_checkpoints_in_the_order_given(self, run: Path) -> None:
        for order in ((10, 20), (20, 10)):
            chosen = Chosen(*(run / f"global_step_{step}" for step in order))
            assert chosen.steps == list(order)
            assert chosen.notes == {}

    def test_may_be_component_folders_and_files(self, run: Path, layouts: Path) -> None:
        chosen = Chosen(run / "global_step_10" / "actor", layouts / "plain-files" / "plain" / "model.pt")
        assert chosen.components == ["actor", "model"]
        assert chosen.steps is None, "a file does not say its step"

    def test_must_be_complete(self, run: Path) -> None:
        assert isinstance(refused(run / "global_step_10", run / "global_step_30"), MissingShard)

    def test_may_be_runs_of_which_the_newest_complete_step_is_taken(self, run: Path, long_run: Path) -> None:
        chosen = Chosen(run, long_run)
        assert chosen.steps == [20, 100]
        assert chosen.notes == {"step-skipped": ["global_step_30 is skipped: rank 2 of 4 is missing"]}

    def test_may_be_runs_of_which_the_same_steps_are_taken(self, run: Path, long_run: Path) -> None:
        assert Chosen(run, long_run, last=2).steps == [10, 20, 40, 100]
        assert Chosen(run, long_run, steps=(10, 20)).steps == [10, 20, 10, 20]

    def test_may_be_a_run_and_a_checkpoint(self, run: Path, long_run: Path) -> None:
        assert Chosen(run, long_run / "checkpoint-40", end=20).steps == [10, 20, 40]

    def test_may_be_the_same_twice_but_that_is_said(self, run: Path) -> None:
        path = run / "global_step_10"
        chosen = Chosen(path, path / ".." / "global_step_10", run / "global_step_20")
        assert chosen.notes == {"same-twice": [f"{path} (actor) is averaged 2 times"]}
        assert Chosen(path / "actor", path / "critic").notes == {}, "two components of one checkpoint are not the same"

    def test_leave_nothing_for_a_choice_of_steps_to_say_where_none_is_a_run(self, run: Path) -> None:
        error = refused(run / "global_step_10", run / "global_step_20", last=2)
        assert isinstance(error, UsageError)

    def test_cannot_have_more_nodes(self, run: Path, tmp_path: Path) -> None:
        error = refused(run, run, also=(tmp_path,))
        assert isinstance(error, UsageError)
        assert error.hint == "merge the checkpoint from its nodes first"


class TestRefusals:
    def test_of_a_run_without_a_choice_list_its_steps(self, run: Path) -> None:
        error = refused(run)
        assert error.message == "which steps of the run should be averaged?"
        assert error.expected == "some of 10, 20, 30"
        assert error.hint == "pass --all, --last 2, --from 20 --to 30, or --steps 20,30"

    @pytest.mark.parametrize(
        ("choice", "count"),
        [({"begin": 20}, 1), ({"every": 20}, 1), ({"steps": (10,)}, 1)],
        ids=str,
    )
    def test_of_fewer_than_two(self, run: Path, choice: dict[str, Any], count: int) -> None:
        error = refused(run, **choice)
        reason = f": {SKIPPED}" if choice in ({"begin": 20}, {"every": 20}) else ""
        assert error.message == f"an average needs at least two checkpoints; found {count}{reason}"
        assert error.hint == "ckpt merge writes a single one"

    def test_of_a_range_that_ends_before_it_begins(self, run: Path) -> None:
        assert refused(run, begin=30, end=10).message == "no steps lie in the range from 30 to 10"

    def test_of_a_range_without_steps_list_those_that_are_there(self, run: Path) -> None:
        for choice in ({"begin": 11, "end": 12}, {"begin": 1000, "end": 5000, "every": 1000}):
            error = refused(run, **choice)
            assert (error.message, error.expected) == ("no step of the run is chosen", "some of the steps 10, 20, 30")
            assert error.hint == "pass --all, --last 2, --from 20 --to 30, or --steps 20,30"

    def test_of_a_component_that_no_step_has_says_what_is_there(self, run: Path) -> None:
        error = refused(run, everything=True, type="emma")
        assert isinstance(error, NotFound)
        assert error.message == "no step of this run has a component emma"

    def test_of_one_checkpoint(self, run: Path) -> None:
        assert refused(run / "global_step_10").message == "an average needs at least two checkpoints; found 1"
        error = refused(run / "global_step_10", everything=True)
        assert error.message == "this is one checkpoint, which has no steps to choose from"
        assert error.hint == "pass the run, or several checkpoints"

    @pytest.mark.parametrize(
        "choice",
        [
            {"everything": True, "last": 2},
            {"everything": True, "begin": 10},
            {"last": 2, "end": 20},
            {"steps": (10, 20), "every": 10},
            {"everything": True, "steps": (10, 20)},
            {"last": 2, "steps": (10, 20)},
        ],
        ids=str,
    )
    def test_of_choices_that_contradict_each_other(self, run: Path, choice: dict[str, Any]) -> None:
        error = refused(run, **choice)
        assert error.message == "the steps are chosen in more than one way"
        assert error.expected == f"one of {CHOICES}"

    @pytest.mark.parametrize(
        ("choice", "message"),
        [
            ({"last": 1}, "--last is out of range"),
            ({"last": -3}, "--last is out of range"),
            ({"every": 0}, "--every is out of range"),
            ({"every": -10}, "--every is out of range"),
            ({"steps": (10, 20, 10)}, "--steps names a step twice"),
        ],
        ids=str,
    )
    def test_of_choices_that_make_no_sense(self, run: Path, choice: dict[str, Any], message: str) -> None:
        error = refused(run, **choice)
        assert isinstance(error, UsageError)
        assert error.message == message

    def test_of_a_path_that_is_not_there(self, run: Path, tmp_path: Path) -> None:
        assert isinstance(refused(run / "global_step_10", tmp_path / "nothing"), NotFound)
