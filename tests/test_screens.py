"""What people see, kept as golden files: each screen at 80 and 120 columns and in a pipe."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ckpt_cli.cli import session
from ckpt_cli.cli.screens.inspect import detect_result, inspect_result
from ckpt_cli.cli.screens.verify import verify_result
from ckpt_cli.cli.screens.written import average_result, extract_result, merge_result
from ckpt_cli.commands.average import average
from ckpt_cli.commands.extract_state import extract_state
from ckpt_cli.commands.inspect import detect, inspect
from ckpt_cli.commands.merge import merge
from ckpt_cli.commands.verify import verify
from tests.cli import ROOT

EXAMPLE = ROOT / "examples" / "tiny-run"
GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (80, 120, None)


class Terminal(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def screen(monkeypatch: pytest.MonkeyPatch, width: int | None, show: Any) -> str:
    """What ``show(session)`` prints, without colour, both streams in one."""
    stream = Terminal(width is not None)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", str(width or 80))
    monkeypatch.setenv("TERM", "xterm")
    show(session.Session("test", color="never", verbose=True))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("width", WIDTHS, ids=str)
class TestScreens:
    @pytest.fixture(autouse=True)
    def beside_the_run(self, layouts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run with odd tensors: replicas, padded shards, a counter, one that is tied."""
        monkeypatch.chdir(layouts / "lmms-run")

    def check(self, name: str, width: int | None, text: str) -> None:
        text = re.sub(r"[\d.]+ [GT]B free", "# GB free", text)
        text = re.sub(r"at most about [\d.]+ MB", "at most about # MB", text)
        text = re.sub(r" in [\d.]+ s( \(.*?/s\))?", " in # s", text)
        if width is not None:
            assert all(len(line) <= width for line in text.splitlines() if not line.startswith(("warning:", "note:", "next:")))
        path = GOLDEN / f"{name}-{width or 'pipe'}.txt"
        if os.environ.get("GOLDEN_UPDATE"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text()

    def test_detect(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = detect("run")
        self.check("detect", width, screen(monkeypatch, width, lambda s: detect_result(result, s)))

    def test_inspect(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = inspect("run")
        self.check("inspect", width, screen(monkeypatch, width, lambda s: inspect_result(result, s)))

    def test_dry_run(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = merge("run", type="ema", dtype="bf16", dry_run=True, max_shard_size=3000)
        self.check("dry-run", width, screen(monkeypatch, width, lambda s: merge_result(result, s)))

    def test_average(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = average("run", "averaged", everything=True, weights=(-0.25, 1.25), dtype="bf16", dry_run=True)
        text = screen(monkeypatch, width, lambda s: average_result(result, s))
        self.check("average", width, text)

    def test_extract_state(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = extract_state("run", optimizer=True, dry_run=True)
        text = screen(monkeypatch, width, lambda s: extract_result(result, s))
        self.check("extract-state", width, text)

    def test_verify(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = verify("run", full=True, base="run/checkpoint-100")
        text = screen(monkeypatch, width, lambda s: verify_result(result, s))
        self.check("verify", width, text)

    def test_verify_that_fails(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int | None) -> None:
        merge("run", tmp_path / "out", type="ema", dtype="bf16")
        path = tmp_path / "out" / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        config = tmp_path / "out" / "config.json"
        config.write_text(config.read_text().replace('"bfloat16"', '"float32"'))
        result = verify(tmp_path / "out", full=True, against="run").model_copy(update={"path": "tiny-ema"})
        text = screen(monkeypatch, width, lambda s: verify_result(result, s))
        self.check("verify-failed", width, text)
