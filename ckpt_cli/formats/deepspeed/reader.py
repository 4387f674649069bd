"""DeepSpeed saves of ZeRO stages 0 to 3, BF16_Optimizer, pipelines, experts, tensor parallelism, and universal ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError, NotFound, reading
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.ages import age_notes
from ckpt_cli.formats.assembly import with_aliases
from ckpt_cli.formats.base import WEIGHTS_16, Format, Match, RankValues, ReadOptions
from ckpt_cli.formats.deepspeed.names import files_in_save, is_deepspeed_name, is_model_states, save_files
from ckpt_cli.formats.deepspeed.optimizer_states import FP32
from ckpt_cli.formats.deepspeed.pipeline import unlisted_notes
from ckpt_cli.formats.deepspeed.save import Save, read_save
from ckpt_cli.formats.deepspeed.stage_0 import optimizer_entries, read_masters
from ckpt_cli.formats.deepspeed.state import (
    client_component,
    client_groups,
    client_notes,
    named_optimizer,
    own_values,
    steps_of_optimizer,
    training_values,
    written_by,
)
from ckpt_cli.formats.deepspeed.universal import universal_files, universal_tensors
from ckpt_cli.formats.deepspeed.weights import check_named, fp32_weights, frozen_notes, slot_tensors, stored_weights
from ckpt_cli.formats.kept_configs import KeptConfig, configs_in
from ckpt_cli.formats.optimizer_state import NamedState
from ckpt_cli.formats.torch_files.set_apart import names_of, set_apart
from ckpt_cli.formats.torch_files.state_dict import left_out_notes
from ckpt_cli.names import plural
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.tensor import Tensor

FORMAT = "deepspeed"


class DeepSpeed(Format):
    """Reader of DeepSpeed's tag folders."""

    name = FORMAT
    display = "DeepSpeed"
    by_content = True
    tells_writer = True
    in_tags = True

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        if there.is_file(path):
            # One file stands for the save that it is part of.
            return [match for match in self.recognise(path.parent, there) if path in match.files] if is_deepspeed_name(path.name) else []
        listed = files_in_save(path, there)
        if not listed:
            return []
        names = save_files(listed)
        return [Match(FORMAT, "model", path, names.all, "DeepSpeed", ranks=names.optimizer_ranks, trouble=names.trouble)]

    def groups(self, match: Match, files: Files) -> list[str]:
        """The model, the module's own weights where these are there besides in fp32, and state dicts that the caller kept beside it."""
        if match.trouble is not None:
            return [match.component]
        save = read_save(match, files)
        narrow = not save.is_stage_3 and any(tensor.dtype.bits == 16 for tensor in _module(save))
        with reading(save.first.path):
            kept = [group.name for group in client_groups(save.first)[1][1:]]
        average = [] if "ema" in kept else names_of(match.component, save.first.module or {})[1:]
        return [match.component, *average, *([WEIGHTS_16] if narrow and _has_masters(save, files) else []), *kept]

    def joined(self, first: Match, second: Match) -> Match:
        twice = sorted({path.name for path in first.files} & {path.name for path in second.files})
        # Every node has the model states of its first rank, and they are the same.
        kept = tuple(path for path in second.files if path.name not in twice)
        names = save_files((*first.files, *kept))
        trouble = self.twice(first, second) or names.trouble
        return replace(super().joined(first, second), files=names.all, ranks=names.optimizer_ranks, trouble=trouble)

    def twice(self, first: Match, second: Match) -> CkptError | None:
        return super().twice(first, replace(second, files=tuple(path for path in second.files if not is_model_states(path.name))))

    def complements(self, first: Match, second: Match) -> bool:
        return bool(first.ranks) and bool(second.ranks) and not set(first.ranks) & set(second.ranks)

    def training_state(self, match: Match, files: Files) -> tuple[dict[str, Any], Path]:
        save = read_save(match, files)
        return training_values(save), save.first.path

    def training_states(self, match: Match, files: Files) -> Mapping[int, RankValues]:
        return own_values(read_save(match, files))

    def kept_configs(self, match: Match, files: Files) -> list[KeptConfig]:
        return configs_in(files.parsed(read_save(match, files).first.path, TorchFile))

    def doubts(self, match: Match, files: Files) -> list[Note]:
        return steps_of_optimizer(read_save(match, files))

    def ranks_told(self, match: Match, files: Files) -> int | None:
        return written_by(read_save(match, files))

    def optimizer(self, match: Match, files: Files) -> NamedState | None:
        return named_optimizer(read_save(match, files), files)

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        save = read_save(match, files)
        kept = [group.name for group in client_groups(save.first)[1][1:]]
        if match.group in kept:
            return client_component(match, save, options)
        notes = client_notes(save)
        if match.group == WEIGHTS_16:
            if save.is_stage_3:
                raise NotFound(
                    "at stage 3 no file holds the weights in the dtype of the training", path=match.root, hint="leave out --type"
                )
            tensors = stored_weights(save)
            check_named(tensors, save)
        else:
            tensors = fp32_weights(save, _masters(save, files, notes))
        notes += [*frozen_notes(tensors, save), *unlisted_notes(save)]
        sources = [files.source(path) for path in (*save.names.all, *universal_files(save))]
        ranks = sum(len(held) for held in save.optimizers.values()) or sum(len(held) for held in save.models.values())
        component = Component(
            name=match.component,
            format=FORMAT,
            root=match.root,
            tensors=with_aliases(tensors),
            files=tuple(Path(source.path) for source in sources),
            world_size=ranks,
            leaves=save.leaves,
            notes=(*_kind(save), *notes, *left_out_notes(save.leaves, tensors), *steps_of_optimizer(save), *age_notes(sources)),
            writer=save.writer,
            ordered=not save.experts,
            step=save.first.number("global_steps"),
        )
        return component if "ema" in kept else set_apart(component, save.first.path.name, average=match.group == "ema")


