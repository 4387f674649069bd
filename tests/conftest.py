"""Real checkpoints: the archives of `data`, unpacked once per session. Tests read these folders and edit copies."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.formats.conformance")

DATA = Path(__file__).parent / "data"

Copy = Callable[..., Path]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `layouts` and one `torch-<version>` per version."""
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
    """Per layout, which commands give which file and which are refused."""
    content: dict[str, Any] = json.loads((layouts / "expect.json").read_text())
    return content


@pytest.fixture
def copy(data: Path, tmp_path: Path) -> Copy:
    """`copy("layouts", "verl-run", "run")` is a copy of that folder, to be damaged."""

    def make(*parts: str) -> Path:
        return Path(shutil.copytree(data.joinpath(*parts), tmp_path / "copy" / parts[-1]))

    return make
