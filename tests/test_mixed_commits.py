"""Folders of ``hf download --local-dir`` with files of two commits, as huggingface_hub itself notes what it downloaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ckpt_cli
from tests.test_asset_names import told

hub = pytest.importorskip("huggingface_hub._local_folder")

OLD, NEW = "a" * 40, "b" * 40


def noted(root: Path, commits: dict[str, str], default: str = OLD) -> Path:
    for path in [path for path in sorted(root.rglob("*")) if path.is_file() and ".cache" not in path.parts]:
        name = path.relative_to(root).as_posix()
        hub.write_download_metadata(root, name, commits.get(name, default), "etag")
    return root


@pytest.fixture
def downloaded(layouts: Path, tmp_path: Path) -> Path:
    """A repository with a whole model of two files and rank files of a run, as one download leaves it."""
    root = tmp_path / "repository"
    shutil.copytree(layouts / "verl-run" / "run" / "global_step_20", root / "last")
    ckpt_cli.merge(root / "last", tmp_path / "merged", max_shard_size="3KB")
    for path in (tmp_path / "merged").iterdir():
        if path.name != "ckpt-manifest.json":
            shutil.copyfile(path, root / path.name)
    assert len(list(root.glob("*.safetensors"))) > 1
    return noted(root, {})


def first(root: Path, pattern: str) -> str:
    return min(path.relative_to(root).as_posix() for path in root.rglob(pattern))


@pytest.mark.parametrize(("pattern", "source"), [("*.safetensors", ""), ("config.json", ""), ("model_world_size_*.pt", "last")])
def test_are_warned_of(pattern: str, source: str, downloaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mixed-commits" not in told(ckpt_cli.merge(downloaded / source, tmp_path / "whole"))
    name = first(downloaded, pattern)
    noted(downloaded, {name: NEW})
    text = told(ckpt_cli.merge(downloaded / source, tmp_path / "out"))["mixed-commits"]
    assert f"at {OLD[:12]} " in text
    assert f"at {NEW[:12]} {name}" in text
    monkeypatch.chdir(downloaded / source)
    assert "mixed-commits" in told(ckpt_cli.merge(".", tmp_path / "here"))
    noted(downloaded, {}, NEW)  # the update went on: what did not change is noted anew
    assert "mixed-commits" not in told(ckpt_cli.merge(downloaded / source, tmp_path / "updated"))


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "generation_config.json", "last/data.pt"])
def test_of_other_files_than_weights_and_config_do_not_matter(name: str, downloaded: Path, tmp_path: Path) -> None:
    (downloaded / name).write_text("{}" if name != "tokenizer.json" else '{"model": {"vocab": {"a": 0}}}')
    noted(downloaded, {name: NEW})
    assert "mixed-commits" not in told(ckpt_cli.merge(downloaded, tmp_path / "out"))


def test_a_file_that_was_written_since_was_not_downloaded(downloaded: Path, tmp_path: Path) -> None:
    name = first(downloaded, "*.safetensors")
    noted(downloaded, {name: NEW})
    later = (downloaded / name).stat().st_mtime + 100
    os.utime(downloaded / name, (later, later))
    assert hub.read_download_metadata(downloaded, name) is None
    assert "mixed-commits" not in told(ckpt_cli.merge(downloaded, tmp_path / "out"))


@pytest.mark.parametrize("content", ["", "\n\n\n", f"{NEW}\netag\nlater\n", f"{NEW}\n", "main\netag\n99999999999\n", "\x00" * 5000])
def test_what_is_no_note_is_passed_over(content: str, downloaded: Path, tmp_path: Path) -> None:
    for path in downloaded.rglob("*.safetensors.metadata"):
        path.write_text(content)
    assert "mixed-commits" not in told(ckpt_cli.merge(downloaded, tmp_path / "out"))


@pytest.mark.parametrize("pattern", ["*.safetensors", "config.json"])
def test_of_a_base_are_warned_of_where_anything_is_taken(pattern: str, layouts: Path, downloaded: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(layouts / "verl-run" / "run" / "global_step_20", run / "global_step_20")
    for path in run.rglob("*.json"):
        path.unlink()
    assert "mixed-commits" not in told(ckpt_cli.merge(run, tmp_path / "whole", base=downloaded))
    name = first(downloaded, pattern)
    noted(downloaded, {name: NEW})
    assert f"at {NEW[:12]} {name}" in told(ckpt_cli.merge(run, tmp_path / "out", base=downloaded))["mixed-commits"]
