"""Doors that stay closed: variables that are not set, addresses, signals in the middle of reading, files that are exchanged."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli import given
from ckpt_cli.errors import Inconsistent, NotFound, SourceChanged, UsageError
from ckpt_cli.files.source import Files, FileSource
from ckpt_cli.hub.assets import resolve_base
from ckpt_cli.hub.classes import transformers_child
from ckpt_cli.tensors.parallel import Stop, Stopped, in_threads
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt
from tests.transformers_forks import VARIABLE


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        place = tmp_path / "run" / f"global_step_{step}" / "actor"
        place.mkdir(parents=True)
        torch.save({"a.weight": torch.full((8, 8), float(step))}, place / "model_world_size_1_rank_0.pt")
    return tmp_path / "run"


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


COMMANDS = {
    "detect": ("detect", "RUN"),
    "inspect": ("inspect", "RUN"),
    "merge": ("merge", "RUN", "-o", "OUT"),
    "average": ("average", "RUN", "--all", "-o", "OUT"),
    "extract-state": ("extract-state", "RUN", "-o", "OUT"),
    "verify": ("verify", "RUN"),
}
PATH_OPTIONS = [
    *[(command, "RUN") for command in COMMANDS],
    *[(command, "OUT") for command in ("merge", "average", "extract-state")],
    *[(command, "--also") for command in COMMANDS],
    *[(command, "--base") for command in ("inspect", "merge", "average", "verify")],
    *[(command, "--key-map") for command in ("merge", "average", "verify")],
    ("verify", "--against"),
    ("verify", "--plot"),
]


def line(command: str, option: str, value: str, run: Path, out: Path) -> list[str]:
    """A command line in which one path is this value."""
    words = [{"RUN": str(run), "OUT": str(out)}.get(word, word) for word in COMMANDS[command]]
    if option in ("RUN", "OUT"):
        words[words.index(str({"RUN": run, "OUT": out}[option]))] = value
        return words
    extra = ["--base", str(run)] if option == "--plot" else []
    return [*words, *extra, f"{option}={value}"]


class TestAPathThatIsEmpty:
    """An unset variable in a script: ckpt merge ./run -o "$OUT"."""

    @pytest.mark.parametrize(("command", "option"), PATH_OPTIONS)
    def test_is_a_usage_error_before_anything_else(self, command: str, option: str, run: Path, tmp_path: Path) -> None:
        here = tmp_path / "here"
        here.mkdir()
        before = tree(tmp_path)
        outcome = ckpt(*line(command, option, "", run, tmp_path / "out"), cwd=here)
        assert (outcome.code, outcome.out) == (2, "")
        assert "is empty" in outcome.err
        assert tree(tmp_path) == before

    @pytest.mark.parametrize("value", ["", " ", "\t"])
    def test_so_is_one_of_several(self, value: str, run: Path, tmp_path: Path) -> None:
        for call in (
            lambda: ckpt_cli.average([run, value], tmp_path / "out"),
            lambda: ckpt_cli.merge(run, tmp_path / "out", also=[run, value]),
            lambda: ckpt_cli.merge(run, value, dry_run=True),
        ):
            with pytest.raises(UsageError, match="is empty"):
                call()


class TestAnOptionThatIsEmpty:
    @pytest.mark.parametrize(
        ("command", "option"),
        [
            *[(command, "--type") for command in COMMANDS],
            *[(command, option) for command in ("merge", "average") for option in ("--dtype", "--names", "--include", "--exclude")],
            *[(command, option) for command in ("merge", "average") for option in ("--max-shard-size", "--weights-name", "--jobs")],
            ("merge", "--lora"),
            ("merge", "--lora-alpha"),
            ("merge", "--step"),
            ("average", "--steps"),
            ("average", "--weights"),
            ("average", "--method"),
            ("average", "--decay-shape"),
            ("average", "--last"),
            ("verify", "--include"),
            ("verify", "--names"),
            ("verify", "--sample"),
            ("verify", "--shard-order"),
            ("detect", "--color"),
        ],
    )
    def test_is_a_usage_error(self, command: str, option: str, run: Path, tmp_path: Path) -> None:
        words = [
            word for word in line(command, "RUN", str(run), run, tmp_path / "out") if word != "--all" or option not in ("--last", "--steps")
        ]
        outcome = ckpt(*words, f"{option}=")
        assert (outcome.code, outcome.out) == (2, "")
        assert not (tmp_path / "out").exists()


class TestHome:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "home").mkdir()
        (tmp_path / "here").mkdir()
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path / "here")
        return tmp_path / "home"

    def test_is_meant_by_a_leading_tilde(self, home: Path, run: Path, tmp_path: Path) -> None:
        outcome = ckpt("merge", run, "--output=~/deep/out", cwd=tmp_path / "here")
        assert outcome.code == 0
        assert (home / "deep" / "out" / "model.safetensors").is_file()
        assert tree(tmp_path / "here") == []
        assert ckpt("verify", "~/deep/out", f"--against={run}", cwd=tmp_path / "here").code == 0
        assert ckpt("verify", run, "--against=~/deep/out", cwd=tmp_path / "here").code == 0
        assert ckpt("verify", run, "--base=~/deep/out", cwd=tmp_path / "here").code == 0
        assert ckpt("extract-state", run, "--output=~/state", "--dry-run", cwd=tmp_path / "here").code == 3

    @pytest.mark.parametrize("given_as", [str, Path])
    def test_is_meant_in_python_too(self, given_as: Callable[[str], str | Path], home: Path, run: Path, tmp_path: Path) -> None:
        shutil.copytree(run, home / "run")
        (home / "map.json").write_text('{"a.weight": "b.weight"}')
        ckpt_cli.merge(given_as("~/run"), given_as("~/out"), key_map=given_as("~/map.json"))
        assert load_file(home / "out" / "model.safetensors").keys() == {"b.weight"}
        assert tree(tmp_path / "here") == []

    def test_a_folder_with_that_name_is_written_with_a_dot(self, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, "./~/out")
        assert (tmp_path / "here" / "~" / "out" / "model.safetensors").is_file()

    def test_a_file_that_begins_with_a_tilde_is_itself(self, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, "~backup")
        assert (tmp_path / "here" / "~backup").is_dir()
        assert ckpt_cli.verify("~backup").exit_code == 0

    def test_of_someone_who_does_not_exist(self, run: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="there is no user nobody-knows-me") as caught:
            ckpt_cli.merge(run, "~nobody-knows-me/out")
        assert "./~nobody-knows-me" in (caught.value.hint or "")
        assert tree(tmp_path / "here") == []

    def test_of_someone_who_does(self, run: Path) -> None:
        assert str(given.path_of("~root/x")).startswith("/")


class TestFoldersOfTheEnvironment:
    """Nothing expands a ~ in a Dockerfile or a unit file, and nothing may make a folder called so."""

    @pytest.mark.parametrize(
        ("value", "wanted"),
        [
            ("~/kept", "{home}/kept/ckpt"),
            ("", "{home}/.cache/ckpt"),
            ("kept", "{home}/.cache/ckpt"),
            ("/kept", "/kept/ckpt"),
        ],
    )
    def test_the_cache_is_never_in_the_current_folder(
        self, value: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert str(transformers_child.cache_home()) == wanted.format(home=tmp_path)

    @pytest.mark.parametrize(
        "given",
        [
            {},
            {"HF_HOME": "~/hf"},
            {"HF_HOME": "$HOME/${FOLDER}/hf"},
            {"HF_HOME": ""},
            {"HF_HUB_CACHE": "~/hub"},
            {"HF_HUB_CACHE": "$FOLDER/hub", "HF_HOME": "/elsewhere"},
            {"HF_HUB_CACHE": "$UNKNOWN/hub"},
            {"HF_HUB_CACHE": "", "HF_HOME": "/elsewhere"},
            {"HUGGINGFACE_HUB_CACHE": "~/old"},
            {"HUGGINGFACE_HUB_CACHE": "$HOME/old", "HF_HOME": "/elsewhere", "XDG_CACHE_HOME": "/xdg"},
            {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HUB_CACHE": "/new"},
            {"XDG_CACHE_HOME": "/xdg"},
            {"XDG_CACHE_HOME": "~/$FOLDER"},
            {"XDG_CACHE_HOME": ""},
            {"XDG_CACHE_HOME": "/xdg", "HF_HOME": "/hf"},
            {"TRANSFORMERS_CACHE": "/of/transformers"},
        ],
        ids=str,
    )
    def test_the_hub_cache_is_where_the_library_has_it(self, given: dict[str, str], tmp_path: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_", "XDG_", "TRANSFORMERS_"))}
        code = "import huggingface_hub.constants as c, ckpt_cli.hub_ids as a; print(c.HF_HUB_CACHE, a.hub_cache(), sep=chr(10))"
        environment = {**kept, "HOME": str(tmp_path), "FOLDER": "folder", "PYTHONPATH": str(ROOT), **given}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
        library, found = done.stdout.splitlines()
        assert found == str(Path(library))

    @pytest.mark.parametrize(("variable", "below"), [("HF_HOME", "hub"), ("HF_HUB_CACHE", ""), (None, ".cache/huggingface/hub")])
    def test_the_hub_cache_is_found_below_home(
        self, variable: str | None, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        if variable is not None:
            monkeypatch.setenv(variable, "~/hf")
        cache = tmp_path / ("hf" if variable else "") / below / "models--org--name"
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text("0" * 40)
        (cache / "snapshots" / ("0" * 40)).mkdir(parents=True)
        assert resolve_base("org/name") == cache / "snapshots" / ("0" * 40)

    def test_a_base_without_refs_main_is_the_only_snapshot(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        cache = tmp_path / "models--org--name"
        (tmp_path / "models--org--names").mkdir()
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "v1").write_text("0" * 40)
        with pytest.raises(NotFound) as caught:
            resolve_base("org/name")
        assert caught.value.hint == "did you mean org/names?"
        (cache / "snapshots" / ("0" * 40)).mkdir(parents=True)
        assert resolve_base("org/name") == cache / "snapshots" / ("0" * 40)
        (cache / "snapshots" / ("1" * 40)).mkdir(parents=True)
        with pytest.raises(NotFound, match="2 snapshots of org/name") as caught:
            resolve_base("org/name")
        assert caught.value.hint == f"pass the path of one of them, such as --base {cache / 'snapshots' / ('0' * 40)}"
        (cache / "refs" / "main").write_text("2" * 40)
        with pytest.raises(NotFound) as caught:
            resolve_base("org/name")
        assert caught.value.hint == "download it first, ckpt never does: hf download org/name"


ADDRESSES = [
    ("https://huggingface.co/org/name/tree/main", "hf download org/name --local-dir name"),
    ("huggingface.co/org/name", "hf download org/name --local-dir name"),
    ("s3:/bucket/run", "write it as s3://bucket/run"),
    ("https:/host/model.safetensors", "write it as https://host/model.safetensors"),
    ("file:///data/my%20run", "write it as /data/my run"),
    ("file://localhost/data/run", "write it as /data/run"),
    ("file:/data/run", "write it as /data/run"),
    ("local:///data/run", "write it as /data/run"),
    ("s3:///bucket/run", "write it as s3://bucket/run"),
]
"""Addresses, and what is advised instead of giving them."""


class TestAddresses:
    @pytest.mark.parametrize(
        ("address", "what"),
        [
            ("local:///data/run", "PATH is a local:// address, but ckpt takes paths"),
            ("s3:/bucket/run", "PATH is an s3: address with one slash"),
            ("s3:///bucket/run", "PATH is an s3: address without a bucket"),
            ("gs://", "PATH is a gs: address without a bucket"),
            ("hdfs:///user/run", "PATH is an hdfs: address without a host"),
            ("memory:///run", "PATH is a memory: address without a host"),
            ("lakefs:///run", "PATH is a lakefs: address without a host"),
        ],
    )
    def test_are_called_what_they_are(self, address: str, what: str) -> None:
        with pytest.raises(UsageError) as caught:
            ckpt_cli.detect(address)
        assert caught.value.message == what
        assert ("write it as" in (caught.value.hint or "")) == address.startswith(("local", "s3"))

    @pytest.mark.parametrize(("address", "advice"), ADDRESSES)
    def test_of_inputs_have_an_answer_of_their_own(self, address: str, advice: str) -> None:
        for call in (
            lambda: ckpt_cli.detect(address),
            lambda: ckpt_cli.merge(".", also=address),
            lambda: ckpt_cli.merge(".", base=address),
            lambda: ckpt_cli.merge(".", key_map=address),
            lambda: ckpt_cli.verify(".", against=address),
        ):
            with pytest.raises(UsageError) as caught:
                call()
            assert advice.split(" --local-dir")[0] in (caught.value.hint or "")
            assert caught.value.path == address
        with pytest.raises(UsageError) as caught:
            ckpt_cli.detect(address)
        assert advice in (caught.value.hint or "")

    @pytest.mark.parametrize(("address", "advice"), ADDRESSES)
    @pytest.mark.parametrize("command", COMMANDS)
    def test_have_the_same_answer_on_the_command_line(self, command: str, address: str, advice: str, tmp_path: Path) -> None:
        if command == "average":
            outcome = ckpt("average", address, address, "-o", tmp_path / "out")
        else:
            outcome = ckpt(*line(command, "RUN", address, tmp_path, tmp_path / "out"))
        assert outcome.code == 2
        assert advice in outcome.err.partition("  hint: ")[2]

    def test_are_named_by_their_scheme(self, run: Path) -> None:
        for address, said in (("s3://b/x", "an s3://"), ("gs://b/x", "a gs://"), ("hf://o/n", "an hf://"), ("wasb://b/x", "a wasb://")):
            with pytest.raises(UsageError, match=f"--output is {said} address, and ckpt writes local files only"):
                ckpt_cli.watch(run, address)
        for address, said in (("hf://o/n", "an hf://"), ("wasb://b/x", "a wasb://"), ("https://h/x", "an https://")):
            with pytest.raises(
                UsageError, match=f"--output is {said} address, and ckpt writes to local folders, s3://, gs:// and az:// only"
            ):
                ckpt_cli.merge(run, address)

    def test_nothing_opens_some(self) -> None:
        with pytest.raises(UsageError, match="nothing here opens nowhere:// addresses"):
            ckpt_cli.detect("nowhere://host/run")

    @pytest.mark.parametrize(
        ("address", "advice"),
        [
            ("hf://org/name", "write to a local folder, then: hf upload org/name FOLDER"),
            ("https://example.org/out", "write to a local folder, and copy it there"),
        ],
    )
    def test_of_outputs_make_no_folder(self, address: str, advice: str, run: Path, tmp_path: Path) -> None:
        before = tree(tmp_path)
        for words in (["merge", run], ["average", run, "--all"], ["extract-state", run]):
            outcome = ckpt(*words, "-o", address, cwd=tmp_path)
            assert outcome.code == 2
            assert "writes to local folders, s3://, gs:// and az:// only" in outcome.err
            assert advice in outcome.err
        with pytest.raises(UsageError):
            ckpt_cli.merge(run, Path(address))
        assert tree(tmp_path) == before

    def test_a_base_on_the_hub_is_named_by_its_id(self) -> None:
        with pytest.raises(UsageError) as caught:
            ckpt_cli.merge(".", base="https://huggingface.co/org/name")
        assert "hf download org/name, then pass org/name" in (caught.value.hint or "")
        for command in (["merge", "."], ["verify", "."], ["inspect", "."], ["average", ".", ".", "-o", "out"]):
            assert (
                "hint: download it first: hf download org/name, then pass org/name"
                in ckpt(*command, "--base", "https://huggingface.co/org/name").err
            )

    @pytest.mark.parametrize("name", ["a:b", "c:", "s3", "run:/x", "epoch=1-step=2.ckpt", "./s3:/x", "http"])
    def test_names_with_colons_are_names(self, name: str) -> None:
        assert given.path_text(name) == name


SPARSE = 12 << 30
"""Bytes of a tensor that no machine reads in seconds; it takes no room on the disk."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two models of one tensor, which is a hole in a file."""
    folder = tmp_path_factory.mktemp("large")
    if shutil.disk_usage(folder).free < 3 * SPARSE:
        pytest.skip("not enough room for the outputs")
    rows = SPARSE // 4096
    header = json.dumps({"w": {"dtype": "F32", "shape": [rows, 1024], "data_offsets": [0, SPARSE]}}).encode()
    header += b" " * (-len(header) % 8)
    for name in ("a", "b"):
        (folder / name).mkdir()
        with (folder / name / "model.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + SPARSE)
    yield folder
    shutil.rmtree(folder)


def _bytes_read(pid: int) -> int:
    """What a process has read so far, from disk or cache."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/io").read_text().split()[1])
    return 0


READING = {
    "verify --full": ("verify", "a", "--full"),
    "verify --sample": ("verify", "a", "--full", "--sample", "90%"),
    "verify --against": ("verify", "a", "--against", "b"),
    "verify --base": ("verify", "a", "--base", "b"),
    "merge": ("merge", "a", "-o", "out"),
    "merge --dtype": ("merge", "a", "-o", "out", "--dtype", "bf16"),
    "average": ("average", "a", "b", "-o", "out"),
}


class TestSignals:
    """One tensor is at work for many seconds: the end of a block counts, not that of the tensor."""

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
    @pytest.mark.parametrize("name", READING)
    def test_end_the_reading_of_a_large_tensor_at_once(self, name: str, number: signal.Signals, large: Path) -> None:
        command = [sys.executable, "-m", "ckpt_cli", *READING[name]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=large, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while _bytes_read(process.pid) < 200 << 20:  # the tensor is at work
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        started = time.monotonic()
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        took = time.monotonic() - started
        assert process.returncode == 128 + number
        assert f"ended by {number.name}" in said
        assert took < 3  # 0.1 to 1 s on an idle machine; a tensor takes far longer
        assert sorted(path.name for path in large.iterdir()) == ["a", "b"]


class TestThreads:
    def test_give_results_in_order(self) -> None:
        assert in_threads(lambda number: number * 2, range(1000), 4, Stop()) == [number * 2 for number in range(1000)]

    @pytest.mark.parametrize("place", [0, 3, 999])
    def test_the_first_error_stops_all_and_is_the_one_that_is_told(self, place: int) -> None:
        stop, begun = Stop(), []

        def work(number: int) -> None:
            begun.append(number)
            if number == place:
                raise ValueError(number)
            if number > place or place == 999:
                return
            for _ in range(1000):  # as a large tensor, of which one block takes 10 ms
                stop.check()
                time.sleep(0.01)

        started = time.monotonic()
        with pytest.raises(ValueError, match=str(place)):
            in_threads(work, range(1000), 4, stop)
        assert time.monotonic() - started < 5
        assert place == 999 or len(begun) < 1000

    def test_an_interrupt_of_the_caller_stops_them(self) -> None:
        stop, ended = Stop(), []

        def work(_: int) -> None:
            try:
                while True:
                    stop.check()
                    time.sleep(0.01)
            except Stopped:
                ended.append(1)
                raise

        def items() -> Iterator[int]:
            yield from range(3)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            in_threads(work, items(), 3, stop)
        assert 0 < len(ended) <= 3

    def test_a_sample_is_never_empty_and_the_same_every_time(self, tmp_path: Path) -> None:
        save_file({"w": torch.ones(4 << 20)}, tmp_path / "model.safetensors")
        reads = [ckpt_cli.verify(tmp_path, sample=share).bytes_read for share in (1e-9, 1e-9, 0.5, 1.0)]
        assert reads[:2] == [1 << 20, 1 << 20]
        assert 0 < reads[2] < reads[3] == 16 << 20


QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.usefixtures("own_child")
class TestTheChildThatAsksTransformers:
    @pytest.fixture
    def temporary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "tmp"
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr("tempfile.tempdir", None)
        return folder

    @pytest.mark.slow
    @pytest.mark.parametrize("question", ["tensors", "rules"])
    def test_leaves_nothing_in_the_temporary_folder(
        self, question: transformers_child.Question, temporary: Path, asked_in_forks: Path | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And says what forks say, which answer in most tests."""
        config = {**QWEN, "intermediate_size": 8, "num_key_value_heads": 2, "vocab_size": 16}
        answer = transformers_child._run_child(question, json.dumps(config))
        assert answer is not None
        assert "error" not in answer
        assert tree(temporary) == []
        monkeypatch.setenv(VARIABLE, str(asked_in_forks))
        assert transformers_child._run_child(question, json.dumps(config)) == answer

    def test_makes_its_own_temporary_files_where_they_are_removed(self, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = subprocess.Popen

        def started(_: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[str]:
            for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                assert Path(env[name]).parent == temporary
                (Path(env[name]) / f"of {name}").mkdir()
            return plain([sys.executable, "-c", "print('{\"a\": 1}')"], env=env, **options)

        monkeypatch.setattr(subprocess, "Popen", started)
        assert transformers_child._run_child("rules", "{}") == {"a": 1}
        assert tree(temporary) == []

    def test_is_no_error_without_a_temporary_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise FileNotFoundError(2, "No usable temporary directory found")

        monkeypatch.setattr("tempfile.TemporaryDirectory", fail)
        assert transformers_child._run_child("rules", "{}") == {
            "unasked": "its process failed: [Errno 2] No usable temporary directory found"
        }

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=["SIGTERM", "SIGINT", "SIGKILL"])
    def test_ends_with_the_command(self, number: signal.Signals, tmp_path: Path, temporary: Path) -> None:
        """The child sleeps where it would import transformers; it must be gone soon after its parent."""
        package = tmp_path / "package"
        (package / "transformers").mkdir(parents=True)
        (package / "transformers" / "__init__.py").write_text(
            f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
        )
        (package / "transformers-5.0.0.dist-info").mkdir()
        (package / "transformers-5.0.0.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 5.0.0\n")
        model = tmp_path / "model"
        model.mkdir()
        save_file({"w": torch.ones(2)}, model / "model.safetensors")
        (model / "config.json").write_text(json.dumps(QWEN))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(package)]), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "ckpt_cli", "verify", str(model)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        pid = tmp_path / "pid"
        for _ in range(1000):
            if pid.is_file() and pid.read_text():
                break
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        child = int(pid.read_text())
        process.send_signal(number)
        process.communicate(timeout=20)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        for _ in range(100):
            if not _alive(child):
                break
            time.sleep(0.05)
        assert not _alive(child)
        if number != signal.SIGKILL:
            assert tree(temporary) == []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


