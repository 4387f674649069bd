"""Second downloads and copies beside the files that are read, by the names that programs give to them: with other content, one is wrong."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from pathlib import Path

from ckpt_cli.discover.beside.files import holds_weights
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.hub.beside.copied import copied_name
from ckpt_cli.hub.beside.names import is_asset_name
from ckpt_cli.names import few
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Component, Note

WHOLE = 1 << 20
"""Bytes of a file that is compared as a whole; of larger ones samples are."""

SAMPLES, LENGTH = 64, 4096


def copy_notes(found: Found, place: Place, component: Component, assets: Iterable[Path], files: Files) -> list[Note]:
    """Notes about copies beside the files that a component and its assets are read from, unless a file of it was passed.

    Copies that have a name of weights are told with all other weights that are left out.
    """
    weights = () if found.is_named(place) else (*place.match.files, *component.files)
    return list(notes_of_copies(set(map(absolute, component.files)), dict.fromkeys((*weights, *assets)), files))


def notes_of_copies(weights: Container[str], read: Collection[Path], files: Files) -> Iterator[Note]:
    """The same about copies beside all files that were ``read``; none of these is one of the ``weights``, which are whole paths."""
    differing: dict[str, str] = {}
    equal: list[str] = []
    lone: list[str] = []
    there, taken = Folders(), {absolute(path): path for path in read}
    for folder in dict.fromkeys(path.parent for path in read):
        for path in there.files(folder, lambda name: copied_name(name) is not None and not holds_weights(name)):
            name = str(copied_name(path.name))
            original = taken.get(absolute(folder / name))
            if absolute(path) in weights:
                continue
            if original is None:
                lone += [path.name] if is_asset_name(name) else []
                continue
            try:
                if _is_equal(original, path, files):
                    equal.append(path.name)
                else:
                    differing[path.name] = name
            except CkptError as error:
                differing[path.name] = f"{name} (not compared: {error.message})"
    if differing:
        text = "; ".join(f"{few([name])} beside {original}" for name, original in list(differing.items())[:3])
        text += f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        text = f"by their names second downloads or copies, which have other content and were not read: {text}"
        yield Note("warning", "second-copy", text)
    if lone:
        text = f"by their names second downloads or copies, which no loader reads, of files that are not beside them: {few(lone, 3)}"
        yield Note("warning", "second-copy", text)
    if equal:
        text = f"{few(equal, 3)}: by their names second downloads or copies of what was read, with the same content as far as samples tell"
        yield Note("info", "second-copy", text)


def _is_equal(path: Path, other: Path, files: Files) -> bool:
    """Whether two files have the same bytes, as samples tell of large ones: their ends, where archives list checksums, are among them."""
    one, two = files.source(path), files.source(other)
    if one.size != two.size:
        return False
    if one.size <= WHOLE:
        return one.read(0, one.size) == two.read(0, two.size)
    step = (one.size - WHOLE // 2) // SAMPLES
    places = [(number * step, LENGTH) for number in range(SAMPLES)] + [(one.size - WHOLE // 2, WHOLE // 2)]
    return all(one.read(*place) == two.read(*place) for place in places)
