"""Folders that hold weights beside those that are read: a projector, an encoder, another part of the model, or an older copy of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_cli.discover.around.given_otherwise import is_given_otherwise
from ckpt_cli.discover.beside.files import holds_any_weights
from ckpt_cli.discover.beside.folders import Held, files_with_weights, held_below, kind_of
from ckpt_cli.discover.beside.models import comparison_with_folder
from ckpt_cli.discover.forms.inner_runs import CODE as RUN_BELOW
from ckpt_cli.discover.forms.inner_runs import runs_below
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import Unreadable
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.registry import format_of
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.trainers import CERTAIN, has_form
from ckpt_cli.hub.assets import HUB_FOLDER
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.peft_names import ADAPTER_FOLDER, has_adapters
from ckpt_cli.names import few
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.tensor import Tensor

FORMS = re.compile(
    r"(onnx|openvino|gguf|ggml|core_?ml|tflite|tf|tensorflow|flax|jax|mlx|rust|quanti[sz]ed|int[48]|fp8)([._-].*)?", re.IGNORECASE
)
"""Folders with the same weights in forms for other programs."""

OF_MODULES = re.compile(r"(experts?|layers?|blocks?)[-_.]?[0-9]+", re.ASCII | re.IGNORECASE)
"""Folders of single modules of a model, where others with a number are of ranks."""

NUMBER = re.compile(r"[-_.]?[0-9]{1,6}\Z", re.ASCII)


def sibling_notes(found: Found, place: Place, held: Component, config: Config, files: Files, told: Collection[Path]) -> list[Note]:
    """What is said of folders with weights that are in no component, from the folder that was passed down to that of the weights.

    What lies beside a folder that was passed is none of its own, unless it is called like another part of it. ``told`` are folders of
    which something else is said.
    """
    top, root = found.given or found.path, place.match.root
    if not root.is_relative_to(top):
        return []
    passed = (other.folder for each in found.places for other in each.passed_over if other.folder is not None)
    taken = {folder for each in found.places for folder in (each.match.root, *each.match.more_roots, *(f.parent for f in each.match.files))}
    tops = (top, place.home) if place.home.is_relative_to(top) else (top,)
    return notes_below(tops, root, {*taken, *told, *passed}, place.name, held.tensors, config, files, read=held.files)


def notes_below(
    tops: Sequence[Path],
    root: Path,
    taken: Collection[Path],
    name: str,
    tensors: Mapping[str, Tensor],
    config: Config,
    files: Files,
    *,
    read: Iterable[Path],
) -> list[Note]:
    """The notes about folders below the ``tops``, of which ``root`` is read; those that are ``taken``, or around such, are none of them.

    Neither are those whose weights are among the files that were ``read``: an index may name files in folders.
    """
    own = set(read)
    there = Folders()
    try:
        if not there.is_folder(root):
            return []  # beside a single file anything may lie
        runs = dict(found for top in dict.fromkeys(tops) for found in _told_runs_below(top, {root, *taken}, there))
        runs = {folder: text for folder, text in runs.items() if not is_given_otherwise(folder, root, files)}
        # From above, nothing is looked for in a folder that is read.
        below = {entry.path: entry for top in dict.fromkeys((*tops, root)) for entry in held_below(top, there) or ()}
        below = {path: entry for path, entry in below.items() if not is_given_otherwise(path, root, files)}
        held = [
            entry for entry in below.values() if _counts(entry, root, taken, own, files) and not any(map(entry.path.is_relative_to, runs))
        ]
        adapters = _adapters_below(root, tops[1:], taken, runs, tensors, below.values(), there)
        numbered = _numbered(root, there, taken) if root in tops and step_of(root.parent) is not None else []
        held += [entry for entry in numbered if not is_given_otherwise(entry.path, root, files)]
    except Unreadable:
        return []  # no weights are read from there
    notes, others = [*_told_of_runs(runs, name), *_told_of_adapters(adapters, name)], []
    for entry in (entry for entry in held if entry.kind != "copy"):
        if entry.path.name == HUB_FOLDER and entry.matches and all(match.lists_nothing for match in entry.matches):
            continue  # the side files of a model, with the index of a base among them
        comparison = comparison_with_folder(entry.path, tensors, config, files) if entry.matches else None
        if comparison is None:
            others.append(f"{entry.name}/")
        else:
            notes.append(Note(comparison.level, "other-folders", f"{name} was read; {comparison.text}"))
    copies = [f"{entry.name}/" for entry in held if entry.kind == "copy"]
    if others:
        missing = "it belongs to the model, that part is" if len(others) == 1 else "they belong to the model, these parts are"
        text = f"{few(others, 4)} {_verb(others)} weights too, and {_was(others)} not read: if {missing} missing from {name}"
        notes.append(Note("warning", "other-folders", text))
    if copies:
        text = f"{few(copies, 4)} {_verb(copies)} weights too, by name those of another model or an older copy, and {_was(copies)} not read"
        notes.append(Note("info", "other-folders", text))
    return notes


def _adapters_below(
    root: Path,
    homes: Sequence[Path],
    taken: Collection[Path],
    runs: Collection[Path],
    tensors: Mapping[str, Tensor],
    below: Iterable[Held],
    there: Folders,
) -> list[str]:
    """The folders of adapters in that of the weights, or in one of its ``homes``, that nothing else is read of."""
    inside = held_below(root, there) or ()
    found: list[str] = []
    for entry in (*inside, *below):
        home = next((folder for folder in (root, *homes) if entry.path.is_relative_to(folder)), None)
        if entry.kind != "adapter" or home is None or any(map(entry.path.is_relative_to, runs)):
            continue
        if entry.path == root or (entry.path == home and not files_with_weights(home, there)):
            continue  # an adapter_config.json there is one of the weights, and other files beside these have notes of their own
        name = entry.path.relative_to(home) if entry.path != home else Path(home.name)
        # What is read as another component has adapters of its own, and a trainer's folder those that the shards hold too.
        others = any(folder not in (root, home) and entry.path.is_relative_to(folder) for folder in taken)
        of_shards = name.parts[-1] == ADAPTER_FOLDER and has_adapters(tensors)
        if not (others or of_shards or any(kind_of(part) in ("apart", "average") for part in name.parts)):
            found.append(name.as_posix())
    return list(dict.fromkeys(found))


def _told_of_adapters(folders: Sequence[str], name: str) -> list[Note]:
    if not folders:
        return []
    return [Note("warning", "adapters-beside", f"LoRA adapters in {few(folders)}, beside the weights of {name}, are left out")]


def _told_runs_below(top: Path, taken: Collection[Path], there: Folders) -> Iterator[tuple[Path, str]]:
    """The runs below a folder, each with the names of its steps."""
    for folder, steps in runs_below(top, taken, there):
        yield folder, f"{folder.relative_to(top)}/ ({few([step.path.name for step in steps], 2)})"


def _told_of_runs(runs: Mapping[Path, str], name: str) -> list[Note]:
    if not runs:
        return []
    what = (
        "holds a run of its own, which was not read: if that" if len(runs) == 1 else "hold runs of their own, which were not read: if one"
    )
    return [
        Note(
            "warning",
            RUN_BELOW,
            f"{few(list(runs.values()), 3)} beside the weights of {name} {what} is meant, pass {few(list(map(str, runs)), 3)}",
        )
    ]


def _counts(entry: Held, root: Path, taken: Collection[Path], read: Collection[Path], files: Files) -> bool:
    """Whether a folder holds weights that nothing else is said of."""
    if entry.kind in ("apart", "adapter", "output") or any(format_of(match).in_tags for match in entry.matches):
        return False
    if entry.matches and all(path in read for match in entry.matches for path in match.files):
        return False
    if any(folder == entry.path or folder.is_relative_to(entry.path) for folder in (root, *taken)):
        return False
    if entry.path.is_relative_to(root):
        if entry.kind == "part":
            return bool(entry.matches) and OF_MODULES.fullmatch(entry.path.name) is not None
        if entry.matches:
            return True
        return FORMS.fullmatch(entry.path.name) is None and holds_any_weights(entry.path, set(map(absolute, read)), files)
    return not any(entry.path.is_relative_to(folder) for folder in taken) and FORMS.fullmatch(entry.path.name) is None


def _numbered(root: Path, there: Folders, taken: Collection[Path]) -> list[Held]:
    """The folders beside one that are called like it but for a number: parts of one model, or several of one kind."""
    stem = NUMBER.sub("", root.name)
    alike = [entry for entry in held_below(root.parent, there) or () if entry.path.parent == root.parent]
    alike = [entry for entry in alike if NUMBER.sub("", entry.name) == stem and not has_form(entry.name, CERTAIN)]
    return [entry for entry in alike if entry.path != root and entry.path not in taken and kind_of(entry.name) != "apart"]


def _verb(names: Collection[str]) -> str:
    return "holds" if len(names) == 1 else "hold"


def _was(names: Collection[str]) -> str:
    return "was" if len(names) == 1 else "were"
