"""From the tensors of all ranks of a legacy step to whole ones: how tensor parallelism cuts each, as Megatron core's modules do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ckpt_cli.boxes import whole
from ckpt_cli.errors import Inconsistent, Unsupported
from ckpt_cli.files.torch_file import StoredTensor
from ckpt_cli.formats.assembly import one_piece
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.views import concatenated, permuted, sliced, unfolded, unstacked

Cut = Literal["rows", "columns", "gated", "none"]

CUTS: dict[Cut, re.Pattern[str]] = {
    "rows": re.compile(
        r"(.*\.)?(word_embeddings\.weight|output_layer\.(weight|bias)|linear_(qkv|q_proj|q_up_proj|kv_up_proj)\.(weight|bias))", re.ASCII
    ),
    "columns": re.compile(r"(.*\.)?linear_(proj|fc2)\.weight[0-9]*", re.ASCII),
    "gated": re.compile(r"(.*\.)?linear_fc1\.(weight|bias)[0-9]*", re.ASCII),
    "none": re.compile(
        r"(.*\.)?([a-z0-9_]*norm[a-z0-9_]*\.(weight|bias)|[a-z0-9_]+\.layer_norm_(weight|bias)"
        r"|router\.(weight|bias|expert_bias|local_tokens_per_expert)|linear_(proj|fc2)\.bias[0-9]*|gate_weight"
        r"|linear_(q|kv)_down_proj\.weight|(position|tokentype)_embeddings\.weight|inv_freq)",
        re.ASCII,
    ),
}
"""Column-parallel layers are cut by rows, row-parallel ones by columns; of a gated layer every rank holds its gate, then its up."""

LOCAL_EXPERT = re.compile(r"(?P<before>.*\.experts\.local_experts\.)(?P<number>[0-9]{1,6})(?P<after>\..+)", re.ASCII)
GROUPED_EXPERT = re.compile(r"(?P<before>.*\.experts\.linear_fc[12]\.(?:weight|bias))(?P<number>[0-9]{1,6})(?P<after>)", re.ASCII)
PACKED = re.compile(r"(?P<before>.*\.experts\.)weight(?P<number>[12])", re.ASCII)
"""GroupedMLP: all experts of a rank in one tensor, with their matrices transposed."""


def local_tensors(stored: Mapping[str, StoredTensor], rank: int, experts: int | None, first: int) -> dict[str, Tensor]:
    """What one rank holds, with global numbers of experts: it has ``experts`` of them, from number ``first`` on."""
    held: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        local = one_piece(name, tensor, rank)
        if (fields := PACKED.fullmatch(name)) is not None:
            held |= _unpacked(local, fields["before"], fields["number"], experts, first)
            continue
        fields = LOCAL_EXPERT.fullmatch(name) or GROUPED_EXPERT.fullmatch(name)
        if fields is not None and (experts is None or int(fields["number"]) >= experts):
            text = f"the rank holds {experts or 'no'} experts by its arguments"
            raise Inconsistent(text, tensor=name, expected="num_experts in the arguments")
        new = name if fields is None else f"{fields['before']}{int(fields['number']) + first}{fields['after']}"
        held[new] = replace(local, name=new)
    return held


def _unpacked(packed: Tensor, before: str, number: str, experts: int | None, first: int) -> dict[str, Tensor]:
    """The matrices of GroupedMLP's experts, as torch_dist names them.

    ``weight1`` has shape [h, n * 2f], and is [n, h, 2f] in memory; ``weight2`` has shape [n * f, h]. Raises Inconsistent.
    """
    if experts is None or len(packed.shape) != 2 or packed.numel % experts or not packed.numel:
        raise Inconsistent(f"shape {list(packed.shape)} does not hold {experts or 'any'} experts", tensor=packed.name)
    rows, columns = packed.shape
    if number == "1":
        if columns % experts:
            raise Inconsistent(f"shape {list(packed.shape)} does not hold {experts} experts", tensor=packed.name)
        (piece,) = packed.pieces
        if piece.strides != (columns, 1):
            raise Inconsistent("it is not contiguous, which the form of its experts is about", tensor=packed.name)
        inner = columns // experts
        grid = (experts, rows, inner)
        strides = (rows * inner, inner, 1)
        packed = replace(packed, shape=grid, pieces=(replace(piece, box=whole(grid), strides=strides, crc=None),))
    else:
        packed = unfolded(packed, 0, (experts, rows // experts))
    turned = permuted(packed, (0, 2, 1))
    names = [f"{before}experts.{first + index}.linear_fc{number}.weight" for index in range(experts)]
    return {name: replace(part, name=name) for name, part in zip(names, unstacked(turned, 0), strict=True)}


def with_copies(held: Sequence[Tensor]) -> Tensor:
    """The first of some tensors that should be equal, with the others as its replicas. Raises Inconsistent for other shapes."""
    first = held[0]
    for other in held[1:]:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            text = f"the ranks hold {first.dtype} {list(first.shape)} and {other.dtype} {list(other.shape)}"
            raise Inconsistent(text, tensor=first.name, hint="files from two saves may be mixed")
    copies = tuple(piece for other in held[1:] for piece in other.pieces)
    kind = "replicated" if copies and first.kind == "whole" else first.kind
    return replace(first, copies=(*first.copies, *copies), check_copies=first.check_copies or bool(copies), kind=kind)


def joined(name: str, parts: Sequence[Tensor], *, gated: bool) -> Tensor:
    """A tensor from those of all ranks of tensor parallelism; ``gated``: ``linear_fc1`` holds gate and up. Raises Unsupported."""
    if len(parts) == 1:
        return parts[0]
    cut = next((cut for cut, regex in CUTS.items() if regex.fullmatch(name)), None)
    if cut is None:
        raise Unsupported(
            "it is not known how tensor parallelism cuts this tensor",
            tensor=name,
            expected="a tensor of Megatron core's GPT models",
            hint="load it with Megatron and save it in the format torch_dist",
        )
    if cut == "none":
        return with_copies(parts)
    if cut == "gated" and gated:
        _check_even(name, parts)
        halves = [[sliced(part, 0, start, start + part.shape[0] // 2) for part in parts] for start in (0, parts[0].shape[0] // 2)]
        whole_tensor = concatenated([*halves[0], *halves[1]], 0)
    else:
        whole_tensor = concatenated(list(parts), 1 if cut == "columns" else 0)
    return replace(whole_tensor, name=name, kind="sharded", layout=f"TP x{len(parts)}")


def _check_even(name: str, parts: Sequence[Tensor]) -> None:
    if any(part.shape != parts[0].shape or part.shape[0] % 2 for part in parts):
        raise Inconsistent("the ranks hold no equal halves of gate and up", tensor=name, hint="files from two saves may be mixed")
