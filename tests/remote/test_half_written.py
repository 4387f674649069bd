"""Outputs whose publication was interrupted: no command takes them for a model, wherever they lie by now."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.errors import CkptError, IncompleteError, NotWritable
from ckpt_cli.files.manifest import NAME, PUBLISHING, publishing
from ckpt_cli.output.sinks.in_store import FolderInStore
from tests import tiny
from tests.remote.stores import Bucket, Fault, Proxy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("made") / "model", tiny.weights(1), tiny.unknown())


@pytest.fixture(scope="module")
def half(model: Path) -> Path:
    """Everything but a tokenizer and the manifest has its name; the names are those that a killed run left."""
    folder = model.parent / "half"
    ckpt_cli.merge(model, folder)
    names = [path.name for path in folder.iterdir()]
    for name in ("tokenizer.json", NAME):
        (folder / name).unlink()
    (folder / PUBLISHING).write_text(json.dumps(publishing(names, "0")))
    return folder


READING: dict[str, Callable[[Any, Path, Path], object]] = {
    "inspect": lambda half, model, out: ckpt_cli.inspect(half),
    "verify": lambda half, model, out: ckpt_cli.verify(half),
    "verify --against": lambda half, model, out: ckpt_cli.verify(model, against=half),
    "verify half --against": lambda half, model, out: ckpt_cli.verify(half, against=model),
    "merge": lambda half, model, out: ckpt_cli.merge(half, out),
    "merge --base": lambda half, model, out: ckpt_cli.merge(model, out, base=half, dtype="base"),
    "average": lambda half, model, out: ckpt_cli.average([model, half], out),
    "diff": lambda half, model, out: ckpt_cli.diff(model, half),
    "open": lambda half, model, out: ckpt_cli.open(half),
}


@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize("place", ["disk", "store"])
def test_no_command_reads_it(command: str, place: str, half: Path, model: Path, tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    where = half if place == "disk" else bucket.fill(half, "half")
    with pytest.raises(IncompleteError, match="this output is not whole") as caught:
        READING[command](where, model, tmp_path / "out")
    assert caught.value.path == str(where)
    assert caught.value.hint == "wait for the run that writes it, or run its command again"
    assert not (tmp_path / "out").exists()


def test_detect_says_so(half: Path) -> None:
    found = ckpt_cli.detect(half)
    assert "this output is not whole" in found.model_dump_json()


@pytest.mark.parametrize("kept", [[], ["tokenizer_config.json"], [NAME, "config.json", "model.safetensors"]], ids=str)
def test_whatever_is_there_by_then(kept: list[str], model: Path, half: Path, tmp_path: Path) -> None:
    """Nothing that is recognised yet, or a manifest of another run that ended."""
    folder = tmp_path / "half"
    folder.mkdir()
    ckpt_cli.merge(model, tmp_path / "whole")
    for name in kept:
        shutil.copy(tmp_path / "whole" / name, folder)
    shutil.copy(half / PUBLISHING, folder)
    with pytest.raises(IncompleteError, match="this output is not whole"):
        ckpt_cli.merge(folder, tmp_path / "out")


def test_the_hint_is_true(model: Path, store: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, impatient: None) -> None:
    """The command that was interrupted makes it whole, without --overwrite."""
    address = f"s3://{bucket.name}/out"
    with monkeypatch.context() as killed:
        killed.setattr(FolderInStore, "withdraw", lambda self: None)
        store.faults.append(Fault("tokenizer.json", 99, status=403, method="PUT"))
        with pytest.raises(NotWritable):
            ckpt_cli.merge(model, address)
        store.faults.clear()
    assert {PUBLISHING, "model.safetensors"} <= set(bucket.names("out/"))
    with pytest.raises(CkptError, match="this output is not whole"):
        ckpt_cli.verify(address)
    ckpt_cli.merge(model, address)
    assert ckpt_cli.verify(address, against=model).against[0].identical
    assert PUBLISHING not in bucket.names("out/")
