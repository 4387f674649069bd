"""Files beside the weights that the step before, or the one after, has and a step lost, by their names."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli.discover.before.steps import steps_around
from ckpt_cli.discover.beside.homes import homes_in_step
from ckpt_cli.discover.found import Found
from ckpt_cli.errors import CkptError
from ckpt_cli.files.manifest import read_manifest
from ckpt_cli.hub.assets import NOTHING_LOST, Assets, Lost, files_beside, find_assets
from ckpt_cli.hub.beside.families import OF_TEMPLATES, is_decided
from ckpt_cli.hub.beside.listed import home_of
from ckpt_cli.hub.beside.names import OF_VOCABULARY, VOCABULARIES
from ckpt_cli.hub.beside.processors import OF_VIDEOS, PREPROCESSOR, PROCESSOR
from ckpt_cli.hub.beside.tokenizers import has_vocabulary, is_trace
from ckpt_cli.hub.tokenizer_file import TOKENIZER


def assets_of_step(found: Found, homes: Sequence[Path], base: Path | None, doubtful: Sequence[Path] = ()) -> Assets:
    """The assets of a component, with what another step has of them. Raises what `find_assets` raises."""
    assets = find_assets(homes, base, doubtful)
    own = [home for home in homes if home.is_relative_to(found.path)]
    with contextlib.suppress(CkptError):  # another step is only looked at for a warning
        for step in steps_around(found):
            kept = {
                name: path
                for name, path in files_beside(homes_in_step(step, own, found)).items()
                if name not in _added(home_of(name, path))
            }
            lost = {name: path for name, path in kept.items() if not _has(name, assets.files, kept, own)}
            if lost:
                return replace(assets, lost=Lost(step.name, lost))
    return replace(assets, lost=NOTHING_LOST)


def _has(name: str, files: Mapping[str, Path], others: Mapping[str, Path], own: Sequence[Path]) -> bool:
    """Whether a file is there, or what stands for it: a trainer that was updated meanwhile may save the same in other files."""
    if name in files or name.startswith("README"):
        return True
    if is_trace(name) and has_vocabulary(files):
        of_step = {each: path for each, path in files.items() if any(path.is_relative_to(home) for home in own)}
        # A tokenizer that is all of the run's folder or of the base is another one; a tokenizer.json says all that older files do.
        return not has_vocabulary(of_step) or (TOKENIZER in files and name in VOCABULARIES | OF_VOCABULARY)
    if name in (PREPROCESSOR, OF_VIDEOS):
        return PROCESSOR in files and PROCESSOR not in others
    # Templates for other uses than the usual one stand for none.
    usual = {each: path for each, path in files.items() if not each.startswith(OF_TEMPLATES)}
    return name.startswith("chat_template") and is_decided(name, usual)


def _added(folder: Path) -> tuple[str, ...]:
    """What ckpt wrote into a folder: no save of a trainer."""
    with contextlib.suppress(CkptError):
        manifest = read_manifest(folder)
        return manifest.side_files if manifest is not None else ()
    return ()
