"""An index none of whose files is there: it came with the other ``.json`` files of a model (``cp base/*.json step/``), or all is lost.

transformers asks for a single file of weights before any index. Where other weights of a model are beside such an index, it is a leftover
of another folder; alone, it says what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ckpt_cli.errors import MissingShard
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.safetensors.names import SUFFIX, is_index
from ckpt_cli.formats.sets.indexes import listed_files
from ckpt_cli.formats.sets.names import part_name
from ckpt_cli.names import few, plural

TORCH_SUFFIX, TORCH_INDEX = ".bin", "pytorch_model.bin.index.json"

MODEL = re.compile(r"((diffusion_)?(pytorch_)?model|consolidated)([._-].*)?\.safetensors|adapter_model\.safetensors", re.ASCII)
"""Single files that are a model, or an adapter, by their names; heads and averages are not all of one."""


def listing_nothing(index: Path, there: Folders) -> MissingShard | None:
    """The error of an index none of whose files is there, nor any other part of a set; None for others, and what cannot be read.

    Only an index without parts beside it is read.
    """
    suffix = SUFFIX if is_index(index.name) else TORCH_SUFFIX
    if there.files(index.parent, lambda name: name.endswith(suffix) and part_name(name) is not None):
        return None
    files = sorted(listed_files(index))
    if not files or any(there.is_file(index.parent / file) for file in files):
        return None
    text = f"{len(files)} of {plural(len(files), 'weight file')} are missing: {few(files)}"
    hint = "copy the missing files from where the model came from"
    return MissingShard(text, path=index, expected=str(index.parent / files[0]), hint=hint)


def indexes_of_nothing(folder: Path, there: Folders) -> dict[Path, MissingShard]:
    """The indexes in a folder none of whose files is there, each with the error of whoever needs them."""
    indexes = there.files(folder, lambda name: is_index(name) or name == TORCH_INDEX)
    return {index: error for index in indexes if (error := listing_nothing(index, there)) is not None}


def leftover_text(index: Path) -> str:
    """What is said of such an index beside other weights."""
    files = listed_files(index)
    which = "the file that it lists is not here" if len(files) == 1 else f"none of the {len(files)} files that it lists is here"
    return f"{which}: it is of another folder, and is not used"


def has_model(names: Sequence[str]) -> bool:
    """Whether a single file of a model is among these."""
    return any(MODEL.fullmatch(name) and part_name(name) is None for name in names)
