"""Side files around a checkpoint that say something else than those that were taken in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ckpt_cli.discover.around.side_folders import kind_of_file
from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.assets import CONFIG, GENERATION_CONFIG, Assets, find_assets
from ckpt_cli.hub.beside.families import is_of_tokenizer, is_template
from ckpt_cli.hub.beside.listed import home_of
from ckpt_cli.hub.contents.side_files import CHAT, CHATS, differing
from ckpt_cli.hub.settings import differences
from ckpt_cli.hub.tokenizer_file import TOKENIZER
from ckpt_cli.tensors.component import Note

TEMPLATE, TOKENIZER_KIND = "a chat template", kind_of_file(TOKENIZER)
KINDS = frozenset({CONFIG, GENERATION_CONFIG, TEMPLATE, TOKENIZER_KIND, "a processor"})


def untaken_notes(folders: Sequence[Path], homes: Sequence[Path], assets: Assets, home: Path) -> list[Note]:
    """Warnings about ``folders`` with a family of files that is none of the ``homes``' own, and that is not what was taken instead."""
    taken = {kind for name in assets.files if (kind := _kind(name))}
    own = {_kind(name) for name, path in assets.files.items() if home_of(name, path) in homes}
    if TOKENIZER_KIND in own:
        own |= {TEMPLATE} - taken  # that it has none may be meant
    notes = []
    for folder in folders if not own.issuperset(KINDS) else ():
        with contextlib.suppress(CkptError, RecursionError):  # what cannot be read says nothing
            there = find_assets([folder])
            held = sorted({_kind(name) for name, path in there.files.items() if home_of(name, path) == folder} - own - {""})
            kinds = [kind for kind in held if _differs(kind, there, assets)]
            if kinds:
                goes = f"nothing tells that {'it goes' if len(kinds) == 1 else 'they go'} with these weights"
                instead = ", and what is taken instead says something else" if taken & set(kinds) else ""
                text = f"{folder} holds {' and '.join(kinds)}, and was not read: {goes}{instead}; if so, copy the files into {home}"
                notes.append(Note("warning", "assets-beside", text))
    return notes


def _kind(name: str) -> str:
    if name == GENERATION_CONFIG:
        return GENERATION_CONFIG
    return TEMPLATE if is_template(name) else kind_of_file(name)


def _differs(kind: str, there: Assets, assets: Assets) -> bool:
    """Whether a family says something else than what was taken, in whatever way versions of libraries write it."""
    names = {name for name in there.files if _kind(name) == kind or (kind == TOKENIZER_KIND and is_of_tokenizer(name))}
    if kind == GENERATION_CONFIG and kind not in assets.files:
        return False  # nothing is needed in its place
    if not any(_kind(name) == kind for name in assets.files):
        return True
    if all(name in assets.files and read_small(there.files[name]) == read_small(assets.files[name]) for name in names):
        return False
    if kind == CONFIG:
        return bool(differences(assets.config, there.config))
    said = {name for name, _ in differing(there, "there", assets, "here")}
    other_texts = bool(said & {CHAT, CHATS})
    if kind == TEMPLATE:
        return other_texts
    if kind != TOKENIZER_KIND:
        return bool(said & names) or not names & assets.files.keys()
    if there.tokenizer is not None and assets.tokenizer is not None:
        one, other = there.tokenizer(), assets.tokenizer()
        same = (one.digest, sorted(one.added)) == (other.digest, sorted(other.added))
        return not same or other_texts or any(map(is_of_tokenizer, said))
    return any(name not in assets.files or read_small(there.files[name]) != read_small(assets.files[name]) for name in names)
