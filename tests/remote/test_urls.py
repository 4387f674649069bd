"""Addresses travel as paths below a file, so that whoever does not know them finds nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_cli.errors import NotFound, UsageError
from ckpt_cli.urls import Address, address_of, is_remote, parsed, shown


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("s3://bucket/run/global_step_5/", Address("s3", "bucket", "run/global_step_5")),
        ("S3://bucket", Address("s3", "bucket", "")),
        ("s3://bucket/a b?c#d", Address("s3", "bucket", "a b?c#d")),
        ("https://host:8080/a%20b/model.safetensors", Address("https", "host:8080", "a b/model.safetensors")),
        ("abfss://container@account.dfs.core.windows.net/run", Address("abfss", "container@account.dfs.core.windows.net", "run")),
        ("hf://org/model@main/sub", Address("hf", "org", "model@main/sub")),
    ],
)
def test_an_address_survives_as_a_path(url: str, address: Address) -> None:
    assert parsed(url) == address
    assert address_of(os.path.abspath(address.path)) == address
    assert address_of(address.path / "x" / "..") == Address(address.scheme, address.root, f"{address.key}/x/..".strip("/"))
    assert shown(f"{address.path / 'x'} is empty") == f"{address.url}/x is empty"


@pytest.mark.parametrize("text", ["run", "/run", "s3:/bucket", "s3:bucket", "org/model", "C:\\run", "://x", "s3://", "https:///x"])
def test_what_is_no_address(text: str) -> None:
    assert parsed(text) is None
    assert not is_remote(text)
    assert shown(text) == text


def test_nothing_is_at_such_a_path() -> None:
    """The kernel says so of anything below a file that is no folder, whoever asks."""
    path = Address("s3", "bucket", "run/model.pt").path
    assert not os.path.lexists(path)
    assert path.resolve() == path
    assert not path.is_symlink()
    with pytest.raises(NotADirectoryError):
        path.open("rb")
    with pytest.raises(NotADirectoryError):
        os.scandir(path)
    with pytest.raises(NotADirectoryError):
        path.mkdir(parents=True)


def test_a_query_is_kept_apart() -> None:
    address = parsed("https://host/run/a.safetensors?X-Amz-Signature=0123&x=y#z")
    assert address is not None
    assert address.query == "X-Amz-Signature=0123&x=y"
    assert "0123" not in f"{address!r} {address.url} {address.path} {Path(address.path)!r}"


@pytest.mark.parametrize(
    "url", ["https://user:secret@host/x", "s3://KEY:secret@bucket/x", "https://token@host/x", "hdfs://user:secret@h/x"]
)
def test_passwords_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError, match="a user or a password") as caught:
        parsed(url)
    assert "secret" not in str(caught.value)
    assert "token" not in str(caught.value)


def test_errors_show_addresses() -> None:
    path = Address("s3", "bucket", "run").path
    error = NotFound(f"{path} is empty", path=path, expected=f"{path}/x", hint=f"see {path}", details=[f"{path}/y"])
    assert "/dev/null" not in str(error) + error.args[0]
    assert error.path == "s3://bucket/run"


@pytest.mark.parametrize("url", ["s3://bucket/run//x", "gs://bucket//run/x", "az://box/a///b/"])
def test_empty_parts_of_keys_are_refused(url: str) -> None:
    """In a store, ``run//x`` is another key than ``run/x``."""
    with pytest.raises(UsageError, match="//") as raised:
        parsed(url)
    assert "//" not in (raised.value.hint or "").partition("://")[2]


@pytest.mark.parametrize("url", ["s3://bucket/run/x//", "https://host/run//x", "hdfs://node/run//x"])
def test_slashes_at_the_end_and_of_others_are_not(url: str) -> None:
    found = parsed(url)
    assert found is not None
    assert found.key == "run/x"
