"""A component that is asked for, and that some or all steps of a run lack."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.errors import CkptError, NotFound
from tests.cli import ckpt_fork as ckpt


@pytest.fixture
def run(layouts: Path, tmp_path: Path) -> Path:
    """Steps 10 (actor and critic), 20 (actor) and 30 (actor, without rank 2)."""
    return Path(shutil.copytree(layouts / "verl-run" / "run", tmp_path / "run"))


class TestWhatNoStepHas:
    @pytest.mark.parametrize("command", ["merge", "inspect", "average", "extract-state"])
    def test_is_told_with_what_all_steps_have(self, run: Path, tmp_path: Path, command: str) -> None:
        options = {"average": ("--all", "-o", tmp_path / "out"), "inspect": ()}.get(command, ("-o", tmp_path / "out"))
        said = ckpt(command, run, "--type", "ema", *options)
        assert said.code == 3
        assert "no step of this run has a component ema\n" in said.err
        assert f"path: {run}\n" in said.err
        assert "expected: one of: actor, critic (only in global_step_10)\n" in said.err

    def test_is_the_reason_and_not_that_one_step_is_unfinished(self, layouts: Path, run: Path, tmp_path: Path) -> None:
        """Of a DCP folder without .metadata nobody knows what is in it."""
        other = tmp_path / "other"
        shutil.copytree(layouts / "lmms-run" / "run", other)
        dcp = other / "checkpoint-300" / "pytorch_model_fsdp_0"
        dcp.mkdir(parents=True)
        (dcp / "__0_0.distcp").write_bytes(b"x")
        with pytest.raises(NotFound, match="no step of this run has a component actor"):
            ckpt_cli.average([run, other], tmp_path / "out", type="actor")

    def test_is_not_said_where_a_step_has_it_and_is_unfinished(self, run: Path) -> None:
        (run / "global_step_10/critic/model_world_size_4_rank_1.pt").unlink()
        with pytest.raises(CkptError, match="rank 1 of 4 is missing"):
            ckpt_cli.inspect(run, type="critic")


class TestWhatOlderStepsHave:
    def test_is_told_once(self, run: Path, tmp_path: Path) -> None:
        said = ckpt("merge", run, "--type", "critic", "-o", tmp_path / "out").err
        assert "warning: global_step_30, global_step_20 are skipped: no component critic\n" in said
        assert said.count("global_step_20") == 1
        state = ckpt("extract-state", run, "--type", "critic", "-o", tmp_path / "state").err
        assert "global_step_30, global_step_20 are skipped: no component critic" in state

    def test_is_told_of_each_step_in_lists(self, run: Path) -> None:
        steps = ckpt_cli.inspect(run, type="critic").checkpoint.steps
        assert [step.problem for step in steps] == [None, "no component critic", "no component critic"]


class TestWhatIsNotWholeInTheChosenStep:
    @pytest.fixture
    def without_rank(self, layouts: Path, tmp_path: Path) -> Callable[..., Path]:
        def made(*lacking: str) -> Path:
            run = Path(shutil.copytree(layouts / "lmms-run" / "run", tmp_path / "run"))
            for folder in lacking:
                next((run / folder).glob("*_rank_2.pt")).unlink()
            return run

        return made

    def test_is_named_with_the_step_that_its_type_takes(self, without_rank: Callable[..., Path], tmp_path: Path) -> None:
        run = without_rank("checkpoint-200/pytorch_ema_model_fsdp_0")
        said = ckpt("detect", run)
        assert "result  model can be merged, ema cannot\n" in said.out
        assert "step 200, the newest with model complete\n" in said.out
        assert " 200  model, ema  ema: rank 2 of 4 is missing  <- chosen\n" in said.out
        note = "ema of step 200 cannot be merged: rank 2 of 4 is missing; by the names of the files, --type ema takes step 100\n"
        assert note in said.err
        assert "lmms-engine, ema, step 100 (not 200: rank 2 of 4 is missing)" in ckpt("inspect", run, "--type", "ema").out
        assert "note: ema of" not in ckpt("detect", run, "--type", "ema").err

    def test_has_no_step_where_none_is_whole(self, without_rank: Callable[..., Path]) -> None:
        run = without_rank(*(f"checkpoint-{step}/pytorch_ema_model_fsdp_0" for step in (100, 200)))
        assert "note: ema of step 200 cannot be merged: rank 2 of 4 is missing\n" in ckpt("detect", run).err

    def test_is_said_where_an_older_step_is_written(self, without_rank: Callable[..., Path], tmp_path: Path) -> None:
        run = without_rank("checkpoint-200/pytorch_model_fsdp_0")
        said = ckpt("merge", run, "-o", tmp_path / "out")
        assert "lmms-engine, step 100 (not 200: rank 2 of 4 is missing), 4 ranks" in said.out
        assert "(not 200" not in ckpt("merge", run, "-o", tmp_path / "other", "--step", "100").out
        assert " 200  model, ema  model: rank 2 of 4 is missing\n" in ckpt("detect", run).out
        assert "result  can be merged\n" in ckpt("detect", run).out
