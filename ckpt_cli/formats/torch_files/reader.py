"""Single files of ``torch.save``: ``pytorch_model.bin`` (also with an index), ``model.pt``, ``.pth`` with more than the model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, Gap, Inconsistent, PartOfSet, Undecidable, reading
from ckpt_cli.files.folders import Folders, is_file
from ckpt_cli.files.pickle_nodes import as_dict, describe
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.assembly import RankState, assemble
from ckpt_cli.formats.base import Format, Match, OptimizerOfRanks, ReadOptions
from ckpt_cli.formats.foreign import foreign_content
from ckpt_cli.formats.kept_configs import KeptConfig, configs_in
from ckpt_cli.formats.optimizer_state import holds_optimizer, optimizers_in
from ckpt_cli.formats.rank_files.dtensor import LocalReader
from ckpt_cli.formats.rank_files.reader import announced_size
from ckpt_cli.formats.safetensors.index import Index, raise_first, without_index
from ckpt_cli.formats.safetensors.leftovers import TORCH_INDEX as INDEX
from ckpt_cli.formats.safetensors.leftovers import listing_nothing
from ckpt_cli.formats.safetensors.names import model_number, next_models
from ckpt_cli.formats.safetensors.two_exports import signs
from ckpt_cli.formats.sets.contents import refuse_part
from ckpt_cli.formats.sets.kinds import ITEM
from ckpt_cli.formats.sets.names import PartName, part_name
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.formats.torch_files.counters import notes_of_counters
from ckpt_cli.formats.torch_files.groups import chosen_group, groups_of, notes_of_group, unwrapped, without_averages
from ckpt_cli.formats.torch_files.heads import is_head_alone
from ckpt_cli.formats.torch_files.set_apart import names_of, set_apart
from ckpt_cli.formats.torch_files.state_dict import left_out_notes, read_state
from ckpt_cli.formats.trainers import STEPS, has_form
from ckpt_cli.formats.training_state_names import is_state_file
from ckpt_cli.names import few, numbered
from ckpt_cli.tensors.component import Component, Leaf, Note
from ckpt_cli.tensors.plain_values import ValueReader
from ckpt_cli.tensors.tensor import Tensor

FORMAT = "torch-file"
KNOWN = re.compile(
    r"(diffusion_)?pytorch_model\.bin|pytorch_model_fsdp(_(?P<number>[0-9]{1,9}))?\.bin|(model|checkpoint|full_weights|consolidated)\.(pt|pth|th)|weights\.th|ema\.pt"
    r"|(model|checkpoint|model_best)\.pth\.tar|lit_model\.pth|model_optim_rng\.pt|consolidated\.0+\.pth",
    re.ASCII,
)
ADAPTER = "adapter_model.bin"
"""PEFT's adapter, in the form from before safetensors."""

REGISTERED = re.compile(r"custom_checkpoint_[0-9]{1,9}\.pkl", re.ASCII)
"""What accelerate's ``register_for_checkpointing`` was given: state of anything, also an average of the weights. Read where passed."""

LAST = re.compile(r"last(-v[0-9]+)?\.ckpt", re.ASCII)
"""Lightning's newest checkpoint, beside those of single epochs."""

METRIC = re.compile(r"(.*[-_])?(epoch|step)=[0-9]+.*\.ckpt", re.ASCII)
"""What Lightning calls a checkpoint whose name has more than epoch and step in it, such as a metric; others are steps of a run."""

OF_AVERAGE = re.compile(
    r"(.+[-_])?(ema|swa|averaged?)([-_](model|weights|params|state(_dict)?))?\.(bin|pt|pth|ckpt)", re.ASCII | re.IGNORECASE
)
"""What trainers call the file in a folder that is called like an average (``transformer_ema/ema_model.pt`` of SimpleTuner)."""

MAX_NAMED = 64
"""Of how many ranks the files are looked for, to name those that are missing."""

SUFFIXES = (".bin", ".pt", ".pth", ".th", ".ckpt", ".pth.tar")

MARKED = re.compile(
    r"(?P<name>.+\.(bin|pt|pth|th|ckpt))\.((ep|epoch|step|iter)[-_]?[0-9]+(\.[0-9]+)?|[0-9]{3,}|(avg|best)[-_]?[0-9]*|average|last|latest|final)",
    re.ASCII | re.IGNORECASE,
)
"""Names with what tells saves apart behind the suffix: an epoch, a word (FunASR: ``model.pt.ep2``, ``model.pt.best``, ``model.pt.avg10``).

A small number alone is none: so programs that download call what they got a second time.
"""


def unmarked(name: str) -> str:
    """A name without what tells saves apart behind its suffix.

    >>> unmarked("model.pt.ep2"), unmarked("model.pt.bak")
    ('model.pt', 'model.pt.bak')
    """
    marked = MARKED.fullmatch(name)
    return marked["name"] if marked is not None else name


