"""Which step of a run is taken where something speaks against the highest number, and what is said of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.discover.locate import locate
from ckpt_cli.discover.steps import MAX_LOOKED, older_notes
from ckpt_cli.errors import AmbiguousStep, NotFound, NotRecognised, Undecidable, Unreadable
from tests.cli import ROOT
from tests.conftest import Copy
from tests.megatron import arguments, write_legacy
from tests.tensors import load

HOUR = 3600
NOW = 1_700_000_000


def model(folder: Path, value: float, *, time: float | None = None, state: int | None = None) -> Path:
    """A step: one matrix of this value."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.full((4, 4), value)}, folder / "model.safetensors", metadata={"format": "pt"})
    if state is not None:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": state, "log_history": [{"loss": float("nan")}]}))
    if time is not None:
        for path in (*folder.iterdir(), folder):
            os.utime(path, (time, time))
    return folder


def value_of(output: Path) -> float:
    return float(load_file(output / "model.safetensors")["w"][0, 0])


def ranks(folder: Path, world: int = 2, there: int = 2) -> Path:
    """A step of files of ranks, of which some may be missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(there):
        torch.save({"w": torch.ones(4, 4)}, folder / f"model_world_size_{world}_rank_{rank}.pt")
    return folder


def told(notes: Any, code: str) -> list[tuple[str, str]]:
    return [(note.level, note.text) for note in notes if note.code == code]


def of_all_commands(run: Path, out: Path, code: str) -> dict[str, list[tuple[str, str]]]:
    """What each command that chooses a step by itself says under a code."""
    average = ckpt_cli.average(run, out, last=2, dry_run=True)
    return {
        "detect": told(ckpt_cli.detect(run).checkpoint.notes, code),
        "merge": told(ckpt_cli.merge(run, out, dry_run=True).checkpoint.notes, code),
        "inspect": told(ckpt_cli.inspect(run).checkpoint.notes, code),
        "average": told([*average.notes, *average.checkpoint.notes], code),
    }


class TestStepsInSeveralFolders:
    """The folder that is looked into first decided, whatever lay in the others."""

    @pytest.mark.parametrize(
        ("low", "high"),
        [
            ("checkpoint/step-5", "checkpoints/step-10"),
            ("checkpoint-3", "checkpoints/checkpoint-500"),
            ("ckpt/step_7", "checkpoint-9"),
            ("checkpoints/checkpoint-90", "ckpt/checkpoint-100"),
        ],
    )
    def test_are_one_run(self, tmp_path: Path, low: str, high: str) -> None:
        run = tmp_path / "run"
        model(run / low, 1.0)
        model(run / high, 2.0)
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert value_of(tmp_path / "out") == 2.0
        assert [Path(step.path) for step in result.checkpoint.steps] == [run / low, run / high]
        ((level, text),) = told(result.checkpoint.notes, "step-folders")
        assert level == "info"
        assert all(str(step.step) in text for step in result.checkpoint.steps)
        assert ckpt_cli.detect(run).checkpoint.step == result.checkpoint.step
        assert [found.path for found in locate(run, locate(run).checkpoints[0].step).checkpoints] == [run / low]

    def test_are_averaged_together(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-1", 1.0)
        model(run / "checkpoints" / "checkpoint-2", 4.0)
        result = ckpt_cli.average(run, tmp_path / "out", everything=True)
        assert value_of(tmp_path / "out") == 2.5
        assert [note.level for note in result.checkpoint.notes if note.code == "step-folders"] == ["info"]

    def test_of_which_the_newest_is_not_whole(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        ranks(run / "checkpoint" / "step-9", there=1)
        model(run / "checkpoints" / "step-4", 1.0)
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert result.checkpoint.step == 4
        ((level, text),) = told(result.checkpoint.notes, "step-skipped")
        assert level == "warning"
        assert text.startswith("checkpoint/step-9 is skipped")

    def test_a_step_without_weights_in_another_folder_is_named(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoints" / "checkpoint-4", 1.0)
        (run / "checkpoint-8").mkdir()
        (run / "checkpoint-4").mkdir()
        ((_, text),) = told(ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes, "step-skipped")
        assert "checkpoint-8" in text

    def test_one_folder_under_two_names_is_one(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoints" / "step-1", 1.0)
        (run / "checkpoint").symlink_to("checkpoints")
        assert len(locate(run).checkpoints) == 1
        assert locate(run).folders == ()

    def test_one_of_which_cannot_be_listed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-1", 1.0)
        model(run / "checkpoints" / "checkpoint-2", 1.0)
        real = os.scandir

        def refused(path: Any) -> Any:
            if str(path).endswith("checkpoints"):
                raise PermissionError(13, "Permission denied")
            return real(path)

        monkeypatch.setattr(os, "scandir", refused)
        with pytest.raises(Unreadable) as caught:
            ckpt_cli.merge(run, tmp_path / "out")
        assert "pass the folder of the step itself" in (caught.value.hint or "")
        assert ckpt_cli.merge(run / "checkpoint-1", tmp_path / "out").checkpoint.step == 1

    def test_beside_weights_of_the_run_are_counted_together(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", 3.0)
        (run / "config.json").write_text('{"model_type": "own"}')
        model(run / "checkpoint-1", 1.0)
        model(run / "checkpoints" / "checkpoint-2", 1.0)
        ((_, text),) = told(ckpt_cli.detect(run).checkpoint.notes, "steps-inside")
        assert "2 step folders" in text


class TestOneStepInTwoFolders:
    """Two trainers wrote into one folder: the one whose name comes last was taken."""

    @pytest.fixture(
        params=[("checkpoint-20", "global_step_20"), ("checkpoint-020", "checkpoint-20"), ("checkpoint/step-20", "ckpt/step-20")]
    )
    def run(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        model(tmp_path / "run" / "checkpoint-10", 1.0)
        for value, name in enumerate(request.param):
            model(tmp_path / "run" / name, 2.0 + value, state=20)
        return tmp_path / "run"

    def test_is_refused_where_one_would_be_taken(self, run: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        commands = (
            lambda: ckpt_cli.merge(run, out),
            lambda: ckpt_cli.merge(run, out, step=20),
            lambda: ckpt_cli.inspect(run),
            lambda: ckpt_cli.verify(run),
            lambda: ckpt_cli.extract_state(run, out),
            lambda: ckpt_cli.average(run, out, everything=True),
            lambda: ckpt_cli.average(run, out, last=2),
            lambda: ckpt_cli.average(run, out, begin=10),
            lambda: ckpt_cli.average(run, out, steps=(10, 20)),
        )
        for command in commands:
            with pytest.raises(AmbiguousStep, match="step 20 is there more than once: ") as caught:
                command()
            assert caught.value.exit_code == 2
            assert (caught.value.hint or "").startswith("pass the ")
        assert not out.exists()

    def test_is_listed_by_detect(self, run: Path) -> None:
        result = ckpt_cli.detect(run)
        assert result.exit_code == 2
        assert result.error is not None
        assert result.error.code == "ambiguous-step"
        assert [step.step for step in result.checkpoint.steps] == [10, 20, 20]
        assert all(step.problem is None for step in result.checkpoint.steps)

    def test_is_read_where_its_folder_is_named(self, run: Path, tmp_path: Path) -> None:
        last = locate(run).checkpoints[-1].path
        assert ckpt_cli.merge(last, tmp_path / "out").checkpoint.step == 20
        assert ckpt_cli.merge(run, tmp_path / "other", step=10).checkpoint.step == 10
        ckpt_cli.average([run / "checkpoint-10", last], tmp_path / "average")

    def test_does_not_matter_where_another_step_is_meant(self, run: Path, tmp_path: Path) -> None:
        model(run / "checkpoint-30", 9.0)
        model(run / "checkpoint-40", 9.0)
        assert ckpt_cli.merge(run, tmp_path / "out").checkpoint.step == 40
        ckpt_cli.average(run, tmp_path / "average", last=2)

    def test_is_refused_as_the_last_of_those_averaged(self, run: Path, tmp_path: Path) -> None:
        model(run / "checkpoint-30", 9.0)
        with pytest.raises(AmbiguousStep):
            ckpt_cli.average(run, tmp_path / "out", last=2)

    @pytest.mark.parametrize("broken", ["global_step_20", "step_20", "checkpoint-20"])
    def test_one_that_is_not_whole_is_skipped(self, tmp_path: Path, broken: str) -> None:
        run = tmp_path / "run"
        whole = next(name for name in ("checkpoint-020", "step-20") if name != broken)
        model(run / "checkpoint-10", 1.0)
        model(run / whole, 2.0)
        ranks(run / broken, there=1)
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert value_of(tmp_path / "out") == 2.0
        ((level, text),) = told(result.checkpoint.notes, "step-skipped")
        assert level == "warning"
        assert broken in text
        model(run / whole, 2.0, state=20)
        (run / broken / "trainer_state.json").write_text('{"global_step": 20}')
        state = ckpt_cli.extract_state(run, tmp_path / "state")
        assert Path(state.path).name == whole
        assert [broken in text for _, text in told(state.notes, "step-skipped")] == [True]

    def test_a_link_to_it_is_no_second_one(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "global_step_20", 2.0)
        (run / "checkpoint-20").symlink_to("global_step_20")
        assert [found.path.name for found in locate(run).checkpoints] == ["global_step_20"]
        assert ckpt_cli.merge(run, tmp_path / "out", step=20).checkpoint.step == 20
        assert told(ckpt_cli.detect(run).checkpoint.notes, "step-skipped") == []


class TestAStepThatIsNotReadBesideWeights:
    """A whole model in the same folder hid it."""

    def deepspeed(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        for name in ("zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            (folder / name).write_bytes(b"")
        return folder

    def test_in_the_step_folder(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        for step in (2, 4):
            model(run / f"checkpoint-{step}", 1.0, state=step, time=1e9)
            os.utime(run / f"checkpoint-{step}" / "trainer_state.json", (1e9 + 7200,) * 2)
            self.deepspeed(run / f"checkpoint-{step}" / f"global_step{step}")
        for command, notes in of_all_commands(run, tmp_path / "out", "unread").items():
            level, text = notes[-1]
            assert level == "warning", command
            assert "global_step4 (DeepSpeed)" in text, command
        state = ckpt_cli.extract_state(run, tmp_path / "state")
        assert [level for level, _ in told(state.notes, "unread")] == ["warning"]

    def test_that_the_trainer_gathered_in_the_same_save_is_a_note(self, tmp_path: Path) -> None:
        """The Hugging Face Trainer writes the gathered model beside DeepSpeed's folder and its own state."""
        step = model(tmp_path / "run" / "checkpoint-4", 1.0, state=4)
        self.deepspeed(step / "global_step4")
        ((level, text),) = told(ckpt_cli.merge(step, tmp_path / "out").checkpoint.notes, "unread")
        assert level == "info"
        assert "global_step4 (DeepSpeed)" in text

    def test_files_of_ranks_go_before_a_model_beside_them(self, tmp_path: Path) -> None:
        weights = {"embedding.word_embeddings.weight": torch.ones(64, 24)}
        step = write_legacy(tmp_path / "run", weights, arguments(num_layers=0), [[0]])
        model(step, 1.0)
        result = ckpt_cli.merge(step, tmp_path / "out")
        assert load(tmp_path / "out").keys() == weights.keys()
        assert any("model.safetensors" in note.text for note in result.checkpoint.notes)

    def test_in_the_folder_above_steps(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", 1.0)
        (run / "config.json").write_text('{"model_type": "own"}')
        self.deepspeed(run / "checkpoint-100")
        for result in (ckpt_cli.detect(run), ckpt_cli.merge(run, tmp_path / "out")):
            ((level, text),) = told(result.checkpoint.notes, "steps-inside")
            assert level == "warning"
            assert "1 step folder:" in text

    def test_as_a_tag_beside_the_model(self, tmp_path: Path) -> None:
        folder = model(tmp_path / "model", 1.0)
        self.deepspeed(folder / "best")
        ((_, text),) = told(ckpt_cli.detect(folder).checkpoint.notes, "unread")
        assert "best (DeepSpeed)" in text

    def test_ordinary_folders_beside_weights_are_none(self, tmp_path: Path) -> None:
        step = model(tmp_path / "checkpoint-5", 1.0)
        (step / "huggingface").mkdir()
        torch.save({}, step / "optimizer.pt")
        assert told(ckpt_cli.detect(step).checkpoint.notes, "unread") == []


class TestALowerStepThatIsYounger:
    """Training was started again in its folder: the high steps are those of the run before."""

    def steps(self, run: Path, hours: dict[int, float]) -> Path:
        for step, age in hours.items():
            model(run / f"checkpoint-{step}", step, time=NOW + age * HOUR)
        return run

    @pytest.mark.parametrize(
        ("hours", "younger"),
        [
            ({300: 0, 400: 1, 500: 2, 100: 150, 200: 151}, 200),
            ({100: 0, 200: 1, 500: 4, 300: 20, 400: 21}, 400),
            ({1000: 0, 900: 30}, 900),
        ],
    )
    def test_is_named(self, tmp_path: Path, hours: dict[int, float], younger: int) -> None:
        run = self.steps(tmp_path / "run", hours)
        newest = max(hours)
        for command, notes in of_all_commands(run, tmp_path / "out", "older-steps").items():
            assert len(notes) == 1, command
            level, text = notes[0]
            assert level == "warning", command
            assert f"checkpoint-{newest} " in text, command
            assert f"checkpoint-{younger} " in text, command

    def test_is_named_by_extract_state(self, tmp_path: Path) -> None:
        run = self.steps(tmp_path / "run", {2: 0, 1: 30})
        model(run / "checkpoint-2", 2.0, state=2, time=NOW)
        assert [level for level, _ in told(ckpt_cli.extract_state(run, tmp_path / "out").notes, "older-steps")] == ["warning"]

    @pytest.mark.parametrize(
        "hours",
        [
            {100: 0, 200: 5, 300: 10},
            {300: 0, 100: 0.2, 200: 0.9},
            {100: 0, 200: 0, 300: 0},
            {100: 0.5, 200: 0.1, 300: 0},
        ],
        ids=["as trained", "copied in any order", "at once", "copied backwards"],
    )
    def test_is_none_of_training_or_copying(self, tmp_path: Path, hours: dict[int, float]) -> None:
        run = self.steps(tmp_path / "run", hours)
        assert not any(of_all_commands(run, tmp_path / "out", "older-steps").values())

    def test_does_not_matter_where_a_step_is_asked_for(self, tmp_path: Path) -> None:
        run = self.steps(tmp_path / "run", {300: 0, 400: 1, 100: 150})
        assert told(ckpt_cli.merge(run, tmp_path / "out", step=400).checkpoint.notes, "older-steps") == []
        average = ckpt_cli.average(run, tmp_path / "average", steps=(300, 400))
        assert told([*average.notes, *average.checkpoint.notes], "older-steps") == []

    def test_is_none_if_it_was_merged_into_the_run(self, tmp_path: Path) -> None:
        run = self.steps(tmp_path / "run", {100: 0, 200: 1})
        ckpt_cli.merge(run, tmp_path / "out", step=100)
        (tmp_path / "out").rename(run / "checkpoint-150")
        assert told(ckpt_cli.detect(run).checkpoint.notes, "older-steps") == []

    def test_takes_one_look_at_some_steps_of_a_long_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = self.steps(tmp_path / "run", {step: step for step in range(2, 400)})
        self.steps(run, {1: 1000})
        target = locate(run)
        asked = []
        real = os.stat
        monkeypatch.setattr(os, "stat", lambda path, *a, **k: asked.append(path) or real(path, *a, **k))
        (note,) = older_notes(target, target.checkpoints[-1])
        assert "checkpoint-1 " in note.text
        assert len(asked) <= MAX_LOOKED + 4


class TestAFileForEachStep:
    """as Lightning writes them, without last.ckpt: the folder is a run of these steps."""

    def saved(self, run: Path, step: int, name: str = "epoch=0-step={}.ckpt", **more: Any) -> Path:
        run.mkdir(parents=True, exist_ok=True)
        path = run / name.format(step)
        torch.save({"state_dict": {"w": torch.full((4, 4), float(step))}, **more}, path)
        return path

    @pytest.mark.parametrize("more", [{}, {"pytorch-lightning_version": "2.6.0", "global_step": 3, "epoch": 0}], ids=["bare", "whole"])
    @pytest.mark.parametrize("name", ["epoch=0-step={}.ckpt", "step-{}.ckpt", "step_{}.ckpt", "step{}.ckpt"])
    def test_the_only_one_is_taken(self, tmp_path: Path, name: str, more: dict[str, Any]) -> None:
        path = self.saved(tmp_path / "run", 3, name, **more)
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert (result.checkpoint.path, result.checkpoint.step, value_of(tmp_path / "out")) == (str(path), 3, 3)

    def test_the_newest_of_several_is_taken(self, tmp_path: Path) -> None:
        for step in (100, 20, 3):
            self.saved(tmp_path / "run", step)
        assert [found.step for found in locate(tmp_path / "run").checkpoints] == [3, 20, 100]
        ckpt_cli.merge(tmp_path / "run", tmp_path / "newest")
        ckpt_cli.merge(tmp_path / "run", tmp_path / "older", step=20)
        ckpt_cli.average(tmp_path / "run", tmp_path / "mean", everything=True)
        assert [value_of(tmp_path / name) for name in ("newest", "older", "mean")] == [100, 20, 41]

    @pytest.mark.parametrize("name", ["epoch=02-val_loss=0.32.ckpt", "mnist-epoch=2.ckpt", "epoch=0-step=3-v1.ckpt"])
    def test_of_another_name_is_the_model_if_it_is_the_only_one(self, tmp_path: Path, name: str) -> None:
        self.saved(tmp_path / "run", 3, name)
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert value_of(tmp_path / "out") == 3
        self.saved(tmp_path / "run", 20, "epoch=07-val_loss=0.2.ckpt")
        with pytest.raises(Undecidable, match="several files could be the model"):
            ckpt_cli.merge(tmp_path / "run", tmp_path / "second")
        self.saved(tmp_path / "run", 50)
        ckpt_cli.merge(tmp_path / "run", tmp_path / "third")
        assert value_of(tmp_path / "third") == 50

    def test_in_the_folder_of_the_run(self, tmp_path: Path) -> None:
        for step in (3, 20):
            self.saved(tmp_path / "version_0" / "checkpoints", step)
        ckpt_cli.merge(tmp_path / "version_0", tmp_path / "out")
        assert value_of(tmp_path / "out") == 20

    def test_beside_the_last_one_which_is_the_model(self, tmp_path: Path) -> None:
        self.saved(tmp_path / "run", 20)
        self.saved(tmp_path / "run", 30, "last.ckpt")
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        ckpt_cli.merge(tmp_path / "run", tmp_path / "step", step=20)
        assert [value_of(tmp_path / name) for name in ("out", "step")] == [30, 20]

    def test_that_holds_no_weights_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "step-3").write_text("a file without a suffix")
        with pytest.raises(NotRecognised):
            ckpt_cli.detect(tmp_path / "run")


