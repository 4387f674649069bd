"""Downloads by huggingface_hub that did not finish, as it leaves them itself: the side files that they lack are named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import ckpt_cli
from tests.test_asset_names import told
from tests.test_tokenizers import model

hub = pytest.importorskip("huggingface_hub._local_folder")

COMMIT = "a" * 40
CODE = "unfinished-download"
FILES = {
    "config.json": json.dumps({"model_type": "own"}).encode(),
    "tokenizer.json": json.dumps({"model": {"vocab": {token: number for number, token in enumerate("abcdefgh")}}}).encode(),
    "chat_template.jinja": b"{{ messages }}" * 100,
}
DOWNLOAD = """
import sys
from huggingface_hub import hf_hub_download
where, name, *files = sys.argv[1:]
for file in files:
    hf_hub_download("org/x", file, **{where: name})
"""


@dataclass
class Stalling:
    """A server of one repository; ``stalls`` is the file that never ends, and ``begun`` tells that it was begun."""

    url: str = ""
    stalls: str = ""
    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def server() -> Iterator[Stalling]:
    state = Stalling()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(None)

        def do_GET(self) -> None:
            name = self.path.partition("?")[0].rpartition("/")[2]
            self.answer(10 if name == state.stalls else len(FILES[name]))

        def answer(self, sent: int | None) -> None:
            content = FILES.get(self.path.partition("?")[0].rpartition("/")[2])
            self.send_response(404 if content is None else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(content or b"").hexdigest()}"')
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            if content is not None and sent is not None:
                self.wfile.write(content[:sent])
                self.wfile.flush()
                if sent < len(content):
                    state.begun.set()
                    state.ended.wait(60)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.daemon_threads = True
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        state.url = f"http://127.0.0.1:{served.server_address[1]}"
        yield state
        state.ended.set()
        served.shutdown()
        thread.join()


def download(server: Stalling, where: str, folder: Path, end: signal.Signals | None) -> None:
    """All files of the repository, or until a signal ends that."""
    settings = {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "HF_HOME": str(folder.parent / "home")}
    with subprocess.Popen(
        [sys.executable, "-c", DOWNLOAD, where, str(folder), *FILES], env=os.environ | settings, stderr=subprocess.DEVNULL
    ) as process:
        if end is not None:
            assert server.begun.wait(60)
            process.send_signal(end)
            server.ended.set()
    assert (process.returncode == 0) is (end is None)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("where", ["local_dir", "cache_dir"])
def test_is_told_until_it_is_finished(server: Stalling, where: str, end: signal.Signals, tmp_path: Path) -> None:
    run = model(tmp_path / "run", config={"model_type": "own"})
    (run / "tokenizer.json").unlink()
    folder = tmp_path / "hub"
    base = folder if where == "local_dir" else folder / "models--org--x" / "snapshots" / COMMIT
    server.stalls = "chat_template.jinja"
    download(server, where, folder, end)
    text = told(ckpt_cli.merge(run, tmp_path / "out", base=base))[CODE]
    assert ("chat_template.jinja is not there" if where == "local_dir" else "org/x: a file is missing") in text
    server.stalls = ""
    download(server, where, folder, None)
    result = ckpt_cli.merge(run, tmp_path / "whole", base=base)
    assert CODE not in told(result)
    assert (tmp_path / "whole" / "chat_template.jinja").is_file()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model as a finished download leaves it."""
    folder = model(tmp_path / "folder", config={"model_type": "own"}, tokenizer_config={}, generation_config={"eos_token_id": 3})
    for path in list(folder.iterdir()):
        hub.read_download_metadata(folder, path.name)
        hub.write_download_metadata(folder, path.name, COMMIT, "e" * 40)
    return folder


def lose(folder: Path, name: str, *, begun: bool) -> None:
    """Leave of a file what a download does that was only begun, or was ended by Ctrl-C."""
    paths = hub.get_local_download_paths(folder, name)
    (folder / name).unlink()
    paths.metadata_path.unlink(missing_ok=True)
    if begun:
        paths.incomplete_path("e" * 40).write_bytes(b"{")


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_of_a_source_is_told_too(name: str, begun: bool, folder: Path, tmp_path: Path) -> None:
    assert CODE not in told(ckpt_cli.merge(folder, tmp_path / "whole"))
    lose(folder, name, begun=begun)
    for base in (None, model(tmp_path / "base", config={"model_type": "own"})):
        text = told(ckpt_cli.merge(folder, tmp_path / f"out{base is None}", base=base))[CODE]
        assert f"{folder}: {name} is not there" in text
        assert ("or the repository has no such file" in text) is not begun


def test_a_part_that_was_left_by_an_earlier_try_is_none(folder: Path, tmp_path: Path) -> None:
    hub.get_local_download_paths(folder, "tokenizer.json").incomplete_path("e" * 40).write_bytes(b"{")
    assert CODE not in told(ckpt_cli.merge(folder, tmp_path / "out"))


@pytest.mark.parametrize("name", ["README.md", "pytorch_model.bin", "tf_model.h5"])
def test_files_that_nothing_is_taken_of_are_not_missed(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).touch()
    lose(folder, name, begun=True)
    hub.read_download_metadata(folder, name)
    assert CODE not in told(ckpt_cli.merge(folder, tmp_path / "out"))


def test_what_the_run_has_itself_is_not_missed_of_a_base(folder: Path, tmp_path: Path) -> None:
    run = model(tmp_path / "run", config={"model_type": "own"})
    lose(folder, "tokenizer.json", begun=True)
    assert CODE not in told(ckpt_cli.merge(run, tmp_path / "out", base=folder))


def test_weights_of_a_base_are_missed(folder: Path, tmp_path: Path) -> None:
    lose(folder, "model.safetensors", begun=True)
    assert "model.safetensors" in told(ckpt_cli.merge(model(tmp_path / "run"), tmp_path / "out", base=folder))[CODE]


def test_what_another_commit_left_in_the_cache_is_none(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--x"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    shutil.copytree(model(tmp_path / "made"), blobs)
    snapshot.mkdir(parents=True)
    left = [blobs / f"{'f' * 40}.incomplete", tmp_path / ".locks" / "models--org--x" / f"{'f' * 40}.lock"]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1e9, 1e9))
    for path in blobs.iterdir():
        if path.suffix != ".incomplete":
            (snapshot / path.name).symlink_to(path)
    assert CODE not in told(ckpt_cli.merge(snapshot, tmp_path / "out"))
    os.utime(left[1])
    assert CODE in told(ckpt_cli.merge(snapshot, tmp_path / "again"))
