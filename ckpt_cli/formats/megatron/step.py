"""A torch_dist step, opened: its catalogue, its model's tensors, and what is beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ckpt_cli.errors import CorruptFile, reading
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.dcp.items import ItemReader, assembled
from ckpt_cli.formats.dcp.metadata import Catalog, CatalogTensor, read_catalog
from ckpt_cli.formats.megatron.common import Common, entries_of, read_common, unused_in
from ckpt_cli.formats.megatron.native import is_state, native_tensors, unflattened
from ckpt_cli.formats.megatron.signs import COMMON
from ckpt_cli.formats.unused.search import Unused
from ckpt_cli.names import is_extra_state
from ckpt_cli.tensors.component import Mesh
from ckpt_cli.tensors.tensor import Tensor

COMMON_STATE = "common_state/shard_0_1"
RANDOM = re.compile(r"rng_state/shard_(?P<place>[0-9]{1,9}(\.[0-9]{1,9}){0,7})_(?P<sizes>[0-9]{1,9}(\.[0-9]{1,9}){0,7})", re.ASCII)
"""The random state of a rank: its place on the axes pp, tp (and ep with expert parallelism), and their sizes."""

AXES = ("pp", "tp", "ep")
SHOWN = ("tp", "pp", "vpp", "ep", "dp")
SLOT = re.compile(r"(?P<chain>chained_[0-9]+\.)?optimizer\.state\.(?P<slot>[a-z0-9_]+)\.(?P<key>.+)", re.ASCII)
"""Slots of an optimizer by parameter, where they are addressable by name."""

MASTERS = ("fp32_param", "param")
"""What the float32 masters are called: by the plain optimizer, and by ``fully_reshardable``."""

BUCKETS = re.compile(r"(chained_[0-9]+\.)?optimizer\.distributed\.dp_group_idx_[0-9]+\..*", re.ASCII)
MAX_COMMON = 1 << 28


@dataclass(frozen=True)
class Step:
    """One step, which may lie in the folders of several nodes."""

    roots: tuple[Path, ...]
    files: Files
    catalog: Catalog
    reader: ItemReader

    @classmethod
    def opened(cls, roots: tuple[Path, ...], files: Files) -> Step:
        """The step in some folders; the catalogue is kept by ``files``. Raises what reading the metadata raises."""
        return files.kept((cls.opened, *roots), lambda: cls(roots, files, read_catalog(roots, files), ItemReader(roots, files)))

    @property
    def model(self) -> dict[str, CatalogTensor]:
        """The entries of the model, by key."""
        return {key: entry for key, entry in self.catalog.tensors.items() if not is_state(key) and not is_extra_state(key)}

    @cached_property
    def common(self) -> Common:
        """What is not sharded; empty if it is neither in a file nor an entry. Raises CorruptFile."""
        item = self._common_item
        if item is None:
            return Common()
        with reading(self.common_file or self.roots[0]):
            return read_common(item)

    @cached_property
    def unused(self) -> Unused:
        """What is there beside Megatron's own state, and may be needed with the weights."""
        return unused_in(entries_of(self._common_item)) if self._common_item is not None else Unused()

    @cached_property
    def _common_item(self) -> TorchFile | None:
        path = self.common_file
        if path is not None:
            with reading(path):
                source = self.files.source(path)
                if source.size > MAX_COMMON:
                    raise CorruptFile(f"{source.size} bytes are too many for {COMMON}", expected=f"at most {MAX_COMMON} bytes")
                return TorchFile(source)
        stored = thing.stored if (thing := self.catalog.objects.get(COMMON_STATE)) is not None else None
        if stored is None:
            return None
        with reading(self.roots[0], tensor=COMMON_STATE):
            item = self.reader.parsed(stored)
            if item is None:
                raise CorruptFile("it is no file of torch.save")
            return item

    @property
    def common_file(self) -> Path | None:
        """``common.pt`` in one of the folders; None since core 0.19."""
        return next((root / COMMON for root in self.roots if is_file(root / COMMON)), None)

    @property
    def slots(self) -> dict[str, dict[str, CatalogTensor]]:
        """The optimizer's entries by slot and model key, where they are addressable by name."""
        found: dict[str, dict[str, CatalogTensor]] = {}
        for key, entry in self.catalog.tensors.items():
            if (fields := SLOT.fullmatch(key)) is not None:
                found.setdefault(fields["slot"], {})[fields["key"]] = entry
        return found

    @property
    def masters(self) -> str | None:
        """The slot of the float32 masters; None if there is none."""
        return next((slot for slot in MASTERS if slot in self.slots), None)

    @property
    def has_buckets(self) -> bool:
        """Whether the optimizer lies in buckets, which only the model's class tells apart."""
        return any(map(BUCKETS.fullmatch, (*self.catalog.tensors, *self.catalog.objects)))

    @property
    def optimizer_form(self) -> str | None:
        """The form of the optimizer in words; None if there is none."""
        slots = self.slots
        if self.has_buckets:
            return "distributed, in buckets (dp_reshardable)"
        if "param" in slots:
            return "distributed, by name (fully_reshardable)"
        if any(key.startswith(("optimizer.", "chained_")) for key in self.catalog.logical):
            return "distributed, by name (fully_sharded_model_space)"
        return "by name" if slots else None

    @property
    def mesh(self) -> Mesh | None:
        """How many ranks cut the model, by the arguments, or by the random states of the ranks; None where there are none of both."""
        seen = next((fields["sizes"].split(".") for key in self.catalog.objects if (fields := RANDOM.fullmatch(key))), [])
        sizes = {name: int(size) for name, size in zip(AXES, seen, strict=False)}
        sizes |= {name: size for name in SHOWN if (size := self.common.size(name)) is not None}
        shown = {name: sizes[name] for name in SHOWN if name in sizes and (sizes[name] > 1 or name in SHOWN[:2])}
        return Mesh(tuple(shown), tuple(shown.values())) if shown else None

    def tensors(self, entries: Mapping[str, CatalogTensor]) -> dict[str, Tensor]:
        """Full tensors under Megatron's names, one per layer and expert. Raises what `tile` raises."""
        self.reader.check_files(entries.values())
        stored: dict[str, Tensor] = {}
        for key, entry in entries.items():
            with reading(self.roots[0], tensor=entry.name):
                whole = assembled(key, entry, self.reader)
                logical = self.catalog.logical.get(entry.name)
                stored[key] = whole if logical is None else unflattened(whole, logical)
        with reading(self.roots[0]):
            return native_tensors(stored)


def data_files(entries: Iterable[CatalogTensor]) -> list[str]:
    """The data files in which some entries lie, sorted."""
    return sorted({stored.file for entry in entries for places in entry.chunks.values() for stored in places})
