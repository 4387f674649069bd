"""Two things that are the same thing: links, hard links and other names of one checkpoint are not compared as if they were two."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import Inconsistent, UsageError
from ckpt_cli.files.descriptors import Identity
from tests import tiny
from tests.cli import ckpt
from tests.remote.test_other_doors import Web as Web
from tests.remote.test_other_doors import web as web

NOTHING = "so there is nothing to compare"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path / "model", tiny.weights(1), tiny.unknown())


def linked(path: Path) -> Path:
    (link := path.with_name("link")).symlink_to(path.name)
    return link


def hard_linked(path: Path) -> Path:
    return Path(shutil.copytree(path, path.with_name("hard"), copy_function=os.link))


def file_inside(path: Path) -> Path:
    return path / "model.safetensors"


def roundabout(path: Path) -> Path:
    return path / ".." / path.name


NAMES: list[Callable[[Path], Path]] = [Path, linked, hard_linked, file_inside, roundabout]


@pytest.mark.parametrize("named", NAMES)
class TestByAnotherName:
    def test_nothing_is_compared(self, named: Callable[[Path], Path], model: Path, tmp_path: Path) -> None:
        other = named(model)
        for pair in ((model, other), (other, model)):
            with pytest.raises(UsageError, match=NOTHING):
                ckpt_cli.diff(*pair)
        for option in ("against", "base"):
            with pytest.raises(UsageError, match=f"{option} names what is verified itself, {NOTHING}"):
                ckpt_cli.verify(model, **{option: other})  # type: ignore[arg-type]

    def test_a_base_is_another_checkpoint(self, named: Callable[[Path], Path], model: Path, tmp_path: Path) -> None:
        base = named(model)
        if base.is_file():
            base = linked(model)  # a base is a folder
        for how in ({}, {"compare": True}, {"dtype": "base"}):
            with pytest.raises(UsageError, match=f"base names what is merged itself, {NOTHING}") as caught:
                ckpt_cli.merge(model, tmp_path / "out", base=base, **how)  # type: ignore[arg-type]
            assert "hint: pass the model that training started from, or leave out base" in str(caught.value)
        assert not (tmp_path / "out").exists()

    def test_an_average_says_what_counts_twice(self, named: Callable[[Path], Path], model: Path, tmp_path: Path) -> None:
        third, other = tiny.folder(tmp_path / "third", tiny.weights(3), tiny.unknown()), named(model)
        result = ckpt_cli.average([model, other, third], tmp_path / "mean", dry_run=True)
        (said,) = [note.text for note in result.notes if note.code == "same-twice"]
        assert said.startswith(f"{model} (model) is averaged 2 times")
        assert other in (model, roundabout(model)) or str(other) in said
        assert "same-twice" not in {note.code for note in result.outputs[0].notes}, "said once"


class TestSteps:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        for step in (1, 2):
            tiny.verl(tmp_path / "run", tiny.weights(step), tiny.unknown(), step=step)
        return tmp_path / "run"

    def test_one_step_by_all_of_its_paths(self, run: Path) -> None:
        step = run / "global_step_2"
        (run / "latest").symlink_to(step.name)
        paths = [run, step, step / "actor", step / "actor" / "model_world_size_1_rank_0.pt", run / "latest", run / "latest" / "actor"]
        for path in paths:
            with pytest.raises(UsageError, match=NOTHING):
                ckpt_cli.diff(step, path)
            result = ckpt_cli.average([step, path], run.parent / "mean", dry_run=True)
            assert "is averaged 2 times" in {note.code: note.text for note in result.notes}["same-twice"]
            with pytest.raises(UsageError, match=NOTHING):
                ckpt_cli.verify(path, against=step)
        assert ckpt("diff", run, "--steps", "2,2").code == 2
        done = ckpt("diff", run, run / "latest", "--exit-code", "-q")
        assert (done.code, done.out) == (2, "")
        assert "hint: pass another checkpoint, step or component" in done.err
        assert not ckpt_cli.diff(run / "global_step_1", run).identical

    def test_a_copy_is_another_checkpoint(self, run: Path, tmp_path: Path) -> None:
        shutil.copytree(run, tmp_path / "copy")
        assert ckpt_cli.diff(run, tmp_path / "copy").identical


def test_one_file_holds_two_components(tmp_path: Path) -> None:
    """Their bytes lie in one file, in other places of it."""
    states = {name: {"a.weight": torch.full((4, 4), value)} for name, value in (("model", 1.0), ("ema", 2.0))}
    torch.save(states, tmp_path / "both.pt")
    found = ckpt_cli.diff(tmp_path / "both.pt", type="model,ema")
    assert [drift.max_abs for drift in found.comparison.drifts] == [1.0]
    assert ckpt("diff", tmp_path / "both.pt", tmp_path / "both.pt", "--type", "ema,ema").code == 2


def test_files_in_common_are_not_everything(tmp_path: Path) -> None:
    """Two models that share a frozen part through a hard link are two models."""
    for number in (1, 2):
        folder = tmp_path / f"m{number}"
        folder.mkdir()
        save_file({"b.weight": torch.full((4,), float(number))}, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
        files = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    save_file({"a.weight": torch.ones(4)}, tmp_path / "m1" / files["a.weight"], {"format": "pt"})
    os.link(tmp_path / "m1" / files["a.weight"], tmp_path / "m2" / files["a.weight"])
    assert [drift.name for drift in ckpt_cli.diff(tmp_path / "m1", tmp_path / "m2").comparison.drifts] == ["b.weight"]
    assert ckpt_cli.verify(tmp_path / "m2", base=tmp_path / "m1").comparison is not None
    assert "same-twice" not in {note.code for note in ckpt_cli.average([tmp_path / "m1", tmp_path / "m2"], tmp_path / "mean").notes}


class TestNodes:
    """One folder of --also given under two names would only be said to have the ranks of another."""

    @pytest.fixture
    def nodes(self, layouts: Path, tmp_path: Path) -> list[Path]:
        found = []
        for node in range(4):
            home = tmp_path / f"node{node}" / "global_step_20" / "actor"
            home.mkdir(parents=True)
            for path in (layouts / "verl-run" / "run" / "global_step_20" / "actor").glob(f"model*_rank_{node}.pt"):
                shutil.copy(path, home)
            found.append(tmp_path / f"node{node}")
        return found

    @pytest.mark.parametrize("named", [Path, linked, roundabout])
    def test_are_named_once(self, named: Callable[[Path], Path], nodes: list[Path]) -> None:
        first, *others = nodes
        again = named(others[1])
        with pytest.raises(UsageError, match="also names a folder twice"):
            ckpt_cli.detect(first, also=(*others, again))
        with pytest.raises(UsageError, match="also names the folder itself"):
            ckpt_cli.detect(others[1], also=(first, again))

    def test_that_hold_one_rank_are_both_named(self, nodes: list[Path]) -> None:
        copy = hard_linked(nodes[2])
        with pytest.raises(Inconsistent) as caught:
            ckpt_cli.merge(nodes[0], nodes[0].parent / "out", also=(*nodes[1:], copy))
        said = caught.value.message
        assert said.startswith(f"rank 2 is in both {nodes[2]}/")
        assert f" and {copy}/" in said


def test_adapters_are_not_their_own_base(tmp_path: Path) -> None:
    adapter = tiny.adapter(tmp_path / "adapter", tiny.factors(), "nowhere")
    with pytest.raises(UsageError, match=f"base names what is merged itself, {NOTHING}"):
        ckpt_cli.merge(adapter, tmp_path / "out", base=linked(adapter))


def test_files_of_a_server_that_tells_no_versions_are_told_apart(web: tuple[str, type[Any]], tmp_path: Path) -> None:
    url, _ = web
    for number in (1, 2):
        tiny.folder(tmp_path / "www" / f"m{number}", tiny.weights(number), tiny.unknown())
    first, second = (f"{url}/m{number}/model.safetensors" for number in (1, 2))
    assert not ckpt_cli.diff(first, second).identical
    assert "different-values" in {item.code for item in ckpt_cli.verify(first, against=second).findings}
    with pytest.raises(UsageError, match=NOTHING):
        ckpt_cli.diff(first, first)


def test_files_with_one_inode_number_are_not_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some file systems give all files, which are of other sizes or times."""
    of = Identity.of
    monkeypatch.setattr(Identity, "of", classmethod(lambda _, path, status: replace(of(path, status), inode=1)))
    first = tiny.folder(tmp_path / "run" / "checkpoint-1", tiny.weights(1), tiny.unknown())
    second = tiny.folder(tmp_path / "run" / "checkpoint-2", tiny.weights(2), tiny.unknown())
    ckpt_cli.diff(first, second)
    result = ckpt_cli.average([first, second], tmp_path / "out", dry_run=True)
    assert not [note.text for note in (*result.notes, *result.outputs[0].notes) if "is averaged 2 times" in note.text]
    with pytest.raises(UsageError, match=NOTHING):
        ckpt_cli.diff(first, linked(first))
