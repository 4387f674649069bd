"""Where tensors that a draft lacks may be found: in the place of one, or in files beside it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.boxes import Shape
from ckpt_cli.discover.forms.holders import Holder, holders_beside
from ckpt_cli.drafting.draft import Draft
from ckpt_cli.errors import CkptError, MissingTensors
from ckpt_cli.files.source import Files
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few
from ckpt_cli.paths import absolute


def tell_what_is_there(error: MissingTensors, draft: Draft, base: Path | None = None) -> None:
    """Name the file that has something else in the place of a tensor that is missing, and first of all hints what holds it beside that.

    Not the ``base``: that it has what is missing, the hint for a base says.
    """
    leaves = (leaf for source in draft.sources for leaf in source.component.leaves if leaf.file is not None)
    leaf = next((leaf for leaf in leaves if leaf.name in draft.claim.lacking), None)
    if leaf is not None:
        error.path, error.tensor = str(leaf.file), leaf.name
        error.details = (*error.details, f"in the place of {leaf.name}: {leaf.text}")
    fit = draft.claim.fit
    known: Mapping[str, Shape] = fit.missing if fit is not None and fit.expected is not None else {}
    tell_what_holds(error, draft, {name: known.get(name) for name in draft.claim.lacking}, base)


def tell_what_holds(error: MissingTensors, draft: Draft, lacking: Mapping[str, Shape | None], base: Path | None = None) -> None:
    """Begin the hint with what lies beside a draft and has tensors that are ``lacking``, in these shapes; globs count as one."""
    try:
        with Files() as files:
            holders = [
                each for each in _holders(draft, files) if base is None or not Path(absolute(each.path)).is_relative_to(absolute(base))
            ]
            beside = [(holder, [name for name, shape in lacking.items() if _has(holder, name, shape)]) for holder in holders]
    except CkptError:
        return  # only asked for the hint
    found = [(holder, held) for holder, held in beside if held]
    if not found:
        return
    holder, held = min(found, key=lambda each: (bool(each[0].cut), -len(each[1]), len(each[0].changed)))
    has = f"{holder.shown} beside it has {'all of them' if len(held) == len(lacking) > 1 else few(grouped(held), 3)}"
    if holder.cut or len(held) < len(lacking):
        hint = f"{has}: if both are of one save, join them into one state dict, and merge that"
        error.hint = f"{hint}; if not, {error.hint}" if error.hint else hint
        return
    hint = f"{has}, {holder.agreement}: pass {shell.path(holder.path)}"
    error.hint = f"{hint} if that is meant; if not, {error.hint}" if holder.changed and error.hint else hint


def _holders(draft: Draft, files: Files) -> Iterator[Holder]:
    for source in draft.sources:
        yield from holders_beside(source.place, source.component.tensors, source.assets.config, files)


def _has(holder: Holder, name: str, shape: Shape | None) -> bool:
    if name in holder.tensors:
        return shape is None or holder.tensors[name].shape == shape
    return "*" in name and any(fnmatch.fnmatchcase(other, name) for other in holder.tensors)
