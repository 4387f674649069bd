"""`extract-state` and `merge --with-state` as commands: where files go, what is refused, and that nothing in a file ever runs."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import json
import math
import os
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckpt_cli
from ckpt_cli.cli import session
from ckpt_cli.cli.screens.extracted import extract_result
from ckpt_cli.errors import CkptError, CorruptFile, NotFound, OutputExists, OutputInsideSource, UsageError
from ckpt_cli.results.written import ExtractResult
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt
from tests.conftest import Copy
from tests.tensors import differences, load
from tests.test_inert_values import TRAPS, repacked, with_pickle

EXTRA = "extra_state_merged.pt"
SLOW = 20.0
"""Seconds after which a small file has taken too long."""


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestTheOutput:
    def test_is_beside_the_checkpoint_if_nothing_else_is_said(self, copy: Copy) -> None:
        run = copy("layouts", "verl-run", "run")
        assert ckpt_cli.extract_state(run).output == str(run / "global_step_20_state")
        assert ckpt_cli.extract_state(run / "global_step_10" / "critic").output == str(run / "global_step_10_state_critic")
        assert ckpt_cli.extract_state(run, step=10, type="critic", overwrite=True).output == str(run / "global_step_10_state_critic")
        assert ckpt_cli.extract_state(run, step=10).output == str(run / "global_step_10_state")

    @pytest.mark.parametrize(
        ("layout", "run", "output"),
        [
            ("lmms-run", "run", "checkpoint-200_state"),
            ("accelerate", "run", "checkpoint-7_state"),
            ("lightning", "fabric", "step-5.ckpt_state"),
            ("composer", "run", "ep0-ba5_state"),
            ("bagel-runs", "fork_dcp", "0000006_state"),
        ],
    )
    def test_is_named_after_the_step_of_every_trainer(self, copy: Copy, layout: str, run: str, output: str) -> None:
        folder = copy("layouts", layout, run)
        assert ckpt_cli.extract_state(folder).output == str(folder / output)
        assert (folder / output / "ckpt-manifest.json").is_file()

    def test_of_a_single_file_is_beside_it(self, tmp_path: Path) -> None:
        torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "checkpoint.pt")
        assert ckpt_cli.extract_state(tmp_path / "checkpoint.pt").output == str(tmp_path / "checkpoint_state")
        assert torch.load(tmp_path / "checkpoint_state" / EXTRA) == {"epoch": 3}

    def test_leaves_the_checkpoint_as_it_was(self, copy: Copy, tmp_path: Path) -> None:
        run = copy("layouts", "verl-run", "run")
        before = contents(run)
        ckpt_cli.extract_state(run, tmp_path / "out", optimizer=True)
        assert contents(run) == before

    def test_holds_the_files_that_were_promised(self, layouts: Path, tmp_path: Path) -> None:
        result = ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "out", optimizer=True)
        wanted = {EXTRA, "lr_scheduler_state.json", "training_state.json", "data.pt", "optimizer.safetensors", "optimizer.json"}
        assert names_in(tmp_path / "out") == {*wanted, "ckpt-manifest.json"}
        assert {file.name: file.bytes for file in result.files} == {name: (tmp_path / "out" / name).stat().st_size for name in wanted}

    def test_is_the_same_every_time(self, layouts: Path, tmp_path: Path) -> None:
        for name in ("first", "second"):
            ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / name, optimizer=True)
        first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
        assert {name for name in first if first[name] != second[name]} <= {"ckpt-manifest.json"}

    def test_has_a_manifest_that_says_where_it_came_from(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "verl-run" / "run"
        ckpt_cli.extract_state(run, tmp_path / "out")
        manifest = json.loads((tmp_path / "out" / "ckpt-manifest.json").read_text())
        text = json.dumps(manifest)
        assert str(run / "global_step_20") in text
        assert all(f"extra_state_world_size_4_rank_{rank}.pt" in text for rank in range(4))
        assert "extract-state" in text

    def test_is_never_inside_of_what_is_read(self, copy: Copy) -> None:
        run = copy("layouts", "verl-run", "run")
        before = contents(run)
        for output in (run / "global_step_20" / "state", run / "global_step_20", run / "global_step_20" / "actor" / "x"):
            with pytest.raises((OutputInsideSource, OutputExists)):
                ckpt_cli.extract_state(run, output, overwrite=True)
        assert contents(run) == before

    def test_is_not_put_over_something_else(self, layouts: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("mine")
        for overwrite in (False, True):
            with pytest.raises(OutputExists):
                ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "out", overwrite=overwrite)
        assert contents(tmp_path / "out") == {"thesis.txt": b"mine"}

    def test_replaces_an_earlier_one_only_when_asked_to(self, layouts: Path, tmp_path: Path) -> None:
        ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "out", optimizer=True)
        with pytest.raises(OutputExists, match="exists"):
            ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "out")
        assert (tmp_path / "out" / "optimizer.json").exists()
        ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "out", overwrite=True)
        assert not (tmp_path / "out" / "optimizer.json").exists()

    def test_is_not_written_in_a_dry_run_that_says_what_would_be(self, layouts: Path, tmp_path: Path) -> None:
        planned = ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "out", optimizer=True, dry_run=True)
        assert list(tmp_path.iterdir()) == []
        done = ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "out", optimizer=True)
        same = {"dry_run": False, "seconds": 0.0, "files": ()}
        assert planned.dry_run
        assert [file.name for file in planned.files] == [file.name for file in done.files]
        assert planned.model_copy(update=same) == done.model_copy(update=same)

    def test_is_not_there_if_writing_fails(self, copy: Copy, tmp_path: Path) -> None:
        run = copy("layouts", "verl-run", "run")
        (run / "global_step_20" / "actor" / "optim_world_size_4_rank_1.pt").write_bytes(b"")
        with pytest.raises(CorruptFile):
            ckpt_cli.extract_state(run, tmp_path / "deep" / "out", optimizer=True)
        assert not (tmp_path / "deep").exists()


class TestWhatIsChosen:
    def test_is_the_newest_whole_step_and_the_skipped_one_is_named(self, layouts: Path, tmp_path: Path) -> None:
        result = ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "out")
        (note,) = (note for note in result.notes if note.code == "step-skipped")
        assert (result.step, note.level) == (20, "warning")
        assert "global_step_30" in note.text

    def test_may_be_a_step_without_whole_weights(self, copy: Copy, tmp_path: Path) -> None:
        run = copy("layouts", "verl-run", "run")
        (run / "global_step_20" / "actor" / "model_world_size_4_rank_1.pt").unlink()
        result = ckpt_cli.extract_state(run, tmp_path / "out", step=20)
        (note,) = result.notes
        assert (note.level, note.code) == ("warning", "incomplete-weights")
        assert "rank 1" in note.text
        assert torch.load(tmp_path / "out" / EXTRA)["lr_scheduler"]["last_epoch"] == 20

    def test_is_a_component(self, layouts: Path, tmp_path: Path) -> None:
        assert ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "out", step=10, type="critic").component == "critic"
        with pytest.raises(UsageError, match="one component at a time"):
            ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "all", step=10, type="all")
        with pytest.raises(NotFound):
            ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "none", type="reward")

    @pytest.mark.parametrize(
        "path", ["plain-files/hub", "plain-files/hub_bin", "plain-files/one_gpu", "plain-files/plain/model.pt", "mesh-line/line/ranks"]
    )
    def test_is_not_a_folder_without_any_state(self, layouts: Path, tmp_path: Path, path: str) -> None:
        with pytest.raises(NotFound, match="no training state") as caught:
            ckpt_cli.extract_state(layouts / path, tmp_path / "out")
        assert caught.value.expected
        assert caught.value.hint == (None if "one_gpu" in path else "pass the folder of the training step that these weights come from")
        assert list(tmp_path.iterdir()) == []

    def test_may_be_a_folder_of_weights_in_several_files(self, copy: Copy, tmp_path: Path) -> None:
        for name in ("hub", "hub_bin"):
            folder = copy("layouts", "plain-files", name)
            torch.save({"last_epoch": 3}, folder / "scheduler.pt")
            ckpt_cli.extract_state(folder, tmp_path / f"{name}-state")
            assert torch.load(tmp_path / f"{name}-state" / EXTRA) == {"lr_scheduler": {"last_epoch": 3}}

    def test_may_be_an_optimizer_alone(self, tmp_path: Path) -> None:
        folder = tmp_path / "global_step_3"
        folder.mkdir()
        torch.save({"w": torch.ones(2)}, folder / "model_world_size_1_rank_0.pt")
        optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
        torch.save(optimizer, folder / "optim_world_size_1_rank_0.pt")
        ckpt_cli.extract_state(folder, tmp_path / "out", optimizer=True)
        assert load(tmp_path / "out" / "optimizer.safetensors").keys() == {"state.w.exp_avg"}

    def test_options_that_do_not_exist_are_an_error_of_usage(self, layouts: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="unknown option"):
            ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "out", optimiser=True)
        with pytest.raises(UsageError, match="jobs"):
            ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "out", jobs=0)


class TestMergingWithState:
    @pytest.mark.parametrize(
        "path", ["verl-run/run", "lmms-run/run", "accelerate/run", "torchtitan/run/checkpoint", "composer/run", "bagel-runs/fork_ranks"]
    )
    def test_writes_the_same_files_beside_the_weights(self, layouts: Path, tmp_path: Path, path: str) -> None:
        extracted = ckpt_cli.extract_state(layouts / path, tmp_path / "state")
        merged = ckpt_cli.merge(layouts / path, tmp_path / "merged", with_state=True)
        state = contents(tmp_path / "state")
        state.pop("ckpt-manifest.json")
        found = contents(tmp_path / "merged")
        assert merged.outputs[0].state == tuple(sorted(state))
        assert {file.name for file in extracted.files} == set(state)
        for name in set(state) - {"training_state.json"}:
            assert found[name] == state[name], name
        assert json.loads(found["training_state.json"]) == json.loads(state["training_state.json"])

    def test_changes_nothing_else(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "verl-run" / "run"
        ckpt_cli.merge(run, tmp_path / "plain")
        ckpt_cli.merge(run, tmp_path / "with", with_state=True)
        plain, more = contents(tmp_path / "plain"), contents(tmp_path / "with")
        assert {name: more[name] for name in plain if name != "ckpt-manifest.json"} == {
            name: content for name, content in plain.items() if name != "ckpt-manifest.json"
        }
        assert set(more) - set(plain) == {EXTRA, "lr_scheduler_state.json", "training_state.json", "data.pt"}

    def test_lists_them_in_the_manifest_so_that_they_are_replaced(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "verl-run" / "run"
        ckpt_cli.merge(run, tmp_path / "out", with_state=True)
        ckpt_cli.merge(run, tmp_path / "out", overwrite=True)
        assert not (tmp_path / "out" / EXTRA).exists()

    def test_is_refused_where_there_is_none(self, layouts: Path, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="no training state"):
            ckpt_cli.merge(layouts / "plain-files" / "hub", tmp_path / "out", with_state=True)
        assert list(tmp_path.iterdir()) == []

    def test_writes_nothing_in_a_dry_run(self, layouts: Path, tmp_path: Path) -> None:
        result = ckpt_cli.merge(layouts / "verl-run" / "run", tmp_path / "out", with_state=True, dry_run=True)
        assert EXTRA in result.outputs[0].state
        assert list(tmp_path.iterdir()) == []

    def test_tells_what_is_wrong_with_the_state(self, copy: Copy, tmp_path: Path) -> None:
        run = copy("layouts", "verl-run", "run")
        (run / "global_step_20" / "actor" / "extra_state_world_size_4_rank_3.pt").unlink()
        result = ckpt_cli.merge(run, tmp_path / "out", with_state=True)
        assert "missing-rank" in {note.code for note in result.outputs[0].notes}

    def test_puts_it_beside_the_weights_in_place_as_well(self, copy: Copy) -> None:
        run = copy("layouts", "verl-run", "run")
        actor = run / "global_step_20" / "actor"
        before = contents(actor)
        ckpt_cli.merge(run, with_state=True, in_place=True)
        after = contents(actor)
        assert {name: after[name] for name in before} == before
        assert {EXTRA, "training_state.json", "model.safetensors"} <= set(after)


def test_a_dry_run_says_about_how_large_the_files_would_be(layouts: Path, tmp_path: Path) -> None:
    run = layouts / "lmms-run" / "run"
    planned = {file.name: file.bytes for file in ckpt_cli.extract_state(run, tmp_path / "out", dry_run=True).files}
    written = {file.name: file.bytes for file in ckpt_cli.extract_state(run, tmp_path / "out").files}
    assert planned.keys() == written.keys()
    assert all(0.8 * size <= planned[name] <= 1.2 * size for name, size in written.items())
    assert all(planned[name] == size for name, size in written.items() if not name.endswith(".pt"))


class TestTheCommandLine:
    def test_says_where_training_stood_and_what_to_do_next(self, layouts: Path, tmp_path: Path) -> None:
        outcome = ckpt("extract-state", layouts / "verl-run" / "run", "-o", tmp_path / "out", "--optimizer")
        assert outcome.code == 0
        assert "step 20" in outcome.out
        assert "last_epoch 20" in outcome.out
        assert outcome.err.splitlines()[-1] == f"next: ls {tmp_path}/out"

    def test_prints_json_that_holds_the_result(self, layouts: Path, tmp_path: Path) -> None:
        outcome = ckpt("extract-state", layouts / "verl-run" / "run", "-o", tmp_path / "out", "--json", "--dry-run")
        envelope = json.loads(outcome.out)
        assert (outcome.code, envelope["status"], envelope["command"], envelope["exit_code"]) == (0, "success", "extract-state", 0)
        result = ExtractResult(**envelope["data"])
        again = ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / "out", dry_run=True)
        assert result.model_copy(update={"seconds": 0.0}).model_dump(mode="json") == again.model_copy(update={"seconds": 0.0}).model_dump(
            mode="json"
        )
        assert not (tmp_path / "out").exists()

    def test_ends_with_the_code_of_what_is_wrong(self, layouts: Path, tmp_path: Path) -> None:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "mine.txt").write_text("x")
        for code, name, arguments in (
            (3, "not-found", [layouts / "plain-files" / "hub"]),
            (4, "undecidable", [layouts / "bagel-runs" / "official", "--optimizer"]),
            (2, "usage", [layouts / "verl-run" / "run", "--step", "10", "--type", "all"]),
            (5, "output-exists", [layouts / "verl-run" / "run", "-o", tmp_path / "full"]),
        ):
            outcome = ckpt("extract-state", "-o", tmp_path / "out", *arguments)
            assert (outcome.code, outcome.out) == (code, "")
            assert f"error[{name}]: " in outcome.err
            assert "Traceback" not in outcome.err


class TestTheScreen:
    """Whatever a scheduler or a counter holds can be shown."""

    def shown(self, monkeypatch: pytest.MonkeyPatch, folder: Path, content: object) -> str:
        checkpoint = folder / "global_step_7"
        checkpoint.mkdir()
        torch.save({"w": torch.ones(2)}, checkpoint / "model_world_size_1_rank_0.pt")
        torch.save(content, checkpoint / "extra_state_world_size_1_rank_0.pt")
        result = ckpt_cli.extract_state(checkpoint)
        stream = io.StringIO()
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", stream)
        extract_result(result, session.Session("extract-state", color="never", verbose=True))
        json.dumps(result.model_dump(mode="json"), allow_nan=False)
        return stream.getvalue()

    def test_shows_rates_and_counters(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        content = {"lr_scheduler": {"last_epoch": 7, "_last_lr": [1e-4, 2e-5]}, "epoch": 2, "total_tokens": 1_500_000}
        text = self.shown(monkeypatch, tmp_path, content)
        for part in ("step 7, epoch 2", "last_epoch 7, lr 0.0001, 2e-05", "total_tokens 1.5e+06"):
            assert part in text

    @pytest.mark.parametrize(
        "rates",
        [["x"], [None], [math.nan], [math.inf], [[0.1]], [True], [{}], {"a": 1}, "0.1", 0.1, [torch.tensor(0.1)], [torch.ones(2)], []],
        ids=repr,
    )
    def test_shows_rates_of_any_kind(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rates: object) -> None:
        assert "step 7" in self.shown(monkeypatch, tmp_path, {"lr_scheduler": {"last_epoch": 7, "_last_lr": rates}})

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**300, 10**400, -(10**30), torch.tensor(math.nan)], ids=str)
    def test_shows_counters_of_any_size(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: object) -> None:
        """A best loss begins at infinity."""
        try:
            text = self.shown(monkeypatch, tmp_path, {"best_loss": value})
        except CorruptFile:
            assert isinstance(value, int)
        else:
            assert "best_loss" in text

    @pytest.mark.parametrize(
        "name", ["\x1b[31mred\x1b[0m", "[bold]x[/bold]", "[/foo]", "a\nb\rc", "\u202eevil", "\ud800", "x" * 3_000], ids=ascii
    )
    def test_shows_names_of_any_kind(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
        content = {name: 3, "lr_scheduler": {"last_epoch": name}, "step": name, "args": Runs(os.getcwd), "s": slice(1)}
        text = self.shown(monkeypatch, tmp_path, content)
        assert not any(control in text for control in ("\x1b", "\r", "\u202e"))


# -- pickles that would run something ---------------------------------------------------------------------------------


class Runs:
    """Pickles as a call of ``function`` with ``args``."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def torch_file(content: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def payloads(marker: Path) -> dict[str, object]:
    """Things that make the folder ``marker`` when they are unpickled."""
    return {
        "os.mkdir": Runs(os.mkdir, str(marker)),
        "os.system": Runs(os.system, f"mkdir {marker}"),
        "builtins.eval": Runs(builtins.eval, f"__import__('os').mkdir({str(marker)!r})"),
        "builtins.exec": Runs(builtins.exec, f"import os; os.mkdir({str(marker)!r})"),
        "subprocess.Popen": Runs(subprocess.Popen, ["mkdir", str(marker)]),
        "subprocess.check_output": Runs(subprocess.check_output, ["mkdir", str(marker)]),
        "pathlib.Path.mkdir": Runs(Path.mkdir, marker),
        "torch.load of another file": Runs(functools.partial(torch.load, weights_only=False), str(marker.parent / "inner.pt")),
        "an array of objects": np.array([Runs(os.mkdir, str(marker))], dtype=object),
        "among other things": {"shape": Runs(os.mkdir, str(marker)), "tensor": torch.ones(1)},
    }


