"""Whether another weights file holds the same values as the one that is read: judged by samples of every tensor, never by shapes alone.

Another step has other values in nearly every matrix, so that some sample of some tensor differs. What could not be compared says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe, recognise
from ckpt_cli.hub.tied_names import tied_pair
from ckpt_cli.names import few, stripped_names
from ckpt_cli.tensors.equality import same_samples
from ckpt_cli.tensors.tensor import Tensor


def difference_from(path: Path, tensors: Mapping[str, Tensor], files: Files) -> str | None:
    """How the tensors in a file (or in the parts of an index) differ from those of a model, or why that was not compared.

    None if they are the same as far as samples tell.
    """
    matches = recognise(path)
    if not matches:
        return "which was not compared: it is not recognised as weights"
    try:
        if matches[0].trouble is not None:
            raise matches[0].trouble
        return difference(tensors, describe(matches[0], files, ReadOptions()).tensors)
    except CkptError as error:
        return f"which was not compared: {error.message}"


def difference(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> str | None:
    """How other weights differ from ``tensors``; None if they have all of these with equal samples, and no more weights.

    What shares its storage with another tensor, and buffers of integers (as older versions of transformers saved them), is no more.
    A tied head that has the values of the embedding, as samples tell, may be missing.
    """
    try:
        mine = {new: tensors[old] for old, new in stripped_names(tensors).items()}
    except CkptError as error:
        return f"which was not compared: {error.message}"
    if not mine or not others:
        return "which was not compared: one of them holds no tensors"
    found = {name: others[name] for name in mine if name in others}
    head, embedding = tied_pair(list(mine)) or ("", "")
    for lacking, partner in ((head, embedding), (embedding, head)):
        # The partner's bytes stand for both; that the values are those of the other is compared below, as for all.
        if lacking in mine and lacking not in others and partner in others:
            found[lacking] = others[partner]
    held = {piece.same_bytes_as[:2] for tensor in found.values() for piece in tensor.pieces}
    more = [name for name, tensor in others.items() if name not in mine and tensor.numel and tensor.dtype.kind != "int"]
    more = [name for name in more if not all(piece.same_bytes_as[:2] in held for piece in others[name].pieces)]
    kinds = {
        "without": [name for name in mine if name not in found],
        "also with": more,
        "with another shape of": [name for name, tensor in found.items() if tensor.shape != mine[name].shape],
        "with another dtype of": [name for name, tensor in found.items() if tensor.dtype != mine[name].dtype],
    }
    said = [f"{text} {few(names, 2)}" for text, names in kinds.items() if names]
    if said:
        return ", ".join(said)
    if any(piece.source.forward_only for side in (mine, found) for tensor in side.values() for piece in tensor.pieces):
        return "with the same names and shapes; its values were not compared, as compressed files are only read from their beginning on"
    changed = next((name for name, tensor in found.items() if not same_samples(mine[name], tensor)), None)
    return None if changed is None else f"with other values of {changed} (samples differ)"