REOPENING: dict[str, Callable[[FileSource], object]] = {
    "read": lambda source: source.read(0, 1),
    "read_at": lambda source: source.read_at(0, memoryview(bytearray(1))),
    "descriptor": lambda source: source.descriptor().__enter__(),
}


class TestAFileThatIsExchanged:
    """Under the same name, with the same size and time: only the inode tells."""

    @pytest.mark.parametrize("how", REOPENING)
    def test_is_refused_when_its_descriptor_is_opened_again(self, how: str, tmp_path: Path) -> None:
        for name in ("a", "b", "other"):
            (tmp_path / name).write_bytes(name[:1].encode() * 100)
        with Files(limit=1) as files:
            first, second = files.source(tmp_path / "a"), files.source(tmp_path / "b")
            assert second.read(0, 1) == b"b"  # the descriptor of the first is closed by now
            status = os.stat(tmp_path / "a")
            os.utime(tmp_path / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
            os.replace(tmp_path / "other", tmp_path / "a")
            assert os.stat(tmp_path / "a").st_mtime_ns == status.st_mtime_ns
            with pytest.raises(SourceChanged) as caught:
                REOPENING[how](first)
            assert caught.value.path == str(tmp_path / "a")
            with pytest.raises(SourceChanged):
                files.check_unchanged()

    def test_what_was_refused_is_closed(self, tmp_path: Path) -> None:
        for name in ("a", "b", "other"):
            (tmp_path / name).write_bytes(b"x" * 100)
        with Files(limit=1) as files:
            first, _ = files.source(tmp_path / "a"), files.source(tmp_path / "b")
            os.replace(tmp_path / "other", tmp_path / "a")
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(10):
                with pytest.raises(SourceChanged):
                    first.read(0, 1)
            assert len(os.listdir("/proc/self/fd")) == before


class TestValuesThatAreNotFinite:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    @pytest.mark.parametrize(("value", "nan", "infinite"), [(float("inf"), 0, 1), (float("-inf"), 0, 1), (float("nan"), 1, 0)])
    def test_are_found_in_every_dtype(self, dtype: torch.dtype, value: float, nan: int, infinite: int, tmp_path: Path) -> None:
        tensor = torch.randn(64, 64).to(dtype)
        tensor[3, 5] = value
        save_file({"w": tensor}, tmp_path / "model.safetensors")
        result = ckpt_cli.verify(tmp_path, full=True)
        (found,) = [item for item in result.findings if item.code == "non-finite"]
        assert (found.numbers["nan"], found.numbers["infinite"], result.exit_code) == (nan, infinite, 1)

    def test_the_largest_finite_bfloat16_is_none(self, tmp_path: Path) -> None:
        extremes = torch.tensor([0x7F7F, 0xFF7F, 0x0001, 0x8000], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        save_file({"w": extremes}, tmp_path / "model.safetensors")
        assert [item.code for item in ckpt_cli.verify(tmp_path, full=True).findings if item.code == "non-finite"] == []

    def test_a_nan_by_any_bits_is_one(self, tmp_path: Path) -> None:
        bits = torch.tensor([0x7F81, 0xFFC0, 0x7FFF, 0x7F80, 0xFF80], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        save_file({"w": bits}, tmp_path / "model.safetensors")
        (found,) = [item for item in ckpt_cli.verify(tmp_path, full=True).findings if item.code == "non-finite"]
        assert (found.numbers["nan"], found.numbers["infinite"]) == (3, 2)

    @pytest.mark.parametrize(
        ("integer", "dtype", "bits"), [("int16", "bfloat16", 0x7F81), ("int16", "float16", 0x7C01), ("int32", "float32", 0x7F800001)]
    )
    def test_a_signalling_nan_makes_no_noise(self, integer: str, dtype: str, bits: int, tmp_path: Path) -> None:
        for number, name in enumerate("ab"):
            tensor = torch.ones(64).to(getattr(torch, dtype))
            tensor.view(getattr(torch, integer))[3] = bits + number
            save_file({"w": tensor}, (tmp_path / name).with_suffix(".safetensors"))
        a, b = (tmp_path / f"{name}.safetensors" for name in "ab")
        ckpt_cli.verify(a, full=True)
        ckpt_cli.verify(a, against=b)
        ckpt_cli.verify(a, base=b)
        ckpt_cli.merge(a, tmp_path / "merged", dtype="fp32", verify=True)
        ckpt_cli.average([a, b], tmp_path / "averaged", allow_non_finite=True)


class TestWeightsThatTheIndexDoesNotList:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        mapping = {}
        for number in (1, 2):
            name = f"model-0000{number}-of-00002.safetensors"
            save_file({f"w{number}": torch.full((4, 4), float(number))}, folder / name, {"format": "pt"})
            mapping[f"w{number}"] = name
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 128}, "weight_map": mapping}))
        return folder

    @pytest.mark.parametrize(
        ("name", "code"),
        [
            ("model.safetensors", "stale-file"),
            ("value_head.safetensors", "other-weights"),
            ("consolidated.00.pth", "other-weights"),
            ("pytorch_model.bin", "other-model"),
        ],
    )
    def test_are_said_by_verify_and_never_read_for_the_model(self, name: str, code: str, folder: Path, tmp_path: Path) -> None:
        save_file({"w1": torch.full((4, 4), 9.0), "more": torch.ones(2)}, folder / name, {"format": "pt"})
        found = [(item.code, item.file) for item in ckpt_cli.verify(folder).findings]
        assert (code, name) in found
        ckpt_cli.merge(folder, tmp_path / "out")
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert {key: tensor.unique().tolist() for key, tensor in written.items()} == {"w1": [1.0], "w2": [2.0]}

    @pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "model-00001-of-00003.safetensors"])
    def test_parts_that_the_index_does_not_list_are_refused(self, name: str, folder: Path, tmp_path: Path) -> None:
        save_file({"w1": torch.full((4, 4), 9.0)}, folder / name, {"format": "pt"})
        assert ("stale-file", name) in [(item.code, item.file) for item in ckpt_cli.verify(folder).findings]
        for command in (ckpt_cli.merge, lambda path, out: ckpt_cli.average([path, path], out)):
            with pytest.raises(Inconsistent, match=name):
                command(folder, tmp_path / "out")

    def test_the_index_alone_decides(self, folder: Path) -> None:
        assert [item.code for item in ckpt_cli.verify(folder).findings if item.severity != "info"] == ["lacks-config"]


