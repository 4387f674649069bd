"""Whatever else fsspec knows: ``hf://``, ``hdfs://``, ``memory://`` and others."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from ckpt_cli.errors import CkptError, CorruptFile, NotFound, UsageError
from ckpt_cli.files.remote.failures import failure
from ckpt_cli.files.remote.store import Buffer, Entry, Listing
from ckpt_cli.urls import Address

TAGS = ("etag", "ETag", "oid", "blob_id", "checksum", "md5", "sha256", "ino")
TIMES = ("mtime", "LastModified", "last_modified", "modified", "created")
TRIES = 4
PASSING = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "ChunkedEncodingError", "ClientPayloadError", "ServerDisconnectedError")
"""Errors after which the same request may succeed, by name: which library fsspec uses depends on the scheme."""


class FsspecStore:
    """A file system of fsspec, with the options that its environment gives it."""

    door: Literal["obstore", "fsspec"] = "fsspec"

    def __init__(self, address: Address) -> None:
        from fsspec.core import url_to_fs

        self._address = address
        self.raw: Any
        try:
            # Listings are not kept: the same process may look twice.
            self.raw, base = url_to_fs(address.url, use_listings_cache=False)
            self._base = str(base).rstrip("/")
        except ImportError as error:
            lacks = error.name or getattr(error.__cause__, "name", None) or "a package that fsspec names"
            raise UsageError(
                f"{address.scheme}:// needs {lacks}, which is not installed", path=address.url, hint=f"install {lacks}"
            ) from None
        except Exception as error:  # noqa: BLE001
            raise self.failed(error, "", "it cannot be opened") from None

    def name(self, key: str) -> str:
        """What the file system calls a key."""
        return f"{self._base}/{key}" if key else self._base or "/"

    def list(self, key: str) -> Listing | None:
        try:
            found = self._again(lambda: self.raw.ls(self.name(key), detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # noqa: BLE001
            raise self.failed(error, key, "the folder cannot be listed") from None
        own = self.name(key).rstrip("/")
        entries = {str(each["name"]).rstrip("/").rpartition("/")[2]: each for each in found if str(each["name"]).rstrip("/") != own}
        files = {name: _entry(each) for name, each in entries.items() if each["type"] == "file"}
        folders = frozenset(name for name, each in entries.items() if each["type"] == "directory")
        return Listing(files, folders) if files or folders else None

    def status(self, key: str) -> Entry | None:
        try:
            found = self._again(lambda: self.raw.info(self.name(key)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # noqa: BLE001
            failed = self.failed(error, key, "it cannot be accessed")
            if isinstance(failed, NotFound):
                return None
            raise failed from None
        return _entry(found) if found["type"] == "file" else None

    def begin(self, key: str, first: int, last: int) -> tuple[Entry, int, Buffer] | None:
        entry = self.status(key)
        if entry is None:
            return None
        start = 0 if first else max(0, entry.size - last)
        return entry, start, self.read(key, start, min(entry.size, start + (first or last)), entry)

    def read(self, key: str, start: int, stop: int, entry: Entry) -> Buffer:
        if start == stop:
            return b""
        try:
            data = self._again(lambda: self.raw.cat_file(self.name(key), start=start, end=stop))
        except Exception as error:  # noqa: BLE001
            raise self.failed(error, key, "reading failed") from None
        if len(data) != stop - start:
            raise CorruptFile(f"the file ends at byte {start + len(data)}", path=self._at(key).url, expected=f"{entry.size} bytes")
        return bytes(data)

    def failed(self, error: BaseException, key: str, what: str) -> CkptError:
        return failure(error, self._at(key), what)

    def _again(self, ask: Any) -> Any:
        """The answer to a request, which is made again if the connection breaks."""
        for _ in range(TRIES - 1):
            try:
                return ask()
            except Exception as error:
                if type(error).__name__ not in PASSING:
                    raise
        return ask()

    def _at(self, key: str) -> Address:
        return Address(self._address.scheme, self._address.root, key)


def _entry(found: Any) -> Entry:
    tag = next((str(found[key]) for key in TAGS if found.get(key)), None)
    modified = next((found[key] for key in TIMES if found.get(key)), 0)
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    return Entry(int(found["size"] or 0), tag, None, int(modified * 1e9) if isinstance(modified, (int, float)) else 0)
