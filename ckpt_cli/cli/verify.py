"""`ckpt verify`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import options_again
from ckpt_cli.cli.words.declare import command
from ckpt_cli.errors import UsageError
from ckpt_cli.output.part import AUTO
from ckpt_cli.progress import Progress
from ckpt_cli.verifying.options import VerifyOptions

if TYPE_CHECKING:
    from ckpt_cli.results.verify import VerifyPart, VerifyResult

READING = ("shard_order", "lora_alpha", "names", "key_map")
"""Options that say how a checkpoint is read."""


@command(VerifyOptions, variant="Source")
def verify(
    session: Session,
    path: options.Path,
    parts: options.Documents = None,
    against: options.Against = None,
    base: options.CompareWith = None,
    plot: options.Plot = None,
    type: options.Type = None,
    step: options.Step = None,
    also: options.Also = None,
    part: options.CheckedPart = None,
    gather: options.Gather = False,
    **given: Any,
) -> int:
    from ckpt_cli.cli.screens.verify import verify_result
    from ckpt_cli.commands import verify as verification

    session = replace(session, again=options_again(type=type, step=step, also=also, **{name: given.get(name) for name in READING}))
    given |= {"type": type, "step": step, "also": also or (), "against": against}

    def launched(shown: Progress) -> VerifyResult | VerifyPart:
        _refuse(parts, part, gather, base)
        return verification.verify_launched(path, progress=shown, **given)

    def check(shown: Progress) -> VerifyResult:
        _refuse(parts, part, gather)
        return verification.verify(path, base=base, plot=plot, gather=parts or (), progress=shown, **given)

    def check_part(shown: Progress) -> VerifyPart:
        _refuse(parts, part, gather, base, json=session.json)
        return verification.verify_part(path, part or "", progress=shown, **given)

    if part == AUTO[0] and not session.json:
        return session.run(launched, verify_result, lambda result: result.exit_code)
    if part is not None:
        return session.run(check_part, verify_result, lambda result: result.exit_code)
    return session.run(check, verify_result, lambda result: result.exit_code)


def _refuse(parts: list[str] | None, part: str | None, gather: bool, base: str | None = None, *, json: bool = True) -> None:
    """Raise UsageError for parts that are not gathered, or nothing to gather, and for what does not go with a part."""
    if part is not None and gather:
        raise UsageError("--gather takes the documents of all parts, so --part does not apply", hint="leave out one of them")
    if gather and not parts:
        raise UsageError("--gather needs the documents of all parts", hint="ckpt verify PATH --gather part-*.json")
    if parts and not gather:
        hint = f"a source is named with --against {parts[0]}; the documents of parts follow --gather"
        raise UsageError(f"one argument too many: {parts[0]}", expected="one PATH", hint=hint)
    if part is not None and base is not None:
        raise UsageError("--part is for --full and --against", hint="pass --base with --gather, which compares with it in one process")
    if part is not None and not json:
        what = "the result of a part is a document, which is gathered with those of the others"
        raise UsageError(f"--part needs --json: {what}", hint="--part 0/8 --json > part-0.json")
