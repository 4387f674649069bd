"""Biases that were trained beside LoRA factors: PEFT's ``bias``, "lora_only" (of the adapted modules) or "all" (of the whole model).

PEFT saves them with the factors and puts them in place of those of the base (``BaseTuner._get_learnable_bias_state_dict``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ckpt_cli.errors import Inconsistent, Unsupported
from ckpt_cli.hub.peft_names import PeftState
from ckpt_cli.lora.config import CONFIG, AdapterFacts
from ckpt_cli.tensors.tensor import Tensor

KINDS = ("none", "all", "lora_only")


def bias_kind(facts: AdapterFacts) -> str:
    """What the config says of biases; "none" if it says nothing. Raises Unsupported for what is not known."""
    said = facts.config.get("bias") or "none"
    if said not in KINDS:
        hint = "merge it with PEFT, or pass --lora keep"
        raise Unsupported(f"{CONFIG} says bias {str(said)[:40]}", expected=", ".join(KINDS), hint=hint)
    return str(said)


def trained_biases(state: PeftState, facts: AdapterFacts) -> tuple[str, ...]:
    """The tensors of a state that the config says were trained as biases, without those of modules that were trained as a whole."""
    return tuple(name for name in _meant(state.tensors, state, facts) if name in state.tensors and name not in state.saved)


def missing_biases(held: Collection[str], base: Mapping[str, Tensor], state: PeftState, facts: AdapterFacts) -> list[str]:
    """The biases of a model that the config says were trained, and that an adapter's files do not hold (``held``: what they do)."""
    # What is called so but has several dimensions is a buffer, such as the mask in old files of GPT-2.
    return [name for name in _meant(base, state, facts) if name in base and len(base[name].shape) == 1 and name not in held]


def check_biases(state: PeftState, base: Mapping[str, Tensor], biases: Collection[str]) -> None:
    """Raise Inconsistent for a trained bias of an adapted module that the module of the base has not, or not in this shape."""
    for adapter in state.adapters:
        name = f"{adapter.module}.bias"
        if name not in biases or f"{adapter.module}.weight" not in base:
            continue
        if name not in base or base[name].shape != state.tensors[name].shape:
            what = "has no bias" if name not in base else f"has a bias of {base[name].numel} elements, not {state.tensors[name].numel}"
            raise Inconsistent(
                f"the adapter has a trained bias, but its module in the base {what}",
                tensor=state.tensors[name].name,
                expected="the model that the adapter was trained on",
            )


def _meant(names: Mapping[str, Tensor], state: PeftState, facts: AdapterFacts) -> Iterator[str]:
    kind = bias_kind(facts)
    if kind == "all":
        return (name for name in names if name == "bias" or name.endswith(".bias"))
    return (f"{adapter.module}.bias" for adapter in (state.adapters if kind == "lora_only" else ()))
