"""Files under names that no loader reads, which are nearly those of side files: in other letters, with a suffix more, as a copy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from ckpt_cli.errors import CkptError
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.beside.copied import copied_name
from ckpt_cli.hub.beside.model_config import no_model_config
from ckpt_cli.hub.beside.names import ASSET_NAMES, CONFIG, OF_VOCABULARY, VOCABULARIES, has_weight_suffix
from ckpt_cli.hub.beside.tokenizers import has_vocabulary
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

MORE = re.compile(
    r"(?P<name>.+\.[a-z]\w*)\.txt|(?P<twice>.+(?P<end>\.[a-z]\w*))(?P=end)"
    r"|(?P<begun>.+)\.(tmp|part|partial|crdownload|incomplete|download|opdownload)"
)
"""Editors of Windows add a suffix that its file manager does not show; downloads and savers have one until the file is whole."""

ASIDE = re.compile(r"(?P<name>.+?)(~|\.(bak|orig|old|backup|save)[0-9]*)|backup of (?P<of>.+)", re.ASCII)
ASIDE_INSIDE = re.compile(r"(?P<stem>.+?)[ ._-](bak|backup|orig|old)(?P<suffix>\.[^.]+)", re.ASCII)
"""Copies that somebody put aside. Alone they may well be what nobody wants any more."""

UNREAD = frozenset({"LICENSE", "LICENSE.txt", "NOTICE", "configuration.json"})
READ = ASSET_NAMES - UNREAD
"""What loaders read by these names."""

TEMPLATES = frozenset({"chat_template.jinja", "chat_template.json"})
MOST = 4
NOTHING: Mapping[str, Path] = MappingProxyType({})


def meant_by(name: str) -> dict[str, bool]:
    """The names, in small letters, that a file's name is nearly, and whether it is that of a copy put aside.

    >>> meant_by("Config.json"), meant_by("config (1).json.txt"), meant_by("vocab.txt")
    ({'config.json': False}, {'config (1).json': False, 'config.json': False}, {})
    >>> meant_by("merges.txt.bak"), meant_by("model.safetensors.bak")
    ({'merges.txt': True}, {'model.safetensors': True})
    """
    small = name.lower()
    found = {small: False} if small != name else {}
    todo, aside = small, False
    for _ in range(MOST):
        put, more = ASIDE.fullmatch(todo), MORE.fullmatch(todo)
        inside = ASIDE_INSIDE.fullmatch(todo)
        if put is not None:
            todo, aside = put["name"] or put["of"], True
        elif more is not None:
            todo = more["name"] or more["twice"] or more["begun"]
        elif inside is not None:
            todo, aside = inside["stem"] + inside["suffix"], True
        elif (copied := copied_name(todo)) is not None:
            todo = copied
        else:
            break
        found[todo] = aside
    return found


def is_near_some(name: str) -> bool:
    """Whether a name is nearly one that is told by names alone; weights are left to those who read them."""
    return not has_weight_suffix(name) and any(not has_weight_suffix(meant) for meant in meant_by(name))


def near_notes(near: Iterable[Path], own: Collection[str], files: Mapping[str, Path], of_base: Mapping[str, Path]) -> list[Note]:
    """Warnings about files of a run in whose place another of the base is taken, or none; see `near_names`."""
    return [_note(name, paths, files.get(name)) for name, paths in near_names(near, own, files, of_base).items()]


def near_names(
    near: Iterable[Path], own: Collection[str], files: Mapping[str, Path], of_base: Mapping[str, Path] = NOTHING
) -> dict[str, list[Path]]:
    """The names under which a run has no file, each with the files whose names are nearly that one.

    ``near`` are those that have nearly the name of some, ``own`` the names that there are in the run; ``files`` are taken, from it or the
    base.
    """
    taken = {name.lower(): name for name, path in files.items() if of_base.get(name) == path and name not in own and name not in UNREAD}
    of_run = {name: path for name, path in files.items() if name.lower() not in taken}
    missing = {name.lower(): name for name in READ - files.keys() - set(own) if not _has_another(name, of_run)}
    found: dict[str, list[Path]] = {}
    for path in near:
        for meant, aside in meant_by(path.name).items():
            name = taken.get(meant) or (missing.get(meant) if not aside else None)
            if name is not None and path.name != name and _may_be(path, name, files.get(name)):
                found.setdefault(name, []).append(path)
    return dict(sorted(found.items()))


def _note(name: str, paths: list[Path], taken: Path | None) -> Note:
    which = few([str(path) for path in paths], 3)
    instead = f"{taken} is taken, that of the base" if taken is not None else f"the output has no {name}"
    one = "it is" if len(paths) == 1 else "one of them is"
    text = f"{which}: no loader reads {'it' if len(paths) == 1 else 'them'} under that name, and {instead}"
    return Note("warning", "near-name", f"{text}; if {one} the {name} of the run, rename it")


def _has_another(name: str, files: Mapping[str, Path]) -> bool:
    """Whether there is in another file of the run what a missing one would say: its vocabulary, or the chat template."""
    if name in VOCABULARIES | OF_VOCABULARY:
        return has_vocabulary(files)
    return name in TEMPLATES and not TEMPLATES.isdisjoint(files)


def _may_be(path: Path, name: str, taken: Path | None) -> bool:
    """Whether a file may be the one that is meant, by its content, and says anything else than what is taken."""
    if name == CONFIG and no_model_config(path) is not None:
        return False
    with contextlib.suppress(CkptError):  # what cannot be read may be anything
        return taken is None or not _is_same(read_small(path), read_small(taken))
    return True


def _is_same(one: bytes, other: bytes) -> bool:
    if one == other:
        return True
    with contextlib.suppress(CkptError):
        return bool(parse_json(one) == parse_json(other))
    return False
