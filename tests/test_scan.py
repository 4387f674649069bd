"""`ckpt scan`: pickles are found wherever they are, what loads without danger is clean, and the documents have their shape."""

from __future__ import annotations

import bz2
import collections
import datetime
import gzip
import io
import json
import lzma
import os
import pickle
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from torch.distributed import fsdp

import ckpt_cli
from ckpt_cli.cli.screens.scan import scan_result
from ckpt_cli.errors import NotFound, Unreadable
from ckpt_cli.results.scan import ScanResult
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt
from tests.golden_screens import WIDTHS, check_golden, screen
from tests.payloads import Runs, calling, in_dict, pickled, repacked, torch_file, zipped

EXAMPLE = ROOT / "examples" / "tiny-run"
EVIL = calling("posix", "system", "touch marker")


def found(path: Path, data: bytes | None = None) -> list[tuple[str, str]]:
    """Severity and name of what is found in a file."""
    if data is not None:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(data)
    return [(finding.severity, finding.name) for finding in ckpt_cli.scan(path).findings]


SYSTEM = ("dangerous", "posix.system")


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.numbers, self.flags, self.by_name = torch.nn.Linear(2, 2), [1, 2], [True], {"a": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.numbers[0] * int(self.flags[0]) * self.by_name["a"]


class TestCheckpointsOfAllTrainers:
    def test_are_clean(self, data: Path) -> None:
        """Five versions of torch, and every framework whose files are here."""
        result = ckpt_cli.scan(data)
        assert (result.findings, result.not_scanned, result.incomplete) == ((), (), ())
        assert result.pickles > 8_000
        assert result.files == sum(path.is_file() for path in data.rglob("*"))

    @pytest.mark.parametrize("version", ["2.3.1", "2.4.1", "2.6.0", "2.9.1", "2.13.0"])
    def test_no_file_of_any_torch_version_is_passed_over(self, version: str, data: Path) -> None:
        files = sorted((data / f"torch-{version}").rglob("*.pt"))
        assert files
        for path in files:
            result = ckpt_cli.scan(path)
            assert result.pickles >= 1
            assert set(result.names) >= {"torch._utils._rebuild_tensor_v2"} or "optim" in path.name

    def test_every_item_of_a_distcp_is_looked_at(self, data: Path) -> None:
        for path in sorted((data / "dcp" / "2.13.0" / "fsdp2").glob("*.distcp")):
            assert ckpt_cli.scan(path).pickles == path.read_bytes().count(b"/data.pklFB") > 1

    def test_what_else_people_pickle(self, tmp_path: Path) -> None:
        values: list[Any] = [
            {"when": datetime.datetime.now(datetime.timezone.utc), "path": Path("x"), "numbers": {1, 2}, "no": type(None)},
            [np.arange(3), np.float32(2), np.dtype("f8"), np.random.default_rng(1), np.random.RandomState(1)],
            collections.defaultdict(list, {"a": [complex(1, 2), slice(1, 2), range(3), bytearray(b"x"), frozenset("ab")]}),
            [time.gmtime(0), fsdp.MixedPrecision(), fsdp.CPUOffload()],
            [torch.ones(3), torch.nn.Parameter(torch.ones(2)), torch.device("cpu"), torch.float8_e4m3fn, torch.ones(2).to_sparse()],
        ]
        for protocol in range(6):
            for number, value in enumerate(values):
                assert found(tmp_path / f"{number}.pkl", pickle.dumps(value, protocol)) == []
                assert found(tmp_path / f"{number}.pt", torch_file(value, pickle_protocol=max(protocol, 1))) == []
        for error in (UserWarning("x"), TimeoutError("x"), AttributeError("x")):
            assert found(tmp_path / "error.pkl", pickle.dumps(error, 4)) == []

    @pytest.mark.filterwarnings("ignore")
    def test_archives_of_torchscript(self, tmp_path: Path) -> None:
        """What these pickles call in torch returns what it is given; the classes come with code of their own, which nobody knows."""
        torch.jit.save(torch.jit.script(Scripted()), tmp_path / "model.pt")
        assert {severity for severity, _ in found(tmp_path / "model.pt")} == {"unknown"}
        assert all(name.startswith("__torch__.") for _, name in found(tmp_path / "model.pt"))
        for name in ("build_intlist", "build_tensorlist", "build_doublelist", "build_boollist", "build_tensor_from_id", "restore_type_tag"):
            assert found(tmp_path / "one.pkl", pickled(calling("torch.jit._pickle", name, "1"))) == []
        assert found(tmp_path / "one.pkl", pickled(calling("torch.jit", "_pickle.torch.load", "x")))[0][0] == "dangerous"

    def test_what_is_no_pickle(self, tmp_path: Path) -> None:
        texts = [
            "",
            "cat\ndog\nbird\n",
            "import os\nos.system('x')\n",
            "(a) text\n",
            "Name\nIt\nVersion\n",
            "c" * 5_000,
            "]}).\n",
            '{"a": 1}',
        ]
        for number, content in enumerate(texts):
            result = ckpt_cli.scan(_written(tmp_path / f"{number}.txt", content.encode()))
            assert (result.findings, result.not_scanned) == ((), ())
        generator = np.random.default_rng(7)
        for _ in range(500):
            assert found(tmp_path / "noise.bin", generator.bytes(1_000)) == []


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _npy(content: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, content, allow_pickle=True)
    return buffer.getvalue()


def _tar(content: bytes, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as archive:
        entry = tarfile.TarInfo("../../pickle")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _nested(protocol: int) -> bytes:
    return pickle.dumps({"inner": pickled(EVIL)}, protocol)


PLACES: dict[str, bytes] = {
    "model.pt": zipped(in_dict(EVIL)),
    "model.pth": torch_file(Runs(os.system, "touch marker"), _use_new_zipfile_serialization=False),
    "pytorch_model.bin": zipped(in_dict(EVIL)),
    "last.ckpt": zipped(in_dict(EVIL)),
    "data.pkl": in_dict(EVIL),
    "no extension": in_dict(EVIL),
    "model.safetensors": zipped(in_dict(EVIL)),
    "weights.txt": zipped(in_dict(EVIL), "other/name.jpg"),
    "zip in a zip": zipped(zipped(in_dict(EVIL)), "archive/data/7"),
    "deflated.pt": zipped(in_dict(EVIL), compression=8),
    "bzip2.pt": zipped(in_dict(EVIL), compression=12),
    "nested.pkl": _nested(4),
    "nested 2.pkl": _nested(2),
    "a pickle in a pickle in a pickle": pickle.dumps([pickle.dumps([_nested(2)])]),
    "tensor in a plain pickle": pickle.dumps([torch.ones(2), {"x": zipped(in_dict(EVIL))}]),
    "second pickle": pickle.dumps({}) + in_dict(EVIL),
    "third pickle": pickle.dumps(1) + pickle.dumps(2) + b"cposix\nsystem\n(S'touch marker'\ntR.",
    "data.pkl.gz": gzip.compress(in_dict(EVIL)),
    "data.pkl.zst": zstandard.compress(in_dict(EVIL)),
    "second frame.zst": zstandard.compress(zipped(pickle.dumps({}))) + zstandard.compress(zipped(in_dict(EVIL))),
    "data.pkl.bz2": bz2.compress(in_dict(EVIL)),
    "data.pkl.xz": lzma.compress(in_dict(EVIL)),
    "model.tar": _tar(in_dict(EVIL)),
    "old.tar": _tar(in_dict(EVIL), format=tarfile.GNU_FORMAT),
    "objects.npy": _npy(np.array([Runs(os.system, "touch marker")], dtype=object)),
}


class TestPickles:
    @pytest.mark.parametrize("name", PLACES)
    def test_are_found_wherever_they_are(self, name: str, tmp_path: Path) -> None:
        assert SYSTEM in found(tmp_path / name, PLACES[name])
        assert ckpt("scan", tmp_path).code == 1
        assert not (tmp_path / "marker").exists()

    def test_offsets_lead_to_the_opcode(self, tmp_path: Path) -> None:
        for name in ("model.pt", "data.pkl", "zip in a zip", "nested.pkl", "second pickle", "model.tar", "model.pth"):
            path = _written(tmp_path / "file", PLACES[name])
            (finding,) = [finding for finding in ckpt_cli.scan(path).findings if finding.name == "posix.system"]
            assert finding.position is not None
            assert PLACES[name][finding.position :].startswith(b"cposix\nsystem\n")
            assert finding.called
        assert ckpt_cli.scan(_written(tmp_path / "z", PLACES["data.pkl.gz"])).findings[0].position is None

    def test_that_scanners_do_not_list(self, data: Path, tmp_path: Path) -> None:
        """DCP's .metadata, metadata.pkl and others, with one more value behind everything that is expected."""
        kinds: dict[str, Path] = {}
        for path in sorted(data.rglob("*")):
            if path.is_file() and path.read_bytes()[-1:] == b"." and path.read_bytes()[:1] == b"\x80":
                kinds.setdefault(path.name, path)
        assert {".metadata", "metadata.pkl"} <= kinds.keys()
        for path in kinds.values():
            assert found(tmp_path / path.name, path.read_bytes()[:-1] + b"0" + EVIL + b".") == [SYSTEM], path

    @pytest.mark.parametrize("folder", ["deepspeed", "megatron", "torch-checkpointing", "layouts"])
    def test_in_the_archives_of_every_trainer(self, folder: str, data: Path, tmp_path: Path) -> None:
        """One file of each kind of name, with a value more in its pickle."""
        kinds: dict[str, Path] = {}
        for path in sorted((data / folder).rglob("*")):
            if path.is_file() and path.read_bytes()[:4] == b"PK\x03\x04" and path.suffix != ".distcp":
                kinds.setdefault("".join(char for char in path.name if not char.isdigit()), path)
        assert kinds
        for path in kinds.values():
            changed = repacked(path.read_bytes(), lambda name, old: old[:-1] + b"0" + EVIL + b"." if name.endswith("data.pkl") else old)
            assert found(tmp_path / path.name, changed) == [SYSTEM], path

    def test_in_an_item_of_a_distcp(self, data: Path, tmp_path: Path) -> None:
        original = (data / "dcp" / "2.13.0" / "fsdp2" / "__1_0.distcp").read_bytes()
        items = [zipped(in_dict(EVIL)), zipped(pickle.dumps({}))]
        for order in (
            [original, *items],
            [*items, original],
            [original, items[0], original],
            [b"raw tensor bytes" * 100, items[0], original],
        ):
            result = ckpt_cli.scan(_written(tmp_path / "__1_0.distcp", b"".join(order)))
            assert [(finding.severity, finding.name) for finding in result.findings] == [SYSTEM]

    def test_nothing_is_run(self, tmp_path: Path) -> None:
        """All of the above in one folder, with an audit hook that sees look-ups, processes, sockets and unexpected imports."""
        for number, content in enumerate(PLACES.values()):
            (tmp_path / "run").mkdir(exist_ok=True)
            (tmp_path / "run" / str(number)).write_bytes(content)
        program = (
            "import json, sys\n"
            "import ckpt_cli\n"
            "seen = []\n"
            "def hook(event, args):\n"
            "    if event.startswith(('pickle', 'os.system', 'os.exec', 'os.fork', 'os.posix_spawn', 'subprocess', 'socket')):\n"
            "        seen.append(event)\n"
            "sys.addaudithook(hook)\n"
            "result = ckpt_cli.scan(sys.argv[1])\n"
            "print(json.dumps([seen, len(result.findings), sorted({'torch', 'pickle', 'numpy'} & set(sys.modules))]))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "run")],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        seen, findings, modules = json.loads(done.stdout)
        assert (seen, modules) == ([], [])
        assert findings >= len(PLACES)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


class TestTheCommand:
    def test_a_clean_folder_says_so_in_a_line(self) -> None:
        outcome = ckpt("scan", EXAMPLE)
        assert outcome.code == 0
        assert "clean: 28 pickles in 34 files, 23 kinds of calls, all expected" in outcome.out
        assert ckpt("scan", EXAMPLE, "-q").out.count("\n") == 1

    def test_what_is_unknown_is_a_warning(self, tmp_path: Path) -> None:
        (tmp_path / "a.pt").write_bytes(zipped(in_dict(calling("my_project.config", "Config"))))
        assert ckpt("scan", tmp_path).code == 0
        strict = ckpt("scan", tmp_path, "--strict")
        assert strict.code == 1
        assert "my_project.config.Config" in strict.err
        assert "warning: a.pt: archive/data.pkl, byte" in ckpt("scan", tmp_path, "-q").err

    def test_json_and_sarif(self, tmp_path: Path) -> None:
        (tmp_path / "a b.pt").write_bytes(zipped(in_dict(EVIL + b"0" + calling("mine", "Thing"))))
        (tmp_path / "x.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(100))
        outcome = ckpt("scan", tmp_path, "--json")
        document = json.loads(outcome.out)
        assert (outcome.code, document["status"], document["exit_code"]) == (1, "findings", 1)
        assert ScanResult.model_validate(document["data"]).of_severity("dangerous")[0].name == "posix.system"
        sarif = ckpt("scan", tmp_path, "--sarif")
        assert sarif.code == 1
        _check_sarif(json.loads(sarif.out))
        results = json.loads(sarif.out)["runs"][0]["results"]
        assert sorted(result["ruleId"] for result in results) == ["dangerous-call", "not-scanned", "unknown-call"]
        assert results[0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b.pt"
        assert ckpt("scan", tmp_path, "--json", "--sarif").code == 2
        _check_sarif(json.loads(ckpt("scan", EXAMPLE, "--sarif").out))

    def test_code_of_a_model_is_named_as_information(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling_x.X"}}))
        (tmp_path / "modeling_x.py").write_text("from .helpers import y\nraise SystemExit\n")
        (tmp_path / "helpers.py").write_text("")
        (tmp_path / "train.py").write_text("")
        result = ckpt_cli.scan(tmp_path)
        assert (result.custom_code, result.exit_code) == (("helpers.py", "modeling_x.py"), 0)
        assert "modeling_x.py" in ckpt("scan", tmp_path).out

    def test_what_cannot_be_read_is_never_clean(self, tmp_path: Path) -> None:
        (tmp_path / "loop").symlink_to("loop")
        (tmp_path / "lfs.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        (tmp_path / "up").symlink_to("..")
        os.mkfifo(tmp_path / "fifo")
        result = ckpt_cli.scan(tmp_path)
        assert sorted(item.file for item in result.not_scanned) == ["lfs.bin", "loop"]
        assert result.files == 1
        assert ckpt("scan", tmp_path, "--strict").code == 1
        with pytest.raises(Unreadable):
            ckpt_cli.scan(tmp_path / "fifo")
        with pytest.raises(NotFound):
            ckpt_cli.scan(tmp_path / "none")

    def test_names_from_files_are_safe_for_a_terminal(self, tmp_path: Path) -> None:
        body = b"\x80\x04" + b"\x8c\x09a\x1b[31mred" + b"\x8c\x05x\ny\rz" + b"\x93)R."
        (tmp_path / "a\x1b[2Jb\n.pt").write_bytes(zipped(body, "archive/\x1b[5m/data.pkl"))
        for options in ((), ("-v",), ("--json",), ("--sarif",), ("-q",)):
            outcome = ckpt("scan", tmp_path, *options)
            assert "\x1b" not in outcome.out + outcome.err
            assert "\r" not in outcome.out + outcome.err

    def test_work_and_memory_are_bounded(self, tmp_path: Path) -> None:
        """Bombs: values, marks, memo indices, lengths, frames of compressed zeros, archives in archives."""
        bombs: dict[str, bytes] = {
            "values": b"\x80\x02" + b"N" * 5_000_000 + b".",
            "marks": b"\x80\x02" + b"(" * 5_000_000 + b".",
            "memo": b"\x80\x02Nr\xff\xff\xff\x7fp999999999999\n.",
            "length": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
            "tuples": b"\x80\x02N" + b"\x85" * 3_000_000 + b"}Ns.",
            "zeros.zst": zstandard.compress(bytes(1 << 30)),
            "zeros.gz": gzip.compress(bytes(1 << 27)),
            "names": b"\x80\x02" + b"cmine\nThing\n0" * 200_000 + b"N.",
        }
        for name, content in bombs.items():
            (tmp_path / name).write_bytes(content)
        program = (
            "import resource, sys\nresource.setrlimit(resource.RLIMIT_DATA, (600 << 20,) * 2)\n"
            "from ckpt_cli.cli import main\nmain(['scan', sys.argv[1], '-q'])\n"
        )
        start = time.perf_counter()
        command = [sys.executable, "-c", program, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "mine.Thing" in done.stderr
        assert "values: " in done.stderr
        assert time.perf_counter() - start < 120


def _check_sarif(document: dict[str, Any]) -> None:
    """What the SARIF 2.1.0 specification requires of the parts that are used."""
    assert document["version"] == "2.1.0"
    assert document["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = document["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"]
    rules = [rule["id"] for rule in driver["rules"]]
    assert len(set(rules)) == len(rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        for location in result["locations"]:
            place = location["physicalLocation"]
            assert " " not in place["artifactLocation"]["uri"]
            assert all(place["region"][key] >= 0 for key in place.get("region", ()))


@pytest.mark.parametrize("width", WIDTHS, ids=str)
class TestScreens:
    def show(self, monkeypatch: pytest.MonkeyPatch, width: int | None, name: str, path: Path) -> None:
        monkeypatch.chdir(path.parent)
        result = ckpt_cli.scan(path.name)
        check_golden(name, width, screen(monkeypatch, width, lambda s: scan_result(result, s)))

    def test_clean(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        self.show(monkeypatch, width, "scan", EXAMPLE)

    def test_dangerous(self, monkeypatch: pytest.MonkeyPatch, width: int | None, tmp_path: Path) -> None:
        folder = tmp_path / "download"
        folder.mkdir()
        (folder / "pytorch_model.bin").write_bytes(zipped(in_dict(EVIL + b"0" + EVIL + b"0" + calling("builtins", "eval", "1"))))
        (folder / ".metadata").write_bytes(in_dict(calling("importlib", "import_module", "x") + b"0" + calling("trainer.config", "Config")))
        (folder / "optimizer.pt").write_bytes(zipped(in_dict(calling("trainer.config", "Config")))[:-30])
        (folder / "weights.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(50))
        (folder / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_x.X"}}')
        (folder / "modeling_x.py").write_text("")
        self.show(monkeypatch, width, "scan-dangerous", folder)
