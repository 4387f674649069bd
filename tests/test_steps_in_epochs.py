"""Where steps are counted anew in each epoch, the epoch tells the newest: in every command, not only where one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckpt_cli
from ckpt_cli.discover.found import ages, are_counted_anew
from ckpt_cli.results.watch import WatchResult
from tests import tiny

NESTED = ("epoch_1/global_step_20", "epoch_1/global_step_30", "epoch_2/global_step_10")
FLAT = ("epoch1_step20", "epoch1_step30", "epoch2_step10")
PLAIN = ("global_step_20", "global_step_30", "global_step_40")
FORMS = pytest.mark.parametrize("steps", [NESTED, FLAT], ids=["nested", "flat"])


def run_of(folder: Path, steps: Sequence[str]) -> Path:
    for number, step in enumerate(steps):
        tiny.folder(folder / step, tiny.weights(number), tiny.classless())
    return folder


def watched(run: Path, out: Path, **options: Any) -> WatchResult:
    return ckpt_cli.watch(run, out, once=True, settle=0, **options)


def said(error: ckpt_cli.CkptError) -> str:
    return " ".join(filter(None, (error.message, error.hint, *(error.details or ()))))


def numbers(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.is_dir())


class TestOrder:
    @pytest.mark.parametrize(
        ("steps", "anew"),
        [
            (NESTED, True),
            (FLAT, True),
            (PLAIN, False),
            (("epoch_1/step_10", "epoch_2/step_20"), False),
            (("epoch_1/step_10", "epoch_2/step_10"), True),
            (("epoch2_step10", "global_step_30"), False),
        ],
    )
    def test_numbers_tell_it_or_not(self, steps: tuple[str, ...], anew: bool) -> None:
        assert are_counted_anew([Path("run", step) for step in steps]) == anew

    @pytest.mark.parametrize(
        ("newer", "older"),
        [
            ("epoch_2/global_step_10", "epoch_1/global_step_30"),
            ("epoch_2", "epoch_1/global_step_30"),
            ("epoch_3", "epoch_2/global_step_10"),
            ("epoch_2/tmp_step_20", "epoch_2/global_step_10"),
            ("epoch_2/global_step_10", "epoch_1/tmp_step_40"),
            ("global_step_5", "epoch_2/global_step_10"),
        ],
    )
    def test_of_what_has_no_weights(self, newer: str, older: str) -> None:
        age = ages([Path("run", step) for step in NESTED])
        assert age(Path("run", newer)) > age(Path("run", older))

    def test_by_number_where_some_say_no_epoch(self) -> None:
        age = ages([Path("run", step) for step in (*NESTED, "global_step_40")])
        assert age(Path("run", "epoch_1/global_step_30")) > age(Path("run", "epoch_2/global_step_10"))


@FORMS
class TestWatch:
    def test_the_newest_output_is_kept(self, steps: tuple[str, ...], tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", steps)
        result = watched(run, tmp_path / "out", keep=1)
        assert [(event.event, event.step) for event in result.events] == [
            ("made", 20), ("made", 30), ("removed", 20), ("made", 10), ("removed", 30),
        ]  # fmt: skip
        assert numbers(tmp_path / "out") == ["step-10"]

    def test_a_later_watch_has_the_same_order(self, steps: tuple[str, ...], tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", steps)
        watched(run, tmp_path / "out")
        watched(run, tmp_path / "out", keep=2)
        assert numbers(tmp_path / "out") == ["step-10", "step-30"]

    def test_since_goes_on_through_later_epochs(self, steps: tuple[str, ...], tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", steps)
        result = watched(run, tmp_path / "out", since=25)
        assert [event.step for event in result.events] == [30, 10]

    def test_the_newest_are_averaged(self, steps: tuple[str, ...], tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", steps)
        result = watched(run, tmp_path / "out", average="last=2")
        assert {event.step: event.steps for event in result.events if event.event == "made"} == {30: (20, 30), 10: (30, 10)}


def test_watch_refuses_a_number_of_several_epochs(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ("epoch_1/global_step_20", "epoch_1/global_step_30", "epoch_2/global_step_20"))
    result = watched(run, tmp_path / "out")
    assert [(event.event, event.step, event.error) for event in result.events] == [("failed", 20, "ambiguous-step"), ("made", 30, None)]


@FORMS
class TestReport:
    def test_the_newest_and_what_can_be_freed(self, steps: tuple[str, ...], tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", steps)
        for step in steps:
            torch.save({"state": {0: {"exp_avg": torch.ones(64)}}, "param_groups": [{"params": [0]}]}, run / step / "optimizer.pt")
        report = ckpt_cli.report(run)
        assert report.newest == str(run / steps[-1])
        assert [(Path(row.path).name, bool(row.freeable)) for row in report.steps] == [
            (Path(step).name, step != steps[-1]) for step in steps
        ]
        assert [row.label for row in report.steps] == list(steps)

    def test_the_drift_is_from_each_to_the_next(self, steps: tuple[str, ...], tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", steps)
        drift = ckpt_cli.report(run, drift=True).drift
        assert drift is not None
        assert (drift.blocks[0].layers, drift.blocks[0].names) == ((30, 10), steps[1:])
        pair = ckpt_cli.diff(run / steps[1], run / steps[2])
        total = {group.pattern: group.relative_l2 for group in pair.comparison.groups}
        assert {row.module: row.values[1] for row in drift.blocks[0].rows} == total


def test_two_steps_of_one_number_are_told_apart(tmp_path: Path) -> None:
    steps = ("epoch_1/global_step_20", "epoch_1/global_step_30", "epoch_2/global_step_20")
    run = run_of(tmp_path / "run", steps)
    report = ckpt_cli.report(run, drift=True)
    assert report.drift is not None
    assert report.drift.blocks[0].names == steps[1:]
    assert [step.called for step in ckpt_cli.detect(run).checkpoint.steps] == list(steps)
    with pytest.raises(ckpt_cli.CkptError, match="more than once") as caught:
        ckpt_cli.merge(run, tmp_path / "out", step=20)
    assert caught.value.code == "ambiguous-step"
    assert str(run / steps[2]) in said(caught.value)
    assert ckpt_cli.merge(run, tmp_path / "out").checkpoint.path == str(run / steps[2])


def test_labels_only_where_numbers_do_not_tell(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ("epoch=1-step=10", "epoch=2-step=20"))
    assert [step.label for step in ckpt_cli.detect(run).checkpoint.steps] == [None, None]
    assert [row.called for row in ckpt_cli.report(run).steps] == ["10", "20"]


@pytest.mark.parametrize("newest", ["epoch_2/global_step_10", "epoch2_step10", "epoch_2"])
@pytest.mark.parametrize("command", ["detect", "merge", "extract_state"])
def test_a_newest_step_that_is_a_broken_link_is_refused(newest: str, command: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", FLAT[:2] if "step1" in newest else NESTED[:2])
    (run / newest).parent.mkdir(exist_ok=True)
    (run / newest).symlink_to("nowhere")
    with pytest.raises(ckpt_cli.CkptError, match="a link to nowhere") as caught:
        getattr(ckpt_cli, command)(run, **({} if command == "detect" else {"output": tmp_path / "out"}))
    assert caught.value.code == "unreadable"
    assert caught.value.hint is not None
    assert "--step 30" in caught.value.hint


@pytest.mark.parametrize("newest", ["epoch_2/global_step_10", "epoch2_step10"])
def test_an_older_broken_link_is_passed_over(newest: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", (newest,))
    link = run / ("epoch_1/global_step_30" if "/" in newest else "epoch1_step30")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("nowhere")
    found = ckpt_cli.detect(run).checkpoint
    assert found.path == str(run / newest)
    assert [(step.path, bool(step.problem)) for step in found.steps] == [(str(link), True), (str(run / newest), False)]


@pytest.mark.parametrize(
    ("steps", "bare", "told"),
    [
        (FLAT[:2], "epoch2_step10", "epoch2_step10"),
        (NESTED[:2], "epoch_2/global_step_10", "epoch_2"),
        ((*NESTED[:2], "epoch_2/global_step_5"), "epoch_2/global_step_20", "epoch_2/global_step_20"),
    ],
)
def test_a_newer_step_without_weights_is_told(steps: tuple[str, ...], bare: str, told: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps)
    (run / bare).mkdir(parents=True)
    result = ckpt_cli.merge(run, tmp_path / "out")
    assert any(note.text.startswith(f"{told} is skipped") for note in result.checkpoint.notes)


def test_a_number_of_which_one_epoch_has_no_weights_is_ambiguous(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", NESTED)
    (run / "epoch_2" / "global_step_20").mkdir()
    with pytest.raises(ckpt_cli.CkptError, match="more than once") as caught:
        ckpt_cli.merge(run, tmp_path / "out", step=20)
    assert str(run / "epoch_1" / "global_step_20") in said(caught.value)


@pytest.mark.parametrize(
    ("steps", "hint"),
    [
        (NESTED, "--steps 30,10,"),
        (FLAT, "--steps 30,10,"),
        (PLAIN, "--steps 30,40,"),
        (("epoch_1/step_20", "epoch_1/step_30", "epoch_2/step_20"), "epoch_2/step_20, or"),
    ],
)
def test_diff_proposes_the_last_two(steps: tuple[str, ...], hint: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps)
    with pytest.raises(ckpt_cli.CkptError, match="nothing to compare") as caught:
        ckpt_cli.diff(run)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


@FORMS
class TestAverage:
    def test_the_last_ones(self, steps: tuple[str, ...], tmp_path: Path) -> None:
        result = ckpt_cli.average(run_of(tmp_path / "run", steps), output=tmp_path / "out", last=2, dry_run=True)
        assert [source.step for source in result.outputs[0].sources] == [30, 10]

    def test_weights_go_with_the_steps_that_they_were_given_for(self, steps: tuple[str, ...], tmp_path: Path) -> None:
        run, out = run_of(tmp_path / "run", steps), tmp_path / "out"
        result = ckpt_cli.average(run, output=out, steps=(10, 20, 30), weights=(0.7, 0.2, 0.1), dry_run=True)
        assert {source.step: source.coefficient for source in result.outputs[0].sources} == pytest.approx({10: 0.7, 20: 0.2, 30: 0.1})

    def test_a_range_of_numbers_is_refused(self, steps: tuple[str, ...], tmp_path: Path) -> None:
        with pytest.raises(ckpt_cli.CkptError, match="counted anew"):
            ckpt_cli.average(run_of(tmp_path / "run", steps), output=tmp_path / "out", begin=10, end=30)

    def test_the_choices_that_are_named(self, steps: tuple[str, ...], tmp_path: Path) -> None:
        with pytest.raises(ckpt_cli.CkptError, match="which steps") as caught:
            ckpt_cli.average(run_of(tmp_path / "run", steps), output=tmp_path / "out")
        assert caught.value.hint == "pass --all, --last 2, or --steps 30,10"


def test_steps_of_one_number_in_two_epochs_are_two(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ("epoch_1/step_20", "epoch_2/step_20"))
    ckpt_cli.average(run, output=tmp_path / "out", everything=True)
    first, second = (tiny.weights(seed)["model.norm.weight"].numpy() for seed in (0, 1))
    written = ckpt_cli.open(tmp_path / "out")["model.norm.weight"].numpy()
    numpy.testing.assert_allclose(written, (first + second) / 2, rtol=1e-6)
    with pytest.raises(ckpt_cli.CkptError, match="more than once"):
        ckpt_cli.average(run, output=tmp_path / "other", steps=(20,))


@FORMS
def test_order_of_paths_for_a_method_that_needs_it(steps: tuple[str, ...], tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps)
    older, newer = run / steps[1], run / steps[2]
    ckpt_cli.average([older, newer], output=tmp_path / "out", method="ema", decay=0.5, dry_run=True)
    with pytest.raises(ckpt_cli.CkptError, match="from old to new"):
        ckpt_cli.average([newer, older], output=tmp_path / "out", method="ema", decay=0.5, dry_run=True)
    with pytest.raises(ckpt_cli.CkptError, match="how far they are apart"):
        ckpt_cli.average([older, newer], output=tmp_path / "out", method="ema", half_life=10, dry_run=True)


def test_the_newest_of_two_with_one_number_is_verified(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ("epoch_1/step_20", "epoch_2/step_20"))
    result = ckpt_cli.merge(run, tmp_path / "out", verify=True)
    assert result.exit_code == 0
    written = ckpt_cli.open(tmp_path / "out")["model.norm.weight"].numpy()
    numpy.testing.assert_array_equal(written, tiny.weights(1)["model.norm.weight"].numpy())
