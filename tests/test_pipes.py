"""Pipes given as paths, as a shell does for ``<(command)``: documents come through, weights are refused with what helps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.errors import CorruptFile, NotFound, Unreadable
from ckpt_cli.files.streams.pipes import piped
from tests import tiny
from tests.tensors import load


@contextmanager
def through(content: bytes) -> Iterator[str]:
    """The path of a pipe with a short content, whose other end is closed."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    try:
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)


@pytest.mark.parametrize("rules", [b'{"model.norm.weight": "norm.weight"}', b'[[rules]]\nmatch = "model.norm.weight"\nto = "norm.weight"'])
def test_rules_come_through(tmp_path: Path, rules: bytes) -> None:
    folder = tiny.folder(tmp_path / "model", tiny.weights())
    with through(rules) as path:
        ckpt_cli.merge(folder, tmp_path / "out", key_map=(path,), names="native", allow_missing=("model.norm.weight",))
    assert "norm.weight" in load(tmp_path / "out")
    with pytest.raises(NotFound, match="came through a pipe"):
        ckpt_cli.verify(tmp_path / "out", against=folder)
    (tmp_path / "rules").with_suffix(".json").write_text('{"model.norm.weight": "norm.weight"}')
    checked = ckpt_cli.verify(tmp_path / "out", against=folder, key_map=(tmp_path / "rules.json",))
    assert checked.exit_code == 0


def test_parts_come_through(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model", tiny.weights())
    first, second = (ckpt_cli.verify_part(folder, f"{at}/2", full=True).model_dump_json().encode() for at in (0, 1))
    with through(first) as one, through(second) as other:
        result = ckpt_cli.verify(folder, gather=(one, other))
    assert result.exit_code == ckpt_cli.verify(folder, full=True).exit_code
    with through(json.dumps({"no": "part"}).encode()) as one, pytest.raises(CorruptFile, match="not what verify"):
        ckpt_cli.verify(folder, gather=(one,))


def test_a_document_has_a_limit() -> None:
    with through(b"12345") as path, pytest.raises(CorruptFile, match="more comes through"):
        piped(path, 4)
    with through(b"12345") as path:
        assert piped(path, 5) == piped(path, 5) == b"12345"


def test_weights_and_bases_are_refused(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model", tiny.weights())
    os.mkfifo(tmp_path / "pipe")
    with through(b"") as path:
        for given in (path, str(tmp_path / "pipe")):
            with pytest.raises(Unreadable, match="this is a pipe") as caught:
                ckpt_cli.merge(given, tmp_path / "out")
            assert caught.value.hint == "write it to a file first, and pass that"
            with pytest.raises(Unreadable, match="this is a pipe"):
                ckpt_cli.merge(folder, tmp_path / "out", base=given)
    with (folder / "model.safetensors").open("rb") as file, pytest.raises(Unreadable, match="open descriptor"):
        ckpt_cli.merge(f"/dev/fd/{file.fileno()}", tmp_path / "out")
    with pytest.raises(Unreadable, match="named pipe"):
        ckpt_cli.merge(folder, tmp_path / "out", key_map=(str(tmp_path / "pipe"),))
