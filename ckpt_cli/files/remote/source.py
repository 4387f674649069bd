"""Files in stores as sources: what will be read is fetched ahead, many requests at a time, in a bounded amount of memory.

A disk answers in microseconds and a store in tens of milliseconds, so nothing may wait for one small read after the other:

- a file is opened with one request, which also brings its beginning or its end, where headers are;
- whoever knows what will be read says so (`RemoteSource.expect`); neighbouring ranges are one request, and the next ones are under way
  while these are used;
- what is fetched is kept until something else needs its room (`MEMORY` in all); what was read goes first.

Where the store can tell versions apart, every request asks for the version that was opened (If-Match), and every answer must be of it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeAlias

from ckpt_cli.errors import CorruptFile, NotFound, reading
from ckpt_cli.files.leftovers.pointers import refuse_pointer
from ckpt_cli.files.remote.ranges import Extent, Extents, extents_of
from ckpt_cli.files.remote.store import Buffer, Entry, Store, store_of
from ckpt_cli.files.remote.tree import ListedFile, tree_of
from ckpt_cli.files.source import FileSource
from ckpt_cli.urls import Address

if TYPE_CHECKING:
    from ckpt_cli.files.source import Files

SOON = 64
"""Files that are opened before they are asked for."""

IN_FLIGHT = 16
"""Requests at a time. A connection to a store carries some 50 to 100 MB/s."""

MEMORY = 256 << 20
"""Bytes that are kept of all files of a pool together, as long as two requests of `SMALLEST` bytes for each of them are not more."""

LARGEST, SMALLEST = 8 << 20, 256 << 10
"""Bytes of a request for what was announced: as many as memory allows for all files."""

HEAD = 256 << 10
"""Bytes at the beginning of a file that come with the first request for any: most headers and pickles are smaller."""

TAIL = 128 << 10
"""Bytes at the end that come with opening a file of torch.save, whose directory is there."""

STEP = 32 << 10
"""Bytes of a request for something small that was not announced; four times as many each time the next read goes on where it ended."""

ITEMS = ".distcp"
"""The suffix of files whose items are found by the metadata of their folder: nothing is known of them beforehand."""

TORCH = (".pt", ".pth", ".th", ".bin", ".ckpt", "")
"""Suffixes of files that are read from their end."""


Check: TypeAlias = tuple[int, int, int, Callable[[bytes], None]]
"""The place of some data, start and length of their header, and what checks that."""


class RemoteSource(FileSource):
    """A file in a store."""

    __slots__ = ("_ahead", "_blocks", "_checks", "_entry", "_extents", "_key", "_listed", "_passed", "_pool", "_read", "_starts", "_store")
    is_local = False

    def __init__(self, files: Files, pool: RemoteFiles, address: Address, store: Store, entry: Entry) -> None:
        path = str(address.path)
        self._listed = ListedFile(store, address.key, path, entry)
        super().__init__(files, self._listed.identity)
        self._pool, self._store, self._key, self._entry = pool, store, address.key, entry
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []
        self._extents = Extents.of(())
        self._read: set[int] = set()
        self._checks: list[Check] = []
        self._passed: set[int] = set()
        self._ahead = (0, STEP)

    def read_at(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise CorruptFile(f"the file ends at byte {self.size}", path=self.path, expected=f"{offset + len(buffer)} bytes")
        if not buffer:
            return
        for place, start, length, check in self._due(offset, offset + len(buffer)):
            header = bytearray(length)
            self._fill(start, memoryview(header), counted=False)
            with reading(self.path):
                check(bytes(header))
            # Not before: who only samples a file may pass over an error, and who reads it then has to meet the same one.
            self._passed.add(place)
        self._fill(offset, buffer, counted=True)

    def expect(self, ranges: Iterable[tuple[int, int]], *, exactly: bool = False) -> None:
        """Tell what will be read next, in this order, as ranges of bytes. What was announced before is forgotten.

        ``exactly``: next to nothing besides is fetched, as for weights; otherwise whatever saves a request.
        """
        with self._pool.lock:
            wanted = [(self._with_header(start), stop) for start, stop in ranges]
            self._pool.announced.add(self.path)
            self._extents = extents_of(wanted, self.size, self._pool.request_size(), exactly=exactly)
            self._read = set()
            # Where nothing else is known to be in the way, the first ones can already come.
            for extent in self._extents.in_order[: self._pool.ahead()]:
                self._begin_extent(extent)

    def before_reading(self, place: int, start: int, length: int, check: Callable[[bytes], None]) -> None:
        """Have bytes of a header checked when what follows it is read: then they are fetched together."""
        with self._pool.lock:
            insort(self._checks, (place, start, length, check), key=lambda each: each[0])

    def check_unchanged(self) -> None:
        """Raise SourceChanged unless the file is the one that was opened. Where every answer names its version, that is known."""
        if self._entry.version is not None or (self._entry.tag is not None and self._store.door == "obstore"):
            return
        self._listed.check_unchanged()

    def hold(self, start: int, data: Buffer) -> None:
        """Keep bytes that came with opening the file."""
        if len(data):
            block = Block(start, start + len(data), None)
            block.future.set_result(memoryview(data))
            with self._pool.lock:
                self._add(block)

    # -- inside: all of this holds the lock of the pool, except while waiting ---------------------------------------------

    def _due(self, start: int, stop: int) -> list[Check]:
        """The checks of what lies in a range that it has not passed yet."""
        if len(self._passed) == len(self._checks):
            return []
        with self._pool.lock:
            first = max(0, bisect_right(self._checks, start, key=lambda each: each[0]) - 1)
            last = bisect_left(self._checks, stop, key=lambda each: each[0])
            return [each for each in self._checks[first:last] if each[0] not in self._passed]

    def _with_header(self, start: int) -> int:
        place = bisect_right(self._checks, start, key=lambda each: each[0]) - 1
        is_due = place >= 0 and self._checks[place][0] == start and start not in self._passed
        return self._checks[place][1] if is_due else start

    def _fill(self, offset: int, buffer: memoryview, *, counted: bool) -> None:
        done = 0
        while done < len(buffer):
            at = offset + done
            with self._pool.lock:
                block = self._block_at(at) or self._begin(at, offset + len(buffer))
                self._pool.touch(self, block)
            data = block.future.result()
            part = data[at - block.start : at - block.start + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            if counted and block.needed is not None:
                with self._pool.lock:
                    block.needed -= len(part)
                    if block.needed <= 0:
                        self._read.add(block.start)
                        self._pool.spent(block)

    def _block_at(self, offset: int) -> Block | None:
        place = bisect_right(self._starts, offset) - 1
        block = self._blocks[self._starts[place]] if place >= 0 else None
        if block is None or offset >= block.stop:
            return None
        if block.future.done() and block.future.exception() is not None:
            self._pool.drop(self, block)  # what failed once may be asked for again
            return None
        return block

    def _begin(self, offset: int, stop: int) -> Block:
        """Ask for a range from ``offset`` on, and for what is needed after it."""
        extent = self._extents.at(offset)
        if extent is not None:
            block = self._request(offset, extent.stop, extent.needed if offset == extent.start else None)
            for following in self._extents.after(extent, self._pool.ahead()):
                self._begin_extent(following)
            return block
        expected, ahead = self._ahead
        length = stop - offset
        if length < STEP:
            ahead = min(ahead * 4, LARGEST) if offset == expected else STEP
            length = max(length, HEAD if offset == 0 else ahead)
        self._ahead = (min(offset + length, self.size), ahead)
        return self._request(offset, min(offset + length, self.size), None)

    def _begin_extent(self, extent: Extent) -> None:
        # A reader that is behind the others comes to ranges which these have read and let go of.
        if extent.start not in self._read and self._block_at(extent.start) is None and self._pool.has_room(extent.stop - extent.start):
            self._request(extent.start, extent.stop, extent.needed)

    def _request(self, start: int, stop: int, needed: int | None) -> Block:
        """Begin to fetch a range, up to where something is there already."""
        place = bisect_right(self._starts, start)
        if place < len(self._starts) and self._starts[place] < stop:
            stop, needed = self._starts[place], None
        block = Block(start, stop, needed, self._pool.fetch(self._store, self._key, start, stop, self._entry))
        self._add(block)
        return block

    def _add(self, block: Block) -> None:
        insort(self._starts, block.start)
        self._blocks[block.start] = block
        self._pool.keep(self, block)

    def forget(self, block: Block) -> None:
        """Let go of a block."""
        if self._blocks.pop(block.start, None) is not None:
            del self._starts[bisect_left(self._starts, block.start)]


class Block:
    """A range of a file that is there, or on its way. ``needed``: how many of its bytes are still to be read, None if that is not known."""

    __slots__ = ("future", "is_spent", "needed", "start", "stop")

    def __init__(self, start: int, stop: int, needed: int | None, future: Future[memoryview] | None = None) -> None:
        self.start, self.stop, self.needed, self.is_spent = start, stop, needed, False
        self.future: Future[memoryview] = Future() if future is None else future


class RemoteFiles:
    """The remote files of a pool: their requests, and the memory that these share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.announced: set[str] = set()
        self._workers = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="ckpt-remote")
        self._opening: dict[Address, Future[Opened]] = {}
        self._waiting: deque[Address] = deque()
        self._kept: OrderedDict[int, tuple[RemoteSource, Block]] = OrderedDict()
        self._size = self._spent = 0

    def open_soon(self, addresses: Iterable[Address]) -> None:
        """Begin to open files that will all be opened."""
        with self.lock:
            self._waiting.extend(addresses)
            self._open_more()

    def source(self, files: Files, address: Address) -> RemoteSource:
        """A file, opened. Raises NotFound, Unreadable, NotFetched."""
        with self.lock:
            opening = self._opening.pop(address, None)
            self._open_more()
        opened = opening.result() if opening is not None else _opened(address)
        tree, key = tree_of(address.path)
        tree.refuse_unfinished(key)
        source = RemoteSource(files, self, address, opened.store, opened.entry)
        for start, data in opened.parts:
            source.hold(start, data)
        return source

    def _open_more(self) -> None:
        while self._waiting and len(self._opening) < SOON:
            address = self._waiting.popleft()
            if address not in self._opening:
                self._opening[address] = self._workers.submit(_opened, address)

    def close(self) -> None:
        """Ask for nothing any more."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            self._kept.clear()
            self._size = self._spent = 0

    def fetch(self, store: Store, key: str, start: int, stop: int, entry: Entry) -> Future[memoryview]:
        """Begin to fetch a range."""
        return self._workers.submit(lambda: memoryview(store.read(key, start, stop, entry)))

    def keep(self, source: RemoteSource, block: Block) -> None:
        """Count a block, and let go of those that were used longest ago if there is no room for all."""
        self._kept[id(block)] = source, block
        self._size += block.stop - block.start
        for number in list(self._kept):
            if self._size <= self._limit():
                break
            other_source, other = self._kept[number]
            if other is not block and other.future.done():
                self.drop(other_source, other)

    def touch(self, source: RemoteSource, block: Block) -> None:
        """Note that a block is being used."""
        if id(block) in self._kept and not block.is_spent:
            self._kept.move_to_end(id(block))

    def spent(self, block: Block) -> None:
        """Note that all of a block was read: it is kept for who reads it again, but goes first."""
        if id(block) in self._kept and block.needed is not None:
            block.needed = None
            block.is_spent = True
            self._spent += block.stop - block.start
            self._kept.move_to_end(id(block), last=False)

    def drop(self, source: RemoteSource, block: Block) -> None:
        """Let go of a block."""
        if self._kept.pop(id(block), None) is not None:
            self._size -= block.stop - block.start
            self._spent -= block.stop - block.start if block.is_spent else 0
            source.forget(block)

    def has_room(self, length: int) -> bool:
        """Whether something may be fetched before it is asked for."""
        return self._size - self._spent + length <= self._limit()

    def request_size(self) -> int:
        """Bytes of a request: two for each file that is being read have room."""
        return max(SMALLEST, min(LARGEST, MEMORY // (4 * max(1, len(self.announced)))))

    def ahead(self) -> int:
        """How many requests of one file are under way before they are needed."""
        return max(1, IN_FLIGHT // max(1, len(self.announced)))

    def _limit(self) -> int:
        return max(MEMORY, 2 * SMALLEST * len(self.announced))


@dataclass(frozen=True, slots=True)
class Opened:
    """A file and what was read to open it: (offset, bytes)."""

    store: Store
    entry: Entry
    parts: tuple[tuple[int, Buffer], ...]


def _opened(address: Address) -> Opened:
    """The status of a file with its beginning, in one request; of a file of torch.save with its end and its beginning, in two."""
    store = store_of(address)
    from_end = PurePath(address.key).suffix in TORCH
    head = STEP if PurePath(address.key).suffix == ITEMS else HEAD
    begun = store.begin(address.key, 0 if from_end else head, TAIL if from_end else 0)
    if begun is None:
        raise NotFound("no such file", path=address.path)
    entry, start, data = begun
    refuse_pointer(data, str(address.path), entry.size)
    if not from_end or start == 0:
        return Opened(store, entry, ((start, data),))
    head = min(HEAD, start)
    return Opened(store, entry, ((0, store.read(address.key, 0, head, entry)), (start, data)))
