"""Parts of an output are written at different times: each must have found the same files, or nothing is published."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests import tiny

CONFIG: dict[str, Any] = {"model_type": "strange", "rope_theta": 10000.0, "torch_dtype": "float32"}


def model(folder: Path, value: float = 1.0) -> Path:
    """A model in two files, of which each of two parts reads one."""
    for number in (1, 2):
        tensors = {f"w{number}.weight": torch.full((64, 64), value)}
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / f"model-0000{number}-of-00002.safetensors", metadata={"format": "pt"})
    names = {f"w{number}.weight": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(tiny.TOKENIZER["tokenizer.json"]))
    return folder


def in_place(path: Path) -> None:
    """Other weights in the same file, with its size and mtime."""
    status, content = path.stat(), path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[:-64] + bytes(64))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def by_another(path: Path) -> None:
    """A file of equal size and mtime in its place, as a copy that was restored."""
    status, content = path.stat(), path.read_bytes()
    path.with_name("other").write_bytes(content[:-64] + bytes(64))
    os.utime(path.with_name("other"), ns=(status.st_atime_ns, status.st_mtime_ns))
    path.with_name("other").replace(path)


def check_refused(write: Callable[[str], Any], out: Path, change: Callable[[], object], named: str, parts: tuple[str, str]) -> None:
    """What changes between two parts is named, and running all parts again helps."""
    write(parts[0])
    change()
    write(parts[1])
    for _ in range(2):
        with pytest.raises(Inconsistent, match=rf"files changed between part 0 and part 1: \S*{re.escape(named)}\n") as caught:
            ckpt_cli.publish(out)
        assert str(caught.value.advice).startswith("run all parts again")
        assert not out.exists()
    for part in parts:
        write(part)
    ckpt_cli.publish(out)


each_order = pytest.mark.parametrize("parts", [("0/2", "1/2"), ("1/2", "0/2")], ids=["first 0", "first 1"])


@each_order
class TestAFileBesideTheWeights:
    def test_that_changed(self, parts: tuple[str, str], tmp_path: Path) -> None:
        run = model(tmp_path / "run")

        def change() -> None:
            (run / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 99999.0}))

        check_refused(lambda part: ckpt_cli.merge(run, tmp_path / "out", part=part), tmp_path / "out", change, "config.json", parts)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == 99999.0
        assert ckpt_cli.verify(tmp_path / "out", full=True, against=run).exit_code == 0

    @pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
    def test_that_came_or_went(self, name: str, parts: tuple[str, str], tmp_path: Path) -> None:
        run = model(tmp_path / "run")

        def change() -> None:
            (run / name).unlink() if (run / name).exists() else (run / name).write_text("{}")

        check_refused(lambda part: ckpt_cli.merge(run, tmp_path / "out", part=part), tmp_path / "out", change, name, parts)
        assert (tmp_path / "out" / name).exists() == (run / name).exists()

    def test_of_the_base_or_of_an_average(self, parts: tuple[str, str], tmp_path: Path) -> None:
        runs = [model(tmp_path / str(i), float(i)) for i in (1, 2)]
        base = tiny.folder(tmp_path / "base", None, bare=True, files={"chat_template.jinja": "a"})

        def change() -> None:
            (base / "chat_template.jinja").write_text("b")

        def write(part: str) -> None:
            ckpt_cli.average(runs, tmp_path / "out", base=base, part=part)

        check_refused(write, tmp_path / "out", change, "chat_template.jinja", parts)


@each_order
@pytest.mark.parametrize("rewrite", [in_place, by_another])
@pytest.mark.parametrize("number", [1, 2])
class TestAFileOfWeightsThatKeepsSizeAndTime:
    """whether or not the part that runs next reads it: the other files of its save may be new, too."""

    def test_in_a_merge(self, number: int, rewrite: Callable[[Path], None], parts: tuple[str, str], tmp_path: Path) -> None:
        run = model(tmp_path / "run")
        path = run / f"model-0000{number}-of-00002.safetensors"
        write: Callable[[str], Any] = lambda part: ckpt_cli.merge(run, tmp_path / "out", part=part)  # noqa: E731
        check_refused(write, tmp_path / "out", lambda: rewrite(path), path.name, parts)
        (written,) = (tmp_path / "out").glob("*.safetensors")
        assert torch.equal(load_file(written)[f"w{number}.weight"], load_file(path)[f"w{number}.weight"])

    def test_in_an_average(self, number: int, rewrite: Callable[[Path], None], parts: tuple[str, str], tmp_path: Path) -> None:
        runs = [model(tmp_path / str(i), float(i)) for i in (1, 2)]
        path = runs[0] / f"model-0000{number}-of-00002.safetensors"
        write: Callable[[str], Any] = lambda part: ckpt_cli.average(runs, tmp_path / "out", part=part)  # noqa: E731
        check_refused(write, tmp_path / "out", lambda: rewrite(path), path.name, parts)


class TestABaseOfWhichEachMachineHasACopy:
    """on a disk of its own, under the same path: nobody can compare the copies."""

    def written(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Path:
        run, base, out = model(folder / "run"), model(folder / "base", 2.0), folder / "out"
        (run / "tokenizer.json").unlink()
        file, index = base / "model-00002-of-00002.safetensors", base / "model.safetensors.index.json"
        if options:
            save_file({**load_file(file), "more.weight": torch.ones(64, 64)}, file, metadata={"format": "pt"})
            index.write_text(json.dumps({"weight_map": {**json.loads(index.read_text())["weight_map"], "more.weight": file.name}}))
        ckpt_cli.merge(run, out, base=base, part="0/2", **options)
        shutil.copytree(base, folder / "copy")  # with its times, as rsync -t does
        shutil.rmtree(base)
        (folder / "copy").rename(base)
        monkeypatch.setattr(platform, "node", lambda: "another machine")
        ckpt_cli.merge(run, out, base=base, part="1/2", **options)
        return out

    def test_is_refused_where_its_weights_are_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        out = self.written(tmp_path, monkeypatch, carry_from_base="more.weight")
        with pytest.raises(Inconsistent, match="not other copies of them") as refused:
            ckpt_cli.publish(out)
        assert str(refused.value.hint).startswith("if each machine reads a copy of its own, put one where all of them see it")

    def test_is_published_where_it_only_gives_side_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        out = self.written(tmp_path, monkeypatch)
        ckpt_cli.publish(out)
        assert (out / "tokenizer.json").exists()


def test_a_launched_run_is_not_published_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = model(tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    ckpt_cli.merge(run, tmp_path / "out", part="auto")
    in_place(run / "model-00002-of-00002.safetensors")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(Inconsistent, match="files changed between part 0 and part 1"):
        ckpt_cli.merge(run, tmp_path / "out", part="auto")
    assert not (tmp_path / "out").exists()


def test_unchanged_files_are_published(tmp_path: Path) -> None:
    run = model(tmp_path / "run")
    for part in ("1/2", "0/2"):
        ckpt_cli.merge(run, tmp_path / "out", part=part)
    ckpt_cli.publish(tmp_path / "out")
    ckpt_cli.merge(run, tmp_path / "whole")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()
    }
