"""Values in the command of a watch: one word, or a part of one, in whatever quotes of the shell they stand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.errors import UsageError
from ckpt_cli.watching.evaluation import run_command
from ckpt_cli.watching.placeholders import placeholders, uses
from tests.cli import ckpt
from tests.test_watch import ONCE, run  # noqa: F401

ODD = "/tmp/a {step} {run} b; touch $(echo x) 'q' \"d\" `e` \\n * #"
SHOW = f"{sys.executable} -c 'import json, sys; print(json.dumps({{\"words\": sys.argv[1:]}}))'"


def words(command: str, output: str, tmp_path: Path) -> list[str]:
    """What a program gets as its arguments; in a command it is called SHOW."""
    (tmp_path / "show").write_text(f'#!/bin/sh\nexec {SHOW} "$@"\n')
    (tmp_path / "show").chmod(0o755)
    ran = run_command(command.replace("SHOW", str(tmp_path / "show")), Path(output), 7, tmp_path, lambda _: None)
    assert ran.exit_code == 0
    assert ran.metrics is not None
    return list(ran.metrics["words"])


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("SHOW {output} {step}", ["O", "7"]),
        ('SHOW "{output}"', ["O"]),
        ("SHOW '{output}'", ["O"]),
        ("SHOW 'pretrained={output},dtype=bf16'", ["pretrained=O,dtype=bf16"]),
        ('SHOW --a="x {output}"/y b\'{output}\'{output}"{output}"', ["--a=x O/y", "bOOO"]),
        ('SHOW "it\'s {output}" \'"{output}"\'', ["it's O", '"O"']),
        ("SHOW it\\'s {output}", ["it's", "O"]),
        ('SHOW "\\"{output}\\""', ['"O"']),
        ('SHOW "$(echo x; basename -- "$CKPT_STEP")" "{output}"', ["x\n7", "O"]),
        ('SHOW "$(printf %s {output})" "$(printf %s "{output}")" "$(printf %s \'{output}\')"', ["O", "O", "O"]),
        ('X={output} && SHOW "$X"; # isn\'t it\n:', ["O"]),
        ("# it's one\nSHOW {output}", ["O"]),
        ('(SHOW "{output}")', ["O"]),
        ('{ SHOW "{output}"; }', ["O"]),
        ("X=`printf %s {output}`; SHOW \"$X\" '{output}'", ["O", "O"]),
        ("cat >/dev/null <<'EOF'\nit's\nEOF\nSHOW \"{output}\"", ["O"]),
        ('output=mine; SHOW ${output} "${output}" {output}', ["mine", "mine", "O"]),
        ("sh -c 'SHOW \"$CKPT_OUTPUT\"'", ["O"]),
        ("sh -c 'SHOW \"$1\"' name {output}", ["O"]),
        ("SHOW -c {output}", ["-c", "O"]),
        ("test ! -e {output} && SHOW \\\n{output}", ["O"]),
        ("SHOW ${CKPT_NOTHING:-it} '{output}'", ["it", "O"]),
        ("SHOW $((1 + 2)) {output}", ["3", "O"]),
        ("case {step} in 7) SHOW '{output}';; esac", ["O"]),
    ],
)
@pytest.mark.parametrize("output", ["/tmp/plain-1.0", ODD], ids=["plain", "odd"])
def test_are_what_they_are_in_any_quotes(command: str, expected: list[str], output: str, tmp_path: Path) -> None:
    assert words(command, output, tmp_path) == [each.replace("O", output) for each in expected]


CODE = [
    "sh -c 'SHOW {output}'",
    'bash -lc "SHOW {output}"',
    "env A=1 sh -c 'SHOW {output}'",
    "(sh -c 'SHOW {output}')",
    'X=$(sh -c "SHOW {output}"); echo "$X"',
    "eval SHOW {output}",
    "eval 'SHOW {output}'",
    "sh <<EOF\nSHOW {output}\nEOF",
    "sh -s <<'EOF'\nSHOW {output}\nEOF",
    "SHOW ${CKPT_NOTHING:-{output}}",
]


@pytest.mark.parametrize("command", CODE)
def test_code_gets_plain_paths_only(command: str, tmp_path: Path) -> None:
    assert words(command, "/tmp/plain-1.0", tmp_path) == ["/tmp/plain-1.0"]
    with pytest.raises(UsageError, match="stands in code that another program reads") as caught:
        words(command, "/tmp/a b", tmp_path)
    assert "as in sh -c 'ls \"$CKPT_OUTPUT\"'" in str(caught.value.hint)


@pytest.mark.parametrize(
    "command",
    [
        "ssh host eval.py {output}",
        "sbatch --wrap='eval.py {output}'",
        "python3 -c \"open('{output}')\"",
        "echo $'{output}'",
        "echo '{output}",
    ],
)
def test_more_code(command: str) -> None:
    assert [found.context for found in placeholders(command)] == ["code"]


@pytest.mark.parametrize(
    ("command", "used"), [("ls ${output}", False), ("ls $CKPT_OUTPUT", True), ("ls {step}", False), ("ls '{output}'", True)]
)
def test_whether_a_command_uses_the_output(command: str, used: bool) -> None:
    assert uses(command, "output") is used


def test_it_is_refused_before_anything_is_merged(run: Path, tmp_path: Path) -> None:  # noqa: F811
    home = tmp_path / "two words"
    with pytest.raises(UsageError, match="stands in code") as caught:
        ckpt_cli.watch(run, home, once=True, execute="sh -c 'ls {output}'")
    assert caught.value.path == str(home)
    assert not home.exists()
    hinted = "sh -c 'ls \"$CKPT_OUTPUT\"'"
    assert hinted in str(caught.value.hint)
    ran = ckpt_cli.watch(run, home, once=True, settle=0, since=200, execute=hinted)
    assert [event.exit_code for event in ran.events if event.event == "ran"] == [0]


def test_on_the_screen(run: Path, tmp_path: Path) -> None:  # noqa: F811
    done = ckpt("watch", run, "-o", tmp_path / "it's here", *ONCE, "--json", "--exec", 'ls "{output}/model.safetensors"')
    events = json.loads(done.out)["data"]["events"]
    assert [event.get("exit_code") for event in events if event["event"] == "ran"] == [0, 0]
