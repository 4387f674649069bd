"""Quiet never changes meaning: warnings with -q, errors with --strict, and what cannot be looked at is never absent."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.cli import _run
from ckpt_cli.errors import (
    CastOverflow,
    CkptError,
    CorruptFile,
    LfsPointer,
    NotFound,
    SourceChanged,
    UnfinishedDownload,
    Unreadable,
    Warned,
)
from ckpt_cli.files.folders import entries_in, files_in, is_file
from ckpt_cli.files.source import Files, read_small
from tests.cli import ROOT, Outcome

EXAMPLE = ROOT / "examples" / "tiny-run"
SKIPPED = "warning: checkpoint-200 is skipped: rank 2 of 4 is missing"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1000\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the tiny run with two steps, EMA included; of a class that nobody knows, so that its extra tensors are no warning."""
    copy = Path(shutil.copytree(EXAMPLE, tmp_path / "run"))
    for config in copy.rglob("config.json"):
        config.write_text(config.read_text().replace("Qwen3ForCausalLM", "OwnForCausalLM").replace('"qwen3"', '"own"'))
    return copy


@pytest.fixture
def lacking(run: Path) -> Path:
    """The run, whose newest step lacks a rank."""
    shard(run, 2).unlink()
    return run


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The command line in this process."""

    def called(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = _run([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return called


def shard(run: Path, rank: int, step: int = 200) -> Path:
    return run / f"checkpoint-{step}" / "pytorch_model_fsdp_0" / f"model_world_size_4_rank_{rank}.pt"


def model(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors or {"w": torch.ones(2, 3)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def commands(run: Path, out: Path) -> dict[str, list[str]]:
    """Every command, on the run of which a step must be chosen."""
    return {
        "detect": ["detect", str(run)],
        "inspect": ["inspect", str(run)],
        "merge": ["merge", str(run), "-o", str(out)],
        "average": ["average", str(run), "--all", "-o", str(out)],
        "extract-state": ["extract-state", str(run), "-o", str(out)],
        "verify": ["verify", str(run)],
    }


COMMANDS = ("detect", "inspect", "merge", "average", "extract-state", "verify")


# -- -q --------------------------------------------------------------------------------------------------------------


class TestQuiet:
    @pytest.mark.parametrize("command", ["detect", "inspect", "merge", "verify"])
    def test_a_step_that_was_skipped_is_said_on_stderr(
        self, lacking: Path, tmp_path: Path, call: Callable[..., Outcome], command: str
    ) -> None:
        outcome = call(*commands(lacking, tmp_path / "out")[command], "-q")
        assert outcome.code == 0
        assert SKIPPED in outcome.err.splitlines()
        assert "warning" not in outcome.out

    @pytest.mark.parametrize("command", ["detect", "inspect", "merge", "verify"])
    def test_twice_silences_warnings_and_changes_nothing_else(
        self, lacking: Path, tmp_path: Path, call: Callable[..., Outcome], command: str
    ) -> None:
        once = call(*commands(lacking, tmp_path / "a")[command], "-q")
        twice = call(*commands(lacking, tmp_path / "b")[command], "-qq")
        assert (twice.code, twice.err) == (0, "")
        assert twice.out.replace("/b", "/a") == once.out

    def test_an_average_without_a_step_says_so(self, run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
        shutil.copytree(run / "checkpoint-100", run / "checkpoint-300")
        shard(run, 2).unlink()
        outcome = call("average", run, "--all", "-o", tmp_path / "out", "-q")
        assert "warning: checkpoint-200 is left out: rank 2 of 4 is missing" in outcome.err

    def test_files_that_were_written_hours_apart_are_said(self, run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
        status = shard(run, 1).stat()
        os.utime(shard(run, 1), ns=(status.st_atime_ns, status.st_mtime_ns - 72 * 3600 * 10**9))
        outcome = call("merge", run, "-o", tmp_path / "out", "-q")
        assert (outcome.code, outcome.err.count("3 days older than")) == (0, 1)

    def test_the_same_of_an_older_checkpoint_of_an_average(self, run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
        path = shard(run, 1, step=100)
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 72 * 3600 * 10**9))
        outcome = call("average", run, "--all", "-o", tmp_path / "out", "-q")
        assert "warning: checkpoint-100: model_world_size_4_rank_1.pt is 3 days older than" in outcome.err

    def test_of_a_state_without_all_ranks(self, lacking: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
        state = lacking / "checkpoint-200" / "rng_state_0.pth"
        torch.save({"cpu": torch.zeros(3, dtype=torch.uint8)}, state)
        outcome = call("extract-state", lacking, "--step", "200", "-o", tmp_path / "out", "-q")
        assert outcome.code == 0
        assert "warning: the weights of checkpoint-200 are not whole: rank 2 of 4 is missing" in outcome.err

    def test_errors_of_verify_are_listed(self, tmp_path: Path, call: Callable[..., Outcome]) -> None:
        folder = model(tmp_path / "model")
        (folder / "model.safetensors").write_bytes(b"x" * 40)
        for flag in ("-q", "-qq"):
            outcome = call("verify", folder, flag)
            assert (outcome.code, outcome.out) == (1, "failed\n")
            assert outcome.err.startswith("error[damaged-file]: model.safetensors: ")

    def test_warnings_of_verify_are_listed(self, tmp_path: Path, call: Callable[..., Outcome]) -> None:
        folder = model(tmp_path / "model", **{"a.weight": torch.zeros(4, 4)})
        outcome = call("verify", folder, "--full", "-q")
        assert (outcome.code, outcome.out) == (0, "ok\n")
        assert outcome.err.splitlines() == [
            "warning: without config.json, names and shapes were not compared",
            "warning: a.weight: all 16 elements are zero",
        ]

    def test_of_many_of_one_kind_the_first_are_shown(self, tmp_path: Path, call: Callable[..., Outcome]) -> None:
        folder = model(tmp_path / "model", **{f"l{i}.weight": torch.zeros(4, 4) for i in range(20)})
        outcome = call("verify", folder, "--full", "-q")
        assert outcome.err.count("warning: l") == 8
        assert "... and 12 more (--json lists all)" in outcome.err

    def test_detect_says_why_it_cannot_be_merged(self, lacking: Path, call: Callable[..., Outcome]) -> None:
        outcome = call("detect", lacking / "checkpoint-200", "-q")
        assert outcome.code == 4
        assert outcome.err == "error[missing-shard]: rank 2 of 4 is missing\n"

    def test_without_warnings_nothing_is_said(self, run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
        outcome = call("merge", run, "-o", tmp_path / "out", "-q")
        assert (outcome.out, outcome.err) == (f"{tmp_path / 'out'}\n", "")


# -- --strict --------------------------------------------------------------------------------------------------------


class TestStrict:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_a_warning_ends_with_1_and_an_entry_in_errors(
        self, lacking: Path, tmp_path: Path, call: Callable[..., Outcome], command: str
    ) -> None:
        if command == "extract-state":
            torch.save({"cpu": torch.zeros(3, dtype=torch.uint8)}, lacking / "checkpoint-100" / "rng_state_0.pth")
        if command == "average":
            shutil.copytree(lacking / "checkpoint-100", lacking / "checkpoint-300")
        arguments = commands(lacking, tmp_path / "out")[command]
        outcome = call(*arguments, "--strict", "--json")
        document = json.loads(outcome.out)
        assert (outcome.code, document["exit_code"], document["status"]) == (1, 1, "error")
        assert "step-skipped" in [error["code"] for error in document["errors"]]
        assert not (tmp_path / "out").exists()
        told = call(*arguments, "--strict")
        assert told.code == 1
        assert "error[strict]: --strict treats " in told.err
        assert "checkpoint-200 is " in told.err

    @pytest.mark.parametrize("command", COMMANDS)
    def test_without_warnings_everything_is_as_always(self, run: Path, tmp_path: Path, call: Callable[..., Outcome], command: str) -> None:
        if command == "extract-state":
            saved = shard(run, 0).stat().st_mtime
            for path in (run / "checkpoint-200" / f"rng_state_{rank}.pth" for rank in range(4)):
                torch.save({"cpu": torch.zeros(3, dtype=torch.uint8)}, path)
                os.utime(path, (saved, saved))
        assert call(*commands(run, tmp_path / "out")[command], "--strict", "--json").code == 0

    def test_a_dry_run_refuses_what_the_run_refuses(self, lacking: Path, tmp_path: Path) -> None:
        for dry_run in (True, False):
            with pytest.raises(Warned) as caught:
                ckpt_cli.merge(lacking, tmp_path / "out", strict=True, dry_run=dry_run)
            assert caught.value.exit_code == 1
            assert [code for code, _ in caught.value.warnings] == ["step-skipped"]
        assert not (tmp_path / "out").exists()

    def test_what_an_output_would_lack_is_a_warning(self, tmp_path: Path) -> None:
        with pytest.raises(Warned) as caught:
            ckpt_cli.merge(model(tmp_path / "model"), tmp_path / "out", strict=True)
        assert {code for code, _ in caught.value.warnings} == {"lacks-asset"}
        assert not (tmp_path / "out").exists()

    def test_infinities_that_are_allowed_prevent_publication(self, run: Path, tmp_path: Path) -> None:
        folder = self._with_assets(run, model(tmp_path / "model", w=torch.full((2, 3), 1e6)))
        ckpt_cli.merge(folder, tmp_path / "a", dtype="fp16", allow_overflow=True)
        with pytest.raises(Warned, match="1 warning") as caught:
            ckpt_cli.merge(folder, tmp_path / "b", dtype="fp16", allow_overflow=True, strict=True)
        assert caught.value.details == ("cast-overflow: 6 finite values became infinite",)
        assert (tmp_path / "a").exists()
        assert not (tmp_path / "b").exists()
        with pytest.raises(CastOverflow):
            ckpt_cli.merge(folder, tmp_path / "b", dtype="fp16", strict=True)

    def test_values_that_are_not_finite_prevent_publication_of_an_average(self, run: Path, tmp_path: Path) -> None:
        paths = [self._with_assets(run, model(tmp_path / f"m{i}", w=torch.tensor([1.0 + i, float("nan")]))) for i in range(2)]
        ckpt_cli.average(paths, tmp_path / "a", allow_non_finite=True)
        with pytest.raises(Warned, match="2 warnings"):
            ckpt_cli.average(paths, tmp_path / "b", allow_non_finite=True, strict=True)
        assert not (tmp_path / "b").exists()

    def test_warnings_that_verifying_finds_end_with_1(self, run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
        folder = self._with_assets(run, model(tmp_path / "model", **{"a.weight": torch.zeros(4, 4)}))
        assert call("verify", folder, "--full").code == 0
        outcome = call("verify", folder, "--full", "--strict", "--json")
        assert (outcome.code, [error["code"] for error in json.loads(outcome.out)["errors"]]) == (1, ["all-zero"])

    def test_what_was_strict_is_merged_again_as_it_was(self, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "a", strict=True)
        ckpt_cli.merge(run, tmp_path / "b")
        kept = [json.loads((tmp_path / name / "ckpt-manifest.json").read_text())["options"] for name in ("a", "b")]
        assert kept[0] == kept[1]
        assert "--strict" not in ckpt_cli.verify(tmp_path / "a").made_by

    @staticmethod
    def _with_assets(run: Path, folder: Path) -> Path:
        for name in ("tokenizer.json",):
            shutil.copy(run / "checkpoint-200" / name, folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "unknown-to-all"}))
        return folder


def test_verify_says_which_step_of_a_source_or_a_base_was_taken(lacking: Path, tmp_path: Path) -> None:
    """Relatives: a run as --against, and as --base."""
    ckpt_cli.merge(lacking, tmp_path / "out")
    for options in ({"against": lacking}, {"base": lacking}):
        result = ckpt_cli.verify(tmp_path / "out", **options)
        skipped = [note.text for note in result.notes]
        # The manifest names the step that was merged: nothing is skipped to find it.
        assert skipped == ([] if "against" in options else ["checkpoint-200 is skipped: rank 2 of 4 is missing"])


def test_detect_of_an_incomplete_checkpoint_has_its_error_in_errors(lacking: Path, call: Callable[..., Outcome]) -> None:
    outcome = call("detect", lacking / "checkpoint-200", "--json")
    document = json.loads(outcome.out)
    assert (outcome.code, document["exit_code"], document["status"]) == (4, 4, "error")
    (error,) = document["errors"]
    assert (error["code"], error["message"]) == ("missing-shard", "rank 2 of 4 is missing")
    assert error["expected"] == str(shard(lacking, 2))
    assert f"use {lacking / 'checkpoint-100'}, which is whole" in error["hint"]
    assert document["data"]["problem"] == error["message"]
    assert "error" not in document["data"]


# -- what cannot be looked at ----------------------------------------------------------------------------------------

NUMBERS = (errno.EACCES, errno.EIO, errno.ELOOP, errno.ESTALE, errno.EMFILE, errno.ENAMETOOLONG)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`refuse(path, number, "scandir")`: that call of the system fails for this path."""

    def broken(path: Path, number: int, *calls: str) -> None:
        for call in calls:
            real = getattr(os, call)

            def fails(what: Any = ".", *arguments: Any, real: Any = real, **options: Any) -> Any:
                if not isinstance(what, int) and os.path.abspath(what) == str(path):
                    raise OSError(number, os.strerror(number), str(what))
                return real(what, *arguments, **options)

            monkeypatch.setattr(os, call, fails)

    return broken


