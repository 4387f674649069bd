"""`ckpt watch`: steps of a live run are merged once they are written to their end, each once, whatever is killed in between."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint._extension import ZStandard

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, NotFound, OutputInsideSource, UsageError, Watched
from ckpt_cli.output.interrupted.place import place_of, temporary_name
from ckpt_cli.results.watch import WatchResult
from ckpt_cli.watching.lock import only_watch
from ckpt_cli.watching.watched_run import Listener
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt
from tests.tiny import classless, folder, weights

EXAMPLE = ROOT / "examples" / "tiny-run"
PATIENCE = 60.0
FAST = ("--interval", "0.1", "--settle", "0.6")
ONCE = ("--once", "--settle", "0")
"""Files of tests may have old times, but were all made just now, as their ctime tells."""

WRITER = """
import os, shutil, sys, time
source, run, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
for step in ("100", "200"):
    for folder, _, names in os.walk(os.path.join(source, "checkpoint-" + step)):
        target = os.path.join(run, os.path.relpath(folder, source))
        os.makedirs(target, exist_ok=True)
        for number, name in enumerate(sorted(names)):
            with open(os.path.join(folder, name), "rb") as file:
                data = file.read()
            with open(os.path.join(target, name), "wb") as file:
                file.write(data[: len(data) // 2])
                file.flush()
                # Longer than the watch waits, in the middle of a file and before the next one.
                time.sleep(pause if number == 1 else 0.01)
                file.write(data[len(data) // 2 :])
            time.sleep(pause if number == 2 else 0)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that ended yesterday, so that nothing has to be waited for."""
    shutil.copytree(EXAMPLE, tmp_path / "run")
    age(tmp_path / "run", 86400)
    return tmp_path / "run"


def age(folder: Path, seconds: float) -> None:
    """Give all files of a folder a time in the past."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - seconds,) * 2)


def watch(*arguments: Any, settle: float = 0.0, **options: Any) -> WatchResult:
    """A watch that waits for no files, as `ONCE`."""
    return ckpt_cli.watch(*arguments, settle=settle, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "ckpt-manifest.json"}


def journal(home: Path) -> list[dict[str, Any]]:
    path = home / "watch.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def happened(home: Path) -> list[tuple[str, int]]:
    return [(event["event"], event["step"]) for event in journal(home)]


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@contextlib.contextmanager
def watching(*arguments: str | Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A `ckpt watch` that goes on until it is ended; what it prints goes into a file, which commands of it may keep open."""
    command = [sys.executable, "-m", "ckpt_cli", "watch", *map(str, arguments)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)


class TestALiveRun:
    @pytest.mark.slow
    @pytest.mark.parametrize("settle", ["3", "0.3"])
    def test_steps_are_made_when_they_are_whole_and_never_before(self, tmp_path: Path, settle: str) -> None:
        """Shards are written with pauses in the middle of files and between them, also with longer ones than the watch waits."""
        live, home = tmp_path / "live", tmp_path / "out"
        live.mkdir()
        command = 'printf \'{"sum": "%s"}\n\' "$(sha256sum < {output}/model.safetensors)"'
        with watching(
            live, "-o", home, "--interval", "0.1", "--settle", settle, "--type", "ema", "--exec", command, log=tmp_path / "log"
        ) as process:
            writer = subprocess.Popen([sys.executable, "-c", WRITER, str(EXAMPLE), str(live), "1" if settle == "3" else "0.8"])
            assert writer.wait() == 0
            until(lambda: happened(home)[-1:] == [("ran", 200)] and (home / "step-200" / "tokenizer.json").exists(), "step 200")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 143
        said = (tmp_path / "log").read_text()
        assert "Traceback" not in said
        assert "waits" in said
        steps = [step for event, step in happened(home) if event == "made"]
        # With files that come later than it waits, a step is made again; its weights are right each time.
        assert steps == [100, 200] if settle == "3" else set(steps) == {100, 200}
        for step in (100, 200):
            ckpt_cli.merge(EXAMPLE, tmp_path / str(step), type="ema", step=step)
            assert contents(home / f"step-{step}") == contents(tmp_path / str(step))
            weights = hashlib.sha256((tmp_path / str(step) / "model.safetensors").read_bytes()).hexdigest()
            assert {event["metrics"]["sum"].split()[0] for event in journal(home) if event["event"] == "ran" and event["step"] == step} == {
                weights
            }

    def test_a_run_that_has_no_step_yet(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        result = watch(tmp_path / "run", once=True)
        assert (result.events, result.waiting, result.exit_code) == ((), {}, 0)

    def test_a_run_that_is_away_for_a_while(self, run: Path, tmp_path: Path) -> None:
        with watching(run, "-o", tmp_path / "out", *FAST, "--since", "200", log=tmp_path / "log") as process:
            until(lambda: ("made", 200) in happened(tmp_path / "out"), "the first step")
            run.rename(tmp_path / "away")
            until(lambda: "run  waits" in (tmp_path / "log").read_text(), "the reason")
            shutil.copytree(EXAMPLE / "checkpoint-200", tmp_path / "away" / "checkpoint-300")
            age(tmp_path / "away" / "checkpoint-300", 86400)
            (tmp_path / "away").rename(run)
            until(lambda: ("made", 300) in happened(tmp_path / "out"), "the next step")
            assert process.poll() is None

    def test_young_files_are_waited_for(self, run: Path, tmp_path: Path) -> None:
        age(run, 0)
        began, told = time.monotonic(), list[str]()
        listener = Listener(waits=lambda run, step, reason: told.append(f"{step}: {reason}"))
        watch(run, tmp_path / "out", once=True, settle=0.7, interval=0.1, listener=listener)
        assert time.monotonic() - began >= 0.7
        reason = "no tracker written after it says that it is finished, so its files must not change for 0.7 s (--settle)"
        assert told == [f"100: {reason}", f"200: {reason}"]
        # Whichever is quiet first: on a busy machine their files are not touched at the same time.
        assert sorted(happened(tmp_path / "out")) == [("made", 100), ("made", 200)]

    @pytest.mark.parametrize("tracker", [None, "200", "300"])
    def test_a_copy_that_keeps_old_times_is_waited_for(self, run: Path, tmp_path: Path, tracker: str | None) -> None:
        """``rsync -a`` and ``cp -p`` give each file its time of days ago at once, and the tokenizer may come after the weights."""
        if tracker is not None:
            (run / "latest_checkpointed_iteration.txt").write_text(tracker)
        age(run, 86400)
        for step in (100, 200):
            (run / f"checkpoint-{step}" / "late.json").write_text("{}")
        age(run, 86400)
        told: list[int] = []
        listener = Listener(waits=lambda run, step, reason: told.append(step))
        watch(run, tmp_path / "out", once=True, settle=0.3, interval=0.1, listener=listener)
        assert sorted(told) == [100, 200]
        assert sorted(happened(tmp_path / "out")) == [("made", 100), ("made", 200)]

    def test_a_tracker_ends_the_wait_for_its_step_and_for_older_ones_at_once(self, run: Path, tmp_path: Path) -> None:
        age(run, 5)
        (run / "latest_checkpointed_iteration.txt").write_text("200")
        told: list[int] = []
        listener = Listener(waits=lambda run, step, reason: told.append(step))
        watch(run, tmp_path / "out", once=True, settle=60, listener=listener)
        assert told == []
        assert happened(tmp_path / "out") == [("made", 100), ("made", 200)]

    def test_an_older_step_to_which_files_were_added_since_waits_in_spite_of_the_tracker(self, run: Path, tmp_path: Path) -> None:
        age(run, 5)
        (run / "latest_checkpointed_iteration.txt").write_text("200")
        age(run / "checkpoint-100", -1)
        told: list[int] = []
        listener = Listener(waits=lambda run, step, reason: told.append(step))
        watch(run, tmp_path / "out", once=True, settle=0.3, interval=0.1, listener=listener)
        assert told == [100]

    @pytest.mark.parametrize("damage", ["cut", "absent"])
    def test_a_step_that_stays_unfinished_is_reported_and_no_other_one_suffers(self, run: Path, tmp_path: Path, damage: str) -> None:
        shard = next((run / "checkpoint-200" / "pytorch_model_fsdp_0").glob("*rank_2*"))
        whole = shard.read_bytes()
        if damage == "cut":
            shard.write_bytes(whole[:-500])
        else:
            shard.unlink()
        age(run, 86400)
        result = watch(run, tmp_path / "out", once=True)
        assert happened(tmp_path / "out") == [("made", 100)]
        assert set(result.waiting[str(run)]) == {200}
        assert [note.code for note in result.notes] == ["step-waits"]
        assert not (tmp_path / "out" / "step-200").exists()
        shard.write_bytes(whole)
        age(shard.parent, 86400)
        watch(run, tmp_path / "out", once=True)
        assert happened(tmp_path / "out") == [("made", 100), ("made", 200)]


class TestAgain:
    def test_no_step_is_done_twice(self, run: Path, tmp_path: Path) -> None:
        command = ["watch", run, "-o", tmp_path / "out", *ONCE, "--exec", "touch {output}.$(date +%N)"]
        assert ckpt(*command).code == 0
        before = journal(tmp_path / "out")
        again = ckpt(*command)
        assert again.code == 0
        assert again.out.startswith(f"step 200  is in  {tmp_path / 'out' / 'step-200'}   since 20")
        assert again.out.endswith(" UTC; nothing new\n")
        assert f"next: ckpt verify {tmp_path / 'out' / 'step-200'} --against {run / 'checkpoint-200'}" in again.err
        assert journal(tmp_path / "out") == before
        assert len(list((tmp_path / "out").glob("step-100.*"))) == 1

    def test_an_output_that_is_gone_is_not_said_to_be_there(self, run: Path, tmp_path: Path) -> None:
        command = ["watch", run, "-o", tmp_path / "out", *ONCE]
        assert ckpt(*command).code == 0
        shutil.rmtree(tmp_path / "out" / "step-200")
        again = ckpt(*command)
        assert again.out == f"step 200  was in  {tmp_path / 'out' / 'step-200'}   that folder is gone\n"
        assert "next:" not in again.err

    def test_no_step_at_all(self, run: Path, tmp_path: Path) -> None:
        done = ckpt("watch", run, "-o", tmp_path / "out", *ONCE, "--since", "1000")
        assert (done.code, done.out) == (0, "nothing is due: there are no steps yet that these options want\n")

    def test_a_step_that_was_saved_again_is_made_again(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True, type="model")
        first = contents(tmp_path / "out" / "step-200")
        shutil.rmtree(run / "checkpoint-200")
        shutil.copytree(run / "checkpoint-100", run / "checkpoint-200")
        age(run / "checkpoint-200", 43200)
        watch(run, tmp_path / "out", once=True, type="model")
        assert happened(tmp_path / "out") == [("made", 100), ("made", 200), ("made", 200)]
        assert contents(tmp_path / "out" / "step-200") == contents(tmp_path / "out" / "step-100") != first

    def test_an_output_that_was_published_but_not_noted_is_noted(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True)
        (tmp_path / "out" / "watch.jsonl").unlink()
        before = (tmp_path / "out" / "step-200" / "model.safetensors").stat()
        watch(run, tmp_path / "out", once=True)
        assert happened(tmp_path / "out") == [("made", 100), ("made", 200)]
        assert (tmp_path / "out" / "step-200" / "model.safetensors").stat().st_ino == before.st_ino

    def test_the_output_of_something_else_is_never_replaced(self, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "out" / "step-200", step=100)
        before = contents(tmp_path / "out" / "step-200")
        done = ckpt("watch", run, "-o", tmp_path / "out", *ONCE)
        assert done.code == 5
        assert "error[output-exists]: step 200" in done.err
        assert contents(tmp_path / "out" / "step-200") == before
        assert happened(tmp_path / "out") == [("made", 100), ("failed", 200)]

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_a_command_that_was_ended_with_the_watch_runs_again(self, run: Path, tmp_path: Path, number: int) -> None:
        home, started = tmp_path / "out", tmp_path / "started"
        command = f"echo $$ >> {shlex.quote(str(started))}; test -e {home}/go || sleep 600; echo {{output}}"
        with watching(run, "-o", home, "--every", "200", *FAST, "--exec", command, log=tmp_path / "log") as process:
            until(started.exists, "the command")
            process.send_signal(number)
            process.wait(PATIENCE)
        shell = int(started.read_text())
        if number != signal.SIGKILL:
            assert process.returncode == 128 + number
            until(lambda: not alive(shell), "the end of the command")
        else:
            os.killpg(shell, signal.SIGKILL)
        assert happened(home) == [("made", 200)]
        (home / "go").touch()
        assert ckpt("watch", run, "-o", home, "--every", "200", *ONCE, "--exec", command).code == 0
        assert happened(home) == [("made", 200), ("ran", 200)]

    def test_a_command_that_has_just_begun_is_ended_too(self, tmp_path: Path) -> None:
        """The signal comes while the process is still being started."""
        program = (
            "import sys\n"
            "from pathlib import Path\n"
            "from ckpt_cli.watching.evaluation import run_command\n"
            "for _ in range(20):\n"
            "    try:\n"
            "        run_command('echo $$ >> {run}/began; kill -INT $PPID; sleep 600', Path('x'), 1, Path(sys.argv[1]), print)\n"
            "    except KeyboardInterrupt:\n"
            "        pass\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        assert subprocess.run([sys.executable, "-c", program, tmp_path], env=environment, timeout=PATIENCE).returncode == 0
        began = [int(line) for line in (tmp_path / "began").read_text().split()]
        assert len(began) == 20
        until(lambda: not any(runs(process, str(tmp_path)) for process in began), "the end of all commands")

    @pytest.mark.parametrize("cut", [1, 2, 30])
    def test_a_line_that_was_cut_off_is_no_event(self, cut: int, run: Path, tmp_path: Path) -> None:
        """Not even if what is left of it ends with a brace, and another line follows."""
        watch(run, tmp_path / "out", once=True, include=["*"])
        path = tmp_path / "out" / "watch.jsonl"
        whole = path.read_bytes().splitlines()
        path.write_bytes(whole[0] + b"\n" + whole[1][:-cut])
        watch(run, tmp_path / "out", once=True, include=["*"])
        watch(run, tmp_path / "out", once=True, include=["*"])
        assert [json.loads(line)["step"] for line in path.read_bytes().splitlines() if line not in whole[1][:-cut]] == [100, 200]

    def test_lines_are_whole_where_writes_are_not(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2 + 1]))
        watch(run, tmp_path / "out", once=True)
        assert [json.loads(line)["step"] for line in (tmp_path / "out" / "watch.jsonl").read_bytes().splitlines()] == [100, 200]

    def test_what_a_killed_watch_left_of_steps_that_are_done_is_removed(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True)
        (tmp_path / "out" / "watch.jsonl").unlink()
        left = place_of(tmp_path / "out" / "step-100")
        left.mkdir()
        watch(run, tmp_path / "out", once=True)
        assert not left.exists()

    def test_what_a_killed_watch_had_begun_to_remove_is_removed(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True)
        aside = temporary_name(tmp_path / "out" / "step-100")
        (tmp_path / "out" / "step-100").rename(aside)
        result = watch(run, tmp_path / "out", once=True, keep=1)
        assert [event.event for event in result.events] == ["removed"]
        assert not aside.exists()

    def test_the_lock_needs_no_room(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        (tmp_path / "out").mkdir()
        monkeypatch.setattr(os, "pwrite", full)
        with only_watch(tmp_path / "out"), pytest.raises(Watched), only_watch(tmp_path / "out"):
            pass

    def test_a_journal_of_something_else_is_refused(self, run: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "watch.jsonl").write_text('{"loss": 1}\n')
        with pytest.raises(CorruptFile, match="was not written by ckpt watch"):
            watch(run, tmp_path / "out", once=True)

    def test_one_watch_a_folder(self, run: Path, tmp_path: Path) -> None:
        with watching(run, "-o", tmp_path / "out", *FAST, log=tmp_path / "log") as process:
            until(lambda: ("made", 200) in happened(tmp_path / "out"), "the first watch")
            with pytest.raises(Watched, match=f"another watch writes here: process {process.pid} on "):
                watch(run, tmp_path / "out", once=True)
            done = ckpt("watch", run, "-o", tmp_path / "out", *ONCE)
            assert (done.code, "error[watched]" in done.err) == (5, True)
        assert ckpt("watch", run, "-o", tmp_path / "out", *ONCE).code == 0


class TestAHomeBelongsToOneRunAndOneSetOfOptions:
    @pytest.mark.parametrize(
        ("first", "then", "said"),
        [
            ({}, {"dtype": "bf16"}, "now: --dtype bf16"),
            ({"type": "model"}, {"type": "ema"}, "now: --type ema"),
            ({"include": ["model.*", "lm_head.*"]}, {}, "then: --include 'model.*' --include 'lm_head.*'"),
            ({"average": "last=2"}, {}, "now: none that changes what is written"),
            ({"average": "last=2"}, {"average": "last=2,method=ema,half_life=5"}, "now: --average last=2,method=ema,half-life=5"),
            ({}, {"key_map": "model.layers=model.blocks"}, r"now: --key-map (model\.layers(\..+)? -> model.blocks\1)"),
        ],
        ids=str,
    )
    def test_other_options_are_refused(self, run: Path, tmp_path: Path, first: Any, then: Any, said: str) -> None:
        home = tmp_path / "out"
        watch(run, home, once=True, since=200, **first)
        before, noted = contents(home / "step-200"), journal(home)
        with pytest.raises(UsageError, match="the outputs here were made with other options") as caught:
            watch(run, home, once=True, execute=f"touch {tmp_path}/ran {{output}}", **then)
        assert said in caught.value.details
        assert caught.value.hint == "choose another folder with -o"
        assert (contents(home / "step-200"), journal(home)) == (before, noted)
        assert not (tmp_path / "ran").exists()

    def test_another_run_is_refused_on_the_command_line_too(self, run: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        shutil.copytree(run, other)
        age(other, 2 * 86400)
        assert ckpt("watch", run, "-o", tmp_path / "out", *ONCE).code == 0
        done = ckpt("watch", other, "-o", tmp_path / "out", *ONCE)
        assert done.code == 2
        assert str(run) in done.err
        assert str(other) in done.err
        assert ckpt("watch", other, "-o", tmp_path / "elsewhere", *ONCE).code == 0

    def test_what_decides_nothing_may_differ(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True, dtype="bf16", type="model")
        (tmp_path / "link").symlink_to(run)
        more: dict[str, Any] = {"jobs": 1, "keep": 5, "every": 100, "since": 100, "interval": 1, "settle": 1, "verify": True}
        again = watch(tmp_path / "link", tmp_path / "out", once=True, dtype="bfloat16", type="model", **more)
        assert again.events == ()

    def test_a_key_map_that_changes_meanwhile_is_refused(self, run: Path, tmp_path: Path) -> None:
        rules = tmp_path / "rules.json"
        rules.write_text(json.dumps({"rules": [{"match": "(.*)", "to": r"one.\1"}]}))
        (run / "latest_checkpointed_iteration.txt").write_text("100")

        def change(_: object) -> None:
            rules.write_text(json.dumps({"rules": [{"match": "(.*)", "to": r"two.\1"}]}))

        with pytest.raises(UsageError, match="the key map or the base is another one"):
            watch(
                run, tmp_path / "out", once=True, type="model", key_map=rules, names="native", settle=0.3, listener=Listener(event=change)
            )
        assert happened(tmp_path / "out") == [("made", 100)]

    def test_a_journal_of_an_older_version_goes_on(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True, dtype="bf16")
        path = tmp_path / "out" / "watch.jsonl"
        lines = [{name: value for name, value in event.items() if name != "options"} for event in journal(tmp_path / "out")]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert watch(run, tmp_path / "out", once=True, dtype="bf16").events == ()


class TestWhatAnOutputWasMadeFrom:
    def test_weights_that_were_repaired_are_seen_whatever_their_time(self, run: Path, tmp_path: Path) -> None:
        """The newest file of the step is newer than all weights, as a tracker or a state file may be, and stays so."""
        shard = next((run / "checkpoint-100" / "pytorch_model_fsdp_0").glob("*rank_2*"))
        (run / "checkpoint-100" / "late.json").write_text("{}")
        os.utime(run / "checkpoint-100" / "late.json", (time.time() - 43200,) * 2)
        for step in (300, 400):
            shutil.copytree(run / "checkpoint-200", run / f"checkpoint-{step}")
        watch(run, tmp_path / "out", once=True, type="model")
        other = run / "checkpoint-200" / "pytorch_model_fsdp_0" / shard.name
        shard.write_bytes(other.read_bytes())
        os.utime(shard, (time.time() - 50000,) * 2)
        (event, *more) = watch(run, tmp_path / "out", once=True, type="model").events
        assert (event.event, event.step, more) == ("made", 100, [])
        ckpt_cli.merge(run, tmp_path / "right", step=100, type="model")
        assert contents(tmp_path / "out" / "step-100") == contents(tmp_path / "right")

    @pytest.mark.parametrize("name", ["of the step", "of the base"])
    def test_files_beside_the_weights_are_seen_whatever_their_time(self, name: str, run: Path, tmp_path: Path) -> None:
        base = tmp_path / "base"
        base.mkdir()
        (base / "chat_template.jinja").write_text("a")
        age(base, 86400)
        for step in (300, 400):
            shutil.copytree(run / "checkpoint-200", run / f"checkpoint-{step}")
        watch(run, tmp_path / "out", once=True, type="model", base=base)
        path = base / "chat_template.jinja" if name == "of the base" else next((run / "checkpoint-400").rglob("tokenizer_config.json"))
        path.write_text('{"eos_token_id": 7}')
        os.utime(path, (time.time() - 100000,) * 2)
        events = watch(run, tmp_path / "out", once=True, type="model", base=base).events
        assert [(event.event, event.step) for event in events] == [
            ("made", step) for step in ((100, 200, 300, 400) if name == "of the base" else (400,))
        ]
        assert (tmp_path / "out" / "step-400" / path.name).read_text() == '{"eos_token_id": 7}'
        assert watch(run, tmp_path / "out", once=True, type="model", base=base).events == ()

    def test_the_last_line_names_no_output_that_was_removed(self, run: Path, tmp_path: Path) -> None:
        command = ["watch", run, "-o", tmp_path / "out", *ONCE, "--keep", "1"]
        watch(run, tmp_path / "out", once=True, keep=1)
        age(run / "checkpoint-100", 86400 - 1800)
        done = ckpt(*command)
        assert happened(tmp_path / "out")[-2:] == [("made", 100), ("removed", 100)]
        (line,) = (line for line in done.err.splitlines() if line.startswith("next: "))
        assert line == f"next: ckpt verify {tmp_path / 'out' / 'step-200'} --against {run / 'checkpoint-200'}"

    def test_an_average_is_made_again_if_an_older_step_of_it_was(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True, average="last=2", type="model")
        shutil.rmtree(run / "checkpoint-100")
        shutil.copytree(run / "checkpoint-200", run / "checkpoint-100")
        age(run / "checkpoint-100", 86400 - 1800)  # much later, it would be of another training
        (event,) = watch(run, tmp_path / "out", once=True, average="last=2", type="model").events
        assert (event.event, event.step) == ("made", 200)
        ckpt_cli.average(run, tmp_path / "right", steps=(100, 200), type="model")
        assert contents(tmp_path / "out" / "step-200") == contents(tmp_path / "right")

    def test_compressed_files_that_stay_as_they_are_are_no_reason(self, tmp_path: Path) -> None:
        for step in (100, 200, 300):
            folder = tmp_path / "run" / f"checkpoint-{step}" / "pytorch_model_fsdp_0"
            writer = dcp.FileSystemWriter(folder, _extensions=[ZStandard()])
            dcp.save({"model": {"w": torch.arange(1000.0)}}, storage_writer=writer, no_dist=True)
        age(tmp_path / "run", 86400)
        assert [event.event for event in watch(tmp_path / "run", tmp_path / "out", once=True).events] == ["made"] * 3
        assert watch(tmp_path / "run", tmp_path / "out", once=True).events == ()

    def test_files_of_a_step_that_are_removed_are_no_reason(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True, type="model")
        shutil.rmtree(run / "checkpoint-100" / "pytorch_model_fsdp_0")
        assert watch(run, tmp_path / "out", once=True, type="model").events == ()

    @pytest.mark.parametrize("changed", ["config.json", "tokenizer.json", "weights"])
    def test_an_output_that_is_not_noted_is_taken_only_if_it_is_right(self, run: Path, tmp_path: Path, changed: str) -> None:
        watch(run, tmp_path / "out", once=True, type="model")
        (tmp_path / "out" / "watch.jsonl").unlink()
        pattern = "pytorch_model_fsdp_0/*rank_1*" if changed == "weights" else changed
        found = next((run / "checkpoint-200").rglob(pattern))
        if changed == "weights":
            found.write_bytes((run / "checkpoint-100" / found.relative_to(run / "checkpoint-200")).read_bytes())
        else:
            found.write_text(json.dumps(json.loads(found.read_text()) | {"note": "changed"}))
        os.utime(found, (time.time() - 80000,) * 2)
        before = contents(tmp_path / "out" / "step-200")
        result = watch(run, tmp_path / "out", once=True, type="model")
        assert ("failed", 200, "output-exists") in [(event.event, event.step, event.error) for event in result.events]
        assert contents(tmp_path / "out" / "step-200") == before


def runs(process: int, words: str) -> bool:
    """Whether a process is there whose command has these words: its number may be that of another one by now, which lives on."""
    command = Path(f"/proc/{process}/cmdline")
    try:
        return words in command.read_bytes().decode() if Path("/proc/self").exists() else alive(process)
    except OSError:
        return False


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


class TestWhatIsWritten:
    def test_averages_of_the_newest_steps(self, run: Path, tmp_path: Path) -> None:
        result = watch(run, tmp_path / "out", once=True, average="last=2", dtype="bf16")
        ckpt_cli.average(run, tmp_path / "average", steps=(100, 200), dtype="bf16")
        assert contents(tmp_path / "out" / "step-200") == contents(tmp_path / "average")
        assert [(event.event, event.step, event.steps) for event in result.events] == [("made", 200, (100, 200))]
        assert result.waiting == {str(run): {100: "--average last=2 needs 2 steps up to this one, and there is 1"}}

    def test_warnings_about_older_steps_of_an_average_are_noted(self, tmp_path: Path) -> None:
        for step in (1, 2):
            folder(tmp_path / "run" / f"checkpoint-{step}", weights(step), classless())
        (tmp_path / "run" / "checkpoint-1" / "config (1).json").write_text("{}")
        (event,) = watch(tmp_path / "run", tmp_path / "out", once=True, settle=0, average="last=2").events
        told = ckpt_cli.average(tmp_path / "run", tmp_path / "right", steps=(1, 2)).notes
        assert [note.text for note in told if note.code == "second-copy" and note.text in event.warnings]

    def test_an_average_of_more_steps_than_there_are_says_so_at_once(self, run: Path, tmp_path: Path) -> None:
        done = ckpt("watch", run, "-o", tmp_path / "out", "--average", "5", *ONCE)  # without waiting for --settle
        assert done.code == 0
        assert "step 200  waits: --average last=5 needs 5 steps up to this one, and there are 2" in done.err
        assert happened(tmp_path / "out") == []

    def test_a_method_of_averaging(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True, average="last=2,method=ema,decay=0.25")
        ckpt_cli.average(run, tmp_path / "average", steps=(100, 200), method="ema", decay=0.25)
        assert contents(tmp_path / "out" / "step-200") == contents(tmp_path / "average")

    def test_several_components(self, run: Path, tmp_path: Path) -> None:
        (event, *_) = watch(run, tmp_path / "out", once=True, type="both", keep=1).events
        assert len(event.outputs) == 2
        assert happened(tmp_path / "out") == [("made", 100), ("made", 200), ("removed", 100)]
        assert not any(Path(folder).exists() for folder in event.outputs)

    def test_several_runs(self, run: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        shutil.copytree(run, other)
        done = ckpt("watch", run, other, "-o", tmp_path / "out", *ONCE, "--since", "200")
        assert done.code == 0
        assert [happened(tmp_path / "out" / name) for name in ("run", "other")] == [[("made", 200)]] * 2
        assert "run step 200  made" in done.out
        assert "other step 200  made" in done.out

    def test_by_default_the_outputs_lie_beside_the_run(self, run: Path) -> None:
        watch(run, once=True, every=200)
        assert (run.parent / "run_merged" / "step-200" / "config.json").exists()

    def test_only_outputs_of_this_watch_are_removed(self, run: Path, tmp_path: Path) -> None:
        home = tmp_path / "out"
        ckpt_cli.merge(run, home / "step-50", step=100)
        watch(run, home, once=True, keep=1)
        assert happened(home) == [("made", 100), ("made", 200), ("removed", 100)]
        assert sorted(path.name for path in home.glob("step-*")) == ["step-200", "step-50"]

    def test_an_output_with_something_else_in_it_stays(self, run: Path, tmp_path: Path) -> None:
        home = tmp_path / "out"
        result = watch(run, home, once=True, keep=1, execute="echo ours > {output}/scores.txt")
        assert (home / "step-100" / "scores.txt").exists()
        assert [note.code for note in result.notes] == ["output-kept"]

    def test_outputs_wait_for_their_command_before_they_are_removed(self, run: Path, tmp_path: Path) -> None:
        seen = tmp_path / "seen"
        watch(run, tmp_path / "out", once=True, keep=1, execute=f"ls {{output}} >> {seen}")
        assert seen.read_text().count("model.safetensors") == 2

    def test_warnings_are_said_once_and_noted_for_each_step(self, run: Path, tmp_path: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            for path in run.rglob(name):
                path.unlink()
        age(run, 86400)
        done = ckpt("watch", run, "-o", tmp_path / "out", *ONCE)
        assert done.err.count("no tokenizer") == 1
        assert all("no tokenizer" in event["warnings"][0] for event in journal(tmp_path / "out"))


class TestTheCommand:
    def test_its_last_json_line_is_the_metrics(self, run: Path, tmp_path: Path) -> None:
        script = tmp_path / "evaluate.py"
        script.write_text(
            "import json, os, sys\n"
            "print('loading'); print(json.dumps({'loss': 9}))\n"
            "limit = os.environ.get('OPENBLAS_NUM_THREADS')\n"
            "print(json.dumps({'loss': 1.5, 'bad': float('nan'), 'step': int(sys.argv[2]), 'threads': limit}))\n"
            "print('[1, 2]'); print('{not json'); print('done')\n"
        )
        environment = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
        command = f"watch {run} -o {tmp_path}/out --once --settle 0 --since 200 --exec '{sys.executable} {script} {{output}} {{step}}'"
        done = subprocess.run(
            [sys.executable, "-m", "ckpt_cli", *shlex.split(command)],
            env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert journal(tmp_path / "out")[-1]["metrics"] == {"loss": 1.5, "bad": "NaN", "step": 200, "threads": None}
        assert "step 200  command ended with exit code 0 after 0" in done.stdout
        assert "loss 1.5" in done.stdout
        assert "loading" in done.stderr

    def test_names_are_quoted_for_the_shell(self, run: Path, tmp_path: Path) -> None:
        home = tmp_path / "a {step} {run} b; touch $(echo x) 'q'"
        result = watch(run, home, once=True, since=200, execute='test -d {output} && test {output} = "$CKPT_OUTPUT"')
        assert [event.exit_code for event in result.events] == [0, 0]

    def test_one_that_fails_is_reported_and_not_repeated(self, run: Path, tmp_path: Path) -> None:
        done = ckpt("watch", run, "-o", tmp_path / "out", *ONCE, "--exec", "test {step} = 200 || kill -9 $$ {output}")
        assert done.code == 1
        assert [event.get("exit_code") for event in journal(tmp_path / "out") if event["event"] == "ran"] == [137, 0]
        assert ckpt("watch", run, "-o", tmp_path / "out", *ONCE, "--exec", "false {output}").code == 0

    @pytest.mark.parametrize("options", [["--average", "last=2"], ["--type", "both"]], ids=str)
    def test_the_last_line_of_the_screen_verifies_what_was_made(self, run: Path, tmp_path: Path, options: list[str]) -> None:
        done = ckpt("watch", run, "-o", tmp_path / "out", *ONCE, *options)
        assert done.code == 0
        (line,) = [line for line in done.err.splitlines() if line.startswith("next: ckpt verify ")]
        verified = ckpt(*shlex.split(line)[2:])
        assert (verified.code, "error" in verified.err) == (0, False), verified

    def test_json_is_one_document(self, run: Path, tmp_path: Path) -> None:
        document = json.loads(ckpt("watch", run, "-o", tmp_path / "out", *ONCE, "--json", "--exec", "echo {output}").out)
        assert [event["event"] for event in document["data"]["events"]] == ["made", "ran"] * 2


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"average": "five"}, "--average does not understand 'five'"),
            ({"average": "method=ema"}, "--average does not say how many steps"),
            ({"average": "last=1"}, "--average does not say how many steps"),
            ({"average": "last=3,steps=5"}, "--average does not understand 'steps=5'"),
            ({"average": "last=2,decay=often"}, "--decay must be a number"),
            ({"average": "last=2", "verify": True}, "--verify compares with one step"),
            ({"execute": "python evaluate.py"}, "--exec does not use the output"),
            ({"execute": " "}, "--exec is empty"),
            ({"keep": 0}, "--keep is out of range"),
            ({"every": 0}, "--every is out of range"),
            ({"interval": -1}, "--interval is out of range"),
            ({"settle": float("nan")}, "--settle is out of range"),
            ({"dtype": "base"}, "--dtype base needs a base"),
            ({"dtype": "int3"}, "unknown dtype"),
            ({"overwrite": True}, "unknown option: overwrite"),
        ],
        ids=str,
    )
    def test_options(self, run: Path, tmp_path: Path, options: Any, what: str) -> None:
        with pytest.raises(UsageError) as caught:
            watch(run, tmp_path / "out", once=True, **options)
        assert what in caught.value.message
        assert not list(tmp_path.glob("out/step-*"))

    @pytest.mark.parametrize("inside", ["", "merged", "checkpoint-100/out"])
    def test_outputs_in_the_run(self, run: Path, inside: str) -> None:
        with pytest.raises(OutputInsideSource):
            watch(run, run / inside, once=True)

    @pytest.mark.parametrize(
        ("path", "error"), [("nowhere", NotFound), ("run/checkpoint-100", UsageError), ("run/checkpoint-100/config.json", NotFound)]
    )
    def test_what_is_no_run(self, run: Path, tmp_path: Path, path: str, error: type[CkptError]) -> None:
        with pytest.raises(error):
            watch(tmp_path / path, tmp_path / "out", once=True)

    def test_two_runs_of_one_name(self, run: Path, tmp_path: Path) -> None:
        shutil.copytree(run, tmp_path / "other" / "run")
        with pytest.raises(UsageError, match="the same name"):
            watch([run, tmp_path / "other" / "run"], tmp_path / "out", once=True)


def test_the_examples_in_the_help_work(run: Path) -> None:
    (run.parent / "evaluate.py").write_text("import sys\nassert sys.argv[2] in ('100', '200')\n")
    text = ckpt("watch", "--help").out
    examples = [line.strip() for line in text.split("Examples:")[1].splitlines() if line.strip().startswith("ckpt ")]
    assert len(examples) == 3
    for example in examples:
        outcome = ckpt(*shlex.split(example)[1:], *([] if "--once" in example else ["--once"]), "--settle", "0", cwd=run.parent)
        assert outcome.code == 0, (example, outcome)


class TestWhatIsPassedOver:
    """A step that `merge` would refuse is said, and never left out."""

    @pytest.mark.parametrize("twin", ["global_step_100", "checkpoint-0100"])
    def test_a_step_in_two_folders_has_failed(self, run: Path, tmp_path: Path, twin: str) -> None:
        shutil.copytree(run / "checkpoint-200", run / twin)
        done = ckpt("watch", run, "-o", tmp_path / "out", "--once", "--settle", "0")
        assert done.code == ckpt("merge", run, "--step", "100", "-o", tmp_path / "one").code == 2
        assert "error[ambiguous-step]: step 100: step 100 is there more than once" in done.err
        assert "move all but one of them out of the run" in done.err
        assert happened(tmp_path / "out") == [("failed", 100), ("made", 200)]
        shutil.rmtree(run / twin)
        assert ckpt("watch", run, "-o", tmp_path / "out", *ONCE).code == 0

    def test_a_step_that_was_made_and_got_a_twin_is_no_longer_known(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True)
        shutil.copytree(run / "checkpoint-100", run / "global_step_200", copy_function=shutil.copy2)
        result = watch(run, tmp_path / "out", once=True, settle=0)
        assert [(event.event, event.step, event.error) for event in result.events] == [("failed", 200, "ambiguous-step")]
        assert result.exit_code == 2

    def test_an_average_with_such_a_step_fails_and_the_watch_goes_on(self, run: Path, tmp_path: Path) -> None:
        for name in ("global_step_100", "checkpoint-300"):
            shutil.copytree(run / "checkpoint-200", run / name)
        result = watch(run, tmp_path / "out", once=True, settle=0, average="last=2", type="model")
        assert [(event.event, event.step) for event in result.events] == [("failed", 200), ("made", 300)]

    @pytest.mark.parametrize("kind", ["bare", "unfinished", "output", "bare alone"])
    def test_a_folder_that_holds_no_checkpoint_waits(self, run: Path, tmp_path: Path, kind: str) -> None:
        if kind == "output":
            ckpt_cli.merge(run, tmp_path / "one", step=200)
            (tmp_path / "one").rename(run / "checkpoint-300")
        elif kind == "unfinished":
            (run / "checkpoint-200").rename(run / "tmp_step-300")
        else:
            (run / "checkpoint-300").mkdir()
        if kind == "bare alone":
            for step in (100, 200):
                shutil.rmtree(run / f"checkpoint-{step}")
        done = ckpt("watch", run, "-o", tmp_path / "out", "--once", "--settle", "0")
        assert "step 300" in done.err
        assert "nothing is due" not in done.out
        assert ckpt("watch", run, "-o", tmp_path / "out", *ONCE, "--since", "400").out.startswith(
            ("nothing is due", "step 200", "step 100")
        )


class TestATrainingThatWasStartedAgain:
    """It writes the low steps first, and the high ones of the training before stay until it gets there."""

    def steps(self, run: Path, days: dict[int, float]) -> Path:
        """Steps that were written so many days ago."""
        for step in (100, 200):
            (run / f"checkpoint-{step}").rename(run.parent / f"old-{step}")
        for step, since in days.items():
            shutil.copytree(run.parent / ("old-100" if since > 5 else "old-200"), run / f"checkpoint-{step}")
            age(run / f"checkpoint-{step}", since * 86400)
        return run

    @pytest.mark.parametrize(
        ("days", "made", "waits"),
        [
            ({5000: 40, 200: 2, 400: 1}, {400: (200, 400)}, {5000: (400, 5000)}),
            ({4800: 40, 5000: 39, 200: 2}, {5000: (4800, 5000)}, {4800: (200, 4800)}),
            # Steps at other distances: those of the training before lie between those of the new one.
            ({100: 40, 300: 39.9, 200: 2, 400: 1}, {200: (100, 200)}, {300: (200, 300), 400: (200, 300)}),
            # Training that went back to 300.
            ({200: 40, 300: 39.9, 500: 39.8, 400: 1}, {300: (200, 300), 400: (300, 400)}, {500: (400, 500)}),
            # Started again twice.
            ({300: 40, 200: 20, 400: 19, 100: 1}, {}, {200: (100, 200), 300: (200, 300), 400: (200, 300)}),
        ],
        ids=["low steps", "several of before", "between", "went back", "twice"],
    )
    def test_no_average_is_of_both(
        self, days: dict[int, float], made: dict[int, Any], waits: dict[int, Any], run: Path, tmp_path: Path
    ) -> None:
        self.steps(run, days)
        result = watch(run, tmp_path / "out", once=True, average="last=2", type="model")
        assert {event.step: event.steps for event in result.events} == made
        reasons = {step: text for step, text in result.waiting[str(run)].items() if step != min(days)}
        assert reasons.keys() == waits.keys()
        for step, (younger, older) in waits.items():
            assert f"checkpoint-{younger} was written " in reasons[step]
            assert f" later than checkpoint-{older}, so that these may be of two trainings" in reasons[step]
        assert [note.code for note in result.notes if note.code != "step-waits"] == ["older-steps"]

    def test_three_steps_of_which_the_outer_ones_are_of_both(self, run: Path, tmp_path: Path) -> None:
        self.steps(run, {4800: 40, 5000: 39, 200: 2})
        result = watch(run, tmp_path / "out", once=True, average="last=3", type="model")
        assert result.events == ()
        assert "may be of two trainings" in result.waiting[str(run)][5000]

    def test_an_average_that_waited_is_made_once_the_steps_before_are_gone(self, run: Path, tmp_path: Path) -> None:
        self.steps(run, {300: 40, 200: 2, 400: 1})
        done = ckpt("watch", run, "-o", tmp_path / "out", *ONCE, "--average", "2", "--type", "model")
        assert "step 400  waits: --average last=2 needs steps 300, 400" in done.err
        shutil.rmtree(run / "checkpoint-300")
        result = watch(run, tmp_path / "out", once=True, average="last=2", type="model")
        assert [(event.step, event.steps) for event in result.events] == [(400, (200, 400))]
        assert [note.code for note in result.notes] == ["step-waits"]

    def test_is_said_as_other_commands_say_it(self, run: Path, tmp_path: Path) -> None:
        self.steps(run, {5000: 40, 200: 2, 400: 1})
        for _ in range(2):
            done = ckpt("watch", run, "-o", tmp_path / "out", *ONCE)
            text = "warning: run: checkpoint-400 was written 39 days later than checkpoint-5000: if training was started again"
            assert done.err.count(text) == 1
            assert done.code == 0
        assert ckpt("watch", run, "-o", tmp_path / "out", *ONCE, "-qq").err == ""
        (note,) = ckpt_cli.detect(run).checkpoint.notes
        assert note.code == "older-steps"

    def test_is_none_of_training(self, run: Path, tmp_path: Path) -> None:
        self.steps(run, {100: 4, 200: 3, 300: 2.99})
        assert watch(run, tmp_path / "out", once=True).notes == ()

    @pytest.mark.parametrize(
        ("days", "kept"),
        [
            ({5000: 40, 200: 2}, {200, 5000}),
            ({5000: 40, 200: 2, 400: 1}, {400, 5000}),
            ({300: 40, 200: 2, 400: 1}, {400}),
            ({200: 40, 300: 39.9, 500: 39.8, 400: 1}, {400, 500}),
        ],
    )
    def test_its_newest_output_is_kept(self, days: dict[int, float], kept: set[int], run: Path, tmp_path: Path) -> None:
        self.steps(run, days)
        home = tmp_path / "out"
        result = watch(run, home, once=True, keep=1)
        assert {int(path.name.removeprefix("step-")) for path in home.glob("step-*")} == kept
        said = [note.text for note in result.notes if note.code == "output-kept"]
        assert [text.partition(" is not removed: ")[0] for text in said] == ([str(home / f"step-{max(kept)}")] if len(kept) > 1 else [])

    def test_its_newest_output_is_kept_also_if_the_steps_are_gone(self, run: Path, tmp_path: Path) -> None:
        self.steps(run, {5000: 40, 300: 2})
        home = tmp_path / "out"
        watch(run, home, once=True)
        shutil.rmtree(run / "checkpoint-5000")
        for _ in range(2):
            watch(run, home, once=True, keep=1)
        assert {path.name for path in home.glob("step-*")} == {"step-300", "step-5000"}
        shutil.rmtree(home / "step-5000")
        assert [note.code for note in watch(run, home, once=True, keep=1).notes] == []

    def test_files_that_come_late_are_seen_in_its_steps(self, run: Path, tmp_path: Path) -> None:
        self.steps(run, {4800: 40, 4900: 40, 5000: 40, 200: 2, 400: 1})
        watch(run, tmp_path / "out", once=True, type="model")
        (run / "checkpoint-400" / "chat_template.jinja").write_text("a")
        os.utime(run / "checkpoint-400" / "chat_template.jinja", (time.time() - 40000,) * 2)
        assert [event.step for event in watch(run, tmp_path / "out", once=True, type="model").events] == [400]


class TestAnOutputThatIsNotWhatWasWritten:
    @pytest.mark.parametrize("damage", ["weights", "cut", "config", "manifest"])
    def test_nothing_runs_on_it(self, run: Path, tmp_path: Path, damage: str) -> None:
        watch(run, tmp_path / "out", once=True)
        output = tmp_path / "out" / "step-200"
        if damage == "cut":
            os.truncate(output / "model.safetensors", 100)
        else:
            (output / {"weights": "model.safetensors", "config": "config.json", "manifest": "ckpt-manifest.json"}[damage]).unlink()
        seen = ckpt("watch", run, "-o", tmp_path / "out", *ONCE)
        assert "nothing new" not in seen.out
        assert "is not what was written" in seen.err
        result = watch(run, tmp_path / "out", once=True, execute=f"ls {{output}} && echo {{step}} >> {tmp_path / 'ran'}")
        assert (tmp_path / "ran").read_text().split() == ["100"]
        assert [(event.event, event.step) for event in result.events] == [("ran", 100), ("failed", 200)]
        assert result.exit_code == 4
        ckpt_cli.merge(run, output, step=200, overwrite=True) if damage != "manifest" else None
        shutil.rmtree(output) if damage == "manifest" else None
        assert watch(run, tmp_path / "out", once=True, execute="ls {output}").exit_code == 0

    def test_it_takes_no_place_of_those_that_are_kept(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True)
        (tmp_path / "out" / "step-200" / "model.safetensors").unlink()
        assert watch(run, tmp_path / "out", once=True, keep=1).events == ()
        shutil.rmtree(tmp_path / "out" / "step-200")
        assert watch(run, tmp_path / "out", once=True, keep=1).events == ()
        assert (tmp_path / "out" / "step-100" / "model.safetensors").exists()

    def test_what_somebody_else_removed_was_not_removed_by_keep(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True)
        shutil.rmtree(tmp_path / "out" / "step-100")
        assert watch(run, tmp_path / "out", once=True, keep=1).events == ()

    def test_what_is_kept_for_want_of_a_manifest_says_so(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True)
        (tmp_path / "out" / "step-100" / "ckpt-manifest.json").unlink()
        (note,) = watch(run, tmp_path / "out", once=True, keep=1).notes
        assert note.text.endswith("is not removed: it has no ckpt-manifest.json that says what ckpt wrote there")

    def test_there_is_something_new_while_a_step_waits(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True)
        (run / "checkpoint-300").mkdir()
        assert "nothing new" not in ckpt("watch", run, "-o", tmp_path / "out", *ONCE).out


class TestFilesThatKeepTheirTime:
    """A file that was replaced by one of the same size and time has another ctime."""

    @pytest.mark.parametrize("how", ["moved", "in place"])
    @pytest.mark.parametrize("step", [100, 200])
    def test_weights(self, run: Path, tmp_path: Path, how: str, step: int) -> None:
        for other in (300, 400):
            shutil.copytree(run / "checkpoint-200", run / f"checkpoint-{other}", copy_function=shutil.copy2)
        watch(run, tmp_path / "out", once=True, type="model")
        for shard in (run / f"checkpoint-{step}" / "pytorch_model_fsdp_0").iterdir():
            status, source = shard.stat(), run / f"checkpoint-{300 - step}" / "pytorch_model_fsdp_0" / shard.name
            target = shard if how == "in place" else tmp_path / "new"
            target.write_bytes(source.read_bytes())
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            target.replace(shard)
            assert (shard.stat().st_size, shard.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
        result = watch(run, tmp_path / "out", once=True, type="model")
        assert [(event.event, event.step) for event in result.events] == [("made", step)]
        ckpt_cli.merge(run, tmp_path / "right", step=step, type="model")
        assert contents(tmp_path / "out" / f"step-{step}") == contents(tmp_path / "right")
        assert watch(run, tmp_path / "out", once=True, type="model").events == ()

    def test_a_late_file_with_an_old_time(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True, type="model")
        path = run / "checkpoint-200" / "chat_template.jinja"
        path.write_text("a")
        os.utime(path, (time.time() - 200000,) * 2)
        assert [event.step for event in watch(run, tmp_path / "out", once=True, type="model").events] == [200]


def save_last(run: Path) -> None:
    """The last model in the folder of its run."""
    ckpt_cli.merge(run / "checkpoint-200", run.parent / "last")
    for name in ("model.safetensors", "config.json"):
        shutil.copy2(run.parent / "last" / name, run)


class TestWeightsBesideTheSteps:
    """A training saves its last model into the run's own folder: the Trainer by `save_model`, PEFT an adapter."""

    @pytest.mark.parametrize("average", [None, "last=2"])
    def test_are_no_step(self, average: str | None, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True, average=average)
        save_last(run)
        shutil.copytree(run / "checkpoint-200", run / "checkpoint-300")
        told: list[str] = []
        result = watch(run, tmp_path / "out", once=True, average=average, listener=Listener(tells=lambda _, text: told.append(text)))
        made = [(event.step, event.steps) for event in result.events]
        assert made == [(300, (200, 300) if average else ())]
        (note,) = (note for note in result.notes if note.code != "step-waits")
        assert (note.level, note.code, [note.text]) == ("info", "weights-beside", told)
        assert told[0].startswith("model.safetensors beside the steps")

    def test_are_told_at_a_first_watch_too(self, run: Path, tmp_path: Path) -> None:
        save_last(run)
        done = ckpt("watch", run, "-o", tmp_path / "out", *ONCE)
        assert happened(tmp_path / "out") == [("made", 100), ("made", 200)]
        assert done.code == 0
        assert f"run: model.safetensors beside the steps, weights of the folder itself: ckpt merge {run} takes them" in done.err

    def test_of_an_adapter(self, run: Path, tmp_path: Path) -> None:
        (run / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q"]}))
        save_file({f"base_model.model.q.lora_{end}.weight": torch.ones(1, 1) for end in "AB"}, run / "adapter_model.safetensors")
        assert [event.step for event in watch(run, tmp_path / "out", once=True).events] == [100, 200]

    def test_that_are_all_that_is_left(self, run: Path, tmp_path: Path) -> None:
        watch(run, tmp_path / "out", once=True)
        save_last(run)
        for step in (100, 200):
            shutil.rmtree(run / f"checkpoint-{step}")
        assert watch(run, tmp_path / "out", once=True).events == ()
        with pytest.raises(UsageError, match="one checkpoint, not a run"):
            watch(run, tmp_path / "new", once=True)

    def test_where_the_first_step_is_being_written(self, run: Path, tmp_path: Path) -> None:
        save_last(run)
        for step in (100, 200):
            shutil.rmtree(run / f"checkpoint-{step}")
        (run / "checkpoint-300").mkdir()
        (run / "checkpoint-300" / "config.json").write_text("{}")
        assert watch(run, tmp_path / "out", once=True).waiting == {str(run): {300: "no weights were recognised in this step folder"}}

    def test_a_config_alone_is_none(self, run: Path, tmp_path: Path) -> None:
        shutil.copy2(run / "checkpoint-200" / "config.json", run)
        assert watch(run, tmp_path / "out", once=True).notes == ()
