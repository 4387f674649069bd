"""What `ckpt watch` prints: a line for each thing that happens, when it happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.widgets import BAD, DIM, GOOD, WARNING, here, next_line
from ckpt_cli.names import printable
from ckpt_cli.results.watch import WatchEvent, WatchResult

if TYPE_CHECKING:
    from rich.text import Text

    from ckpt_cli.cli.session import Session

METRICS = 4
"""How many metrics a line shows; watch.jsonl has all."""


@dataclass(frozen=True, slots=True)
class Screen:
    """The lines of one watch: with --json none, with -q only those about outputs. Each warning is said once, not for every step."""

    session: Session
    runs: Sequence[Path]
    told: set[str] = field(default_factory=set)

    def event(self, event: WatchEvent) -> None:
        """A line about an event: the step first, then what was done."""
        from rich.text import Text

        from ckpt_cli.cli.words.hints import fitting

        if self.session.json:
            return
        if event.error is not None:
            self.session.labelled(f"error[{event.error}]", BAD, f"{self._step(event.run, event.step)}: {event.message}")
            if (hint := fitting(event.hint, "watch")) is not None:
                self.session.labelled("  hint", None, hint)
            return
        for warning in event.warnings if self.session.quiet < 2 else ():
            if warning not in self.told:
                self.told.add(warning)
                self.session.labelled("warning", WARNING, warning)
        if self.session.quiet:
            if event.event == "made":
                self.session.out().print(Text(printable(event.output)), soft_wrap=True)
            return
        label = Text(f"{self._step(event.run, event.step)}  ", style="bold")
        self.session.out().print(label + _said(event), soft_wrap=True)

    def waits(self, run: Path, step: int | None, reason: str) -> None:
        """Why a step is not made yet."""
        if not self.session.json and not self.session.quiet:
            self.session.labelled(f"{self._step(str(run), step)}  waits", DIM, reason)

    def warns(self, run: Path, warning: str) -> None:
        """What a run warns of, when it begins to."""
        if not self.session.json and self.session.quiet < 2:
            self.session.labelled("warning", WARNING, f"{run.name}: {warning}")

    def tells(self, run: Path, text: str) -> None:
        """What of a run is left out as it should be."""
        if not self.session.json and not self.session.quiet:
            self.session.labelled("left out", DIM, f"{run.name}: {text}")

    def line(self, line: str) -> None:
        """A line of a command."""
        if not self.session.json and not self.session.quiet:
            self.session.err().print(printable(line), style=DIM, soft_wrap=True, markup=False)

    def _step(self, run: str, step: int | None) -> str:
        if step is None:
            return Path(run).name
        return f"step {step}" if len(self.runs) < 2 else f"{Path(run).name} step {step}"


def watch_result(result: WatchResult, session: Session) -> None:
    """What `ckpt watch --once` prints at its end: where the outputs of runs are for which nothing happened, and what to do next."""
    from rich.text import Text

    if session.quiet:
        return
    for note in result.notes:
        # Why a step waits, and what a run warns of, was said when it began to.
        if note.level == "warning" and note.code not in ("step-waits", "older-steps", "uncounted"):
            session.labelled("warning", WARNING, note.text)
    happened = {event.run for event in result.events}
    for output in result.newest:
        if output.run not in happened:
            of_run = f"{Path(output.run).name} " if len(result.runs) > 1 else ""
            since = f"since {output.made[:16].replace('T', ' ')} UTC"
            # Of a run in which steps wait there is something new.
            now = output.trouble or ("" if output.run in result.waiting else "nothing new")
            said = here(output.output, "; ".join(filter(None, (since, now))) if output.is_there else "that folder is gone")
            line = Text(f"{of_run}step {output.step}  ", style="bold").append("is in  " if output.is_there else "was in  ", style=DIM)
            session.out().print(line + said, soft_wrap=True)
    if not result.events and not result.waiting and not result.newest:
        session.out().print("nothing is due: there are no steps yet that these options want", soft_wrap=True)
    standing = [output for output in result.newest if output.is_there]
    if standing:
        last = max(reversed(standing), key=lambda output: output.made)
        against = "--full" if last.source is None else f"--against {text.argument(last.source)}"
        next_line(session, f"ckpt verify {text.argument(last.outputs[0])} {against}")


def _said(event: WatchEvent) -> Text:
    """What is said of an event, after the step."""
    from rich.text import Text

    if event.event == "made":
        how = f"average of steps {', '.join(map(str, event.steps))}" if event.steps else ""
        return Text("made  ", style=GOOD) + here(event.output, how, f"{text.size(event.bytes or 0)} in {text.duration(event.seconds)}")
    if event.push is not None:
        return Text("pushed  ", style=GOOD) + here(event.push.url, f"{text.size(event.push.bytes)} in {text.duration(event.seconds)}")
    if event.event == "removed":
        return Text("removed  ", style=DIM) + here(event.output)
    ended = f"command ended with exit code {event.exit_code} after {text.duration(event.seconds)}"
    metrics = [f"{name} {_short(value)}" for name, value in (event.metrics or {}).items() if isinstance(value, (int, float, str))]
    more = f", and {len(metrics) - METRICS} more" if len(metrics) > METRICS else ""
    return Text(f"{ended}   {printable(', '.join(metrics[:METRICS]))}{more}".rstrip(), style=BAD if event.exit_code else "")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]
