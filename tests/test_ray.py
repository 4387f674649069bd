"""Ray: the machines of a cluster write what one process writes, also when some of them are lost; what fails, fails as it does here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

import ckpt_cli
from ckpt_cli.commands.merge import merge
from ckpt_cli.engines.call import part_call
from ckpt_cli.engines.ray_task import mark_of, write_part
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.output.parts_folder import MARK, PartsFolder
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt
from tests.pages import run
from tests.test_scale_page import SCRIPTS, is_the_output_of_one_process, work  # noqa: F401 - a fixture

RUN = ROOT / "examples" / "tiny-run"
MEMORY = 80 << 20
SHARDS = ["--max-shard-size", "20KB"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without processors, so that tasks run on the two other nodes."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            made.add_node(num_cpus=1, object_store_memory=MEMORY)
        yield made
        made.shutdown()


@pytest.fixture
def engine(cluster: Any) -> list[str]:
    return ["--engine", "ray", "--ray-address", cluster.address]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose parts take long enough to be killed in the middle."""
    folder = tmp_path_factory.mktemp("big")
    random = numpy.random.default_rng(7)
    block = random.standard_normal((1 << 10, 1 << 13), dtype=numpy.float32)
    save_file({f"layers.{i}.weight": numpy.roll(block, i) for i in range(6)}, folder / "model.safetensors")
    return folder


BIG = ["--dtype", "bf16", "--max-shard-size", "17MB"]
"""One tensor in each file."""


def started(*arguments: str | Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "ckpt_cli", *map(str, arguments), "--progress", "off"]
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def writer_of(raylets: list[int], folder: Path) -> tuple[int, int]:
    """A raylet and its worker, which is stopped while it has a file of the output open."""
    return process_of(raylets, lambda path: MARK in path and path.startswith(str(folder)) and path.endswith(".safetensors"))


def process_of(raylets: list[int], opened: Callable[[str], bool]) -> tuple[int, int]:
    """A raylet and its worker, which is stopped while it has such a file open."""
    parents: dict[str, int | None] = {}
    for _ in range(20_000):
        # Parents are asked for once: asking all processes again and again would take the processor from the workers.
        numbers = [name for name in os.listdir("/proc") if name.isdigit()]
        parents = {number: parents[number] if number in parents else _parent(number) for number in numbers}
        for number, parent in parents.items():
            if parent is None or parent not in raylets:
                continue
            try:
                if _has(Path("/proc", number), opened):
                    os.kill(int(number), signal.SIGSTOP)
                    if _has(Path("/proc", number), opened):
                        return parent, int(number)
                    os.kill(int(number), signal.SIGCONT)
            except OSError:
                continue
        time.sleep(0.003)
    raise AssertionError("no worker was seen while it worked")


