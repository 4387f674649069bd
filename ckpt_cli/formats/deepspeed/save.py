"""A DeepSpeed save whose files were read: what belongs together, and that nothing is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import CorruptFile, Inconsistent, MissingShard, MixedWorldSizes, PartOfSet, reading
from ckpt_cli.files.folders import folders_in, is_file
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import StoredTensor, TorchFile
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.deepspeed.model_states import ModelStates, check_stem, placeholder_twins, plain_tensors, read_model_states
from ckpt_cli.formats.deepspeed.names import UNIVERSAL, SaveFiles, cut_layers, save_files
from ckpt_cli.formats.deepspeed.optimizer_states import OptimizerStates, read_optimizer_states
from ckpt_cli.formats.deepspeed.partitions import EXPERT_NAME, MIXED, ParameterGroup, expert_counts, parameter_groups
from ckpt_cli.formats.rank_files.dtensor import LocalReader
from ckpt_cli.formats.sets.recorded import Recorded, recorded_rank, refuse_exchanged
from ckpt_cli.formats.torch_files.state_dict import read_state
from ckpt_cli.tensors.component import Leaf

LISTS_FROZEN = 2
"""The lowest stage of ZeRO that lists frozen parameters."""

EXPERTS = "deepspeed_moe."
"""What the names of a layer with experts have in them: before ``gate.``, in the model states, and before ``experts.``."""

LEFT_EXPERTS = "files of an older save with more experts may be left in the folder: move them to another one"


@dataclass(frozen=True)
class Save:
    """The files of a save.

    ``models``: model parallel rank -> data parallel rank (-1 for stages 0 to 2) -> file; ``optimizers``: the ranks of each, in order.
    ``layers`` and ``experts`` hold the tensors of a pipeline's layers (by their numbers) and of experts, in the dtype of the training;
    ``of_files`` is what else these files hold.
    """

    names: SaveFiles
    root: Path
    models: Mapping[int, Mapping[int, ModelStates]]
    optimizers: Mapping[int, Sequence[OptimizerStates]]
    layers: Mapping[int, Mapping[str, StoredTensor]]
    experts: Mapping[str, StoredTensor]
    of_files: tuple[Leaf, ...] = ()

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """What stands among the weights and is no tensor, in any file, each name once."""
        held = [leaf for mp in self.models for leaf in self.model_of(mp).leaves]
        return tuple({leaf.name: leaf for leaf in (*held, *self.of_files)}.values())

    @property
    def first(self) -> ModelStates:
        """The model states of the lowest rank."""
        return next(iter(next(iter(self.models.values())).values()))

    @property
    def is_pipeline(self) -> bool:
        return bool(self.layers) or self.first.module is None

    @property
    def is_stage_3(self) -> bool:
        return any(rank >= 0 for ranks in self.models.values() for rank in ranks)

    @property
    def is_partitioned(self) -> bool:
        """Whether an optimizer of ZeRO or BF16_Optimizer wrote partitions, also where its files are not there."""
        beside = as_dict(self.first.entries.get("optimizer")) or {}
        return bool(self.optimizers) or self.first.groups is not None or "single_partition_of_fp32_groups" in beside

    @property
    def lacks_frozen(self) -> bool:
        """Whether frozen parameters, if there are any, were left out when saving (``exclude_frozen_parameters``).

        Stages 2 and 3 list them otherwise, also where there are none; stages 0 and 1 never do, so that nothing tells.
        """
        setting = as_dict((as_dict(self.first.entries.get("ds_config")) or {}).get("zero_optimization")) or {}
        stages = (3 if self.is_stage_3 else setting.get("stage"), *(ranks[0].stage for ranks in self.optimizers.values()))
        lists = any(type(stage) is int and stage >= LISTS_FROZEN for stage in stages)
        return lists and self.first.entries.get("frozen_param_shapes") is None

    @cached_property
    def expert_counts(self) -> Mapping[str, int]:
        """The number of experts of each MoE layer, by the names in the files of experts."""
        return expert_counts(self.experts)

    @cached_property
    def groups(self) -> Mapping[int, Sequence[ParameterGroup]]:
        """The parameters in the partitions, by model parallel rank. Raises what `parameter_groups` raises."""
        return {mp: parameter_groups(self.model_of(mp), ranks, self.expert_counts) for mp, ranks in self.optimizers.items()}

    @cached_property
    def shared(self) -> Mapping[str, str]:
        """Other names of parameters -> the names under which the rest of the save has them.

        What only placeholders show must be the same in the files of all ranks.
        """
        held = [states for ranks in self.models.values() for states in ranks.values()]
        twins = [placeholder_twins(states) for states in held] if self.is_stage_3 else [{}]
        alike = {name: kept for name, kept in twins[0].items() if all(other.get(name) == kept for other in twins)}
        return alike | {alias: kept for states in held for alias, kept in states.shared.items()}

    def model_of(self, mp: int) -> ModelStates:
        return next(iter(self.models[mp].values()))

    @property
    def writer(self) -> str:
        return f"DeepSpeed {self.first.entries.get('ds_version')}, {self.stage}"

    @property
    def stage(self) -> str:
        """The kind of save in words."""
        if self.names.parameters:
            return "universal"
        if not self.optimizers:
            return "ZeRO-3" if self.is_stage_3 else "ZeRO" if self.is_partitioned else "stage 0"
        stages = {ranks[0].stage for ranks in self.optimizers.values()}
        stage = stages.pop() if len(stages) == 1 else None
        return f"ZeRO-{stage}" if stage is not None else "BF16_Optimizer"


def read_save(match: Match, files: Files) -> Save:
    """Every file of a save, read once. Raises MissingShard, MixedWorldSizes, Inconsistent, CorruptFile, each with the file."""
    return files.kept(("deepspeed", match.files), lambda: _read(match, files))


def _read(match: Match, files: Files) -> Save:
    names = save_files(match.files)
    if not names.optimizer:
        names = replace(names, parameters=tuple(folders_in(match.root / UNIVERSAL)))
    if names.trouble is not None:
        raise names.trouble
    _check_names(names, match.root)
    models = {mp: {rank: read_model_states(path, files) for rank, path in ranks.items()} for mp, ranks in names.model.items()}
    optimizers = {
        mp: tuple(read_optimizer_states(path, rank, files) for rank, path in ranks.items()) for mp, ranks in names.optimizer.items()
    }
    of_layers = {number: _plain(path, files) for number, path in names.layers.items()}
    leaves = [replace(leaf, name=f"{number}.{leaf.name}") for number, (_, others) in of_layers.items() for leaf in others]
    experts: dict[str, StoredTensor] = {}
    for (_, expert), path in names.experts.items():
        held, others = _plain(path, files)
        leaves += others
        for name, stored in held.items():
            fields = EXPERT_NAME.fullmatch(name)
            if fields is not None and int(fields["number"]) != expert:
                raise Inconsistent(f"the file holds a tensor of expert {fields['number']}", path=path, tensor=name, hint=MIXED)
            if name in experts:
                raise Inconsistent("two files of experts hold this tensor", path=path, tensor=name, hint=MIXED)
            experts[name] = stored
    layers = {number: held for number, (held, _) in of_layers.items()}
    save = Save(names, match.root, models, optimizers, layers, experts, tuple(leaves))
    _check_model_ranks(save)
    _check_recorded(save)
    _check_twins(match, save, files)
    for mp in models:
        _check_data_ranks(save, mp)
    _check_experts(save)
    _check_layers(save)
    return save


def _plain(path: Path, files: Files) -> tuple[dict[str, StoredTensor], tuple[Leaf, ...]]:
    """The tensors of a file that is a dict of them, and what else is in it."""
    file = files.parsed(path, TorchFile)
    with reading(path):
        check_stem(file, path)
        entries = as_dict(file.root)
        if entries is None:
            raise CorruptFile("this is no dict of tensors", expected="the tensors of a layer or an expert")
        if not entries:
            return {}, ()
        local, leaves = read_state(entries, LocalReader(file, 0), path)
        return plain_tensors(local), leaves


def _check_names(names: SaveFiles, root: Path) -> None:
    """What names alone show to be missing."""
    if not names.model:
        text = f"{next(iter(names.all)).name} is part of a DeepSpeed save whose model states are missing"
        raise MissingShard(text, path=root, expected="mp_rank_00_model_states.pt, or zero_pp_rank_0_mp_rank_00_model_states.pt")
    is_stage_3 = all(rank >= 0 for ranks in names.model.values() for rank in ranks)
    if not names.optimizer and not names.parameters and is_stage_3:
        raise MissingShard(
            "the optimizer states are missing, and at stage 3 nothing else holds the weights",
            path=root,
            expected="*_optim_states.pt of every rank",
        )
    there = sorted({*names.model, *names.optimizer})
    missing = next((rank for rank in range(len(there) + 1) if rank <= there[-1] and rank not in names.model), None)
    if missing is not None:
        raise _missing("model states", _first_path(names.model), min(names.model), missing)


def _missing(what: str, sibling: Path, its_rank: int, missing: int) -> MissingShard:
    """The error for the files of a model parallel rank; ``sibling`` is the same file of another one."""
    wanted = sibling.name.replace(f"mp_rank_{its_rank:02d}_", f"mp_rank_{missing:02d}_")
    return MissingShard(
        f"the {what} of model parallel rank {missing} are missing", path=sibling.parent, expected=str(sibling.parent / wanted)
    )


def _first_path(held: Mapping[int, Mapping[int, Path]]) -> Path:
    return next(iter(next(iter(held.values())).values()))


def _check_model_ranks(save: Save) -> None:
    """That the files of all stages of a pipeline, or ranks of tensor parallelism, are there, and no others."""
    there = len(save.models)
    said = save.first.number("mp_world_size")
    if said is None and there > 1:
        raise PartOfSet(
            f"files of {there} model parallel ranks, of which none says how the weights are cut over them",
            path=save.root,
            expected="files of DeepSpeed, which have an mp_world_size, or one file",
            hint="put them together with the program that wrote them; if one is a whole model, move it to a folder of its own",
        )
    count = said or 1
    if there < count:
        raise _missing(
            "model states", save.first.path, min(save.models), next(rank for rank in range(there + 1) if rank not in save.models)
        )
    if there > count:
        raise MixedWorldSizes(
            f"{save.first.path.name} was written by {count} model parallel ranks, and there are files of {there}",
            path=save.root,
            expected="files of one save",
            hint="files of an older save by more ranks may be left in the folder: move them to another one",
        )
    lacking = next((mp for mp in save.models if save.optimizers and mp not in save.optimizers), None)
    if lacking is not None:
        raise _missing("optimizer states", _first_path(save.names.optimizer), min(save.optimizers), lacking)


def _check_recorded(save: Save) -> None:
    """That the ranks in the arguments of a program (as Megatron-DeepSpeed keeps them) rise with those in the names of the files."""
    grid = {
        (mp, dp): Recorded(states.path.name, states.path, recorded_rank(states.entries))
        for mp, ranks in save.models.items()
        for dp, states in ranks.items()
    }
    lines = [(axis, number) for axis in (0, 1) for number in sorted({place[axis] for place in grid})]
    refuse_exchanged(*([grid[place] for place in sorted(grid) if place[axis] == number] for axis, number in lines))


def _check_data_ranks(save: Save, mp: int) -> None:
    """That the model states of one model parallel rank are of one save, and at stage 3 those of all ranks."""
    ranks, first = save.models[mp], save.model_of(mp)
    for states in ranks.values():
        _check_counters(save.first, states)
        if _in_order(states) != _in_order(first):
            raise Inconsistent(f"its parameters differ from those in {first.path.name}", path=states.path, hint=MIXED)
    if -1 in ranks or (save.names.parameters and not first.frozen):
        return
    partitioned = [states.counts[0] for states in save.optimizers.get(mp, ())[:1] if states.counts]
    count = max(max(ranks) + 1, *partitioned, 1)
    missing = next((rank for rank in range(len(ranks) + 1) if rank < count and rank not in ranks), None)
    if missing is not None:
        wanted = first.path.name.replace(f"pp_rank_{min(ranks)}_", f"pp_rank_{missing}_")
        text = f"the model states of rank {missing} of {count} are missing"
        raise MissingShard(text, path=save.root, expected=str(save.root / wanted))
    if len(ranks) > count:
        text = f"there are model states of {len(ranks)} ranks, and the optimizer was written by {count}"
        raise MixedWorldSizes(text, path=save.root, expected="files of one save")


def _in_order(states: ModelStates) -> list[list[tuple[str, Shape]]]:
    """The parameters of the groups, and the frozen ones, in the order of storage."""
    return [list(group.items()) for group in (*(states.groups or ()), states.frozen)]


def _check_twins(match: Match, save: Save, files: Files) -> None:
    """Nodes without a shared disk may all have the model states of their first rank: these must be the same."""
    for ranks in save.models.values():
        for states in ranks.values():
            for root in (match.root, *match.more_roots):
                twin = root / states.path.name
                if twin != states.path and is_file(twin):
                    other = read_model_states(twin, files)
                    _check_counters(states, other)
                    if other.file.fingerprint != states.file.fingerprint:
                        raise Inconsistent(f"it differs from {states.path}", path=twin, expected="the same save on all nodes", hint=MIXED)


def _check_counters(first: ModelStates, other: ModelStates) -> None:
    for key in ("global_steps", "dp_world_size", "mp_world_size"):
        if first.number(key) != other.number(key):
            text = f"{key} is {other.number(key)}, and {first.number(key)} in {first.path.name}"
            raise Inconsistent(text, path=other.path, expected="files of one save", hint=MIXED)


def _check_experts(save: Save) -> None:
    counts = save.first.entries.get("num_experts")
    listed = [count for count in counts if type(count) is int] if isinstance(counts, (list, tuple)) else []
    if not any(count > 1 for count in listed) and not save.experts:
        return
    _refuse_left_experts(save, listed)
    by_layer: dict[int, set[int]] = {}
    for layer, expert in save.names.experts:
        by_layer.setdefault(layer, set()).add(expert)
    for (layer, expert), path in save.names.experts.items():
        count = listed[0] if len(listed) == 1 else listed[layer] if layer < len(listed) else 0
        if listed and expert >= count:
            text = (
                f"MoE layer {layer} has {count} experts, and this is a file of its expert {expert}"
                if count
                else f"there is no MoE layer {layer}"
            )
            raise MixedWorldSizes(text, path=path, expected="files of one save", hint=LEFT_EXPERTS)
    layers = len(listed) if len(listed) > 1 else max(by_layer, default=0) + 1
    for layer in range(min(layers, len(by_layer) + 1)):
        held = by_layer.get(layer, set())
        count = listed[layer] if layer < len(listed) else listed[0] if len(listed) == 1 else max(held, default=0) + 1
        missing = next((expert for expert in range(min(count, len(held) + 1)) if expert not in held), None)
        if missing is not None:
            wanted = f"layer_{layer}_expert_{missing}_mp_rank_00_model_states.pt"
            raise MissingShard(f"expert {missing} of MoE layer {layer} is missing", path=save.root, expected=str(save.root / wanted))


def _refuse_left_experts(save: Save, listed: Sequence[int]) -> None:
    """Raise MixedWorldSizes for experts of layers that the model states have nothing of: each layer's gate is among these."""
    if not save.names.experts or save.layers or save.first.entries.get("ds_autoep_layers"):
        return
    held = [states for ranks in save.models.values() for states in ranks.values()]
    names = [name for states in held for group in (states.module or {}, *(states.groups or ()), states.frozen) for name in group]
    known = {name.partition(EXPERTS)[0] for name in names if EXPERTS in name}
    if not known and listed:
        return  # gates that were left out when saving, as frozen parameters
    strange = next((name for name in save.experts if not known or (EXPERTS in name and name.partition(EXPERTS)[0] not in known)), None)
    if strange is not None or not known:
        lacks, them = ("experts of this layer", "them") if known else ("experts", "some")
        text = f"{save.first.path.name} knows of no {lacks}, and there are files of {them}"
        path = save.root if known else next(iter(save.names.experts.values()))
        raise MixedWorldSizes(text, path=path, tensor=strange, expected="files of one save", hint=LEFT_EXPERTS)


def _check_layers(save: Save) -> None:
    if save.layers and save.first.module:
        raise MixedWorldSizes(
            f"{save.first.path.name} holds the whole model, and there are files of a pipeline's layers",
            path=next(iter(save.names.layers.values())),
            expected="files of one save",
            hint="files of an older save as a pipeline may be left in the folder: move them to another one",
        )
    if not save.is_pipeline or save.names.parameters:
        return
    degrees = as_dict(save.first.entries.get("checkpoint_parallel_dimensions")) or {}
    if type(degrees.get("tp_degree")) is int and degrees["tp_degree"] > 1:
        raise cut_layers(save.root)
    if not save.layers:
        raise MissingShard("the files of the pipeline's layers are missing", path=save.root, expected="layer_NN-model_states.pt")