PAYLOADS = tuple(payloads(Path("/nowhere/marker")))


def raw_payloads(marker: Path) -> dict[str, bytes]:
    """Pickles that no pickler writes: calls in the places of dtypes, states, keys and names."""
    run = b"cposix\nmkdir\n" + text(str(marker)) + b"\x85R"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85U\x01btR"

    def wrap(value: bytes) -> bytes:
        return b"\x80\x02}" + text("rng") + b"}" + text("cpu") + value + b"ss."

    return {
        "posix.system": wrap(b"cposix\nsystem\n" + text(f"mkdir {marker}") + b"\x85R"),
        "builtins.getattr": wrap(b"cbuiltins\ngetattr\n(cos\npath\n" + text("join") + b"tR" + text(str(marker)) + b"\x85R"),
        "a global found by its path": b"\x80\x04}"
        + text("rng")
        + text("os")
        + text("path.os.mkdir")
        + b"\x93"
        + text(str(marker))
        + b"\x85Rs.",
        "INST": b"\x80\x02}" + text("rng") + b"(" + text(str(marker)) + b"iposix\nmkdir\ns.",
        "OBJ": b"\x80\x02}" + text("rng") + b"(cposix\nmkdir\n" + text(str(marker)) + b"os.",
        "NEWOBJ": b"\x80\x02}" + text("rng") + b"cposix\nmkdir\n" + text(str(marker)) + b"\x85\x81s.",
        "the state of an array": wrap(array + run + b"b"),
        "the dtype of an array": wrap(array + b"(K\x01K\x02\x85" + run + b"\x89U\x01atb"),
        "the data of an array": wrap(array + b"(K\x01K\x02\x85cnumpy\ndtype\n(U\x02u1K\0K\x01tR\x89" + run + b"tb"),
        "a codec": wrap(b"c_codecs\nencode\n" + text("a") + run + b"\x86R"),
        "a size": wrap(b"ctorch\nSize\n" + run + b"\x85R"),
        "a device": wrap(b"ctorch\ndevice\n" + run + b"\x85R"),
        "a path": wrap(b"cpathlib\nPosixPath\n" + run + b"\x85R"),
        "a set": wrap(b"cbuiltins\nset\n" + run + b"\x85R"),
        "an ordered dict": wrap(b"ccollections\nOrderedDict\n" + run + b"\x85R"),
        "a default factory": wrap(b"ccollections\ndefaultdict\n" + run + b"\x85R"),
        "a key": b"\x80\x02}" + run + b"K\x01s.",
        "the whole file": b"\x80\x02" + run + b".",
        "a persistent id": wrap(run + b"Q"),
        "the type of a storage": wrap(
            b"ctorch._utils\n_rebuild_tensor_v2\n((U\x07storage" + run + b"U\x010U\x03cpuK\x01tQK\0K\x01\x85K\x01\x85\x89NtR"
        ),
    }


