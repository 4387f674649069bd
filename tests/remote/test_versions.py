"""Files that are replaced by others of the same size: what the server says of them tells, or else a warning says that nothing does."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import ckpt_cli
from ckpt_cli.commands.verify import verify_part
from ckpt_cli.errors import CkptError, Inconsistent, SourceChanged, Unsupported
from ckpt_cli.files.remote import source as remote
from ckpt_cli.files.remote.store import Entry
from ckpt_cli.files.source import Files
from ckpt_cli.formats.ages import unversioned
from ckpt_cli.given import path_of
from ckpt_cli.progress import Silent
from tests import tiny

Says = Literal["etag", "weak", "time", "nothing"]
SEVERAL = {"max_shard_size": "4KB"}
WEIGHTS = "/model/model.safetensors"


class Server(http.server.BaseHTTPRequestHandler):
    """Serves files in ranges, and ignores If-Match, as many servers do. ``before`` is called before a range of a file is sent."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    root: Path
    says: Says
    before: Callable[[str], None] | None = None

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, *, body: bool) -> None:
        if self.before is not None and body:
            self.before(self.path)
        path = self.root / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        asked, start, stop = self.headers.get("Range"), 0, len(data)
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = (int(first), min(int(last) + 1, stop)) if first else (max(0, stop - int(last)), stop)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        tag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        if self.says in ("etag", "weak"):
            self.send_header("ETag", tag if self.says == "etag" else f"W/{tag}")
        if self.says == "time":
            self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if body:
            self.wfile.write(data[start:stop])

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)


