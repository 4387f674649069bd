"""What `ckpt verify` prints: the verdict first, then what is wrong, then what to do about it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.comparison import print_comparison
from ckpt_cli.cli.screens.widgets import BAD, DIM, GOOD, WARNING, again, good, here, next_line, plain, print_facts, print_notes
from ckpt_cli.urls import recorded, shown
from ckpt_cli.verifying.findings import AGAIN, KINDS, MOVE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ckpt_cli.cli.session import Session
    from ckpt_cli.results.verify import Finding, SourceComparison, VerifyPart, VerifyResult

ROWS = 8
"""How many findings of one code are shown."""

SEVERITIES = {"error": "error", "warning": "warning", "info": "note"}
"""What findings of a severity are called."""

STYLES = {"error": BAD, "warning": WARNING, "info": DIM}


def verify_result(result: VerifyResult | VerifyPart, session: Session) -> None:
    """The whole screen of `ckpt verify`."""
    from ckpt_cli.results.verify import VerifyPart

    console = session.out()
    if isinstance(result, VerifyPart):
        found = text.plural(len(result.findings), "finding") if result.findings else "nothing found"
        console.print(plain(f"part {result.part} of {result.parts}: {found}; the process that is done last has the result"))
        return
    if session.quiet:
        console.print(plain("ok" if result.exit_code == 0 else "failed"))
        return
    print_facts(console, verdict(result, verbose=session.verbose))
    print_findings(console, result.findings, everything=session.verbose)
    if result.comparison is not None:
        console.print()
        print_comparison(result.comparison, session)
    console.print()
    print_notes(session, result.notes)
    command, advice = _next(result, session)
    if advice is not None:
        session.labelled("hint", DIM, advice)
    if command is not None:
        next_line(session, command)


def verdict(result: VerifyResult, *, verbose: bool = False) -> list[tuple[str, str | Text]]:
    """The facts: the result, what was checked, and at which levels."""
    errors, warnings, notes = (_counted(result.of_severity(name), noun) for name, noun in SEVERITIES.items())
    hidden = "" if verbose else f" (-v shows {'it' if notes.startswith('1 ') else 'them'})"
    counted = [*filter(None, (errors, warnings)), *([f"{notes}{hidden}"] if notes else [])]
    said = ("failed: " if errors else "ok: " if counted else "ok") + ", ".join(counted)
    described = f"{text.plural(result.files, 'file')}, {text.plural(result.tensors, 'tensor')}, {text.size(result.bytes)} of tensor data"
    facts: list[tuple[str, str | Text]] = [
        ("result", good(said, BAD if errors else WARNING if warnings else GOOD)),
        ("verified", here(result.path, f"{result.component}, {described}")),
        ("headers", _headers(result)),
        ("names", _names(result)),
    ]
    if "full" in result.levels or "sample" in result.levels:
        proved = f", {text.plural(result.checksums, 'checksum')} compared" if result.checksums else ""
        share = "" if "full" in result.levels else f" of {text.size(result.bytes)}, a sample that proves no checksum"
        facts.append(("values", f"{text.size(result.bytes_read)} read{share}{proved}"))
    facts += [("against", good(source_fact(source), GOOD if source.identical else BAD)) for source in result.against]
    return facts


def _counted(findings: Sequence[Finding], noun: str) -> str:
    """How many headings the findings get, and how many findings stand below these if some have several."""
    codes = len({item.code for item in findings})
    return f"{text.plural(codes, noun)}{f' in {len(findings)} places' if len(findings) > codes else ''}" if codes else ""


def _headers(result: VerifyResult) -> str:
    """The result of checking files, headers and the index."""
    codes = [item.code for item in result.of_severity("error") if KINDS[item.code].level == "headers"]
    if codes:
        return f"wrong: {', '.join(dict.fromkeys(codes))}"
    looked_at = "its header and the index" if _without_config(result) else "its header, the index and the config"
    return f"every file, {looked_at} are in order"


def _names(result: VerifyResult) -> str:
    if result.names is not None:
        return result.names
    why = next((item.message for item in result.findings if item.code == "not-compared"), "")
    why = "there is no config.json" if _without_config(result) else why
    why = "config.json is none of a model" if any(item.code == "no-model-config" for item in result.findings) else why
    return "not compared with a model class" + (f": {why}" if why else "")


def _without_config(result: VerifyResult) -> bool:
    return any(item.code in ("no-config", "lacks-config") for item in result.findings)


def source_fact(source: SourceComparison) -> str:
    """How an output compares with its source, in a line."""
    cast = f", {source.cast} of them after a cast" if source.cast else ""
    if source.lora is not None:
        alpha = f"alpha {text.extent(source.lora.alphas)} ({source.lora.origin})"
        cast += f", {text.plural(source.lora.modules, 'module')} with LoRA fused, {alpha}"
    compared = f"{text.plural(source.tensors, 'tensor')}, {text.size(source.bytes)} of tensor data{cast}"
    verb = "differs" if source.different == 1 else "differ"
    outcome = "identical to" if source.identical else f"{text.plural(source.different, 'tensor')} {verb} from"
    base = f", and {source.from_base} {'to' if source.identical else 'compared with'} the base" if source.from_base else ""
    return f"{outcome} {text.path(source.source)} ({source.component}): {compared}{base}"


def print_findings(console: Console, findings: Sequence[Finding], *, everything: bool) -> None:
    """Errors and warnings (with ``everything`` also notes) in groups of one code, each after a blank line."""
    shown = [item for item in findings if everything or item.severity != "info"]
    for code in dict.fromkeys(item.code for item in shown):
        console.print()
        _print_group(console, [item for item in shown if item.code == code], everything=everything)


def _print_group(console: Console, findings: Sequence[Finding], *, everything: bool) -> None:
    """The findings of one code: what it means, then where it was found."""
    from rich.padding import Padding
    from rich.text import Text

    first = findings[0]
    head = plain(f"{first.severity}[{first.code}]: {KINDS[first.code].meaning}")
    if console.is_terminal:
        head = Text("\n".join(text.wrapped(head.plain, console.width, "  ")))
    head.stylize(STYLES[first.severity], 0, len(first.severity) + len(first.code) + 2)
    console.print(head)
    listed = findings if everything else findings[:ROWS]
    for item in listed:
        where = " in ".join(filter(None, (item.tensor, item.file)))
        console.print(Padding(plain(f"{where}: {item.message}" if where else item.message), (0, 0, 0, 2), expand=False))
    if len(listed) < len(findings):
        console.print(plain(f"  ... and {len(findings) - len(listed)} more (-v or --json lists all)"))


def _real(name: str) -> str:
    """A path behind all links, or an address."""
    return shown(os.path.realpath(recorded(name)))


def _other_source(result: VerifyResult) -> tuple[str | None, str | None] | None:
    """What to do if a folder differs from something that may not be its source: then the folder itself may be right."""
    made_from = _real(result.made_from) if result.made_from is not None else None
    if made_from is None:
        return None, "check that --against names the source of this folder"
    made_of = result.made_of.split("+") if result.made_of is not None else []
    if any(_real(source.source) != made_from or (made_of and source.component not in made_of) for source in result.against):
        which = ", ".join(filter(None, (result.made_of, f"step {result.made_at}" if result.made_at is not None else None)))
        what = f"it was merged from {text.path(made_from)}{f' ({which})' if which else ''}"
        return f"ckpt verify {text.argument(result.path)} --against {text.argument(made_from)}{_also(result)}", what
    if any(item.code == "changed-source" for item in result.findings):
        return None, "find out why the source changed after the merge: the folder may be right"
    return None


def _also(result: VerifyResult) -> str:
    """The folders of other nodes that its source lies in, as options."""
    pairs = itertools.pairwise(result.made_by)
    return "".join(f" --also {text.argument(folder)}" for option, folder in pairs if option == "--also")


def _next(result: VerifyResult, session: Session) -> tuple[str | None, str | None]:
    """A command to copy and advice in words, either may be missing: for the most severe finding, or the check that proves more."""
    for item in result.findings:
        if item.severity == "error":
            advice = KINDS[item.code].advice
            other = _other_source(result) if KINDS[item.code].level == "against" and result.against else None
            if other is not None:
                return other
            if item.numbers.get("damaged") == "source":
                return None, f"get {item.file} again: the source is damaged, so anything made from it is too"
            if advice == AGAIN and result.made_by:
                return text.words_again(result.made_by), None
            if advice == AGAIN and result.made_from is not None and item.code in ("changed-size", "wrong-checksum"):
                return None, "if the weights were saved again here on purpose, remove ckpt-manifest.json, which is of the ones before"
            if advice == AGAIN:
                extra = item.code == "missing-tensor" and any(other.code == "extra-tensor" for other in result.findings)
                unless = ", unless the weights are those of another model than config.json names, such as a draft model"
                return None, f"get the folder again from its origin{unless if extra else ''}"
            return None, f"move {item.file} away" if advice == MOVE and item.file else advice or None
    code = next((item.code for item in result.findings if item.code in ("lacks-config", "no-model-config")), None)
    if code is not None:
        if result.made_by and "--base" not in result.made_by:
            # No command to copy: which folder it is nobody knows but the user.
            words = " ".join([text.words_again(result.made_by[:-2]), "--base DIR", *result.made_by[-2:]])
            return None, f"with the base model as DIR, for its config: {words}"
        return None, KINDS[code].advice
    if result.made_from is not None and not result.against:
        return f"ckpt verify {text.argument(result.path)} --against {text.argument(result.made_from)}{_also(result)}", None
    if "full" not in result.levels and not result.against:
        return f"ckpt verify {text.argument(result.path)}{again(session, 'verify')} --full", None
    # Of two folders, the options chose a part of the source.
    return f"ckpt inspect {text.argument(result.path)}{'' if result.against else again(session, 'inspect')}", None
