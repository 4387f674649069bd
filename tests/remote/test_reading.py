"""How much is asked of a store: requests, bytes, how many at a time, and how much of it is kept in memory."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.discover.open import open_checkpoint
from ckpt_cli.errors import CkptError, CorruptFile
from ckpt_cli.files.remote import source as remote
from ckpt_cli.files.source import Files
from ckpt_cli.tensors.reading import element_bytes
from ckpt_cli.urls import parsed
from tests.remote.stores import Bucket, Proxy

WIDTH, LAYERS = 256, 4


def state() -> dict[str, torch.Tensor]:
    """A model of some 8 MB, with tensors of several sizes."""
    made = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (4 * WIDTH, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}"
        shapes |= {f"{start}.self_attn.q_proj.weight": (WIDTH, WIDTH), f"{start}.input_layernorm.weight": (WIDTH,)}
        shapes |= {f"{start}.mlp.up_proj.weight": (3 * WIDTH, WIDTH), f"{start}.mlp.down_proj.weight": (WIDTH, 3 * WIDTH)}
    return {name: torch.randn(*shape, generator=made) for name, shape in shapes.items()}


NEEDED = sum(tensor.nbytes for tensor in state().values())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as safetensors, as a file of torch.save, as rank files with an optimizer beside, and as DCP with one inside."""
    folder, tensors = tmp_path_factory.mktemp("saved"), state()
    for name in ("safetensors", "torch", "ranks"):
        (folder / name).mkdir()
    save_file(tensors, folder / "safetensors" / "model.safetensors", {"format": "pt"})
    torch.save(tensors, folder / "torch" / "pytorch_model.bin")
    moments = {f"optimizer.{name}.exp_avg": tensor * 2 for name, tensor in tensors.items()}
    torch.save(tensors, folder / "ranks" / "model_world_size_1_rank_0.pt")
    torch.save(moments, folder / "ranks" / "optim_world_size_1_rank_0.pt")
    (folder / "ranks" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({**{f"model.{name}": t for name, t in tensors.items()}, **moments}, checkpoint_id=str(folder / "dcp"), no_dist=True)
    return folder


FORMATS = ["safetensors", "torch", "ranks", "dcp"]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_a_merge_fetches_what_it_needs(saved: Path, tmp_path: Path, kind: str, dtype: str, store: Proxy, bucket: Bucket) -> None:
    address = bucket.fill(saved / kind, kind)
    ckpt_cli.merge(address, tmp_path / "there", dtype=dtype)
    assert NEEDED <= store.sent() <= 1.05 * NEEDED
    assert store.of("optim") == []
    ckpt_cli.merge(saved / kind, tmp_path / "here", dtype=dtype)
    assert (tmp_path / "there" / "model.safetensors").read_bytes() == (tmp_path / "here" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["safetensors", "torch", "ranks"])
def test_inspecting_takes_three_requests(saved: Path, kind: str, store: Proxy, bucket: Bucket) -> None:
    address = bucket.fill(saved / kind, kind)
    ckpt_cli.inspect(address)
    weights = store.of(r"model.*\.(safetensors|bin|pt)$")
    assert 1 <= len(weights) <= 3
    assert sum(each.sent for each in weights) < NEEDED / 8
    assert store.of("optim") == []
    assert len(store.listings(f"{kind}/")) == 1


@pytest.mark.parametrize("command", [ckpt_cli.detect, ckpt_cli.inspect])
def test_a_catalogue_says_what_is_in_items(command: Callable[[object], Any], saved: Path, store: Proxy, bucket: Bucket) -> None:
    """26 tensors, far apart: looking into each would take a request."""
    address = bucket.fill(saved / "dcp", "dcp")
    there = command(address)
    assert len(store.of(r"\.distcp$")) == len(store.of(r"\.metadata$")) == 1
    assert store.sent(r"\.distcp$") < NEEDED / 8
    here, names = command(saved / "dcp"), (str(saved / "dcp"), address)
    texts = [re.sub(r'"seconds":[^,}]+', "", each.model_dump_json()) for each in (here, there)]
    assert texts[0].replace(names[0], "@") == texts[1].replace(names[1], "@")


@pytest.mark.parametrize(
    "layout",
    ["layouts/torchtitan/run", "layouts/olmo-core/run", "layouts/dcp-options/safetensors_items", "megatron/llama-main-tp2/checkpoint"],
)
def test_three_requests_for_each_file_of_a_run(data: Path, layout: str, store: Proxy, bucket: Bucket) -> None:
    """Objects that are looked at are fetched as a whole."""
    ckpt_cli.inspect(bucket.fill(data / layout, "run"))
    asked = Counter(each.key for each in store.of(r"\.distcp$"))
    assert asked
    assert max(asked.values()) <= 3


def test_values_of_an_item_are_still_found(saved: Path, store: Proxy, bucket: Bucket) -> None:
    """Where something reads them although they were not announced; what the item says is compared with the metadata then."""
    path = parsed(bucket.fill(saved / "dcp", "dcp"))
    assert path is not None
    with Files(values=False) as files:
        tensors = open_checkpoint(path.path, files).components[0].component.tensors
        assert len(tensors) == len(state())
        for name, held in tensors.items():
            tensor = state()[name.removeprefix("model.")]
            assert bytes(element_bytes(held)) == tensor.numpy().tobytes()
            assert bytes(element_bytes(held, 7, 50)) == tensor.numpy().reshape(-1)[7:57].tobytes()


def test_an_item_that_is_not_what_the_metadata_says(saved: Path, tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    """Whoever reads values looks into the items first."""
    shutil.copytree(saved / "dcp", tmp_path / "dcp")
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({f"model.{n}": t.double()[:1] for n, t in state().items()}, checkpoint_id=str(tmp_path / "other"), no_dist=True)
    path = next((tmp_path / "dcp").glob("*.distcp"))
    other = next((tmp_path / "other").glob("*.distcp")).read_bytes()
    path.write_bytes(other + path.read_bytes()[len(other) :])
    address = bucket.fill(tmp_path / "dcp", "dcp")
    assert ckpt_cli.inspect(address).checkpoint.components
    for place in (address, tmp_path / "dcp"):
        with pytest.raises(CkptError) as caught:
            ckpt_cli.merge(place, tmp_path / "out")
        assert caught.value.exit_code in (3, 4)
    with pytest.raises(CkptError):
        ckpt_cli.inspect(address, stats=True)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Room for a third of the weights. What was held, each time that something was added."""
    held: list[int] = []
    keep = remote.RemoteFiles.keep

    def kept(self: remote.RemoteFiles, source: remote.RemoteSource, block: remote.Block) -> None:
        keep(self, source, block)
        held.append(self._size)

    monkeypatch.setattr(remote.RemoteFiles, "keep", kept)
    for name, value in {"MEMORY": 3 << 20, "LARGEST": 128 << 10, "SMALLEST": 64 << 10, "HEAD": 16 << 10, "TAIL": 16 << 10}.items():
        monkeypatch.setattr(remote, name, value)
    return held


@pytest.mark.parametrize("kind", FORMATS)
def test_memory_is_bounded_and_nothing_is_fetched_twice(
    saved: Path, tmp_path: Path, kind: str, little_memory: list[int], store: Proxy, bucket: Bucket
) -> None:
    address = bucket.fill(saved / kind, kind)
    ckpt_cli.merge(address, tmp_path / "there", dtype="bf16")
    assert max(little_memory) <= (3 << 20) + remote.IN_FLIGHT * (128 << 10)
    assert store.sent() <= 1.05 * NEEDED
    ckpt_cli.merge(saved / kind, tmp_path / "here", dtype="bf16")
    assert (tmp_path / "there" / "model.safetensors").read_bytes() == (tmp_path / "here" / "model.safetensors").read_bytes()


def test_what_was_read_is_not_fetched_ahead_again(saved: Path, little_memory: list[int], store: Proxy, bucket: Bucket) -> None:
    """By a reader that is behind the others, when these have let go of it."""
    address = bucket.fill(saved / "safetensors", "x")
    with Files() as files:
        opened = files.source(ckpt_cli_path(f"{address}/model.safetensors"))
        ranges = [(start, start + (128 << 10)) for start in range(1 << 20, 7 << 20, 128 << 10)]
        opened.expect(ranges, exactly=True)
        for start, stop in ranges[24:] + ranges[:24]:
            opened.read(start, stop - start)
        time.sleep(0.3)
        assert store.sent() <= 1.05 * (6 << 20)


def test_many_requests_are_under_way(saved: Path, tmp_path: Path, little_memory: list[int], store: Proxy, bucket: Bucket) -> None:
    """Each takes a tenth of a second; one after the other they would take four."""
    address, lock, now, most = bucket.fill(saved / "torch", "torch"), threading.Lock(), [0], [0]

    def wait(_: str) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.1)
        with lock:
            now[0] -= 1

    store.before = wait
    ckpt_cli.merge(address, tmp_path / "out")
    assert len(store.of("torch")) >= 40
    assert 4 <= most[0] <= remote.IN_FLIGHT + 2


def test_headers_of_members_are_still_looked_at(saved: Path, tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    """Not when a file is opened, which would take a request each, but before anything behind them is used."""
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    data = bytearray((saved / "torch" / "pytorch_model.bin").read_bytes())
    place = data.index(b"pytorch_model/data/5", 30)
    data[place + len(b"pytorch_model/data/")] = ord("6")
    (damaged / "pytorch_model.bin").write_bytes(data)
    address = bucket.fill(damaged, "damaged")
    assert ckpt_cli.inspect(address).checkpoint.components
    for path in (damaged, address):
        with pytest.raises(CorruptFile, match="the local header of data/5 contradicts the zip directory"):
            ckpt_cli.merge(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_reads_at_any_place(saved: Path, store: Proxy, bucket: Bucket) -> None:
    """Without a word beforehand, across what is held already, and beyond the end."""
    address = bucket.fill(saved / "safetensors", "x")
    data = (saved / "safetensors" / "model.safetensors").read_bytes()
    with Files() as files:
        opened = files.source(ckpt_cli_path(f"{address}/model.safetensors"))
        assert opened.size == len(data)
        for start, length in ((0, 10), (len(data) - 7, 7), (200_000, 100_000), (1_000_000, 3), (1_000_003, 40_000), (5, 900_000), (9, 0)):
            assert opened.read(start, length) == data[start : start + length]
        opened.expect([(10_000, 1_500_000), (2_000_000, 2_000_100)])
        for start, length in ((2_000_050, 10), (0, 2_100_000), (1_499_990, 20)):
            assert opened.read(start, length) == data[start : start + length]
        with pytest.raises(CorruptFile, match="the file ends at byte"):
            opened.read(len(data) - 3, 4)


def ckpt_cli_path(address: str) -> Path:
    from ckpt_cli.given import path_of

    return path_of(address)