RAW = tuple(raw_payloads(Path("/nowhere/marker")))

KINDS: dict[str, tuple[str, Callable[[object], object]]] = {
    "extra": ("extra_state_world_size_1_rank_0.pt", lambda bad: {"lr_scheduler": {"a": bad}, "rng": {"cpu": bad, "numpy": bad}, "x": bad}),
    "rng": ("rng_state_0.pth", lambda bad: {"cpu": bad, "cuda": [bad], "python": bad}),
    "rng of accelerate": ("random_states_0.pkl", lambda bad: {"random_state": bad, "torch_cuda_manual_seed": [bad]}),
    "scheduler": ("scheduler.pt", lambda bad: {"last_epoch": bad, "_last_lr": [bad]}),
    "scaler": ("scaler.pt", lambda bad: bad),
    "meta.pt": ("meta.pt", lambda bad: {"epoch": bad, "callbacks": {"a": bad}}),
    "OLMo": ("train/rank0.pt", lambda bad: {"global_step": bad}),
    "optimizer of a rank": (
        "optim_world_size_1_rank_0.pt",
        lambda bad: {"state": {0: {"exp_avg": torch.ones(2), "x": bad}}, "param_groups": [{"params": [0], "lr": bad}]},
    ),
    "whole optimizer": ("optimizer.bin", lambda bad: {"state": {0: bad}, "param_groups": bad}),
    "copied": ("data.pt", lambda bad: bad),
}


