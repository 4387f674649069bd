"""`ckpt detect RUN --report`: a row for each step, with sizes by kind, what can be merged, what could be freed, and the drift."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file

import ckpt_cli
from ckpt_cli.cli.looking.report import report_result
from ckpt_cli.errors import OutputExists, UsageError
from ckpt_cli.results.inspect import ReportResult, StepReport
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt
from tests.golden_screens import WIDTHS, check_golden, screen

EXAMPLE = ROOT / "examples" / "tiny-run"
SHARD = "pytorch_model_fsdp_0/model_world_size_4_rank_2.pt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 50 and 300 lack a rank, 75 has no weights; 100, 150 (with its optimizer) and 200 are whole."""
    run = tmp_path_factory.mktemp("report") / "run"
    shutil.copytree(EXAMPLE, run)
    for step, source in ((50, 100), (150, 200), (300, 200)):
        shutil.copytree(run / f"checkpoint-{source}", run / f"checkpoint-{step}")
    for step in (50, 300):
        (run / f"checkpoint-{step}" / SHARD).unlink()
    (run / "checkpoint-75").mkdir()
    (run / "checkpoint-75" / "trainer.log").write_bytes(bytes(1000))
    return run


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def by_step(result: ReportResult) -> dict[int | None, StepReport]:
    return {step.step: step for step in result.steps}


def test_what_can_be_merged_and_why_not(run: Path) -> None:
    result = ckpt_cli.report(run)
    steps = by_step(result)
    assert [step.step for step in result.steps] == [50, 75, 100, 150, 200, 300]
    assert [step for step, row in steps.items() if row.mergeable] == [100, 150, 200]
    assert steps[50].problem == steps[300].problem == "rank 2 of 4 is missing"
    assert steps[75].problem == "no weights were recognised in it"
    assert all(row.complete == row.mergeable for row in result.steps)
    assert (result.newest, result.framework) == (str(run / "checkpoint-200"), "lmms-engine")


def test_sizes_are_those_on_the_disk(run: Path) -> None:
    for step, row in by_step(ckpt_cli.report(run)).items():
        folder = run / f"checkpoint-{step}"
        assert row.weights + row.optimizer + row.other == size(folder)
        assert row.optimizer == size(folder / "optimizer")
        assert row.weights == size(folder / "pytorch_model_fsdp_0") + size(folder / "pytorch_ema_model_fsdp_0")


