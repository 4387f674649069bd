"""Buckets and web servers, through obstore. Its requests release the lock of the interpreter and are tried again by themselves."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any, Literal, TypeVar

from ckpt_cli.errors import CkptError, CorruptFile, NotFound, SourceChanged
from ckpt_cli.files.remote.failures import failure
from ckpt_cli.files.remote.store import Buffer, Entry, Listing
from ckpt_cli.urls import WEB, Address

Answer = TypeVar("Answer")

RETRIES = 6
PATIENCE = timedelta(minutes=2)
"""How long one request is tried again and again."""

TIMEOUTS = {"timeout": "5m", "read_timeout": "60s", "connect_timeout": "10s"}
"""For a whole request, for a part of its body, and for a connection."""

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "GOOGLE_BASE_URL")
"""Variables that name another server than the usual one."""

CUT = 3
"""How often a request is made again whose body was cut."""


RANGE_TROUBLE = ("non-partial", "416 Range", "not supported")
"""What texts of errors contain where the same file may be read in another way."""


class BucketStore:
    """The store of one bucket, container or host. Credentials come from the environment, as obstore documents."""

    door: Literal["obstore", "fsspec"] = "obstore"

    def __init__(self, address: Address) -> None:
        self._address = address
        self.raw: Any = _raw(address, "")
        self._signed: dict[str, Any] = {}

    def list(self, key: str) -> Listing | None:
        import obstore

        try:
            found = _again(lambda: obstore.list_with_delimiter(self.raw, f"{key}/" if key else None))
        except Exception as error:  # noqa: BLE001 - its errors have no common base
            raise self.failed(error, key, "the folder cannot be listed") from None
        # A store may hold an empty file in place of a folder, called like it with a slash behind.
        files = {_last(meta["path"]): _entry(meta) for meta in found["objects"] if meta["path"].strip("/") != key}
        folders = frozenset(map(_last, found["common_prefixes"]))
        return Listing(files, folders) if files or folders else None

    def status(self, key: str) -> Entry | None:
        import obstore

        try:
            return _entry(obstore.head(self._raw_of(key), key))
        except Exception as error:  # noqa: BLE001
            self._check_absent(self.failed(error, key, "it cannot be accessed"), key)
            return None

    def begin(self, key: str, first: int, last: int) -> tuple[Entry, int, Buffer] | None:
        wanted: Any = (0, first) if first else {"suffix": last}
        try:
            result, data = self._got(key, {"range": wanted})
            return _entry(result.meta), result.range[0], data
        except Exception as error:  # noqa: BLE001
            failed = self.failed(error, key, "reading failed")
            if isinstance(failed, NotFound):
                self._check_absent(failed, key)
                return None
            # No range of an empty file can be asked for, and not every web server knows ranges from the end.
            entry = self.status(key) if any(sign in str(error) for sign in RANGE_TROUBLE) else None
            if entry is None:
                raise failed from None
            if entry.size == 0:
                return entry, 0, b""
            start = 0 if first else max(0, entry.size - last)
            return entry, start, self.read(key, start, min(entry.size, start + (first or last)), entry)

    def read(self, key: str, start: int, stop: int, entry: Entry) -> Buffer:
        options: Any = {"range": (start, stop)}
        if entry.tag is not None and not entry.tag.startswith("W/"):
            options["if_match"] = entry.tag
        if entry.version is not None:
            options["version"] = entry.version
        try:
            result, data = self._got(key, options)
        except Exception as error:  # noqa: BLE001
            raise self.failed(error, key, "reading failed") from None
        # Not every server minds what it is asked for.
        if not entry.is_same(_entry(result.meta)):
            raise SourceChanged("a source file changed while it was being read", path=self._at(key).url)
        if tuple(result.range) != (start, stop) or len(data) != stop - start:
            expected = f"{entry.size} bytes"
            raise CorruptFile(f"the file ends at byte {result.range[0] + len(data)}", path=self._at(key).url, expected=expected)
        return data

    def _got(self, key: str, options: Any) -> tuple[Any, memoryview]:
        """The answer to a request for a range, and its body. Raises what obstore raises."""
        import obstore

        def ask() -> tuple[Any, memoryview]:
            result = obstore.get(self._raw_of(key), key, options=options)
            return result, memoryview(result.bytes())

        return _again(ask)

    def failed(self, error: BaseException, key: str, what: str) -> CkptError:
        return failure(error, self._at(key), what)

    def _check_absent(self, failed: CkptError, key: str) -> None:
        """There is no such file, which is an answer; raises the error if it is another, or that there is no such bucket."""
        if not isinstance(failed, NotFound) or failed.path != self._at(key).url:
            raise failed from None

    def _raw_of(self, key: str) -> Any:
        """The store for one file: a web address may have been given with a signature."""
        query = self._at(key).query if self._address.scheme in WEB else ""
        if query and query not in self._signed:
            self._signed[query] = _raw(self._address, query)
        return self._signed[query] if query else self.raw

    def _at(self, key: str) -> Address:
        return Address(self._address.scheme, self._address.root, key)


def _raw(address: Address, query: str) -> Any:
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

    client: Any = dict(TIMEOUTS)
    retry: Any = {"max_retries": RETRIES, "retry_timeout": PATIENCE}
    if address.scheme in WEB:
        client["allow_http"] = address.scheme == "http"
        url = f"{address.scheme}://{address.root}{f'?{query}' if query else ''}"
        return HTTPStore.from_url(url, client_options=client, retry_config=retry)
    # Whoever names an endpoint without TLS means it.
    client["allow_http"] = any(os.environ.get(name, "").startswith("http:") for name in ENDPOINTS)
    if address.scheme in ("s3", "s3a"):
        return S3Store(address.root, client_options=client, retry_config=retry)
    if address.scheme in ("gs", "gcs"):
        return GCSStore(address.root, client_options=client, retry_config=retry)
    container, _, host = address.root.partition("@")
    if host:
        return AzureStore.from_url(f"{address.scheme}://{container}@{host}", client_options=client, retry_config=retry)
    return AzureStore(container, client_options=client, retry_config=retry)


def _again(ask: Callable[[], Answer]) -> Answer:
    """What a request answers, which is made again if its body is cut; all else obstore tries again by itself."""
    for _ in range(CUT):
        try:
            return ask()
        except Exception as error:
            if "body" not in str(error):
                raise
    return ask()


def _entry(meta: Any) -> Entry:
    modified = meta["last_modified"] - datetime(1970, 1, 1, tzinfo=timezone.utc)
    return Entry(meta["size"], meta["e_tag"], meta["version"], modified // timedelta(microseconds=1) * 1000)


def _last(key: str) -> str:
    return key.rstrip("/").rpartition("/")[2]
