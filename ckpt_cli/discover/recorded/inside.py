"""What a checkpoint holds beside its weights of configs and settings, read once."""

from __future__ import annotations

from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.kept_configs import KeptConfig
from ckpt_cli.formats.registry import format_of


def kept_in(match: Match, files: Files) -> list[KeptConfig]:
    """Configs and settings in the files of the weights; none where they cannot be read, since the weights were read without them."""
    return files.kept((kept_in, match.root, match.files), lambda: _read(match, files))


def _read(match: Match, files: Files) -> list[KeptConfig]:
    try:
        return format_of(match).kept_configs(match, files)
    except CkptError:
        return []
