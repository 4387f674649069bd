"""A folder of an object store as an output. Stores have no folders to rename, so its files get their names one after the other.

First all bytes are sent; then the names follow within seconds, those without which nothing takes the folder for a model last, and the
manifest at the end. Meanwhile a small file (`manifest.PUBLISHING`) says which names belong to the output, so that a run after one that
was killed knows what is there. An old output loses its manifest, config and index first: no mixture of both looks like a model.

Stores have no locks either. That small file names the run, and so does the metadata of every file. A run that no longer finds itself there
ends with an error, and leaves the small file behind if some of its files lie among those of the other.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from ckpt_cli.errors import NotFound, NotWritable, OutputInUse
from ckpt_cli.files import manifest
from ckpt_cli.files.remote.store import Entry, store_of
from ckpt_cli.files.remote.tree import look_again
from ckpt_cli.files.source import read_small
from ckpt_cli.output.sinks.sink import BegunAnew, Sink
from ckpt_cli.output.sinks.upload import RUN, Upload, not_written, tried
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
        self._run = uuid.uuid4().hex
        self._marked = self._begun = self._lost = False
        self._left = self._marker()

    def create(self, name: str, size: int, stop: Stop | None = None) -> AbstractContextManager[Sink]:
        """A new file, which has no name before `publish`."""
        upload = self._uploads[name] = Upload(self._store, self._at(name), size, stop, run=self._run)
        return upload

    def check(self, name: str, size: int, header: bytes) -> None:
        """Nothing can be read before it is published; the store compared a checksum of each part, and `publish` looks at the sizes."""

    def sync(self) -> None:
        """What a store has answered for is durable."""

    def publish(self, *, replace: bool) -> None:
        """Give the files their names. Raises NotWritable; what was there before is then there again, unless some of it was replaced.

        Raises OutputInUse if another run gives its files the same names.
        """
        del replace  # what there is was looked at just before, and is ours
        old = self._listed()
        try:
            self._mark([*old, *self._uploads])
            if self._listed() != old:
                raise self._in_use()
            self._hide([name for name in old if order_of(name)[0]])
            self._complete([name for name in self._uploads if not order_of(name)[0]])
            self._remove(name for name in old if name not in self._uploads)
            last = sorted((name for name in self._uploads if order_of(name)[0]), key=order_of)
            for name in last:
                if name == manifest.NAME:
                    self._check_alone()
                self._complete([name])
            self._check_alone()
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
            if self._lost:
                self._leave_marker()
            else:
                self._take_back()
        look_again(self.target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        in_threads(Upload.abort, list(self._uploads.values()), AT_ONCE, Stop())
        if kind is None:
            self._unmark()  # raises OutputInUse, too

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        return f"{self._key}/{name}" if self._key else name

    def _listed(self) -> dict[str, Entry]:
        """The files that are there, without the marker."""
        return {name: entry for name, entry in self._beneath("").items() if name != manifest.PUBLISHING}

    def _beneath(self, above: str) -> dict[str, Entry]:
        key = self._at(above) if above else self._key
        found = tried(self._store, key, lambda: self._store.list(key), "the folder cannot be listed")
        if found is None:
            return {}
        prefix = f"{above}/" if above else ""
        inner = [self._beneath(f"{prefix}{name}") for name in sorted(found.folders)]
        return {f"{prefix}{name}": entry for name, entry in found.files.items()} | {k: v for each in inner for k, v in each.items()}

    def _marker(self) -> dict[str, Any] | None:
        """What `manifest.PUBLISHING` says now; None if it is not there."""
        key = self._at(manifest.PUBLISHING)
        begun = tried(self._store, key, lambda: self._store.begin(key, LARGEST, 0), "reading failed")
        if begun is None:
            return None
        try:
            content = json.loads(bytes(begun[2]))
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _mark(self, names: Iterable[str]) -> None:
        """Say that this run gives its files their names. Raises OutputInUse if another one has begun to since this one was started."""
        import obstore

        found, key = self._marker(), self._at(manifest.PUBLISHING)
        if found is not None and found != self._left:
            raise self._in_use()
        data = json.dumps(manifest.publishing(names, self._run)).encode()
        self._marked = True
        try:
            # What a killed run left is replaced; otherwise only one of two runs can make it.
            obstore.put(self._store.raw, key, data, mode="overwrite" if found is not None else "create", use_multipart=False)
        except Exception as error:  # noqa: BLE001 - its errors have no common base
            if type(error).__name__ in ("NotSupportedError", "NotImplementedError"):
                self._put(manifest.PUBLISHING, data)
            elif type(error).__name__ not in ("AlreadyExistsError", "PreconditionError"):
                raise not_written(self._store.failed(error, key, "writing failed"), "writing failed") from None
        self._check_marker()

    def _check_marker(self) -> None:
        if (self._marker() or {}).get("run") != self._run:
            raise self._in_use()

    def _in_use(self) -> OutputInUse:
        self._lost = True
        return OutputInUse(
            "another run writes to this output at the same time",
            path=self.target,
            hint="run the command again when the other one has ended, or choose another -o",
        )

    def _leave_marker(self) -> None:
        """Where files of this run lie among those of another, say that they are not one output: to readers, and to the other."""
        if not self._begun and self._left is None:
            self._unmark()
        elif self._begun and self._own(self._uploads):
            names = [*self._uploads, *(self._marker() or {}).get("publishing", ())]
            self._put(manifest.PUBLISHING, json.dumps(manifest.publishing(names, self._run)).encode())

    def _unmark(self) -> None:
        if self._marked:
            self._check_marker()
            self._remove([manifest.PUBLISHING])
            self._marked = False

    def _take_back(self) -> None:
        """Undo what can be undone; what is not whole afterwards stays marked."""
        if self._begun:
            self._remove(sorted(self._own(self._uploads), key=order_of, reverse=True))
        for name in sorted(self._hidden, key=order_of) if not self._begun else ():
            self._put(name, self._hidden[name])
        as_before = not self._begun and self._left is None
        if as_before or not self._listed():
            self._unmark()

    def _hide(self, names: Iterable[str]) -> None:
        """Remove files that make an old output look whole; they are small enough to be kept."""
        for name in names:
            path = self.target / name
            self._hidden[name] = tried(self._store, self._at(name), partial(read_small, path, LARGEST), "reading failed")
        self._remove(sorted(self._hidden, key=order_of, reverse=True))

    def _complete(self, names: list[str]) -> None:
        self._begun = self._begun or bool(names)
        in_threads(lambda name: self._uploads[name].complete(), names, AT_ONCE, Stop())

    def _check_alone(self) -> None:
        """Raise OutputInUse unless every file that has its name by now is the one that this run wrote, and so is the marker."""
        named = [name for name, upload in self._uploads.items() if upload.is_completed]
        self._check_marker()
        if len(self._own(named)) != len(named):
            raise self._in_use()

    def _own(self, names: Iterable[str]) -> list[str]:
        """Of these files, those that are there as this run wrote them."""
        import obstore

        def is_own(name: str) -> bool:
            try:
                found = obstore.get(self._store.raw, self._at(name), options={"head": True})
            except Exception as error:  # noqa: BLE001 - its errors have no common base
                failed = self._store.failed(error, self._at(name), "it cannot be accessed")
                if isinstance(failed, NotFound):
                    return False
                raise not_written(failed) from None
            return found.attributes.get(RUN) == self._run and found.meta["size"] == self._uploads[name].size

        names = list(names)
        return [name for name, own in zip(names, in_threads(is_own, names, AT_ONCE, Stop()), strict=True) if own]

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
