"""The formats that ckpt reads, in the order in which they are asked.

==================  =============================================================================
module              reads
==================  =============================================================================
`rank_shards`       one ``torch.save`` file per rank: verl, EasyR1, SkyRL, lmms-engine, accelerate, BAGEL forks
`hub_folder`        safetensors, single or with an index: Hugging Face model folders
==================  =============================================================================
"""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.files import Files
from ckpt_cli.formats.base import Match, Reader, ReadOptions
from ckpt_cli.formats.hub_folder import HubFolder
from ckpt_cli.formats.rank_shards import RankShards
from ckpt_cli.model import Component

READERS: tuple[Reader, ...] = (RankShards(), HubFolder())


def recognise(path: Path) -> list[Match]:
    """Everything that some reader recognises directly at ``path``."""
    return [match for reader in READERS for match in reader.recognise(path)]


def describe(match: Match, files: Files, options: ReadOptions) -> Component:
    """The component behind a match; see `Reader.describe` for what it proves and raises."""
    reader = next(reader for reader in READERS if reader.name == match.format)
    return reader.describe(match, files, options)
