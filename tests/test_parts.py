"""Parts of one plan, written by processes that know nothing of each other, make the output that one process makes, or none."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_cli.errors import CorruptFile, Inconsistent, MissingParts, NoSpace, NotFound, OutputExists, Unreadable, UsageError
from ckpt_cli.files.source import Files
from ckpt_cli.launchers import launcher_of
from ckpt_cli.output import manifest, parts
from ckpt_cli.output.part import Part
from ckpt_cli.output.parts import Published, publish_parts, write_part
from ckpt_cli.output.parts_folder import MARK, PartsFolder
from ckpt_cli.output.plan import Plan, make_plan, work_of
from ckpt_cli.output.publish import Order, OutputFolder, publish
from ckpt_cli.output.share import share_of
from ckpt_cli.output.writer import Written
from tests.cli import ROOT
from tests.test_execute import Sources, sources  # noqa: F401 - a fixture

SIDE: dict[str, bytes | Path] = {"config.json": b"{}"}
OPTIONS = {"dtype": "keep"}


@pytest.fixture
def plan(sources: Sources) -> Plan:  # noqa: F811
    return make_plan(sources.tensors, max_shard_size=300_000)


def built(plan: Plan, written: Written) -> bytes:
    return manifest.build("merge", plan, written, options=OPTIONS, side_files=SIDE, facts={})


def at_once(plan: Plan, target: Path) -> dict[str, bytes]:
    """What one process writes."""
    publish([Order(plan, SIDE, OutputFolder(target), lambda written: built(plan, written))])
    return contents(target)


def published(target: Path, *, overwrite: bool = False) -> Published:
    return publish_parts([target], overwrite=overwrite)[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def run_part(plan: Plan, text: str, target: Path) -> list[int]:
    _, done = write_part(plan, Part.of(text), target, SIDE, lambda written: built(plan, written))
    return done


class TestWhatAPartIs:
    @pytest.mark.parametrize("count", [1, 2, 3, 7, 50, 10_000])
    def test_every_piece_of_work_and_every_header_belongs_to_one_part(self, plan: Plan, count: int) -> None:
        shares = [share_of(plan, Part(number, count)) for number in range(count)]
        work = [(portion.file.name, each.target_offset) for share in shares for portion in share.files for each in portion.work]
        assert sorted(work) == sorted((file.name, each.target_offset) for file in plan.files for each in work_of(file))
        headers = [portion.file.name for share in shares for portion in share.files if portion.with_header]
        assert sorted(headers) == sorted(file.name for file in plan.files)
        assert sum(share.nbytes for share in shares) == plan.bytes_read
        wrote = {file.name: sum(share.wrote.get(file.name, 0) for share in shares) for file in plan.files}
        assert wrote == {file.name: file.size for file in plan.files}

    def test_work_that_begins_where_a_part_begins_belongs_to_that_part(self, tmp_path: Path) -> None:
        """As many parts as bytes, so that every piece of work begins with a part."""
        with Files() as files:
            made = Sources(tmp_path, files)
            for i in range(3):
                made.add(f"w{i}", torch.full((2 + i, 5), float(i)))
            small = make_plan(made.tensors)
            size = sum(file.size for file in small.files)
            shares = [share_of(small, Part(number, size)) for number in range(size)]
        work = [each.target_offset for share in shares for portion in share.files for each in portion.work]
        assert work == [each.target_offset for file in small.files for each in work_of(file)]
        assert sum(sum(share.wrote.values()) for share in shares) == size

    def test_parts_are_of_one_size_as_far_as_work_allows(self, plan: Plan) -> None:
        sizes = [share_of(plan, Part(number, 4)).nbytes for number in range(4)]
        assert max(sizes) < 1.5 * min(sizes)

    @pytest.mark.parametrize("count", [1, 2, 3, 7, 50, 10_000])
    def test_whole_files_are_not_cut(self, plan: Plan, count: int) -> None:
        shares = [share_of(plan, Part(number, count, whole_files=True)) for number in range(count)]
        wrote = [name for share in shares for name in share.wrote]
        assert wrote == [file.name for file in plan.files]
        assert {name: size for share in shares for name, size in share.wrote.items()} == {file.name: file.size for file in plan.files}
        assert len(plan.files) > 2
        most = max(len(share.files) for share in shares)
        assert most == -(-len(plan.files) // count)

    def test_only_the_files_that_a_part_reads_are_watched(self, plan: Plan) -> None:
        watched = [{source.path for source in share_of(plan, Part(number, 10)).sources} for number in range(10)]
        assert set.union(*watched) == {source.path for source in plan.sources}
        assert any(each != watched[0] for each in watched)

    @pytest.mark.parametrize(
        "text", ["", "1", "8/8", "-1/8", "1/0", "0/0", "a/b", "1/8/2", "01/+8", "٣/8", "1/9999999", " 1/8", "1/8:file", "1/8:files:files"]
    )
    def test_what_is_no_part(self, text: str) -> None:
        with pytest.raises(UsageError, match="is no part"):
            Part.of(text)


BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
"""What every process of a batch script of Slurm inherits, without srun."""
STEP = {**BATCH, "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
TORCH = {"RANK": "5", "WORLD_SIZE": "8"}


class TestWhatALauncherSays:
    @pytest.mark.parametrize(
        ("environment", "part"),
        [
            ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, "3/8"),
            ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "0/4"),
            ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "1/2"),
            ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "1/2"),
            ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "1/2"),
            ({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "1/2"),
            ({**BATCH, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, "3/4"),
            ({**BATCH, "PMI_RANK": "3", "PMI_SIZE": "4"}, "3/4"),
            ({**BATCH, "RANK": "3", "WORLD_SIZE": "4"}, "3/4"),
        ],
    )
    def test_is_the_part_of_the_process(self, environment: dict[str, str], part: str) -> None:
        assert str(Part.of_environment(environment)) == part

    @pytest.mark.parametrize("environment", [{}, {"RANK": "1"}, {"WORLD_SIZE": "8"}, {"SLURM_NTASKS": "8"}, BATCH])
    def test_without_one_there_is_no_part(self, environment: dict[str, str]) -> None:
        with pytest.raises(UsageError, match="no launcher says") as caught:
            Part.of_environment(environment)
        assert "--part K/N" in str(caught.value.advice)

    @pytest.mark.parametrize(
        "environment", [{"RANK": "8", "WORLD_SIZE": "8"}, {"RANK": "x", "WORLD_SIZE": "8"}, {"RANK": "", "WORLD_SIZE": ""}]
    )
    def test_that_is_no_part_is_refused(self, environment: dict[str, str]) -> None:
        with pytest.raises(UsageError, match="RANK is"):
            Part.of_environment(environment)

    @pytest.mark.parametrize(
        ("own", "above", "part"),
        [
            pytest.param({**STEP, **MPI}, [{**STEP, **MPI}, STEP, {}], "3/4", id="the daemon of mpirun on another node, through a shell"),
            pytest.param({**STEP, **TORCH}, [STEP], "5/8", id="torchrun in each task of srun"),
            pytest.param({**STEP, **TORCH}, [{**STEP, "RANK": "0", "WORLD_SIZE": "2"}], "5/8", id="torchrun, given its node as RANK"),
            pytest.param({**STEP, **MPI}, [MPI], "1/2", id="srun in a process of mpirun"),
            pytest.param({**STEP, **MPI, **TORCH}, [{**STEP, **MPI}], "5/8", id="the nearest of three"),
            pytest.param({**STEP, "SLURM_STEP_NUM_TASKS": "1", **MPI}, [], "3/4", id="a step of one task"),
        ],
    )
    def test_the_nearest_counts(self, own: dict[str, str], above: list[dict[str, str]], part: str) -> None:
        assert str(Part.of_environment(own, above)) == part

    @pytest.mark.parametrize("above", [[], [{}], [{**STEP, **MPI}, {}]])
    def test_contradictions_are_refused(self, above: list[dict[str, str]]) -> None:
        with pytest.raises(UsageError, match="contradict") as caught:
            Part.of_environment({**STEP, **MPI}, above)
        assert "--part K/N" in str(caught.value.advice)

    def test_ranks_of_mpirun_have_one_run_on_all_nodes(self) -> None:
        """On another node they are within a step of srun."""
        here, there = ({**each, **MPI, "PMIX_NAMESPACE": "prterun-7@1"} for each in (BATCH, STEP))
        runs = [launcher.run_of(each) for each in (here, there) if (launcher := launcher_of(each, [BATCH if each is here else STEP]))]
        assert runs == ["prterun-7@1/7"] * 2

    @pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="only Linux tells")
    def test_processes_above_are_known(self) -> None:
        """From a process of its own, since those above pytest are not known: they may be of another user."""
        program = "from ckpt_cli.launchers import environments_above as above; print([each.get('NEAR') for each in above()][:2])"
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}], env={{'PYTHONPATH': {str(ROOT)!r}}})"
        done = subprocess.run([sys.executable, "-c", code], env={"NEAR": "=1"}, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("['=1'")


class TestTheOutput:
    @pytest.mark.parametrize("count", [1, 2, 5, 23])
    def test_is_what_one_process_writes(self, plan: Plan, tmp_path: Path, count: int) -> None:
        expected = at_once(plan, tmp_path / "one")
        order = list(range(count))
        random.Random(count).shuffle(order)
        for number in order:
            run_part(plan, f"{number}/{count}", tmp_path / "parts")
        done = published(tmp_path / "parts")
        assert contents(tmp_path / "parts") == expected
        assert (done.parts, done.files) == (count, {file.name: file.size for file in plan.files})
        assert [path.name for path in tmp_path.iterdir() if MARK in path.name] == []

    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    def test_casts(self, sources: Sources, tmp_path: Path, dtype: str) -> None:  # noqa: F811
        plan = make_plan(sources.tensors, dtype=dtype)
        expected = at_once(plan, tmp_path / "one")
        for number in (2, 0, 1):
            run_part(plan, f"{number}/3", tmp_path / "parts")
        published(tmp_path / "parts")
        assert contents(tmp_path / "parts") == expected

    @pytest.mark.parametrize("count", [1, 2, 23])
    def test_by_whole_files(self, plan: Plan, tmp_path: Path, count: int) -> None:
        expected = at_once(plan, tmp_path / "one")
        for number in reversed(range(count)):
            run_part(plan, f"{number}/{count}:files", tmp_path / "parts")
        published(tmp_path / "parts")
        assert contents(tmp_path / "parts") == expected

    def test_by_whole_files_and_not(self, plan: Plan, tmp_path: Path) -> None:
        run_part(plan, "0/2:files", tmp_path / "parts")
        run_part(plan, "1/2", tmp_path / "parts")
        with pytest.raises(Inconsistent, match="cut in several ways"):
            published(tmp_path / "parts")

    def test_parts_may_run_twice(self, plan: Plan, tmp_path: Path) -> None:
        expected = at_once(plan, tmp_path / "one")
        for number in (1, 0, 1, 2, 0, 2):
            run_part(plan, f"{number}/3", tmp_path / "parts")
        published(tmp_path / "parts")
        assert contents(tmp_path / "parts") == expected

    def test_a_part_that_was_killed_is_run_again(self, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = at_once(plan, tmp_path / "one")
        run_part(plan, "0/2", tmp_path / "parts")
        with monkeypatch.context() as patch:
            patch.setattr("ckpt_cli.output.writer.zlib.crc32", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run_part(plan, "1/2", tmp_path / "parts")
        with pytest.raises(MissingParts, match="1 of 2 parts are not written yet: 1"):
            published(tmp_path / "parts")
        assert run_part(plan, "1/2", tmp_path / "parts") == [0, 1]
        published(tmp_path / "parts")
        assert contents(tmp_path / "parts") == expected

    def test_publishing_again_is_no_error(self, plan: Plan, tmp_path: Path) -> None:
        run_part(plan, "0/1", tmp_path / "parts")
        first, second = published(tmp_path / "parts"), published(tmp_path / "parts")
        assert (first.folder, first.files) == (second.folder, second.files)

    def test_several_processes_may_publish_at_the_same_time(self, plan: Plan, tmp_path: Path) -> None:
        expected = at_once(plan, tmp_path / "one")
        for number in range(4):
            run_part(plan, f"{number}/4", tmp_path / "parts")
        program = (
            "import sys; from pathlib import Path; from ckpt_cli.output.parts import publish_parts; publish_parts([Path(sys.argv[1])])"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "parts")]
        processes = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) for _ in range(4)]
        assert [process.wait() for process in processes] == [0] * 4
        assert contents(tmp_path / "parts") == expected

    @pytest.mark.parametrize("how", ["nothing removed", "half removed"])
    def test_a_publisher_that_was_killed_right_after_renaming(
        self,
        plan: Plan,
        sources: Sources,  # noqa: F811
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        how: str,
    ) -> None:
        """What stays behind is the older output; it must never get the name back."""
        at_once(make_plan(sources.tensors, max_shard_size=299_000), tmp_path / "out")
        expected = at_once(plan, tmp_path / "one")
        for number in range(2):
            run_part(plan, f"{number}/2", tmp_path / "out")
        shared = PartsFolder(tmp_path / "out", plan.digest)
        with monkeypatch.context() as patch:
            patch.setattr(PartsFolder, "remove", lambda _: None)
            published(tmp_path / "out", overwrite=True)
        assert shared.output.is_dir()
        if how == "half removed":
            shared.record(Part(1, 2)).unlink()
        again = published(tmp_path / "out", overwrite=True)
        assert again.tensors == len(plan.tensors)
        assert contents(tmp_path / "out") == expected
        assert not shared.root.exists()

    def test_a_publisher_that_was_killed_while_it_removed_what_stays_behind(
        self, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_part(plan, "0/1", tmp_path / "out")
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            published(tmp_path / "out")
        assert any(".ckpt-tmp-" in path.name for path in tmp_path.iterdir())
        assert published(tmp_path / "out").tensors == len(plan.tensors)
        assert not any(".ckpt-" in path.name for path in tmp_path.iterdir())

    def test_a_disk_that_cannot_be_read_is_not_another_file(self, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(_: Path) -> int:
            raise Unreadable("Input/output error")

        run_part(plan, "0/1", tmp_path / "out")
        with monkeypatch.context() as patch:
            patch.setattr(parts, "size_of", broken)
            with pytest.raises(Unreadable):
                published(tmp_path / "out")
        published(tmp_path / "out")

    def test_a_publisher_that_was_killed_and_an_output_that_was_removed(
        self,
        plan: Plan,
        sources: Sources,  # noqa: F811
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The older output lies where the parts wrote: it must not be taken for theirs."""
        at_once(make_plan(sources.tensors, max_shard_size=299_000), tmp_path / "out")
        run_part(plan, "0/1", tmp_path / "out")
        with monkeypatch.context() as patch:
            patch.setattr(PartsFolder, "remove", lambda _: None)
            published(tmp_path / "out", overwrite=True)
        shutil.rmtree(tmp_path / "out")
        with pytest.raises(Inconsistent, match="published before") as caught:
            published(tmp_path / "out")
        root = PartsFolder(tmp_path / "out", plan.digest).root
        assert str(root) in str(caught.value.advice)
        shutil.rmtree(root)
        run_part(plan, "0/1", tmp_path / "out")
        published(tmp_path / "out")
        assert contents(tmp_path / "out") == at_once(plan, tmp_path / "one")

    def test_a_publisher_that_was_killed_right_before_renaming(self, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = at_once(plan, tmp_path / "one")
        run_part(plan, "0/1", tmp_path / "out")
        with monkeypatch.context() as patch:
            patch.setattr("ckpt_cli.output.staging.Staging.publish", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                published(tmp_path / "out")
        assert not (tmp_path / "out").exists()
        published(tmp_path / "out")
        assert contents(tmp_path / "out") == expected

    def test_several_outputs_appear_together_or_not_at_all(self, plan: Plan, sources: Sources, tmp_path: Path) -> None:  # noqa: F811
        other = make_plan(sources.tensors, dtype="bf16")
        for number in range(2):
            run_part(plan, f"{number}/2", tmp_path / "a")
        run_part(other, "0/2", tmp_path / "b")
        with pytest.raises(MissingParts):
            publish_parts([tmp_path / "a", tmp_path / "b"])
        assert not (tmp_path / "a").exists()
        run_part(other, "1/2", tmp_path / "b")
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "mine.txt").write_text("mine")
        with pytest.raises(OutputExists):
            publish_parts([tmp_path / "a", tmp_path / "b"])
        assert not (tmp_path / "a").exists()
        (tmp_path / "b" / "mine.txt").unlink()
        assert [each.folder.name for each in publish_parts([tmp_path / "a", tmp_path / "b"])] == ["a", "b"]
        assert contents(tmp_path / "a") == at_once(plan, tmp_path / "one")
        assert contents(tmp_path / "b") == at_once(other, tmp_path / "two")

    def test_an_older_output_is_replaced_only_if_that_was_asked_for(self, plan: Plan, tmp_path: Path) -> None:
        before = at_once(plan, tmp_path / "out")
        run_part(plan, "0/1", tmp_path / "out")
        with pytest.raises(OutputExists):
            published(tmp_path / "out")
        assert contents(tmp_path / "out") == before
        published(tmp_path / "out", overwrite=True)
        assert contents(tmp_path / "out") == before
        assert [path.name for path in tmp_path.iterdir()] == ["sources", "out"] or len(list(tmp_path.iterdir())) == 2


class TestNothingIsPublished:
    """Whatever lacks or does not fit: the parts stay as they are, and the error says what to do."""

    @pytest.fixture
    def shared(self, plan: Plan, tmp_path: Path) -> Iterator[PartsFolder]:
        for number in range(3):
            run_part(plan, f"{number}/3", tmp_path / "out")
        folder = PartsFolder(tmp_path / "out", plan.digest)
        yield folder
        assert folder.root.is_dir()
        assert not (tmp_path / "out").exists()

    def test_without_any_part(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="no part of this output was written"):
            published(tmp_path / "out")
        with pytest.raises(NotFound):
            published(tmp_path / "no" / "such" / "folder")

    def test_while_parts_are_missing(self, shared: PartsFolder) -> None:
        shared.record(Part(1, 3)).unlink()
        with pytest.raises(MissingParts, match="1 of 3 parts are not written yet: 1") as caught:
            published(shared.target)
        assert caught.value.exit_code == 4

    def test_before_any_part_is_done(self, shared: PartsFolder) -> None:
        for number in range(3):
            shared.record(Part(number, 3)).unlink()
        with pytest.raises(MissingParts, match="no part is written yet"):
            published(shared.target)

    def test_with_parts_of_two_divisions(self, shared: PartsFolder, plan: Plan) -> None:
        run_part(plan, "0/2", shared.target)
        with pytest.raises(Inconsistent, match="cut into 2 and into 3 parts"):
            published(shared.target)

    def test_with_parts_of_two_plans(self, shared: PartsFolder, sources: Sources) -> None:  # noqa: F811
        run_part(make_plan(sources.tensors, dtype="bf16"), "0/3", shared.target)
        with pytest.raises(Inconsistent, match="2 different plans") as caught:
            published(shared.target)
        assert len(caught.value.details) == 2

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"schema_version": 99}', b"null", b"\xff", b"[" * 100_000])
    def test_with_a_damaged_record(self, shared: PartsFolder, content: bytes) -> None:
        shared.record(Part(1, 3)).write_bytes(content)
        with pytest.raises(CorruptFile):
            published(shared.target)

    def test_with_a_record_of_another_plan(self, shared: PartsFolder) -> None:
        path = shared.record(Part(1, 3))
        path.write_text(json.dumps({**json.loads(path.read_text()), "plan_digest": "0" * 64}))
        with pytest.raises(Inconsistent, match="another plan"):
            published(shared.target)

    def test_with_the_record_of_one_part_under_the_name_of_another(self, shared: PartsFolder) -> None:
        shared.record(Part(2, 3)).write_bytes(shared.record(Part(1, 3)).read_bytes())
        with pytest.raises(Inconsistent, match="name of this record"):
            published(shared.target)

    @pytest.mark.parametrize(
        "change",
        [
            {"tiles": 5},
            {"tiles": {"model.safetensors": {"w": [[1, 2]]}}},
            {"part": "x"},
            {"parts": 0},
            {"parts": 10**12},
            {"whole": None},
            {"whole": {"manifest": {}, "headers": {}, "overwrite": False, "tensors": 1}},
            {"whole": {"manifest": {"checksums": []}, "headers": {}, "overwrite": False, "tensors": 1}},
            {"more": 1},
        ],
    )
    def test_with_a_record_of_another_form(self, shared: PartsFolder, change: dict[str, object]) -> None:
        path = shared.record(Part(0, 3))
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        with pytest.raises((CorruptFile, Inconsistent)) as caught:
            published(shared.target)
        assert caught.value.advice

    def test_with_parts_of_two_versions(self, shared: PartsFolder) -> None:
        """Which may cut an output in other places, so that the parts leave holes."""
        path = shared.record(Part(1, 3))
        path.write_text(json.dumps({**json.loads(path.read_text()), "cutting": "0.0.1/1/1/1"}))
        with pytest.raises(Inconsistent, match="several versions"):
            published(shared.target)

    def test_with_parts_that_wrote_less_than_the_files_have(self, shared: PartsFolder) -> None:
        path = shared.record(Part(1, 3))
        record = json.loads(path.read_text())
        name = next(iter(record["wrote"]))
        record["wrote"][name] -= 1
        path.write_text(json.dumps(record))
        with pytest.raises(Inconsistent, match="the parts wrote"):
            published(shared.target)

    def test_with_a_file_that_was_cut(self, shared: PartsFolder) -> None:
        path = next(iter(sorted(shared.output.glob("*.safetensors"))))
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(Inconsistent, match="not what the parts wrote"):
            published(shared.target)

    def test_with_a_file_that_is_gone(self, shared: PartsFolder) -> None:
        next(iter(sorted(shared.output.glob("*.safetensors")))).unlink()
        with pytest.raises(Inconsistent, match="not what the parts wrote"):
            published(shared.target)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
    @pytest.mark.parametrize("content", [None, b"", b"{ }"])
    def test_with_a_side_file_that_changed(self, shared: PartsFolder, name: str, content: bytes | None) -> None:
        (shared.output / name).unlink()
        if content is not None:
            (shared.output / name).write_bytes(content)
        with pytest.raises(Inconsistent, match="not what part 0 wrote"):
            published(shared.target)

    def test_with_a_header_of_zeros(self, shared: PartsFolder) -> None:
        """As on a machine that does not see what another one wrote."""
        path = next(iter(sorted(shared.output.glob("*.safetensors"))))
        path.write_bytes(bytes(64) + path.read_bytes()[64:])
        with pytest.raises(Inconsistent, match="not what the parts wrote"):
            published(shared.target)

    def test_onto_something_that_appeared(self, shared: PartsFolder) -> None:
        shared.target.mkdir()
        (shared.target / "mine.txt").write_text("mine")
        with pytest.raises(OutputExists):
            published(shared.target)
        (shared.target / "mine.txt").unlink()
        shared.target.rmdir()


