"""Signs that the files of one model are from two exports of it: what names and shapes do not show, since both have the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_cli.formats.safetensors.index import Index, Problem
from ckpt_cli.name_patterns import pattern_of
from ckpt_cli.names import few, plural
from ckpt_cli.tensors.tensor import Tensor

Held = Mapping[str, Mapping[str, Tensor]]
"""File -> its tensors."""

PLAIN = ("float16", "bfloat16", "float32", "float64")
"""Dtypes in which a trainer exports whole models. Codes are of single layers: quantisers leave the first or the last ones as they are."""

WIDTHS = (1, 2, 4, 8)
FEWEST = 2
"""Kinds of weights that one layer alone may well have in another dtype."""


def signs(index: Index, held: Held) -> Iterator[Problem]:
    """What shows in the files of an index, all of which can be read."""
    mixed = list(_mixed(held))
    total = sum(tensor.nbytes for tensors in held.values() for tensor in tensors.values())
    yield from mixed
    yield from index.miscounted(total, is_usual=not mixed and _is_usual(index.total, total, held))


def _mixed(held: Held) -> Iterator[Problem]:
    """Files in which weights have another dtype than the same weights of other layers have in other files.

    A model of several dtypes has them by the kind of a weight (norms, routers), or in layers and parts of these that do not end where
    files do: the fewer files would be of one dtype only by chance.
    """
    dtypes: dict[str, dict[str, set[str]]] = {}
    for file, tensors in held.items():
        for name, tensor in tensors.items():
            dtypes.setdefault(pattern_of(name)[0], {}).setdefault(file, set()).add(tensor.dtype.torch)
    differing = [of for of in dtypes.values() if len(set().union(*of.values())) > 1]
    differing = [of for of in differing if set().union(*of.values()) <= set(PLAIN)]
    exports: dict[str, set[str]] = {}
    for of in differing:
        for file, found in of.items():
            exports.setdefault(file, set()).update(found)
    if len(differing) < FEWEST or any(len(found) > 1 for found in exports.values()):
        return
    files: dict[str, list[str]] = {}
    for file, (dtype,) in sorted(exports.items()):
        files.setdefault(dtype, []).append(file)
    fewest = min(len(names) for names in files.values())
    rare = {dtype: names for dtype, names in files.items() if len(names) == fewest}
    if any(
        tensor.dtype.torch in files.keys() - {dtype} for dtype, names in rare.items() for name in names for tensor in held[name].values()
    ):
        return
    said = " and ".join(f"{dtype} in {few(names)}" for dtype, names in sorted(files.items()))
    text = f"{plural(len(differing), 'kind')} of weights are {said}: these files may be from two exports"
    yield Problem("mixed-exports", text, file=rare[min(rare)][0], is_told=True)


def _is_usual(said: object, total: int, held: Held) -> bool:
    """Whether a size that is not that of the files is one that writers of sound indexes are known for, or no size.

    They count elements, keep the size from before the whole model was cast, or count a tensor twice that is tied.
    """
    if type(said) not in (int, float) or not said or said < 0:  # type: ignore[operator]
        return True
    tensors = [tensor for of in held.values() for tensor in of.values()]
    elements = sum(tensor.numel for tensor in tensors)
    return said in {elements * width for width in WIDTHS} | {total + tensor.nbytes for tensor in tensors if len(tensor.shape) > 1}
