"""Folders and small files of a store, as a command sees them: each folder is listed once, each small file read once.

A store has no folders, only keys with slashes, and a request takes as long as a thousand questions to a disk. So one listing
answers everything about a folder, for all who ask until a caller gives an address in that store again: then all is looked up anew.
"""

from __future__ import annotations

import functools
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from ckpt_cli.errors import NotFound, SourceChanged, Unreadable
from ckpt_cli.files.descriptors import STORE, Identity
from ckpt_cli.files.leftovers.downloads import refuse_unfinished
from ckpt_cli.files.leftovers.pointers import refuse_pointer
from ckpt_cli.files.remote.store import Entry, Listing, Store, store_of
from ckpt_cli.files.remote.web import Answers, listing_of_web, names_on_page
from ckpt_cli.files.source import check_small
from ckpt_cli.paths import absolute
from ckpt_cli.urls import WEB, Address, address_of

FIRST = 256 << 10
"""So much of a small file is asked for at first: nearly all are smaller."""

KEPT = 16 << 20
"""Bytes of small files that are kept."""

OF_CONTENT = {"s3", "s3a", "gs", "gcs"}
"""Stores whose tags are digests: files that were sent in the same way have the same one. Web servers make theirs of size and time."""

FOLDER = "folder"
Found: TypeAlias = Entry | str | None
"""A file, `FOLDER`, or nothing."""


