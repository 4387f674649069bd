"""Two tensors that loading takes for one parameter: it uses one of them, and says nothing of the other."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping

from ckpt_cli import shell
from ckpt_cli.errors import Inconsistent
from ckpt_cli.hub.classes.fit import KnownClass
from ckpt_cli.hub.classes.in_memory.loaded import loaded_names
from ckpt_cli.name_patterns import grouped, pattern_of
from ckpt_cli.names import few, plural


def shadowed_names(kind: KnownClass | str, names: Collection[str]) -> Mapping[str, str]:
    """Names that are another one's of the same file in memory -> that one, which the class calls so.

    A file with gamma and weight of one norm, or with the prefix of the base model and without it.
    """
    known = loaded_names(kind)
    return known.beside(names) if known is not None else {}


def refuse_shadowed(kind: KnownClass | str, names: Collection[str]) -> None:
    """Raise Inconsistent for names that are two tensors' in a file, and one's in memory."""
    found = shadowed_names(kind, names)
    if not found or isinstance(kind, str):
        return
    others, owners = list(found), list(dict.fromkeys(found.values()))
    first = others[0]
    globs = list(dict.fromkeys(pattern_of(name)[0].replace("{}", "*") for name in others))
    if any(fnmatch.fnmatchcase(name, glob) for glob in globs for name in names if name not in found):
        globs = others
    flags = " ".join(f"--exclude {shell.word(glob)}" for glob in globs)
    many = plural(len(others), "tensor is a second one", "tensors are a second one")
    raise Inconsistent(
        f"{many} for a parameter of {kind.kind}, under another name that loaders take for the same: {few(grouped(others), 3)} beside "
        f"{few(grouped(owners), 3)}",
        tensor=first,
        expected="one tensor for each parameter: loaders would use one of the two without a word",
        hint=f"if {found[first]} and its like were trained, {flags} leaves the others out",
    )