class Place:
    """A checkpoint of one rank whose state files are hostile, and everything around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "global_step_7"
        self.checkpoint.mkdir()
        self.marker = folder / "marker"
        torch.save(Runs(os.mkdir, str(self.marker)), folder / "inner.pt")
        torch.save({"w": torch.ones(2)}, self.checkpoint / "model_world_size_1_rank_0.pt")
        torch.save({"any": 1}, self.checkpoint / "custom_checkpoint_0.pkl")

    def write(self, name: str, data: bytes) -> Place:
        (self.checkpoint / name).parent.mkdir(exist_ok=True)
        (self.checkpoint / name).write_bytes(data)
        return self

    def harmless(self, path: Path | None = None, **options: Any) -> ExtractResult | CkptError:
        """Nothing ran: the state is extracted, and what the file wanted is listed or copied, or the file is refused with a reason."""
        start = time.process_time()
        try:
            result: ExtractResult | CkptError = ckpt_cli.extract_state(path or self.checkpoint, self.folder / "out", **options)
        except CkptError as error:
            result = error
        if isinstance(result, CkptError):
            assert result.exit_code in (3, 4)
            assert 0 < len(result.message) < 1_000
            assert not (self.folder / "out").exists() or options.get("overwrite")
        elif (self.folder / "out" / EXTRA).exists():
            torch.load(self.folder / "out" / EXTRA)
        assert not self.marker.exists()
        assert time.process_time() - start < SLOW
        return result


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class TestPicklesThatWouldRunCode:
    @pytest.mark.filterwarnings("ignore")
    def test_would_run_it_in_torch_load(self, place: Place) -> None:
        """What these tests show is worth something: unpickled as usual, every payload makes its mark."""
        for name, payload in payloads(place.marker).items():
            place.write("data.pt", torch_file(payload))
            with contextlib.suppress(Exception):
                torch.load(place.checkpoint / "data.pt", weights_only=False)
            for _ in range(100):
                if place.marker.exists():
                    break
                time.sleep(0.02)
            assert place.marker.exists(), name
            place.marker.rmdir()

    @pytest.mark.parametrize("payload", PAYLOADS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_run_nothing(self, kind: str, payload: str, place: Place) -> None:
        name, around = KINDS[kind]
        place.write(name, torch_file(around(payloads(place.marker)[payload])))
        result = place.harmless(optimizer="optimizer" in kind)
        if kind == "copied":
            assert isinstance(result, ExtractResult)
            assert (place.folder / "out" / name).read_bytes() == (place.checkpoint / name).read_bytes()
        elif isinstance(result, ExtractResult):
            assert result.not_represented

    @pytest.mark.parametrize("payload", RAW)
    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "copied"])
    def test_that_no_pickler_writes_run_nothing(self, kind: str, payload: str, place: Place) -> None:
        place.write(KINDS[kind][0], with_pickle(raw_payloads(place.marker)[payload])).harmless(optimizer="optimizer" in kind)

    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_as_objects_of_dcp_run_nothing(self, payload: str, place: Place) -> None:
        bad = payloads(place.marker)[payload]
        state = {
            "model": {"w": torch.ones(2)},
            "train_state": {"a": bad, "b": [bad]},
            "optimizer": {"state": {"w": {"exp_avg": torch.ones(2), "x": bad}}, "param_groups": [{"params": ["w"], "lr": bad}]},
        }
        save_dcp(state, checkpoint_id=place.folder / "step-3", no_dist=True)
        if place.marker.exists():
            place.marker.rmdir()
        for optimizer in (False, True):
            result = place.harmless(place.folder / "step-3", optimizer=optimizer, overwrite=True)
            assert not isinstance(result, ExtractResult) or result.not_represented

    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_beside_the_weights_of_one_file_run_nothing(self, payload: str, place: Place) -> None:
        bad = payloads(place.marker)[payload]
        (place.folder / "one").mkdir()
        torch.save({"model": {"w": torch.ones(2)}, "lr_scheduler": {"a": bad}, "b": bad}, place.folder / "one" / "checkpoint.pt")
        result = place.harmless(place.folder / "one" / "checkpoint.pt")
        assert isinstance(result, ExtractResult)
        assert result.not_represented

    def test_import_nothing_and_look_nothing_up(self, place: Place) -> None:
        (place.folder / "evil_module.py").write_text(f"import os\nos.mkdir({str(place.marker)!r})\nclass Thing: pass\n")
        evil = b"\x80\x02}" + text("lr_scheduler") + b"}" + text("a") + b"cevil_module\nThing\n)R}X\x01\0\0\0aK\x01sbss."
        for name in ("extra_state_world_size_1_rank_0.pt", "scheduler.pt", "optim_world_size_1_rank_0.pt"):
            place.write(name, with_pickle(evil))
        place.write("optim_world_size_1_rank_0.pt", torch_file(KINDS["optimizer of a rank"][1](Runs(os.mkdir, str(place.marker)))))
        done = subprocess.run(
            [sys.executable, "-B", "-c", OBSERVER, str(place.checkpoint), str(place.folder / "out")],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": f"{ROOT}{os.pathsep}{place.folder}"},
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert seen == {"events": [], "imports": []}
        assert not place.marker.exists()


OBSERVER = """
import json, sys
import torch  # writes the .pt file; what it does while it is imported is its own affair
import ckpt_cli
events, imports = [], []
def hook(event, args):
    if event == "pickle.find_class" or event in ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"):
        events.append(event)
    elif event == "import" and args[0].startswith("evil"):
        imports.append(args[0])
