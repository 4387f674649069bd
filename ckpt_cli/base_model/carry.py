"""What an output takes from a base without matching it: tensors that training left out, and dtypes."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence

from ckpt_cli.dtypes import Dtype
from ckpt_cli.errors import Inconsistent, NotFound
from ckpt_cli.hub.classes.absent.moved_names import moved_names
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few, plural, printable
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor


def carried_tensors(
    tensors: Mapping[str, Tensor],
    on_purpose: Collection[str],
    base: Mapping[str, Tensor],
    globs: Sequence[str],
    together: Mapping[str, str],
) -> tuple[dict[str, Tensor], list[Note]]:
    """The tensors of the base that ``globs`` name, besides ``tensors`` and those left out ``on_purpose``, and notes about them.

    What the model ties to a tensor that was trained is none: the base's own would undo the training. ``together`` says what tied names
    have in common. Raises NotFound for a glob that no tensor of the base matches.
    """
    trained = {together[name]: name for name in tensors if name in together}
    tied = {name: trained[together[name]] for name in base if name not in tensors and together.get(name) in trained}
    there = {*tensors, *on_purpose}
    for glob in globs:
        if not any(fnmatch.fnmatchcase(name, glob) for name in base):
            raise NotFound(
                f"--carry-from-base {printable(glob)} matches no tensor of the base",
                expected="a pattern for whole names, such as 'model.visual.*'",
                hint="ckpt inspect --all with the base's folder lists its names",
            )
    named = [name for name in base if name not in there and any(fnmatch.fnmatchcase(name, glob) for glob in globs)]
    taken = {name: base[name] for name in named if name not in tied}
    idle = [glob for glob in globs if not any(fnmatch.fnmatchcase(name, glob) for name in named)]
    why = "the run already has all of these, or they were left out"
    notes = [Note("warning", "unused-pattern", f"--carry-from-base {printable(glob)}: {why}") for glob in idle]
    for name in named:
        if name in tied:
            text = f"{printable(name)} is not taken from the base: config.json ties it to {printable(tied[name])}, which was trained"
            notes.append(Note("info", "tied-head", text))
    others = {name: tensor.shape for name, tensor in tensors.items() if name not in base}
    moved = moved_names({name: tensor.shape for name, tensor in taken.items()}, others)
    if moved:
        text = f"{len(moved)} of the tensors taken from the base are in the run under other names, which are not used in their place"
        notes.append(Note("warning", "carried-beside", f"{text}: {few(grouped(list(moved.values())), 3)}; --key-map renames them"))
    return taken, notes


def dtypes_of_base(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> tuple[dict[str, Dtype], list[Note]]:
    """The dtype of each tensor that the base also has, for ``--dtype base``; others keep theirs, which is reported.

    Raises Inconsistent if no cast converts one into the other.
    """
    dtypes: dict[str, Dtype] = {}
    for name in tensors.keys() & base.keys():
        mine, theirs = tensors[name].dtype, base[name].dtype
        if mine != theirs and not mine.kind == theirs.kind == "float":
            raise Inconsistent(
                f"{mine} cannot be cast to the base's {theirs}",
                tensor=name,
                expected="floating dtypes on both sides",
                hint="leave it out with --exclude, or name the dtype instead of --dtype base",
            )
        dtypes[name] = theirs
    kept = [name for name in tensors if name not in base]
    text = (
        f"{plural(len(kept), 'tensor is not in the base and keeps its', 'tensors are not in the base and keep their')} dtype: {few(kept)}"
    )
    return dtypes, [Note("warning", "dtype-kept", text)] if kept else []
