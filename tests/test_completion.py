"""Completion in the real shells, through a pseudo-terminal: a key is pressed, and what the shell then runs is looked at."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt_cli.cli.words.scripts import SCRIPTS
from tests.cli import ROOT, ckpt

PRESSED = {
    "ckpt mer\t": "merge",
    "unshard extr\t": "extract-state",
    "ckpt merge run --dty\tbf\t": "merge run --dtype bf16",
    "ckpt merge run --dtype=bf\t": "merge run --dtype=bf16",
    "ckpt merge run --names na\t": "merge run --names native",
    "ckpt merge run --type e\t": "merge run --type ema",
    "ckpt merge run --step 1\t": "merge run --step 100",
    "unshard average run --method post\t": "average run --method posthoc-ema",
    "unshard average run --last 2 --dtype f\t3\t": "average run --last 2 --dtype fp32",
    "ckpt merge ru\t": "merge run/",
}
"""What is typed, TAB included, and the words of the command that the shell then runs."""

STARTS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-d", "-i"],
    "fish": ["fish", "-i"],
}
READY = {
    "bash": "source {scripts}/ckpt.bash; PS1='ready$ '\n",
    "zsh": "fpath=({scripts} $fpath); autoload -Uz compinit; compinit -u -d {home}/dump; PS1='ready$ '\n",
    "fish": "source {scripts}/ckpt.fish; function fish_prompt; printf 'ready$ '; end\n",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a run, and with commands that complete as they should, and otherwise say how they were called."""
    shutil.copytree(ROOT / "examples" / "tiny-run", tmp_path / "run")
    (tmp_path / "bin").mkdir()
    for name in ("ckpt", "unshard"):
        path = tmp_path / "bin" / name
        real = f"PYTHONPATH={ROOT} exec {sys.executable} -m ckpt_cli"
        path.write_text(f'#!/bin/sh\n[ -n "$_CKPT_COMPLETE" ] && {real} "$@"\necho "called: <$*>"\n')
        path.chmod(0o755)
    return tmp_path


class Shell:
    """A shell on a terminal of its own."""

    def __init__(self, name: str, home: Path) -> None:
        kept = ("PATH", "LD_LIBRARY_PATH", "FPATH", "LANG")
        environment = {key: os.environ[key] for key in kept if key in os.environ} | {
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "HOME": str(home),
            "ZDOTDIR": str(home),
            "TERM": "dumb" if name == "fish" else "xterm",
            "COLUMNS": "100",
        }
        # A process of its own gives the shell a terminal that it controls.
        spawn = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *STARTS[name]]
        self._process = subprocess.Popen(spawn, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=home, env=environment, bufsize=0)
        self.press(READY[name].format(scripts=ROOT / "completions", home=home))
        self.wait_for("ready$ ")

    def press(self, keys: str) -> None:
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), keys.encode())

    def wait_for(self, text: str, seconds: float = 30) -> str:
        """All output until ``text`` is there."""
        seen, end = "", time.monotonic() + seconds
        while text not in seen:
            if not self._comes(max(end - time.monotonic(), 0)):
                pytest.fail(f"{text!r} did not come within {seconds} s: {seen!r}")
            seen += self._read()
        return seen

    def quiet(self, seconds: float) -> None:
        """Wait until nothing more comes."""
        while self._comes(seconds):
            self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)

    def _comes(self, seconds: float) -> bool:
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def _read(self) -> str:
        assert self._process.stdout is not None
        return os.read(self._process.stdout.fileno(), 65536).decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize("shell", SCRIPTS)
