"""The formats that ckpt reads, in the order in which they are asked.

==================  =============================================================================
module              reads
==================  =============================================================================
`rank_shards`       one ``torch.save`` file per rank: verl, EasyR1, SkyRL, lmms-engine, accelerate, BAGEL forks
`dcp`               torch DCP folders: accelerate, Lightning, torchtitan, OLMo-core, composer, ...
`hub_shards`        sharded safetensors of torch's HuggingFaceStorageWriter
`hub_folder`        safetensors, single or with an index: Hugging Face model folders
`torch_files`       single files of ``torch.save``, also ``pytorch_model.bin`` with an index
==================  =============================================================================
"""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.files import Files
from ckpt_cli.formats.base import Match, Reader, ReadOptions
from ckpt_cli.formats.dcp import Dcp
from ckpt_cli.formats.hub_folder import HubFolder
from ckpt_cli.formats.hub_shards import HubShards
from ckpt_cli.formats.placeholders import refuse_placeholders
from ckpt_cli.formats.rank_shards import RankShards
from ckpt_cli.formats.torch_files import TorchFiles
from ckpt_cli.model import Component

READERS: tuple[Reader, ...] = (RankShards(), Dcp(), HubShards(), HubFolder(), TorchFiles())


FORMATS = tuple(reader.name for reader in READERS)
"""Their names, in the same order."""


def recognise(path: Path) -> list[Match]:
    """Everything that some reader recognises directly at ``path``."""
    return [match for reader in READERS for match in reader.recognise(path)]


def describe(match: Match, files: Files, options: ReadOptions) -> Component:
    """The component behind a match; see `Reader.describe` for what it proves and raises. Raises the trouble of the match."""
    if match.trouble is not None:
        raise match.trouble
    component = _reader(match).describe(match, files, options)
    refuse_placeholders(component)
    return component


def groups(match: Match) -> list[str]:
    """The names of the state dicts inside of a match, the main one first."""
    return _reader(match).groups(match)


def _reader(match: Match) -> Reader:
    return next(reader for reader in READERS if reader.name == match.format)
