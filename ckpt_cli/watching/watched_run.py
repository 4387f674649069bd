"""A run that is watched: which of its steps are due, what is made of them, and what was done before."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from ckpt_cli import shell
from ckpt_cli.discover.beside.uncounted import uncounted_notes
from ckpt_cli.discover.found import Found, Target
from ckpt_cli.discover.locate import locate
from ckpt_cli.discover.newest import short_reason
from ckpt_cli.errors import (
    AmbiguousStep,
    CkptError,
    CorruptFile,
    IncompleteError,
    NotFound,
    NotRecognised,
    OutputExists,
    SourceChanged,
    UnfinishedDownload,
    UsageError,
)
from ckpt_cli.files.folders import FileState
from ckpt_cli.output.interrupted.place import remove_leftovers
from ckpt_cli.pushing.destination import Destination
from ckpt_cli.results.watch import WatchEvent
from ckpt_cli.results.written import AverageResult, MergeResult, PushInfo
from ckpt_cli.watching.due import bare_steps, beside_text, is_ambiguous, passed_over, steps_of
from ckpt_cli.watching.evaluation import run_command
from ckpt_cli.watching.journal import Journal
from ckpt_cli.watching.options import WatchOptions
from ckpt_cli.watching.outputs import folders_of, is_output_of, remove, trouble_of, why_kept
from ckpt_cli.watching.readiness import Readiness, is_other, is_saved_again, saved_at, sources_of
from ckpt_cli.watching.trainings import Written, started_again, told_later, written_in

UNFINISHED = (IncompleteError, CorruptFile, NotFound, SourceChanged, UnfinishedDownload)
"""Errors of a step that may be gone once it is written to its end."""

OF_OTHER_STEPS = ("step-skipped", "older-steps", "tracker", "step-folders")
"""Codes of notes about the choice of a step, which a watch does not leave to anything; what shows a second training it says of the run."""

STILL_WRITTEN = 2
"""The newest steps, to which files may still be added; of older ones only the weights are looked at, of one of them at each look all."""


class Maker(Protocol):
    """What makes an output of steps: one to merge, several to average, the newest last."""

    def __call__(
        self, run: Path, steps: tuple[int, ...], output: Path, *, overwrite: bool, dry_run: bool
    ) -> MergeResult | AverageResult: ...


class Pusher(Protocol):
    """What pushes the output of a step, and verifies it first unless that was done."""

    def __call__(self, output: Path, to: Destination, *, verified: bool) -> PushInfo: ...


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what happens: events, why a step or all of a run (None) waits, the lines that commands print, what a run warns of.

    ``tells``: what of a run is left out, and is as it should be.
    """

    event: Callable[[WatchEvent], None] = lambda _: None
    waits: Callable[[Path, int | None, str], None] = lambda *_: None
    line: Callable[[str], None] = lambda _: None
    warns: Callable[[Path, str], None] = lambda *_: None
    tells: Callable[[Path, str], None] = lambda *_: None


