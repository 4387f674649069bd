"""A store on this machine: moto's S3 behind a proxy that counts what passes, and that can delay, cut and refuse."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

SECRET = "ThisMustNeverBeShown"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": f"AKID{SECRET}", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}


@dataclass(frozen=True)
class Request:
    """One request: what was asked for, and how many bytes of a body were sent."""

    method: str
    path: str
    listing: str | None
    range: str | None
    status: int
    sent: int
    query: str = ""

    @property
    def key(self) -> str:
        """The key without its bucket; empty for listings."""
        return self.path.lstrip("/").partition("/")[2]


@dataclass
class Fault:
    """What the proxy does to the next ``times`` requests for keys that match: answer a status, cut the body, wait, or hang up.

    What is written is matched with its query. ``hang_up``: before the request reaches the store, or after.
    """

    pattern: str
    times: int
    status: int | None = None
    cut: int | None = None
    delay: float = 0.0
    method: str = "GET"
    hang_up: Literal["before", "after"] | None = None


@dataclass
class Proxy:
    """What passed, and what shall go wrong."""

    upstream: tuple[str, int]
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    before: Callable[[str], None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of(self, pattern: str) -> list[Request]:
        """The requests for keys that match, without listings."""
        return [each for each in self.requests if each.listing is None and re.search(pattern, each.key)]

    def listings(self, prefix: str | None = None) -> list[Request]:
        return [each for each in self.requests if each.listing is not None and prefix in (None, each.listing)]

    def sent(self, pattern: str = "") -> int:
        return sum(each.sent for each in self.of(pattern))

    def take(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.pattern, path):
                    fault.times -= 1
                    return fault
        return None


@contextmanager
def proxied(upstream: tuple[str, int]) -> Iterator[Proxy]:
    proxy = Proxy(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def pass_on(self) -> None:
            address = urlsplit(self.path)
            query = parse_qs(address.query)
            listing = query.get("prefix", [""])[0] if "list-type" in query else None
            path = unquote(address.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else None
            asked = path if self.command in ("GET", "HEAD") else f"{path}?{address.query}"
            fault = proxy.take(self.command, asked if listing is None else f"?{listing}")
            if proxy.before is not None:
                proxy.before(path)
            if fault is not None and fault.delay:
                time.sleep(fault.delay)
            cut, hang_up = (None, None) if fault is None else (fault.cut, fault.hang_up)
            if fault is not None and fault.status is not None:
                status, headers, cut = fault.status, list[tuple[str, str]](), None
                data = f"<Error><Code>Fault</Code><Message>{SECRET}</Message></Error>".encode()
            elif hang_up == "before":
                status, headers, data = 0, [], b""
            else:
                connection = http.client.HTTPConnection(*proxy.upstream, timeout=120)
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                response = connection.getresponse()
                data, status, headers = response.read(), response.status, response.getheaders()
                connection.close()
            silent = self.command == "HEAD" or hang_up is not None or (fault is not None and fault.status is not None)
            # Before the answer: who has it may look at once.
            with proxy.lock:
                sent = 0 if silent else len(data[:cut])
                proxy.requests.append(Request(self.command, path, listing, self.headers.get("Range"), status, sent, address.query))
            if hang_up is not None:
                self.close_connection = True
            else:
                self.answer(status, headers, data, cut)

        def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, cut: int | None) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = next((value for name, value in headers if name.lower() == "content-length"), str(len(data)))
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(data[:cut])
            if cut is not None and cut < len(data):
                self.wfile.flush()
                self.close_connection = True

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()


class Bucket:
    """A bucket of the store, filled without the proxy."""

    def __init__(self, client: Any, name: str) -> None:
        self.client, self.name = client, name
        client.create_bucket(Bucket=name)

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def names(self, prefix: str = "") -> list[str]:
        """What can be seen, without the prefix."""
        found = self.client.list_objects_v2(Bucket=self.name, Prefix=prefix).get("Contents", [])
        return [each["Key"].removeprefix(prefix) for each in found]

    def content(self, prefix: str) -> dict[str, bytes]:
        """The files of a folder, by name."""
        get = self.client.get_object
        return {name: get(Bucket=self.name, Key=f"{prefix}/{name}")["Body"].read() for name in self.names(f"{prefix}/")}

    def uploads(self) -> list[str]:
        """The keys of multipart uploads that were neither completed nor given up."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])]

    def fill(self, folder: Path, prefix: str) -> str:
        """Copy a folder into the bucket; returns its address."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"s3://{self.name}/{prefix}"
