"""What a long command shows while it works: on a terminal, in a log, for programs."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from ckpt_cli.cli import live
from ckpt_cli.cli.session import Session
from ckpt_cli.commands.merge import merge
from ckpt_cli.commands.scan import scan
from ckpt_cli.hub.classes.transformers_child import _waited_for
from ckpt_cli.progress import shown_on
from tests.cli import ROOT, ckpt


def on_a_terminal(*arguments: str | Path, columns: int = 80, **environment: str) -> str:
    """All that a command writes to a terminal."""
    child, parent = pty.openpty()[::-1]
    code = "import ckpt_cli.cli.live as live; live.PATIENCE = live.OFTEN = 0; from ckpt_cli.cli import main; main()"
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**clean, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "TERM": "xterm-256color", **environment},
    )
    os.close(child)
    written = b""
    while True:
        try:
            block = os.read(parent, 65536)
        except OSError:  # the other side is closed
            break
        if not block:
            break
        written += block
    os.close(parent)
    assert process.wait(timeout=60) == 0, written
    return written.decode()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A model in twelve files."""
    folder = tmp_path / "model"
    folder.mkdir()
    names = [f"model-{number:05d}-of-00012.safetensors" for number in range(1, 13)]
    for number, name in enumerate(names):
        save_file({f"layers.{number}.mlp.weight": numpy.ones((64, 64), numpy.float32)}, folder / name)
    placed = {f"layers.{number}.mlp.weight": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


class TestATerminal:
    def test_counts_files_then_bytes_and_leaves_nothing_behind(self, shards: Path, tmp_path: Path) -> None:
        written = on_a_terminal("merge", shards, "-o", tmp_path / "out", "--names", "native")
        assert "reading 12 of 12 files" in written
        assert re.search(r"model\.safetensors +\S.* 100%", written)
        # Whatever was shown was erased: the reading line, and the bar.
        assert written.rindex("\x1b[2K") < written.index("checkpoint")
        assert "\x1b[31m" not in written  # nothing of it is an error

    @pytest.mark.parametrize("columns", [60, 80, 100])
    def test_a_bar_is_one_line_of_the_same_layout(self, shards: Path, tmp_path: Path, columns: int) -> None:
        written = on_a_terminal("merge", shards, "-o", tmp_path / "out", "--names", "native", columns=columns, NO_COLOR="1")
        bars = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", written) if "%" in line and " of " in line]
        assert bars
        assert max(map(len, bars)) <= columns
        assert len({line.index(" of ") for line in bars}) == 1

    def test_that_can_do_nothing_gets_plain_lines(self, shards: Path, tmp_path: Path) -> None:
        written = on_a_terminal("merge", shards, "-o", tmp_path / "out", "--names", "native", TERM="dumb")
        assert re.match(r"(reading [0-9]+ of 12 files\r\n)+checkpoint  ", written)
        assert "\x1b" not in written


def test_reading_is_not_mentioned_before_it_takes_long(shards: Path, tmp_path: Path) -> None:
    outcome = ckpt("merge", shards, "-o", tmp_path / "out", "--names", "native")
    assert outcome.code == 0
    assert not re.search("reading [0-9]", outcome.err)


def test_programs_get_totals_first_one_event_a_second_and_a_summary(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "PATIENCE", 0)
    monkeypatch.setattr(live.JsonLines, "every", 0.0)
    shown = live.make_progress(Session("merge", progress="json"))
    merge(shards, tmp_path / "out", names="native", progress=shown)
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    kinds = [event["event"] for event in events]
    assert list(dict.fromkeys(kinds)) == ["reading", "start", "progress", "flushing", "summary"]
    assert kinds.count("start") == kinds.count("summary") == 1
    assert (events[0]["files"], events[0]["total_files"]) == (1, 12)
    summary = events[-1]
    assert summary["done"] == summary["total"] == next(event["total"] for event in events if event["event"] == "start") == 12 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("plain", "asking transformers for Model\n"),
        ("json", '{"event": "waiting", "what": "asking transformers for Model"}\n'),
        ("off", ""),
    ],
)
def test_another_process_that_takes_long_is_told_of(
    mode: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PATIENCE", 0.2)
    monkeypatch.setattr(live.JsonLines, "every", 10.0)
    command = [sys.executable, "-c", "import time; time.sleep(1); print('answer')"]
    shown = live.make_progress(Session("merge", progress=mode))  # type: ignore[arg-type]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child, shown_on(shown):
        assert _waited_for(child, "asking transformers for Model") == "answer\n"
    assert capsys.readouterr().err == said


def test_a_log_of_reading_does_not_end_in_its_middle(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come now and then: what came after the last one is told at the end, but only where one was told."""
    for patience, said in ((0.0, "reading 1 of 3 files\nreading 3 of 3 files\n"), (60.0, "")):
        monkeypatch.setattr(live, "PATIENCE", patience)
        shown = live.make_progress(Session("scan", progress="plain"))
        for done in (1, 2, 3):
            shown.reading(done, 3, "files")
        shown.finish()
        shown.finish()
        assert capsys.readouterr().err == said


def test_a_scan_reads_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.pkl", "b.pkl", "c.txt"):
        (tmp_path / name).write_bytes(b"N.")
    monkeypatch.setattr(live, "PATIENCE", 0)
    shown = live.make_progress(Session("scan", progress="plain"))
    scan(tmp_path, progress=shown)
    shown.finish()
    assert capsys.readouterr().err.splitlines()[-1] == "reading 3 of 3 files"


def test_a_child_that_never_ends_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child.TIMEOUT", 0.2)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(subprocess.TimeoutExpired), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        _waited_for(child, "asking transformers for Model")
    assert child.returncode < 0


@pytest.mark.slow
def test_a_terminal_is_told_that_transformers_is_asked(tmp_path: Path) -> None:
    written = on_a_terminal("merge", ROOT / "examples" / "tiny-run", "-o", tmp_path / "out", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "asking transformers for Qwen3ForCausalLM" in written
    assert written.rindex("\x1b[2K") < written.index("complete ")


def test_events_of_many_threads_are_whole_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.JsonLines, "every", 0.0)
    shown = live.JsonLines()
    shown.start(4000, "a")
    threads = [threading.Thread(target=lambda: [shown.advance(1, "a") for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shown.finish()
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (events[0]["event"], events[-1]["event"], events[-1]["done"]) == ("start", "summary", 4000)
