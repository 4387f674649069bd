"""Hugging Face model folders: one safetensors file, or several with an index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckpt_cli.boxes import contiguous_strides, whole
from ckpt_cli.errors import CorruptFile, IncompleteError, Inconsistent, MissingShard, reading
from ckpt_cli.files.folders import Folders, entries_in
from ckpt_cli.files.safetensors_file import Entry, read_header
from ckpt_cli.files.source import Files, Source
from ckpt_cli.formats.base import Format, Match, ReadOptions
from ckpt_cli.formats.safetensors.index import check_members, read_weight_map
from ckpt_cli.formats.sets.contents import refuse_shard
from ckpt_cli.formats.sets.names import PartName, lost_part, part_name
from ckpt_cli.formats.torch_files.averages import split_average
from ckpt_cli.formats.torch_files.reader import holds_torch_model
from ckpt_cli.names import check_name, few, is_extra_state
from ckpt_cli.tensors.component import Component, Leaf, Note
from ckpt_cli.tensors.tensor import Piece, Tensor

FORMAT = "safetensors"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMA = "ema.safetensors"
"""How BAGEL names its averaged weights, alone or beside the others."""

OPTIMIZER = "optimizer.safetensors"
"""What `extract-state` writes: no model."""

INDEX_SUFFIX = ".safetensors.index.json"


class HubFolder(Format):
    """Reader of safetensors files and folders."""

    name = FORMAT
    is_sharded = False
    display = "safetensors"
    is_loaded = True
    keeps_order = False

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        if there.is_file(path):
            if path.name.endswith(INDEX_SUFFIX):
                return [Match(FORMAT, "model", path.parent, (path,), f"index {path.name}")]
            if path.suffix == ".safetensors":
                return [Match(FORMAT, "model", path, (path,), "a safetensors file")]
            return []
        matches = [Match(FORMAT, "ema", path, (path / EMA,), EMA)] if there.is_file(path / EMA) else []
        if there.is_file(path / INDEX):
            return [Match(FORMAT, "model", path, (path / INDEX,), f"index {INDEX}"), *matches]
        if there.is_file(path / SINGLE):
            return [Match(FORMAT, "model", path, (path / SINGLE,), SINGLE), *matches]
        others = there.files(path, lambda name: name.endswith(INDEX_SUFFIX))
        if len(others) == 1 and not matches:
            return [Match(FORMAT, "model", path, (others[0],), f"index {others[0].name}")]
        alone = [entry for entry in there.entries(path) if entry.suffix == ".safetensors" and entry.name != OPTIMIZER]
        if len(alone) == 1 and not matches and _is_whole(alone[0].name) and not holds_torch_model(path, there):
            return [Match(FORMAT, "model", path, (alone[0],), f"the only safetensors file, {alone[0].name}")]
        named = [(entry, part) for entry in there.entries(path) if (part := safetensors_part(entry.name)) is not None]
        if named:
            parts, index = [entry for entry, _ in named], f"{named[0][1].stem}{INDEX_SUFFIX}"
            trouble: IncompleteError = MissingShard(
                f"{index} is missing, so nothing shows that the {len(parts)} parts are complete",
                path=path / index,
                hint="copy the index from where the model came from",
            )
            trouble = lost_part(parts, there) or trouble
            return [Match(FORMAT, "model", path, tuple(parts), "parts of a model without an index", trouble=trouble), *matches]
        return matches

    def single_file(self, match: Match) -> Path | None:
        return match.files[0] if len(match.files) == 1 and match.files[0].suffix != ".json" else None

    def groups(self, match: Match, files: Files) -> list[str]:
        """The model, and an average of its weights that lies in the same files under a prefix (latent diffusion: ``model_ema.*``)."""
        if match.trouble is not None or match.component != "model":
            return [match.component]
        first = match.files[0]
        names = read_weight_map(first, ".safetensors") if first.suffix == ".json" else files.parsed(first, read_header).entries
        split = split_average(dict.fromkeys(name if isinstance(name, str) else name.name for name in names))
        return [match.component] if split is None else [match.component, "ema"]

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        first = match.files[0]
        if first.suffix != ".json":
            header, source = files.parsed(first, read_header), files.source(first)
            with reading(first):
                refuse_shard(header.metadata)
            entries = [(entry, source) for entry in header.entries]
            paths: tuple[Path, ...] = (first,)
        else:
            mapping = read_weight_map(first, ".safetensors")
            names = sorted(set(mapping.values()))
            stem = first.name.removesuffix(INDEX_SUFFIX)
            unlisted = [
                entry.name
                for entry in entries_in(first.parent)
                if (part := safetensors_part(entry.name)) is not None and part.stem == stem and entry.name not in names
            ]
            if unlisted:
                hint = "move it away if it is from an older save"
                raise Inconsistent(f"the index does not mention {few(unlisted)}", path=first, hint=hint)
            entries = []
            files.expect([first.parent / name for name in names])
            for name in names:
                header = read_header(source := files.source(first.parent / name))
                with reading(source.path):
                    check_members(mapping, name, (entry.name for entry in header.entries))
                entries += [(entry, source) for entry in header.entries]
            order = {name: i for i, name in enumerate(mapping)}
            entries.sort(key=lambda item: order[item[0].name])
            paths = (first, *(first.parent / name for name in names))
        tensors = {check_name(entry.name): described_entry(entry, source) for entry, source in entries if not is_extra_state(entry.name)}
        split = split_average(tensors) if match.component == "model" or match.group is not None else None
        notes: tuple[Note, ...] = ()
        if split is not None:
            model, average = split
            tensors = model if match.group is None else {name: replace(tensor, name=name) for name, tensor in average.items()}
            notes = (Note("info", "other-components", f"{first.name} also holds ema (--type ema)"),) if match.group is None else ()
        if not tensors:
            raise CorruptFile("the file holds no tensor" if len(paths) == 1 else "the files hold no tensor", path=first)
        leaves = tuple(entry_leaf(entry) for entry, _ in entries if is_extra_state(entry.name))
        return Component(match.component, FORMAT, match.root, tensors, paths, leaves=leaves, notes=notes, writer=match.evidence)


def entry_leaf(entry: Entry) -> Leaf:
    """An entry of a safetensors file that is not a weight, as shown to users."""
    return Leaf(check_name(entry.name), f"{entry.dtype} {list(entry.shape)}")


def _is_whole(name: str) -> bool:
    part = safetensors_part(name)
    return part is None or part.parts == 1


def safetensors_part(name: str) -> PartName | None:
    """What the name of a part in safetensors says; None for other names."""
    part = part_name(name)
    return part if part is not None and part.suffix == ".safetensors" else None


def described_entry(entry: Entry, source: Source) -> Tensor:
    """A tensor of a safetensors file: one piece, the whole of it."""
    piece = Piece(source, entry.offset, contiguous_strides(entry.shape), whole(entry.shape))
    return Tensor(entry.name, entry.dtype, entry.shape, (piece,) if entry.nbytes else ())
