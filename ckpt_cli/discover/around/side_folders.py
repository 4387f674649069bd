"""Folders that hold side files and nothing else: a config, a tokenizer, processors; by what is in them and how they are called."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from ckpt_cli.discover.beside.folders import files_with_weights, held_below, is_searched, kind_of
from ckpt_cli.discover.found import Found
from ckpt_cli.errors import CkptError, Unreadable
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.source import read_small
from ckpt_cli.formats.registry import recognise
from ckpt_cli.formats.training_state_names import is_state_file
from ckpt_cli.hub.assets import CONFIG, HUB_FOLDER
from ckpt_cli.hub.beside.model_config import no_model_config
from ckpt_cli.hub.beside.named import folders_named_in
from ckpt_cli.hub.beside.processors import NAMES as PROCESSORS
from ckpt_cli.hub.beside.tokenizers import has_vocabulary
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG

OF_SIDE_FILES = frozenset(
    ("hf", "huggingface", "transformers", "pretrained", "model", "tokenizer", "processor", "preprocessor", "config", "configs", "assets")
)
"""What a folder of side files is called, where it lies in a run, or beside weights that are no step of one."""

IN_STEPS = OF_SIDE_FILES | {
    "and",
    "checkpoint",
    "ckpt",
    "export",
    "files",
    "final",
    "format",
    "hub",
    "metadata",
    "processors",
    "tokenizers",
}
"""What one in a step is called besides: nothing here says that it is of another model."""

TOKENIZERS = re.compile(r"(?!.*(audio|speech|sound|image|vision|visual|video|vq|vae)).*tokenizers?([_-].*)?", re.IGNORECASE)
OF_PARTS = re.compile(r"(image|video|audio|speech)[ ._-]?processors?|feature[ ._-]?extractors?|tokenizers|processors", re.IGNORECASE)
"""What one of several is called, as transformers calls the parts of a processor, and MLflow their folders."""

COMPONENTS = "components"
"""The folder of such folders that MLflow writes beside ``model/``: ``components/tokenizer``."""

IN_PARTS = ("model_index.json", "modules.json")
"""What makes each folder beside it a part of one pipeline."""

MOST_INNER = 64


def is_well_named(name: str, known: frozenset[str] = OF_SIDE_FILES) -> bool:
    """Whether a folder is called like one of side files.

    >>> [is_well_named(name) for name in ("hf_tokenizer", "image_processor", "reward_tokenizer")]
    [True, True, False]
    """
    return OF_PARTS.fullmatch(name) is not None or words_of(name) <= known


def words_of(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[ ._-]+", name.lower()))


def rivals(folder: Path, held: Mapping[Path, Mapping[str, Path]]) -> list[Path]:
    """Other folders beside it that have something else of what it has: nothing tells which of them counts."""
    own = held[folder]
    return [
        other
        for other, files in held.items()
        if other != folder and any(not _same(own[kind], files[kind]) for kind in own if kind in files)
    ]


def _same(one: Path, other: Path) -> bool:
    return one.name == other.name and read_small(one) == read_small(other)


def inner_folders(home: Path, found: Found, there: Folders) -> dict[Path, dict[str, Path]]:
    """The folders in a home that hold a config, a tokenizer or a processor, and no weights or state: each with a file of each kind."""
    with contextlib.suppress(Unreadable):  # what cannot be looked at is nothing that was looked for
        return _inner_of(home, found, there)
    return {}


def _inner_of(home: Path, found: Found, there: Folders) -> dict[Path, dict[str, Path]]:
    if any(there.is_file(home / name) for name in IN_PARTS) or not there.is_folder(home):
        return {}
    taken = [
        folder
        for each in (found, *found.more)
        for place in each.places
        for folder in (place.home, place.match.root, *place.match.more_roots)
    ]
    held = {}
    inner = there.folders(home, may_be_inner)[:MOST_INNER]
    if home / COMPONENTS in inner:
        inner += there.folders(home / COMPONENTS, may_be_inner)[:MOST_INNER]
    named = folders_named_in(home) if inner else ()
    for folder in (folder for folder in inner if folder not in named):
        with contextlib.suppress(CkptError):
            kinds = kinds_in(folder, there)
            is_taken = any(path == folder or path.is_relative_to(folder) for path in taken)
            if kinds and not is_taken and not holds_more(folder, there):
                held[folder] = kinds
    return held


def may_be_inner(name: str) -> bool:
    kind = "model" if TOKENIZERS.fullmatch(name) else kind_of(name)
    return kind == "model" and name != HUB_FOLDER and is_searched(name) and not name.isdigit()


def kinds_in(folder: Path, there: Folders) -> dict[str, Path]:
    """A file of each kind of side files in a folder."""
    kinds: dict[str, Path] = {}
    for path in there.files(folder, lambda name: name == CONFIG or has_vocabulary([name]) or name in PROCESSORS):
        if path.name != CONFIG or no_model_config(path) is None:
            kinds.setdefault(kind_of_file(path.name), path)
    return kinds


def holds_more(folder: Path, there: Folders) -> bool:
    """Whether there are weights, an adapter, training state or an output of ckpt in a folder, or below it."""
    known = there.files(folder, lambda name: name in (ADAPTER_CONFIG, MANIFEST) or is_state_file(name))
    return bool(known or recognise(folder, there) or files_with_weights(folder, there)) or held_below(folder, there) != []


def kind_of_file(name: str) -> str:
    return CONFIG if name == CONFIG else "a processor" if name in PROCESSORS else "a tokenizer" if has_vocabulary([name]) else ""
