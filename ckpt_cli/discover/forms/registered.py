"""Objects that accelerate was given to save with the state, where they hold the weights of the model: an average, or a second model.

Their files are numbered (``custom_checkpoint_K.pkl``), so that only what is in them tells it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import CkptError, UsageError
from ckpt_cli.files.folders import files_in, is_folder
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe, recognise
from ckpt_cli.formats.torch_files.averages import NAMELESS, is_average_name
from ckpt_cli.formats.torch_files.reader import REGISTERED
from ckpt_cli.names import few, stripped_names
from ckpt_cli.tensors.component import Component, Note


def registered_notes(found: Found, place: Place, component: Component, files: Files) -> tuple[Note, ...]:
    """What is said of registered objects that hold the weights of a model, under its names or as a list of as many tensors.

    Raises UsageError for the model in the place of an average (`with_ema_of_model`), if one of them may be the average.
    """
    if found.is_named(place) or not component.tensors:
        return ()
    paths = _paths(found, place)
    named = [path for path in paths if _holds(path, component, files)]
    lists = [path for path in paths if path not in named and _lists(path, files, len(component.tensors))]
    if (named or lists) and _stands_for_average(found, place):
        raise UsageError(
            f"{few([path.name for path in (*named, *lists)], 3)} holds weights like those of the model, so the run may have an EMA",
            path=(named or lists)[0],
            expected="a run without an EMA",
            hint=f"pass {shell.path(named[0])} if it is the EMA" if named else "its tensors have no names: load it with its class",
        )
    notes = []
    if named:
        text = f"{_names(named)} weights of {place.name} under their names, as an average does: to read it, pass {shell.path(named[0])}"
        notes.append(Note("info", "other-weights", text))
    if lists:
        text = f"{_names(lists)} as many tensors as {place.name} without names, as an average does: only its class can load it"
        notes.append(Note("info", "other-weights", text))
    return tuple(notes)


def hint_of_registered(found: Found) -> str | None:
    """Where an average that is asked for may be, if a checkpoint has none: in a registered object that holds weights; None if none does."""
    with Files() as files:
        paths = list(dict.fromkeys(path for place in found.places for path in _paths(found, place)))
        held = [path for path in paths if _has_weights(path, files)]
        if held:
            many = len(held) > 1
            which = (
                f"pass {shell.path(held[0])}, or another of them, if that is it" if many else f"pass {shell.path(held[0])} if that is it"
            )
            return f"{few([path.name for path in held], 3)} (registered with accelerate) {'hold' if many else 'holds'} weights: {which}"
        if any(_lists(path, files) for path in paths):
            return "an object that was registered with accelerate holds tensors without names, as averages do: only its class can load it"
    return None


def _paths(found: Found, place: Place) -> list[Path]:
    folders = [folder for folder in dict.fromkeys((place.home, found.path)) if is_folder(folder)]
    return [path for folder in folders for path in files_in(folder, REGISTERED.fullmatch)]


def _has_weights(path: Path, files: Files) -> bool:
    """Whether a file can be read as a model that has a matrix: schedulers and counters have none."""
    try:
        (match,) = recognise(path)
        return any(len(tensor.shape) > 1 for tensor in describe(match, files, ReadOptions()).tensors.values())
    except (CkptError, ValueError):
        return False


def _names(paths: Sequence[Path]) -> str:
    return f"{few([path.name for path in paths], 3)} (registered with accelerate) {'holds' if len(paths) == 1 else 'hold'}"


def _stands_for_average(found: Found, place: Place) -> bool:
    """Whether a component is the model under the name of an average."""
    return is_average_name(place.name) and not is_average_name(place.match.component) and place.match == found.places[0].match


def _holds(path: Path, component: Component, files: Files) -> bool:
    """Whether most tensors of a model are in a file, and few others, by names and shapes: an average has no buffers and no tied ones."""
    try:
        (match,) = recognise(path)
        held = _shapes(describe(match, files, ReadOptions()))
    except (CkptError, ValueError):
        return False
    own = _shapes(component)
    common = [name for name, shape in own.items() if held.get(name) == shape]
    return 2 * len(common) > len(own) and 2 * len(common) > len(held)


def _shapes(component: Component) -> Mapping[str, tuple[int, ...]]:
    return {new: component.tensors[old].shape for old, new in stripped_names(component.tensors).items()}


def _lists(path: Path, files: Files, count: int = 0) -> bool:
    """Whether a file has an average without names in it, of about as many tensors as the model, which has ``count``."""
    try:
        entries = as_dict(files.parsed(path, TorchFile).root) or {}
    except CkptError:
        return False
    lists = [entries[key] for key in NAMELESS if isinstance(entries.get(key), (list, tuple))]
    return any(2 * len(each) > count for each in lists)
