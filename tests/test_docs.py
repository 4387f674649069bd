"""The documentation: every link leads somewhere, every page is in the navigation, and the site builds without a warning."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import ROOT

yaml = pytest.importorskip("yaml")

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*ROOT.glob("*.md"), ROOT / "examples" / "README.md", *PAGES]
LINK = re.compile(r"\]\((?P<link>[^()\s]+)\)|\b(?:src|srcset|href)=\"(?P<picture>[^\"]+)\"")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def links_of(path: Path) -> Iterator[str]:
    for found in LINK.finditer(CODE.sub("", path.read_text())):
        link = found["link"] or found["picture"]
        if not link.startswith(("http:", "https:", "mailto:")):
            yield link


def anchors_of(path: Path) -> set[str]:
    """The anchors of the headings of a page that GitHub and mkdocs call alike."""
    headings = re.findall(r"^#{1,6} (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower() for heading in headings]
    by_github, by_mkdocs = ([re.sub(spaces, "-", text) for text in plain] for spaces in (r"\s", r"[-\s]+"))
    return {one for one, other in zip(by_github, by_mkdocs, strict=True) if one == other}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(path: Path) -> None:
    broken = []
    for link in links_of(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
        elif DOCS in path.parents and DOCS not in target.parents:
            broken.append(f"{link}, which is not a part of the site")
    assert broken == []


def nav(entries: object) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        entries = list(entries.values())
    for entry in entries if isinstance(entries, list) else ():
        yield from nav(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == [path.relative_to(DOCS).as_posix() for path in PAGES]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material")
    for name in ("mkdocs.yml", "docs"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "tutorial" / "index.html").is_file()
