"""Real checkpoints: the archives of `data`, unpacked once per session. Tests read these folders and edit copies."""

from __future__ import annotations

import gc
import json
import os
import shutil
import stat
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.formats.conformance")

DATA = Path(__file__).parent / "data"

Copy = Callable[..., Path]


LONG = (
    "test_benchmarks.py", "test_crashes.py", "test_formats.py", "test_memory.py", "test_ray.py", "test_resume.py", "test_scale_page.py",
    "test_tutorial.py", "test_watch.py",
)  # fmt: skip
"""Few tests that take long: begun last, they would leave the other processors idle at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Processes take files in the order of `pytest_collection_modifyitems`, not in that of pytest-xdist: by how many tests they have."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long first, then those with many tests; within a file as they are written."""
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONG, -counts[item.path], str(item.path)))


def pytest_collection_finish() -> None:
    """All modules are loaded by now, and stay: looking for garbage among their objects would take a sixth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache is left alone; what transformers says about a config is asked once per session, in a child process."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """What the tests write need not outlive the machine, so that nothing waits for its disk.

    Only files and folders are spared, and only in this process: what else is synced is refused as ever, and the tests of crashes see the
    calls of the commands that they start.
    """
    real = os.fsync

    def fsync(fd: int) -> None:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(scope="session", autouse=True)
def asked_in_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """transformers answers in forks of a process that has loaded it, for commands in this process and in forks; its folder, on Linux."""
    if sys.platform != "linux":
        yield None
        return
    from ckpt_cli.hub.classes import transformers_child
    from tests.transformers_forks import VARIABLE, asked_in_forks

    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp(f"asked-{os.getpid()}", numbered=False)
        patch.setenv(VARIABLE, str(home))
        patch.setattr(transformers_child, "_run_child", asked_in_forks(transformers_child._run_child))
        yield home


@pytest.fixture
def own_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that ask transformers are started as ckpt starts them."""
    from tests.transformers_forks import VARIABLE

    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    """transformers prints neither warnings nor bars, and later as before: such settings are of the whole process."""
    from huggingface_hub import utils
    from transformers import logging

    level, disabled = logging.get_verbosity(), utils.are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(level)
    if not disabled:
        logging.enable_progress_bar()


@pytest.fixture
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers answers in this process, for tests that have loaded it already."""
    from tests.architectures import answered_here

    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `layouts`, one `torch-<version>` per version, and `dcp/<version>`."""
    folder = tmp_path_factory.mktemp("data")
    for archive in sorted(DATA.glob("*.tar.xz")):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def layouts(data: Path) -> Path:
    return data / "layouts"


@pytest.fixture(scope="session")
def expect(layouts: Path) -> dict[str, Any]:
    """Per layout, which commands give which file and which are refused; every archive lists those of its own files."""
    merged: dict[str, Any] = {}
    for part in sorted(layouts.glob("expect*.json")):
        for layout, content in json.loads(part.read_text()).items():
            whole = merged.setdefault(layout, {"results": [], "like_base": [], "refused": []})
            for kind, cases in whole.items():
                cases.extend(content.get(kind, []))
    return merged


@pytest.fixture
def copy(data: Path, tmp_path: Path) -> Copy:
    """`copy("layouts", "verl-run", "run")` is a copy of that folder, to be damaged."""

    def make(*parts: str) -> Path:
        return Path(shutil.copytree(data.joinpath(*parts), tmp_path / "copy" / parts[-1]))

    return make
