from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ckpt_cli.files.remote import bucket_store
from ckpt_cli.output.sinks import upload
from tests.remote.stores import ENVIRONMENT, Bucket, Proxy, proxied


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[str, int]]:
    server_of = pytest.importorskip("moto.server").ThreadedMotoServer
    running = server_of(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield running.get_host_and_port()
    running.stop()


@pytest.fixture(scope="session")
def client(server: tuple[str, int]) -> Any:
    return pytest.importorskip("boto3").client(
        "s3", endpoint_url=f"http://{server[0]}:{server[1]}", aws_access_key_id="x", aws_secret_access_key="x", region_name="us-east-1"
    )


@pytest.fixture
def store(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The way to the store, from now on."""
    pytest.importorskip("obstore")
    with proxied(server) as proxy:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        yield proxy


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads of a few kilobytes have several parts, and several batches of them."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    for name, value in {"PART": 2 << 10, "BATCH": 8 << 10, "SMALL": 512}.items():
        monkeypatch.setattr(upload, name, value)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few retries."""
    monkeypatch.setattr(bucket_store, "RETRIES", 2)


@pytest.fixture
def bucket(client: Any, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    bucket = Bucket(client, f"bucket-{abs(hash(request.node.nodeid)) % 10**9}")
    yield bucket
    for key in bucket.names():
        client.delete_object(Bucket=bucket.name, Key=key)
    client.delete_bucket(Bucket=bucket.name)


@pytest.fixture
def memory() -> Iterator[Any]:
    """A file system of fsspec, empty again afterwards."""
    system = pytest.importorskip("fsspec").filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]
