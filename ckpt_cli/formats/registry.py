"""The formats that ckpt reads, in the order in which they are asked.

==================  =============================================================================
module              reads
==================  =============================================================================
`rank_shards`       one ``torch.save`` file per rank: verl, EasyR1, SkyRL, lmms-engine, accelerate, BAGEL forks
`dcp`               torch DCP folders: accelerate, Lightning, torchtitan, OLMo-core, composer, ...
`hub_shards`        sharded safetensors of torch's HuggingFaceStorageWriter
`hub_folder`        safetensors, single or with an index: Hugging Face model folders
`torch_files`       single files of ``torch.save``, also ``pytorch_model.bin`` with an index
`unread`            nothing: DeepSpeed's and Megatron's folders and unknown sets, which are refused by name
==================  =============================================================================
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckpt_cli.errors import PartOfSet
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Match, Reader, ReadOptions
from ckpt_cli.formats.dcp.reader import Dcp
from ckpt_cli.formats.placeholders import refuse_placeholders
from ckpt_cli.formats.rank_files.reader import RankShards
from ckpt_cli.formats.safetensors.folder import HubFolder
from ckpt_cli.formats.safetensors.shards import HubShards
from ckpt_cli.formats.sets.contents import share_error
from ckpt_cli.formats.sets.names import index_beside, part_error
from ckpt_cli.formats.torch_files.reader import TorchFiles
from ckpt_cli.formats.unread import FORMAT as UNREAD
from ckpt_cli.formats.unread import Unread
from ckpt_cli.tensors.component import Component

READERS: tuple[Reader, ...] = (RankShards(), Dcp(), HubShards(), HubFolder(), TorchFiles(), Unread())


FORMATS = tuple(reader.name for reader in READERS)
"""Their names, in the same order."""


def recognise(path: Path, there: Folders | None = None) -> list[Match]:
    """Everything that some reader recognises directly at ``path``; a file that is one of a set, by its name, gets that as its trouble.

    ``there``: what was seen of folders before.
    """
    there = there or Folders()
    found = [match for reader in READERS for match in reader.recognise(path, there)]
    read = {match.component for match in found if match.format != UNREAD}
    return [_doubted(match, there) for match in found if match.format != UNREAD or match.component not in read]


def describe(match: Match, files: Files, options: ReadOptions) -> Component:
    """The component behind a match; see `Reader.describe` for what it proves and raises. Raises the trouble of the match."""
    if match.trouble is not None:
        raise match.trouble
    alone = _alone(match)
    if alone is not None and (index := index_beside(alone, Folders())) is not None:
        text = f"{alone.name} is one of several files of the model that {index.name} lists"
        raise PartOfSet(text, path=alone, expected="the whole set", hint=f"pass {index}")
    component = _reader(match).describe(match, files, options)
    if alone is not None and (error := share_error(component.tensors, alone)) is not None:
        raise error
    refuse_placeholders(component)
    return component


def _alone(match: Match) -> Path | None:
    """The file, if a match is one file that is taken for the whole model."""
    one = len(match.files) == 1 and match.format in (HubFolder.name, TorchFiles.name) and match.files[0].suffix != ".json"
    return match.files[0] if one else None


def _doubted(match: Match, there: Folders) -> Match:
    alone = _alone(match) if match.trouble is None else None
    return match if alone is None else replace(match, trouble=part_error(alone, there))


def groups(match: Match, files: Files) -> list[str]:
    """The names of the state dicts inside of a match, the main one first."""
    return _reader(match).groups(match, files)


def _reader(match: Match) -> Reader:
    return next(reader for reader in READERS if reader.name == match.format)
