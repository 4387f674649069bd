"""Non-persistent buffers of a live model, which no checkpoint holds: whether they are those that the class of the model makes.

``to_empty`` leaves them as uninitialised memory. What a class of transformers (5 and later) makes of its config is made again here, on
copies of the modules that hold these buffers; of other models only what has no memory, or holds NaN, is known to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ckpt_cli.loading.elements import torch_module
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

TOLERANCE = 0.02
"""Of the largest value: another dtype, or another device, rounds less than this."""

MADE_ANEW = "model.init_weights() of transformers 5, if the model was built in torch.device('meta')"


def buffer_notes(model: Any) -> list[Note]:
    """A warning that names the buffers that are certainly wrong."""
    wrong = [*_wrong(model)]
    if not wrong:
        return []
    text = f"non-persistent buffers, which no checkpoint holds, are not those of the model's class: {few(wrong)}"
    cure = f"to_empty leaves them unset; build the model on a device with memory, or make them anew before loading ({MADE_ANEW})"
    return [Note("warning", "unset-buffers", f"{text}: {cure}")]


def _wrong(model: Any) -> Iterator[str]:
    makers: dict[str, Callable[[Any], None] | None] = {}
    for name, module in model.named_modules():
        makers[name] = _maker(module) or makers.get(name.rpartition(".")[0])
        held = _transient(module)
        made = _made(module, held, makers[name])
        # A forward pass may change one of them (a rotary embedding that grows) and leave the one that it started from.
        differs = bool(made) and not any(_alike(values, held[buffer]) for buffer, values in made.items())
        for buffer, values in held.items():
            if values.is_meta or (differs and buffer in made) or bool(values.isnan().any()):
                yield f"{name}.{buffer}" if name else buffer


def _transient(module: Any) -> dict[str, Any]:
    """The non-persistent buffers of one module, without those that are distributed or of no plain kind."""
    names, plain = module._non_persistent_buffers_set, torch_module().Tensor  # noqa: SLF001 - torch has no other way to ask
    held = {name: values for name, values in module._buffers.items() if name in names and type(values) is plain}  # noqa: SLF001
    return {name: values for name, values in held.items() if values.itemsize > 1 or not values.is_floating_point()}


def _maker(module: Any) -> Callable[[Any], None] | None:
    """What initialises the modules of a model of transformers, one by one."""
    make = getattr(module, "_init_weights", None)
    return make if callable(make) and callable(getattr(getattr(module, "config", None), "to_dict", None)) else None


def _made(module: Any, held: Mapping[str, Any], make: Callable[[Any], None] | None) -> dict[str, Any]:
    """What initialising a module makes of its buffers; of those that it leaves alone, or fills at random: nothing."""
    torch, found = torch_module(), []
    if make is None or not held:
        return {}
    for start in (torch.zeros_like, torch.ones_like):
        # A class may want more of its modules than a copy has: then nothing is known of their buffers.
        with torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(Exception):
            blank = _blank(module, {name: start(values, device="cpu") for name, values in held.items()})
            make(blank)
            found.append({name: blank._buffers[name] for name in held})  # noqa: SLF001
    if len(found) < 2:
        return {}
    return {name: values for name, values in found[0].items() if torch.equal(values, found[1][name])}


def _blank(module: Any, buffers: Mapping[str, Any]) -> Any:
    """A copy of a module with these buffers of its own, and without memory for anything else."""
    torch, made = torch_module(), object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    made.__dict__["_parameters"] = {name: _on_meta(values) for name, values in module._parameters.items()}  # noqa: SLF001
    made.__dict__["_buffers"] = {**{name: _on_meta(values) for name, values in module._buffers.items()}, **buffers}  # noqa: SLF001
    made.__dict__["_modules"] = {
        name: _blank(child, {}) if isinstance(child, torch.nn.Module) else child
        for name, child in module._modules.items()  # noqa: SLF001
    }
    return made


def _on_meta(values: Any) -> Any:
    return values if values is None else torch_module().empty(values.shape, dtype=values.dtype, device="meta")


def _alike(made: Any, held: Any) -> bool:
    torch = torch_module()
    if held.is_meta or made.shape != held.shape:
        return False
    held = held.detach().cpu()
    if torch.equal(made, held):
        return True
    if made.is_complex():
        made, held = torch.view_as_real(made), torch.view_as_real(held)
    if not made.is_floating_point():
        return False
    first, second = made.double(), held.double()
    if not first.isfinite().any():
        return False
    near = (first - second).abs() <= TOLERANCE * first[first.isfinite()].abs().max()
    return bool(((first == second) | near).all())