class TestWhatATrackerSays:
    def run(self, folder: Path, *steps: int) -> Path:
        for step in steps:
            model(folder / f"global_step_{step}", step)
        return folder

    def write(self, run: Path, kind: str, step: int) -> None:
        if kind == "link":
            (run / "latest").symlink_to(f"global_step_{step}")
        elif kind == "checkpoint_tracker.json":
            (run / kind).write_text(json.dumps({"last_global_step": step, "best_global_step": 1}))
        else:
            name, _, form = kind.partition(" ")
            (run / name).write_text(f"{form or '{}'}\n".format(step))

    KINDS = (
        "latest_checkpointed_iteration.txt",
        "latest_ckpt_global_step.txt",
        "latest global_step{}",
        "latest global_step_{}",
        "link",
        "checkpoint_tracker.json",
    )

    @pytest.mark.parametrize("kind", KINDS)
    def test_of_a_lower_step_that_is_whole_is_a_warning(self, tmp_path: Path, kind: str) -> None:
        run = self.run(tmp_path / "run", 10, 20, 40)
        self.write(run, kind, 20)
        for command, notes in of_all_commands(run, tmp_path / "out", "tracker").items():
            assert len(notes) == 1, command
            level, text = notes[0]
            assert level == "warning", command
            assert "says 20, which is whole" in text, command
            assert "40" in text, command

    @pytest.mark.parametrize("kind", KINDS[:3])
    def test_of_a_step_that_was_not_copied_is_a_warning(self, tmp_path: Path, kind: str) -> None:
        run = self.run(tmp_path / "run", 10, 20)
        self.write(run, kind, 60)
        for command, notes in of_all_commands(run, tmp_path / "out", "tracker").items():
            assert [level for level, _ in notes] == ["warning"], command
            assert "says 60, and that step is not there" in notes[0][1], command
        state = model(run / "global_step_20", 20.0, state=20)
        assert [level for level, _ in told(ckpt_cli.extract_state(run, tmp_path / "state").notes, "tracker")] == ["warning"], state

    @pytest.mark.parametrize("kind", KINDS)
    def test_of_the_step_that_is_taken_is_nothing(self, tmp_path: Path, kind: str) -> None:
        run = self.run(tmp_path / "run", 10, 20)
        self.write(run, kind, 20)
        assert not any(of_all_commands(run, tmp_path / "out", "tracker").values())

    def test_of_steps_that_are_gone_or_skipped_is_a_note(self, tmp_path: Path) -> None:
        run = self.run(tmp_path / "run", 10, 20)
        ranks(run / "global_step_30", there=1)
        for step in (5, 30):
            self.write(run, self.KINDS[0], step)
            assert [level for level, _ in told(ckpt_cli.detect(run).checkpoint.notes, "tracker")] == ["info"]

    def test_is_a_note_where_a_step_is_asked_for(self, tmp_path: Path) -> None:
        run = self.run(tmp_path / "run", 10, 20, 40)
        self.write(run, self.KINDS[0], 20)
        assert [level for level, _ in told(ckpt_cli.detect(run, step=40).checkpoint.notes, "tracker")] == ["info"]

    @pytest.mark.parametrize("content", [b"{", b"[]", b'{"last_global_step": true}', b'{"last_global_step": "9"}', b"\xff"])
    def test_that_makes_no_sense_is_nothing(self, tmp_path: Path, content: bytes) -> None:
        run = self.run(tmp_path / "run", 10)
        (run / "checkpoint_tracker.json").write_bytes(content)
        (run / "latest").mkdir()
        assert locate(run).trackers == ()


