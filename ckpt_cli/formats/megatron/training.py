"""What a step of Megatron holds besides weights, as nested values: iteration, scheduler, arguments, random states of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_cli.errors import Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.dcp.metadata import named_metadata
from ckpt_cli.formats.megatron.common import SCHEDULER, Common, read_common
from ckpt_cli.formats.megatron.one_save import read_save
from ckpt_cli.formats.megatron.ranks import CHUNK
from ckpt_cli.formats.megatron.step import RANDOM, Step
from ckpt_cli.formats.optimizer_state import Group, NamedState
from ckpt_cli.tensors.plain_values import TensorValue, equal
from ckpt_cli.tensors.tensor import Tensor

OPTIMIZER = "optimizer"
MAX_DEPTH = 4

IN_BUCKETS = "its parts lie in buckets, of which only the class of the model tells whose they are (dp_reshardable)"
BY_NUMBER = "its parts are numbered in an order that the files do not record"


def of_step(step: Step) -> dict[str, Any]:
    """The state in a torch_dist step; random states in the order of the axes pp, tp and ep."""
    places: dict[tuple[int, ...], Any] = {}
    for key, thing in step.catalog.objects.items():
        fields = RANDOM.fullmatch(key)
        if fields is not None and thing.stored is not None:
            places[tuple(map(int, fields["place"].split(".")))] = _random(step.reader.value(thing.stored))
    return _named(step.common, [places[place] for place in sorted(places)])


def of_ranks(paths: Sequence[Path], files: Files) -> dict[str, Any]:
    """The state in legacy files: that of the first one, but for the random states of all."""
    _, ranks, _ = read_save(paths, files)
    commons = [read_common(TorchFile(files.source(rank.path)), lambda key: not CHUNK.fullmatch(key) and key != OPTIMIZER) for rank in ranks]
    return _named(commons[0], [_random(common.values.get("rng_state")) for common in commons])


def _named(common: Common, randoms: list[Any]) -> dict[str, Any]:
    state = {name: value for name, value in common.values.items() if name not in (SCHEDULER, OPTIMIZER, "rng_state")}
    if SCHEDULER in common.values:
        state["lr_scheduler"] = common.values[SCHEDULER]
    if common.arguments:
        state["args"] = dict(common.arguments)
    if any(value is not None for value in randoms):
        state["rng_state"] = randoms
    return state


def _random(value: Any) -> Any:
    """The random state of a rank: of lists with one item their item, of several (one per data-parallel rank) all by number."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return {f"data_parallel_{number}": item for number, item in enumerate(value)} if isinstance(value, list) else value


def optimizer_of_step(step: Step) -> NamedState | None:
    """The optimizer by parameter, under Megatron's names. None if there is none. Raises Unsupported where nothing tells whose a part is."""
    if step.has_buckets:
        raise Unsupported(
            f"this is Megatron's distributed optimizer: {IN_BUCKETS}",
            path=step.roots[0],
            expected="an optimizer that was saved by name (fully_reshardable, fully_sharded_model_space)",
            hint="leave out --optimizer",
        )
    slots = step.slots
    if not slots:
        return None
    tensors: dict[tuple[str, str], Tensor] = {}
    for slot, entries in slots.items():
        tensors |= {(name, slot): tensor for name, tensor in step.tensors(entries).items()}
    held = step.common.values.get(OPTIMIZER)
    count = _common_step(held)
    values = {(name, "step"): count for name in dict.fromkeys(name for name, _ in tensors)} if count is not None else {}
    return NamedState(tensors, values, list(_groups(held)))


def refuse_numbered(paths: Sequence[Path], files: Files) -> None:
    """Raise Unsupported if legacy files hold an optimizer."""
    for path in paths:
        file = files.parsed(path, TorchFile)
        if isinstance(file.root, Mapping) and file.root.get(OPTIMIZER) is not None:
            raise Unsupported(
                f"this is the optimizer of a legacy step of Megatron: {BY_NUMBER}",
                path=path,
                expected="a step of the format torch_dist, with an optimizer that was saved by name",
                hint="leave out --optimizer",
            )


def _groups(held: Any, depth: int = 0) -> Iterable[Group]:
    """The options of parameter groups, of one optimizer or of several. Which parameters a group has is not recorded."""
    if not isinstance(held, Mapping) or depth > MAX_DEPTH:
        return
    listed = held.get("param_groups")
    for group in listed if isinstance(listed, list) else ():
        if isinstance(group, Mapping):
            yield {**{str(key): value for key, value in group.items()}, "params": []}
    for key, value in held.items():
        if key not in ("param_groups", "param_state", "state"):
            yield from _groups(value, depth + 1)


def _common_step(held: Any) -> TensorValue | int | None:
    """The step that all parameters have; None if nothing says it, or they differ."""
    if not isinstance(held, Mapping):
        return None
    inner = held.get(OPTIMIZER)
    state = inner.get("state") if isinstance(inner, Mapping) else None
    found = [state["common_step"]] if isinstance(state, Mapping) and "common_step" in state else []
    by_number = held.get("param_state")
    if isinstance(by_number, Mapping):
        found += [value["step"] for value in by_number.values() if isinstance(value, Mapping) and "step" in value]
    return found[0] if found and all(equal(value, found[0]) for value in found[1:]) else None


def steps_beside(root: Path, files: Files) -> list[Step]:
    """The steps in which verl keeps optimizer and extra state beside ``model/dist_ckpt``."""
    if root.name != "dist_ckpt" or root.parent.name != "model":
        return []
    folders = [root.parent.parent / part / root.name for part in ("optimizer", "extra")]
    return [Step.opened((folder,), files) for folder in folders if named_metadata(folder, Folders())]
