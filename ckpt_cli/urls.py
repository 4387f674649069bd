"""Addresses of files that are not on this machine, such as ``s3://bucket/run``.

pathlib and ``os.path`` make ``s3:/`` of ``s3://``, so an address travels as a path below a file that is never a folder:
``/dev/null/s3:/bucket/run``. It can be joined, cut and compared like any other path, and whoever opens it without knowing
what it is gets "no such file" from the system (ENOTDIR), never other bytes. `ckpt_cli.files` knows what it is; `shown` makes
addresses of such paths again in whatever is printed or written.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from ckpt_cli.paths import absolute

ABOVE = f"{os.devnull}/"
URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<root>[^/?#]*)(?P<key>[^?#]*)(?:\?(?P<query>[^#]*))?(?:#.*)?", re.DOTALL)
VIRTUAL = re.compile(rf"{re.escape(ABOVE)}(?P<scheme>[a-z][a-z0-9+.-]+):/")
WEB = ("http", "https")
BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss")
"""The schemes of object stores, which are read and written; all others are only read."""

_queries: dict[tuple[str, str], str] = {}
"""What followed the question mark of web addresses: it may be a signature, so it must not be part of a path that is shown.

By scheme and host and path. It is only added to, when an argument is read."""

_given: dict[tuple[str, str], tuple[int, frozenset[str]]] = {}
"""How often callers named a place in a store, and which keys, by scheme and root: each time, what is known of it is looked up anew."""


@dataclass(frozen=True, slots=True)
class Address:
    """A place in a store: scheme, root (bucket, container or host), and the key of a file or folder, without slashes around it."""

    scheme: str
    root: str
    key: str

    @property
    def url(self) -> str:
        """The address as people write it, without anything secret."""
        return f"{self.scheme}://{self.root}/{self.key}".rstrip("/") if self.key else f"{self.scheme}://{self.root}"

    @property
    def query(self) -> str:
        """What was given behind the path of a web address, of this one or else of a folder that it lies in; never to be shown."""
        place = f"{self.root}/{self.key}"
        while place and (found := _queries.get((self.scheme, place))) is None:
            place = place.rpartition("/")[0]
        return found or "" if place else ""

    @property
    def given(self) -> tuple[int, frozenset[str]]:
        """How often callers named something in this store so far, and which keys."""
        return _given.get((self.scheme, self.root), (0, frozenset()))

    @property
    def path(self) -> Path:
        """The path by which it is known in here."""
        return Path(f"{ABOVE}{self.scheme}:/{self.root}", self.key)


def address_of(path: str | os.PathLike[str]) -> Address | None:
    """The address behind a path that `Address.path` made, or that was made from such a one; None for a path of this machine."""
    text = os.fspath(path)
    if not text.startswith(ABOVE):
        return None
    found = VIRTUAL.match(text)
    if found is None:
        return None
    root, _, key = text[found.end() :].partition("/")
    return Address(found["scheme"], root, key.strip("/")) if root else None


def parsed(url: str) -> Address | None:
    """The address that a URL is, or None if it is none. It is noted as one that a caller named.

    Raises UsageError if it holds a password: it would end in the history of the shell, and in manifests.
    """
    found = URL.fullmatch(url)
    if found is None or not found["root"]:
        return None
    scheme, root, key = found["scheme"].lower(), found["root"], found["key"]
    if scheme in WEB:
        key, query = unquote(key), found["query"]
    else:
        # Elsewhere "?" and "#" are parts of names.
        key, query = url[len(found["scheme"]) + 3 + len(root) :], None
    from ckpt_cli.errors import UsageError

    user, at, host = root.rpartition("@")
    if at and (":" in user or scheme in (*WEB, "s3", "gs", "az")):
        raise UsageError(
            "the address contains a user or a password",
            path=f"{scheme}://{host}{quote(key)}",
            expected="an address without them",
            hint="pass credentials in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    parts = [part for part in key.split("/") if part not in ("", ".")]
    if scheme in BUCKETS and "//" in key.rstrip("/"):
        raise UsageError(
            "the address contains //, which is part of the key in a store, and a path has no such parts",
            path=f"{scheme}://{root}{key}",
            expected="an address with single slashes",
            hint=f"pass {Address(scheme, root, '/'.join(parts)).url} if that is meant; else give the objects other keys",
        )
    if ".." in parts:
        raise UsageError("the address contains ..", path=f"{scheme}://{root}{key}", expected="an address without it")
    address = Address(scheme, root, "/".join(parts))
    times, keys = address.given
    _given[scheme, root] = times + 1, keys | {address.key}
    if query:
        _queries[scheme, f"{root}/{address.key}"] = query
    return address


def shown(text: str) -> str:
    """A text with addresses in place of the paths that stand for them.

    >>> shown("/dev/null/s3:/bucket/run is empty")
    's3://bucket/run is empty'
    """
    return VIRTUAL.sub(r"\g<scheme>://", text) if ABOVE in text else text


def full_name(path: str | os.PathLike[str]) -> str:
    """What is recorded of a path: its address, or the whole path on this machine."""
    return shown(absolute(path))


def recorded(name: str) -> Path:
    """The path of which `full_name` made this name, which a manifest has.

    >>> str(recorded("s3://bucket/base")), str(recorded("/data/base"))
    ('/dev/null/s3:/bucket/base', '/data/base')
    """
    found = URL.fullmatch(name)
    if found is None or not found["root"]:
        return Path(name)
    return Address(found["scheme"].lower(), found["root"], name[found.end("root") :].strip("/")).path


def is_unnamed(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in a store of which the caller named nothing: which host is asked is not for a file to decide."""
    address = address_of(path)
    return address is not None and not address.given[0]


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path stands for an address."""
    return address_of(path) is not None
