"""Configs that a DCP folder in a store holds: dozens of objects, which several ranks may share among their files."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_cli
from ckpt_cli.formats.dcp import reader
from tests.remote.stores import Bucket, Proxy


@pytest.mark.filterwarnings("ignore")  # torch: there is no process group
@pytest.mark.parametrize("files", [1, 6])
def test_they_take_a_request_per_file_and_all_at_once(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Proxy, bucket: Bucket
) -> None:
    config = {"model_type": "strange", "hidden_size": 8, "vocab_size": 64, **{f"entry_{number}": number for number in range(60)}}
    kept = {"config": {"content": config, "class": "strange.Model"}}
    # Other objects before them, and weights behind: what is read to open a file holds none of them.
    before = {f"other_{number}": "x" * (150 << 10) for number in range(2 * files)}
    weights = {f"model.{number}.weight": torch.ones(256, 256) for number in range(files)}
    model = {"model.embed_tokens.weight": torch.ones(64, 8), **weights}
    state = {"before": before, "model": model, "integrations": {"huggingface": {"model": kept}}}
    writer = dcp.FileSystemWriter(tmp_path / "run" / "ep1-ba100", thread_count=files)
    dcp.save({"state": state}, storage_writer=writer)
    lock, now, most, asked, of_catalog = threading.Lock(), [0], [0], [0], reader.configs_among

    def wait(_: str) -> None:
        with lock:
            now[0] += 1
            asked[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1

    def watched(*given: Any) -> Any:
        store.before = wait
        try:
            return of_catalog(*given)
        finally:
            store.before = None

    monkeypatch.setattr(reader, "configs_among", watched)
    result = ckpt_cli.inspect(bucket.fill(tmp_path / "run", "run"))
    assert [note.code for note in result.checkpoint.notes if note.code.startswith("config")] == ["config-made"]
    assert asked[0] == files
    assert most[0] >= min(files, 4)
