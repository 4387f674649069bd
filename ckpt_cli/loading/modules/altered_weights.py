"""Modules that hold at present other weights than those that they were trained with, or hold them elsewhere: filling these goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt_cli.errors import Unsupported
from ckpt_cli.names import plural

RESCALED = "layers_are_rescaled"
"""RWKV divides the weights of its later layers before its first forward pass in eval mode (transformers, ``RwkvModel``)."""

COMPUTED = (("embed_sum", "_embed"),)
"""Tensors that are loaded, each with the attribute of its module that keeps what was computed from it (transformers, Mimi's codebook)."""


def refuse_altered(model: Any) -> None:
    """Raise Unsupported for merged adapters, weights that are rescaled or computed for inference, or kept elsewhere by accelerate."""
    merged = [name for name, module in model.named_modules() if _is_merged(module)]
    if merged:
        raise Unsupported(
            f"adapters are merged into the weights of {plural(len(merged), 'module')}: weights that are loaded there would lack them",
            tensor=merged[0],
            expected="adapters beside the weights that they change",
            hint="take them out first: model.unmerge_adapter() of PEFT, unfuse_lora() of diffusers, model.train() of loralib",
        )
    for name, module in model.named_modules():
        if getattr(module, RESCALED, None) is True and getattr(getattr(module, "config", None), "rescale_every", True):
            raise Unsupported(
                "its weights are rescaled for inference, and those that are loaded would be taken for rescaled ones",
                tensor=name or type(module).__name__,
                hint="load before the first forward pass in eval mode, or after one in train mode (model.train()), which undoes it",
            )
        kept = next((kept for held, kept in COMPUTED if hasattr(module, held) and getattr(module, kept, None) is not None), None)
        if kept is not None:
            raise Unsupported(
                f"it keeps what was computed of its tensors in {kept}, and would go on with that",
                tensor=name or type(module).__name__,
                hint=f"load before the first forward pass, or set {kept} of all modules of this class to None first",
            )
        if any(getattr(hook, "offload", None) is True for hook in _hooks(module)):
            raise Unsupported(
                "accelerate keeps its weights elsewhere, and puts them back before every forward pass",
                tensor=name or type(module).__name__,
                hint="load before they are offloaded, or call accelerate.hooks.remove_hook_from_submodules(model) first",
            )


def _is_merged(module: Any) -> bool:
    """Whether a layer with an adapter has it in its weight: PEFT lists the adapters, its first versions and loralib say yes or no."""
    listed = getattr(module, "merged_adapters", None)
    if isinstance(listed, (list, tuple, set)):
        return bool(listed)
    return getattr(module, "merged", None) is True and any(name.startswith("lora_") for name in _held(module))


def _held(module: Any) -> Iterator[str]:
    yield from (name for name, _ in module.named_parameters(recurse=False))
    yield from (name for name, _ in module.named_children())


def _hooks(module: Any) -> Iterator[Any]:
    """The hooks of accelerate at a module, of which several are one that lists them."""
    hook = getattr(module, "_hf_hook", None)
    yield hook
    yield from getattr(hook, "hooks", None) or ()
