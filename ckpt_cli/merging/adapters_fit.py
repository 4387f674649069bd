"""Whether a base is the model that adapters were trained on."""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.base_model.resemblance import ENOUGH
from ckpt_cli.errors import Inconsistent
from ckpt_cli.hub.peft_names import parse_peft
from ckpt_cli.lora.config import adapter_facts
from ckpt_cli.lora.copies import with_ties
from ckpt_cli.lora.merge import Adapted
from ckpt_cli.lora.on_base.adapted import fits
from ckpt_cli.lora.on_base.seen import as_in_memory
from ckpt_cli.lora.parts import placed
from ckpt_cli.tensors.component import Component


def check_adapters_fit(opened: Adapted, base: Component, folder: Path) -> None:
    """Raise Inconsistent if most adapters find no weight of their shape in a base, as in another model."""
    state = parse_peft(opened.component.tensors)
    facts = adapter_facts(opened.homes, None)
    seen = as_in_memory(base.tensors, opened.assets.config, state.adapters, facts.config)
    tensors = with_ties(seen.tensors, seen.config, state.adapters)
    state = placed(state, tensors)
    fitting = sum(fits(adapter, tensors) for adapter in state.adapters)
    if fitting < ENOUGH * len(state.adapters):
        count = f"{fitting} of {len(state.adapters)} adapters have a weight of their shape in it"
        raise Inconsistent(
            f"the base is another model, or has other names: {count}",
            path=folder,
            expected="the model that training started from",
            hint="pass that model as --base, or leave out --base to export the adapters without a comparison",
        )
