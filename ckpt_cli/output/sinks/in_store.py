"""A folder of an object store as an output. Stores have no folders to rename, so its files get their names one after the other.

First all bytes are sent; then the names follow within seconds, those without which nothing takes the folder for a model last, and the
manifest at the end. Meanwhile a small file (`manifest.PUBLISHING`) says which names belong to the output, so that a run after one that
was killed knows what is there. An old output loses its manifest, config and index first: no mixture of both looks like a model.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from ckpt_cli.errors import NotFound, NotWritable, OutputExists
from ckpt_cli.files import manifest
from ckpt_cli.files.remote.store import store_of
from ckpt_cli.files.remote.tree import look_again
from ckpt_cli.files.source import read_small
from ckpt_cli.output.sinks.sink import BegunAnew, Sink
from ckpt_cli.output.sinks.upload import Upload, tried
from ckpt_cli.output.staging import order_of
from ckpt_cli.tensors.parallel import Stop, in_threads
from ckpt_cli.urls import address_of

AT_ONCE = 8
"""Files that are completed or given up at the same time."""

LARGEST = 1 << 30
"""Bytes of an index; those of the largest models have a tenth of this."""


class FolderInStore(BegunAnew):
    """The uploads of one output. Use it as a context manager: without `publish` they are given up."""

    in_order = True

    def __init__(self, target: Path) -> None:
        address = address_of(target)
        if address is None:
            raise NotFound("no address", path=target)
        self.target = self.folder = target
        self._store, self._key = store_of(address), address.key
        self._uploads: dict[str, Upload] = {}
        self._hidden: dict[str, bytes] = {}
        self._marked = self._begun = False

    def create(self, name: str, size: int, stop: Stop | None = None) -> AbstractContextManager[Sink]:
        """A new file, which has no name before `publish`."""
        upload = self._uploads[name] = Upload(self._store, self._at(name), size, stop)
        return upload

    def check(self, name: str, size: int, header: bytes) -> None:
        """Nothing can be read before it is published; the store compared a checksum of each part, and `publish` looks at the sizes."""

    def sync(self) -> None:
        """What a store has answered for is durable."""

    def publish(self, *, replace: bool) -> None:
        """Give the files their names. Raises NotWritable; what was there before is then there again, unless some of it was replaced."""
        del replace  # what there is was looked at just before, and is ours
        old = [name for name in self._listed() if name != manifest.PUBLISHING]
        try:
            self._mark([*old, *self._uploads])
            self._hide([name for name in old if order_of(name)[0]])
            self._complete([name for name in self._uploads if not order_of(name)[0]])
            self._remove(name for name in old if name not in self._uploads)
            last = sorted((name for name in self._uploads if order_of(name)[0]), key=order_of)
            for name in last:
                if name == manifest.NAME:
                    self._check_sizes()
                self._complete([name])
        except NotWritable as error:
            if old and self._begun:
                error.hint = "the old output is gone, at least in part: run the command again"
            raise
        finally:
            look_again(self.target)

    def publish_into(self, folder: Path) -> None:
        raise NotWritable("files are added to folders on disks only", path=folder, hint="use -o instead of --in-place")

    def withdraw(self) -> None:
        """Remove what has its name by now, or put back the files of an old output that no new one has replaced."""
        with contextlib.suppress(Exception):
            if self._begun:
                self._remove(sorted(self._uploads, key=order_of, reverse=True))
            for name in sorted(self._hidden, key=order_of) if not self._begun else ():
                self._put(name, self._hidden[name])
            self._unmark()
        look_again(self.target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        in_threads(Upload.abort, list(self._uploads.values()), AT_ONCE, Stop())
        if kind is None:
            with contextlib.suppress(NotWritable):
                self._unmark()  # beside a manifest it means nothing

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        return f"{self._key}/{name}" if self._key else name

    def _listed(self) -> dict[str, int]:
        """The files that are there, and their sizes in bytes."""
        found = tried(self._store, self._key, lambda: self._store.list(self._key), "the folder cannot be listed")
        return {} if found is None else {name: entry.size for name, entry in found.files.items()}

    def _mark(self, names: Iterable[str]) -> None:
        self._marked = True
        self._put(manifest.PUBLISHING, json.dumps(manifest.publishing(names)).encode())

    def _unmark(self) -> None:
        if self._marked:
            self._remove([manifest.PUBLISHING])
            self._marked = False

    def _hide(self, names: Iterable[str]) -> None:
        """Remove files that make an old output look whole; they are small enough to be kept."""
        for name in names:
            path = self.target / name
            self._hidden[name] = tried(self._store, self._at(name), partial(read_small, path, LARGEST), "reading failed")
        self._remove(sorted(self._hidden, key=order_of, reverse=True))

    def _complete(self, names: list[str]) -> None:
        self._begun = self._begun or bool(names)
        in_threads(lambda name: self._uploads[name].complete(), names, AT_ONCE, Stop())

    def _check_sizes(self) -> None:
        there = self._listed()
        for name, upload in self._uploads.items():
            if name != manifest.NAME and there.get(name) != upload.size:
                message = "something else wrote or removed a file of the output at the same time"
                raise OutputExists(message, path=self.target / name, hint="choose another -o, or run the command again")

    def _put(self, name: str, data: bytes) -> None:
        with Upload(self._store, self._at(name), len(data)) as upload:
            if data:
                upload.put(0, memoryview(data))
            upload.finish()
            upload.complete()

    def _remove(self, names: Iterable[str]) -> None:
        import obstore

        keys = [self._at(name) for name in names]
        if keys:
            tried(self._store, self._key, lambda: obstore.delete(self._store.raw, keys), "files of the output cannot be removed")
