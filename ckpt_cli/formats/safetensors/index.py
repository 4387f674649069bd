"""``*.index.json`` of a Hugging Face model: which file holds which tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ckpt_cli.errors import CorruptFile, Inconsistent, MissingShard, PartOfSet, reading
from ckpt_cli.files.folders import is_file, stays_inside
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.formats.sets.names import unlisted_parts
from ckpt_cli.names import few


def check_members(mapping: Mapping[str, str], file: str, inside: Iterable[str]) -> None:
    """A file must hold exactly the tensors that the index assigns to it. Raises Inconsistent."""
    held = set(inside)
    for name, owner in mapping.items():
        if owner == file and name not in held:
            raise Inconsistent("the index says that this tensor is in the file, but it is not", tensor=name)
    for name in held:
        if mapping.get(name) != file:
            hint = "files from two models may be mixed"
            raise Inconsistent("the file holds a tensor that the index does not assign to it", tensor=name, hint=hint)


def listed_files(index: Path, suffix: str) -> dict[str, str]:
    """Tensor name -> file name as an index has it; every file has the ``suffix`` and lies in its folder. Raises CorruptFile."""
    content = parse_json(read_small(index), "the index")
    mapping = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(mapping, dict) or not mapping:
        raise CorruptFile("the index has no weight_map")
    for name, file in mapping.items():
        if not stays_inside(file) or not file.endswith(suffix):
            message = "the index names a file outside of its folder or of another format"
            raise CorruptFile(message, tensor=name, expected=f"a {suffix} file")
    return mapping


def read_weight_map(index: Path, suffix: str) -> dict[str, str]:
    """The same for a model that is whole: every file is there, and none of its set is unlisted.

    Raises CorruptFile, PartOfSet or MissingShard.
    """
    with reading(index):
        mapping = listed_files(index, suffix)
        names = sorted(set(mapping.values()))
        unlisted = unlisted_parts(names)
        if unlisted:
            raise PartOfSet(
                f"the index lists {len(names)} files but not {few(unlisted)}, which their names imply",
                expected="the index of the whole model",
                hint="get the index again from where the model came from",
            )
        absent = [name for name in names if not is_file(index.parent / name)]
        if absent:
            raise MissingShard(
                f"{len(absent)} of {len(names)} weight files are missing: {few(absent)}",
                expected=str(index.parent / absent[0]),
                hint="copy the missing files from where the model came from",
            )
        return mapping
