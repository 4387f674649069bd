"""Web servers, and what fsspec opens: in memory here, so that the same code is used as for the hub or HDFS."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.errors import NotFound, NotRecognised, SourceChanged, Unreadable, UsageError
from ckpt_cli.files.source import Files
from ckpt_cli.given import path_of
from tests import tiny
from tests.cli import ckpt_fork as ckpt
from tests.remote.stores import SECRET
from tests.remote.test_commands import content, said

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path / "model", tiny.weights(1), tiny.unknown())


def fill(system: Any, folder: Path, prefix: str) -> str:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            system.pipe(f"/{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return f"memory://{prefix}"


@pytest.mark.parametrize("layout", ["layouts/lightning/trainer", "layouts/plain-files/hub"])
def test_fsspec(data: Path, layout: str, memory: Any, tmp_path: Path) -> None:
    address = fill(memory, data / layout, "some/run")
    assert said(lambda: ckpt_cli.inspect(address), address) == said(lambda: ckpt_cli.inspect(data / layout), data / layout)
    ckpt_cli.merge(address, tmp_path / "there", dtype="bf16")
    ckpt_cli.merge(data / layout, tmp_path / "here", dtype="bf16")
    assert content(tmp_path / "there") == content(tmp_path / "here")
    assert "model.safetensors" in content(tmp_path / "there")


def test_fsspec_has_the_same_errors(model: Path, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = fill(memory, model, "run")
    with pytest.raises(NotFound, match="no such file or folder"):
        ckpt_cli.detect("memory://run/nothing")
    with Files() as files:
        opened = files.source(path_of(f"{address}/model.safetensors"))
        memory.pipe("/run/model.safetensors", memory.cat("/run/model.safetensors")[:-1])
        with pytest.raises(SourceChanged):
            files.check_unchanged()
        assert opened.path.endswith("run/model.safetensors")

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(f"403 for {SECRET}")

    monkeypatch.setattr(type(memory), "cat_file", fail)
    with pytest.raises(Unreadable, match="access was denied") as caught:
        ckpt_cli.detect(f"{address}/model.safetensors")
    assert SECRET not in str(caught.value)


def test_a_package_that_a_scheme_needs() -> None:
    if fsspec.utils.get_protocol("sftp://") and not __import__("importlib").util.find_spec("paramiko"):
        with pytest.raises(UsageError, match="sftp:// needs paramiko, which is not installed"):
            ckpt_cli.detect("sftp://host/run")


class Web(http.server.SimpleHTTPRequestHandler):
    """A server of files that knows ranges. Pages of links, and ranges, can be turned off; a query may be needed."""

    protocol_version = "HTTP/1.1"
    pages = ranges = True
    needed = ""
    asked: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = Path(self.translate_path(self.path))
        if self.needed and self.needed not in self.path:
            self.send_error(403)
        elif path.is_dir() and not self.pages:
            self.send_error(404)
        elif path.is_file() and self.ranges and (asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))):
            data = path.read_bytes()
            start = int(asked[1]) if asked[1] else max(0, len(data) - int(asked[2]))
            stop = min(int(asked[2]) + 1, len(data)) if asked[1] and asked[2] else len(data)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            self.send_header("Content-Length", str(stop - start))
            self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
            self.end_headers()
            self.wfile.write(data[start:stop])
        else:
            super().do_GET()

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        if self.needed and self.needed not in self.path:
            self.send_error(403)
        elif not self.pages and Path(self.translate_path(self.path)).is_dir():
            self.send_error(404)
        else:
            super().do_HEAD()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, type[Web]]]:
    pytest.importorskip("obstore")
    handler = type("Handler", (Web,), {"asked": []})
    (tmp_path / "www").mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(tmp_path / "www")))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("pages", [True, False])
@pytest.mark.parametrize("named", ["", "/model.safetensors.index.json"])
def test_a_model_on_a_web_server(pages: bool, named: str, web: tuple[str, type[Web]], tmp_path: Path) -> None:
    """A folder is known by its page of links, or by the usual names and the index; a file is enough."""
    (url, handler), folder = web, tmp_path / "www" / "some" / "model"
    handler.pages = pages
    ckpt_cli.merge(tiny.folder(tmp_path / "model", tiny.weights(1), tiny.unknown()), folder, max_shard_size="4KB")
    (folder / "ckpt-manifest.json").unlink()
    assert len(list(folder.glob("*.safetensors"))) > 2
    address = f"{url}/some/model{named}"
    ckpt_cli.merge(address, tmp_path / "there")
    ckpt_cli.merge(f"{folder}{named}", tmp_path / "here")
    assert content(tmp_path / "there") == content(tmp_path / "here")
    assert {"config.json", "tokenizer.json"} <= content(tmp_path / "there").keys()


def test_one_file(web: tuple[str, type[Web]], tmp_path: Path) -> None:
    (url, handler), folder = web, tmp_path / "www" / "x"
    tiny.folder(folder, tiny.weights(1), tiny.unknown())
    handler.pages = False
    address = f"{url}/x/model.safetensors"
    assert said(lambda: ckpt_cli.inspect(address), f"{url}/x") == said(lambda: ckpt_cli.inspect(folder / "model.safetensors"), folder)
    with pytest.raises(NotFound):
        ckpt_cli.inspect(f"{url}/y/model.safetensors")
    with pytest.raises((NotFound, NotRecognised)):
        ckpt_cli.inspect(f"{url}/y")


def test_a_signed_address(web: tuple[str, type[Web]], tmp_path: Path) -> None:
    """What follows the question mark goes with every request, and is never shown or written."""
    (url, handler), folder = web, tmp_path / "www" / "x"
    tiny.folder(folder, tiny.weights(1), tiny.unknown())
    handler.needed, handler.pages = f"X-Amz-Signature={SECRET}", False
    address = f"{url}/x/model.safetensors"
    for words in (["inspect"], ["merge", "-o", tmp_path / "out"]):
        outcome = ckpt(words[0], f"{address}?X-Amz-Expires=60&X-Amz-Signature={SECRET}", *words[1:], "--json")
        assert outcome.code == 0, outcome.err
        assert SECRET not in outcome.out + outcome.err
        assert address in outcome.out
    assert SECRET not in (tmp_path / "out" / "ckpt-manifest.json").read_text()
    refused = ckpt("inspect", address)
    assert refused.code == 3
    assert "access was denied" in refused.err


def test_a_server_without_ranges(web: tuple[str, type[Web]], tmp_path: Path) -> None:
    (url, handler), folder = web, tmp_path / "www" / "x"
    tiny.folder(folder, tiny.weights(1), tiny.unknown())
    handler.ranges = False
    with pytest.raises(Unreadable, match="the server cannot send parts of files") as caught:
        ckpt_cli.inspect(f"{url}/x/model.safetensors")
    assert caught.value.hint == "download it first"
