"""Tensors of a dtype that no class has in their place: codes without scales, complex numbers, integers in place of weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from ckpt_cli.dtypes import BY_CODE, Dtype
from ckpt_cli.hub.classes.computed.codes import COUNTERS, SCALES, is_table, scaled_codes
from ckpt_cli.hub.classes.config_counts import PACKED, SCALE, has_packed_codes
from ckpt_cli.hub.classes.fit import KnownClass
from ckpt_cli.hub.config import Config, is_quantised
from ckpt_cli.name_patterns import pattern_of
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

MASK_DIMENSIONS = 4
"""GPT-2 and its like keep the causal mask as ``attn.bias``, [1, 1, n, n]."""


def odd_dtypes(tensors: Mapping[str, Tensor], config: Config, kind: KnownClass | str) -> list[Note]:
    """Warnings about weights that are not floats, one for each dtype.

    A weight is a tensor that the class knows, that other layers have as floats, or named like one; codes with scales beside them are some
    whatever their library calls them. With a quantization_config, codes are expected; complex numbers are never codes.
    """
    quantised = is_quantised(config) or "compression_config" in config
    found: dict[Dtype, list[str]] = {}
    packed = packed_weights(tensors)
    others = bool(packed) or any(tensor.dtype.kind != "float" for tensor in tensors.values())
    floats = {pattern_of(name)[0] for name, tensor in tensors.items() if others and tensor.dtype.kind == "float" and name not in packed}
    codes = {name for name in undeclared_codes(tensors, config) if tensors[name].shape} if others and not quantised else set()
    for name, tensor in tensors.items():
        dtype, odd = tensor.dtype, name in codes or (tensor.dtype.kind != "float" and _is_weight(name, tensor, kind, floats))
        if odd and (not quantised or dtype.kind == "complex"):
            found.setdefault(dtype, []).append(name)
    texts = [_text(dtype, names, tensors, config) for dtype, names in found.items()]
    return [Note("warning", "odd-dtype", text) for text in texts if text is not None]


def _is_weight(name: str, tensor: Tensor, kind: KnownClass | str, floats: Collection[str]) -> bool:
    """Whether a class has floats in the place of a tensor, judged by names."""
    leaf, dimensions = name.rpartition(".")[2], len(tensor.shape)
    if is_table(name) or (leaf.endswith("bias") and (not dimensions or dimensions >= MASK_DIMENSIONS)):
        return False
    if tensor.dtype.kind == "opaque" and SCALES.fullmatch(leaf):
        return False
    called = leaf.endswith(("weight", "bias")) or (tensor.dtype.kind == "int" and SCALE.search(leaf) and dimensions > 1)
    return bool(called) or pattern_of(name)[0] in floats or (isinstance(kind, KnownClass) and kind.knows(name))


def _text(dtype: Dtype, names: list[str], tensors: Mapping[str, Tensor], config: Config) -> str | None:
    """The message about weights of one dtype; none about codes with scales if there is no config at all: these are for other tools."""
    text = f"{few(names, 3)}: {dtype} where a model has floats"
    if dtype.kind in ("complex", "bool"):
        return f"{text}: no loader takes complex numbers for weights" if dtype.kind == "complex" else text
    if dtype.kind == "float":
        text = f"{few(names, 3)}: {dtype} that holds no numbers"
    if has_packed_codes(tensors) or dtype.kind == "float":
        lack = "config.json has no quantization_config" if config else "there is no config.json with a quantization_config"
        return f"{text}: codes of 4 bits, which bitsandbytes packed, and {lack}, without which no loader unpacks them"
    modules = {name.rpartition(".")[0] for name in names}
    called = (other.rpartition(".") for other in tensors.keys() - set(names))
    if not scaled_codes(tensors).keys().isdisjoint(names) or any(SCALE.search(leaf) and module in modules for module, _, leaf in called):
        what = "config.json has no quantization_config, without which loaders ignore the scales"
        return f"{text}, and {what}" if config else None
    return f"{text}; without scales such codes are meaningless"


UNPACKING = re.compile(rf"(?P<weight>.+)(\.(nested_)?(absmax|quant_map)|{PACKED.pattern})")
"""Names of what bitsandbytes stores below the name of a weight of 4 bits."""


ADAPTED = ".base_layer.weight"
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.([^.]+\.)?weight")
"""Where PEFT's models have an adapted weight, and its factors."""


