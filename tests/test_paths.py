"""``..`` behind a link, and a current folder that is gone: every command reads and writes where the system would."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.errors import NotFound
from ckpt_cli.paths import absolute, without_above
from tests.cli import ROOT, ckpt

EXAMPLE = ROOT / "examples" / "tiny-run"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``link`` leads to a/b, so that ``link/..`` is a; a/run has step 100 only, run has step 200 only."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    for home, step in ((tmp_path, 200), (tmp_path / "a", 100)):
        shutil.copytree(EXAMPLE / f"checkpoint-{step}", home / "run" / f"checkpoint-{step}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def step_of(output: Path) -> str:
    return Path(json.loads((output / "ckpt-manifest.json").read_text())["checkpoint"]).name


class TestAboveALink:
    def test_a_run_is_the_same_for_all_commands(self, place: Path) -> None:
        ckpt_cli.merge("link/../run", "merged")
        assert step_of(place / "merged") == "checkpoint-100"
        watched = ckpt_cli.watch("link/../run", "watched", once=True, settle=0)
        assert watched.runs == (str(place / "a" / "run"),)
        assert [path.name for path in (place / "watched").glob("step-*")] == ["step-100"]
        ckpt_cli.watch("link/../run", once=True, settle=0)
        assert (place / "a" / "run_merged" / "step-100").is_dir()
        assert not (place / "run_merged").exists()

    def test_an_output_is_where_the_system_says(self, place: Path) -> None:
        for made in (
            ckpt_cli.merge("run", "link/../merged").outputs[0].output,
            ckpt_cli.average(["run", "a/run"], "link/../average").outputs[0].output,
            ckpt_cli.extract_state("run", "link/../state").output,
        ):
            assert Path(made).parent == place / "a"
            assert (place / "a" / Path(made).name).is_dir()
            assert not (place / Path(made).name).exists()
            assert os.path.isdir(f"link/../{Path(made).name}")

    def test_another_model_is_not_replaced(self, place: Path) -> None:
        ckpt_cli.merge("a/run", "out")
        (place / "a" / "out").mkdir()
        ckpt_cli.merge("run", "link/../out", overwrite=True)
        assert (step_of(place / "out"), step_of(place / "a" / "out")) == ("checkpoint-100", "checkpoint-200")

    def test_names_after_it_stay_as_they_were_given(self, place: Path) -> None:
        (place / "a" / "best").symlink_to("run/checkpoint-100")
        assert without_above("link/../best") == str(place / "a" / "best")
        assert [without_above(text) for text in ("./run/", "a..b", "run")] == ["./run/", "a..b", "run"]
        assert absolute("a/../run") == str(place / "run")


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in use cannot be removed there")
class TestACurrentFolderThatIsGone:
    @pytest.fixture
    def gone(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = place / "gone"
        folder.mkdir()
        monkeypatch.chdir(folder)
        folder.rmdir()
        return place

    def test_does_not_matter_to_whole_paths(self, gone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for words in (
            ["merge", gone / "run", "-o", gone / "out"],
            ["verify", gone / "out"],
            ["merge", gone / "run"],
            ["watch", gone / "run", "-o", gone / "watched", "--once", "--settle", "0"],
            ["average", gone / "run", gone / "a" / "run", "-o", gone / "average"],
            ["inspect", gone / "run"],
        ):
            done = ckpt(*words, PYTHONPATH=str(ROOT))
            assert (done.code, "error" in done.err) == (0, False), (words, done)
        again = ckpt("merge", gone / "run", "-o", gone / "out", PYTHONPATH=str(ROOT))
        assert (again.code, "output-exists" in again.err) == (5, True)

    def test_is_said_of_relative_ones(self, gone: Path) -> None:
        for words in (["detect", "../run"], ["merge", gone / "run", "-o", "out"], ["merge", "run", "-o", gone / "out"]):
            done = ckpt(*words, PYTHONPATH=str(ROOT))
            assert (done.code, "the current folder was removed" in done.err, "Traceback" in done.err) == (3, True, False), (words, done)
        with pytest.raises(NotFound, match="the current folder was removed"):
            absolute("run")

    def test_is_said_where_torch_cannot_be_loaded_without_it(self, gone: Path) -> None:
        done = ckpt("extract-state", ROOT / "examples" / "tiny-run", "-o", gone / "state", PYTHONPATH=str(ROOT))
        assert (done.code, "the current folder was removed" in done.err, "go to a folder" in done.err) == (3, True, True), done
        assert not (gone / "state").exists()