class TorchFiles(Format):
    """Reader of unsharded ``torch.save`` files."""

    name = FORMAT
    is_sharded = False
    display = "a file of torch.save"

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        if there.is_file(path):
            if path.name == INDEX:
                return [_indexed(path, there)]
            name = unmarked(path.name)
            wanted = (name.endswith(SUFFIXES) and not is_state_file(name)) or REGISTERED.fullmatch(path.name)
            match = Match(FORMAT, _component(path), path, (path,), "a file of torch.save", number=_number(path))
            return [match] if wanted else []
        index = _indexed(path / INDEX, there) if there.is_file(path / INDEX) else None
        if index is not None and not index.lists_nothing:
            return [index]
        matches = self._files_in(path, there)
        return matches if index is None or any(match.component == "model" for match in matches) else [index, *matches]

    def _files_in(self, path: Path, there: Folders) -> list[Match]:
        """What a folder holds without an index."""
        listed = there.files(path, lambda name: name == ADAPTER or KNOWN.fullmatch(name) or _part(name))
        found = [entry for entry in listed if KNOWN.fullmatch(entry.name) and not is_head_alone(entry, there)]
        found += next_models(path, ".bin", there).values()
        parts = [] if found else [entry for entry in listed if _part(entry.name)]
        if len(parts) == 1 and (only := _part(parts[0].name)) is not None and only.parts == 1:
            found, parts = parts, []
        if not found and not parts:
            found = [entry for entry in listed if entry.name == ADAPTER] or there.files(path, LAST.fullmatch)
            named = [] if found else there.files(path, METRIC.fullmatch)
            found = found or (named if not any(has_form(entry.name, STEPS) for entry in named) else [])
        if not found and not parts and is_average_name(path.name):
            averages = there.files(path, OF_AVERAGE.fullmatch)
            found = averages if len(averages) == 1 else []
        if parts:
            unproven = without_index(path / INDEX, parts, there)
            return [Match(FORMAT, "model", path, tuple(parts), "parts of a model without an index", trouble=unproven)]
        by_component: dict[str, list[Path]] = {}
        for entry in sorted(found, key=lambda entry: (_component(entry) == "ema", _number(entry))):
            by_component.setdefault(_component(entry), []).append(entry)
        matches = []
        for component, files in by_component.items():
            several = Undecidable(
                f"several files could be the model: {few([file.name for file in files])}",
                path=path,
                expected="one of them",
                hint="pass the file itself instead of its folder",
            )
            trouble, number = several if len(files) > 1 else None, _number(files[0])
            matches.append(Match(FORMAT, component, path, tuple(files), files[0].name, trouble=trouble, number=number))
        return matches

    def groups(self, match: Match, files: Files) -> list[str]:
        """The model of a file, and the averages that a trainer keeps beside it."""
        first = match.files[0]
        if match.trouble is not None:
            return [match.component]
        if first.name == INDEX:
            index = Index.read(first, ".bin", files)
            raise_first(index.missing())
            return names_of(match.component, index.owners)
        file = _opened(first, files)
        with reading(first):
            return [group.name for group in groups_of(file, match.component, LocalReader(file, 0))[1]]

    def single_file(self, match: Match) -> Path | None:
        return match.files[0] if len(match.files) == 1 and match.files[0].suffix != ".json" else None

    def training_state(self, match: Match, files: Files) -> tuple[dict[str, Any], Path]:
        file = self.single_file(match)
        return ({}, match.root) if file is None else (beside_weights(file, files), file)

    def kept_configs(self, match: Match, files: Files) -> list[KeptConfig]:
        file = self.single_file(match)
        return [] if file is None else configs_in(files.parsed(file, TorchFile))

    def optimizer_files(self, match: Match, files: Files) -> OptimizerOfRanks | None:
        file = self.single_file(match)
        return OptimizerOfRanks({0: file}, 1) if file is not None and holds_optimizer(file, files) else None

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        first = match.files[0]
        paths, index = [first], Index.read(first, ".bin", files) if first.name == INDEX else None
        if index is not None:
            raise_first(index.missing())
            paths = [first.parent / name for name in index.files]
        tensors: dict[str, Tensor] = {}
        held: dict[str, dict[str, Tensor]] = {}
        leaves: list[Leaf] = []
        notes: list[Note] = []
        for path in paths:
            state, others = _read(path, files, match, notes) if index is None else _read_part(path, files, match, notes)
            name = path.relative_to(first.parent).as_posix()
            if index is not None:
                raise_first(index.misplaced({name: state.locals}))
            leaves += others
            held[name] = _assembled(state, options)
            tensors.update(held[name])
        if index is not None:
            notes += (Note("warning", problem.code, problem.text) for problem in signs(index, held) if problem.is_told and problem.text)
        component = Component(
            match.component,
            FORMAT,
            match.root,
            tensors,
            tuple(dict.fromkeys([first, *paths])),
            leaves=tuple(leaves),
            writer=match.evidence,
            notes=(*notes, *left_out_notes(leaves)),
            step=next((int(leaf.text) for leaf in leaves if leaf.name == "global_step" and leaf.text.isdecimal()), None),
        )
        return component if index is None else set_apart(component, first.name, average=match.group is not None)


