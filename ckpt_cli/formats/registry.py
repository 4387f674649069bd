"""The formats that ckpt reads, in the order in which they are tried.

====================  =============================================================================
module                reads
====================  =============================================================================
`rank_files`          one ``torch.save`` file per rank: verl, EasyR1, SkyRL, lmms-engine, accelerate, BAGEL forks
`deepspeed`           tag folders of DeepSpeed: ZeRO stages 0 to 3, BF16_Optimizer, pipelines, experts, universal
`megatron`            Megatron-LM, NeMo, verl, slime: torch_dist steps, and legacy files of ranks
`self_describing`     files of ranks under other names, if the tensors in them say which ranks they are of
`torch_checkpointing` torch_checkpointing: ``<item>_<rank>.pt`` or ``.safetensors`` with ``metadata.pkl``
`dcp`                 torch DCP folders: accelerate, Lightning, torchtitan, OLMo-core, composer, ...
`safetensors/shards`  sharded safetensors of torch's HuggingFaceStorageWriter
`safetensors/folder`  safetensors, single or with an index: Hugging Face model folders
`torch_files`         single files of ``torch.save``, also ``pytorch_model.bin`` with an index
`unread`              nothing: sets of unknown names, which are refused by name
====================  =============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ckpt_cli import shell
from ckpt_cli.errors import INTERRUPTED, CkptError, Inconsistent, InputError, PartOfSet
from ckpt_cli.files.collecting import Uncollected
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.manifest import unfinished_error
from ckpt_cli.files.source import Files
from ckpt_cli.formats.ages import origins_of, unversioned_notes
from ckpt_cli.formats.base import APART, Format, Match, ReadOptions
from ckpt_cli.formats.dcp.reader import Dcp
from ckpt_cli.formats.deepspeed.reader import DeepSpeed
from ckpt_cli.formats.megatron.legacy import Legacy
from ckpt_cli.formats.megatron.reader import TorchDist
from ckpt_cli.formats.placeholders import holds_nothing, refuse_placeholders
from ckpt_cli.formats.rank_files.cuts import order_notes
from ckpt_cli.formats.rank_files.reader import RankShards
from ckpt_cli.formats.rank_files.self_describing import SelfDescribing
from ckpt_cli.formats.safetensors.folder import HubFolder
from ckpt_cli.formats.safetensors.shards import HubShards
from ckpt_cli.formats.sets.contents import share_error
from ckpt_cli.formats.sets.indexes import index_beside
from ckpt_cli.formats.sets.names import part_error
from ckpt_cli.formats.sets.neighbours import neighbour_error
from ckpt_cli.formats.sets.stages import stage_error
from ckpt_cli.formats.torch_checkpointing.reader import TorchCheckpointing
from ckpt_cli.formats.torch_files.counters import averaged
from ckpt_cli.formats.torch_files.reader import TorchFiles
from ckpt_cli.formats.unread import Unread
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Component
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.urls import is_remote

FORMATS: tuple[Format, ...] = (
    RankShards(),
    DeepSpeed(),
    TorchDist(),
    Legacy(),
    TorchCheckpointing(),
    Dcp(),
    HubShards(),
    HubFolder(),
    TorchFiles(),
    SelfDescribing(),
    Unread(),
)


OTHERS, ALIKE = 8, 1.1
"""How many other ranks a file that is too short is compared with, and by how much their files may differ in size."""


def recognise(path: Path, there: Folders | None = None) -> list[Match]:
    """Everything that some format recognises directly at ``path``; a file that is one of a set, by its name, gets that as its trouble.

    ``there``: what was seen of folders before.
    """
    there = there or Folders()
    found = [_doubted(match, there) for known in FORMATS for match in known.recognise(path, there)]
    if found and there.is_folder(path) and (error := unfinished_error(path, there)) is not None:
        return [replace(match, trouble=error) for match in found]
    if any(match.component == "model" and _is_sure(match) and not match.lists_nothing for match in found):
        found = [match for match in found if not match.lists_nothing]
    unsure = {match.component for match in found if format_of(match).is_unsure}
    read = {
        match.component for match in found if _is_sure(match) and not (match.component in unsure and isinstance(match.trouble, PartOfSet))
    }
    return [
        match
        for match in found
        if (match.component in read and _is_sure(match))
        or (match.component not in read and (format_of(match).is_unsure or match.component not in unsure))
    ]


def _is_sure(match: Match) -> bool:
    """Whether names tell that these are weights that can be read."""
    known = format_of(match)
    return not (known.is_refused or known.is_unsure)


def tags_in(folder: Path, there: Folders) -> list[Match]:
    """What a folder of any name holds, below that of a step: saves of formats that keep them so."""
    return [match for known in FORMATS if known.in_tags for match in known.recognise(folder, there)]


def describe(match: Match, files: Files, options: ReadOptions) -> Component:
    """The component behind a match; see `Format.describe` for what it proves and raises. Raises the trouble of the match."""
    if match.trouble is not None:
        raise match.trouble
    alone = _alone(match)
    if alone is not None and (index := index_beside(alone, Folders())) is not None:
        text = f"{alone.name} is one of several files of the model that {index.name} lists"
        raise PartOfSet(text, path=alone, expected="the whole set", hint=f"pass {shell.path(index)}")
    files.expect(match.files, "rank files" if match.ranks else "files")
    try:
        with Uncollected(), files.noting() as opened:
            component = averaged(format_of(match).describe(match, files, options))
            if alone is not None:
                _refuse_share(component, alone, files, options)
    except InputError as trouble:
        if trouble.path is None and trouble.tensor is None:
            trouble.path = str(match.files[0] if len(match.files) == 1 else match.root)
        if trouble.hint == INTERRUPTED and trouble.expected is None:
            trouble.expected = _size_of_others(match, trouble.path, files)
        raise
    refuse_placeholders(component)
    notes = (*order_notes(component.notes, options.shard_order), *unversioned_notes(origins_of(component.tensors.values())))
    return replace(component, notes=notes, watched=tuple(opened.values()))


def _refuse_share(component: Component, alone: Path, files: Files, options: ReadOptions) -> None:
    """Raise PartOfSet if what a file holds, or the one with the next number, shows that it is one of several of a model."""

    def read(path: Path) -> Mapping[str, Tensor]:
        match = next((match for match in recognise(path) if match.format == component.format), None)
        return format_of(match).describe(match, files, options).tensors if match is not None else {}

    error = share_error(component.tensors, alone, files) or neighbour_error(component.tensors, alone, Folders(), read)
    if error is not None:
        raise error


def _size_of_others(match: Match, short: str | None, files: Files) -> str | None:
    """How large the files of other ranks are, of which one is ``short``; None if they are not alike, or not larger."""
    ranks = {absolute(path) for path in match.ranks.values()}
    if short is None or (name := absolute(short)) not in ranks:
        return None
    others = sorted(ranks - {name})[:OTHERS]
    try:
        sizes = [files.source(path).size for path in others]
        if not sizes or max(sizes) > ALIKE * min(sizes) or files.source(name).size >= min(sizes):
            return None
    except CkptError:
        return None  # only asked for the message
    return f"about {max(sizes):,} bytes, as the files of the other ranks have"


def _alone(match: Match) -> Path | None:
    """The file, if a match is one file that is taken for the whole model."""
    return format_of(match).single_file(match)


def _doubted(match: Match, there: Folders) -> Match:
    if match.trouble is not None:
        return match
    alone = _alone(match)
    trouble = part_error(alone, there) or stage_error(alone.parent, there) if alone is not None else None
    trouble = trouble or stage_error(match.root, there)
    empty = holds_nothing(alone) if alone is not None and trouble is None and not is_remote(alone) else None
    return replace(match, trouble=trouble or empty, lists_nothing=empty is not None)


def groups(match: Match, files: Files) -> list[str]:
    """The names of the state dicts in a match, the main one first."""
    return format_of(match).groups(match, files)


class OfFormat(Protocol):
    """A match, or what was described of one."""

    @property
    def format(self) -> str: ...


def format_of(match: OfFormat) -> Format:
    """The format of a match, of a component, or of a result about one."""
    return next(known for known in FORMATS if known.name == match.format)


def order_of(match: Match) -> int:
    """The position of its format among all: if two claim a component, shards go before merged weights."""
    return FORMATS.index(format_of(match))


def joined(first: Match, second: Match) -> Match:
    """Two matches of the same component, from two folders, as one. Contradictions become its ``trouble``; nothing is read."""
    known = _common(first, second)
    if known is None:
        text = f"{first.root} is {first.format}, {second.root} is {second.format}"
        return replace(first, trouble=Inconsistent(text, path=second.root, expected="folders of one save", hint=APART))
    return known.joined(first, second)


def complement(first: Match, second: Match) -> bool:
    """Whether two matches of two folders look like parts of one save."""
    known = _common(first, second)
    return known is not None and first.component == second.component and known.complements(first, second)


def _common(first: Match, second: Match) -> Format | None:
    """The format of two matches: that of one of them, if it takes the other one for a part; None if neither does."""
    return next((known for known, other in ((format_of(first), second), (format_of(second), first)) if known.takes(other)), None)
