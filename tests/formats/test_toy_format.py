"""A format of fifty lines, added as docs/architecture.md says ("Add a format"): rows of every tensor, one file per rank."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_cli.boxes import Box, contiguous_strides
from ckpt_cli.dtypes import BY_CODE
from ckpt_cli.errors import CorruptFile, MissingShard, reading
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import Storage, StoredTensor
from ckpt_cli.formats import registry
from ckpt_cli.formats.assembly import PlacedTensor, RankPart, cut_layout, tile
from ckpt_cli.formats.base import Format, Match, ReadOptions
from ckpt_cli.names import check_name
from ckpt_cli.tensors.component import Component
from tests.formats.conformance import Example, FormatConformance

# -- step 1: the module ----------------------------------------------------------------------------------------------

TOY = re.compile(r"rows-(?P<rank>[0-9]+)-of-(?P<world>[0-9]+)\.toy", re.ASCII)


class Toy(Format):
    """A line of JSON (name -> dtype, whole shape, first row, offset), then the bytes of the rows of all tensors."""

    name = "toy"
    display = "toy files"

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        folder = path.parent if TOY.fullmatch(path.name) else path
        found = {int(fields["rank"]): file for file in there.files(folder) if (fields := TOY.fullmatch(file.name))}
        if not found:
            return []
        world = int(TOY.fullmatch(next(iter(found.values())).name)["world"])  # type: ignore[index]
        match = Match(self.name, "model", folder, tuple(found.values()), "toy trainer", world, found)
        absent = [f"rows-{rank}-of-{world}.toy" for rank in match.missing_ranks]
        return [replace(match, trouble=MissingShard(f"{absent[0]} is missing", path=folder))] if absent else [match]

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        held: dict[str, tuple[str, list[int], list[RankPart]]] = {}
        for rank, path in sorted(match.ranks.items()):
            source = files.source(path)
            line = source.read(0, min(source.size, 1 << 20)).split(b"\n")[0]
            with reading(path):
                try:
                    entries = json.loads(line)
                    for name, (code, shape, first, rows, offset) in entries.items():
                        dtype, extent = BY_CODE[code], (rows, *shape[1:])
                        size = dtype.itemsize * torch.Size(extent).numel()
                        if len(line) + 1 + offset + size > source.size:
                            raise CorruptFile("the file is truncated", tensor=name)
                        storage = Storage(source, name, len(line) + 1 + offset, size, None)
                        stored = StoredTensor(storage, dtype, extent, contiguous_strides(extent), storage.offset)
                        box = Box((first, *[0] * (len(shape) - 1)), extent)
                        held.setdefault(check_name(name), (code, shape, []))[2].append(RankPart(rank, stored, box, (0,) * len(shape)))
                except (ValueError, KeyError):
                    raise CorruptFile("the first line is no description of tensors") from None
        tensors = {}
        for name, (code, shape, parts) in held.items():
            kind, layout = cut_layout(tuple(shape), (part.box for part in parts))
            with reading(match.root, tensor=name):
                tensors[name] = tile(name, BY_CODE[code], PlacedTensor(tuple(shape), parts, kind, layout), len(match.ranks), ())
        return Component(match.component, self.name, match.root, tensors, match.files, world_size=match.world_size)


# -- step 3: the conformance class -----------------------------------------------------------------------------------

MODEL = {"embed.weight": torch.randn(10, 4), "layers.0.proj.weight": torch.randn(6, 3).to(torch.bfloat16)}
CODES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def save(folder: Path, world: int) -> None:
    folder.mkdir()
    for rank in range(world):
        entries, data = {}, b""
        for name, tensor in MODEL.items():
            part = tensor.chunk(world)[rank]
            first = sum(len(other) for other in tensor.chunk(world)[:rank])
            entries[name] = (CODES[tensor.dtype], list(tensor.shape), first, len(part), len(data))
            data += part.contiguous().view(torch.uint8).numpy().tobytes()
        (folder / f"rows-{rank}-of-{world}.toy").write_bytes(json.dumps(entries).encode() + b"\n" + data)


class TestToy(FormatConformance):
    reader = Toy()

    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Step 2: one line in the registry."""
        monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, self.reader))

    @pytest.fixture
    def original(self, tmp_path_factory: pytest.TempPathFactory) -> Example:
        home = tmp_path_factory.mktemp("toy")
        save(home / "example", 3)
        save_file(MODEL, home / "expected.safetensors")
        return Example(home / "example", home / "expected.safetensors")
