"""What every store can do, and which one an address belongs to.

`store_of` opens the store of an address: one object for each scheme and root (bucket, container, host), shared by all threads. It offers

- `list`, `status`, `read`, `begin`: a folder, one file, a range of it, its first or last bytes together with its status;
- `raw`: the store of obstore, or the file system of fsspec (`Store.door` says which), for whoever writes: keys are those of `Address.key`;
- `failed`: the CkptError for an exception of `raw`. No message holds more of the original than a status and a code, since
  the texts of these libraries contain whole URLs with their signatures.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ckpt_cli.errors import CkptError, UsageError, install
from ckpt_cli.urls import BUCKETS, WEB, Address

Buffer = bytes | bytearray | memoryview

SETTINGS = ("AWS_", "GOOGLE_", "AZURE_", "HF_")
"""How the names of environment variables begin that say with which credentials a store is opened."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a store: its size in bytes, and what changes with its content where the store has it (an entity tag, a version, a time)."""

    size: int
    tag: str | None = None
    version: str | None = None
    modified_ns: int = 0

    @property
    def stamp(self) -> str:
        """Its version and its tag, as far as there are any. Whether a tag is weak depends on who answers."""
        return " ".join(each for each in (self.version, _strong(self.tag)) if each)

    def is_same(self, now: Entry) -> bool:
        """Whether a later answer is of the same content, as far as the store tells: some leave out tags or times in some answers."""
        told = ((self.version, now.version), (_strong(self.tag), _strong(now.tag)))
        known = [first == second for first, second in told if first and second]
        if known:
            return self.size == now.size and all(known)
        if self.stamp and not self.modified_ns:
            return False
        return self.size == now.size and self.modified_ns in (0, now.modified_ns)


def _strong(tag: str | None) -> str | None:
    return tag.removeprefix("W/") if tag else None


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies directly in a folder, by name."""

    files: Mapping[str, Entry]
    folders: frozenset[str]


class Store(Protocol):
    """One bucket, container, host or file system. Thread-safe. Every method raises Unreadable for what cannot be determined."""

    door: Literal["obstore", "fsspec"]
    raw: Any

    def list(self, key: str) -> Listing | None:
        """What lies in a folder, in one request per thousand files; None if there is nothing, or the store cannot list."""
        ...

    def status(self, key: str) -> Entry | None:
        """A file, asked for anew; None if there is none."""
        ...

    def begin(self, key: str, first: int, last: int) -> tuple[Entry, int, Buffer] | None:
        """The status of a file with its first bytes, or else its last: the status, where the bytes begin, the bytes.

        One of ``first`` and ``last`` is 0; there are fewer bytes if the file is shorter. None if there is no such file.
        """
        ...

    def read(self, key: str, start: int, stop: int, entry: Entry) -> Buffer:
        """A range of a file. CorruptFile if it ends before; SourceChanged if the store says that it is another than ``entry``."""
        ...

    def failed(self, error: BaseException, key: str, what: str) -> CkptError:
        """An exception of ``raw`` as a CkptError: NotFound, Unreadable or SourceChanged, with a hint where one is known to be true."""
        ...


@functools.cache
def _opened(scheme: str, root: str, settings: frozenset[tuple[str, str]]) -> Store:
    """Kept for the process: it holds connections, which take longer to make than most requests. What was read is not kept here."""
    address = Address(scheme, root, "")
    if scheme in (*BUCKETS, *WEB):
        try:
            import obstore  # noqa: F401
        except ImportError:
            raise UsageError(f"{scheme}:// needs obstore, which is not installed", path=address.url, hint=install("remote")) from None
        from ckpt_cli.files.remote.bucket_store import BucketStore

        return BucketStore(address)
    try:
        import fsspec
    except ImportError:
        raise UsageError(f"{scheme}:// needs fsspec, which is not installed", path=address.url, hint=install("fsspec")) from None
    if scheme not in fsspec.available_protocols():
        raise UsageError(
            f"nothing here opens {scheme}:// addresses",
            path=address.url,
            expected=f"a path, or {', '.join(f'{known}://' for known in (*BUCKETS[:1], 'gs', 'az', 'https', 'hf'))}",
        )
    from ckpt_cli.files.remote.fsspec_store import FsspecStore

    return FsspecStore(address)


def store_of(address: Address) -> Store:
    """The store that an address lies in. Raises UsageError if what opens it is not installed, or nothing opens its scheme."""
    settings = frozenset(item for item in os.environ.items() if item[0].startswith(SETTINGS))
    return _opened(address.scheme, address.root, settings)
