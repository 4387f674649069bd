"""`ckpt merge`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import argument, options_again
from ckpt_cli.cli.words.declare import command
from ckpt_cli.errors import UsageError
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.progress import Progress

if TYPE_CHECKING:
    from ckpt_cli.results.written import MergeResult


@command(MergeOptions)
def merge(
    session: Session,
    path: options.Path,
    second: options.SecondPath = None,
    output: options.Output = None,
    type: options.Type = None,
    step: options.Step = None,
    base: options.Base = None,
    also: options.Also = None,
    **given: Any,
) -> int:
    from ckpt_cli.cli.screens.written import merge_result
    from ckpt_cli.cli.words.mistakes import refuse_number, refuse_swapped, refuse_two_inputs
    from ckpt_cli.commands import merge as merging

    def work(shown: Progress) -> MergeResult:
        if second is not None and output is not None:
            refuse_two_inputs(path, second, output)
            raise UsageError("there are two outputs", hint=f"leave out {argument(second)}, or -o", expected="one folder to write")
        if second is not None:
            refuse_swapped("merge", path, second)
            refuse_number(path, second)
            refuse_two_inputs(path, second)
        target = output if output is not None else second
        return merging.merge(path, target, type=type, step=step, base=base, also=also or (), progress=shown, **given)

    session = replace(session, again=options_again(also=also))
    return session.run(work, merge_result, lambda result: result.exit_code)