def _module(save: Save) -> list[Any]:
    held = [*(save.first.module or {}).values(), *save.experts.values()]
    return [*held, *(stored for layer in save.layers.values() for stored in layer.values())]


def _has_masters(save: Save, files: Files) -> bool:
    """Whether the optimizer keeps the weights in more bits than the module."""
    if save.optimizers:
        return any(part.vectors[FP32].dtype.bits > 16 for ranks in save.optimizers.values() for part in ranks[0].partitions)
    if save.names.parameters:
        return True
    return not save.is_partitioned and any("fp32_groups" in entries for _, _, entries in optimizer_entries(save, files))


def _masters(save: Save, files: Files, notes: list[Note]) -> dict[str, Tensor]:
    """The weights that were trained, in the dtype of the optimizer."""
    if save.names.parameters:
        return universal_tensors(save, files)
    if save.optimizers:
        return slot_tensors(save)
    if not save.is_partitioned:
        found = read_masters(save, files)
        notes += found.notes
        return found.tensors
    text = "the files of the optimizer are not there: the weights are those of the module, in the dtype of the training"
    notes.append(Note("warning", "no-masters", text))
    return {}


def _kind(save: Save) -> list[Note]:
    groups = [group for held in save.groups.values() for group in held] if save.optimizers else []
    said = [save.stage]
    if save.optimizers:
        said.append(plural(max(len(ranks) for ranks in save.optimizers.values()), "data parallel rank"))
    if len(save.models) > 1:
        said.append(f"{len(save.models)} {'stages of a pipeline' if save.is_pipeline else 'ranks of tensor parallelism'}")
    if groups:
        said.append(plural(len(next(iter(save.groups.values()))), "parameter group"))
    for one, many, count in (
        ("frozen parameter", "frozen parameters", len(save.first.frozen)),
        ("tied", "tied", len(save.shared)),
        ("file of experts", "files of experts", len(save.names.experts)),
    ):
        if count:
            said.append(plural(count, one, many))
    return [Note("info", "deepspeed", ", ".join(said))]
