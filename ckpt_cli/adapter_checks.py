"""Header level of `verify` for PEFT folders: whether the factors and adapter_config.json belong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_cli.adapters import CONFIG, adapter_facts
from ckpt_cli.errors import CkptError
from ckpt_cli.findings import finding, unread
from ckpt_cli.lora import lacks_base, rank_of
from ckpt_cli.lora_names import parse_peft
from ckpt_cli.model import Tensor
from ckpt_cli.report import Finding


def check_adapter(folder: Path, tensors: Mapping[str, Tensor]) -> list[Finding]:
    """Both factors of every module, ranks as the config says, modules that it targets, and an alpha."""
    try:
        state = parse_peft(tensors)
        facts = adapter_facts((folder,), None)
        found = list(_untargeted(facts.config.get("target_modules"), [adapter.module for adapter in state.adapters]))
        for adapter in state.adapters:
            rank = rank_of(adapter)
            # Of fused experts the factors hold one rank per expert, and how many there are only the base tells.
            if not facts.config.get("target_parameters") and lacks_base(state):
                facts.check_rank(adapter.path, rank)
            facts.scale(adapter.path, rank)
    except CkptError as error:
        return [unread("damaged-adapter", error, CONFIG)]
    return found


def scales(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """What the files of a PEFT folder scale each module with; empty if they do not say it."""
    try:
        facts = adapter_facts((folder,), None)
        return {adapter.path: facts.scale(adapter.path, rank_of(adapter)) for adapter in parse_peft(tensors).adapters}
    except CkptError:
        return {}


def _untargeted(targets: object, modules: list[str]) -> Iterator[Finding]:
    """Modules that a list of names leaves out: PEFT would drop their factors. Expressions are PEFT's own matter."""
    if isinstance(targets, list) and targets:
        for module in modules:
            if not any(isinstance(name, str) and (module == name or module.endswith(f".{name}")) for name in targets):
                yield finding("damaged-adapter", "the config does not target this module", tensor=module, file=CONFIG)
