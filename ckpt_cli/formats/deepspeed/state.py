"""What a DeepSpeed save holds besides weights: counters, scheduler, loss scale, the caller's own state, and the optimizer by parameter."""

from __future__ import annotations

from typing import Any

from ckpt_cli.errors import Unsupported, reading
from ckpt_cli.files.source import Files
from ckpt_cli.formats.deepspeed.flat_tensors import tensor_of
from ckpt_cli.formats.deepspeed.model_states import WEIGHTS
from ckpt_cli.formats.deepspeed.optimizer_states import FP32
from ckpt_cli.formats.deepspeed.save import Save
from ckpt_cli.formats.deepspeed.stage_0 import stage_0_optimizer
from ckpt_cli.formats.deepspeed.universal import universal_optimizer
from ckpt_cli.formats.deepspeed.weights import check_agreement, slot_tensors, stored_weights
from ckpt_cli.formats.optimizer_state import Group, NamedState
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.plain_values import ValueReader
from ckpt_cli.tensors.tensor import Tensor


def training_values(save: Save) -> dict[str, Any]:
    """Everything in the model states that speaks neither of weights nor of the setting, and the loss scale, as values."""
    first = save.first
    reader = ValueReader(first.file)
    with reading(first.path):
        state = {str(key): reader.read(node) for key, node in first.entries.items() if key not in WEIGHTS and node is not None}
    for ranks in save.optimizers.values():
        return {**state, **{key: value for key, value in ranks[0].scaling.items() if key not in state}}
    return state


def named_optimizer(save: Save, files: Files) -> NamedState | None:
    """The optimizer by parameter. None if there is none. Raises Undecidable for one whose parameters cannot be told."""
    if save.names.parameters:
        return universal_optimizer(save, files)
    if not save.optimizers:
        return None if save.is_partitioned else stage_0_optimizer(save, files)
    odd = sorted({slot for held in save.groups.values() for group in held for p in group.parameters for slot in p.odd})
    if odd:
        text = f"{few(odd, 3)}: the optimizer keeps something else than a number per element, which only the library that wrote it can read"
        raise Unsupported(text, path=next(iter(save.optimizers.values()))[0].path, hint="leave out --optimizer")
    if not save.is_stage_3:
        check_agreement(slot_tensors(save), stored_weights(save), save)
    slots = dict.fromkeys(slot for held in save.groups.values() for group in held for p in group.parameters for slot in p.ranges)
    tensors: dict[tuple[str, str], Tensor] = {}
    for slot in slots:
        if slot != FP32:
            tensors |= {(name, slot): tensor for name, tensor in slot_tensors(save, slot).items()}
    values: dict[tuple[str, str], Any] = {}
    groups: list[Group] = []
    for held in save.groups.values():
        for index, group in enumerate(held):
            names = [parameter.name for parameter in group.parameters]
            if index < len(groups):
                groups[index]["params"] = list(dict.fromkeys([*groups[index]["params"], *names]))
            else:
                groups.append({**group.options, "params": names})
            for parameter in group.parameters:
                for slot, stored in parameter.scalars.items():
                    tensors.setdefault((parameter.name, slot), tensor_of(f"state.{parameter.name}.{slot}", stored))
                for slot, value in parameter.values.items():
                    values.setdefault((parameter.name, slot), value)
    return NamedState(tensors, values, groups)


def steps_of_optimizer(save: Save) -> list[Note]:
    """A warning if the optimizer has counted other steps than the model states. (That its ranks agree is checked where they are read.)"""
    step = next((ranks[0].step for ranks in save.optimizers.values()), None)
    steps, skipped = save.first.number("global_steps"), save.first.number("skipped_steps") or 0
    if step is not None and steps is not None and step != steps - skipped:
        text = f"the optimizer has counted {step:g} steps, {save.first.path.name} says {steps - skipped}"
        return [Note("warning", "step-differs", f"{text}: they may be of different saves, or the optimizer was started anew")]
    return []