sys.addaudithook(hook)
ckpt_cli.extract_state(sys.argv[1], sys.argv[2], optimizer=True)
print(json.dumps({"events": events, "imports": imports}))
"""


LIMITED = """
import resource, sys
import ckpt_cli
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
for path in sys.argv[1:]:
    try:
        ckpt_cli.extract_state(path, optimizer="3/" in path)
    except ckpt_cli.CkptError as error:
        assert error.exit_code in (3, 4)
"""


class TestFilesThatAreTraps:
    @pytest.mark.parametrize("name", [kind[0] for kind in KINDS.values()][:-1])
    def test_cut_off_anywhere_are_refused(self, name: str, place: Place) -> None:
        data = torch_file({"lr_scheduler": {"last_epoch": 3}, "cpu": torch.arange(8, dtype=torch.uint8)})
        for length in (0, 1, 30, 100, len(data) // 2, len(data) - 30, len(data) - 1):
            result = place.write(name, data[:length]).harmless(optimizer="optim" in name)
            assert isinstance(result, CorruptFile)
            assert result.path == str(place.checkpoint / name)

    @pytest.mark.parametrize("trap", ["lists in lists", "a list of itself", "a dict of itself"])
    @pytest.mark.parametrize("name", ["extra_state_world_size_1_rank_0.pt", "scheduler.pt", "rng_state_0.pth", "meta.pt"])
    def test_endless_values_are_refused(self, name: str, trap: str, place: Place) -> None:
        result = place.write(name, with_pickle(b"\x80\x02}" + text("lr_scheduler") + TRAPS[trap] + b"s.")).harmless()
        assert isinstance(result, CorruptFile)

    @pytest.mark.parametrize("trap", ["lists in lists", "a list of itself", "a dict of itself"])
    def test_endless_values_in_an_optimizer_are_refused(self, trap: str, place: Place) -> None:
        groups = b"](}" + text("params") + b"]K\0a" + text("lr") + TRAPS[trap] + b"sse"
        pickled = b"\x80\x02}" + text("state") + b"}s" + text("param_groups") + groups + b"s."
        result = place.write("optim_world_size_1_rank_0.pt", with_pickle(pickled)).harmless(optimizer=True)
        assert isinstance(result, CkptError)

    def test_a_text_that_is_used_a_thousand_times_is_not_written_a_thousand_times(self, place: Place) -> None:
        """100 KB of text in a memo, referred to by two bytes each time: what is written is bounded by what was read."""
        repeated = b"(" + text("y" * 100_000) + b"q\x01" + b"h\x01" * 1_000 + b"l"
        data = with_pickle(b"\x80\x02}" + text("lr_scheduler") + repeated + b"s.")
        result = place.write("extra_state_world_size_1_rank_0.pt", data).harmless()
        if isinstance(result, ExtractResult):
            assert sum(file.bytes for file in result.files) < 50 * len(data)

    def test_a_huge_tensor_of_few_bytes_is_listed(self, place: Place) -> None:
        place.write("scheduler.pt", torch_file({"a": torch.ones(1).expand(1 << 40), "last_epoch": 3}))
        result = place.harmless()
        assert isinstance(result, ExtractResult)
        assert len(result.not_represented) == 1

    def test_a_pipe_does_not_block(self, place: Place) -> None:
        os.mkfifo(place.checkpoint / "scheduler.pt")
        place.harmless()

    def test_a_link_to_a_device_is_refused_or_left_alone(self, place: Place) -> None:
        (place.checkpoint / "scheduler.pt").symlink_to("/dev/zero")
        (place.checkpoint / "data.pt").symlink_to("/dev/zero")
        place.harmless()

    def test_folders_with_the_names_of_files_are_left_alone(self, place: Place) -> None:
        for name in ("scheduler.pt", "data.pt", "trainer_state.json", "optimizer.bin"):
            (place.checkpoint / name).mkdir()
        assert isinstance(place.harmless(), ExtractResult)

    @pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process can be limited on Linux")
    def test_ranks_and_world_sizes_of_any_size_take_no_memory(self, tmp_path: Path) -> None:
        """A name alone must not make a list of all the ranks that it speaks of."""
        for number, name in enumerate(
            (
                "extra_state_world_size_99999999999_rank_0.pt",
                "extra_state_world_size_1_rank_99999999999.pt",
                f"rng_state_{'9' * 200}.pth",
                "optim_world_size_99999999999_rank_0.pt",
            )
        ):
            (tmp_path / str(number)).mkdir()
            optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
            content = torch_file({"rng": {"cuda": torch.ones(2)}, "cuda": torch.ones(2), **optimizer})
            Place(tmp_path / str(number)).write(name, content)
        checkpoints = sorted(map(str, tmp_path.glob("*/global_step_7")))
        done = subprocess.run([sys.executable, "-c", LIMITED, *checkpoints], capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert done.returncode == 0, done.stderr[-500:]

    def test_thousands_of_mutants_raise_nothing_but_errors_of_ours(self, place: Place) -> None:
        source = random.Random(4)
        rng = {"cpu": torch.arange(4, dtype=torch.uint8), "numpy": ("MT19937", np.arange(4, dtype="u4"), 1, 0, 0.0), "random": (3, (1, 2))}
        data = torch_file({"lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1]}, "rng": rng, "step": 3, "list": [b"x", (1,)]})
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            original = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        outcomes = {"extracted": 0, "refused": 0}
        for number in range(200):
            changed = bytearray(original)
            for _ in range(source.choice((1, 1, 2, 4))):
                changed[source.randrange(len(changed))] = source.choice((source.randrange(256), *b"(.02NtRbQqhK}]"))
            place.write("extra_state_world_size_1_rank_0.pt", repacked(data, bytes(changed)))
            try:
                result = ckpt_cli.extract_state(place.checkpoint, place.folder / f"out{number}")
            except CkptError:
                outcomes["refused"] += 1
            else:
                outcomes["extracted"] += 1
                extract_result(result, session.Session("extract-state", color="never", quiet=True))
        assert min(outcomes.values()) > 20
        assert not place.marker.exists()


def test_the_tensors_of_a_state_are_those_of_the_files(layouts: Path, tmp_path: Path) -> None:
    """The same optimizer, read with one worker and with many."""
    for jobs in (1, 8):
        ckpt_cli.extract_state(layouts / "verl-run" / "run", tmp_path / str(jobs), optimizer=True, jobs=jobs)
    assert differences(load(tmp_path / "1" / "optimizer.safetensors"), load(tmp_path / "8" / "optimizer.safetensors")) == []
