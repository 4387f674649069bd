"""Single files of ``torch.save``: ``pytorch_model.bin`` (also with an index), ``model.pt``, ``.pth`` with more than the model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, MissingShard, Undecidable, reading
from ckpt_cli.files import Files, files_in
from ckpt_cli.formats.assembly import RankState, assemble
from ckpt_cli.formats.base import Match, ReadOptions
from ckpt_cli.formats.dtensor import LocalReader
from ckpt_cli.formats.file_groups import EMA_KEYS, MODEL_KEYS, FileGroup, chosen_group, file_groups, without_averages
from ckpt_cli.formats.state_dict import read_state
from ckpt_cli.formats.weight_index import check_members, read_weight_map
from ckpt_cli.inert_values import ValueReader
from ckpt_cli.model import Component, Leaf, Note
from ckpt_cli.names import few
from ckpt_cli.pickle_nodes import as_dict, describe
from ckpt_cli.torchfile import TorchFile

FORMAT = "torch-file"
INDEX = "pytorch_model.bin.index.json"
PART = re.compile(r"pytorch_model-[0-9]+-of-[0-9]+\.bin", re.ASCII)
KNOWN = re.compile(
    r"pytorch_model\.bin|pytorch_model_fsdp(_[0-9]+)?\.bin|(model|checkpoint|full_weights|consolidated)\.(pt|pth)|ema\.pt", re.ASCII
)
NO_MODEL = re.compile(r"(optim|extra_state|scheduler|rng_state|random_states|training_args|data|scaler).*", re.ASCII)
"""Names of files with other things than weights."""

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
MAX_DEPTH = 4


class TorchFiles:
    """Reader of unsharded ``torch.save`` files."""

    name = FORMAT

    def recognise(self, path: Path) -> list[Match]:
        if os.path.isfile(path):
            if path.name == INDEX:
                return [Match(FORMAT, "model", path.parent, (path,), f"index {INDEX}")]
            wanted = path.suffix in SUFFIXES and not NO_MODEL.fullmatch(path.name)
            return [Match(FORMAT, _component(path), path, (path,), "a file of torch.save")] if wanted else []
        if os.path.isfile(path / INDEX):
            return [Match(FORMAT, "model", path, (path / INDEX,), f"index {INDEX}")]
        found = [entry for entry in files_in(path) if KNOWN.fullmatch(entry.name)]
        parts = [] if found else [entry for entry in files_in(path) if PART.fullmatch(entry.name)]
        if parts:
            unproven = MissingShard(
                f"{INDEX} is missing; {len(parts)} parts without it prove nothing",
                path=path / INDEX,
                hint="copy the index from where the model came from",
            )
            return [Match(FORMAT, "model", path, tuple(parts), "parts of a model without an index", trouble=unproven)]
        models, ema = [entry for entry in found if entry.stem != "ema"], [entry for entry in found if entry.stem == "ema"]
        matches = []
        for component, files in (("model", models), ("ema", ema)):
            if files:
                several = Undecidable(
                    f"several files could be the model: {few([file.name for file in files])}",
                    path=path,
                    expected="one of them",
                    hint="pass the file itself instead of its folder",
                )
                matches.append(Match(FORMAT, component, path, tuple(files), files[0].name, trouble=several if len(files) > 1 else None))
        return matches

    def groups(self, match: Match) -> list[str]:
        """The model of a file, and the averages that a trainer keeps beside it."""
        first = match.files[0]
        if match.trouble is not None or first.name == INDEX:
            return [match.component]
        with Files() as files, reading(first):
            return [group.name for group in _groups(TorchFile(files.source(first)), match.component)]

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        first = match.files[0]
        paths, mapping = [first], None
        if first.name == INDEX:
            mapping = read_weight_map(first, ".bin")
            paths = [first.parent / name for name in sorted(set(mapping.values()))]
        tensors = {}
        leaves: list[Leaf] = []
        notes: list[Note] = []
        for path in paths:
            state, others = _read(path, files, match, notes)
            if mapping is not None:
                with reading(path):
                    check_members(mapping, path.name, state.locals)
            leaves += others
            tensors.update(assemble([state], 1, (), options).tensors)
        return Component(
            match.component,
            FORMAT,
            match.root,
            tensors,
            tuple(dict.fromkeys([first, *paths])),
            leaves=tuple(leaves),
            notes=tuple(notes),
            writer=match.evidence,
        )


def holds_torch_model(folder: Path) -> bool:
    """Whether a folder has files of torch with the usual names of a model: another file in it, of any name, is not the model."""
    return os.path.isfile(folder / INDEX) or any(KNOWN.fullmatch(entry.name) or PART.fullmatch(entry.name) for entry in files_in(folder))


def _component(path: Path) -> str:
    return "ema" if path.name == "ema.pt" else "model"


def _groups(file: TorchFile, component: str) -> list[FileGroup]:
    """The state dicts of a file. A name that is no group's means the component that the file's own name says."""
    main = "ema" if component == "ema" else "model"
    return file_groups(file.root, component, *_state_dict(file.root, EMA_KEYS if main == "ema" else MODEL_KEYS))


def _read(path: Path, files: Files, match: Match, notes: list[Note]) -> tuple[RankState, list[Leaf]]:
    file = TorchFile(files.source(path))
    reader = LocalReader(file, 0)
    with reading(path):
        groups = _groups(file, _component(path) if match.group is not None else match.component)
        group = chosen_group(groups, match.group)
        held, leaves = read_state(group.entries, reader, path)
        beside = [Leaf(str(key), describe(value)) for key, value in group.beside.items()]
    others = [f"{other.name} (--type {other.name})" for other in groups if other is not group] if group is groups[0] else []
    if group.why is not None:
        notes.append(Note("warning", "averaged", group.why))
    if others:
        notes.append(Note("info", "other-components", f"{path.name} also holds {few(others)}"))
    return RankState(0, path, held), [*beside, *leaves]


def beside_weights(path: Path, files: Files, leave_out: re.Pattern[str]) -> dict[str, Any]:
    """What a trainer's file holds beside its state dicts of weights, as values: without keys that ``leave_out`` matches.

    Empty for a file that is a state dict itself.
    """
    file = TorchFile(files.source(path))
    entries = as_dict(file.root) or {}
    reader = ValueReader(file)
    with reading(path):
        kept = {str(key): node for key, node in without_averages(entries).items() if not leave_out.fullmatch(str(key))}
        return {key: reader.read(node) for key, node in kept.items()}


def _state_dict(root: Any, keys: tuple[str, ...]) -> tuple[Mapping[Any, Any], dict[Any, Any]]:
    """The dict of tensors in a file, and what stands beside it: going down through the known keys that hold a dict.

    Tensors beside such a key (a random state, a loss) do not make a state dict of what is around it.
    """
    above: dict[Any, Any] = {}
    node = root
    for _ in range(MAX_DEPTH):
        entries = as_dict(node)
        if entries is None:
            raise CorruptFile(f"the file holds {describe(node)}, not a state dict", expected="a dict of tensors")
        inner = next((key for key in keys if as_dict(entries.get(key)) is not None), None)
        if inner is None:
            return entries, above
        above |= {key: value for key, value in entries.items() if key != inner}
        node = entries[inner]
    raise CorruptFile("the state dict is nested too deeply")
