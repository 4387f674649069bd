"""The items of a save: in which files they are, which hold weights, and which make up one model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ckpt_cli.errors import CkptError, Inconsistent, reading
from ckpt_cli.files.folders import Folders, is_file
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.dcp.groups import MODEL
from ckpt_cli.formats.rank_files.dtensor import LocalReader
from ckpt_cli.formats.sets.parts import PART, with_parts
from ckpt_cli.formats.torch_checkpointing.metadata import FORM_OF, ITEM_FILE, METADATA, Item, ItemFile, Saved
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.formats.torch_files.groups import groups_of
from ckpt_cli.formats.torch_files.matrices import is_tensor
from ckpt_cli.formats.torch_files.state_dict import holds_storage
from ckpt_cli.formats.training_state_names import is_record_key, is_state_key
from ckpt_cli.formats.unused.search import DataSearch, Unused
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

MAIN = "model"


def named_items(folder: Path, there: Folders) -> dict[str, dict[int, Path]]:
    """The files of each item by rank, as their names say."""
    items: dict[str, dict[int, Path]] = {}
    for path in there.files(folder, ITEM_FILE.fullmatch):
        if (fields := ITEM_FILE.fullmatch(path.name)) is not None:
            items.setdefault(fields["item"], {})[int(fields["rank"])] = path
    return {name: dict(sorted(ranks.items())) for name, ranks in items.items()}


def ranks_of_state(items: Mapping[str, Mapping[int, Path]]) -> int:
    """How many ranks wrote a save whose metadata are lost, by the items that are state of all ranks; 0 if there are none."""
    return max((len(ranks) for name, ranks in items.items() if is_state_key(name) and max(ranks) == len(ranks) - 1), default=0)


def item_of(name: str, match: Match, saved: Saved) -> Item:
    """An item of a save; of one that the metadata does not list, names alone tell the files. Raises Inconsistent for impossible ranks."""
    if name in saved.items:
        return saved.items[name]
    files: dict[int, ItemFile] = {}
    for root in (match.root, *match.more_roots):
        for rank, path in named_items(root, Folders()).get(name, {}).items():
            files.setdefault(rank, ItemFile(path.name, FORM_OF[path.suffix.removeprefix(".")]))
    if files and max(files) >= saved.world_size:
        path = match.root / files[max(files)].path
        raise Inconsistent(f"the file is of rank {max(files)}, but {saved.world_size} ranks wrote this save", path=path)
    suffix = next((file.path.rpartition(".")[2] for file in files.values()), "pt")
    return Item({rank: files.get(rank, ItemFile(f"{name}_{rank}.{suffix}", FORM_OF[suffix])) for rank in range(saved.world_size)}, {})


def all_items(match: Match, saved: Saved) -> list[str]:
    """The items of a save, those that the metadata lists first."""
    named = (name for root in (match.root, *match.more_roots) for name in named_items(root, Folders()))
    return list(dict.fromkeys((*saved.items, *named)))


def weights(match: Match, saved: Saved, files: Files) -> list[str]:
    """The items that hold weights."""
    return [name for name in all_items(match, saved) if _holds_weights(name, match, saved, files)]


def models(items: Iterable[str]) -> dict[str, list[str]]:
    """Models and the items that they lie in, mostly one each: the main one first, averages last. Raises PartOfSet."""
    made = with_parts(items)
    return {
        name: made[name] for name in sorted(made, key=lambda name: (name != MAIN, not is_model_name(name), is_average_name(name), name))
    }


def notes_of_others(main: str, others: Sequence[str]) -> list[Note]:
    """Notes about models beside the main one; a warning for those that could be the model, or a part of it."""
    doubtful = [
        name for name in others if not is_average_name(name) and (main != MAIN or PART.fullmatch(name) or not MODEL.fullmatch(name))
    ]
    told = [f"{name} (--type {name})" for name in doubtful]
    known = [f"{name} (--type {name})" for name in others if name not in doubtful]
    notes = []
    if told:
        text = f"the folder also holds weights of {few(told)}, which are not in this component"
        notes.append(Note("warning", "other-groups", text, tuple(doubtful)))
    if known:
        text = f"the folder also holds {few(known)}"
        notes.append(Note("info", "other-components", text, tuple(name for name in others if name not in doubtful)))
    return notes


def unused_items(match: Match, saved: Saved, files: Files) -> Unused:
    """What the items that hold no weights have beside the state of the training; the file of the first rank that is there tells."""
    level: dict[str, object] = {}
    kept = set(weights(match, saved, files))
    for name in (name for name in all_items(match, saved) if name not in kept and not is_state_key(name)):
        path = next((path for file in item_of(name, match, saved).files.values() if (path := path_of(file, match)) is not None), None)
        with contextlib.suppress(CkptError):  # who asks for state is told
            level[name] = files.parsed(path, TorchFile).root if path is not None and path.suffix == ".pt" else None
    return DataSearch().unused(level)


def notes_of_unlisted(name: str, saved: Saved) -> list[Note]:
    """A warning about weights that the metadata do not list, beside some that they do: a save leaves the files of earlier ones."""
    listed = [other for other, item in saved.items.items() if item.tensors and not is_state_key(other)]
    if name in saved.items or not listed:
        return []
    text = f"{METADATA} lists {few(listed)} and not {name}: it was saved without a resharder, or is of an earlier save into this folder"
    return [Note("warning", "unlisted-item", text)]


def _holds_weights(name: str, match: Match, saved: Saved, files: Files) -> bool:
    if is_state_key(name):
        return False
    if name in saved.items:
        return any(len(sharding.shape) > 1 for entries in saved.items[name].tensors.values() for _, sharding in entries)
    if is_record_key(name):
        return False
    # The metadata does not list it, so that its file is asked: a dict of numbers is no model.
    path = next((path for file in item_of(name, match, saved).files.values() if (path := path_of(file, match)) is not None), None)
    if path is None or path.suffix != ".pt":
        return path is not None and path.suffix == ".safetensors"
    try:
        file = files.parsed(path, TorchFile)
    except CkptError:
        # What cannot be read is not known to be none.
        return True
    if is_tensor(file.root):
        return False  # no state dict: `unused_items` tells what it is
    reader = LocalReader(file, 0)
    try:
        with reading(path):
            group = groups_of(file, MAIN, reader)[1][0]
            return any((local := reader.read(node)) is not None and len(local.shape) > 1 for node in group.entries.values())
    except CkptError:
        return holds_storage(file.root)


def is_model_name(name: str) -> bool:
    """Whether an item is called like a model."""
    return not is_state_key(name) and (MODEL.fullmatch(name) is not None or is_average_name(name))


def path_of(file: ItemFile, match: Match) -> Path | None:
    """Where a file of an item is, of the folders of all nodes; None if it is in none."""
    return next((root / file.path for root in (match.root, *match.more_roots) if is_file(root / file.path)), None)
