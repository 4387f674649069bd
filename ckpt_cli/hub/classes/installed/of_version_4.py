"""What transformers 4 saves of a model: version 5 has functions for it, which came with conversions of weights.

Facts from `PreTrainedModel.save_pretrained` of transformers 4.51 to 4.57 (`transformers/modeling_utils.py`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any


def tensor_of(model: Any, name: str) -> Any:
    """The parameter or buffer of this name, itself: those of a state dict are detached. Versions before 4.51 have no method for it."""
    module, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(module), leaf)


def expressions(listed: Iterable[str]) -> list[str]:
    """Those of a class that are expressions: DeBERTa's has one that is none, which loading never comes to use."""
    found: list[str] = []
    for text in sorted(listed):
        with contextlib.suppress(re.error):
            re.compile(text)
            found.append(text)
    return found


def without_tied(state: dict[str, Any], model: Any) -> dict[str, Any]:
    """The tensors of a state dict without those that share their storage with another one and are declared as tied."""
    owners: dict[int, list[str]] = {}
    for name in state:
        owners.setdefault(id(tensor_of(model, name)), []).append(name)
    patterns = list(_tied_patterns(model))
    for names in owners.values():
        tied = sorted(name for name in names if any(re.search(pattern, name) for pattern in patterns))
        for name in tied[: len(names) - 1]:
            del state[name]
    return state


def names_on_hub(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The tensors under the names of their files, which differ from those in memory for some models of vision and language."""
    from transformers import modeling_utils

    old_names = getattr(modeling_utils, "VLMS", ())
    if not any(old in kind.__name__.lower() for kind in type(model).__mro__[:-1] for old in old_names):
        return state
    loading = getattr(model, "_checkpoint_conversion_mapping", {})
    # A replacement of loading is a pattern of saving; anchors and groups of the pattern of loading stand for nothing in a name.
    saving = {after: re.sub(r"\(.*\)", "", before.lstrip("^")) for before, after in loading.items()}
    return {_renamed(name, saving): tensor for name, tensor in state.items()}


def _renamed(name: str, saving: dict[str, str]) -> str:
    for pattern, replacement in saving.items():
        name, count = re.subn(pattern, replacement, name)
        if count:
            break
    return name


def _tied_patterns(model: Any, prefix: str = "") -> Iterator[str]:
    """The patterns of a model and of those inside of it, which are about their own names."""
    for pattern in getattr(model, "_tied_weights_keys", None) or ():
        yield f"{prefix}.{pattern}" if prefix else pattern
    for name, module in model.named_children():
        yield from _tied_patterns(module, f"{prefix}.{name}" if prefix else name)
