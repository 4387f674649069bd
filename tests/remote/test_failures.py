"""What stores do wrong: refuse, cut, delay, answer something else. Either the output is right, or the error says what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.errors import CkptError, NotFound, SourceChanged, Unreadable
from ckpt_cli.files.remote import bucket_store
from ckpt_cli.files.remote.failures import failure
from ckpt_cli.files.remote.store import store_of
from ckpt_cli.urls import Address, parsed
from tests import tiny
from tests.remote.stores import SECRET, Bucket, Fault, Proxy


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path / "model", tiny.weights(1), tiny.unknown())


def merged(address: str, tmp_path: Path) -> bytes:
    ckpt_cli.merge(address, tmp_path / "out")
    return (tmp_path / "out" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("safetensors$", 2, status=503),
        Fault("safetensors$", 2, status=500),
        Fault("safetensors$", 2, status=429),
        Fault("safetensors$", 2, cut=100),
        Fault("safetensors$", 2, cut=0),
        Fault(r"^\?", 2, status=503),
        Fault(r"^\?", 1, cut=50),
        Fault("config.json$", 1, cut=10),
        Fault("", 20, delay=0.05),
    ],
    ids=str,
)
def test_what_passes_is_tried_again(fault: Fault, model: Path, tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    address = bucket.fill(model, "run")
    store.faults.append(fault)
    assert merged(address, tmp_path) == (model / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "config.json").exists()
    assert fault.times == 0 or fault.delay


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (Fault("safetensors$", 999, status=503), Unreadable, "the server answered 503.*after 2 retries"),
        (Fault("safetensors$", 999, status=429), Unreadable, "the server answered 429"),
        (Fault("safetensors$", 999, status=403), Unreadable, "access was denied"),
        (Fault("safetensors$", 999, cut=100), Unreadable, "reading failed: the connection was cut"),
        (Fault(r"^\?", 999, status=500), Unreadable, "the folder cannot be listed: the server answered 500"),
        (Fault(r"^\?", 999, status=403), Unreadable, "the folder cannot be listed: access was denied"),
        (Fault("config.json$", 999, status=403), Unreadable, "access was denied"),
    ],
    ids=str,
)
def test_what_stays_is_an_error(
    fault: Fault, kind: type[CkptError], message: str, model: Path, tmp_path: Path, impatient: None, store: Proxy, bucket: Bucket
) -> None:
    address = bucket.fill(model, "run")
    store.faults.append(fault)
    with pytest.raises(kind, match=message) as caught:
        ckpt_cli.merge(address, tmp_path / "out")
    assert (caught.value.path or "").startswith(address)
    assert SECRET not in str(caught.value) + repr(caught.value)
    assert caught.value.__cause__ is None, "the original has URLs and headers in it"
    assert not (tmp_path / "out").exists()


def test_no_such_bucket_and_no_such_key(model: Path, store: Proxy, bucket: Bucket) -> None:
    bucket.fill(model, "run")
    with pytest.raises(NotFound, match="there is no such bucket") as caught:
        ckpt_cli.detect("s3://bucket-that-is-not-there/run")
    assert caught.value.path == "s3://bucket-that-is-not-there"
    with pytest.raises(NotFound, match="no such file or folder") as caught:
        ckpt_cli.detect(f"s3://{bucket.name}/runs")
    assert caught.value.path == f"s3://{bucket.name}/runs"
    with pytest.raises(NotFound, match="no such file or folder"):
        ckpt_cli.detect(f"s3://{bucket.name}/run/model.safetensorz")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://nowhere.invalid"])
def test_no_connection(endpoint: str, impatient: None, store: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(Unreadable, match=r"there is no connection after 2 retries|its host has no address") as caught:
        ckpt_cli.detect("s3://bucket/run")
    assert caught.value.path == "s3://bucket/run"
    assert "check the name of the host, and the network" in str(caught.value)


def test_no_answer(impatient: None, model: Path, store: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_store, "TIMEOUTS", {"timeout": "200ms", "connect_timeout": "200ms"})
    address = bucket.fill(model, "run")
    store.faults.append(Fault("safetensors$", 999, delay=1.0))
    with pytest.raises(Unreadable, match=r"no answer in time|there is no connection"):
        ckpt_cli.inspect(address)


def test_above_what_was_named_nothing_needs_to_be_allowed(model: Path, tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    """A policy may allow one prefix only: what lies above it is then as if it were not there."""
    address = bucket.fill(model, "team/project/run")
    store.faults += [Fault(f"^\\?{prefix}$", 999, status=403) for prefix in ("", "team/", "team/project/")]
    assert merged(address, tmp_path) == (model / "model.safetensors").read_bytes()
    assert store.listings("") == [], "a bucket may hold millions of other files"


def test_another_version_in_between(model: Path, tmp_path: Path, store: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same size: every request names the version that was opened."""
    from ckpt_cli.files.remote import source

    monkeypatch.setattr(source, "HEAD", 1 << 10)
    address = bucket.fill(model, "run")
    old = (model / "model.safetensors").read_bytes()

    def replace(path: str) -> None:
        if path.endswith("safetensors") and len(store.of("safetensors")) == 1:
            bucket.put("run/model.safetensors", old[:-1] + bytes([old[-1] ^ 1]))

    store.before = replace
    with pytest.raises(SourceChanged, match="a source file changed while it was being read") as caught:
        ckpt_cli.merge(address, tmp_path / "out")
    assert caught.value.path == f"{address}/model.safetensors"
    assert not (tmp_path / "out").exists()


