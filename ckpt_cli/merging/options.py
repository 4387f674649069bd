"""The options of `merge`."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_cli.dtypes import BASE
from ckpt_cli.errors import UsageError
from ckpt_cli.names import LoraMode
from ckpt_cli.output.options import WritingKeywords, WritingOptions


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
    def fills_from_base(self) -> bool:
        return bool(self.carry_from_base) or self.fill_missing_from_base

    @property
    def takes_from_base(self) -> bool:
        return self.fills_from_base or self.dtype == BASE or self.match_base

    @property
    def needs_base_weights(self) -> bool:
        """Whether the weights of the base are asked for, so that one without any will not do."""
        return self.takes_from_base or self.compare

    def check_with(self, base: object, output: object) -> None:
        """Raise UsageError for options that contradict each other, or that need a base."""
        if self.in_place and output is not None:
            raise UsageError("--in-place writes into the checkpoint, so --output does not apply", hint="leave out one of them")
        if self.in_place and self.overwrite:
            raise UsageError("--in-place never replaces a file, so --overwrite does not apply", hint="leave out one of them")
        self.check(base, ("match_base", "fill_missing_from_base", "carry_from_base", "drop_extra", "compare"))
        if self.in_parts and self.in_place:
            text = f"--in-place adds files to the checkpoint, so {self.in_parts} does not apply"
            raise UsageError(text, hint="pass -o instead of --in-place")
        if self.part is not None and self.verify:
            hint = "leave out --verify, and run `ckpt verify` on the output when it is published"
            raise UsageError("--verify needs the whole output, so --part does not apply", hint=hint)
        if self.in_place and self.push_to_hub is not None:
            text = "--in-place adds files to the checkpoint, which is not to be pushed, so --push-to-hub does not apply"
            raise UsageError(text, hint="pass -o instead of --in-place")
        if self.in_place and self.lora == "both":
            raise UsageError("--in-place writes one folder, but --lora both makes two", hint="export the adapter on its own")
        if (self.fill_missing_from_base or self.drop_extra) and not self.match_base:
            raise UsageError("--fill-missing-from-base and --drop-extra need --match-base", hint="pass --match-base as well")


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