def test_what_is_freed_is_needed_neither_to_merge_nor_to_go_on(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    result = ckpt_cli.report(run)
    # What was not recognised (75) may be anything.
    expected = {50: size(run / "checkpoint-50" / "pytorch_model_fsdp_0"), 150: size(run / "checkpoint-150" / "optimizer")}
    assert {row.step: row.freeable for row in result.steps if row.freeable} == expected
    assert result.freeable == sum(expected.values())
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_nothing_is_freed_where_no_step_can_be_merged(run: Path, tmp_path: Path) -> None:
    """The ranks may lie on other nodes."""
    for step in (50, 300):
        shutil.copytree(run / f"checkpoint-{step}", tmp_path / "run" / f"checkpoint-{step}")
    result = ckpt_cli.report(tmp_path / "run")
    assert (result.newest, result.freeable) == (None, 0)


def verl_run(run: Path) -> Path:
    """Two steps of an actor and a critic, each with an optimizer."""
    for step in (5, 10):
        for name in ("actor", "critic"):
            place = run / f"global_step_{step}" / name
            place.mkdir(parents=True)
            torch.save({"a.weight": torch.ones(64)}, place / "model_world_size_1_rank_0.pt")
            torch.save({"state": {0: {"exp_avg": torch.ones(64)}}, "param_groups": []}, place / "optim_world_size_1_rank_0.pt")
    return run


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def freed(run: Path) -> dict[int | None, int]:
    return {row.step: row.freeable for row in ckpt_cli.report(run).steps}


def optimizers(run: Path, step: int) -> list[Path]:
    return sorted((run / f"global_step_{step}").rglob("optim_*.pt"))


class TestWhatIsNeededStill:
    def test_an_optimizer_that_a_later_step_replaces_is_not(self, tmp_path: Path) -> None:
        run = verl_run(tmp_path / "run")
        assert freed(run) == {5: sum(path.stat().st_size for path in optimizers(run, 5)), 10: 0}

    @pytest.mark.parametrize("happens", [Path.unlink, cut, lambda path: path.write_bytes(bytes(path.stat().st_size))])
    def test_an_optimizer_that_the_newest_step_lacks_is(self, happens, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        run = verl_run(tmp_path / "run")
        happens(optimizers(run, 10)[1])
        assert freed(run) == {5: 0, 10: 0}

    def test_the_last_whole_optimizer_of_several_is(self, tmp_path: Path) -> None:
        run = verl_run(tmp_path / "run")
        shutil.copytree(run / "global_step_10", run / "global_step_20")
        cut(optimizers(run, 20)[0])
        assert freed(run) == {5: sum(path.stat().st_size for path in optimizers(run, 5)), 10: 0, 20: 0}

    def test_so_is_what_is_whole_beside_a_damaged_actor(self, tmp_path: Path) -> None:
        run = verl_run(tmp_path / "run")
        weights = run / "global_step_5" / "actor" / "model_world_size_1_rank_0.pt"
        cut(weights)
        assert freed(run)[5] == sum(path.stat().st_size for path in (weights, *optimizers(run, 5)))
        cut(run / "global_step_5" / "critic" / "model_world_size_1_rank_0.pt")
        assert freed(run)[5] == size(run / "global_step_5")

    def test_so_is_the_only_optimizer_beside_damaged_weights(self, tmp_path: Path) -> None:
        run = verl_run(tmp_path / "run")
        for path in (run / "global_step_5").rglob("model_*.pt"):
            cut(path)
        for path in optimizers(run, 10):
            path.unlink()
        assert freed(run)[5] == size(run / "global_step_5") - sum(path.stat().st_size for path in optimizers(run, 5))

    def test_so_are_ranks_the_rest_of_which_may_be_on_another_node(self, tmp_path: Path) -> None:
        run = verl_run(tmp_path / "run")
        for path in (run / "global_step_5").rglob("*_world_size_1_*"):
            path.rename(path.with_name(path.name.replace("size_1", "size_2")))
        assert freed(run) == {5: 0, 10: 0}


def symbolic(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(os.path.relpath(other, path.parent))


def hard(path: Path, other: Path) -> None:
    path.unlink()
    os.link(other, path)


class TestLinks:
    """A file under several names is one file: it replaces nothing, counts once, and is needed wherever a step has it."""

    @pytest.mark.parametrize("link", [symbolic, hard])
    def test_an_optimizer_that_the_newest_step_has_by_a_link_is_kept(self, link: Callable[[Path, Path], None], tmp_path: Path) -> None:
        run = verl_run(tmp_path / "run")
        for path, other in zip(optimizers(run, 10), optimizers(run, 5), strict=True):
            link(path, other)
        result = ckpt_cli.report(run)
        assert result.freeable == 0
        once = sum(path.stat().st_size for path in optimizers(run, 5))
        assert result.size == sum(row.weights + row.optimizer + row.other for row in result.steps) - once
        assert [row.optimizer for row in result.steps] == [once, once]

    def test_that_of_a_folder_is_one_too(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        shutil.copytree(ROOT / "examples" / "tiny-run", run)
        newer, older = (run / f"checkpoint-{step}" / "optimizer" for step in (200, 100))
        shutil.copytree(newer, older)
        assert freed(run)[100] == size(older)
        shutil.rmtree(newer)
        newer.symlink_to("../checkpoint-100/optimizer")
        assert freed(run) == {100: 0, 200: 0}

    @pytest.mark.parametrize("link", [symbolic, hard])
    def test_an_optimizer_of_a_step_before_replaces_none(self, link: Callable[[Path, Path], None], tmp_path: Path) -> None:
        run = verl_run(tmp_path / "run")
        shutil.copytree(run / "global_step_10", run / "global_step_20")
        for path, other in zip(optimizers(run, 20), optimizers(run, 5), strict=True):
            link(path, other)
        # Step 5 is replaced by step 10, but its files are those of step 20; step 10 has the newest optimizer.
        assert freed(run) == {5: 0, 10: 0, 20: 0}

    @pytest.mark.parametrize("link", [symbolic, hard])
    def test_damaged_files_that_another_step_has_are_not_freed(self, link: Callable[[Path, Path], None], tmp_path: Path) -> None:
        run = verl_run(tmp_path / "run")
        for path in (run / "global_step_5").rglob("model_*.pt"):
            cut(path)
        assert freed(run)[5] == size(run / "global_step_5")
        critic = run / "global_step_5" / "critic" / "model_world_size_1_rank_0.pt"
        link(run / "global_step_10" / "critic" / critic.name, critic)
        assert freed(run)[5] == size(run / "global_step_5") - critic.stat().st_size

    def test_what_lies_elsewhere_is_not_freed(self, tmp_path: Path) -> None:
        run = verl_run(tmp_path / "run")
        (tmp_path / "blobs").mkdir()
        for path in optimizers(run, 5):
            blob = path.rename(tmp_path / "blobs" / path.parent.name)
            path.symlink_to(blob)
        assert freed(run) == {5: 0, 10: 0}
        for path in optimizers(run, 5):
            hard(path, path.resolve())
        assert freed(run) == {5: 0, 10: 0}
        shutil.rmtree(tmp_path / "blobs")
        assert freed(run)[5] == sum(path.stat().st_size for path in optimizers(run, 5))

    def test_a_step_that_is_a_link_itself_is_freed_where_it_lies(self, tmp_path: Path) -> None:
        run = verl_run(tmp_path / "run")
        step = (run / "global_step_5").rename(tmp_path / "global_step_5")
        (run / "global_step_5").symlink_to(step)
        assert freed(run)[5] == sum(path.stat().st_size for path in optimizers(run, 5))


def test_files_with_weights_and_optimizer_are_told_apart_by_headers(tmp_path: Path) -> None:
    weights = {f"layers.{i}.weight": torch.full((64, 32), float(i)) for i in range(2)}
    state = {name: {"exp_avg": tensor, "exp_avg_sq": tensor} for name, tensor in weights.items()}
    for step in (10, 20):
        optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(weights)}]}
        dcp.save({"model": weights, "optimizer": optimizer}, checkpoint_id=str(tmp_path / "run" / f"step-{step}"), no_dist=True)
    result = ckpt_cli.report(tmp_path / "run")
    bytes_of_weights = 2 * 64 * 32 * 4
    for row in result.steps:
        assert row.weights == bytes_of_weights
        assert row.optimizer >= 2 * bytes_of_weights
        assert row.weights + row.optimizer + row.other == size(Path(row.path))
    # Nobody can remove a part of a file.
    assert result.freeable == 0


def test_an_optimizer_that_the_weights_are_read_from_is_not_freed(data: Path, tmp_path: Path) -> None:
    for step in (3, 4):
        shutil.copytree(data / "deepspeed" / "z3-bf16-w2-offload" / "run" / "global_step3", tmp_path / "run" / f"global_step{step}")
    rows = ckpt_cli.report(tmp_path / "run").steps
    assert [row.freeable for row in rows] == [0, 0]
    assert all(row.mergeable and 0 < row.weights < row.optimizer for row in rows)


def test_tensors_that_a_step_has_and_the_one_before_lacks_are_named(tmp_path: Path) -> None:
    for step, names in ((1, "ab"), (2, "ab"), (3, "abc")):
        place = tmp_path / "run" / f"global_step_{step}" / "actor"
        place.mkdir(parents=True)
        torch.save({f"{name}.weight": torch.ones(4) for name in names}, place / "model_world_size_1_rank_0.pt")
    rows = by_step(ckpt_cli.report(tmp_path / "run"))
    assert (rows[1].differs, rows[2].differs, rows[3].differs) == (None, None, "other tensors than step 2: c.weight")
    moved = by_step(ckpt_cli.report(tmp_path / "run", drift=True))
    assert (moved[2].partly, moved[3].partly) == (None, "drift of 8 elements only, of 12")
    shown = ckpt("detect", "run", "--report", "--drift", cwd=tmp_path).out
    assert "newest complete, other tensors than step 2: c.weight, drift of 8 elements only, of 12" in shown


def test_the_drift_is_the_relative_change_of_all_weights(run: Path, tmp_path: Path) -> None:
    rows = by_step(ckpt_cli.report(run, drift=True))
    for step in (100, 200):
        ckpt_cli.merge(run, tmp_path / str(step), step=step)
    before, after = (load_file(tmp_path / step / "model.safetensors") for step in ("100", "200"))
    moved = sum(float(((after[name].astype(numpy.float64) - before[name]) ** 2).sum()) for name in before)
    norm = sum(float((before[name].astype(numpy.float64) ** 2).sum()) for name in before)
    assert rows[150].drift == pytest.approx((moved / norm) ** 0.5, rel=1e-9)
    assert (rows[100].drift, rows[200].drift, rows[300].drift) == (None, 0, None)


def test_the_map_has_a_column_for_each_step_that_has_one_before(run: Path) -> None:
    result = ckpt_cli.report(run, drift=True)
    assert result.drift is not None
    (block,) = result.drift.blocks
    assert (block.axis, block.layers) == ("step", (150, 200))
    assert all(row.values[0] > 0 and row.values[1] == 0 for row in block.rows)  # type: ignore[operator]
    assert len(block.rows) > 5
    assert ckpt_cli.report(run).drift is None


def test_a_sample_gives_about_the_same(run: Path) -> None:
    result = ckpt_cli.report(run, drift=True, sample="50%")
    assert result.sample == 0.5
    with pytest.raises(UsageError, match="sample is about drift"):
        ckpt_cli.report(run, sample=0.5)


class TestPage:
    def test_says_what_the_rows_say_and_loads_nothing(self, run: Path, tmp_path: Path) -> None:
        result = ckpt_cli.report(run, drift=True, html=tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert result.written == str(tmp_path / "report.html")
        assert len(re.findall(r"<tr title=", page)) == len(result.steps)
        assert page.count("rank 2 of 4 is missing") >= 2
        assert 'title="model.norm.weight, step 200: unchanged"' in page
        assert not re.search(r"(src|href)=|https?:|@import|url\(", page)

    def test_is_equal_for_equal_runs(self, run: Path, tmp_path: Path) -> None:
        for name in ("a.html", "b.html"):
            ckpt_cli.report(run, html=tmp_path / name)
        assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()

    def test_replaces_nothing(self, run: Path, tmp_path: Path) -> None:
        (tmp_path / "there.html").write_text("mine")
        with pytest.raises(OutputExists):
            ckpt_cli.report(run, html=tmp_path / "there.html")
        with pytest.raises(UsageError, match="writes a page"):
            ckpt_cli.report(run, html=tmp_path / "report.txt")

    def test_names_are_no_html(self, tmp_path: Path) -> None:
        place = tmp_path / "<b>run" / "global_step_1" / "actor"
        place.mkdir(parents=True)
        torch.save({"a.weight": torch.ones(4)}, place / "model_world_size_1_rank_0.pt")
        ckpt_cli.report(tmp_path / "<b>run", html=tmp_path / "report.html")
        assert "<b>" not in (tmp_path / "report.html").read_text()


class TestCommand:
    @pytest.mark.parametrize(
        "typed", [["--report", "out.html"], ["--report=out.html"], ["--html", "out.html"], ["--report", "--html=out.html"]]
    )
    def test_a_file_may_follow_the_option(self, typed: list[str], run: Path, tmp_path: Path) -> None:
        shown = ckpt("detect", run, *typed, cwd=tmp_path)
        assert (shown.code, (tmp_path / "out.html").is_file()) == (0, True)

    def test_a_path_may_follow_it_too(self, run: Path) -> None:
        shown = ckpt("detect", "--report", run, "-q")
        assert shown.out.splitlines() == [str(run / f"checkpoint-{step}") for step in (100, 150, 200)]

    def test_a_step_is_refused(self, run: Path) -> None:
        shown = ckpt("detect", run, "--report", "--step", "100")
        assert (shown.code, "leave out --step" in shown.err) == (2, True)

    def test_json_has_the_rows(self, run: Path) -> None:
        data = json.loads(ckpt("detect", run, "--report", "--json").out)["data"]
        assert [step["step"] for step in data["steps"]] == [50, 75, 100, 150, 200, 300]

    def test_the_next_command_works(self, run: Path, tmp_path: Path) -> None:
        command = re.findall(r"next: ckpt (.*)", ckpt("detect", run, "--report").err)
        shown = ckpt(*command[0].split(), cwd=tmp_path)
        assert (shown.code, "drift" in shown.out) == (0, True)

    @pytest.mark.parametrize("width", WIDTHS, ids=str)
    def test_the_screen(self, width: int | None, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(run.parent)
        result = ckpt_cli.report("run", drift=True)
        check_golden("report", width, screen(monkeypatch, width, lambda s: report_result(result, s)))


def test_a_step_that_cannot_be_listed_is_a_row(run: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may list everything")
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "checkpoint-150").chmod(0)
    try:
        row = by_step(ckpt_cli.report(tmp_path / "run"))[150]
    finally:
        (tmp_path / "run" / "checkpoint-150").chmod(0o755)
    assert (row.mergeable, row.freeable) == (False, 0)


def test_a_damaged_file_is_a_reason_and_one_that_is_refused_is_none_to_remove(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    os.truncate(tmp_path / "run" / "checkpoint-100" / SHARD, 100)
    flat = tmp_path / "run" / "checkpoint-150" / SHARD
    flat.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    rows = by_step(ckpt_cli.report(tmp_path / "run"))
    assert (rows[100].mergeable, rows[100].freeable) == (False, size(tmp_path / "run" / "checkpoint-100" / "pytorch_model_fsdp_0"))
    assert (rows[150].mergeable, rows[150].freeable) == (False, 0)


def test_a_step_whose_average_is_damaged_is_not_called_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    shutil.copytree(EXAMPLE, run)
    (run / "checkpoint-200" / "pytorch_ema_model_fsdp_0" / "model_world_size_4_rank_2.pt").unlink()
    result = ckpt_cli.report(run)
    row = by_step(result)[200]
    assert (row.mergeable, row.partly_broken) == (True, "model complete, ema: rank 2 of 4 is missing")
    shown = screen(monkeypatch, 120, lambda session: report_result(result, session))
    assert "newest with model complete, ema: rank 2 of 4 is missing" in shown
    assert "newest complete" not in shown