class TestWhatCannotBeLookedAt:
    @pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
    @pytest.mark.parametrize("command", COMMANDS)
    def test_a_newer_step_is_never_passed_over(
        self, run: Path, tmp_path: Path, call: Callable[..., Outcome], refuse: Callable[..., None], command: str, number: int
    ) -> None:
        shutil.copytree(run / "checkpoint-100", run / "checkpoint-50")
        refuse(run / "checkpoint-200", number, "scandir")
        outcome = call(*commands(run, tmp_path / "out")[command], "--json")
        (error,) = json.loads(outcome.out)["errors"]
        assert (outcome.code, error["code"], error["path"]) == (3, "unreadable", str(run / "checkpoint-200"))
        assert os.strerror(number) in error["message"]
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("step", [50, 100])
    def test_another_step_can_be_asked_for(self, run: Path, tmp_path: Path, refuse: Callable[..., None], step: int) -> None:
        shutil.copytree(run / "checkpoint-100", run / "checkpoint-50")
        refuse(run / "checkpoint-200", errno.EACCES, "scandir")
        with pytest.raises(Unreadable) as caught:
            ckpt_cli.merge(run, tmp_path / "out")
        assert str(caught.value.hint).endswith("pass --step 100, which is whole")
        assert ckpt_cli.merge(run, tmp_path / "out", step=step).checkpoint.step == step
        assert ckpt_cli.average(run, tmp_path / "mean", steps=(50, 100)).outputs[0].sources[0].step == 50
        with pytest.raises(Unreadable):
            ckpt_cli.average(run, tmp_path / "other", steps=(100, 200))

    def test_an_older_step_does_not_matter(self, run: Path, tmp_path: Path, refuse: Callable[..., None]) -> None:
        shutil.copytree(run / "checkpoint-100", run / "checkpoint-50")
        refuse(run / "checkpoint-50", errno.EACCES, "scandir")
        assert ckpt_cli.merge(run, tmp_path / "out").checkpoint.step == 200
        assert ckpt_cli.average(run, tmp_path / "mean", last=2).outputs[0].sources[0].step == 100
        (older,) = [step for step in ckpt_cli.detect(run).checkpoint.steps if step.step == 50]
        assert older.problem == "the folder cannot be listed: Permission denied"
        for options in ({"last": 3}, {"everything": True}, {"begin": 50}):
            with pytest.raises(Unreadable):
                ckpt_cli.average(run, tmp_path / "other", **options)

    def test_a_component_folder_of_the_newest_step(self, run: Path, tmp_path: Path, refuse: Callable[..., None]) -> None:
        refuse(run / "checkpoint-200" / "pytorch_model_fsdp_0", errno.EACCES, "scandir")
        with pytest.raises(Unreadable):
            ckpt_cli.merge(run, tmp_path / "out")

    def test_a_step_that_cannot_even_be_asked_about(self, run: Path, tmp_path: Path, refuse: Callable[..., None]) -> None:
        refuse(run / "checkpoint-200", errno.ESTALE, "stat", "scandir")
        with pytest.raises(Unreadable) as caught:
            ckpt_cli.merge(run, tmp_path / "out")
        assert caught.value.path == str(run / "checkpoint-200")

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "huggingface"])
    def test_a_side_file_is_not_left_out(self, run: Path, tmp_path: Path, refuse: Callable[..., None], name: str) -> None:
        (run / "checkpoint-200" / "huggingface").mkdir()
        refuse(run / "checkpoint-200" / name, errno.EIO, "stat", "scandir")
        with pytest.raises(Unreadable) as caught:
            ckpt_cli.merge(run, tmp_path / "out")
        assert caught.value.path == str(run / "checkpoint-200" / name)
        assert not (tmp_path / "out").exists()

    def test_a_shard_that_cannot_be_opened(self, run: Path, tmp_path: Path, refuse: Callable[..., None]) -> None:
        refuse(shard(run, 1), errno.EIO, "open")
        with pytest.raises(Unreadable):
            ckpt_cli.merge(run, tmp_path / "out")

    @pytest.mark.parametrize("type", [None, "ema"])
    def test_the_metadata_of_a_dcp_folder(self, data: Path, tmp_path: Path, refuse: Callable[..., None], type: str | None) -> None:
        """Relative: a component whose name only the content tells is not "no such component" then."""
        source = next(path.parent for path in sorted((data / "dcp").rglob(".metadata")))
        run = tmp_path / "run"
        for step in (1, 2):
            shutil.copytree(source, run / f"step_{step}")
        refuse(run / "step_2" / ".metadata", errno.EIO, "open")
        with pytest.raises(Unreadable) as caught:
            ckpt_cli.merge(run, tmp_path / "out", type=type)
        assert caught.value.path == str(run / "step_2" / ".metadata")

    def test_one_of_several_nodes(self, run: Path, tmp_path: Path, refuse: Callable[..., None]) -> None:
        nodes = tmp_path / "nodes"
        for node, ranks in (("a", (0, 1)), ("b", (2,)), ("c", (3,))):
            folder = nodes / node / "checkpoint-200" / "pytorch_model_fsdp_0"
            folder.mkdir(parents=True)
            for rank in ranks:
                shutil.copy(shard(run, rank), folder)
        assert ckpt_cli.merge(nodes, tmp_path / "out").checkpoint.step == 200
        refuse(nodes / "c", errno.EACCES, "scandir")
        with pytest.raises(Unreadable) as caught:
            ckpt_cli.merge(nodes, tmp_path / "other")
        assert caught.value.path == str(nodes / "c")

    def test_a_base(self, run: Path, tmp_path: Path, refuse: Callable[..., None]) -> None:
        base = model(tmp_path / "base")
        refuse(base, errno.EACCES, "stat", "scandir")
        with pytest.raises(Unreadable):
            ckpt_cli.merge(run, tmp_path / "out", base=base)

    def test_a_file_of_a_model_folder_that_is_verified(self, tmp_path: Path, refuse: Callable[..., None]) -> None:
        folder = model(tmp_path / "model")
        refuse(folder / "model.safetensors", errno.EACCES, "open")
        assert [item.code for item in ckpt_cli.verify(folder).of_severity("error")] == ["unreadable-file"]

    def test_an_output_that_is_there(self, run: Path, tmp_path: Path, refuse: Callable[..., None]) -> None:
        """Relative: an output folder that cannot be listed is not taken for an empty one."""
        (tmp_path / "out").mkdir()
        refuse(tmp_path / "out", errno.EACCES, "scandir")
        with pytest.raises(CkptError) as caught:
            ckpt_cli.merge(run, tmp_path / "out", overwrite=True)
        assert (caught.value.code, caught.value.exit_code) == ("not-writable", 5)

    def test_a_link_in_a_circle_that_nobody_needs_does_not_matter(self, run: Path, tmp_path: Path) -> None:
        (run / "wandb").symlink_to("wandb")
        (run / "checkpoint-200" / "logs").symlink_to("logs")
        ckpt_cli.merge(run, tmp_path / "out")

    def test_without_permission_in_truth(self, run: Path, tmp_path: Path) -> None:
        """As another user, whom no permission is given."""
        secret = run / "checkpoint-200"
        tmp_path.chmod(0o755)
        program = (
            "import os, sys, ckpt_cli\n"
            "from ckpt_cli.commands import merge as merging\n"
            "from ckpt_cli.errors import Unreadable\n"
            "os.chdir(sys.argv[1])\n"
            "merging.merge('run', dry_run=True)\n"
            "os.chmod('run/checkpoint-200', 0)\n"
            "if os.geteuid() == 0: os.setuid(65534)\n"
            "try: merging.merge('run', dry_run=True)\n"
            "except Unreadable as error: print(error.path, error.message)\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, env=environment)
        finally:
            secret.chmod(0o755)
        assert done.stdout == "run/checkpoint-200 the folder cannot be listed: Permission denied\n", done.stderr

    @pytest.mark.parametrize("call", ["stat", "scandir", "open"])
    def test_whichever_call_fails_nothing_else_is_written(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        """Every seventh look at the run fails, one per merge: the result is an error of ours, or what it is without."""
        ckpt_cli.merge(run, tmp_path / "right")
        right = (tmp_path / "right" / "model.safetensors").read_bytes()
        real = getattr(os, call)
        for place in range(0, 10_000, 7):
            looks: list[str] = []

            def fails(what: Any = ".", *arguments: Any, place: int = place, looks: list[str] = looks, **options: Any) -> Any:
                if str(what).startswith(str(run)):
                    looks.append(str(what))
                    if len(looks) == place + 1:
                        raise OSError(errno.EIO, os.strerror(errno.EIO), str(what))
                return real(what, *arguments, **options)

            monkeypatch.setattr(os, call, fails)
            out = tmp_path / f"out-{place}"
            told: CkptError | None = None
            try:
                ckpt_cli.merge(run, out)
            except CkptError as error:
                told = error
            if told is not None:
                assert told.code in ("unreadable", "not-writable"), (told, looks[-1])
                assert not out.exists()
            else:
                assert (out / "model.safetensors").read_bytes() == right
                assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (tmp_path / "right").iterdir())
            if len(looks) <= place:
                break

    @pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR])
    def test_only_what_is_not_there_is_absent(self, tmp_path: Path, refuse: Callable[..., None], number: int) -> None:
        (tmp_path / "folder").mkdir()
        refuse(tmp_path / "folder", number, "scandir", "stat")
        assert entries_in(tmp_path / "folder") == []
        assert not is_file(tmp_path / "folder")
        assert files_in(tmp_path) == []

    def test_a_source_that_cannot_be_asked_about_any_more_has_not_vanished(self, tmp_path: Path, refuse: Callable[..., None]) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"1")
        with Files() as files:
            source = files.source(path)
            refuse(path, errno.ESTALE, "stat")
            with pytest.raises(Unreadable):
                source.check_unchanged()


