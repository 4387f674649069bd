"""What lies beside a component and may hold what it lacks: the same model in another form, or a file with the rest of it.

It is looked for where something is missing, before anything from elsewhere is proposed. Nothing of it is ever read in the place of what
was recognised: which of the two is meant, only the user knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.beside.files import weights_in
from ckpt_cli.discover.beside.models import folders_with_model, under_hub_names, unequal
from ckpt_cli.discover.found import Place
from ckpt_cli.discover.nodes.also import fetch_hint
from ckpt_cli.errors import CkptError, CorruptFile, MissingShard, NotFetched
from ckpt_cli.files.folders import is_file, is_folder
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe, recognise
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.formats.weight_names import AVERAGED
from ckpt_cli.hub.config import Config
from ckpt_cli.names import few, stripped_names, unnumbered
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.tensor import Tensor

MOST = 16
"""Files and folders that are looked into: a folder may hold a file for every epoch."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Weights beside a component: the path by which they are read alone, and their tensors, as stored and as a merge names them.

    ``cut`` are tensors of the component that it has in another shape or not at all, ``changed`` those with other values, by samples.
    """

    path: Path
    shown: str
    tensors: Mapping[str, Tensor]
    cut: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def agreement(self) -> str:
        """How its values are related to those of the component, all of whose tensors it has."""
        if self.changed:
            return f"but {few(self.changed, 1)} with other values, so that one of the two may be of another step"
        return "and the others with the same values (samples are equal)"


def holders_beside(place: Place, held: Mapping[str, Tensor], config: Config, files: Files) -> Iterator[Holder]:
    """The weights beside a component with these tensors, in what could be its model or a part of it; no average is, nor what is damaged."""
    mine = under_hub_names(held, config)
    for path in itertools.islice(_paths_beside(place, files), MOST):
        tensors = _tensors_at(path, files)
        if not tensors:
            continue
        named = under_hub_names(tensors, config)
        cut = tuple(name for name in mine if name not in named or named[name].shape != mine[name].shape)
        try:
            changed = unequal(mine, named)
        except CkptError:
            continue  # what cannot be read helps nobody
        shown = f"{path.name}/" if is_folder(path) else path.name
        stored = {new: tensors[old] for old, new in stripped_names(tensors).items()}
        yield Holder(path, shown, {**stored, **named}, cut, tuple(changed))


def tell_whole_form(error: CkptError, place: Place, files: Files) -> None:
    """Say in the hint of an error about files that are missing or damaged which other form of the model beside them can be read."""
    if not isinstance(error, (MissingShard, CorruptFile, NotFetched)):
        return
    for path in _forms_of(place):
        if _tensors_at(path, files):
            other = f"{path.name} beside it is another form of the model and can be read: pass {shell.path(path)}"
            advice = error.advice or fetch_hint(place.match.root)
            # A match whose names show its trouble raises one error, however often it is described.
            error.hint = advice if other in advice else f"{advice}, or, if it is of the same step: {other}"
            return


def _paths_beside(place: Place, files: Files) -> Iterator[Path]:
    """Where weights lie beside a component, each once: its other forms, files in its folders, model folders in these."""
    if is_average_name(unnumbered(place.name)[0]):
        return  # of an average, the model beside it is no other form
    used = {absolute(path) for path in place.match.files}
    seen = set(used)
    roots = [root for root in dict.fromkeys((place.match.root, place.home)) if is_folder(root)]
    roots = roots or list(dict.fromkeys(path.parent for path in place.match.files))
    inside = (path for root in roots for path in weights_in(root, used, files))
    for path in itertools.chain(_forms_of(place), inside, folders_with_model(place)):
        # An output of ckpt in a folder of its own was made from this save, or from another one.
        if absolute(path) not in seen and not AVERAGED.fullmatch(path.name) and not is_file(path / MANIFEST):
            seen.add(absolute(path))
            yield path


def _forms_of(place: Place) -> Iterator[Path]:
    """Other readings of the component, by the path that names each alone."""
    for other in place.passed_over:
        path = other.folder or other.match.first
        if any(match.files == other.match.files for match in recognise(path)):
            yield path


def _tensors_at(path: Path, files: Files) -> Mapping[str, Tensor]:
    """The tensors of the model at a path; none where it cannot be read as one."""
    try:
        matches = [match for match in recognise(path) if match.trouble is None and not is_average_name(unnumbered(match.component)[0])]
        return describe(matches[0], files, ReadOptions()).tensors if matches else {}
    except CkptError:
        return {}
