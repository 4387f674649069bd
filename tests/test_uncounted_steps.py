"""What lies beside the steps of a run and is not counted as one: it may be the newest save, so that no command is silent about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, NotFound, OutputInsideSource, Unreadable, UsageError
from ckpt_cli.watching.watched_run import Listener
from tests.test_steps import model, of_all_commands, ranks, told, value_of

Told = list[tuple[str, str]]


def of_every_command(run: Path, out: Path, code: str) -> dict[str, Told]:
    """Also those that only look at a run."""
    with ckpt_cli.open(run) as opened:
        seen = {"open": told(opened.notes, code)}
    return {**of_all_commands(run, out, code), **seen, "verify": told(ckpt_cli.verify(run).notes, code)}


class TestASaveUnderAnotherName:
    """A run whose newest save is not named like a step was answered with an older one, called the newest."""

    @pytest.mark.parametrize(
        ("steps", "other"),
        [
            (("step_600", "step_500"), "step_10k"),
            (("checkpoint-10", "checkpoint-5"), "checkpoint-last"),
            (("checkpoint-10", "checkpoint-5"), "final"),
            (("checkpoint-10", "checkpoint-5"), "final_model"),
            (("checkpoint-10", "checkpoint-5"), "lastCheckpoint"),
            (("checkpoint-500", "checkpoint-5"), "checkpoint-1e3"),
            (("checkpoint-500", "checkpoint-5"), "checkpoint-1,000"),
            (("checkpoint-30", "checkpoint-5"), "checkpoint-40 copy"),
            (("checkpoint-30", "checkpoint-5"), "checkpoint-40 (1)"),
            (("checkpoint-30", "checkpoint-5"), "checkpoint-40.bak"),
            (("checkpoint-30", "checkpoint-5"), "checkpoint-40~"),
            (("checkpoint-30", "checkpoint-5"), "checkpoint-40-partial"),
            (("checkpoint-30", "checkpoint-5"), "checkpoint-40 副本"),
            (("checkpoint-30", "checkpoint-5"), "old_checkpoint-40"),
            (("global_step_10", "global_step_5"), "global_step_last/actor"),
            (("step_10", "step_5"), "step_last/weights/model"),
            (("0000010", "0000005"), "0000020_new"),
            (("ep1-ba10", "ep1-ba5"), "ep1-ba20 copy"),
            (("checkpoint-10", "checkpoint-5"), "checkpoint-latest/global_step40"),
        ],
    )
    def test_is_named_by_every_command(self, tmp_path: Path, steps: tuple[str, str], other: str) -> None:
        run = tmp_path / "run"
        for step in steps:
            model(run / step, 1.0)
        model(run / other, 2.0)
        for command, notes in of_every_command(run, tmp_path / "out", "uncounted").items():
            assert [level for level, _ in notes] == ["warning"], command
            assert notes[0][1].startswith(f"{other.split('/')[0]}/ beside the steps"), command
            assert notes[0][1].endswith(f"it may be newer than {steps[0]}"), command

    @pytest.mark.parametrize("once", [True, False])
    def test_is_told_by_watch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: bool) -> None:
        run = tmp_path / "run"
        for name in ("step_500", "step_1k", "step_2k"):
            model(run / name, 1.0)
        warned: list[str] = []
        if not once:
            naps = iter(range(3))
            monkeypatch.setattr("ckpt_cli.commands.watch.time.sleep", lambda _: next(naps))
        listener = Listener(warns=lambda _, text: warned.append(text))
        try:
            notes = told(ckpt_cli.watch(run, tmp_path / "out", once=once, settle=0, listener=listener).notes, "uncounted")
            assert [level for level, _ in notes] == ["warning"]
        except StopIteration:
            assert not once
        (text,) = warned
        assert text.startswith("step_1k/, step_2k/ beside the steps were not counted")

    @pytest.mark.parametrize(
        ("steps", "others"),
        [
            (("checkpoint-200", "checkpoint-100"), ("checkpoint-200-merged", "checkpoint-100-merged")),
            (("checkpoint-30", "checkpoint-5"), ("checkpoint-5 copy", "checkpoint-5 (1)")),
            (("0000020", "0000010"), ("0000020.bak", "0000010_4bit")),
            (("global_step_10", "global_step_5"), ("merged_global_step_10", "old_global_step_5")),
            (("epoch_2/step_10", "epoch_1/step_20"), ("epoch_2/step_10-bf16", "epoch_1/step_20-merged")),
        ],
    )
    def test_that_says_an_older_step_or_the_same_is_a_remark(self, tmp_path: Path, steps: tuple[str, str], others: tuple[str, str]) -> None:
        run = tmp_path / "run"
        for name in (*steps, *others):
            model(run / name, 1.0)
        for command, notes in of_every_command(run, tmp_path / "out", "uncounted").items():
            assert [level for level, _ in notes] == ["info"], command

    @pytest.mark.parametrize(
        ("steps", "other"),
        [
            (("checkpoint-200", "checkpoint-100"), "checkpoint-300-merged"),
            (("checkpoint-200", "checkpoint-100"), "checkpoint-200 copy"),
            (("checkpoint-200", "checkpoint-100"), "checkpoint-200 (1)"),
            (("checkpoint-200", "checkpoint-100"), "checkpoint-200-new"),
            (("checkpoint-200", "checkpoint-100"), "checkpoint-100-final"),
            (("checkpoint-200", "checkpoint-100"), "checkpoint-100-300"),
            (("checkpoint-200", "checkpoint-100"), "checkpoint-1.5k"),
            (("checkpoint-200", "checkpoint-100"), "epoch_3-merged"),
            (("epoch_2/step_10", "epoch_1/step_20"), "epoch_2/step_15-merged"),
        ],
    )
    def test_that_may_be_later_than_its_number_says_is_named(self, tmp_path: Path, steps: tuple[str, str], other: str) -> None:
        run = tmp_path / "run"
        for name in (*steps, other):
            model(run / name, 1.0)
        ((level, text),) = told(ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes, "uncounted")
        assert level == "warning"
        assert "may be newer" in text

    def test_is_named_by_extract_state(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-10", 1.0, state=10)
        model(run / "checkpoint-final", 2.0, state=20)
        ((level, _),) = told(ckpt_cli.extract_state(run, tmp_path / "state").notes, "uncounted")
        assert level == "warning"

    def test_is_named_in_an_open_range(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        for name in ("checkpoint-5", "checkpoint-10", "checkpoint-20k"):
            model(run / name, 1.0)
        averaged = ckpt_cli.average(run, tmp_path / "out", begin=1, dry_run=True)
        assert len(told([*averaged.notes, *averaged.checkpoint.notes], "uncounted")) == 1
        averaged = ckpt_cli.average(run, tmp_path / "out", begin=1, end=10, dry_run=True)
        assert told([*averaged.notes, *averaged.checkpoint.notes], "uncounted") == []

    def test_several_are_named_together(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoints" / "step_500", 1.0)
        for name in ("checkpoints/step_9k", "final", "checkpoints/merged"):
            model(run / name, 2.0)
        notes = told(ckpt_cli.detect(run).checkpoint.notes, "uncounted")
        assert [level for level, _ in notes] == ["warning", "info"]
        assert "step_9k/" in notes[0][1]
        assert "final/" in notes[0][1]
        assert "merged/" in notes[1][1]

    def test_does_not_matter_where_a_step_is_asked_for(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-10", 1.0)
        model(run / "checkpoint-last", 2.0)
        assert told(ckpt_cli.detect(run, step=10).checkpoint.notes, "uncounted") == []
        assert told(ckpt_cli.detect(run / "checkpoint-10").checkpoint.notes, "uncounted") == []

    @pytest.mark.parametrize("name", ["merged", "hf", "export"])
    def test_a_model_of_another_tool_is_a_remark(self, tmp_path: Path, name: str) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-10", 1.0)
        model(run / name, 2.0)
        assert [level for level, _ in told(ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes, "uncounted")] == ["info"]

    @pytest.mark.parametrize("name", ["ref", "base_model", "logs", "runs", ".cache", "wandb"])
    def test_what_is_surely_no_save_of_the_run_is_nothing(self, tmp_path: Path, name: str) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-10", 1.0)
        model(run / name, 2.0)
        (run / "final").mkdir()
        (run / "last_data").symlink_to(tmp_path)
        assert told(ckpt_cli.detect(run).checkpoint.notes, "uncounted") == []

    def test_an_output_and_a_link_to_a_step_are_nothing(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-10", 1.0)
        (run / "last").symlink_to("checkpoint-10")
        ckpt_cli.merge(run, run / "checkpoint-10_final")
        assert told(ckpt_cli.detect(run).checkpoint.notes, "uncounted") == []

    def test_a_save_with_an_output_beside_its_weights_is_named(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        ranks(run / "checkpoint-10")
        ranks(run / "checkpoint-last")
        ckpt_cli.merge(run / "checkpoint-last", in_place=True)
        assert len(told(ckpt_cli.detect(run).checkpoint.notes, "uncounted")) == 1

    def test_one_that_cannot_be_looked_at_is_named(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-10", 1.0)
        (run / "checkpoint-last").symlink_to(tmp_path / "gone")
        (run / "data").symlink_to(tmp_path / "gone")
        ((level, text),) = told(ckpt_cli.detect(run).checkpoint.notes, "uncounted")
        assert level == "warning"
        assert text.startswith(f"checkpoint-last (this is a link to {tmp_path / 'gone'}, which does not exist) beside the steps")


class TestAStepThatIsALinkToNothing:
    """Its target may be on a disk that is not mounted: it was taken for no step at all."""

    @pytest.fixture(params=["checkpoint-20", "checkpoint-20/actor", "checkpoint-20/weights"])
    def run(self, tmp_path: Path, request: Any) -> Path:
        run = tmp_path / "run"
        model(run / "checkpoint-5", 1.0)
        model(run / "checkpoint-10", 1.0)
        (run / request.param).parent.mkdir(exist_ok=True)
        (run / request.param).symlink_to(tmp_path / "scratch")
        return run

    def test_is_refused_where_it_would_be_taken(self, run: Path, tmp_path: Path) -> None:
        for refused in (
            lambda: ckpt_cli.merge(run, tmp_path / "out"),
            lambda: ckpt_cli.merge(run, tmp_path / "out", step=20),
            lambda: ckpt_cli.average(run, tmp_path / "out", everything=True),
            lambda: ckpt_cli.inspect(run),
            lambda: ckpt_cli.verify(run),
            lambda: ckpt_cli.detect(run),
            lambda: ckpt_cli.open(run),
            lambda: ckpt_cli.extract_state(run, tmp_path / "state"),
        ):
            with pytest.raises(Unreadable, match="which does not exist"):
                refused()

    def test_does_not_matter_where_another_step_is_asked_for(self, run: Path, tmp_path: Path) -> None:
        assert ckpt_cli.merge(run, tmp_path / "out", step=10).checkpoint.step == 10

    def test_is_not_passed_over_for_another_component(self, tmp_path: Path) -> None:
        ranks(tmp_path / "global_step_20" / "critic")
        (tmp_path / "global_step_20" / "actor").symlink_to(tmp_path / "scratch")
        with pytest.raises(Unreadable):
            ckpt_cli.merge(tmp_path / "global_step_20", tmp_path / "out")


class TestStepsOfTwoCounters:
    """Epoch 2 and step 100 were put on one axis."""

    @pytest.mark.parametrize("names", [("epoch_1", "epoch_2", "step_100"), ("step_1", "epoch7"), ("checkpoint-3", "epoch_9", "epoch_10")])
    def test_are_named_and_not_averaged_together(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        run = tmp_path / "run"
        for name in names:
            model(run / name, 1.0)
        for notes in (ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes, ckpt_cli.detect(run).checkpoint.notes):
            ((level, text),) = told(notes, "counters")
            assert level == "warning"
            assert all(name in text for name in names)
        for chosen in ({"everything": True}, {"last": 2}, {"begin": 1}):
            with pytest.raises(UsageError, match="not of one kind"):
                ckpt_cli.average(run, tmp_path / "average", **chosen)
        ckpt_cli.average([run / name for name in names], tmp_path / "of-folders")

    def test_are_averaged_where_they_are_listed(self, tmp_path: Path) -> None:
        for name in ("epoch_1", "step_100"):
            model(tmp_path / "run" / name, 1.0)
        ckpt_cli.average(tmp_path / "run", tmp_path / "out", steps=(1, 100))

    @pytest.mark.parametrize("names", [("epoch_1", "step_100"), ("checkpoint_7", "global_step_50"), ("step_9", "epoch_2", "epoch_4")])
    def test_have_no_distances(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        """A half-life took epoch 1 and step 100 for 99 steps apart; that the paths are in order can be told within a kind only."""
        paths = [tmp_path / name for name in names]
        for at, path in enumerate(paths):
            model(path, float(at))
        posthoc: dict[str, Any] = {"method": "posthoc-ema", "sigma_rel": 0.1, "source_sigma_rel": 0.05}
        for options in ({"method": "ema", "half_life": 500}, posthoc):
            with pytest.raises(UsageError, match="not of one kind, so they do not say how far they are apart") as caught:
                ckpt_cli.average(paths, tmp_path / "out", **options)
        assert all(name in str(caught.value) for name in names)
        done = ckpt_cli.average(paths, tmp_path / "linear", method="linear")
        assert [source.weight for source in done.outputs[0].sources] == list(range(1, len(names) + 1))
        wsm = ckpt_cli.average(paths, tmp_path / "wsm", method="wsm")
        assert [source.weight for source in wsm.outputs[0].sources] == pytest.approx([1 / len(names)] * len(names))

    @pytest.mark.parametrize("method", ["linear", "wsm", "ema"])
    def test_have_no_order_by_their_numbers(self, tmp_path: Path, method: Any) -> None:
        for name in ("epoch_1", "step_100"):
            model(tmp_path / "run" / name, 1.0)
        decay = {"decay": 0.5} if method == "ema" else {}
        with pytest.raises(UsageError, match="do not say which is older"):
            ckpt_cli.average(tmp_path / "run", tmp_path / "out", steps=(1, 100), method=method, **decay)
        paths = [tmp_path / "run" / name for name in ("step_100", "epoch_1", "epoch_0")]
        model(paths[-1], 1.0)
        with pytest.raises(UsageError, match="ordered from old to new"):
            ckpt_cli.average(paths, tmp_path / "out", method=method, **decay)

    @pytest.mark.parametrize(("half_life", "level"), [(2, "info"), (500, "warning"), (None, None)])
    def test_epochs_alone_are_what_a_half_life_counts(self, tmp_path: Path, half_life: float | None, level: str | None) -> None:
        paths = [tmp_path / name for name in ("epoch_1", "epoch_3")]
        for path in paths:
            model(path, 1.0)
        done = ckpt_cli.average(paths, tmp_path / "out", method="ema", half_life=half_life, decay=None if half_life else 0.5)
        assert [said for said, _ in told(done.outputs[0].notes, "half-life")] == ([level] if level else [])

    def test_steps_that_say_their_epoch_are_of_one(self, tmp_path: Path) -> None:
        for name in ("epoch_1_step_10", "step_20", "checkpoint-30"):
            model(tmp_path / "run" / name, 1.0)
        assert told(ckpt_cli.detect(tmp_path / "run").checkpoint.notes, "counters") == []


class TestAnOutputAmongTheSteps:
    """An output that was called like a step was merged again in place of the newest one."""

    def test_is_not_taken_for_a_step(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-5", 1.0)
        model(run / "checkpoint-10", 2.0)
        ckpt_cli.merge(run, tmp_path / "out", step=5)
        (tmp_path / "out").rename(run / "checkpoint-99")
        for command, notes in of_every_command(run, tmp_path / "again", "uncounted").items():
            assert [level for level, _ in notes] == ["info"], command
            assert "checkpoint-99" in notes[0][1], command
        assert ckpt_cli.merge(run, tmp_path / "again").checkpoint.step == 10
        ckpt_cli.average(run, tmp_path / "average", everything=True)
        assert value_of(tmp_path / "average") == 1.5
        with pytest.raises(NotFound) as caught:
            ckpt_cli.merge(run, tmp_path / "refused", step=99)
        assert caught.value.hint is not None
        assert caught.value.hint.endswith(f"pass {run / 'checkpoint-99'}")
        assert ckpt_cli.merge(run / "checkpoint-99", tmp_path / "itself").checkpoint.step == 99
        assert value_of(tmp_path / "itself") == 1.0

    def test_a_folder_of_outputs_has_steps(self, tmp_path: Path) -> None:
        for step, value in ((5, 1.0), (10, 4.0)):
            ckpt_cli.merge(model(tmp_path / f"checkpoint-{step}", value), tmp_path / "merged" / f"checkpoint-{step}")
        assert ckpt_cli.merge(tmp_path / "merged", tmp_path / "out").checkpoint.step == 10
        assert ckpt_cli.merge(tmp_path / "merged", tmp_path / "five", step=5).checkpoint.step == 5
        ckpt_cli.average(tmp_path / "merged", tmp_path / "average", everything=True)
        assert value_of(tmp_path / "average") == 2.5

    def test_what_was_added_to_a_step_does_not_make_it_one(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        ranks(run / "checkpoint-5")
        ranks(run / "checkpoint-10")
        ckpt_cli.merge(run, in_place=True)
        assert ckpt_cli.detect(run).checkpoint.step == 10

    @pytest.mark.parametrize("name", ["checkpoint-99", "step_7", "checkpoints/checkpoint-99"])
    def test_is_not_written_there(self, tmp_path: Path, name: str) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-5", 1.0, state=5)
        model(run / "checkpoint-10", 2.0, state=10)
        for refused in (
            lambda: ckpt_cli.merge(run, run / name),
            lambda: ckpt_cli.merge(run / "checkpoint-5", run / name),
            lambda: ckpt_cli.average(run, run / name, everything=True),
            lambda: ckpt_cli.extract_state(run, run / name),
        ):
            with pytest.raises(OutputInsideSource) as caught:
                refused()
            assert caught.value.hint is not None
            assert not (run / name).exists()
        ckpt_cli.merge(run, run / f"{name}_merged")

    @pytest.mark.parametrize(
        "name", ["checkpoint-5/merged", "checkpoint-5/a/b", "checkpoint-7/merged", "link/merged", "around/checkpoint-5/x"]
    )
    def test_is_not_written_inside_another_step(self, tmp_path: Path, name: str) -> None:
        run = tmp_path / "run"
        model(run / "checkpoint-5", 1.0, state=5)
        ranks(run / "checkpoint-10")
        (run / "link").symlink_to("checkpoint-5")
        (run / "around").symlink_to(run, target_is_directory=True)
        (run / "last").symlink_to("checkpoint-10")
        for refused in (
            lambda: ckpt_cli.merge(run, run / name),
            lambda: ckpt_cli.merge(run / "checkpoint-10", run / name),
            lambda: ckpt_cli.merge(run / "last", run / name, dry_run=True),
        ):
            with pytest.raises(OutputInsideSource, match="inside another step of the run"):
                refused()
        assert sorted(path.name for path in run.rglob("merged")) == []
        ckpt_cli.merge(run / "checkpoint-10", run / "checkpoint-10 merged" / "checkpoint-5")
        ckpt_cli.merge(run / "checkpoint-10", tmp_path / "other" / "checkpoint-5" / "merged")

    def test_a_part_of_a_step_is_not_written_as_or_in_another_step(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        for step in (5, 10):
            ranks(run / f"global_step_{step}" / "actor")
        for name in ("global_step_5/merged", "global_step_7"):
            with pytest.raises(OutputInsideSource):
                ckpt_cli.merge(run / "global_step_10" / "actor", run / name)
        ckpt_cli.merge(run / "global_step_10" / "actor", run / "merged")


class TestStepsThatAreFiles:
    """Lightning writes a file for each step, and one more under the name with a version where that is taken."""

    @staticmethod
    def save(path: Path, value: float) -> None:
        path.parent.mkdir(exist_ok=True)
        torch.save({"state_dict": {"model.a.weight": torch.full((4, 4), value)}, "pytorch-lightning_version": "2.6.0"}, path)

    @pytest.mark.parametrize(
        "other",
        [
            "epoch=0-step=100-v1.ckpt",
            "epoch=1-step=200-v1.ckpt",
            "epoch=1-step=200-val_loss=0.50.ckpt",
            "epoch=1-step=200.ckpt.tmp",
            "final.ckpt",
        ],
    )
    def test_a_file_that_is_not_named_like_a_step_is_named(self, tmp_path: Path, other: str) -> None:
        for name, value in (("epoch=0-step=50.ckpt", 1.0), ("epoch=0-step=100.ckpt", 2.0), (other, 3.0)):
            self.save(tmp_path / "run" / name, value)
        for command, notes in of_every_command(tmp_path / "run", tmp_path / "out", "uncounted").items():
            assert [level for level, _ in notes] == ["warning"], command
            assert notes[0][1].startswith(f"{other} beside the steps"), command

    def test_what_is_no_save_of_its_own_is_not(self, tmp_path: Path) -> None:
        for name, value in (("epoch=0-step=50.ckpt", 1.0), ("epoch=0-step=100.ckpt", 2.0)):
            self.save(tmp_path / "run" / name, value)
        (tmp_path / "run" / "latest.ckpt").symlink_to("epoch=0-step=100.ckpt")
        (tmp_path / "run" / "metrics.csv").write_text("step,loss\n")
        (tmp_path / "run" / "rng_state.pth").write_bytes(b"")
        assert told(ckpt_cli.detect(tmp_path / "run", step=50).checkpoint.notes, "uncounted") == []
        assert told(ckpt_cli.detect(tmp_path / "run").checkpoint.notes, "uncounted") == []

    def test_names_with_metrics_alone_are_no_steps(self, tmp_path: Path) -> None:
        for step in (100, 200):
            self.save(tmp_path / "run" / f"epoch=0-step={step}-val_loss=0.50.ckpt", step)
        with pytest.raises(CkptError):
            ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
