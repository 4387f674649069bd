"""Numbers out of files are never counted through, and memory is asked for what is there, not for what might be.

What would hang or take gigabytes runs in child processes with limits, so that a failure ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt_cli
from ckpt_cli.boxes import Split, split_dimension
from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent, MixedWorldSizes, NoMemory, SourceChanged, memory_limits
from ckpt_cli.files.pickle_reader import load_pickle
from ckpt_cli.files.source import read_small
from ckpt_cli.formats.base import MAX_RANKS, Match, missing_of
from ckpt_cli.formats.optimizer_state import RankEntries, regrouped
from ckpt_cli.formats.rank_files.dtensor import DistributedLocal, RankMesh
from ckpt_cli.formats.rank_files.experts import expert_blocks
from ckpt_cli.hub.classes.transformers_child import asked_child
from ckpt_cli.hub.config import expert_count, huge_number
from ckpt_cli.hub.layers.counts import layer_count
from ckpt_cli.state.optimizer import _united
from tests.cli import ROOT
from tests.conftest import Copy
from tests.test_hostile import repacked
from tests.test_placements import Laid, plain_mesh, rank_file, save_ranks

resource = pytest.importorskip("resource")

LIMIT = 700 << 20
"""Bytes of address space, or of data, as login nodes allow."""

HUGE = [10**9, 2**31 - 1, 2**31, 10**10, 2**62, 10**30]
COMMANDS = ("detect", "inspect", "merge", "average", "verify")
"""Those that need no torch, which is as large as the limit: a process has room for it or for the rest of this list."""


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers says nothing about configs here: what reads them in this process is meant."""
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", lambda *_: None)


def limited(script: str, *arguments: str | Path, size: int = LIMIT, seconds: int = 60) -> str:
    """Run a script of Python with limits of address space, data and processor time; its output, after it ended well."""

    def limit() -> None:
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
            resource.setrlimit(kind, (size, size))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=limit, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


EVERY_COMMAND = """
    import contextlib, faulthandler, io, json, os, shutil, sys
    faulthandler.dump_traceback_later(280, exit=True)
    os.fsync = lambda fd: None
    import ckpt_cli.hub.classes.transformers_child
    # A child process with torch and transformers needs more than that.
    ckpt_cli.hub.classes.transformers_child.installed_version = lambda: None
    from ckpt_cli.cli import _run
    out = sys.argv[1]
    for path in sys.argv[2:]:
        for command in ("detect", "inspect", "merge", "average", "verify"):
            words = [command, path]
            if command == "average":
                words = [command, path, path]
            if command == "verify":
                words += ["--full"]
            if command in ("merge", "average", "extract-state"):
                words += ["-o", os.path.join(out, "made")]
            told = io.StringIO()
            with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
                code = _run(words)
            shutil.rmtree(os.path.join(out, "made"), ignore_errors=True)
            print(json.dumps([path, command, code, "no-memory" in told.getvalue() or "MemoryError" in told.getvalue()]))
"""


ONE_COMMAND = """
    import sys
    import ckpt_cli.hub.classes.transformers_child
    ckpt_cli.hub.classes.transformers_child.installed_version = lambda: None
    from ckpt_cli.cli import _run
    print("code", _run(sys.argv[1:]))
"""


def outcomes(paths: list[Path], out: Path, **options: Any) -> dict[tuple[str, str], int]:
    """Exit code by path and command; none of them lacked memory."""
    lines = [json.loads(line) for line in limited(EVERY_COMMAND, out, *paths, **options).splitlines() if line.startswith("[")]
    assert len(lines) == len(COMMANDS) * len(paths)
    assert [line for line in lines if line[3] or line[2] == 70] == []
    return {(path, command): code for path, command, code, _ in lines}


def test_every_command_reads_every_layout_within_700_mb(layouts: Path, expect: Mapping[str, Any], tmp_path: Path) -> None:
    """All in one process, whose memory must not grow with what it has done before."""
    paths = sorted({layouts / layout / result["arguments"][0] for layout, content in expect.items() for result in content["results"]})
    codes = outcomes(paths, tmp_path, seconds=300)
    for path in paths:
        assert [codes[str(path), command] for command in ("detect", "inspect", "merge")] == [0, 0, 0], path
        assert codes[str(path), "average"] in (0, 1, 2, 3), path


