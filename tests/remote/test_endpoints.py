"""Stores behind another address than the usual one, as emulators, proxies and private clouds are: for each family, with and without TLS."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

import ckpt_cli
from ckpt_cli.errors import Unreadable
from tests import tiny
from tests.remote.test_commands import content

pytest.importorskip("obstore")

KEY = "QUJD"  # base64
DATE = "Sun, 29 Nov 2026 12:00:00 GMT"


class Blobs(http.server.BaseHTTPRequestHandler):
    """What Azure and Google answer to a listing and to a read; the files are those of ``folder``."""

    folder: Path
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(asked.query).items()}
        if query.get("comp") == "list" or "list-type" in query:
            return self.answer(200, self.listing(query.get("prefix", ""), azure="comp" in query).encode())
        file = self.folder / unquote(asked.path).partition("/box/")[2]
        if not file.is_file():
            return self.answer(404, b"")
        data, wanted = file.read_bytes(), self.headers.get("x-ms-range") or self.headers.get("Range")
        if wanted is None:
            return self.answer(200, data)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        if not first:
            if self.path.startswith("/account"):
                return self.answer(400, b"")  # Azure knows no ranges from the end
            first, last = str(max(0, len(data) - int(last))), ""
        start, stop = int(first), min(len(data), int(last) + 1 if last else len(data))
        return self.answer(206, data[start:stop], f"bytes {start}-{stop - 1}/{len(data)}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def listing(self, prefix: str, *, azure: bool) -> str:
        keys = [path.relative_to(self.folder).as_posix() for path in sorted(self.folder.rglob("*")) if path.is_file()]
        below = [key for key in keys if key.startswith(prefix)]
        folders = sorted({prefix + key[len(prefix) :].split("/")[0] + "/" for key in below if "/" in key[len(prefix) :]})
        found = [(escape(key), (self.folder / key).stat().st_size) for key in below if "/" not in key[len(prefix) :]]
        if azure:
            blobs = "".join(
                f"<Blob><Name>{key}</Name><Properties><Last-Modified>{DATE}</Last-Modified><Content-Length>{size}</Content-Length>"
                f'<Content-Type>x</Content-Type><Etag>"{size}"</Etag></Properties></Blob>'
                for key, size in found
            )
            names = "".join(f"<BlobPrefix><Name>{name}</Name></BlobPrefix>" for name in folders)
            return f"<EnumerationResults><Prefix>{prefix}</Prefix><Blobs>{blobs}{names}</Blobs><NextMarker/></EnumerationResults>"
        objects = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-11-29T12:00:00.000Z</LastModified>"
            f'<ETag>"{size}"</ETag><Size>{size}</Size></Contents>'
            for key, size in found
        )
        names = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in folders)
        return f"<ListBucketResult><Name>box</Name><IsTruncated>false</IsTruncated>{objects}{names}</ListBucketResult>"

    def answer(self, status: int, body: bytes, part: str = "") -> None:
        self.send_response(status)
        total = int(part.rpartition("/")[2]) if part else len(body)
        for name, value in {"Content-Length": str(len(body)), "Last-Modified": DATE, "ETag": f'"{total}"'}.items():
            self.send_header(name, value)
        if part:
            self.send_header("Content-Range", part)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    handler = type("Served", (Blobs,), {"folder": tmp_path / "served"})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(params=["az", "gs"])
def scheme(request: pytest.FixtureRequest, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    settings = {
        "az": {
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"{endpoint}/account",
        },
        "gs": {"GOOGLE_BASE_URL": endpoint, "GOOGLE_SKIP_SIGNATURE": "true"},
    }
    for name, value in settings[request.param].items():
        monkeypatch.setenv(name, value)
    return str(request.param)


def test_a_model_behind_another_address_is_read(scheme: str, tmp_path: Path) -> None:
    model = tiny.folder(tmp_path / "served" / "runs" / "model", tiny.weights(1), tiny.unknown())
    ckpt_cli.merge(f"{scheme}://box/runs/model", tmp_path / "there", dtype="bf16")
    ckpt_cli.merge(model, tmp_path / "here", dtype="bf16")
    assert content(tmp_path / "there") == content(tmp_path / "here")
    assert "model.safetensors" in content(tmp_path / "there")


def test_without_a_word_nothing_goes_without_tls(scheme: str, impatient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that has not been named in the environment is not asked in plain text."""
    tiny.folder(tmp_path / "served" / "runs" / "model", tiny.weights(1), tiny.unknown())
    monkeypatch.setattr("ckpt_cli.files.remote.bucket_store.ENDPOINTS", ())
    with pytest.raises(Unreadable):
        ckpt_cli.detect(f"{scheme}://box/runs/model")
