"""Folders of web servers, which nobody can list: by their page of links, if there is one, or by the usual names in a folder of a model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from urllib.parse import quote, unquote

from ckpt_cli.errors import Unreadable
from ckpt_cli.files.manifest import PUBLISHING
from ckpt_cli.files.remote.store import Entry, Listing, Store
from ckpt_cli.urls import Address

INDEX = "model.safetensors.index.json"
USUAL = (
    PUBLISHING,
    INDEX,
    "model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
MAX_PAGE = 8 << 20
"""Bytes of a page of links, or of an index."""

UNKNOWN = Entry(-1)
NO_FILE = "ckpt-asks-for-a-file-that-is-not-there"
BEGINNING = 64

COUNTED = re.compile(r"(?P<before>.*world_size_(?P<count>\d{1,4})_rank_)(?P<number>\d{1,4})(?P<after>\D.*)", re.ASCII)
PARTS = re.compile(r"(?P<before>(?:.*\D)?)(?P<number>\d{1,6})(?P<after>[-_.]of[-_.](?P<count>\d{1,6})(?:\D.*)?)", re.ASCII)
MOST_PARTS = 4096
"""Files that are asked for because a name says that there are so many."""


class Answers:
    """What a web server says of files that nobody named: some answer with a page (to sign in, of an application) to every name."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._pages: dict[str, bytes | None] = {}

    def status(self, key: str) -> Entry | None:
        """What there is at a key; a page in place of a file is none."""
        entry = self._store.status(key)
        if entry is None or (page := self._page(key.rpartition("/")[0])) is None:
            return entry
        start = self._beginning(key)
        return None if start is None or start == page or start.lstrip().startswith(b"<") else entry

    def _page(self, folder: str) -> bytes | None:
        """How the answer to a name begins that no file in a folder has, None if there is none."""
        with self._lock:
            if folder not in self._pages:
                self._pages[folder] = self._beginning(_below(folder, NO_FILE)) if _guessed(self._store, _below(folder, NO_FILE)) else None
            return self._pages[folder]

    def _beginning(self, key: str) -> bytes | None:
        begun = self._store.begin(key, BEGINNING, 0)
        return None if begun is None else bytes(begun[2][:BEGINNING])


def parts_of(name: str) -> Iterator[str]:
    """The names of all files of the set that a name counts: ranks, or parts.

    >>> list(parts_of("m_world_size_2_rank_0.pt")), list(parts_of("m-00001-of-00002.bin"))
    (['m_world_size_2_rank_0.pt', 'm_world_size_2_rank_1.pt'], ['m-00001-of-00002.bin', 'm-00002-of-00002.bin'])
    """
    for pattern, first in ((COUNTED, 0), (PARTS, 1)):
        found = pattern.fullmatch(name)
        if found is not None and int(found["count"]) <= MOST_PARTS:
            # torch counts parts of distributed saves from 0, everybody else from 1.
            start = 0 if int(found["number"]) == 0 else first
            width = len(found["number"]) if found["number"].startswith("0") else 1
            yield from (f"{found['before']}{number:0{width}d}{found['after']}" for number in range(start, start + int(found["count"])))
            return


def listing_of_web(store: Store, answers: Answers, address: Address, given: frozenset[str]) -> Listing | None:
    """What is known to lie in a folder of a web server; None if nothing is. Files whose size is not known have -1."""
    page, key = names_on_page(address), address.key
    files: dict[str, Entry] = {}
    folders: frozenset[str] = frozenset()
    if page is not None:
        files = {name: UNKNOWN for name in page if not name.endswith("/")}
        folders = frozenset(name.rstrip("/") for name in page if name.endswith("/"))
    elif key in given or any(each.rpartition("/")[0] == key for each in given):
        named = [each.rpartition("/")[2] for each in sorted(given) if each.rpartition("/")[0] == key and each]
        with ThreadPoolExecutor(len(USUAL), thread_name_prefix="ckpt-web") as pool:
            usual = list(dict.fromkeys((*USUAL, *(part for name in named for part in parts_of(name) if part not in named))))
            guessed = dict(zip(usual, pool.map(lambda name: _guessed(answers, _below(key, name)), usual), strict=True))
        there = {**guessed, **{name: store.status(_below(key, name)) for name in named}}
        files = {name: entry for name, entry in there.items() if entry is not None}
        for name in [name for name in files if name.endswith(".index.json")]:
            files |= {each: UNKNOWN for each in _indexed(store, _below(key, name), files[name]) if each not in files}
    return Listing(files, folders) if files or folders else None


def _below(key: str, name: str) -> str:
    return f"{key}/{name}" if key else name


def _indexed(store: Store, key: str, entry: Entry) -> list[str]:
    """The files that an index names in its own folder."""
    if not 0 < entry.size <= MAX_PAGE * 8:
        return []
    try:
        content = json.loads(bytes(store.read(key, 0, entry.size, entry)))
        return sorted({name for name in content["weight_map"].values() if isinstance(name, str) and "/" not in name})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []  # whoever reads the index says what is wrong with it


def _guessed(store: Store | Answers, key: str) -> Entry | None:
    """A file that may be there. A server that refuses it, as those do that know signatures only, may do so whether it is there or not."""
    try:
        return store.status(key)
    except Unreadable:
        return None


def names_on_page(address: Address) -> list[str] | None:
    """The names that the page of a folder links to, as Apache, nginx and Python write it; None if there is no such page."""
    from urllib.request import urlopen

    query = f"?{address.query}" if address.query else ""
    try:
        with urlopen(f"{address.scheme}://{address.root}/{quote(address.key)}{'/' if address.key else ''}{query}", timeout=60) as answer:
            text = answer.read(MAX_PAGE).decode("utf-8", "replace") if answer.headers.get_content_type() == "text/html" else ""
    except Exception:  # noqa: BLE001 - a server without such pages answers in any way
        return None
    if "<title>Index of" not in text and "<title>Directory listing for" not in text:
        return None
    links = _Links()
    links.feed(text)
    names = dict.fromkeys(unquote(link.removeprefix("./")) for link in links.found if "?" not in link)
    return [name for name in names if name.strip("/") not in ("", ".", "..") and "/" not in name.rstrip("/")]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]
