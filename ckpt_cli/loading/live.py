"""A live model of torch as described tensors: pieces are boxes of memory that this process holds.

A description can be renamed and re-cut like that of a checkpoint, so a model can be filled under the names of the hub, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt_cli.boxes import Shape, contiguous_strides, whole
from ckpt_cli.dtypes import BY_TORCH
from ckpt_cli.errors import Unsupported, UsageError
from ckpt_cli.files.descriptors import Identity
from ckpt_cli.files.source import Source
from ckpt_cli.loading.elements import torch_module
from ckpt_cli.loading.local_boxes import local_boxes
from ckpt_cli.loading.modules.altered_weights import refuse_altered
from ckpt_cli.loading.shared_memory import refuse_read_only, refuse_shared, region
from ckpt_cli.loading.wrapped_tensors import plain_inside
from ckpt_cli.names import stripped_names
from ckpt_cli.tensors.tensor import Piece, Tensor

META = (
    "build the model on a device with memory, or materialise it with model.to_empty(device=...) and then make its ties and non-persistent "
    "buffers anew (model.init_weights() of transformers 5), before load_into"
)


class Memory:
    """The local part of a live tensor as a source, whose bytes are its elements in memory, strides and all."""

    forward_only = False

    def __init__(self, name: str, local: Any) -> None:
        self.local = local
        self.path = f"the parameter {name} in memory"
        strides = sum((n - 1) * stride for n, stride in zip(local.shape, local.stride(), strict=True)) + 1 if local.numel() else 0
        self.size = strides * local.element_size()
        self.identity = Identity(self.path, self.size, 0, 0, id(local))

    @property
    def origins(self) -> tuple[Source, ...]:
        return (self,)

    def at(self, offset: int, extent: Shape, strides: Shape) -> Any:
        """The elements from byte ``offset`` on as a tensor that shares their memory; strides count elements."""
        start = self.local.storage_offset() + offset // self.local.element_size()
        return self.local.as_strided(extent, strides, start)

    def read_at(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on."""
        buffer[:] = self.read(offset, len(buffer))

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on."""
        torch = torch_module()
        size = self.local.element_size()
        values = self.at(offset // size * size, (-(-(offset % size + length) // size),), (1,)).detach().cpu()
        raw: bytes = values.view(torch.uint8).numpy().tobytes()
        return raw[offset % size : offset % size + length]

    def check_unchanged(self) -> None:
        """Memory is not watched."""


def config_of(model: Any) -> dict[str, Any]:
    """The config of a model of transformers, inside of whatever wraps it; empty for other models."""
    for module in model.modules():
        as_dict = getattr(getattr(module, "config", None), "to_dict", None)
        config = as_dict() if callable(as_dict) else None
        if isinstance(config, dict) and "model_type" in config:
            return config
    return {}


def describe_model(model: Any) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model, as described tensors by name (without the prefixes of wrappers).

    The pieces of a tensor are what this process holds of it. Its only copy stands for the whole of it on all ranks: with it one can
    tell which names share their elements, also where this rank holds none of them. FSDP2 modules are resharded, so that their
    parameters are those that training updates.

    Raises UsageError for no model and for one on the meta device, Unsupported for parameters that are not whole tensors or DTensors and
    for weights that are at present others than the trained ones.
    """
    torch = torch_module()
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    refuse_altered(model)
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            hint = "load before wrapping the model, or shard it with torch.distributed.fsdp.fully_shard"
            raise Unsupported("the model is wrapped by FSDP1, whose parameters are flat", hint=hint)
        if callable(getattr(module, "reshard", None)) and callable(getattr(module, "set_reshard_after_forward", None)):
            module.reshard()
    found = dict(_state(model))
    stripped = stripped_names(found)
    locals_of = {stripped[name]: _local(stripped[name], values) for name, values in found.items()}
    refuse_shared(locals_of)
    refuse_read_only(locals_of)
    described: dict[tuple[object, ...], Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, values in found.items():
        local = locals_of[stripped[name]]
        same = (tuple(values.shape), *(region(local) if local.numel() else (id(values),)))
        if same not in described:
            described[same] = _describe(stripped[name], values, local)
        tensors[stripped[name]] = described[same]
    return tensors


def _state(model: Any) -> Iterator[tuple[str, Any]]:
    """Parameters and persistent buffers by name, with every name of those that are shared."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        transient = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no other way to ask
        held = {**module._parameters, **{name: b for name, b in module._buffers.items() if name not in transient}}  # noqa: SLF001
        for name, values in held.items():
            if values is not None:
                yield f"{prefix}.{name}" if prefix else name, values


def _is_distributed(values: Any) -> bool:
    return hasattr(values, "device_mesh") and hasattr(values, "to_local")


def _local(name: str, values: Any) -> Any:
    """What this process holds of a tensor. Raises UsageError and Unsupported if that cannot be filled."""
    torch, distributed = torch_module(), _is_distributed(values)
    if hasattr(values, "ds_id"):
        hint = "load before deepspeed.initialize, or inside of deepspeed.zero.GatheredParameters"
        raise Unsupported("DeepSpeed ZeRO-3 has taken the parameter apart", tensor=name, hint=hint)
    with torch.no_grad():
        # Of a parameter, `to_local` gives a wrapper anew, without what the one that training uses keeps beside its weight.
        held = getattr(values, "_local_tensor", None) if distributed else values
        held = values.to_local() if held is None else held
        local = plain_inside(name, held, inside=" inside of a DTensor" if distributed else "").detach()
    if local.is_meta:
        raise UsageError("the parameter is on the meta device, where it has no memory", tensor=name, hint=META)
    known = str(values.dtype).removeprefix("torch.") in BY_TORCH
    if local.layout != torch.strided or local.is_quantized or not known:
        kind = f"a tensor of {values.dtype}" if local.layout == torch.strided else f"a tensor with the layout {local.layout}"
        raise Unsupported(
            f"{kind} cannot be filled", tensor=name, expected="a dense, unquantised tensor", hint="load before it is converted"
        )
    return local


def _describe(name: str, values: Any, local: Any) -> Tensor:
    with torch_module().no_grad():
        whole_box = [(whole(tuple(values.shape)), (0,) * values.dim())]
        parts = local_boxes(name, values) if _is_distributed(values) else whole_box
    dtype, shape = BY_TORCH[str(values.dtype).removeprefix("torch.")], tuple(values.shape)
    memory = Memory(name, local)
    strides = tuple(local.stride())
    pieces = tuple(
        Piece(memory, dtype.itemsize * sum(i * stride for i, stride in zip(place, strides, strict=True)), strides, box)
        for box, place in parts
        if box.numel
    )
    everywhere = Piece(Memory(f"{name} on all ranks", local), 0, contiguous_strides(shape), whole(shape))
    return Tensor(name, dtype, shape, pieces, (everywhere,))


def elements_of(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two described tensors of a model that are the same elements: tied ones."""
    return (tensor.shape, *(copy.same_bytes_as for copy in tensor.copies)) if tensor.numel else (tensor.name,)