def packed_weights(tensors: Mapping[str, Tensor]) -> set[str]:
    """Weights that are codes of 4 bits of bitsandbytes, by what lies below their names, or by the shapes of PEFT's factors beside them.

    Their dtype says nothing: with ``bnb_4bit_quant_storage`` (for FSDP) the packed bytes are those of floats. FSDP saves no scales.
    """
    owners = (found["weight"] for found in map(UNPACKING.fullmatch, tensors) if found)
    sides: dict[str, dict[str, int]] = {}
    for found in filter(None, map(FACTOR.fullmatch, tensors)):
        shape = tensors[found[0]].shape
        sides.setdefault(found["module"] + ADAPTED, {})[found["side"]] = shape[found["side"] == "A"] if len(shape) == 2 else 0
    adapted = {name for name, side in sides.items() if name in tensors and holds_codes(tensors[name], side.get("B", 0), side.get("A", 0))}
    return adapted | {name for name in owners if name in tensors}


def is_packed(name: str, tensors: Mapping[str, Tensor], rows: int, columns: int) -> bool:
    """Whether a weight of these sides is packed so, told by the scales that lie below it, or by its shape."""
    return f"{name}.absmax" in tensors or holds_codes(tensors[name], rows, columns)


def what_codes(name: str, tensors: Mapping[str, Tensor], rows: int, columns: int, coded: Collection[str]) -> str | None:
    """What a weight of these sides is, if it is codes that are called floats: packed ones, or one of those that are ``coded`` by values."""
    if is_packed(name, tensors, rows, columns):
        return "packed codes of 4 bits"
    return f"codes that are called {tensors[name].dtype}, with a scale beside them" if name in coded else None


def holds_codes(tensor: Tensor, rows: int, columns: int) -> bool:
    """Whether a tensor has the shape in which bitsandbytes packs a matrix: one column, with half a byte for each element."""
    return len(tensor.shape) == 2 and tensor.shape[1] == 1 and 0 < rows * columns == 2 * tensor.nbytes


def without_packed_floats(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors for what looks at values: codes that bitsandbytes packed into floats as integers of the same size."""
    codes = {name for name in packed_weights(tensors) if tensors[name].dtype.kind == "float"}
    return {name: replace(tensor, dtype=BY_CODE[f"I{tensor.dtype.bits}"]) if name in codes else tensor for name, tensor in tensors.items()}


def undeclared_codes(tensors: Mapping[str, Tensor], config: Config) -> list[str]:
    """Quantised weights, with their scales, of which the config says nothing: integers and floats whose values mean something together.

    Floats are among them where bitsandbytes packed its codes into these.
    """
    if is_quantised(config):
        return []
    packed = packed_weights(tensors)
    plain = {name: tensor for name, tensor in tensors.items() if tensor.dtype.kind != "opaque"}
    found = [name for name in quantised_names(plain, quantised=False) if tensors[name].dtype.kind == "int" or name in packed]
    found = [name for name in found if not is_table(name)]
    return sorted(name for name in found if not SCALES.fullmatch(name.rpartition(".")[2]) and not has_packed_codes([name]))


def quantised_names(tensors: Mapping[str, Tensor], quantised: bool) -> set[str]:
    """Names that must stay together: quantised weights and their scales.

    A module is quantised if it holds a tensor of a dtype that is meaningless alone, codes that bitsandbytes packed, or integers of at
    most 32 bits beside scales (or such integers at all, if the config says that weights are ``quantised``). So are matrices of integers
    with scales of any name, or elsewhere (`scaled_codes`).
    """
    packed = packed_weights(tensors)
    modules: dict[str, list[str]] = {}
    companions: set[str] = set()
    for name in tensors:
        parts = name.split(".")
        # bitsandbytes puts "a.weight.absmax" and "a.weight.quant_state.bitsandbytes__nf4" beside "a.weight".
        owner = next((i for i in range(1, len(parts)) if ".".join(parts[:i]) in tensors), len(parts))
        modules.setdefault(".".join(parts[: owner - 1]), []).append(name)
        if owner < len(parts):
            companions.add(name)
    fixed: set[str] = set()
    for names in modules.values():
        kinds = {name: tensors[name].dtype for name in names}
        small = [name for name, dtype in kinds.items() if dtype.kind == "int" and dtype.bits <= 32]
        counts = {name for name in small if COUNTERS.fullmatch(name.rpartition(".")[2])}
        codes = [
            name for name, dtype in kinds.items() if dtype.kind == "opaque" or name in packed or (name in small and name not in counts)
        ]
        scales = [name for name in names if name in companions or SCALES.fullmatch(name.rpartition(".")[2])]
        if any(tensors[name].dtype.kind == "opaque" or name in packed for name in codes) or (codes and (quantised or scales)):
            fixed |= {*codes, *scales}
    for name, scales in scaled_codes(tensors).items():
        fixed |= {name, *scales}
    return fixed
