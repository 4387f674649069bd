"""Schedule-free optimizers that were saved in train mode: the model's weights are then not those that are meant to be used.

Such an optimizer (schedulefree, and others with its options) keeps a point z of each parameter. The model holds y in train mode, between
z and the average x, and x in eval mode. Its parameter groups say which.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ckpt_cli.discover.found import Found, Place
from ckpt_cli.discover.optimizers.files import find_optimizer_files, optimizer_folders
from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.optimizer_state import TrainMode, train_mode_in
from ckpt_cli.formats.registry import format_of, recognise
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.names import printable, unnumbered
from ckpt_cli.tensors.component import Note
from ckpt_cli.urls import is_remote


def train_mode_notes(found: Found, place: Place, files: Files) -> list[Note]:
    """A warning if the optimizer of a component is schedule-free and was saved in train mode. An average is none of its weights."""
    if is_average_name(unnumbered(place.name)[0]):
        return []
    with contextlib.suppress(CkptError):  # weights are what is wanted; `extract-state` refuses such files
        for name, said in _optimizers(found, place, files):
            if said is not None:
                return [Note("warning", "train-mode", _text(place.name, name, said))]
    return []


def _optimizers(found: Found, place: Place, files: Files) -> Iterator[tuple[str, TrainMode | None]]:
    """The places of an optimizer, and what it says of itself; of ranks, the first one's. Of a store, only files with weights are read."""
    homes = [place.home, *place.more_homes, found.path, place.match.first.parent] if not is_remote(place.match.root) else []
    folders = [match for folder in optimizer_folders(homes, place.match.number) for match in recognise(folder)]
    for match in (*folders, place.match):
        yield match.root.name, format_of(match).train_mode(match, files)
    owned = format_of(place.match).optimizer_files(place.match, files)
    listed = owned or find_optimizer_files(homes, place.match.number)
    if listed is not None:
        file = listed.ranks[min(listed.ranks)]
        # What is not among the weights is read for this alone, and not kept.
        yield file.name, train_mode_in(files.parsed(file, TorchFile) if file in place.match.files else TorchFile(files.source(file)))


def _text(component: str, name: str, said: TrainMode) -> str:
    beta = f"{next(iter(said.betas)):g}" if len(said.betas) == 1 else "beta1"
    mode = f"the optimizer in {printable(name)} is schedule-free and was saved in train mode"
    held = f"{component}, if saved with it, holds the weights y that gradients are taken at, not the averaged ones that are meant for use"
    way = f"save after optimizer.eval(), or compute y.lerp(z, 1 - 1/{beta}), with z from the optimizer's state of each parameter"
    return f"{mode}: {held}; {way}"
