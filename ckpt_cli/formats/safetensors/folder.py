"""Hugging Face model folders: one safetensors file, or several with an index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpt_cli.errors import CkptError, CorruptFile
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.safetensors_file import Entry, read_header
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Format, Match, ReadOptions
from ckpt_cli.formats.safetensors.index import Index, raise_first, without_index
from ckpt_cli.formats.safetensors.leftovers import has_model, indexes_of_nothing, listing_nothing
from ckpt_cli.formats.safetensors.names import (
    ADAPTER,
    EMA,
    INDEX,
    INDEX_SUFFIX,
    OF_DIFFUSERS,
    OPTIMIZER,
    SINGLE,
    SUFFIX,
    is_index,
    is_whole,
    next_models,
    safetensors_part,
)
from ckpt_cli.formats.safetensors.scan import scan_set
from ckpt_cli.formats.torch_files.reader import holds_torch_model
from ckpt_cli.formats.torch_files.set_apart import names_of, set_apart
from ckpt_cli.names import check_name, few, is_extra_state, numbered
from ckpt_cli.tensors.component import Component, Leaf, Note
from ckpt_cli.tensors.tensor import Tensor

FORMAT = "safetensors"


class HubFolder(Format):
    """Reader of safetensors files and folders."""

    name = FORMAT
    is_sharded = False
    display = "safetensors"
    is_loaded = True
    keeps_order = False

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        if there.is_file(path):
            if is_index(path.name):
                return [_indexed(path, listing_nothing(path, there))]
            if path.suffix == SUFFIX:
                return [Match(FORMAT, "model", path, (path,), "a safetensors file")]
            return []
        lost = {index: error for index, error in indexes_of_nothing(path, there).items() if is_index(index.name)}
        matches = self._weights_in(path, [index for index in there.files(path, is_index) if index not in lost], there)
        alone = path / INDEX if path / INDEX in lost else next(iter(lost), None)
        if alone is None or any(match.component == "model" and (match.trouble or has_model([match.first.name])) for match in matches):
            return matches
        return [_indexed(alone, lost[alone]), *(match for match in matches if match.component != "model")]

    def _weights_in(self, path: Path, indexes: Sequence[Path], there: Folders) -> list[Match]:
        """What a folder holds, with the ``indexes`` that list files of it."""
        matches = [Match(FORMAT, "ema", path, (path / EMA,), EMA)] if there.is_file(path / EMA) else []
        more = next_models(path, SUFFIX, there)
        matches += [Match(FORMAT, numbered("model", number), path, (file,), file.name, number=number) for number, file in more.items()]
        for index, single in ((INDEX, SINGLE), (OF_DIFFUSERS + INDEX_SUFFIX, OF_DIFFUSERS + SUFFIX)):
            if path / index in indexes:
                return [_indexed(path / index), *matches]
            if there.is_file(path / single):
                return [Match(FORMAT, "model", path, (path / single,), single), *matches]
        if len(indexes) == 1 and not matches:
            return [_indexed(indexes[0])]
        alone = [entry for entry in there.entries(path) if entry.suffix == SUFFIX and entry.name != OPTIMIZER]
        if len(alone) == 1 and not matches and is_whole(alone[0].name) and not holds_torch_model(path, there):
            return [Match(FORMAT, "model", path, (alone[0],), f"the only safetensors file, {alone[0].name}")]
        named = [(entry, part) for entry in there.entries(path) if (part := safetensors_part(entry.name)) is not None]
        if named:
            parts = [entry for entry, _ in named]
            trouble = without_index(path / f"{named[0][1].stem}{INDEX_SUFFIX}", parts, there)
            return [Match(FORMAT, "model", path, tuple(parts), "parts of a model without an index", trouble=trouble), *matches]
        # What was trained with an adapter lies beside it under names of its own.
        if path / ADAPTER in alone and not (indexes or matches or holds_torch_model(path, there)):
            return [Match(FORMAT, "model", path, (path / ADAPTER,), f"{ADAPTER} of PEFT")]
        return matches

    def single_file(self, match: Match) -> Path | None:
        return match.files[0] if len(match.files) == 1 and match.files[0].suffix != ".json" else None

    def groups(self, match: Match, files: Files) -> list[str]:
        """The model, and an average of its weights that lies in the same files under a prefix (latent diffusion: ``model_ema.*``)."""
        if match.trouble is not None or match.component != "model":
            return [match.component]
        first = match.files[0]
        if first.suffix == ".json":
            index = Index.read(first, SUFFIX, files)
            raise_first(index.missing())
            return names_of(match.component, index.owners)
        return names_of(match.component, {entry.name: entry for entry in files.parsed(first, read_header).entries})

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        first = match.files[0]
        scanned = scan_set(first, files)
        raise_first(scanned.problems)
        (weights,) = scanned.sets
        tensors = {check_name(name): tensor for name, tensor in weights.tensors.items() if not is_extra_state(name)}
        notes = tuple(Note("warning", problem.code, problem.text) for problem in scanned.problems if problem.is_told and problem.text)
        paths = weights.files if weights.index is None else (weights.index, *weights.files)
        if not tensors:
            raise CorruptFile("the file holds no tensor" if len(paths) == 1 else "the files hold no tensor", path=first)
        leaves = tuple(entry_leaf(tensor) for name, tensor in weights.tensors.items() if is_extra_state(name))
        said, differing = _metadata(weights.files, files)
        if differing:
            text = f"the headers of its files disagree about {few(differing)}, which is not written"
            notes = (*notes, Note("warning", "header-metadata", text))
        component = Component(
            match.component, FORMAT, match.root, tensors, paths, leaves=leaves, notes=notes, writer=match.evidence, metadata=said
        )
        may_hold_both = match.component == "model" or match.group is not None
        return set_apart(component, first.name, average=match.group is not None) if may_hold_both else component


def _indexed(index: Path, lost: CkptError | None = None) -> Match:
    """The model of an index; ``lost``: the error where none of its files is there."""
    return Match(FORMAT, "model", index.parent, (index,), f"index {index.name}", trouble=lost, lists_nothing=lost is not None)


def _metadata(paths: Sequence[Path], files: Files) -> tuple[dict[str, str], list[str]]:
    """What the headers of files say besides tensors, and the entries about which they disagree. Which library wrote them is no matter."""
    said: dict[str, set[str]] = {}
    for path in paths:
        for key, value in files.parsed(path, read_header).metadata.items():
            said.setdefault(key, set()).add(value)
    said.pop("format", None)
    agreed = {key: next(iter(values)) for key, values in said.items() if len(values) == 1}
    return agreed, [key for key in said if key not in agreed]


def entry_leaf(entry: Entry | Tensor) -> Leaf:
    """An entry of a safetensors file that is not a weight, as shown to users."""
    return Leaf(check_name(entry.name), f"{entry.dtype} {list(entry.shape)}")
