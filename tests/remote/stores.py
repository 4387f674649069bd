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

    @property
    def key(self) -> str:
        """The key without its bucket; empty for listings."""
        return self.path.lstrip("/").partition("/")[2]


@dataclass
class Fault:
    """What the proxy does to the next ``times`` requests for keys that match: answer a status, cut the body, or wait."""

    pattern: str
    times: int
    status: int | None = None
    cut: int | None = None
    delay: float = 0.0
    method: str = "GET"


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
            fault = proxy.take(self.command, path if listing is None else f"?{listing}")
            if proxy.before is not None:
                proxy.before(path)
            if fault is not None and fault.delay:
                time.sleep(fault.delay)
            cut = None
            if fault is not None and fault.status is not None:
                status, headers = fault.status, list[tuple[str, str]]()
                data = f"<Error><Code>Fault</Code><Message>{SECRET}</Message></Error>".encode()
            else:
                connection = http.client.HTTPConnection(*proxy.upstream, timeout=120)
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                response = connection.getresponse()
                data, status, headers = response.read(), response.status, response.getheaders()
                cut = None if fault is None else fault.cut
                connection.close()
            sent = 0 if self.command == "HEAD" or (fault is not None and fault.status is not None) else len(data[:cut])
            # Before the answer: who has it may look at once.
            with proxy.lock:
                proxy.requests.append(Request(self.command, path, listing, self.headers.get("Range"), status, sent))
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

    def __init__(self, client: object, name: str) -> None:
        self.client, self.name = client, name
        client.create_bucket(Bucket=name)  # type: ignore[attr-defined]

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)  # type: ignore[attr-defined]

    def fill(self, folder: Path, prefix: str) -> str:
        """Copy a folder into the bucket; returns its address."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"s3://{self.name}/{prefix}"