def _parent(process: str) -> int | None:
    try:
        return int(Path("/proc", process, "stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def _has(process: Path, opened: Callable[[str], bool]) -> bool:
    return any(opened(os.readlink(path)) for path in (process / "fd").iterdir())


@pytest.mark.ray
@pytest.mark.slow
class TestTheOutput:
    @pytest.mark.parametrize("options", [[*SHARDS, "--dtype", "bf16"], ["--type", "both", "--ray-parts", "3"]])
    def test_is_what_one_process_writes(self, tmp_path: Path, engine: list[str], options: list[str]) -> None:
        (tmp_path / "run").symlink_to(RUN)
        alone = [word for word in options if word not in ("--ray-parts", "3")]
        assert ckpt("merge", "run", "-o", "one", *alone, cwd=tmp_path).code == 0
        done = ckpt("merge", "./run", "-o", "new/ray", *options, *engine, "--verify", "--progress", "json", cwd=tmp_path)
        assert done.code == 0, done.err
        assert tree(tmp_path / "new" / "ray") == tree(tmp_path / "one")
        assert leftovers(tmp_path / "new") == []
        events = [json.loads(line) for line in done.err.splitlines() if line.startswith("{")]
        assert events
        assert [line for line in done.err.splitlines() if "ray" in line.lower() and "new/ray" not in line and "ray-parts" not in line] == []

    def test_of_an_average(self, tmp_path: Path, engine: list[str]) -> None:
        options = ["--all", "--dtype", "bf16", *SHARDS]
        assert ckpt("average", RUN, "-o", tmp_path / "one", *options).code == 0
        done = ckpt("average", RUN, "-o", tmp_path / "ray", *options, *engine)
        assert done.code == 0, done.err
        assert contents(tmp_path / "ray") == contents(tmp_path / "one")

    def test_replaces_an_older_one_only_if_asked_for(self, tmp_path: Path, engine: list[str]) -> None:
        assert ckpt("merge", RUN, "-o", tmp_path / "out").code == 0
        before = contents(tmp_path / "out")
        assert ckpt("merge", RUN, "-o", tmp_path / "out", "--dtype", "bf16", *engine).code == 5
        assert contents(tmp_path / "out") == before
        assert ckpt("merge", RUN, "-o", tmp_path / "out", "--dtype", "bf16", "--overwrite", *engine).code == 0
        assert contents(tmp_path / "out") != before
        assert leftovers(tmp_path) == []

    def test_counts_what_all_parts_found(self, tmp_path: Path, engine: list[str]) -> None:
        """Values that a dtype cannot hold, in two files: refused with the error of one process, or counted in one warning."""
        values = numpy.full((64, 64), 1e6, numpy.float32)
        save_file({"a.weight": values, "b.weight": values}, tmp_path / "model.safetensors")
        options = ["--dtype", "fp16", "--max-shard-size", "10KB", "--json"]
        here = json.loads(ckpt("merge", tmp_path / "model.safetensors", "-o", tmp_path / "one", *options).out)
        done = ckpt("merge", tmp_path / "model.safetensors", "-o", tmp_path / "ray", *options, *engine)
        there = json.loads(done.out)
        assert there["exit_code"] == here["exit_code"] == 1
        assert there["errors"][0]["code"] == here["errors"][0]["code"] == "cast-overflow"
        assert there["errors"][0]["hint"] == here["errors"][0]["hint"]
        assert "Traceback" not in done.err
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
        done = ckpt("merge", tmp_path / "model.safetensors", "-o", tmp_path / "ray", *options, *engine, "--allow-overflow")
        assert json.loads(done.out)["data"]["outputs"][0]["overflows"] == {"a.weight": 4096, "b.weight": 4096}

    def test_a_worker_that_is_killed_while_it_writes(self, tmp_path: Path, big: Path, cluster: Any, engine: list[str]) -> None:
        driver = started("merge", big, "-o", tmp_path / "ray", *BIG, *engine)
        _, worker = writer_of([raylet(node) for node in cluster.worker_nodes], tmp_path)
        os.kill(worker, signal.SIGKILL)
        out, err = driver.communicate(timeout=120)
        assert driver.returncode == 0, err
        assert "raylet" not in out
        assert ckpt("merge", big, "-o", tmp_path / "one", *BIG).code == 0
        assert contents(tmp_path / "ray") == contents(tmp_path / "one")

    def test_a_node_that_is_killed_while_it_writes(self, tmp_path: Path, big: Path, cluster: Any, engine: list[str]) -> None:
        driver = started("merge", big, "-o", tmp_path / "ray", *BIG, *engine)
        nodes = {raylet(node): node for node in cluster.worker_nodes}
        parent, worker = writer_of(list(nodes), tmp_path)
        os.kill(parent, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        cluster.remove_node(nodes[parent], allow_graceful=False)
        _, err = driver.communicate(timeout=120)
        cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        assert driver.returncode == 0, err
        assert "Traceback" not in err
        assert "raylet" not in err
        assert ckpt("merge", big, "-o", tmp_path / "one", *BIG).code == 0
        assert contents(tmp_path / "ray") == contents(tmp_path / "one")
        assert leftovers(tmp_path) == []

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_all_tasks(self, tmp_path: Path, big: Path, cluster: Any, engine: list[str], number: signal.Signals) -> None:
        driver = started("merge", big, "-o", tmp_path / "ray", "--debug", *BIG, *engine)
        _, worker = writer_of([raylet(node) for node in cluster.worker_nodes], tmp_path)
        driver.send_signal(number)
        os.kill(worker, signal.SIGCONT)
        _, err = driver.communicate(timeout=60)
        assert driver.returncode == 128 + number, err
        assert "error[interrupted]" in err
        assert "Traceback" not in err
        time.sleep(1)
        assert list(tmp_path.iterdir()) == []

    def test_as_the_page_says(self, work: dict[str, str], cluster: Any) -> None:  # noqa: F811
        run(next(script for script in SCRIPTS if "--engine ray" in script), {**work, "RAY_ADDRESS": cluster.address})
        assert is_the_output_of_one_process(work)
        verify = next(script for script in SCRIPTS if "--engine ray" in script and "ckpt verify" in script)
        assert "result    ok" in run(verify, {**work, "RAY_ADDRESS": cluster.address})

    def test_in_python(self, tmp_path: Path, cluster: Any) -> None:
        """From a program that may be a driver of Ray itself: a process of its own, as Ray leaves threads behind."""
        program = (
            "import sys, ray, ckpt_cli\n"
            "ray.init(address=sys.argv[1], log_to_driver=False)\n"
            "print(ckpt_cli.merge(sys.argv[2], sys.argv[3], engine='ray').outputs[0].part)\n"
            "assert ray.is_initialized()\n"
        )
        words = [sys.executable, "-c", program, cluster.address, str(RUN), str(tmp_path / "ray")]
        done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
        ckpt_cli.merge(RUN, tmp_path / "one")
        assert contents(tmp_path / "ray") == contents(tmp_path / "one")


@pytest.mark.ray
@pytest.mark.slow
class TestAVerification:
    """By the nodes of a cluster: the result of one process."""

    def result(self, *words: str | Path) -> dict[str, Any]:
        """The document without the seconds."""
        done = ckpt("verify", *words, "--json", "--progress", "off")
        assert "Traceback" not in done.err
        document: dict[str, Any] = json.loads(done.out)
        assert done.code == document["exit_code"]
        document["data"].pop("seconds", None)
        for notes in document["data"].get("notes", ()):
            notes.pop("seconds", None)
        return document

    @pytest.mark.parametrize(
        ("options", "damaged"),
        [(["--full"], True), (["--against", str(RUN), "--ray-parts", "5"], True), (["--full", "--against", str(RUN)], False)],
    )
    def test_finds_what_one_process_finds(self, tmp_path: Path, engine: list[str], options: list[str], damaged: bool) -> None:
        output = tmp_path / "out"
        assert ckpt("merge", RUN, "-o", output, *SHARDS).code == 0
        if damaged:
            file = sorted(output.glob("*.safetensors"))[1]
            content = bytearray(file.read_bytes())
            content[-9] ^= 0x40
            file.write_bytes(content)
        alone = self.result(output, *[word for word in options if word not in ("--ray-parts", "5")])
        assert self.result(output, *options, *engine) == alone
        assert alone["exit_code"] == int(damaged)
        assert leftovers(tmp_path) == []

    def test_of_a_path_that_is_given_from_where_one_stands(self, tmp_path: Path, engine: list[str]) -> None:
        assert ckpt("merge", RUN, "-o", tmp_path / "out").code == 0
        (tmp_path / "run").symlink_to(RUN)
        done = ckpt("verify", "out", "--against", "./run", *engine, "--progress", "json", cwd=tmp_path)
        assert done.code == 0, done.err
        assert done.out == ckpt("verify", "out", "--against", "./run", cwd=tmp_path).out

    def test_a_worker_that_is_killed_while_it_reads(self, tmp_path: Path, big: Path, cluster: Any, engine: list[str]) -> None:
        assert ckpt("merge", big, "-o", tmp_path / "out", *BIG).code == 0
        driver = started("verify", tmp_path / "out", "--against", big, "--ray-parts", "6", *engine)
        _, worker = process_of([raylet(node) for node in cluster.worker_nodes], lambda path: path.startswith(str(tmp_path)))
        os.kill(worker, signal.SIGKILL)
        out, err = driver.communicate(timeout=120)
        assert driver.returncode == 0, err
        assert "raylet" not in out + err
        assert "identical" in out

    def test_a_signal_ends_all_tasks(self, tmp_path: Path, big: Path, cluster: Any, engine: list[str]) -> None:
        assert ckpt("merge", big, "-o", tmp_path / "out", *BIG).code == 0
        driver = started("verify", tmp_path / "out", "--against", big, "--ray-parts", "6", *engine)
        _, worker = process_of([raylet(node) for node in cluster.worker_nodes], lambda path: path.startswith(str(tmp_path)))
        driver.send_signal(signal.SIGTERM)
        _, err = driver.communicate(timeout=60)
        assert driver.returncode == 128 + signal.SIGTERM, err
        assert "error[interrupted]" in err
        assert "Traceback" not in err
        for _ in range(100):
            if not Path(f"/proc/{worker}").exists():
                break
            time.sleep(0.1)
        else:
            raise AssertionError("a worker still reads")

    def test_what_a_task_raises_is_raised(self, tmp_path: Path, engine: list[str]) -> None:
        assert ckpt("merge", RUN, "-o", tmp_path / "out").code == 0
        done = ckpt("verify", tmp_path / "out", "--against", tmp_path / "nothing", *engine, "--progress", "off")
        assert done.code == 3
        # On a busy machine Ray writes lines of its own before it.
        assert re.search(r"^error\[not-found\]:", done.err, re.MULTILINE)
        assert "on node" in done.err


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class TestANode:
    """What a worker refuses; it says which node it is on, and writes nothing."""

    def outcome(
        self, tmp_path: Path, *, mark: str = "right", run: Path = RUN, version: str = ckpt_cli.__version__, digest: str = ""
    ) -> Any:
        output = tmp_path / "out"
        shared = PartsFolder(output, "0" * 64)
        if mark != "none":
            shared.root.mkdir()
            mark_of(shared).write_text(mark)
        call = part_call(merge, [str(run), str(output)], MergeOptions(), reads=[run])
        return write_part(call, "0/1:files", 1, [shared], "right", version)

    @pytest.mark.parametrize("mark", ["none", "wrong"])
    def test_that_has_another_folder_at_the_place_of_the_output(self, tmp_path: Path, mark: str) -> None:
        done = self.outcome(tmp_path, mark=mark)
        assert (done.error.code, done.error.exit_code) == ("not-found", 3)
        assert f"node {done.node} does not see the folder of the output" in done.error.message
        assert not list(tmp_path.rglob("*.safetensors"))

    def test_that_does_not_see_the_run(self, tmp_path: Path) -> None:
        done = self.outcome(tmp_path, run=tmp_path / "elsewhere")
        assert done.error.path == str(tmp_path / "elsewhere")
        assert f"node {done.node} does not see this path" in done.error.message

    def test_that_has_another_version(self, tmp_path: Path) -> None:
        done = self.outcome(tmp_path, version="0.0.1")
        assert (done.error.code, done.error.expected) == ("engine-failed", "version 0.0.1, as the driver has")

    def test_that_plans_another_output(self, tmp_path: Path) -> None:
        done = self.outcome(tmp_path)
        assert done.error.code == "inconsistent"
        assert f"node {done.node} planned another output" in done.error.message
        assert any("part 0/1:files" in line for line in done.error.details)
        assert leftovers(tmp_path) == [PartsFolder(tmp_path / "out", "0" * 64).root.name]

    def test_whose_files_fail_sends_the_error_itself(self, tmp_path: Path) -> None:
        import pickle

        run = tmp_path / "model.safetensors"
        run.write_bytes(b"\x10" + bytes(30))
        done = pickle.loads(pickle.dumps(self.outcome(tmp_path, run=run)))
        with pytest.raises(ckpt_cli.CkptError) as here:
            ckpt_cli.merge(run, tmp_path / "one")
        for name in ("code", "exit_code", "message", "path", "expected", "hint"):
            assert getattr(done.error, name) == getattr(here.value, name)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--engine", "spark"], "local"),
            (["--engine", "ray", "--part", "0/2"], "--part"),
            (["--engine", "ray", "--checksum"], "--engine ray"),
            (["--engine", "ray", "--ray-parts", "0"], "--ray-parts"),
            (["--ray-parts", "2"], "--engine ray"),
            (["--ray-address", "auto"], "--engine ray"),
            (["--engine", "ray", "--in-place"], "--in-place"),
        ],
    )
    def test_that_do_not_go_together(self, tmp_path: Path, options: list[str], said: str) -> None:
        where = [] if "--in-place" in options else ["-o", str(tmp_path / "out")]
        done = ckpt("merge", RUN, *where, *options)
        assert done.code == 2
        assert said in done.err
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--full", "--engine", "ray", "--part", "0/2", "--json"], "--part"),
            (["--engine", "ray"], "--engine ray shares out what is read"),
            (["--full", "--ray-parts", "2"], "--engine ray"),
            (["--full", "--engine", "ray", "--ray-parts", "0"], "--ray-parts"),
            (["x.json", "--gather", "--engine", "ray"], "--gather"),
        ],
    )
    def test_of_verify_that_do_not_go_together(self, options: list[str], said: str) -> None:
        done = ckpt("verify", RUN, *options)
        assert done.code == 2
        assert said in done.err + done.out

    def test_a_cluster_that_does_not_answer(self, tmp_path: Path) -> None:
        pytest.importorskip("ray")
        done = ckpt("merge", RUN, "-o", tmp_path / "new" / "out", "--engine", "ray", "--ray-address", "127.0.0.1:1", "--progress", "off")
        assert done.code == 5
        assert done.err.startswith("error[engine-failed]: there is no connection to the Ray cluster at 127.0.0.1:1\n")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("code", [(["--engine", "ray"], 3), (["--engine", "ray", "--dry-run"], 0), ([], 0)])
    def test_without_ray(self, tmp_path: Path, code: tuple[list[str], int]) -> None:
        options, expected = code
        words = ["merge", str(RUN), "-o", str(tmp_path / "out"), *options]
        program = f"import sys; sys.modules['ray'] = None; from ckpt_cli.cli import main; main({words!r})"
        done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert done.returncode == expected
        if expected:
            assert "error[unsupported]: --engine ray needs Ray" in done.stderr
            assert "pip install '.[ray]'" in done.stderr
            assert list(tmp_path.iterdir()) == []
