"""The floors of the house: a package imports only from floors below its own. docs/architecture.md draws them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.formats.registry import FORMATS

ROOT = Path(ckpt_cli.__file__).parent
FLOORS = (
    {"files"},
    {"tensors"},
    {"formats", "hub", "results"},
    {"base_model", "discover", "lora", "output"},
    {"drafting", "engines"},
    {"merging", "averaging", "state", "verifying", "loading", "scanning", "pushing"},
    {"watching", "reporting"},
    {"commands"},
    {"cli"},
)
FLOOR = {package: number for number, packages in enumerate(FLOORS, 1) for package in packages}
DOORS = {"__init__", "__main__"}
"""What is entered from outside leads to every floor."""

MOST_LINES = 400
MOST_MODULES = 14


def imports(path: Path) -> Iterator[str]:
    """The first package or module below ckpt_cli of everything that a module imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "ckpt_cli":
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckpt_cli."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (name.name.split(".")[1] for name in node.names if name.name.startswith("ckpt_cli."))


MODULES = sorted(ROOT.rglob("*.py"))


def test_every_package_has_a_floor() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(FLOOR)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_downwards(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    upwards = {other for other in imports(path) if other != own and FLOOR.get(other, 0) >= FLOOR.get(own, 0) and other in FLOOR}
    assert own in DOORS or not upwards


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES}), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_folder_is_a_hall(folder: Path) -> None:
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= MOST_MODULES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_is_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_links_are_followed_by_realpath() -> None:
    """`Path.resolve` raises RuntimeError for a link that leads to itself, before Python 3.13."""
    calls = [
        (path.name, node.lineno)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "resolve"
    ]
    assert not calls


def test_paths_are_made_whole_in_one_place() -> None:
    """`os.path.abspath` and the like read ``link/..`` by letters, where the system follows the link."""
    lexical = {"abspath", "normpath", "absolute", "cwd", "getcwd"}
    elsewhere = [
        (path.relative_to(ROOT).as_posix(), node.lineno)
        for path in MODULES
        if path != ROOT / "paths.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in lexical
    ]
    assert not elsewhere


def test_formats_are_named_in_their_own_package_only() -> None:
    """Elsewhere it is asked what a format can do (`ckpt_cli.formats.base.Format`)."""
    names = {known.name for known in FORMATS} - {"safetensors"}
    deciding = {
        path.relative_to(ROOT).as_posix()
        for path in MODULES
        if "formats" not in path.relative_to(ROOT).parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if (isinstance(side, ast.Constant) and side.value in names) or (isinstance(side, ast.Attribute) and side.attr == "format")
    }
    assert deciding == set()
