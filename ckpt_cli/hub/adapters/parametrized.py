"""LoRA as parametrizations of torch: its factors lie behind ``parametrizations.<tensor>.<number>``, beside the tensor's ``original``.

A model's own code may be built so (jina-embeddings-v3, jina-clip-v2: a stack of factors, one for each task; those of an embedding
are [rows, r] and [r, columns]), or a trainer put them there (minLoRA, Stable Audio 3, whose files of adapters leave ``original`` out).
None of it is PEFT's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ckpt_cli.names import plural

IN_PARAMETRIZATION = re.compile(r"(?P<outside>(?:.*?\.)?)parametrizations\.(?P<tensor>[^.]+)\.(?P<rest>.+)", re.ASCII)
FACTOR = re.compile(r"[0-9]+\.(?:.*[._])?lora_?[ab](?:[._].*)?", re.ASCII | re.IGNORECASE)
ORIGINAL = re.compile(r"original[0-9]*", re.ASCII)


def outside(name: str) -> str:
    """What a name says in front of a parametrization, which has names of its own behind that.

    >>> outside("q.base_layer.parametrizations.weight.original0"), outside("q.parametrizations.weight.0.lora_A"), outside("q.lora_A.weight")
    ('q.base_layer.', 'q.', 'q.lora_A.weight')
    """
    match = IN_PARAMETRIZATION.fullmatch(name) if "parametrizations." in name else None
    return name if match is None else match["outside"]


def parametrized_factors(names: Iterable[str]) -> list[str]:
    """The tensors of a state dict that are factors of LoRA in parametrizations.

    >>> parametrized_factors(["q.parametrizations.weight.0.lora_A", "q.parametrizations.weight.original", "q.lora_A.weight"])
    ['q.parametrizations.weight.0.lora_A']
    """
    matches = ((name, IN_PARAMETRIZATION.fullmatch(name)) for name in names if "parametrizations." in name)
    return [name for name, match in matches if match is not None and FACTOR.fullmatch(match["rest"])]


def without_originals(factors: Collection[str], names: Iterable[str]) -> list[str]:
    """Those of these factors whose tensor is not here: they are an adapter's, and no model is."""
    matches = (IN_PARAMETRIZATION.fullmatch(name) for name in names)
    there = {(match["outside"], match["tensor"]) for match in matches if match is not None and ORIGINAL.fullmatch(match["rest"])}
    return [name for name in factors if _place(name) not in there]


def parametrized_text(factors: Collection[str]) -> str:
    """What is said of such factors beside their tensors, where no code of the model's own is known to have a place for them."""
    first = next(iter(factors))
    count = plural(len(factors), "tensor is a factor", "tensors are factors")
    return (
        f"{count} of LoRA in parametrizations of torch, such as {first}: they are written as they are, not fused, and only code that "
        "registers the same parametrizations loads them and the weights that they change"
    )


def _place(name: str) -> tuple[str, str]:
    """The module and the tensor that is parametrized."""
    match = IN_PARAMETRIZATION.fullmatch(name)
    return ("", "") if match is None else (match["outside"], match["tensor"])
