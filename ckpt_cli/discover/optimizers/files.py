"""Which files hold an optimizer's state, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_cli.errors import Inconsistent, MixedWorldSizes
from ckpt_cli.files.folders import files_in, folders_in
from ckpt_cli.formats.base import MAX_RANKS, OptimizerOfRanks, missing_of
from ckpt_cli.formats.trainers import OPTIMIZERS, form

FOLDERS = ("", *(name for name in OPTIMIZERS if form(name).groups == 0))
RANK_FILES = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        r"optim_world_size_(?P<world>[0-9]+)_rank_(?P<rank>[0-9]+)\.pt",
        r"optimizer_world_size_(?P<world>[0-9]+)_rank_(?P<rank>[0-9]+)\.pt",
        r"optimizer(_(?P<number>[0-9]{1,9}))?_rank(?P<rank>[0-9]+)\.(bin|pt)",
        r"optimizer\.(?P<rank>[0-9]+)-of-(?P<world>[0-9]+)\.pt",
    )
)
"""verl, EasyR1, SkyRL, VeOmni; lmms-engine; accelerate, BAGEL fork; BAGEL."""

WHOLE_FILES = (
    re.compile(r"optimizer(_(?P<number>[0-9]{1,9}))?\.bin", re.ASCII),
    re.compile(r"optimizer(_(?P<number>[0-9]{1,9}))?\.pt", re.ASCII),
)
"""accelerate with a full state dict, and Hugging Face Trainer on one device."""

OWN_FOLDERS = tuple(form(name) for name in OPTIMIZERS)
"""Folders of an optimizer that was saved like a model of its own."""

FILES = (*RANK_FILES, *WHOLE_FILES)


@dataclass(frozen=True, slots=True)
class OptimizerFiles:
    """The files of one optimizer by rank; ``world_size`` is what their names say (``said``), else one more than the highest rank."""

    ranks: Mapping[int, Path]
    world_size: int
    said: bool = True

    def of_at_least(self, world_size: int) -> OptimizerFiles:
        """The same files, where their names do not say how many ranks there were and something else does."""
        return self if self.said else replace(self, world_size=max(self.world_size, world_size))

    @property
    def missing(self) -> tuple[int, ...]:
        return missing_of(self.world_size, self.ranks)


def owned_files(owned: OptimizerOfRanks) -> OptimizerFiles:
    """The files that a format knows as those of its optimizer."""
    return OptimizerFiles(owned.ranks, owned.world_size or max(owned.ranks) + 1, said=owned.world_size is not None)


def optimizer_folders(homes: Sequence[Path], number: int) -> list[Path]:
    """Folders that may hold the optimizer of a model, of those in which an optimizer is saved like a model."""
    listed = [folders_in(home, _is_own_folder) for home in dict.fromkeys(homes)]
    return [folder for there in listed for regex in OWN_FOLDERS for folder in there if _number_in(folder.name, (regex,)) == number]


def other_optimizers(homes: Sequence[Path], number: int) -> dict[int, list[str]]:
    """Names of files and folders with the optimizers of other models that were saved together, by the number in these names."""
    others: dict[int, list[str]] = {}
    for home in dict.fromkeys(homes):
        names = [f"{path.name}/" for path in folders_in(home, _is_own_folder)]
        names += [path.name for folder in FOLDERS for path in files_in(home / folder, lambda name: _number_in(name, FILES) is not None)]
        for name in names:
            found = _number_in(name.removesuffix("/"), OWN_FOLDERS if name.endswith("/") else FILES)
            if found is not None and found != number and name not in others.setdefault(found, []):
                others[found].append(name)
    return dict(sorted(others.items()))


def is_of_optimizer(path: Path, folder: Path) -> bool:
    """Whether a file below a folder holds nothing but an optimizer, by its name or by that of a folder above it."""
    above = path.relative_to(folder).parts[:-1]
    folders = ("/".join(above[first:last]) for first in range(len(above)) for last in range(first + 1, len(above) + 1))
    return _number_in(path.name, FILES) is not None or any(map(_is_own_folder, folders))


def _is_own_folder(name: str) -> bool:
    return _number_in(name, OWN_FOLDERS) is not None


def _number_in(name: str, patterns: Sequence[re.Pattern[str]]) -> int | None:
    """The number that a name of one of these patterns has, 0 if it has none; None for other names."""
    fields = next((found for pattern in patterns if (found := pattern.fullmatch(name))), None)
    return int(fields.groupdict().get("number") or 0) if fields is not None else None


def find_optimizer_files(homes: Sequence[Path], number: int = 0) -> OptimizerFiles | None:
    """The files in folders (and their folder ``optimizer``) of the optimizer with a number, of several that were saved together.

    Raises MixedWorldSizes, or Inconsistent for a rank twice.
    """
    for pattern in RANK_FILES:
        found: dict[tuple[int | None, int], Path] = {}
        for path in (path for home in dict.fromkeys(homes) for folder in FOLDERS for path in files_in(home / folder, pattern.fullmatch)):
            fields = pattern.fullmatch(path.name)
            if fields is None or _number_in(path.name, (pattern,)) != number:
                continue
            world = int(fields["world"]) if "world" in fields.groupdict() else None
            other = found.setdefault((world, int(fields["rank"])), path)
            if other.name != path.name:
                raise Inconsistent(f"two files claim to be the same rank: {other.name} and {path.name}", path=path.parent)
        if found:
            sizes = {world for world, _ in found}
            if len(sizes) > 1:
                text = f"optimizer states of several world sizes: {' and '.join(sorted(map(str, sizes)))}"
                raise MixedWorldSizes(text, path=next(iter(found.values())).parent, hint="move the files of the older save away")
            size, highest = next(iter(sizes)), max(rank for _, rank in found)
            if highest >= MAX_RANKS or (size is not None and not highest < size <= MAX_RANKS):
                text = f"rank {str(highest)[:20]} cannot be one of {'the' if size is None else str(size)[:20]} ranks"
                raise MixedWorldSizes(
                    text, path=next(iter(found.values())).parent, hint="the file may have been renamed or come from another save"
                )
            ranks = {rank: found[world, rank] for world, rank in sorted(found, key=lambda key: key[1])}
            return OptimizerFiles(ranks, size or max(ranks) + 1, said=size is not None)
    for home in dict.fromkeys(homes):
        for pattern in WHOLE_FILES:
            for path in files_in(home, pattern.fullmatch):
                if _number_in(path.name, (pattern,)) == number:
                    return OptimizerFiles({0: path}, 1)
    return None
