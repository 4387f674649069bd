"""Two runs that write to one address at the same time: stores have no locks, so at most one of them ends well, and no mixture is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.errors import NotWritable, OutputInUse
from ckpt_cli.files.manifest import NAME, PUBLISHING
from tests import tiny
from tests.cli import ckpt
from tests.remote.stores import ENVIRONMENT, Bucket, Fault, Proxy, proxied

SHARDS = {"max_shard_size": "9KB"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of the same names and sizes."""
    folder = tmp_path_factory.mktemp("models")
    first, second = (tiny.folder(folder / str(seed), tiny.weights(seed), tiny.unknown()) for seed in (1, 2))
    for model in (first, second):
        ckpt_cli.merge(model, model.with_name(f"{model.name}-here"), **SHARDS)
    return first, second


def is_of(model: Path, content: dict[str, bytes]) -> bool:
    here = model.with_name(f"{model.name}-here")
    return content == {path.name: path.read_bytes() for path in here.iterdir()}


@contextmanager
def held(store: Proxy, bucket: Bucket, key: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Where files get their names, the first request that writes this one waits: events that it has come, and that it may go on."""
    come, go = threading.Event(), threading.Event()
    take = store.take

    def hold(method: str, path: str) -> Fault | None:
        names_appear = key.endswith(PUBLISHING) or PUBLISHING in bucket.names("out/")
        if method in ("PUT", "POST") and key in path and names_appear and not come.is_set():
            come.set()
            go.wait(60)
        return take(method, path)

    store.take = hold  # type: ignore[method-assign]
    yield come, go


def begun(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("held_at", ["out/model-00003", "out/config.json", f"out/{NAME}", f"out/{PUBLISHING}"])
def test_one_of_two_runs_fails(
    held_at: str, models: tuple[Path, Path], server: tuple[str, int], store: Proxy, bucket: Bucket, small_parts: None
) -> None:
    """One stands still when its files get their names, while another does all of its work."""
    first, second = models
    address = f"s3://{bucket.name}/out"
    with held(store, bucket, held_at) as (come, go), proxied(server) as other:
        thread, errors = begun(lambda: ckpt_cli.merge(first, address, **SHARDS))
        assert come.wait(60)
        done = ckpt("merge", second, "-o", address, "--max-shard-size", "9KB", **ENVIRONMENT, AWS_ENDPOINT_URL=other.url)
        go.set()
        thread.join(60)
    ended = [not errors, done.code == 0]
    assert sum(ended) <= 1
    if not ended[0]:
        assert isinstance(errors[0], OutputInUse), errors
        assert errors[0].exit_code == 5
        assert "another run writes to this output at the same time" in str(errors[0])
    content = bucket.content("out")
    if PUBLISHING not in content:
        assert is_of(models[ended.index(True)], content)
    ckpt_cli.merge(first, address, overwrite=PUBLISHING not in content, **SHARDS)
    assert is_of(first, bucket.content("out")), "the command may simply be run again"
    assert bucket.uploads() == []


def test_a_file_that_something_else_replaces(models: tuple[Path, Path], store: Proxy, bucket: Bucket, small_parts: None) -> None:
    """By one of the same size, right before the manifest."""
    name = "model-00001-of-00004.safetensors"

    def replace(path: str) -> None:
        if path.endswith("config.json") and name in bucket.names("out/"):
            bucket.put(f"out/{name}", bucket.content("out")[name][::-1])

    store.before = replace
    with pytest.raises(OutputInUse, match="another run writes to this output"):
        ckpt_cli.merge(models[0], f"s3://{bucket.name}/out", **SHARDS)
    assert PUBLISHING in bucket.names("out/")
    assert NAME not in bucket.names("out/")


def test_a_marker_that_cannot_be_removed_is_an_error(
    models: tuple[Path, Path], store: Proxy, bucket: Bucket, small_parts: None, impatient: None
) -> None:
    """All is there, but nobody would read it."""
    store.faults.append(Fault(r"\?delete", 99, status=403, method="POST"))
    with pytest.raises(NotWritable, match="access was denied"):
        ckpt_cli.merge(models[0], f"s3://{bucket.name}/out", **SHARDS)
    store.faults.clear()
    ckpt_cli.merge(models[0], f"s3://{bucket.name}/out", **SHARDS)
    assert is_of(models[0], bucket.content("out"))


def test_what_is_only_in_part_the_old_output_stays_marked(
    models: tuple[Path, Path], store: Proxy, bucket: Bucket, small_parts: None, impatient: None
) -> None:
    """After an error when some of it was replaced."""
    first, second = models
    address = f"s3://{bucket.name}/out"
    ckpt_cli.merge(first, address, max_shard_size="4KB")
    store.faults.append(Fault("out/config.json", 99, status=403, method="PUT"))
    with pytest.raises(NotWritable, match="access was denied"):
        ckpt_cli.merge(second, address, overwrite=True, max_shard_size="4KB")
    store.faults.clear()
    left = bucket.names("out/")
    assert left == [] or PUBLISHING in left
    ckpt_cli.merge(second, address, **SHARDS)
    assert is_of(second, bucket.content("out"))