class TestDisksThatAreNotShared:
    """Each part writes a file of the full size, which holds only its own bytes."""

    @pytest.mark.parametrize("kept", [0, 1, 2])
    def test_joined_folders_are_refused(self, plan: Plan, tmp_path: Path, kept: int) -> None:
        """The file of one part stays where all records are copied into one folder."""
        for number in range(3):
            (tmp_path / str(number)).mkdir()
            run_part(plan, f"{number}/3", tmp_path / "out")
            shutil.move(PartsFolder(tmp_path / "out", plan.digest).root, tmp_path / str(number) / "parts")
        joined = PartsFolder(tmp_path / "out", plan.digest).root
        for number in (kept, *(other for other in range(3) if other != kept)):
            for path in sorted((tmp_path / str(number) / "parts").rglob("*")):
                copy = joined / path.relative_to(tmp_path / str(number) / "parts")
                if path.is_file() and not copy.exists():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, copy)
        with pytest.raises(Inconsistent, match=r"not what the parts wrote|does not hold what part [0-2] wrote"):
            published(tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("dtype", ["keep", "bf16"])
    def test_samples_are_what_the_output_holds(self, sources: Sources, tmp_path: Path, dtype: str) -> None:  # noqa: F811
        """Also of work whose tiles are cast, views and transposed: its bytes lie in a row."""
        whole = make_plan(sources.tensors, dtype=dtype, max_shard_size=300_000)
        expected = at_once(whole, tmp_path / "expected")
        for number in range(3):
            run_part(whole, f"{number}/3", tmp_path / "out")
            record = json.loads(PartsFolder(tmp_path / "out", whole.digest).record(Part(number, 3)).read_text())
            assert record["samples"]
            for name, samples in record["samples"].items():
                assert all(zlib.crc32(expected[name][at : at + length]) == crc for at, length, crc in samples)
        published(tmp_path / "out")
        assert contents(tmp_path / "out").keys() == expected.keys()


def test_a_full_disk_is_an_error_of_the_project(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ckpt_cli.output.parts_folder.write_bytes", full)
    with pytest.raises(NoSpace):
        run_part(plan, "0/1", tmp_path / "out")


def test_values_that_overflow_refuse_the_part(tmp_path: Path) -> None:
    from ckpt_cli.errors import CastOverflow
    from ckpt_cli.output.publish import refuse_overflows

    with Files() as files:
        made = Sources(tmp_path, files)
        made.add("w", torch.full((10, 10), 1e30))
        plan = make_plan(made.tensors, dtype="fp16")
        with pytest.raises(CastOverflow):
            write_part(plan, Part(0, 1), tmp_path / "out", {}, lambda written: built(plan, written), approve=refuse_overflows)
    with pytest.raises(MissingParts):
        published(tmp_path / "out")