# -- Git LFS ---------------------------------------------------------------------------------------------------------


def lfs_places(data: Path, folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """(what, what is passed, the file that is a pointer)."""
    run = shutil.copytree(EXAMPLE, folder / "run")
    step = run / "checkpoint-200"
    yield "a rank file", run, shard(run, 1)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        yield name, run, step / name
    dcp = Path(shutil.copytree(next(path.parent for path in sorted((data / "dcp").rglob(".metadata"))), folder / "dcp"))
    yield ".metadata", dcp, dcp / ".metadata"
    yield ".distcp", dcp, next(dcp.glob("*.distcp"))
    single = model(folder / "single")
    yield "safetensors", single, single / "model.safetensors"
    torch_folder = folder / "torch"
    torch_folder.mkdir()
    torch.save({"w": torch.ones(2)}, torch_folder / "pytorch_model.bin")
    yield "torch.save", torch_folder, torch_folder / "pytorch_model.bin"
    indexed = folder / "indexed"
    indexed.mkdir()
    parts = {f"model-0000{i}-of-00002.safetensors": {f"w{i}": torch.ones(2)} for i in (1, 2)}
    for name, tensors in parts.items():
        save_file(tensors, indexed / name)
    index = indexed / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {key: name for name, held in parts.items() for key in held}}))
    yield "index.json", indexed, index
    yield "a part", indexed, indexed / "model-00002-of-00002.safetensors"