def test_every_shell_completes_from_the_first_tab_on(shell: str, home: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for typed, words in PRESSED.items():
        # A new shell each time: the first TAB is one that people press.
        running = Shell(shell, home)
        try:
            for keys in typed.split("\t")[:-1]:
                running.press(keys + "\t")
                running.quiet(2.0)
            running.press("\r")
            called = running.wait_for(">").split("called: <")[-1].split(">")[0]
        finally:
            running.close()
        # zsh takes the slash of a folder away again when the line is run.
        assert called.strip().rstrip("/") == words.rstrip("/"), typed


@pytest.mark.parametrize(
    ("typed", "listed"),
    [
        ("ckpt ", {"detect", "inspect", "merge", "average", "publish", "watch", "extract-state", "verify", "diff", "show", "scan", "env"}),
        ("ckpt merge run --dtype ", {"keep", "fp32", "bf16", "fp16", "base"}),
        ("ckpt merge run --type ", {"model", "ema", "both", "all"}),
        ("ckpt merge run --step ", {"200", "100", "latest"}),
        ("ckpt average run --from ", {"200", "100", "latest"}),
        ("ckpt average run --method ", {"uniform", "weighted", "linear", "ema", "wsm", "posthoc-ema"}),
        ("ckpt average run --decay-shape ", {"linear", "cosine", "1-sqrt"}),
        ("ckpt merge run --lora ", {"fuse", "export", "both", "keep"}),
        ("ckpt merge run --shard-order ", {"auto", "tp-first", "left-to-right"}),
        ("ckpt merge nothing --type ", {"model", "ema", "both", "all"}),
        ("ckpt merge ", set()),
        ("ckpt merge run --o", {"--output", "--overwrite"}),
        ("ckpt merge run --target", set()),
    ],
)
def test_values_are_listed(typed: str, listed: set[str], home: Path) -> None:
    outcome = ckpt(
        cwd=home, _CKPT_COMPLETE="complete_fish", _TYPER_COMPLETE_FISH_ACTION="get-args", _TYPER_COMPLETE_ARGS=typed, HOME=str(home)
    )
    assert {line.split("\t")[0] for line in outcome.out.splitlines() if line} == listed


class TestInstalling:
    def test_puts_the_script_where_the_shell_reads_it(self, tmp_path: Path) -> None:
        for shell, place in (("bash", ".bashrc"), ("zsh", ".zshrc")):
            for _ in range(2):
                assert ckpt("--install-completion", shell, HOME=str(tmp_path), XDG_DATA_HOME="", XDG_CONFIG_HOME="").code == 0
            (line,) = (tmp_path / place).read_text().splitlines()
            assert Path(line.removeprefix("source ")).read_text() == SCRIPTS[shell]
        assert ckpt("--install-completion", "fish", HOME=str(tmp_path), XDG_CONFIG_HOME="").code == 0
        assert (tmp_path / ".config" / "fish" / "completions" / "unshard.fish").read_text() == SCRIPTS["fish"]

    def test_is_for_the_own_shell_where_none_is_named(self, tmp_path: Path) -> None:
        assert ckpt("--install-completion", SHELL="/usr/bin/zsh", HOME=str(tmp_path), XDG_DATA_HOME="").code == 0
        assert (tmp_path / ".zshrc").exists()
        assert ckpt("--show-completion", SHELL="/bin/bash").out == SCRIPTS["bash"]

    @pytest.mark.parametrize("typed", [["--help"], ["bash", "--help"], ["-h"]], ids=str)
    def test_help_installs_nothing(self, tmp_path: Path, typed: list[str]) -> None:
        for option in ("--install-completion", "--show-completion"):
            asked = ckpt(option, *typed, SHELL="/bin/bash", HOME=str(tmp_path), XDG_DATA_HOME="")
            assert (asked.code, asked.out.split()[:2]) == (0, ["Usage:", "ckpt"])
        assert not (tmp_path / ".bashrc").exists()

    def test_keeps_what_the_file_holds(self, tmp_path: Path) -> None:
        (tmp_path / ".bashrc").write_text("alias l=ls\n")
        assert ckpt("--install-completion", "bash", HOME=str(tmp_path), XDG_DATA_HOME="").code == 0
        assert (tmp_path / ".bashrc").read_text().startswith("alias l=ls\nsource ")