def test_a_process_of_its_own_for_each_command(layouts: Path, tmp_path: Path) -> None:
    """What one process does in a row under the same limit, above, is not asked of each layout again; torch, by `extract-state`, is."""
    lines = [("torchtitan/run/checkpoint", "extract-state"), ("dcp-options/zstd", "extract-state")]
    for layout, command in (*(("verl-run/run", command) for command in (*COMMANDS, "extract-state")), *lines):
        words = [command, str(layouts / layout)] + ([str(layouts / layout)] if command == "average" else [])
        words += ["-o", str(tmp_path / "out"), "--overwrite"] if command in ("merge", "average", "extract-state") else []
        code = int(limited(ONE_COMMAND, *words).split()[-1])
        assert code == (3 if (layout, command) == ("dcp-options/zstd", "extract-state") else 0), (layout, command)


class TestLackOfMemory:
    """An error of the project that names the limit, from Python and from the command line."""

    @pytest.mark.parametrize("size", [60 << 20, 120 << 20, 200 << 20])
    def test_is_told_with_the_limit(self, layouts: Path, size: int) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "ckpt_cli", "detect", str(layouts / "verl-run" / "run")],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)),
            timeout=60,
            check=False,
        )
        assert done.returncode == 3, done.stderr
        assert "error[no-memory]" in done.stderr
        assert f"ulimit -v is {size >> 20} MiB" in done.stderr
        assert "hint: " in done.stderr

    def test_is_an_error_of_the_project_wherever_it_shows(self, layouts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def lacking(*_: object, **__: object) -> None:
            raise MemoryError

        run = layouts / "verl-run" / "run"
        ckpt_cli.merge(run, tmp_path / "out")
        monkeypatch.setattr("ckpt_cli.files.pickle_template.load_pickle", lacking)
        for command in (
            lambda: ckpt_cli.detect(run),
            lambda: ckpt_cli.inspect(run),
            lambda: ckpt_cli.merge(run, tmp_path / "again"),
            lambda: ckpt_cli.average([run, run], tmp_path / "again"),
            lambda: ckpt_cli.extract_state(run, tmp_path / "again"),
            lambda: ckpt_cli.verify(tmp_path / "out", against=run),
        ):
            with pytest.raises(NoMemory) as caught:
                command()
            assert isinstance(caught.value, CkptError)
            assert caught.value.exit_code == 3
            assert caught.value.advice
        assert not (tmp_path / "again").exists()

    def test_while_writing_leaves_nothing(self, layouts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def lacking(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr("ckpt_cli.output.writer._Workers._copy", lacking)
        monkeypatch.setattr("ckpt_cli.output.writer._Workers._tile", lacking)
        with pytest.raises(NoMemory):
            ckpt_cli.merge(layouts / "verl-run" / "run", tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_is_no_damage_of_the_pickle(self) -> None:
        """A good file must not be called damaged because it is long."""
        machine = pickle.dumps(list(range(10)))
        assert load_pickle(machine)[0] == list(range(10))
        with pytest.MonkeyPatch.context() as patch:

            def lacking(_: object) -> None:
                raise MemoryError

            patch.setattr("ckpt_cli.files.pickle_reader.HANDLERS", [lacking] * 256)
            with pytest.raises(MemoryError):
                load_pickle(machine)

    def test_without_a_limit_names_none(self) -> None:
        assert "-v" not in memory_limits()


class TestReads:
    def test_ask_for_the_size_of_the_file(self, tmp_path: Path) -> None:
        (tmp_path / ".metadata").write_bytes(b"x" * 3000)
        tracemalloc.start()
        assert len(read_small(tmp_path / ".metadata", 1 << 30)) == 3000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20

    @pytest.mark.parametrize("left", [0, 5])
    def test_that_return_less_are_no_empty_file(self, layouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
        """A mount that gives nothing: no JSONDecodeError, no "bug in ckpt"."""
        real = os.fdopen

        class Short:
            def __init__(self, file: Any) -> None:
                self.file = file

            def __enter__(self) -> Short:
                return self

            def __exit__(self, *_: object) -> None:
                self.file.close()

            def read(self, size: int) -> bytes:
                return bytes(self.file.read(size)[:left])

        monkeypatch.setattr("ckpt_cli.files.source.os.fdopen", lambda fd, mode: Short(real(fd, mode)))
        with pytest.raises(SourceChanged) as caught:
            read_small(layouts / "verl-run" / "run" / "global_step_20" / "actor" / "huggingface" / "config.json")
        assert caught.value.hint
        for command in (ckpt_cli.inspect, lambda run: ckpt_cli.merge(run, tmp_path / "out")):
            with pytest.raises(CkptError):
                command(layouts / "verl-run" / "run" / "global_step_20")


# -- numbers of files ------------------------------------------------------------------------------------------------


def long1(number: int) -> bytes:
    """A number as pickles hold it."""
    return pickle.dumps(number, protocol=2)[2:-1]


def patched(file: Path, old: bytes, new: bytes, count: int = -1) -> None:
    """Other bytes in the pickle of a file of torch.save."""
    hits: list[int] = []

    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return content
        hits.append(content.count(old))
        return content.replace(old, new, count)

    file.write_bytes(repacked(file.read_bytes(), change))
    assert hits[0] > 0


INSPECTED = """
    import sys
    import ckpt_cli
    from ckpt_cli.errors import CkptError
    for command in (ckpt_cli.detect, ckpt_cli.inspect, lambda path: ckpt_cli.merge(path, sys.argv[2])):
        try:
            result = command(sys.argv[1])
            print("ok", getattr(result, "problem", None))
        except CkptError as error:
            print(error.exit_code, error.code, error.message)
"""


def answers(run: Path, out: Path) -> list[str]:
    """What detect, inspect and merge say, within bounds of memory and time."""
    return limited(INSPECTED, run, out, seconds=20).splitlines()


class TestMeshesAndPlacements:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        values = torch.arange(24.0).reshape(12, 2)
        tensors = {"a.weight": Laid(values, (_StridedShard(0, split_factor=2), Shard(0))), "b.weight": Laid(values, (Shard(0), Shard(0)))}
        save_ranks(tmp_path / "run", plain_mesh(2, 2), tensors)
        return tmp_path / "run"

    def spoil(self, run: Path, old: bytes, new: bytes) -> None:
        for rank in range(4):
            patched(rank_file(run, 4, rank), old, new)

    @pytest.mark.parametrize("factor", HUGE)
    def test_of_a_split_factor(self, run: Path, tmp_path: Path, factor: int) -> None:
        with_factor = rank_file(run, 4, 0).read_bytes()
        at = with_factor.index(b"split_factor") + len("split_factor")
        self.spoil(run, with_factor[at - 12 : at + 4], with_factor[at - 12 : at + 2] + long1(factor))
        refusal = answers(run, tmp_path / "out")
        assert refusal[1:] == ["3 corrupt-file a _StridedShard placement is invalid"] * 2
        assert "placement" in refusal[0]

    @pytest.mark.parametrize("size", [10**9, 2**62])
    @pytest.mark.parametrize("stride", [0, 1])
    def test_of_a_mesh_axis(self, run: Path, tmp_path: Path, size: int, stride: int) -> None:
        old = b"K\x02\x85q1X\x06\x00\x00\x00strideq2K\x02"
        content = rank_file(run, 4, 0).read_bytes()
        at = content.index(b"shape", content.index(b"_FlatLayout"))
        old = content[at : content.index(b"b", content.index(b"stride", at) + 12)]
        new = old.replace(b"K\x02", long1(size), 1)
        new = new[: new.rindex(b"K\x02")] + b"K" + bytes([stride]) + new[new.rindex(b"K\x02") + 2 :]
        self.spoil(run, old, new)
        assert {line.split(" ")[0] for line in answers(run, tmp_path / "out")[1:]} == {"3"}

    def test_of_a_split_do_no_work(self) -> None:
        assert split_dimension(6, [Split(2, 0, 10**10)]) == [(0, 6)]
        assert split_dimension(0, [Split(2, 1, 10**30)]) == []
        assert split_dimension(6, [Split(3, 2, 2)]) == [(2, 1), (5, 1)]


NAMES = (
    "model_world_size_{n}_rank_0.pt",
    "model_rank{n}.pt",
    "ema_rank{n}.pt",
    "pytorch_model_fsdp_rank{n}.bin",
    "optim_world_size_{n}_rank_0.pt",
    "optimizer_rank{n}.bin",
    "optimizer.0-of-{n}.pt",
    "extra_state_world_size_{n}_rank_0.pt",
    "rng_state_{n}.pth",
    "random_states_{n}.pkl",
    "shard-00001-model-00001-of-{n}.safetensors",
    "shard-{n}-model-00001-of-00001.safetensors",
    "model-00001-of-{n}.safetensors",
    "model-{n}-of-00002.safetensors",
    "__{n}_0.distcp",
    "__{n}.metadata",
)


NUMBERS = (2**31 - 1, 2**31, 10**15, 10**40)


@pytest.fixture(scope="module")
def merges(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], int]:
    """The exit code of a merge for each name and number; one process runs all commands on all of them, within its bounds."""
    work, runs = tmp_path_factory.mktemp("names"), dict[tuple[str, int], Path]()
    for name in NAMES:
        for number in NUMBERS:
            run = runs[name, number] = work / f"run{len(runs)}"
            run.mkdir()
            file = run / name.format(n=number)
            if file.suffix == ".safetensors":
                save_file({"a.weight": torch.ones(2)}, file)
            else:
                torch.save({"a.weight": torch.ones(2)}, file)
    codes = outcomes([*runs.values()], work, seconds=60)
    return {key: codes[str(run), "merge"] for key, run in runs.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_number_in_a_name_is_not_counted_to(merges: Mapping[tuple[str, int], int], name: str) -> None:
    codes = {merges[name, number] for number in NUMBERS}
    assert codes <= {0, 3, 4}
    if "world_size" not in name and not name.startswith(("model-00001-of", "__")):
        assert codes <= {3, 4}


class TestRanks:
    def test_that_are_missing_are_not_listed_without_end(self, tmp_path: Path) -> None:
        assert missing_of(4, {0, 2}) == (1, 3)
        assert missing_of(2**40, {0}) == ()
        assert Match("f", "model", tmp_path, (), "", 10**12, {0: tmp_path}).missing_ranks == ()
        assert Match("f", "model", tmp_path, (), "", None, {10**12: tmp_path}).missing_ranks == ()

    def test_that_a_file_speaks_of(self, tmp_path: Path) -> None:
        """The mesh in a file may name any rank; how many there are is taken from it where names do not say it."""
        run = tmp_path / "run"
        save_ranks(run, plain_mesh(2), {"a.weight": Laid(torch.ones(4, 2), (Shard(0),))})
        for rank in (0, 1):
            file = rank_file(run, 2, rank).rename(run / f"model_rank{rank}.pt")
            ranks = [rank, 2**31 - 1] if rank == 0 else [2**31 - 1, 1]

            def change(name: str, content: bytes, ranks: list[int] = ranks) -> bytes:
                stored = b"".join(n.to_bytes(4, "little") for n in (0, 1))
                other = b"".join(n.to_bytes(4, "little") for n in ranks)
                return content.replace(stored, other) if "/data/" in name else content

            file.write_bytes(repacked(file.read_bytes(), change))
        assert [line.split(" ")[:2] for line in answers(run, tmp_path / "out")[1:]] == [["3", "corrupt-file"]] * 2

    def test_of_a_name_are_refused_with_the_reason(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / f"model_world_size_{2**31}_rank_{2**31 - 1}.pt")
        with pytest.raises(MixedWorldSizes):
            ckpt_cli.inspect(tmp_path)
        assert ckpt_cli.detect(tmp_path).checkpoint.components[0].missing_ranks == ()
        assert MAX_RANKS < 2**31


CONFIG_NUMBERS = [10**9, 10**30, -1, 0, 2.5, 1e300, True, "32", None, [4], {}]


class TestConfigs:
    @pytest.mark.parametrize("value", CONFIG_NUMBERS)
    @pytest.mark.parametrize(
        "key", ["num_hidden_layers", "num_experts", "num_local_experts", "num_attention_heads", "num_nextn_predict_layers"]
    )
    def test_of_any_kind_are_only_read(self, layouts: Path, copy: Copy, tmp_path: Path, key: str, value: object) -> None:
        """Of a model whose rules are shipped: nothing asks transformers, nothing counts."""
        run = copy("layouts", "verl-run", "run") / "global_step_20"
        config = run / "actor" / "huggingface" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), key: value}))
        ckpt_cli.detect(run)
        ckpt_cli.inspect(run)
        try:
            ckpt_cli.merge(run, tmp_path / "out")
            ckpt_cli.verify(tmp_path / "out")
        except CkptError as error:
            assert error.exit_code == 4  # noqa: PT017 - either answer is fine, a hang or another exception is not

    def test_of_experts_do_not_fill_a_set(self) -> None:
        mesh = RankMesh(("ep",), (2,), (0, 1), (0,))
        other = RankMesh(("ep",), (2,), (2, 3), (0,))
        stored: Any = None
        held = [DistributedLocal(stored, (1, 2), (), each, None, False, False) for each in (mesh, other)]
        with pytest.raises(Inconsistent):
            expert_blocks("mlp.experts.gate_up_proj", (1, 2), held, 4, (), 10**10, has_config=True)

    def test_of_other_kinds_are_no_counts(self) -> None:
        assert expert_count({"num_experts": True}) is None
        assert expert_count({"num_experts": 2.0}) is None
        assert layer_count({"num_hidden_layers": "4"}) is None

    @pytest.mark.parametrize(
        "config",
        [
            {"num_hidden_layers": 10**9},
            {"text_config": {"num_hidden_layers": 10**9}},
            {"a": {"b": [{"n_layer": 10**6}]}},
            {"depths": [2, 10**9]},
            {"num_labels": 10**9},
            {"n_routed_experts": 10**9},
        ],
    )
    def test_that_nobody_builds_are_not_asked_about(self, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", lambda *_: pytest.fail("a process was started"))
        assert huge_number(config)
        assert asked_child("rules", config, 1) is None

    @pytest.mark.parametrize(
        "config",
        [
            {"num_hidden_layers": 126, "intermediate_size": 53248, "vocab_size": 262144, "max_position_embeddings": 10**7},
            {"block_size": 131072, "expert_ffn_hidden_size": 28672, "moe_layer_intermediate": 53248, "pad_token_id": 200000},
            {"layer_types": ["full_attention"] * 80, "num_labels": 1000, "head_dim": 256},
        ],
    )
    def test_of_real_models_are_asked_about(self, config: dict[str, Any]) -> None:
        assert huge_number(config) is None


class TestOtherFiles:
    @pytest.mark.parametrize("value", CONFIG_NUMBERS)
    def test_the_rank_of_an_adapter(self, layouts: Path, copy: Copy, tmp_path: Path, value: object) -> None:
        run = copy("layouts", "verl-lora", "full")
        for config in [*run.rglob("adapter_config.json"), *run.rglob("lora_train_meta.json")]:
            config.write_text(json.dumps({**json.loads(config.read_text()), "r": value, "rank_pattern": {"q_proj": value}}))
        try:
            ckpt_cli.merge(run, tmp_path / "out", lora="export")
        except CkptError as error:
            assert error.exit_code in (3, 4)  # noqa: PT017

    @pytest.mark.parametrize("value", [10**9, 10**400, -1, 2.5, True, "1", None, [1]])
    def test_the_size_that_an_index_names(self, tmp_path: Path, value: object) -> None:
        save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model-00001-of-00001.safetensors")
        index = {"metadata": {"total_size": value}, "weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        ckpt_cli.inspect(tmp_path)
        ckpt_cli.verify(tmp_path)

    @pytest.mark.parametrize("value", [10**9, -1, 0, 2.5, True, "1", None, [1]])
    def test_the_options_in_a_manifest(self, layouts: Path, tmp_path: Path, value: object) -> None:
        run = layouts / "verl-run" / "run" / "global_step_20"
        ckpt_cli.merge(run, tmp_path / "out")
        manifest = tmp_path / "out" / "ckpt-manifest.json"
        content = json.loads(manifest.read_text())
        for key in ("max_shard_size", "jobs", "lora_alpha"):
            manifest.write_text(
                json.dumps({**content, "options": {**content["options"], key: value}, "outputs": {"model.safetensors": value}})
            )
            with contextlib.suppress(CkptError):
                ckpt_cli.verify(tmp_path / "out", against=run)

    def test_shapes_and_offsets_of_dcp_metadata(self, tmp_path: Path) -> None:
        dcp.save({"model": {"a.weight": torch.ones(3, 2)}}, storage_writer=dcp.FileSystemWriter(tmp_path / "run"), no_dist=True)
        whole = (tmp_path / "run" / ".metadata").read_bytes()
        for number in HUGE[:5]:
            for fields in ("size", "sizes", "offsets", "length", "offset"):
                metadata = pickle.loads(whole)
                entry = next(iter(metadata.state_dict_metadata.values()))
                place = next(iter(metadata.storage_data.values()))
                if fields == "size":
                    entry.size = torch.Size([min(number, 2**62), 2])
                elif fields in ("sizes", "offsets"):
                    setattr(entry.chunks[0], fields, torch.Size([min(number, 2**62), 2]))
                else:
                    setattr(place, fields, number)
                (tmp_path / "run" / ".metadata").write_bytes(pickle.dumps(metadata))
                with pytest.raises(CkptError):
                    ckpt_cli.inspect(tmp_path / "run")

    def test_a_tensor_without_elements_has_any_shape(self, tmp_path: Path) -> None:
        """Forty bytes of header say a thousand billion rows; no command walks along them."""
        header = json.dumps(
            {
                "a": {"dtype": "F32", "shape": [10**12, 0, 10**12], "data_offsets": [0, 0]},
                "b": {"dtype": "F32", "shape": [0, 10**12], "data_offsets": [0, 0]},
                "c.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            }
        ).encode()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
        codes = outcomes([tmp_path / "run"], tmp_path, seconds=30)
        assert codes[str(tmp_path / "run"), "merge"] == 0
        script = """
            import sys, ckpt_cli
            ckpt_cli.merge(sys.argv[1], sys.argv[2], dtype="bf16")
            ckpt_cli.verify(sys.argv[2], full=True, against=sys.argv[1])
            ckpt_cli.verify(sys.argv[2], base=sys.argv[1])
        """
        limited(script, tmp_path / "run", tmp_path / "cast", seconds=30)


# -- growth ----------------------------------------------------------------------------------------------------------


class Counted(str):
    """A name that counts how often it is compared."""

    compared = 0
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        Counted.compared += 1
        return str.__hash__(self)


def comparisons(count: int, ranks: int = 4) -> int:
    """How much is compared to unite the groups of some ranks with so many parameters each."""
    entries = [
        RankEntries(rank, Path("x"), {}, {}, [{"lr": 1.0, "params": [Counted(f"p{rank}.{i}") for i in range(count)]}])
        for rank in range(ranks)
    ]
    Counted.compared = 0
    (group,) = _united(entries)
    assert len(group["params"]) == ranks * count
    return Counted.compared


class TestGrowth:
    def test_of_united_groups_is_linear(self) -> None:
        few, many = comparisons(100), comparisons(1000)
        assert many < 12 * few

    def test_united_groups_have_each_parameter_once_in_order(self) -> None:
        entries = [
            RankEntries(rank, Path("x"), {}, {}, [{"lr": 1.0, "params": names}]) for rank, names in enumerate((["b", "a"], ["a", "c"]))
        ]
        assert _united(entries) == [{"lr": 1.0, "params": ["b", "a", "c"]}]

    def test_of_groups_with_options_of_their_own_is_linear(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ckpt_cli.formats import optimizer_state

        calls: list[int] = []
        real = optimizer_state.equal
        monkeypatch.setattr(optimizer_state, "equal", lambda a, b: calls.append(1) or real(a, b))
        assert len(regrouped({f"p{i}": {"lr": i * 0.5} for i in range(500)})) == 500
        assert len(calls) == 0
        (group,) = regrouped({f"p{i}": {"lr": 0.5, "nan": float("nan")} for i in range(500)})
        assert len(group["params"]) == 500
        assert len(calls) == 499

    def test_groups_of_equal_options_of_other_kinds_are_not_one(self) -> None:
        assert len(regrouped({"a": {"lr": 1}, "b": {"lr": 1.0}, "c": {"lr": True}, "d": {"lr": "1"}})) == 4


def test_the_child_processes_of_these_tests_are_bounded() -> None:
    """A script that takes more than it may, or longer, does not pass."""
    with pytest.raises(AssertionError):
        limited("x = bytearray(2 << 30)")
    before = time.monotonic()
    with pytest.raises(AssertionError):
        limited("while True: pass", seconds=1)
    assert time.monotonic() - before < 60
    with pytest.raises(CorruptFile):
        raise CorruptFile("and errors of ours are told apart")
