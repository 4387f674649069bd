"""Folders of web servers, which nobody can list: by their page of links, if there is one, or by the usual names in a folder of a model."""

from __future__ import annotations

import json
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


def listing_of_web(store: Store, address: Address, given: frozenset[str]) -> Listing | None:
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
            guessed = dict(zip(USUAL, pool.map(lambda name: _guessed(store, _below(key, name)), USUAL), strict=True))
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


def _guessed(store: Store, key: str) -> Entry | None:
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
