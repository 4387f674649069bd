"""Stored buffers that a class computes anew and does not load: do they say the same as config.json?

They are the only witnesses of what a training computed with. Files of today's transformers hold none; older versions, and trainers with
code of their own, store them, and loaders pass over them by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_cli.errors import CkptError
from ckpt_cli.hub.classes.computed.frequencies import TABLE, UNSAID, Rotary, contradiction, described, stored_frequencies
from ckpt_cli.hub.classes.fit import KnownClass
from ckpt_cli.hub.config import Config, model_type
from ckpt_cli.hub.layers.counts import tower_of
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few, printable
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.reading import elements, expect_reads, reads_of
from ckpt_cli.tensors.tensor import Tensor

POSITIONS = "position_ids"
SMALL = ("inv_freq", POSITIONS)
"""Ends of names of buffers that are read as a whole."""

OF_ATTENTION = ("attn.bias", "attention.bias", "attn.causal_mask")
"""Ends of names of the masks of GPT-2, GPT-J, GPT-NeoX and CodeGen, which have four dimensions."""

LOCAL = frozenset({"gpt_neo"})
"""Model types with layers that see a window."""

MOST_POSITIONS = 1 << 17
ROUGH = 2**-7
"""The share of an integer by which bfloat16 may have moved it on its way."""

DIFFERS, AGREES = "buffer-differs", "buffer-agrees"
OF_TABLES, OF_OTHERS = "correct config.json", "it needs code of its own"


@dataclass(frozen=True, slots=True)
class StoredBuffers:
    """Names of buffers with the values that config.json gives them, and what is said of others; ``of`` is what computes them anew."""

    of: str = ""
    agreeing: tuple[str, ...] = ()
    differing: Mapping[str, str] = field(default_factory=dict)

    @property
    def told(self) -> frozenset[str]:
        return frozenset((*self.agreeing, *self.differing))

    def notes(self) -> list[Note]:
        texts: dict[str, list[str]] = {}
        for name, text in self.differing.items():
            texts.setdefault(text, []).append(name)
        notes = [Note("warning", DIFFERS, f"{few(grouped(names), 3)}: {text}") for text, names in texts.items()]
        if self.agreeing:
            same = "this has the values that it computes" if len(self.agreeing) == 1 else "these have the values that it computes"
            text = f"{few(grouped(self.agreeing), 3)}: {same} from config.json; {self.of} does not read what is stored"
            notes.append(Note("info", AGREES, text))
        return notes


def stored_buffers(tensors: Mapping[str, Tensor], config: Config, kind: KnownClass | str) -> StoredBuffers:
    """The verdict on buffers that the class of a config does not load. A few hundred bytes of each are read.

    Code of the model's own may load them, and so may a class that is not known. Nothing is said of rotary embeddings of towers, which have
    settings of their own.
    """
    known = isinstance(kind, KnownClass)
    if isinstance(kind, KnownClass) and kind.own:
        return StoredBuffers()
    if not known and (config.get("auto_map") or model_type(config) not in UNSAID):
        return StoredBuffers()
    loaded = {_leaf(name) for name in (*kind.known.native, *kind.known.hub)} if isinstance(kind, KnownClass) else set[str]()
    who = printable(kind.kind) if isinstance(kind, KnownClass) else "what loads the model"
    rotaries = described(config)
    expect_reads(reads_of(tensor for name, tensor in tensors.items() if tensor.numel <= MOST_POSITIONS and _leaf(name).endswith(SMALL)))
    agreeing, differing = list[str](), dict[str, str]()
    for name, tensor in tensors.items():
        if _leaf(name) in loaded and not name.endswith(OF_ATTENTION):
            continue
        if any(piece.source.forward_only for piece in tensor.pieces):
            continue
        said: str | None = None
        with contextlib.suppress(CkptError):  # damage is found elsewhere
            said = _said(name, replace(tensor, alias_of=None), config, rotaries, kind)
        if said:
            advice = OF_TABLES if TABLE.fullmatch(_leaf(name)) else OF_OTHERS
            differing[name] = f"{said}; {who} computes this anew and ignores what is stored: if the model was trained so, {advice}"
        elif said is not None:
            agreeing.append(name)
    agreeing += [name for name in tensors if name.endswith("cos_cached") and name.replace("cos_cached", "sin_cached") in agreeing]
    return StoredBuffers(who, tuple(agreeing), differing)


def _said(name: str, tensor: Tensor, config: Config, rotaries: Sequence[Rotary], kind: KnownClass | str) -> str | None:
    """What is said of a buffer with other values; empty for the same, None for what is no buffer, or of which nothing is sure."""
    leaf = _leaf(name)
    if TABLE.fullmatch(leaf):
        table = stored_frequencies(leaf, tensor) if rotaries and tower_of(name) is None else None
        return contradiction(table, rotaries) if table is not None else None
    if not isinstance(kind, KnownClass):
        return None
    if leaf == POSITIONS:
        return _other_positions(tensor)
    if name.endswith(OF_ATTENTION) and len(tensor.shape) == 4 and not kind.knows(name):
        return _other_mask(tensor, local=model_type(config) in LOCAL)
    return None


def _other_positions(tensor: Tensor) -> str | None:
    import numpy

    count = tensor.numel
    if not 2 <= count <= min(max(tensor.shape), MOST_POSITIONS) or tensor.dtype.kind not in ("int", "float"):
        return None
    stored, expected = elements(tensor), numpy.arange(count)
    values = stored.astype(numpy.float64)
    if bool((stored == expected.astype(stored.dtype)).all()):
        return ""
    apart = ~(numpy.abs(values - expected) <= expected * ROUGH)
    if not apart.any():
        return None
    at = int(numpy.flatnonzero(apart)[0])
    return f"position {at} is stored as {values[at]:g}, and the class counts 0, 1, 2, ..."


def _other_mask(tensor: Tensor, *, local: bool) -> str | None:
    """Some rows of a mask of zeros and ones tell: row i of a causal one sees the first i + 1 positions, or the last of them."""
    size = tensor.shape[-1]
    if tensor.numel != size * size or tensor.shape[-2] != size or size < 2:
        return None
    for row, seen in ((row, [*_seen(tensor, row, size)]) for row in dict.fromkeys((0, size // 2, size - 1))):
        begin = row + 1 - len(seen) if local else 0
        if seen != list(range(begin, row + 1)) or not seen:
            return f"row {row} of the mask stored sees {len(seen)} of {size} positions, and the class lets it see the first {row + 1}"
    return ""


def _seen(tensor: Tensor, row: int, size: int) -> Iterator[int]:
    values = elements(tensor, row * size, size)
    return (number for number, value in enumerate(values.tolist()) if value)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
