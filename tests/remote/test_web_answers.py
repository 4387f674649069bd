"""Web servers that list nothing: those that answer to every name with a page, and files of sets that a name counts."""

from __future__ import annotations

import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.errors import CkptError, MissingShard, NotFound
from ckpt_cli.files.remote.web import parts_of

PAGE = b"<!DOCTYPE html><html><body>Please sign in</body></html>\n"
EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-run" / "checkpoint-200"


class Handler(http.server.SimpleHTTPRequestHandler):
    """A server without pages of links; ``page`` is its answer to names that no file has, None for 404."""

    page: bytes | None = None

    def do_GET(self) -> None:
        self._answer(head=False)

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def _answer(self, *, head: bool) -> None:
        path = Path(self.translate_path(self.path))
        content = path.read_bytes() if path.is_file() else self.page
        first, last = 0, len(content or b"") - 1
        wanted = self.headers.get("Range")
        if wanted is not None and content:
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last = (max(0, len(content) - int(end)), last) if not begin else (int(begin), min(last, int(end or last)))
        self.send_response(404 if content is None else 206 if wanted is not None else 200)
        body = (content or b"")[first : last + 1]
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{path.name}-{len(content or b"")}"')
        if wanted is not None and content is not None:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


class Web:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.handler = type("Handler", (Handler,), {"page": None})
        place = str(folder)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: self.handler(*args, directory=place))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def at(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/{name}"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    pytest.importorskip("obstore")
    (tmp_path / "www").mkdir()
    web = Web(tmp_path / "www")
    yield web
    web.server.shutdown()
    web.server.server_close()


@pytest.fixture(params=[PAGE, b'{"error": "no such thing"}'], ids=["html", "json"])
def answering(web: Web, request: pytest.FixtureRequest, tmp_path: Path) -> Web:
    ckpt_cli.merge(EXAMPLE, tmp_path / "model", type="model")
    shutil.copytree(tmp_path / "model", web.folder, dirs_exist_ok=True)
    (web.folder / "ckpt-manifest.json").unlink()
    web.handler.page = request.param
    return web


class TestAServerThatAnswersToEveryName:
    def test_has_the_files_that_are_no_page(self, answering: Web, tmp_path: Path) -> None:
        result = ckpt_cli.merge(answering.at(""), tmp_path / "out")
        assert not [note for note in result.checkpoint.notes if note.level == "warning"]
        there = {path.name for path in answering.folder.iterdir()}
        assert {path.name for path in (tmp_path / "out").iterdir()} - {"ckpt-manifest.json"} <= there

    def test_beside_a_file_nothing_is_made_of_its_page(self, answering: Web, tmp_path: Path) -> None:
        result = ckpt_cli.detect(answering.at("model.safetensors"))
        assert "BAGEL" not in repr(result)
        assert not [note.text for note in result.checkpoint.notes if "latest" in note.text]

    def test_of_a_file_that_is_none_is_refused(self, answering: Web) -> None:
        with pytest.raises(CkptError):
            ckpt_cli.inspect(answering.at("lost.safetensors"))


def test_a_folder_that_no_server_lists_is_no_name_without_a_similar_one(web: Web) -> None:
    shutil.copytree(EXAMPLE, web.folder, dirs_exist_ok=True)
    with pytest.raises(NotFound) as caught:
        ckpt_cli.detect(web.at("pytorch_model_fsdp_0"))
    assert "is not known: pass the address of a file" in str(caught.value.hint)


class TestFilesOfASet:
    @pytest.fixture
    def ranks(self, web: Web) -> str:
        shutil.copytree(EXAMPLE, web.folder, dirs_exist_ok=True)
        return "pytorch_model_fsdp_0/model_world_size_4_rank_{}.pt"

    @pytest.mark.parametrize("rank", [0, 2])
    @pytest.mark.parametrize("page", [None, PAGE], ids=["404", "page"])
    def test_are_found_by_the_name_of_one(self, web: Web, ranks: str, rank: int, page: bytes | None, tmp_path: Path) -> None:
        web.handler.page = page
        ckpt_cli.merge(web.at(ranks.format(rank)), tmp_path / "out", names="native")
        shutil.copytree(EXAMPLE / "pytorch_model_fsdp_0", tmp_path / "copy" / "pytorch_model_fsdp_0")
        ckpt_cli.merge(tmp_path / "copy", tmp_path / "there", names="native")
        name = "model.safetensors"
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()

    def test_that_are_not_there_are_missing(self, web: Web, ranks: str, tmp_path: Path) -> None:
        (web.folder / ranks.format(1)).unlink()
        with pytest.raises(MissingShard) as caught:
            ckpt_cli.merge(web.at(ranks.format(0)), tmp_path / "out")
        assert caught.value.message.startswith("rank 1 of 4 is missing")
        assert caught.value.expected == web.at(ranks.format(1))


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("a_world_size_2_rank_1.pt", ["a_world_size_2_rank_0.pt", "a_world_size_2_rank_1.pt"]),
        ("model-00002-of-00002.safetensors", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        ("model.00000-of-00002.safetensors", ["model.00000-of-00002.safetensors", "model.00001-of-00002.safetensors"]),
        ("model.safetensors", []),
        ("a_world_size_9999_rank_0.pt", []),
    ],
)
def test_names_of_sets(name: str, others: list[str]) -> None:
    assert list(parts_of(name)) == others


@pytest.mark.parametrize("case", ["z2-bf16-w2-roundrobin", "hf-trainer-z3-w2"])
def test_one_file_of_a_save_that_no_server_lists_says_what_to_do(web: Web, data: Path, case: str) -> None:
    shutil.copytree(data / "deepspeed" / case, web.folder, dirs_exist_ok=True)
    (file,) = list(web.folder.rglob("*zero_pp_rank_0_mp_rank_00_optim_states.pt"))[:1]
    with pytest.raises(MissingShard) as caught:
        ckpt_cli.inspect(web.at(file.relative_to(web.folder).as_posix()))
    assert "download the whole folder" in (caught.value.hint or "")
    assert "node" not in (caught.value.hint or "")
