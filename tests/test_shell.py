"""Words of command lines: bash reads what is printed as what was meant."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_cli import shell
from ckpt_cli.cli import _run
from ckpt_cli.names import printable
from tests.test_next_lines import HEAD, ROOT

BYTES = st.binary(min_size=1, max_size=20).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"\n")))
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)
NAMES = TEXTS | BYTES | st.sampled_from(["", "-x", "~", "$HOME", "a'b", "$'a'", "\\n", "a\nb", "\x1b[31m", "é\u202e1", "!x", "s3:/run"])


def read_by_bash(line: str) -> list[bytes]:
    """The words of a line, as bash hands them to a command."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], check=True, capture_output=True)
    return done.stdout.split(b"\0")[:-1]


@settings(max_examples=25, deadline=None)
@given(words=st.lists(NAMES, min_size=1, max_size=20))
def test_bash_reads_the_same_bytes(words: list[str]) -> None:
    line = shell.join(words)
    assert printable(line) == line
    assert read_by_bash(line) == [os.fsencode(word) for word in words]


@given(words=st.lists(NAMES))
def test_lines_are_split_into_their_words(words: list[str]) -> None:
    assert shell.split(shell.join(words)) == words


@given(word=NAMES.filter(lambda word: printable(word) == word))
def test_plain_words_are_quoted_as_everywhere(word: str) -> None:
    assert shell.word(word) == shlex.quote(word)


@given(name=NAMES)
def test_a_path_is_no_option_and_no_address(name: str) -> None:
    (text,) = shell.split(shell.path(name))
    assert not text.startswith("-")
    assert os.path.normpath(text) == os.path.normpath(name)


@pytest.mark.parametrize("name", ["-lr=1", "two\nlines", "tab\tx", os.fsdecode(b"bad\xff"), "s3:", "\x1b[31mred", "it's a run"])
def test_what_is_proposed_for_a_run_of_any_name_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).symlink_to(ROOT / "examples" / "tiny-run" / "checkpoint-100")
    monkeypatch.chdir(tmp_path)
    assert _run(["merge", f"./{name}", "--dry-run"]) == 0
    (line,) = (said.removeprefix(HEAD) for said in capsys.readouterr().err.splitlines() if said.startswith(HEAD))
    assert read_by_bash(line) == [b"ckpt", b"merge", os.fsencode(f"./{name}")]
    assert _run(["detect", f"./{name}"]) == 0
    (line,) = (said.removeprefix(HEAD) for said in capsys.readouterr().err.splitlines() if said.startswith(HEAD))
    assert _run([os.fsdecode(word) for word in read_by_bash(line)[1:]]) == 0


def test_a_name_that_differs_in_what_cannot_be_seen_is_proposed_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two\nlines").mkdir()
    monkeypatch.chdir(tmp_path)
    assert _run(["detect", "two\\nlines"]) == 3
    assert "did you mean $'two\\nlines'?" in capsys.readouterr().err
