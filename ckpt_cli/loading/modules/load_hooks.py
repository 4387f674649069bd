"""What ``load_state_dict`` of a model would do besides copying: hooks, methods of its own, extra state. None of it is run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt_cli.errors import Unsupported
from ckpt_cli.loading.elements import torch_module
from ckpt_cli.names import few
from ckpt_cli.results.checkpoint import NoteInfo

METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def not_run(model: Any, *, strict: bool) -> tuple[NoteInfo, ...]:
    """A note that names what is not run. Raises Unsupported instead if ``strict``.

    What torch itself adds is not counted: it reshards, or fills in what checkpoints of old versions of torch lack.
    """
    found = list(dict.fromkeys(_steps(model)))
    if not found:
        return ()
    if strict:
        hint = "pass strict=False to fill parameters and buffers without it"
        raise Unsupported("the model loads in a way of its own, which load_into does not run", details=found, hint=hint)
    return (NoteInfo(level="warning", code="load-hooks", text=f"not run: {few(found)}"),)


def _steps(model: Any) -> Iterator[str]:
    base = torch_module().nn.Module
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        for method in METHODS:
            own = getattr(module, method)
            if getattr(own, "__func__", own) is not getattr(base, method) and not _of_torch(own):
                yield f"{where}: {method}"
        for hooks in HOOKS:
            for hook in getattr(module, hooks).values():
                own = getattr(hook, "hook", hook)
                if not _of_torch(own):
                    yield f"{where}: the hook {getattr(own, '__qualname__', type(own).__name__)}"


def _of_torch(function: Any) -> bool:
    function = getattr(function, "func", function)
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0] == "torch"
