"""The options of `merge`."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_cli.dtypes import BASE
from ckpt_cli.errors import UsageError
from ckpt_cli.names import LoraMode
from ckpt_cli.output.options import WritingKeywords, WritingOptions, check_writing


@dataclass(frozen=True, slots=True)
class MergeOptions(WritingOptions):
    """The options of `merge`, with the meaning that ``ckpt merge --help`` gives them.

    ``lora`` None fuses adapters where there are any, and exports those that are alone, without a base.
    """

    match_base: bool = False
    fill_missing_from_base: bool = False
    drop_extra: bool = False
    compare: bool = False
    lora: LoraMode | None = None
    lora_alpha: float | None = None
    ema_from_model: bool = False
    with_state: bool = False
    in_place: bool = False
    verify: bool = False

    @property
    def needs_base_weights(self) -> bool:
        """Whether the weights of the base are asked for, so that one without any will not do."""
        return self.match_base or self.compare or bool(self.carry_from_base) or self.dtype == BASE


class MergeKeywords(WritingKeywords, total=False):
    """The keyword arguments of `merge` besides paths: `MergeOptions` as callers may give them."""

    match_base: bool
    fill_missing_from_base: bool
    drop_extra: bool
    compare: bool
    lora: LoraMode | None
    lora_alpha: float | None
    ema_from_model: bool
    with_state: bool
    in_place: bool
    verify: bool


def check_options(options: MergeOptions, output: object, base: object) -> None:
    """Raise UsageError for options that contradict each other."""
    if options.in_place and output is not None:
        raise UsageError("--in-place writes into the checkpoint, so --output does not apply", hint="leave out one of them")
    if options.in_place and options.overwrite:
        raise UsageError("--in-place never replaces a file, so --overwrite does not apply", hint="leave out one of them")
    check_writing(options.weights_name, options.jobs, options.max_shard_size)
    needing = ("match_base", "fill_missing_from_base", "carry_from_base", "drop_extra", "compare")
    wants_base = [name for name in needing if getattr(options, name)]
    if options.dtype == BASE and base is None:
        raise UsageError("--dtype base needs a base", hint="pass --base with the folder of the base model")
    if wants_base and base is None:
        raise UsageError(f"--{wants_base[0].replace('_', '-')} needs a base", hint="pass --base with the folder of the base model")
    if options.in_place and options.lora == "both":
        raise UsageError("--in-place writes one folder, but --lora both makes two", hint="export the adapter on its own")
    if (options.fill_missing_from_base or options.drop_extra) and not options.match_base:
        raise UsageError("--fill-missing-from-base and --drop-extra need --match-base", hint="pass --match-base as well")