@dataclass(slots=True)
class WatchedRun:
    """A run and the ``home`` of its outputs, which were all made with options that say ``deciding``.

    ``waiting``: why steps are not made yet; ``kept``: outputs that stay, and why; ``older``: what shows that training was started again;
    ``beside``: files of weights in the run's folder itself; ``uncounted``: what lies beside the steps and may be one.
    """

    path: Path
    home: Path
    options: WatchOptions
    deciding: Mapping[str, Any]
    journal: Journal
    make: Maker
    listener: Listener
    readiness: Readiness
    to: Destination | None
    push: Pusher
    waiting: dict[int, str] = field(default_factory=dict)
    kept: dict[Path, str] = field(default_factory=dict)
    older: str | None = None
    beside: list[str] = field(default_factory=list)
    uncounted: str | None = None
    _seen: str | None = None
    _failed: dict[int, str] = field(default_factory=dict)
    _unpushed: dict[int, str] = field(default_factory=dict)
    _unfinished: set[int] = field(default_factory=set)
    _verified: set[int] = field(default_factory=set)
    _sources: dict[int, tuple[FileState, ...]] = field(default_factory=dict)
    _looks: int = 0

    def look(self) -> float | None:
        """Do what is due. Returns the seconds after which a step that may still change could be; None if there is none.

        Raises UsageError for a path that is no run, and what locating raises but for a run without steps.
        """
        target = self._located()
        if target is None:
            self._pass_over(bare_steps(self.path, self.options), {})
            return None
        due: list[float] = []
        wanted = {step: found for found, step in steps_of(target, self.options)}
        written = written_in(target)
        self._warn(started_again(target, written))
        # Where training was started again, it adds to lower ones.
        last = written.last(STILL_WRITTEN) if self.older is not None else []
        newest = {found.step for at, found in enumerate(reversed(target.checkpoints)) if at < STILL_WRITTEN or found.path in last}
        self._pass_over(passed_over(target, self.options), wanted)
        turn = self._looks % len(wanted) if wanted else 0
        for number, (step, found) in enumerate(wanted.items()):
            is_new = step in newest
            if not is_ambiguous(target, step) and self._is_done(
                found, step, in_full=is_new, sources=is_new or not self._looks or number == turn
            ):
                self._after(step)
                continue
            # Said first: with too few steps, whether the files of this one are settled decides nothing.
            if not (steps := self._averaged(target, found, step, written)):
                continue
            parts = [other for other in target.checkpoints if other.step in steps and other is not found]
            left = max(self.readiness.seconds_left(target, each) for each in (found, *parts))
            if left:
                self._wait(step, self.readiness.reason)
                due.append(left)
            elif self._made(found, step, steps):
                self._after(step)
        self._tell_uncounted(target)
        self._looks += 1
        return min(due, default=None)

    def _located(self) -> Target | None:
        """The run with its steps, None while it has none. Weights beside the steps are no step: the Trainer saves its last model there.

        Raises UsageError for weights without steps, unless there were some.
        """
        try:
            target = locate(self.path, None, ())
        except NotRecognised:
            return None
        if target.run is not None:
            return target
        weights = target.checkpoints[0].places[0].match.first.name
        target = locate(self.path, None, (), steps=True)
        if target.run is None and not self.journal.made and not any(bare_steps(self.path, self.options)):
            raise UsageError("this is one checkpoint, not a run", path=self.path, hint=f"ckpt merge {shell.path(self.path)}")
        if weights not in self.beside:
            self.beside.append(weights)
            self.listener.tells(self.path, beside_text(self.path, weights))
        return target if target.run is not None else None

    def _pass_over(self, reasons: Iterable[tuple[int, str]], others: Container[int]) -> None:
        """Say why steps are not made; what was said of those that are no longer there, nor among ``others``, is forgotten."""
        said = dict(reasons)
        self.waiting = {step: reason for step, reason in self.waiting.items() if step in said or step in others}
        for step, reason in said.items():
            self._wait(step, reason)

    def _after(self, step: int) -> None:
        """What is done with an output that is there, as far as it was not done before; what fails does not hold up what follows."""
        self._push(step)
        self._run_command(step)
        self._remove_old()

    def _is_done(self, found: Found, step: int, *, in_full: bool, sources: bool) -> bool:
        """Whether a step was made from the files that it has now; ``sources``: all that its output was read from are looked at."""
        made = self.journal.made.get(step)
        if made is None or (made.saved is not None and is_saved_again(found, made.saved, made.changed, in_full=in_full)):
            return False
        if sources and step not in self._sources:
            self._sources[step] = tuple(source for folder in folders_of(made) for source in sources_of(folder))
        return not (sources and any(map(is_other, self._sources[step])))

    def _averaged(self, target: Target, last: Found, step: int, written: Written[Path]) -> tuple[int, ...]:
        """The steps that make the output of a step: itself, or the newest ones up to it; none while these are too few, or of two runs."""
        said = self.options.averaging
        if said is None:
            return (step,)
        age = target.age
        there = dict.fromkeys(found.step for found in target.checkpoints if found.step is not None and age(found) <= age(last))
        whole = [number for number in there if number == step or number not in self._unfinished]
        if len(whole) < said["last"]:
            there_are = f"there {'is' if len(whole) == 1 else 'are'} {len(whole)}"
            self._wait(step, f"--average last={said['last']} needs {said['last']} steps up to this one, and {there_are}")
            return ()
        steps = tuple(whole[-said["last"] :])
        if (apart := written.apart([found.path for found in target.checkpoints if found.step in steps])) is not None:
            text = f"{told_later(target.label(apart[0]), target.label(apart[1]), apart[2])}, so that these may be of two trainings"
            advice = "move the steps of the one before out of the run, or choose those that are meant with ckpt average"
            self._wait(step, f"--average last={said['last']} needs steps {', '.join(map(str, steps))}, and {text}: {advice}")
            return ()
        return steps

    def _made(self, found: Found, step: int, steps: tuple[int, ...]) -> bool:
        """Make the output of a step; False if that is not possible (yet)."""
        output, started, (saved, changed) = self.home / f"step-{step}", time.monotonic(), saved_at(found)
        try:
            try:
                result = self.make(self.path, steps, output, overwrite=step in self.journal.made, dry_run=False)
                self._verified.add(step)
            except OutputExists:
                # A watch that was killed between publishing and noting it.
                result = self.make(self.path, steps, output, overwrite=True, dry_run=True)
                if not is_output_of(result, output):
                    raise OutputExists("something else than would be written now has this name: move it away", path=output) from None
                for each in result.outputs:
                    remove_leftovers(Path(each.output))
        except UNFINISHED as error:
            self._unfinished.add(step)
            self._wait(step, short_reason(error))
            return False
        except CkptError as error:
            # Mistakes in the options are those of all steps; that a step lies in several folders is its own.
            if isinstance(error, AmbiguousStep):
                error.hint = "move all but one of them out of the run, or merge the one that is meant with `ckpt merge` and its folder"
            elif isinstance(error, UsageError):
                raise
            self._fail(step, output, time.monotonic() - started, error)
            return False
        self.waiting.pop(step, None)
        self._failed.pop(step, None)
        self._unfinished.discard(step)
        self._sources.pop(step, None)
        outputs = tuple(each.output for each in result.outputs)
        size = sum(each.bytes_written for each in result.outputs)
        self._tell(
            "made",
            step,
            Path(outputs[0]) if len(outputs) == 1 else output,
            time.monotonic() - started,
            outputs=outputs if len(outputs) > 1 else (),
            source=result.checkpoint.path,
            saved=saved,
            changed=changed,
            bytes=size,
            steps=steps if len(steps) > 1 else (),
            options=dict(self.deciding),
            exit_code=result.exit_code,
            warnings=_warnings(result),
        )
        return True

    def _push(self, step: int) -> None:
        """Push an output, if that is wanted and was not done, it is what it should be, and still there. A failure is noted once."""
        made = self.journal.made[step]
        if self.to is None or self._is_pushed(step) or made.exit_code or not self._is_there(step):
            return
        pushed = self.push(Path(made.output), self.to.of_step(step, self.path.name), verified=step in self._verified)
        # An output of an earlier watch is read once, not at every look.
        self._verified.add(step)
        error = pushed.error
        if error is None:
            warned = tuple(note.text for note in pushed.notes)
            self._tell("pushed", step, Path(made.output), pushed.seconds, push=pushed, warnings=warned)
        elif self._unpushed.get(step) != error.message:
            self._unpushed[step] = error.message
            text = ": ".join((error.message, *error.details[:1]))
            self._tell("pushed", step, Path(made.output), pushed.seconds, exit_code=pushed.exit_code, error=error.code, message=text)

    def _is_pushed(self, step: int) -> bool:
        if self.to is None:
            return True
        to = self.to.of_step(step, self.path.name)
        return (to.repo, to.branch) in self.journal.pushed.get(step, ())

    def _run_command(self, step: int) -> None:
        """Run the command for an output, if there is one, and it has not run, and the output is still there."""
        command, made = self.options.execute, self.journal.made[step]
        if command is None or step in self.journal.ran or not self._is_there(step):
            return
        ran = run_command(command, Path(made.output), step, self.path, self.listener.line)
        self._tell("ran", step, Path(made.output), ran.seconds, exit_code=ran.exit_code, metrics=ran.metrics)

    def _remove_old(self) -> None:
        """Remove outputs older than the newest N that are whole, as ``--keep`` says: those that were made here, and hold nothing else."""
        if self.options.keep is None:
            return
        made, by_number = self.journal.made, self.journal.kept()
        if len(by_number) <= self.options.keep:
            return
        older, self.kept = self._beyond(by_number, self.options.keep), {}
        if before := set(self.journal.written().of_before()).intersection(by_number):
            # Nothing else tells which training they are of: what one of the two orders counts as the newest stays.
            by_training = sorted(by_number, key=lambda step: step not in before)
            replaced = self._beyond(by_training, self.options.keep)
            self.kept = {folder: why for step in replaced if step not in older for folder, why in self._doubts(step)}
            older = [step for step in older if step in replaced]
        for step in older:
            if (self.options.execute is not None and step not in self.journal.ran) or (
                not made[step].exit_code and not self._is_pushed(step)
            ):
                continue
            folders = folders_of(made[step])
            kept = {folder: why for folder in folders if (why := why_kept(folder, self.home)) is not None}
            self.kept |= kept
            if not kept and remove(folders, Path(made[step].output)):
                self._tell("removed", step, Path(made[step].output), 0.0)

    def _beyond(self, steps: Sequence[int], count: int) -> list[int]:
        """The steps, which come oldest first, that are older than the newest ``count`` whose outputs are whole."""
        # One that lost its weights, or was removed by somebody, takes no place of those that are kept.
        whole = (place for place in reversed(range(len(steps))) if trouble_of(self.journal.made[steps[place]]) is None)
        return list(steps[: next(itertools.islice(whole, count - 1, None), 0)])

    def _doubts(self, step: int) -> Iterator[tuple[Path, str]]:
        """The folders of an output that is the newest by its number only, and what speaks against that."""
        if (later := self.journal.written().later_below(step)) is not None:
            why = f"{told_later(f'step {later[0]}', f'step {step}', later[1])}, so that this may be of a training before"
            yield from ((folder, why) for folder in folders_of(self.journal.made[step]) if folder.is_dir())

    def _is_there(self, step: int) -> bool:
        """Whether an output is there for what follows on it. One that is there, but is not what was written, has failed."""
        made = self.journal.made[step]
        if not os.path.isdir(made.output):
            return False
        trouble = trouble_of(made)
        if trouble is None:
            self._failed.pop(step, None)
        else:
            hint = "write it again with `ckpt merge --overwrite` and the same options, or remove the folder if it is not wanted"
            self._fail(step, Path(made.output), 0.0, IncompleteError(f"the output is not what was written: {trouble}", hint=hint))
        return trouble is None

    def _fail(self, step: int, output: Path, seconds: float, error: CkptError) -> None:
        """Tell an error of a step, once."""
        self.waiting.pop(step, None)
        if self._failed.get(step) != error.message:
            self._failed[step] = error.message
            text = ": ".join(filter(None, (error.message, error.path)))
            said = {"exit_code": error.exit_code, "error": error.code, "message": text, "hint": error.advice}
            self._tell("failed", step, output, seconds, **said)

    def _warn(self, older: str | None) -> None:
        if older is not None and older != self.older:
            self.listener.warns(self.path, older)
        self.older = older

    def _tell_uncounted(self, target: Target) -> None:
        """Warn of what lies beside the steps and may be one, if it is there for more than one look: saves have other names meanwhile."""
        found = [note.text for note in uncounted_notes(target, target.checkpoints[-1]) if note.level == "warning"]
        text = "; ".join(found) or None
        if text is None or text == self._seen or self.options.once:
            if text is not None and text != self.uncounted:
                self.listener.warns(self.path, text)
            self.uncounted = text
        self._seen = text

    def _wait(self, step: int, reason: str) -> None:
        if self.waiting.get(step) != reason:
            self.waiting[step] = reason
            self.listener.waits(self.path, step, reason)

    def _tell(self, event: Any, step: int, output: Path, seconds: float, **more: Any) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        said = WatchEvent(event=event, time=now, run=str(self.path), step=step, output=str(output), seconds=round(seconds, 3), **more)
        self.journal.add(said)
        self.listener.event(said)


def _warnings(result: MergeResult | AverageResult) -> tuple[str, ...]:
    """The texts of the warnings of an output, but for those about other steps of the run: these come and go while it is watched."""
    of_older = result.notes if isinstance(result, AverageResult) else ()
    notes = [*of_older, *result.checkpoint.notes, *(note for output in result.outputs for note in output.notes)]
    return tuple(dict.fromkeys(note.text for note in notes if note.level == "warning" and note.code not in OF_OTHER_STEPS))
