"""Parts on the command line: processes that are started by hand, by a launcher, or killed, and one folder in the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CastOverflow, MissingParts, UsageError
from ckpt_cli.output.parts_folder import MARK
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt

RUN = ROOT / "examples" / "tiny-run"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


class TestMerge:
    @pytest.mark.parametrize("options", [["--dtype", "bf16"], ["--max-shard-size", "20KB"], ["--type", "ema"], ["--with-state"]])
    def test_three_parts_give_what_one_process_gives(self, tmp_path: Path, options: list[str]) -> None:
        assert ckpt("merge", RUN, "-o", tmp_path / "one", *options).code == 0
        for number in (2, 0, 1):
            done = ckpt("merge", RUN, "-o", tmp_path / "parts", *options, "--part", f"{number}/3")
            assert done.code == 0, done.err
            assert f"parts   part {number} of 3" in done.out
        assert ckpt("publish", tmp_path / "parts").code == 0
        assert contents(tmp_path / "parts") == contents(tmp_path / "one")
        assert leftovers(tmp_path) == []

    def test_every_last_line_leads_to_the_output(self, tmp_path: Path) -> None:
        """Whoever copies the last line of each command ends with a published folder."""
        command = ["merge", str(RUN), "-o", str(tmp_path / "out"), "--part", "1/3"]
        for _ in range(5):
            done = ckpt(*command)
            assert done.code == 0, done.err
            command = done.err.splitlines()[-1].removeprefix("next: ckpt ").split()
        assert command[0] == "inspect" or command[0] == "verify"
        assert (tmp_path / "out" / "model.safetensors").is_file()

    def test_publishing_too_early_names_the_parts(self, tmp_path: Path) -> None:
        ckpt("merge", RUN, "-o", tmp_path / "out", "--part", "1/4")
        done = ckpt("publish", tmp_path / "out")
        assert (done.code, done.out) == (4, "")
        assert "error[missing-parts]: 3 of 4 parts are not written yet: 0, 2, 3" in done.err
        assert "hint: " in done.err

    def test_publishing_what_never_was(self, tmp_path: Path) -> None:
        done = ckpt("publish", tmp_path / "out")
        assert done.code == 3
        assert "no part of this output was written" in done.err

    def test_publishing_again_says_so(self, tmp_path: Path) -> None:
        ckpt("merge", RUN, "-o", tmp_path / "out", "--part", "0/1")
        assert "by 1 part" in ckpt("publish", tmp_path / "out").out
        again = ckpt("publish", tmp_path / "out", "--json")
        assert again.code == 0
        assert json.loads(again.out)["data"]["outputs"][0]["parts"] == 0
        assert "was there before" in ckpt("publish", tmp_path / "out").err

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--part", "3/3"], "0/3 to 2/3"),
            (["--part", "1"], "K/N"),
            (["--part", "auto"], "no launcher says"),
            (["--part", "0/2", "--verify"], "--verify"),
            (["--part", "0/2", "--in-place"], "--in-place"),
            (["--part", "0/2", "--checksum"], "--checksum"),
        ],
    )
    def test_options_that_do_not_go_together(self, tmp_path: Path, options: list[str], said: str) -> None:
        where = [] if "--in-place" in options else ["-o", str(tmp_path / "out")]
        done = ckpt("merge", RUN, *where, *options)
        assert done.code == 2
        assert said in done.err
        assert list(tmp_path.iterdir()) == []

    def test_a_dry_run_writes_no_part(self, tmp_path: Path) -> None:
        assert ckpt("merge", RUN, "-o", tmp_path / "out", "--part", "0/2", "--dry-run").code == 0
        assert list(tmp_path.iterdir()) == []

    def test_two_components(self, tmp_path: Path) -> None:
        assert ckpt("merge", RUN, "-o", tmp_path / "one", "--type", "both").code == 0
        for number in range(2):
            assert ckpt("merge", RUN, "-o", tmp_path / "parts", "--type", "both", "--part", f"{number}/2").code == 0
        names = [path.name for path in (tmp_path / "one").iterdir()]
        assert ckpt("publish", *(tmp_path / "parts" / name for name in names)).code == 0
        assert {name: contents(tmp_path / "parts" / name) for name in names} == {name: contents(tmp_path / "one" / name) for name in names}

    def test_files_of_another_step_with_the_same_sizes_and_times_make_another_plan(self, tmp_path: Path) -> None:
        """As copies that keep, or archives that set, the times of files: what torch noted of their contents tells."""
        source = tmp_path / "step"
        for number, step in enumerate(("checkpoint-100", "checkpoint-200")):
            shutil.copytree(RUN / step, source, dirs_exist_ok=True)
            for path in source.rglob("*"):
                os.utime(path, ns=(10**18, 10**18))
            assert ckpt("merge", source, "-o", tmp_path / "out", "--part", f"{number}/2").code == 0
        done = ckpt("publish", tmp_path / "out")
        assert done.code == 4
        assert "2 different plans" in done.err

    def test_other_options_make_another_plan(self, tmp_path: Path) -> None:
        ckpt("merge", RUN, "-o", tmp_path / "out", "--part", "0/2")
        ckpt("merge", RUN, "-o", tmp_path / "out", "--part", "1/2", "--dtype", "bf16")
        done = ckpt("publish", tmp_path / "out")
        assert done.code == 4
        assert "2 different plans" in done.err


def test_averages_in_parts(tmp_path: Path) -> None:
    options = ["--all", "--dtype", "bf16"]
    assert ckpt("average", RUN, "-o", tmp_path / "one", *options).code == 0
    for number in (1, 2, 0):
        assert ckpt("average", RUN, "-o", tmp_path / "parts", *options, "--part", f"{number}/3").code == 0
    assert ckpt("publish", tmp_path / "parts").code == 0
    assert contents(tmp_path / "parts") == contents(tmp_path / "one")


def test_in_python(tmp_path: Path) -> None:
    for number in range(2):
        result = ckpt_cli.merge(RUN, tmp_path / "out", part=f"{number}/2")
    assert result.outputs[0].part is not None
    assert result.outputs[0].part.done == (0, 1)
    assert ckpt_cli.publish(tmp_path / "out").outputs[0].parts == 2
    with pytest.raises(UsageError):
        ckpt_cli.merge(RUN, tmp_path / "again", part="2/2")
    ckpt_cli.merge(RUN, tmp_path / "again", part="1/2")
    with pytest.raises(MissingParts):
        ckpt_cli.publish(tmp_path / "again")


class TestLaunchers:
    def launched(self, tmp_path: Path, *command: str, processes: int = 3) -> subprocess.CompletedProcess[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--no-python"]
        words = [*torchrun, "--master-port", "0", sys.executable, "-m", "ckpt_cli", *command]
        return subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)

    def test_torchrun_publishes_by_itself(self, tmp_path: Path) -> None:
        assert ckpt("merge", RUN, "-o", tmp_path / "one").code == 0
        done = self.launched(tmp_path, "merge", str(RUN), "-o", str(tmp_path / "out"), "--part", "auto")
        assert done.returncode == 0, done.stderr
        assert contents(tmp_path / "out") == contents(tmp_path / "one")
        assert leftovers(tmp_path) == []

    def test_a_rank_that_fails_fails_the_run_and_nothing_is_published(self, tmp_path: Path) -> None:
        words = ["merge", str(RUN), "-o", str(tmp_path / "out"), "--part", "auto"]
        failing = f"words = {words!r} + (['--type', 'none'] if os.environ['RANK'] == '1' else [])"
        program = f"import os; from ckpt_cli.cli import main; {failing}; main(words)"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--no-python", "--master-port", "0"]
        done = subprocess.run(
            [*torchrun, sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode != 0
        assert "rank: 1" in done.stderr.replace("  ", " ")
        assert not (tmp_path / "out").exists()

    def test_srun(self, tmp_path: Path) -> None:
        """By the variables that srun sets: processes that know nothing else of each other."""
        assert ckpt("merge", RUN, "-o", tmp_path / "one").code == 0
        command = [sys.executable, "-m", "ckpt_cli", "merge", str(RUN), "-o", str(tmp_path / "out"), "--part", "auto"]
        started = [
            subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT), "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "4"})
            for rank in range(4)
        ]
        assert [process.wait() for process in started] == [0] * 4
        assert contents(tmp_path / "out") == contents(tmp_path / "one")


@pytest.mark.slow
def test_killed_at_any_time_and_run_again(tmp_path: Path) -> None:
    """SIGKILL at many points of a part; after running it again, the output is that of one process."""
    assert ckpt("merge", RUN, "-o", tmp_path / "one").code == 0
    command = [sys.executable, "-m", "ckpt_cli", "merge", str(RUN), "-o", str(tmp_path / "out"), "--part", "0/2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    subprocess.run([*command[:-1], "1/2"], env=environment, check=True, capture_output=True)
    seconds = time.monotonic() - start
    for point in range(12):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds * (0.4 + 0.05 * point))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "out").exists()
        published = ckpt("publish", tmp_path / "out")
        if published.code == 0:
            assert contents(tmp_path / "out") == contents(tmp_path / "one")
            break
        assert published.code == 4
    else:
        subprocess.run(command, env=environment, check=True, capture_output=True)
        assert ckpt("publish", tmp_path / "out").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    assert [name for name in leftovers(tmp_path) if MARK in name] == []


class TestWhatOnlyOnePartWasAllowed:
    """The first part has nothing to be allowed: what the second one wrote is said when they are published, and in the manifest."""

    def checkpoint(self, folder: Path, last: float) -> Path:
        folder.mkdir(parents=True)
        save_file(
            {"a": torch.ones(64, 64), "z": torch.full((64, 64), 1.0).index_fill(0, torch.tensor([63]), last)}, folder / "model.safetensors"
        )
        return folder

    def options(self, out: Path) -> dict[str, object]:
        return dict(json.loads((out / "ckpt-manifest.json").read_text())["options"])

    def test_values_that_overflow(self, tmp_path: Path) -> None:
        path, out = self.checkpoint(tmp_path / "run", 1e30), tmp_path / "out"
        ckpt_cli.merge(path, out, dtype="fp16", part="0/2")
        with pytest.raises(CastOverflow):
            ckpt_cli.merge(path, out, dtype="fp16", part="1/2")
        ckpt_cli.merge(path, out, dtype="fp16", part="1/2", allow_overflow=True)
        done = ckpt("publish", out)
        assert done.code == 0
        assert "warning: 64 finite values became infinite" in done.err
        assert self.options(out)["allow_overflow"] is True
        ckpt_cli.merge(path, tmp_path / "one", dtype="fp16", allow_overflow=True)
        assert contents(out) == contents(tmp_path / "one")

    def test_values_of_an_average_that_are_not_finite(self, tmp_path: Path) -> None:
        paths, out = (
            [self.checkpoint(tmp_path / f"run/checkpoint-{step}", last) for step, last in ((10, 1.0), (20, float("nan")))],
            tmp_path / "out",
        )
        ckpt_cli.average(paths, out, part="1/2", allow_non_finite=True)
        ckpt_cli.average(paths, out, part="0/2")
        notes = ckpt_cli.publish(out).notes
        assert [(note.code, note.level) for note in notes] == [("non-finite", "warning")]
        assert "in 1 tensor: z" in notes[0].text
        assert self.options(out)["allow_non_finite"] is True
        assert self.options(out)["allow_overflow"] is False

    def test_nothing_is_said_where_nothing_was_allowed(self, tmp_path: Path) -> None:
        path, out = self.checkpoint(tmp_path / "run", 1.0), tmp_path / "out"
        for part in ("0/2", "1/2"):
            ckpt_cli.merge(path, out, dtype="fp16", part=part)
        assert ckpt_cli.publish(out).notes == ()
        assert self.options(out)["allow_overflow"] is False

    def test_the_last_part_of_a_launcher_tells_what_all_counted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, out = self.checkpoint(tmp_path / "run", 1.0), tmp_path / "out"
        save_file({"a": torch.full((64, 64), 1e30), "z": torch.ones(64, 64)}, path / "model.safetensors")
        monkeypatch.setenv("WORLD_SIZE", "2")
        said = []
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            notes = ckpt_cli.merge(path, out, dtype="fp16", part="auto", allow_overflow=True).outputs[0].notes
            said.append([note.text for note in notes if note.code == "cast-overflow"])
        assert out.is_dir()
        assert said == [["4096 finite values became infinite"]] * 2