class TestAStepThatWasRenamed:
    """checkpoint-7 was moved to checkpoint-70."""

    def test_is_named_by_every_command(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-60", 1.0, state=60)
        model(run / "checkpoint-70", 2.0, state=7)
        for command, notes in of_all_commands(run, tmp_path / "out", "step-differs").items():
            assert notes == [("warning", "the folder says step 70, the state in it says 7")], command
        assert len(told(ckpt_cli.verify(run).notes, "step-differs")) == 1
        state = ckpt_cli.extract_state(run, tmp_path / "state")
        assert len(told(state.notes, "step-differs")) == 1
        merged = ckpt_cli.merge(run, tmp_path / "with", with_state=True)
        assert len(told([*merged.checkpoint.notes, *merged.outputs[0].notes], "step-differs")) == 1

    def test_is_named_in_an_average_that_it_is_not_the_newest_of(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-60", 1.0, state=6)
        model(run / "checkpoint-70", 2.0, state=70)
        ((_, text),) = told(ckpt_cli.average(run, tmp_path / "out", everything=True).notes, "step-differs")
        assert text.startswith("checkpoint-60: ")

    def test_is_named_where_its_folder_is_given(self, tmp_path: Path) -> None:
        step = model(tmp_path / "global_step_70", 2.0, state=7)
        assert len(told(ckpt_cli.merge(step, tmp_path / "out").checkpoint.notes, "step-differs")) == 1
        with pytest.raises(ckpt_cli.CkptError):
            ckpt_cli.merge(step, tmp_path / "strict", strict=True)

    @pytest.mark.parametrize("content", [b"", b"[]", b'{"global_step": "7"}', b'{"global_step": 70.0}', b'{"global_step": -1}'])
    def test_a_state_that_says_nothing_is_no_sign(self, tmp_path: Path, content: bytes) -> None:
        step = model(tmp_path / "checkpoint-70", 2.0)
        (step / "trainer_state.json").write_bytes(content)
        assert told(ckpt_cli.detect(step).checkpoint.notes, "step-differs") == []

    def test_a_folder_that_says_no_step_is_none(self, tmp_path: Path) -> None:
        assert told(ckpt_cli.detect(model(tmp_path / "best", 2.0, state=7)).checkpoint.notes, "step-differs") == []

    def test_a_huge_state_is_not_read(self, tmp_path: Path) -> None:
        step = model(tmp_path / "checkpoint-70", 2.0, state=7)
        with open(step / "trainer_state.json", "r+b") as file:
            file.truncate(1 << 30)
        assert told(ckpt_cli.detect(step).checkpoint.notes, "step-differs") == []


def test_a_step_that_is_not_there_names_those_of_all_folders(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model(run / "checkpoint-1", 1.0)
    model(run / "checkpoints" / "checkpoint-2", 1.0)
    with pytest.raises(NotFound) as caught:
        locate(run, 3)
    assert caught.value.expected == "one of the steps 1, 2"


class TestTwoRunsInOneFolder:
    def test_detect_and_report_tell_them_apart(self, copy: Copy, tmp_path: Path) -> None:
        run = copy("layouts", "verl-run", "run")
        shutil.copytree(ROOT / "examples" / "tiny-run" / "checkpoint-100", run / "checkpoint-100")
        checkpoint = ckpt_cli.detect(run).checkpoint
        ((level, text),) = told(checkpoint.notes, "several-runs")
        assert level == "warning"
        assert text.startswith("the steps here are by their names those of 2 runs: global_step_10, ")
        assert "checkpoint-100 of lmms-engine" in text
        assert {step.trainer for step in checkpoint.steps} == {"verl", "lmms-engine"}
        assert told(ckpt_cli.report(run).notes, "several-runs") == [(level, text)]

    def test_steps_of_one_run_are_not(self, copy: Copy) -> None:
        checkpoint = ckpt_cli.detect(copy("layouts", "verl-run", "run")).checkpoint
        assert not told(checkpoint.notes, "several-runs")
        assert {step.trainer for step in checkpoint.steps} == {None}


@pytest.mark.parametrize(
    "form",
    ["checkpoint_step{}", "checkpoint_step_{}", "checkpoint-step-{}", "ckpt_step{}", "model_step_{}", "ckpt_epoch_{}", "model_epoch{}"],
)
def test_steps_and_epochs_of_loops_are_a_run(tmp_path: Path, form: str) -> None:
    """torch's recipe of asynchronous saves calls them checkpoint_step0, checkpoint_step10, ..."""
    for number in (0, 10, 9):
        model(tmp_path / "run" / form.format(number), float(number))
    ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    assert value_of(tmp_path / "out") == 10
