"""Options of a merge that mean nothing for adapters in a folder of their own: PEFT loads these by fixed names, from one file."""

from __future__ import annotations

from dataclasses import fields

from ckpt_cli.errors import UsageError
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

REFUSED = {
    "include": "chooses tensors",
    "exclude": "chooses tensors",
    "key_map": "renames tensors",
    "weights_name": "names the weights file",
    "match_base": "changes tensors",
    "carry_from_base": "adds tensors",
    "compare": "compares tensors",
}
"""Option -> what it does to a model: the result would be another one than was asked for."""

NO_EFFECT = ("max_shard_size", "allow_missing")
"""Options without which the result is the same."""


def check_export_options(options: MergeOptions, *, fusible: bool) -> list[Note]:
    """What is said of options that an export does not heed. Raises UsageError for those that ask for something else.

    With ``--lora both`` all but filters are for the fused model. ``fusible``: the weights under the adapters are here, or in a base.
    """
    given = {field.name for field in fields(options) if getattr(options, field.name) != field.default}
    refused = [name for name in REFUSED if name in given and (options.lora != "both" or name in ("include", "exclude"))]
    if refused:
        hint = f"leave out --lora {options.lora}" if fusible else "pass --base and leave out --lora to fuse the adapters, or --lora keep"
        raise UsageError(f"{_flag(refused[0])} {REFUSED[refused[0]]} of a model, not of an adapter", hint=hint)
    unused = [_flag(name) for name in NO_EFFECT if name in given]
    if not unused or options.lora == "both":
        return []
    has = "has" if len(unused) == 1 else "have"
    return [Note("warning", "no-effect", f"{few(unused)} {has} no effect on an adapter in a folder of its own")]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
