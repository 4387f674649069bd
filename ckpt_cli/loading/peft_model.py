"""A live model of PEFT: its tensors and those of a checkpoint under the names that both have without PEFT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckpt_cli.errors import Unsupported
from ckpt_cli.hub.peft_names import first_state_of, has_adapters, plain_name, wrapped_parts
from ckpt_cli.loading.match import Matched
from ckpt_cli.names import few
from ckpt_cli.tensors.tensor import Tensor


def plain_names(live: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of a model's tensors without what PEFT adds to them, with its own. Raises Unsupported for several adapters."""
    plain: dict[str, str] = {}
    parts = wrapped_parts(live)
    for name in live:
        if (short := plain_name(name, parts)) in plain:
            text = f"the model has several adapters: {few([plain[short], name])} are one tensor in files of PEFT"
            raise Unsupported(text, tensor=name, hint="load before the others are added, or delete them (PeftModel.delete_adapter)")
        plain[short] = name
    return plain


def plainly_named(tensors: Mapping[str, Tensor], live: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of a checkpoint without what PEFT adds to their names, where that makes no two alike.

    ``live`` are the plain names of the model. One of a module that is trained as a whole has its first state too: in a checkpoint that
    knows nothing of adapters, both are one tensor.
    """
    parts = wrapped_parts(tensors)
    short = {name: plain_name(name, parts) for name in tensors}
    if len({*short.values()}) < len(short):
        return dict(tensors)
    plain = {new: tensors[old] for old, new in short.items()}
    if has_adapters(tensors):
        return plain
    used = {name: first_state_of(name) for name in live}
    return plain | {name: plain[now] for name, now in used.items() if now in plain}


def with_own_names(found: Matched, plain: Mapping[str, str]) -> Matched:
    """A match under plain names, told by the names of the model; a hint says how to load the half that a checkpoint has."""
    missing = tuple(plain.get(name, name) for name in found.missing)
    factors = [name for name in missing if "lora_" in name]
    hint = None
    if factors and len(factors) == len(missing):
        hint = "the checkpoint holds no adapters: allow_missing='*lora_*' fills the model below them, and leaves them as they are"
    elif missing and not factors and any("lora_" in pair.name for pair in found.pairs):
        hint = "the checkpoint holds the adapters alone: strict=False fills them, and leaves the model below them as it is"
    return replace(found, missing=missing, hint=hint, apart=tuple(plain.get(name, name) for name in found.apart))