@dataclass(frozen=True, slots=True)
class Named:
    """One name of a listing."""

    folder: bool

    def is_file(self) -> bool:
        return not self.folder

    def is_dir(self) -> bool:
        return self.folder


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of a store as it was when it was first looked at."""

    store: Store
    key: str
    path: str
    entry: Entry

    @property
    def identity(self) -> Identity:
        return Identity(self.path, self.entry.size, self.entry.modified_ns, STORE, number_of(self.path), tag=self.entry.stamp)

    def holds_what(self, other: ListedFile) -> bool:
        """Whether the tags of two files, which some stores make of the content alone, are the same."""
        told = {address.scheme for path in (self.path, other.path) if (address := address_of(path)) is not None}
        return (
            told <= OF_CONTENT and self.entry.size == other.entry.size and self.entry.tag is not None and self.entry.tag == other.entry.tag
        )

    def check_unchanged(self) -> None:
        """Raise SourceChanged unless it still is what it was."""
        now = self.store.status(self.key)
        if now is None:
            raise SourceChanged("a source file vanished while it was being read", path=self.path)
        if not self.entry.is_same(now):
            told = (
                f"it has {now.size} bytes, not {self.entry.size}" if now.size != self.entry.size else "its version, tag or time is another"
            )
            text = f"a source file changed while it was being read: {told}"
            raise SourceChanged(text, path=self.path, expected="the same size, version, tag and time as at the start")


class Tree:
    """What is known of one bucket, container or host."""

    def __init__(self, store: Store, address: Address) -> None:
        self._store, self._root = store, address
        self._answers = Answers(store)
        self._lock = threading.RLock()
        self._times, self._given = 0, frozenset[str]()
        self._listings: dict[str, Listing | None] = {}
        self._found: dict[str, Found] = {}
        self._contents: OrderedDict[str, bytes] = OrderedDict()

    def listing(self, key: str) -> Listing | None:
        """What lies in a folder; None if there is no such folder, or it lies above of what callers named and may not be listed."""
        with self._lock:
            self._look()
            if key not in self._listings:
                above, _, name = key.rpartition("/")
                known = self._listings.get(above) if key else None
                is_none = isinstance(self._found.get(key), Entry) or (known is not None and name not in known.folders)
                self._listings[key] = None if is_none else self._listed(key)
            return self._listings[key]

    def status(self, key: str) -> Found:
        """What there is at a key, which one listing of the folder above answers for all names in it."""
        with self._lock:
            self._look()
            above, _, name = key.rpartition("/")
            if not key or (key not in self._given and any(each.startswith(f"{key}/") for each in self._given)):
                return FOLDER
            known = self.listing(above) if key not in self._given or above in self._listings else None
            if known is not None:
                return FOLDER if name in known.folders else known.files.get(name)
            if key not in self._found:
                absent = key not in self._given and self._is_meant(above)
                self._found[key] = None if absent else self._asked(key)
            return self._found[key]

    def content(self, key: str, limit: int) -> bytes:
        """A small file. Raises NotFound, Unreadable, CorruptFile above ``limit``, SourceChanged."""
        with self._lock:
            self._look()
            if key in self._contents:
                check_small(len(self._contents[key]), limit, self._at(key).path)
                return self._contents[key]
        begun = self._store.begin(key, FIRST, 0)
        if begun is None:
            raise NotFound("no such file", path=self._at(key).path)
        entry, _, start = begun
        check_small(entry.size, limit, self._at(key).path)
        data = bytes(start)
        if len(data) < entry.size:
            data += bytes(self._store.read(key, len(data), entry.size, entry))
        if len(data) != entry.size:
            raise SourceChanged(f"{len(data)} bytes were read of a file that had {entry.size}", path=self._at(key).path)
        refuse_pointer(data, str(self._at(key).path), entry.size)
        self.refuse_unfinished(key)
        with self._lock:
            self._contents[key] = data
            while sum(map(len, self._contents.values())) > KEPT and len(self._contents) > 1:
                self._contents.popitem(last=False)
        return data

    def beginning(self, key: str, length: int) -> bytes:
        """The first bytes of a file."""
        found = self.status(key)
        if isinstance(found, Entry) and 0 <= found.size <= FIRST:
            return self.content(key, FIRST)[:length]
        begun = self._store.begin(key, length, 0)
        if begun is None:
            raise NotFound("no such file", path=self._at(key).path)
        return bytes(begun[2])

    def file(self, key: str) -> ListedFile:
        """A file, with its size. Raises NotFound, Unreadable."""
        found = self.status(key)
        if isinstance(found, Entry) and (found.size < 0 or not (found.stamp or found.modified_ns)):
            found = self._store.status(key)
        if found is None:
            raise NotFound("no such file", path=self._at(key).path)
        if not isinstance(found, Entry):
            raise Unreadable("not a regular file", path=self._at(key).path)
        return ListedFile(self._store, key, str(self._at(key).path), found)

    def refuse_unfinished(self, key: str) -> None:
        """Raise UnfinishedDownload for a file that was copied to the store before it was whole."""
        refuse_unfinished(str(self._at(key).path), lambda path: (at := address_of(path)) is not None and self.is_listed(at.key))

    def is_listed(self, key: str) -> bool:
        """Whether a listing that was made has a file of this name: nothing is asked for."""
        above, _, name = key.rpartition("/")
        with self._lock:
            known = self._listings.get(above)
            return known is not None and name in known.files

    def forget(self, key: str) -> None:
        """Look up anew what there is at a key and below."""
        with self._lock:
            self._listings = {k: v for k, v in self._listings.items() if not _overlap(k, key)}
            self._found = {k: v for k, v in self._found.items() if not _overlap(k, key)}
            for each in [each for each in self._contents if _overlap(each, key)]:
                del self._contents[each]

    def _look(self) -> None:
        times, given = self._root.given
        if times != self._times:
            self._times, self._given = times, given
            self._listings.clear()
            self._found.clear()
            self._contents.clear()

    def _asked(self, key: str) -> Found:
        if self._root.scheme in WEB:
            # Many servers answer to the name of a folder, too: with its page.
            page = names_on_page(self._at(key)) is not None
            asked = self._store if key in self._given else self._answers
            return FOLDER if page else asked.status(key) or (FOLDER if self.listing(key) is not None else None)
        # The folder itself first: it will be listed anyway, and a file with the name of a folder is no checkpoint.
        if not self._is_meant(key):
            return self._store.status(key)  # beside what is meant, in a folder that is not listed: only files are asked for there
        return FOLDER if self.listing(key) is not None else self._store.status(key)

    def _listed(self, key: str) -> Listing | None:
        inside = self._is_meant(key)
        # A bucket may hold millions of files beside what is meant, and may be listed by nobody else than its owner.
        if not inside and not key:
            return None
        if self._root.scheme in WEB:
            near = inside or any(each.rpartition("/")[0] == key for each in self._given)
            return listing_of_web(self._store, self._answers, self._at(key), self._given) if near else None
        try:
            return self._store.list(key)
        except Unreadable:
            if inside:
                raise
            return None

    def _is_meant(self, key: str) -> bool:
        """Whether a key lies at or below what callers named."""
        return not self._given or any(not each or key == each or key.startswith(f"{each}/") for each in self._given)

    def _at(self, key: str) -> Address:
        return Address(self._root.scheme, self._root.root, key)


def _overlap(key: str, other: str) -> bool:
    """Whether one lies in the other, or is the other."""
    return not key or not other or f"{key}/".startswith(f"{other}/") or f"{other}/".startswith(f"{key}/")


@functools.cache
def _tree(store: Any, scheme: str, root: str) -> Tree:
    """One for each store of the process, so that all parts of a command share what was listed; see `Tree` for how long."""
    return Tree(store, Address(scheme, root, ""))


def look_again(path: str | os.PathLike[str]) -> None:
    """Forget what was listed and read at a place and below, which something has changed, or may have."""
    tree, key = tree_of(path)
    tree.forget(key)


def tree_of(path: str | os.PathLike[str]) -> tuple[Tree, str]:
    """The tree that a path for an address lies in, and its key. Raises what opening the store raises."""
    address = address_of(path)
    if address is None:
        raise NotFound("no such file", path=path)
    store: Any = store_of(address)
    return _tree(store, address.scheme, address.root), address.key


def remote_entries(folder: Path) -> Mapping[str, Named] | None:
    """What lies in a folder, by name; None if there is no such folder. Raises Unreadable."""
    tree, key = tree_of(folder)
    found = tree.listing(key)
    return None if found is None else {**dict.fromkeys(found.files, Named(False)), **dict.fromkeys(found.folders, Named(True))}


def remote_status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """The status of a file or folder as the system would tell it; None if there is none. Raises Unreadable."""
    if not address_of(path):
        return None
    tree, key = tree_of(path)
    found = tree.status(key)
    if found is None:
        return None
    inode = number_of(absolute(path))
    if not isinstance(found, Entry):
        return os.stat_result((stat.S_IFDIR | 0o555, inode, STORE, 1, 0, 0, 0, 0, 0, 0))
    seconds = found.modified_ns // 10**9
    times = {"st_mtime_ns": found.modified_ns}
    return os.stat_result((stat.S_IFREG | 0o444, inode, STORE, 1, 0, 0, max(found.size, 0), seconds, seconds, seconds), times)


def listed_file(path: str | os.PathLike[str]) -> ListedFile:
    """A file as it was when it was listed. Raises NotFound, Unreadable."""
    tree, key = tree_of(path)
    return tree.file(key)


def remote_content(path: str | os.PathLike[str], limit: int) -> bytes:
    """A small file, see `Tree.content`."""
    tree, key = tree_of(path)
    return tree.content(key, limit)


def remote_beginning(path: str | os.PathLike[str], length: int) -> bytes:
    """The first bytes of a file. Raises NotFound, Unreadable."""
    tree, key = tree_of(path)
    return tree.beginning(key, length)


def number_of(path: str) -> int:
    """A number in place of an inode, of the name alone: no disk has the device that goes with it, and copies share their tags."""
    return int.from_bytes(sha256(path.encode("utf-8", "surrogateescape")).digest()[:7], "big")