LFS = (
    "a rank file",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    ".metadata",
    ".distcp",
    "safetensors",
    "torch.save",
    "index.json",
    "a part",
)


def unfinished(path: Path, suffix: str = ".aria2") -> Path:
    """A file of full size with a hole, as a download that was interrupted leaves it, with what the tool keeps beside it."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size * 3 // 4)
        file.write(bytes(size // 8))
    control = Path(f"{path}{suffix}")
    control.write_bytes(b"\0\1\0\0\0\0\0\x14" + b"\7" * 60)
    return control


class TestUnfinishedDownloads:
    @pytest.mark.parametrize("what", LFS)
    def test_have_an_error_of_their_own_in_every_command(self, data: Path, tmp_path: Path, call: Callable[..., Outcome], what: str) -> None:
        (given, path) = next((given, path) for name, given, path in lfs_places(data, tmp_path) if name == what)
        # What is not damaged is refused too: nothing but the control file tells.
        path.touch()
        control = Path(f"{path}.aria2")
        control.write_bytes(b"\0\1" + b"\7" * 60)
        for command in ("detect", "inspect", "merge", "verify"):
            outcome = call(*commands(given, tmp_path / "out")[command], "--json")
            document = json.loads(outcome.out)
            found = [*document["errors"], *((document["data"] or {}).get("findings") or ())]
            assert "unfinished-download" in [item["code"] for item in found], (command, document)
            assert outcome.code == (1 if not document["errors"] else 3)
            for error in document["errors"]:
                assert (error["path"], f"delete {control}" in error["hint"]) == (str(path), True)
        assert not (tmp_path / "out").exists()
        control.unlink()
        assert call(*commands(given, tmp_path / "out")["merge"]).code == 0

    @pytest.mark.parametrize("suffix", [".aria2", ".st", ".lftp-pget-status"])
    def test_of_every_tool_that_fills_a_file_in_several_places(self, tmp_path: Path, suffix: str) -> None:
        folder = model(tmp_path / "model")
        control = unfinished(folder / "model.safetensors", suffix)
        with pytest.raises(UnfinishedDownload) as caught:
            ckpt_cli.merge(folder, tmp_path / "out")
        assert str(control) in str(caught.value.hint)
        with pytest.raises(UnfinishedDownload):
            ckpt_cli.average([folder, folder], tmp_path / "out", weights=[1, 1])

    def test_behind_a_link_and_of_a_whole_folder(self, tmp_path: Path) -> None:
        store, folder = model(tmp_path / "store"), tmp_path / "model"
        unfinished(store / "model.safetensors")
        folder.mkdir()
        (folder / "model.safetensors").symlink_to("../store/model.safetensors")
        with pytest.raises(UnfinishedDownload):
            ckpt_cli.merge(folder, tmp_path / "out")
        torrent = model(tmp_path / "torrent")
        (tmp_path / "torrent.aria2").write_bytes(b"\0\1")
        with pytest.raises(UnfinishedDownload):
            ckpt_cli.merge(torrent, tmp_path / "out")

    def test_of_a_base(self, run: Path, tmp_path: Path) -> None:
        base = ckpt_cli.merge(run, tmp_path / "base").outputs[0].output
        unfinished(Path(base) / "model.safetensors")
        with pytest.raises(UnfinishedDownload):
            ckpt_cli.merge(run, tmp_path / "out", base=base)

    def test_are_waited_for_by_a_watch(self, run: Path, tmp_path: Path) -> None:
        control = Path(f"{shard(run, 1)}.aria2")
        control.write_bytes(b"\0\1")
        watched = ckpt_cli.watch(run, tmp_path / "out", once=True, settle=0)
        assert {step: ".aria2" in why for waiting in watched.waiting.values() for step, why in waiting.items()} == {200: True}
        control.unlink()
        assert not ckpt_cli.watch(run, tmp_path / "out", once=True, settle=0).waiting
        assert (tmp_path / "out" / "step-200").is_dir()

    def test_are_no_doubt_where_a_tool_names_files_when_they_are_whole(self, tmp_path: Path) -> None:
        folder = model(tmp_path / "model")
        for suffix in (".part", ".crdownload", ".incomplete", ".partial", ".download", ".opdownload"):
            (folder / f"model.safetensors{suffix}").write_bytes(b"1")
        (folder / "model.safetensors.st").mkdir()
        made = ckpt_cli.merge(folder, tmp_path / "out").outputs[0]
        assert "model.safetensors.part" not in str(made.notes)
        assert not list((tmp_path / "out").glob("*.part"))


APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(4000)


class TestAppleDouble:
    """Attributes that macOS keeps beside files, on disks and in archives that have no room for them."""

    def beside_all(self, folder: Path, content: bytes = APPLE_DOUBLE) -> None:
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            path.with_name(f"._{path.name}").write_bytes(content)

    def test_is_passed_over(self, run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
        plain = ckpt_cli.merge(run, tmp_path / "plain").outputs[0]
        self.beside_all(run)
        made = ckpt_cli.merge(run, tmp_path / "out").outputs[0]
        assert (made.notes, made.assets) == (plain.notes, plain.assets)
        self.beside_all(tmp_path / "out")
        verified = call("verify", tmp_path / "out", "--json")
        assert (verified.code, {item["severity"] for item in json.loads(verified.out)["data"]["findings"]} <= {"info"}) == (0, True)

    def test_is_known_by_its_content(self, tmp_path: Path) -> None:
        folder = model(tmp_path / "model")
        self.beside_all(folder, b"not what macOS writes")
        assert "damaged-file" in [item.code for item in ckpt_cli.verify(folder).findings]

    def test_is_scanned_all_the_same(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        torch.save({"w": torch.ones(2)}, folder / "w.pt")
        (folder / "._w.pt").write_bytes(APPLE_DOUBLE + (folder / "w.pt").read_bytes())
        assert ckpt_cli.scan(folder).files == 2


class TestGitLfs:
    @pytest.mark.parametrize("what", LFS)
    def test_a_pointer_has_an_error_of_its_own_in_every_command(
        self, data: Path, tmp_path: Path, call: Callable[..., Outcome], what: str
    ) -> None:
        (given, pointer) = next((given, pointer) for name, given, pointer in lfs_places(data, tmp_path) if name == what)
        pointer.write_bytes(POINTER)
        for command in ("detect", "inspect", "merge", "verify"):
            outcome = call(*commands(given, tmp_path / "out")[command], "--json")
            document = json.loads(outcome.out)
            found = [*document["errors"], *((document["data"] or {}).get("findings") or ())]
            assert "lfs-pointer" in [item["code"] for item in found], (command, document)
            assert outcome.code == (1 if not document["errors"] else 3)
            for error in document["errors"]:
                assert (error["path"], "git lfs pull" in error["hint"]) == (str(pointer), True)
        assert not (tmp_path / "out").exists()

    def test_of_a_newer_step_is_not_passed_over(self, run: Path, tmp_path: Path) -> None:
        shard(run, 0).write_bytes(POINTER)
        with pytest.raises(LfsPointer):
            ckpt_cli.merge(run, tmp_path / "out")
        with pytest.raises(LfsPointer):
            ckpt_cli.average(run, tmp_path / "out", everything=True)

    @pytest.mark.parametrize(
        "name", ["scheduler.pt", "rng_state_0.pth", "trainer_state.json", "data.pt", "optimizer/optimizer_world_size_4_rank_1.pt"]
    )
    def test_state_files(self, run: Path, tmp_path: Path, name: str) -> None:
        step = run / "checkpoint-200"
        torch.save({"cpu": torch.zeros(3, dtype=torch.uint8)}, step / "rng_state_0.pth")
        (step / name).write_bytes(POINTER)
        with pytest.raises(LfsPointer) as caught:
            ckpt_cli.extract_state(run, tmp_path / "out", optimizer="optimizer" in name)
        assert caught.value.path == str(step / name)
        assert not (tmp_path / "out").exists()

    def test_key_maps_and_bases(self, run: Path, tmp_path: Path) -> None:
        (tmp_path / "map.json").write_bytes(POINTER)
        with pytest.raises(LfsPointer):
            ckpt_cli.merge(run, tmp_path / "out", key_map=tmp_path / "map.json")
        base = model(tmp_path / "base")
        (base / "added_tokens.json").write_bytes(POINTER)
        with pytest.raises(LfsPointer) as caught:
            ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert caught.value.path == str(base / "added_tokens.json")

    def test_a_file_that_only_begins_like_one_is_no_pointer(self, tmp_path: Path) -> None:
        path = tmp_path / "notes.txt"
        path.write_bytes(POINTER + b"x" * 2000)
        assert read_small(path).startswith(POINTER)
        path.write_bytes(b"version https://example.org\n" * 5)
        assert read_small(path)


# -- side files ------------------------------------------------------------------------------------------------------

BAD = {
    "empty": b"",
    "cut off": b'{"model_type": "llama", ',
    "no UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "zeros": bytes(64),
    "no object": b"[1, 2]",
    "null": b"null",
    "text": b'"x"',
    "number": b"1e999",
    "nested": b"[" * 100_000,
    "digits": b'{"a": ' + b"9" * 10_000 + b"}",
    "surrogate": b'{"a": "\\ud800"}',
    "page": b"<!DOCTYPE html><html></html>",
}


class TestSideFiles:
    @pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
    @pytest.mark.parametrize(
        "name",
        [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "adapter_config.json",
            "lora_train_meta.json",
            "trainer_state.json",
            "metadata.json",
            "ckpt-manifest.json",
            "latest_checkpointed_iteration.txt",
        ],
    )
    def test_whatever_is_in_them_the_errors_are_ours(self, run: Path, tmp_path: Path, name: str, content: bytes) -> None:
        for folder in (run, run / "checkpoint-200"):
            (folder / name).write_bytes(content)
        out = tmp_path / "out"
        with suppress(CkptError):
            ckpt_cli.detect(run)
        with suppress(CkptError):
            ckpt_cli.merge(run, out)
        with suppress(CkptError):
            ckpt_cli.extract_state(run, tmp_path / "state")
        folder = model(tmp_path / "model")
        for place in (folder, *([out] if out.exists() else [])):
            (place / name).write_bytes(content)
            with suppress(CkptError):
                ckpt_cli.verify(place)
            with suppress(CkptError):
                ckpt_cli.merge(place, tmp_path / f"again-{place.name}")

    @pytest.mark.parametrize("kind", ["empty", "cut off", "no UTF-8", "no object"])
    def test_a_config_that_cannot_be_read_is_told_with_its_path(self, run: Path, tmp_path: Path, kind: str) -> None:
        (run / "checkpoint-200" / "config.json").write_bytes(BAD[kind])
        with pytest.raises(CorruptFile) as caught:
            ckpt_cli.merge(run / "checkpoint-200", tmp_path / "out")
        assert caught.value.path == str(run / "checkpoint-200" / "config.json")

    @pytest.mark.parametrize("kind", ["empty", "cut off", "no UTF-8"])
    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "preprocessor_config.json"])
    def test_verify_finds_what_a_loader_would_stumble_over(self, tmp_path: Path, kind: str, name: str) -> None:
        folder = model(tmp_path / "model")
        (folder / name).write_bytes(BAD[kind])
        assert [(item.code, item.file) for item in ckpt_cli.verify(folder).of_severity("error")] == [("damaged-side-file", name)]

    @pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
    def test_indexes_and_key_maps(self, run: Path, tmp_path: Path, content: bytes) -> None:
        folder = model(tmp_path / "model")
        (folder / "model.safetensors.index.json").write_bytes(content)
        with pytest.raises(CkptError):
            ckpt_cli.merge(folder, tmp_path / "out")
        ckpt_cli.verify(folder)
        for suffix in (".json", ".toml"):
            (tmp_path / f"map{suffix}").write_bytes(content)
            with suppress(CkptError):
                ckpt_cli.merge(run, tmp_path / "out", key_map=tmp_path / f"map{suffix}", dry_run=True)

    def test_a_read_that_returns_nothing_is_an_error_of_ours(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A network file system may give no bytes of a file that has some."""
        path = run / "checkpoint-200" / "config.json"
        real = os.fdopen

        def emptied(fd: int, *arguments: Any, **options: Any) -> Any:
            if os.path.realpath(f"/proc/self/fd/{fd}") == str(path):
                os.lseek(fd, 0, os.SEEK_END)
            return real(fd, *arguments, **options)

        monkeypatch.setattr(os, "fdopen", emptied)
        size = path.stat().st_size
        with pytest.raises(SourceChanged) as caught:
            ckpt_cli.merge(run / "checkpoint-200", tmp_path / "out")
        assert (caught.value.path, caught.value.message) == (str(path), f"0 bytes were read of a file that had {size}")

    def test_a_config_that_is_emptied_between_two_readings(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from ckpt_cli.hub import config_text

        path, seen = run / "checkpoint-200" / "config.json", []
        real = config_text.read_small

        def once(file: Path, *arguments: Any) -> bytes:
            seen.append(file)
            return real(file, *arguments) if seen.count(path) < 2 else b""

        monkeypatch.setattr(config_text, "read_small", once)
        with pytest.raises(CorruptFile) as caught:
            ckpt_cli.merge(run / "checkpoint-200", tmp_path / "out", dtype="fp16")
        assert caught.value.path == str(path)

    def test_a_missing_side_file_is_absent_and_no_error(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            read_small(tmp_path / "none.json")


@pytest.mark.parametrize("command", ["detect", "inspect", "merge", "verify", "extract-state"])
def test_a_dcp_folder_without_its_metadata_is_incomplete_for_every_command(
    data: Path, tmp_path: Path, call: Callable[..., Outcome], command: str
) -> None:
    folder = Path(shutil.copytree(next(path.parent for path in sorted((data / "dcp").rglob(".metadata"))), tmp_path / "dcp"))
    (folder / ".metadata").unlink()
    outcome = call(*commands(folder, tmp_path / "out")[command], *(["--optimizer"] if command == "extract-state" else []), "--json")
    document = json.loads(outcome.out)
    assert (outcome.code, [error["code"] for error in document["errors"]]) == (4, ["missing-shard"])


def test_an_error_after_a_step_was_skipped_says_that_too(lacking: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        ckpt_cli.extract_state(lacking, tmp_path / "out")
    assert caught.value.path == str(lacking / "checkpoint-100")
    assert caught.value.details == ("checkpoint-200 is skipped: rank 2 of 4 is missing",)


class TestStepsWithoutWeights:
    """They are named by every command that passes them over, and are not "no step" where they were asked for."""

    NOTE = "warning: checkpoint-300 is skipped: no weights were recognised in it"

    @pytest.mark.parametrize("command", COMMANDS)
    def test_are_named(self, run: Path, tmp_path: Path, call: Callable[..., Outcome], command: str) -> None:
        (run / "checkpoint-300").mkdir()
        (run / "checkpoint-50").mkdir()
        outcome = call(*commands(run, tmp_path / "out")[command], "-q")
        assert outcome.code == 0
        assert self.NOTE in outcome.err.splitlines()
        assert outcome.err.count("checkpoint-50 is skipped") == (1 if command == "average" else 0)

    def test_of_the_last_ones_older_steps_do_not_matter(self, run: Path, tmp_path: Path, call: Callable[..., Outcome]) -> None:
        (run / "checkpoint-300").mkdir()
        (run / "checkpoint-50").mkdir()
        assert call("average", run, "--last", "2", "-o", tmp_path / "out", "-q").err == f"{self.NOTE}\n"

    def test_that_were_asked_for_are_there(self, run: Path, tmp_path: Path) -> None:
        (run / "checkpoint-300").mkdir()
        for fails in (
            lambda: ckpt_cli.merge(run, tmp_path / "out", step=300),
            lambda: ckpt_cli.average(run, tmp_path / "out", steps=(100, 300)),
        ):
            with pytest.raises(NotFound, match="no weights were recognised in this step folder") as caught:
                fails()
            assert caught.value.path == str(run / "checkpoint-300")
