"""What is told of a checkpoint on this machine is told of one in a store, and what is recorded of it leads there again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli import urls
from ckpt_cli.errors import CkptError, CorruptFile, UsageError
from tests import tiny
from tests.remote.stores import Bucket, Proxy
from tests.remote.test_other_doors import fill

fsspec = pytest.importorskip("fsspec")


def test_a_step_that_is_a_copy_of_the_one_before(tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    for step in (1, 2):
        tiny.verl(tmp_path / "run", tiny.weights(step), tiny.unknown(), step=step)
    file = Path("actor", "model_world_size_1_rank_0.pt")
    other = bucket.fill(tmp_path / "run", "other")
    shutil.copy(tmp_path / "run" / "global_step_1" / file, tmp_path / "run" / "global_step_2" / file)
    same = bucket.fill(tmp_path / "run", "same")
    found = {path: {note.code for note in ckpt_cli.detect(path).checkpoint.notes} for path in (other, same)}
    assert {path for path, codes in found.items() if "other-step" in codes} == {same}


def test_an_average_records_addresses(tmp_path: Path, memory: Any) -> None:
    addresses = [fill(memory, tiny.folder(tmp_path / name, tiny.weights(seed), tiny.classless()), name) for seed, name in enumerate("ab")]
    ckpt_cli.average(addresses, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "ckpt-manifest.json").read_text())
    assert [source["path"] for source in manifest["averaged"]] == addresses
    again = ckpt_cli.average([*addresses, tmp_path / "out"], tmp_path / "again", dry_run=True)
    assert "counted-twice" in {note.code for note in again.outputs[0].notes}


class TestABaseInAStore:
    @pytest.fixture
    def merged(self, tmp_path: Path, memory: Any) -> Path:
        base = fill(memory, tiny.folder(tmp_path / "base", tiny.weights(1), tiny.unknown()), "base")
        ckpt_cli.merge(tiny.adapter(tmp_path / "adapter", tiny.factors(), base), tmp_path / "out", base=base)
        return tmp_path / "out"

    def test_is_found_again_by_the_manifest(self, merged: Path) -> None:
        result = ckpt_cli.verify(merged, against=merged.parent / "adapter")
        assert [source.identical for source in result.against] == [True]

    def test_is_not_asked_for_unless_it_was_named(self, merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(urls, "_given", {})
        with pytest.raises(UsageError, match="not for a manifest to decide") as error:
            ckpt_cli.verify(merged, against=merged.parent / "adapter")
        assert error.value.hint == "pass --base memory://base"
        assert ckpt_cli.verify(merged, against=merged.parent / "adapter", base="memory://base").against[0].identical


def test_a_download_that_did_not_finish(tmp_path: Path, memory: Any) -> None:
    model = tiny.folder(tmp_path / "model", tiny.weights(1), tiny.classless(), {"vocab.json": {}, ".merges.txt.Xa3bQz": "a b"})
    found = {note.text for note in ckpt_cli.detect(fill(memory, model, "model")).checkpoint.notes if note.code == "unfinished-download"}
    assert [text for text in found if "merges.txt is not there, only .merges.txt.Xa3bQz" in text]


def test_a_damaged_record_stays_damaged(tmp_path: Path, memory: Any) -> None:
    """Who samples a file passes over errors; who reads it afterwards meets them again, with the name of the file."""
    file = tiny.verl(tmp_path / "run", tiny.weights(1), tiny.classless()) / "model_world_size_1_rank_0.pt"
    data = bytearray(file.read_bytes())
    place = data.index(b"/data/5", data.index(b"PK\x03\x04"))
    data[place + 1] ^= 0xFF
    file.write_bytes(data)
    with ckpt_cli.open(fill(memory, tmp_path / "run", "run")) as checkpoint:
        read = [name for name in checkpoint if not isinstance(attempt(checkpoint[name].numpy), CorruptFile)]
        (name,) = [name for name in checkpoint if name not in read]
        again = attempt(checkpoint[name].numpy)
    assert isinstance(again, CorruptFile)
    assert str(again.path).endswith(f"run/global_step_1/actor/{file.name}")


def attempt(read: Callable[[], object]) -> object:
    try:
        return read()
    except CkptError as error:
        return error
