"""What is fed with mutants: every parser on its own, and checkpoints of every kind in which one file is a mutant."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch  # noqa: F401 - writing state imports it, which takes longer than a mutant may

import ckpt_cli
from ckpt_cli.errors import CkptError
from ckpt_cli.files.pickle_nodes import below, describe
from ckpt_cli.files.pickle_reader import load_pickle
from ckpt_cli.files.pickle_template import Templates
from ckpt_cli.files.safetensors_file import parse_json, read_header
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.files.zip_archive import ZipMap
from ckpt_cli.formats.dcp.metadata import read_catalog
from ckpt_cli.scanning.blobs import Held
from ckpt_cli.scanning.containers import Found, pickles_in
from ckpt_cli.scanning.severity import severity
from ckpt_cli.tensors.plain_values import ValueReader
from tests.fuzzing.mutations import changed, changed_bytes

CASES = (
    "layouts/verl-run/run", "layouts/lmms-run/run", "layouts/accelerate/run", "layouts/torchtitan/run/checkpoint", "layouts/olmo-core/run",
    "layouts/lightning/fabric", "layouts/dcp-options/zstd", "layouts/dcp-options/hub_shards", "layouts/dcp-odd-tensors/dcp",
    "layouts/plain-files/hub", "layouts/plain-files/legacy", "layouts/plain-files/nested", "layouts/verl-lora/lora_only",
    "layouts/bagel-runs/fork_ranks", "deepspeed/z0-bf16-w2/run", "deepspeed/z1-bf16-w2/run", "deepspeed/z2-bf16-w2-bf16master/run",
    "deepspeed/z3-bf16-w2/run", "deepspeed/pipe-z1-bf16-pp2/run", "deepspeed/universal-z3-w2/run", "megatron/llama-tp2/checkpoint",
    "megatron/qwen2-0.12-dist/checkpoint", "megatron/legacy-qwen2-te-tp2/checkpoint", "torch-checkpointing/fsdp-2/run/checkpoint/step-3",
    "torch-checkpointing/st-fsdp-4/run/checkpoint/step-3", "torch-2.13.0/fsdp2_tp", "dcp/2.13.0/fsdp2_tp",
)  # fmt: skip
"""Folders of the unpacked archives of tests/data."""

LARGE = 1 << 18
SMALL = 1 << 15
"""Files of checkpoints, and of single parsers, above this take most of the time and have few places that matter."""


@dataclass(frozen=True)
class Target:
    """``run`` parses a mutant; ``seeds`` are what mutants are made of."""

    name: str
    seeds: tuple[bytes, ...]
    change: Callable[[bytes, random.Random], bytes]
    run: Callable[[bytes], object]


class Memory:
    """Bytes as a readable source."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]


def _pickle(data: bytes) -> None:
    root, _ = load_pickle(data)
    pending, seen = [root], set[int]()
    while pending:
        node = pending.pop()
        if id(node) not in seen:
            seen.add(id(node))
            _quietly(lambda node=node: describe(node))
            pending += below(node)


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except CkptError:
        return


def _templates(data: bytes) -> None:
    """A mutant between honest ones must give what the reader gives alone."""
    templates = Templates(least=0)
    half = data[: len(data) // 2]
    for each in (data, data, half, data):
        _quietly(lambda each=each: templates.load(each))


def _zip(data: bytes) -> None:
    archive = ZipMap(Memory(data))
    for name in list(archive.members)[:50]:
        _quietly(lambda name=name: archive.read(name, 1 << 20))


def _scan(data: bytes) -> None:
    for item in pickles_in(Held(data, len(data))):
        if isinstance(item, Found):
            for name in item.trace.names:
                severity(name)


def _torch_file(path: Path) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        path.write_bytes(data)
        with Files() as files:
            file = TorchFile(files.source(path))
            reader = ValueReader(file)
            _quietly(lambda: reader.read(file.root))
            pending, seen = [file.root], set[int]()
            while pending:
                node = pending.pop()
                if id(node) not in seen:
                    seen.add(id(node))
                    _quietly(lambda node=node: file.tensor(node))
                    pending += below(node)

    return run


def _dcp(folder: Path) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        (folder / ".metadata").write_bytes(data)
        with Files() as files:
            read_catalog([folder], files)

    return run


def _safetensors(path: Path) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        path.write_bytes(data)
        with Files() as files:
            read_header(files.source(path))

    return run


def parsers(data: Path, work: Path) -> Iterator[Target]:
    """One target for each parser; ``data`` are the unpacked archives, ``work`` is an empty folder."""
    (work / "dcp").mkdir()
    files = sorted(path for path in data.rglob("*") if path.is_file() and 0 < path.stat().st_size < SMALL)
    contents = {path: path.read_bytes() for path in files}
    archives = [content for content in contents.values() if content.startswith(b"PK\x03\x04")][::40]
    catalogs = [content for path, content in contents.items() if path.name == ".metadata"][::5]
    pickled = [content for content in contents.values() if content[:1] == b"\x80" and content[-1:] == b"."][::9]
    headers = [content for path, content in contents.items() if path.suffix == ".safetensors"][::7]
    texts = [content for path, content in contents.items() if path.suffix == ".json"][::7]
    yield Target("pickle", tuple(pickled), changed_bytes, _pickle)
    yield Target("pickle templates", tuple(each for each in pickled if len(each) < 20_000), changed_bytes, _templates)
    yield Target("zip map", tuple(archives), changed_bytes, _zip)
    yield Target("torch file", tuple(archives), changed, _torch_file(work / "file.pt"))
    yield Target("DCP metadata", tuple(catalogs), changed_bytes, _dcp(work / "dcp"))
    yield Target("safetensors", tuple(headers), changed, _safetensors(work / "file.safetensors"))
    yield Target("JSON", tuple(texts), changed_bytes, parse_json)
    yield Target("scan", (*archives, *pickled), changed, _scan)


class Checkpoint:
    """A copy of a checkpoint in which one file at a time is a mutant, read by the commands that plan without reading weights."""

    def __init__(self, source: Path, work: Path) -> None:
        self.folder = Path(shutil.copytree(source, work / "_".join(source.parts[-4:]), symlinks=True))
        found = [path for path in sorted(self.folder.rglob("*")) if path.is_file() and not path.is_symlink()]
        self.files = [path for path in found if 0 < path.stat().st_size < LARGE and path.suffix not in (".txt", ".md", ".py")]

    def mutants(self, source: random.Random) -> Iterator[tuple[bytes, Callable[[], None]]]:
        """Endless: what a file is changed to, and what reads it then."""
        while True:
            path = source.choice(self.files)
            data = path.read_bytes()
            mutant = changed(data, source)

            def run(path: Path = path, data: bytes = data, mutant: bytes = mutant) -> None:
                path.write_bytes(mutant)
                try:
                    out = self.folder.parent / "out"
                    _quietly(lambda: ckpt_cli.merge(self.folder, out, dry_run=True, type="all"))
                    if source.random() < 0.1:
                        _quietly(lambda: ckpt_cli.extract_state(self.folder, out, optimizer=True, overwrite=True))
                finally:
                    path.write_bytes(data)

            yield mutant, run