class TestPrefixesOfWrappers:
    @pytest.mark.parametrize(
        "prefix",
        [
            "module.",
            "module.module.",
            "module.module.module.",
            "_orig_mod.module.",
            "module._orig_mod.module.",
            "module._fsdp_wrapped_module.",
        ],
    )
    def test_go_away_however_often_they_were_put_there(self, prefix: str, tmp_path: Path) -> None:
        state = {f"{prefix}{name}": torch.ones(2, 2) for name in ("layers.0.weight", "head.weight")}
        (tmp_path / "run").mkdir()
        torch.save(state, tmp_path / "run" / "model_world_size_1_rank_0.pt")
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"layers.0.weight", "head.weight"}

    def test_a_part_of_the_model_that_is_called_module_keeps_its_name(self, tmp_path: Path) -> None:
        state = {"module.weight": torch.ones(2, 2), "head.weight": torch.ones(2, 2)}
        (tmp_path / "run").mkdir()
        torch.save(state, tmp_path / "run" / "model_world_size_1_rank_0.pt")
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()


class TestWithoutAsserts:
    """CI runs a part of these tests once under PYTHONOPTIMIZE=1: nothing in ckpt may hang on an ``assert``."""

    def test_those_of_the_tests_count(self) -> None:
        nothing: list[int] = []
        with pytest.raises(AssertionError):
            assert nothing

    def test_commands_run_like_the_tests(self) -> None:
        done = subprocess.run([sys.executable, "-c", "print(__debug__)"], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(sys.flags.optimize == 0)