@pytest.fixture
def web(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[type[Server]]:
    """The server, with what it says of files as its parameter."""
    pytest.importorskip("obstore")
    handler = type("Handler", (Server,), {"root": tmp_path / "www", "says": request.param, "address": ""})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    handler.address = f"http://127.0.0.1:{server.server_port}{WEIGHTS}"  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    save(handler, 1)
    yield handler
    server.shutdown()
    server.server_close()


def save(web: type[Server], seed: int, layers: int = 2) -> None:
    """The same model with other weights, saved at another time."""
    folder = web.root / "model"
    tiny.folder(folder, tiny.weights(seed, layers=layers), tiny.unknown())
    os.utime(folder / "model.safetensors", (1_700_000_000 + 60 * seed,) * 2)


TOLD = pytest.mark.parametrize("web", ["etag", "weak", "time"], indirect=True)
UNTOLD = pytest.mark.parametrize("web", ["nothing"], indirect=True)


def notes(result: Any) -> set[str]:
    return {note.code for note in (*result.checkpoint.notes, *(note for output in result.outputs for note in output.notes))}


@TOLD
def test_parts_of_two_saves_are_not_joined(web: Any, tmp_path: Path) -> None:
    ckpt_cli.merge(web.address, tmp_path / "out", part="0/2", **SEVERAL)
    save(web, 2)
    ckpt_cli.merge(web.address, tmp_path / "out", part="1/2", **SEVERAL)
    with pytest.raises(CkptError):
        ckpt_cli.publish(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@TOLD
def test_gathered_parts_are_of_what_is_there_now(web: Any, tmp_path: Path) -> None:
    ckpt_cli.merge(web.address, tmp_path / "out", **SEVERAL)
    documents = []
    for number in (0, 1):
        documents.append(tmp_path / f"{number}.json")
        documents[-1].write_text(verify_part(tmp_path / "out", f"{number}/2", against=web.address).model_dump_json())
    assert ckpt_cli.verify(tmp_path / "out", against=web.address, gather=documents).against[0].identical
    save(web, 2)
    with pytest.raises(Inconsistent, match=r"out of date: .*model\.safetensors changed since"):
        ckpt_cli.verify(tmp_path / "out", against=web.address, gather=documents)


@TOLD
def test_a_run_does_not_go_on_with_files_of_another_save(web: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(web, tmp_path, monkeypatch)
    save(web, 2)
    merged = ckpt_cli.merge(web.address, tmp_path / "out", **SEVERAL)
    assert "resumed" not in notes(merged)
    assert ckpt_cli.verify(tmp_path / "out", against=web.root / "model", full=True).against[0].identical


def interrupted(web: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails when some of its files are finished."""
    from ckpt_cli.output import publish

    def fail(*_: object, **__: object) -> None:
        raise SourceChanged("made to fail")

    with monkeypatch.context() as patched:
        patched.setattr(publish.Staging, "publish", fail)
        with pytest.raises(SourceChanged):
            ckpt_cli.merge(web.address, tmp_path / "out", **SEVERAL)


@TOLD
def test_a_file_that_is_replaced_while_it_is_read(web: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the server sends whatever it has, whatever was asked for; at once where it gives tags."""
    for name, value in {"HEAD": 1 << 10, "LARGEST": 4 << 10, "SMALLEST": 4 << 10}.items():
        monkeypatch.setattr(remote, name, value)
    asked: list[str] = []
    save(web, 1, layers=20)

    def replace(path: str) -> None:
        asked.append(path)
        if asked.count(WEIGHTS) == 3 and path == WEIGHTS:
            save(web, 2, layers=20)

    web.before = staticmethod(replace)
    with pytest.raises(SourceChanged, match="a source file changed while it was being read"):
        ckpt_cli.merge(web.address, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@TOLD
def test_a_file_beside_the_weights_that_is_replaced_meanwhile(web: Any, tmp_path: Path) -> None:
    config = web.root / "model" / "config.json"

    class Held(Silent):
        def advance(self, done_bytes: int, label: str = "") -> None:
            # In one step: a server that reads a file which is being written would answer with an error of its own.
            other = config.with_name(f"other-{threading.get_ident()}.json")
            other.write_text(config.read_text().replace("10000.0", "20000.0"))
            os.utime(other, (1_600_000_000,) * 2)
            other.replace(config)

    with pytest.raises(SourceChanged) as caught:
        ckpt_cli.merge(web.address, tmp_path / "out", progress=Held())
    assert str(caught.value.path).endswith("/config.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("web", ["etag", "weak"], indirect=True)
def test_the_manifest_has_the_tag(web: Any, tmp_path: Path) -> None:
    ckpt_cli.merge(web.address, tmp_path / "out")
    (source,) = json.loads((tmp_path / "out" / "ckpt-manifest.json").read_text())["sources"]
    digest = hashlib.md5((web.root / "model" / "model.safetensors").read_bytes(), usedforsecurity=False).hexdigest()
    assert source["tag"] == f'"{digest}"'
    assert "unversioned" not in notes(ckpt_cli.merge(web.address, tmp_path / "other"))


@UNTOLD
def test_a_server_that_says_nothing_is_warned_of(web: Any, tmp_path: Path) -> None:
    text = "the server gives neither an ETag nor a Last-Modified time for model.safetensors"
    merged = ckpt_cli.merge(web.address, tmp_path / "out")
    assert next(note.text for note in merged.checkpoint.notes if note.code == "unversioned").startswith(text)
    for result in (ckpt_cli.inspect(web.address).checkpoint, ckpt_cli.verify(tmp_path / "out", against=web.address)):
        assert "unversioned" in {note.code for note in result.notes}
    with pytest.raises(CkptError, match="unversioned"):
        ckpt_cli.merge(web.address, tmp_path / "strict", strict=True)


@UNTOLD
def test_parts_of_what_nothing_tells_apart_are_refused(web: Any, tmp_path: Path) -> None:
    ckpt_cli.merge(web.address, tmp_path / "out")
    work: list[Callable[[], object]] = [
        lambda: ckpt_cli.merge(web.address, tmp_path / "parts", part="0/2"),
        lambda: ckpt_cli.merge(web.address, tmp_path / "parts", part="0/2", dry_run=True),
        lambda: ckpt_cli.average([web.address, web.root / "model"], tmp_path / "parts", part="0/2"),
        lambda: verify_part(tmp_path / "out", "0/2", against=web.address),
    ]
    for each in work:
        with pytest.raises(Unsupported, match="nothing would show that the parts read the same file") as caught:
            each()
        assert caught.value.hint == "run it as one process, without parts, or download the files first"
    assert not (tmp_path / "parts").exists()


@UNTOLD
def test_no_run_goes_on_where_nothing_tells_files_apart(web: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(web, tmp_path, monkeypatch)
    assert list(tmp_path.glob(".*")) == []
    save(web, 2)
    assert "resumed" not in notes(ckpt_cli.merge(web.address, tmp_path / "out", **SEVERAL))
    assert ckpt_cli.verify(tmp_path / "out", against=web.root / "model", full=True).against[0].identical


def test_a_file_system_without_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some that fsspec knows."""
    from fsspec.implementations.memory import MemoryFileSystem

    info = MemoryFileSystem.info
    tiny.folder(tmp_path / "model", tiny.weights(1), tiny.unknown())
    system = MemoryFileSystem()
    system.pipe("/versions/model.safetensors", (tmp_path / "model" / "model.safetensors").read_bytes())
    with Files() as files:
        assert unversioned([files.source(path_of("memory://versions/model.safetensors"))]) == []
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path, **more: {**info(self, path, **more), "created": None})
    merged = ckpt_cli.merge("memory://versions/model.safetensors", tmp_path / "out")
    assert "unversioned" in notes(merged)
    system.rm("/versions", recursive=True)


@pytest.mark.parametrize(
    ("opened", "now", "same"),
    [
        (Entry(5, '"a"'), Entry(5, '"a"'), True),
        (Entry(5, '"a"'), Entry(6, '"a"'), False),
        (Entry(5, '"a"'), Entry(5, '"b"'), False),
        (Entry(5, '"a"'), Entry(5, 'W/"a"'), True),
        (Entry(5, '"a"'), Entry(5), False),
        (Entry(5, '"a"', modified_ns=7), Entry(5, modified_ns=7), True),
        (Entry(5, '"a"', modified_ns=7), Entry(5, modified_ns=8), False),
        (Entry(5, '"a"', "1"), Entry(5, '"a"', "2"), False),
        (Entry(5, '"a"', "null"), Entry(5, '"b"', "null"), False),
        (Entry(5, None, None, 7), Entry(5, None, None, 8), False),
        (Entry(5), Entry(5, '"a"', modified_ns=7), True),
        (Entry(5), Entry(6), False),
    ],
    ids=str,
)
def test_two_answers_about_one_file(opened: Entry, now: Entry, same: bool) -> None:
    assert opened.is_same(now) == same
