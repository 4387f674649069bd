"""Tensors of a model in side files that its class puts in their place when it is asked to: the adapter and head of one language.

A trainer writes such a file once, at the end, into the folder of the run: it goes with the weights of that time alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe, recognise
from ckpt_cli.hub.beside.names import TOKENIZER_CONFIG, has_weight_suffix
from ckpt_cli.hub.beside.processors import content_of
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.loaded_with.read_by_class import asked_for
from ckpt_cli.tensors.equality import same_sample
from ckpt_cli.tensors.tensor import Tensor

LANGUAGE = "target_lang"
"""The entry of a tokenizer's settings that says which language its model has in itself."""


@dataclass(frozen=True, slots=True)
class TensorsBeside:
    """A side file whose ``tensors`` by name loaders put in the place of those of the model when they are asked ``for_what``.

    ``is_own``: it lies in the checkpoint itself. ``is_main``: whether what it is for is what the model has in itself; None if that is not
    known. It is read when it is asked for; one that cannot be read has no tensors, what is wrong with it is found elsewhere.
    """

    name: str
    path: Path
    for_what: str
    tensors: Callable[[], Mapping[str, Tensor]]
    is_own: bool
    is_main: bool | None

    def differing(self, held: Mapping[str, Sequence[Tensor]]) -> list[str]:
        """The names of its tensors that have other values than some that are ``held`` by name; samples tell, either may be rounded."""
        own = self.tensors()
        return [name for name in own if any(not _alike(own[name], each) for each in held.get(name, ()))]


def tensors_beside(side: Mapping[str, Path], config: Config, files: Files, folder: Path) -> tuple[TensorsBeside, ...]:
    """What side files by name hold of tensors of the model of a config; those in or below ``folder`` are its own."""
    said = content_of(side[TOKENIZER_CONFIG]).get(LANGUAGE) if TOKENIZER_CONFIG in side else None
    asked = {name: asked_for(name, config) for name in side if has_weight_suffix(name)}
    return tuple(
        TensorsBeside(
            name,
            side[name],
            for_what,
            cache(partial(_tensors_in, side[name], files)),
            side[name].is_relative_to(folder),
            said == for_what if isinstance(said, str) else None,
        )
        for name, for_what in asked.items()
        if for_what is not None
    )


def _tensors_in(path: Path, files: Files) -> Mapping[str, Tensor]:
    with contextlib.suppress(CkptError):
        matches = [match for match in recognise(path) if match.trouble is None]
        return describe(matches[0], files, ReadOptions()).tensors if matches else {}
    return {}


def others_trained(one: Mapping[str, Tensor], other: Mapping[str, Tensor], beside: Iterable[str]) -> bool:
    """Whether two models differ in a tensor that is not among those ``beside`` them, as far as samples tell."""
    left = set(beside)
    common = [name for name in one if name in other and name not in left]
    return any(not _alike(one[name], other[name]) for name in common)


def _alike(one: Tensor, other: Tensor) -> bool:
    return same_sample(one, other) or same_sample(other, one)
