"""Whether the three lists in the metadata of a DCP folder agree: the entries, the places of their bytes, and the planner's paths.

torch writes them together, and every name is in all of them. They part where a file was changed afterwards, or two were mixed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.errors import Inconsistent
from ckpt_cli.formats.training_state_names import is_state_key, is_trainer_key
from ckpt_cli.names import few, is_extra_state
from ckpt_cli.tensors.component import Note

if TYPE_CHECKING:
    from ckpt_cli.boxes import Box
    from ckpt_cli.formats.dcp.metadata import CatalogTensor, Stored

MIXED = "the metadata may have been changed, or be made of two saves: get it again from where it was written"

Path = tuple[str | int, ...]


def planned(paths: Mapping[object, object]) -> dict[object, Path]:
    """The paths of nested keys that the planner lists, by names.

    Raises Inconsistent if two names have one path: of two tensors there one would be lost.
    """
    found: dict[object, Path] = {}
    owners: dict[Path, object] = {}
    for name, path in paths.items():
        if isinstance(path, (tuple, list)) and path and all(isinstance(part, (str, int)) for part in path):
            keys = found[name] = tuple(path)
            if (other := owners.setdefault(keys, name)) != name:
                raise Inconsistent(f"the planner data give it the path of {other}", tensor=str(name), hint=MIXED)
    return found


class Prefixes:
    """Where names belong that the planner does not list: below the longest dict whose keys their text begins with.

    torch makes a name of the keys of a path with dots between them, so that its text tells as much.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._above = {".".join(map(str, path[:depth])): path[:depth] for path in paths for depth in range(1, len(path))}

    def keys(self, name: str) -> Path:
        """The path of nested keys of a name.

        >>> Prefixes([("model", "norm.weight")]).keys("model.norm.bias"), Prefixes([]).keys("model.norm.bias")
        (('model', 'norm.bias'), ('model.norm.bias',))
        """
        end = len(name)
        while (end := name.rfind(".", 0, end)) > 0:
            above = self._above.get(name[:end])
            if above is not None and end + 1 < len(name):
                return (*above, name[end + 1 :])
        return (name,)


def lost_names(planner: Iterable[object], stored: Iterable[object], entries: Container[object], endings: Container[str]) -> list[str]:
    """Names of tensors that only the ``planner`` or the places of ``stored`` tensors list: what a save, or who changed it, left out.

    Early versions of torch plan objects of ranks that did not write them: a name that is planned alone counts if it ends like tensors do,
    with one of ``endings``. Who takes an optimizer out of a folder takes its entries, and may leave the rest.
    """
    planned_too = (name for name in planner if isinstance(name, str) and name.rpartition(".")[2] in endings)
    lost = dict.fromkeys(name for name in (*stored, *planned_too) if isinstance(name, str) and name not in entries)
    return [name for name in lost if not is_extra_state(name) and not any(map(_is_of_trainer, name.split(".")))]


def _is_of_trainer(key: str) -> bool:
    return is_state_key(key) or is_trainer_key(key)


def lost_notes(lost: Sequence[str], metadata: str) -> list[Note]:
    """A warning about names without a tensor."""
    if not lost:
        return []
    names, they = ("this name", "it is") if len(lost) == 1 else (f"these {len(lost)} names", "they are")
    text = f"{few(lost, 3)}: {metadata} lists {names}, and no tensor of it: {they} not in the result"
    return [Note("warning", "lost-entries", text)]


def shared_places(tensors: Iterable[CatalogTensor]) -> dict[Stored, tuple[str, str]]:
    """Places at which two tensors are said to be, with the names of both: only a blob of safetensors holds several.

    Raises Inconsistent if two chunks of one tensor are said to be the same bytes: torch writes each chunk for itself.
    """
    owners: dict[Stored, tuple[str, Box]] = {}
    shared: dict[Stored, tuple[str, str]] = {}
    for tensor in tensors:
        for box, places in tensor.chunks.items():
            for stored in places:
                other, theirs = owners.setdefault(stored, (tensor.name, box))
                if other != tensor.name:
                    shared[stored] = other, tensor.name
                elif theirs != box:
                    text = f"its chunks at {list(theirs.offset)} and {list(box.offset)} are said to be the same bytes of {stored.file}"
                    raise Inconsistent(text, tensor=tensor.name, hint=MIXED)
    return shared