def holds_torch_model(folder: Path, there: Folders) -> bool:
    """Whether a folder has files of torch with the usual names of a model: another file in it, of any name, is not the model."""
    named = there.files(folder, lambda name: KNOWN.fullmatch(name) or _part(name) or LAST.fullmatch(name))
    return there.is_file(folder / INDEX) or not all(is_head_alone(path, there) for path in named)


def _indexed(index: Path, there: Folders) -> Match:
    lost = listing_nothing(index, there)
    return Match(FORMAT, "model", index.parent, (index,), f"index {INDEX}", trouble=lost, lists_nothing=lost is not None)


def _part(name: str) -> PartName | None:
    part = part_name(name)
    return part if part is not None and part.suffix == ".bin" else None


def _component(path: Path) -> str:
    return "ema" if path.name == "ema.pt" else numbered("model", _number(path))


def _number(path: Path) -> int:
    """Which of several models that were saved together a file is, by its name."""
    fields = KNOWN.fullmatch(path.name)
    return int(fields["number"] or 0) if fields is not None else model_number(path.name)


def _opened(path: Path, files: Files) -> TorchFile:
    """The parsed file. Raises Unsupported, with the program's name, for one of another program that has the same suffix."""
    try:
        return files.parsed(path, TorchFile)
    except CorruptFile as error:
        raise foreign_content(path) or error from None


def _read(path: Path, files: Files, match: Match, notes: list[Note]) -> tuple[RankState, list[Leaf]]:
    file = _opened(path, files)
    reader = LocalReader(file, 0)
    with reading(path):
        refuse_part(file, path)
        way, groups = groups_of(file, _component(path) if match.group is not None else match.component, reader, match.group)
        group = chosen_group(groups, match.group)
        held, leaves = read_state(group.entries, reader, path)
        beside = [Leaf(str(key), describe(value)) for key, value in group.beside.items()]
        notes += notes_of_group(path.name, way, groups, group)
        notes += notes_of_counters(group.counters, reader, path)
    return RankState(0, path, held), [*beside, *leaves]


def _read_part(path: Path, files: Files, match: Match, notes: list[Note]) -> tuple[RankState, list[Leaf]]:
    """A file that an index lists, which may have an average and not the model, or a part of both: they are told apart as a whole."""
    file = _opened(path, files)
    reader = LocalReader(file, 0)
    with reading(path):
        refuse_part(file, path)
        way, groups = groups_of(file, match.component if match.group is None else "model", reader)
        group = replace(groups[0], entries=way.entries) if any(not other.key for other in groups[1:]) else groups[0]
        held, leaves = read_state(group.entries, reader, path)
        notes += notes_of_group(path.name, way, [group, *(other for other in groups[1:] if other.key)], group)
    return RankState(0, path, held), [*(Leaf(str(key), describe(value)) for key, value in group.beside.items()), *leaves]


def _assembled(state: RankState, options: ReadOptions) -> dict[str, Tensor]:
    """The tensors of a file that is whole. Raises PartOfSet for that of one rank, whose distributed tensors are parts."""
    try:
        return assemble([state], 1, (), options).tensors
    except (Inconsistent, Gap) as error:
        count, fields = announced_size(state), ITEM.fullmatch(state.path.name)
        if count < 2:
            raise
        text = f"{state.path.name} is one rank's file of a set by {count} ranks: it holds parts of distributed tensors"
        names = [f"{fields['item']}_{rank}.{fields['suffix']}" for rank in range(min(count, MAX_NAMED))] if fields is not None else []
        lost = [name for name in names if not is_file(state.path.with_name(name))]
        raise PartOfSet(
            text,
            path=state.path,
            tensor=error.tensor,
            expected=f"the files of all ranks{'; not here: ' + few(lost) if lost else ''}",
            hint="get the missing files from where they were written, and pass the folder" if lost else None,
        ) from None


def beside_weights(path: Path, files: Files) -> dict[str, Any]:
    """What a trainer's file holds beside its state dicts of weights and its optimizers, as values.

    Empty for a file that is a state dict itself.
    """
    file = TorchFile(files.source(path))
    entries = unwrapped(as_dict(file.root) or {})
    reader = ValueReader(file)
    with reading(path):
        apart = optimizers_in(entries)
        kept = {str(key): node for key, node in without_averages(entries).items() if key not in apart}
        return {key: reader.read(node) for key, node in kept.items()}
