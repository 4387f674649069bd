"""Warnings about a config.json that says otherwise than what the training noted of its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.discover.recorded.files import noted_settings
from ckpt_cli.discover.recorded.inside import kept_in
from ckpt_cli.discover.recorded.tokenizers import is_tokenizer, tokenizer_notes
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.kept_configs import KeptConfig
from ckpt_cli.hub.assets import CONFIG, Assets
from ckpt_cli.hub.entries.recorded import OF_OTHERS, contradicted
from ckpt_cli.names import few, printable
from ckpt_cli.tensors.component import Note

SHOWN = 4


def recorded_notes(homes: Iterable[Path], assets: Assets, match: Match, files: Files, base: Path | None) -> list[Note]:
    """What the checkpoint itself, and files of the step and its run, say of the model, and a config or a tokenizer of the base contradicts.

    A config.json of the run is that of the model which was trained, and goes before what its arguments say, but not before another
    description of the model.
    """
    kept = [each for each in kept_in(match, files) if not each.is_config]
    notes = [note for each in kept if is_tokenizer(each) for note in tokenizer_notes(each, assets)]
    taken = assets.files.get(CONFIG)
    if taken is None:
        return notes
    of_base = base is not None and taken.is_relative_to(base)
    whose = "is that of the base" if of_base else f"in {taken.parent} does not"
    told = set[str]()
    for where, settings in _settings(kept, homes, files, base):
        differing = [entry.text for entry in contradicted(assets.config, settings, sure=not of_base) if entry.text not in told]
        told |= set(differing)
        if differing:
            text = f"{where} says of the training: {few(differing, SHOWN)}; config.json {whose}, and other settings change what"
            notes.append(Note("warning", "recorded-settings", f"{text} the weights compute: if the model was trained so, write them there"))
    return notes


def _settings(
    kept: Iterable[KeptConfig], homes: Iterable[Path], files: Files, base: Path | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for each in kept:
        if not any(map(OF_OTHERS.fullmatch, each.where.split("."))):
            yield f"the checkpoint (at {printable(each.where)})", each.config
    for path, content in noted_settings(homes, files):
        if base is None or not path.is_relative_to(base):
            yield str(path), content