def test_credentials_are_in_nothing_that_can_be_shown(store: Proxy, bucket: Bucket) -> None:
    bucket.put("x", b"0123")
    address = Address("s3", bucket.name, "x")
    opened = store_of(address)
    assert opened is store_of(address)
    assert SECRET not in f"{opened!r} {opened.raw!r} {address!r} {vars(opened)!r}"


def test_no_credentials(bucket: Bucket, impatient: None, store: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unreadable) as caught:
        ckpt_cli.detect(f"s3://{bucket.name}/run")
    assert "AWS_SKIP_SIGNATURE=true" in str(caught.value)
    bucket.fill(Path(__file__).parent / "__init__.py", "run")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    bucket.put("run/x", b"0")
    with pytest.raises(CkptError, match="no checkpoint was recognised"):
        ckpt_cli.detect(f"s3://{bucket.name}/run")


def test_a_pointer_of_git_lfs(model: Path, tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    address = bucket.fill(model, "run")
    bucket.put("run/model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n")
    found = ckpt_cli.detect(address)
    assert found.error is not None
    assert found.error.code == "lfs-pointer"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_download_that_was_copied_to_a_store_before_it_finished(
    name: str, model: Path, tmp_path: Path, store: Proxy, bucket: Bucket
) -> None:
    address = bucket.fill(model, "run")
    bucket.put(f"run/{name}.aria2", b"\0\1" + bytes(60))
    found = ckpt_cli.detect(address)
    assert found.error is not None
    assert found.error.code == "unfinished-download"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("ConnectError: [Errno 111] Connection refused", "there is no connection"),
        ("ConnectError: [Errno -3] Temporary failure in name resolution", "its host has no address"),
        ("ProxyError: 403 Forbidden", "there is no connection"),
        ("ConnectTimeout: ", "no answer in time"),
        ("OfflineModeIsEnabled: offline mode is enabled", "there is no connection"),
    ],
)
def test_without_a_network_the_error_says_so_whichever_library_asked(error: str, text: str) -> None:
    """These exceptions have no base in common."""
    name, _, said = error.partition(": ")
    address = parsed("hf://me/model")
    assert address is not None
    told = failure(type(name, (Exception,), {})(said), address, "the folder cannot be listed")
    assert told.message == f"the folder cannot be listed: {text}"
    assert told.path == "hf://me/model"
    assert name not in str(told)
    assert told.hint or "time" in text
    # Either variable puts huggingface_hub offline.
    assert ("TRANSFORMERS_OFFLINE" in (told.hint or "")) == ("HF_HUB_OFFLINE" in (told.hint or "")) == (name == "OfflineModeIsEnabled")


class TestKeysThatAreNoPaths:
    """Nothing of a folder is listed beside such a key, which may be that of a part of what is meant."""

    @pytest.fixture
    def run(self, tmp_path: Path, bucket: Bucket) -> str:
        for step in (10, 20):
            tiny.verl(tmp_path / "run", tiny.weights(step), step=step)
        return bucket.fill(tmp_path / "run", "run")

    @pytest.mark.parametrize(
        ("key", "shown", "folder", "why"),
        [
            ("run//global_step_30/actor/model_world_size_1_rank_0.pt", "run//", "run", "is empty"),
            (
                "run/global_step_20/actor//model_world_size_1_rank_0.pt",
                "run/global_step_20/actor//",
                "run/global_step_20/actor",
                "is empty",
            ),
            ("run/global_step_20/../global_step_30/actor/x.pt", "run/global_step_20/../", "run/global_step_20", "is .."),
            ("run/./x", "run/./", "run", "is ."),
            ("run/a\x01b", "run/a\\x01b", "run", "contains \\x01"),
        ],
    )
    @pytest.mark.parametrize("command", [ckpt_cli.merge, ckpt_cli.detect])
    def test_are_named_with_what_to_do(
        self, command: Any, key: str, shown: str, folder: str, why: str, run: str, tmp_path: Path, store: Proxy, bucket: Bucket
    ) -> None:
        bucket.put(key, b"x")
        arguments = (run, tmp_path / "out") if command is ckpt_cli.merge else (run,)
        with pytest.raises(Unreadable) as caught:
            command(*arguments)
        error, at = caught.value, f"s3://{bucket.name}/{shown}"
        text = str(error).splitlines()
        assert text[0] == f"the folder cannot be listed: a name in the key {at} {why}"
        assert error.path == f"s3://{bucket.name}/{folder}"
        assert f"move what is at {at} to another key, or delete it" in text[-1]
        assert not (tmp_path / "out").exists()
        bucket.client.delete_object(Bucket=bucket.name, Key=key)
        command(*arguments)

    def test_beside_what_was_named_do_no_harm(self, run: str, tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
        bucket.put("run//global_step_30/actor/model_world_size_1_rank_0.pt", b"x")
        assert ckpt_cli.merge(f"{run}/global_step_20", tmp_path / "out").checkpoint.step == 20

    def test_in_an_older_step_do_no_harm(self, run: str, tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
        bucket.put("run/global_step_10/actor//x.pt", b"x")
        assert ckpt_cli.merge(run, tmp_path / "out").checkpoint.step == 20
