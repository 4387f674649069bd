"""Which checkpoints are averaged: those that paths name, or steps of runs, from old to new."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_cli.discover.around.given_otherwise import give
from ckpt_cli.discover.before.settings import CODE as STEP_SETTINGS
from ckpt_cli.discover.before.tensors import CODE as STEP_TENSORS
from ckpt_cli.discover.components import why_none
from ckpt_cli.discover.forms.inner_runs import inner_run_notes
from ckpt_cli.discover.found import Age, Blocked, Dated, Found, Target, are_counted_anew
from ckpt_cli.discover.locate import locate
from ckpt_cli.discover.newest import PASSED, Passed, ambiguous, by_counter, newest_first, numbered_alike, told_counters
from ckpt_cli.discover.nodes.also import also_notes, contradicts
from ckpt_cli.discover.open import Opened, OpenedComponent, bare_notes, open_checkpoint
from ckpt_cli.discover.step_infos import newer_infos, step_info
from ckpt_cli.discover.steps import newest_notes, no_step, told_by_trackers
from ckpt_cli.errors import CkptError, NotFound, Undecidable, UsageError
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ShardOrder
from ckpt_cli.formats.step_names import counts_other, step_of
from ckpt_cli.names import few, plural
from ckpt_cli.results.checkpoint import StepInfo
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import places_of

CHOOSE = "choose other steps with --steps"
CHOICES = "--all, --last 5, --from 1000 --to 5000 --every 1000, or --steps 100,200"


@dataclass(frozen=True, slots=True)
class StepChoice:
    """Steps of a run: all of them, the ``last`` N complete ones, those in a range (``every`` counts from its begin), or a list."""

    everything: bool = False
    last: int | None = None
    begin: int | None = None
    end: int | None = None
    every: int | None = None
    steps: tuple[int, ...] = ()

    @property
    def says_something(self) -> bool:
        return self != StepChoice()

    def check(self) -> None:
        """Raise UsageError for a choice that contradicts itself."""
        ranged = (self.begin, self.end, self.every) != (None, None, None)
        if sum((self.everything, self.last is not None, ranged, bool(self.steps))) > 1:
            raise UsageError("the steps are chosen in more than one way", expected=f"one of {CHOICES}")
        if self.last is not None and self.last < 2:
            raise UsageError("--last is out of range", expected="2 or more")
        if self.begin is not None and self.end is not None and self.begin > self.end:
            raise UsageError(f"no steps lie in the range from {self.begin} to {self.end}", expected="--from no larger than --to")
        if self.every is not None and self.every < 1:
            raise UsageError("--every is out of range", expected="1 or more steps")
        if len(set(self.steps)) < len(self.steps):
            raise UsageError("--steps names a step twice", hint="use --weights to give one more weight")

    def among(self, steps: Sequence[int]) -> set[int]:
        """The chosen ones (of ``last``: all candidates)."""
        if self.steps:
            return {step for step in steps if step in self.steps}
        low = self.begin if self.begin is not None else min(steps, default=0)
        chosen = {step for step in steps if step >= low and (self.end is None or step <= self.end)}
        return {step for step in chosen if self.every is None or (step - low) % self.every == 0}


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The checkpoints of an average from old to new, what was skipped, and which steps newer than all of them."""

    opened: tuple[Opened, ...]
    notes: tuple[Note, ...]
    passed_over: tuple[StepInfo, ...] = ()

    @property
    def components(self) -> tuple[OpenedComponent, ...]:
        """Those of the newest."""
        return self.opened[-1].components

    @property
    def counted_anew(self) -> bool:
        """Whether their numbers do not tell their order."""
        return are_counted_anew([opened.found for opened in self.opened])

    @property
    def by_counter(self) -> dict[str, list[Found]]:
        """Them by what their numbers count; those without a number count nothing."""
        counted: dict[str, list[Found]] = {}
        for found in (opened.found for opened in self.opened if opened.found.step is not None):
            counted.setdefault(counts_other(found.numbered_at) or "steps", []).append(found)
        return counted

    @property
    def are_numbered_alike(self) -> bool:
        """Whether all have a number, of one kind: then these say which is older."""
        return len(self.by_counter) == 1 and all(opened.found.step is not None for opened in self.opened)

    @property
    def steps(self) -> list[int] | None:
        """Their steps; None if some are unknown, of two kinds, or counted anew in each epoch: differences of them say nothing then."""
        if self.counted_anew or len(self.by_counter) > 1:
            return None
        known = [opened.found.step for opened in self.opened]
        return [step for step in known if step is not None] if None not in known else None


def open_snapshots(
    paths: Sequence[Path],
    choice: StepChoice,
    files: Files,
    *,
    type: str | None,
    base: Path | None,
    also: tuple[Path, ...],
    shard_order: ShardOrder,
) -> Snapshots:
    """Open every checkpoint that ``paths`` and ``choice`` mean; incomplete steps that were not requested by number are skipped.

    Raises UsageError if that is fewer than two, and what `open_checkpoint` raises.
    """
    choice.check()
    give(files, paths)
    if also and len(paths) > 1:
        raise UsageError("--also applies to one run, but several paths were given", hint="merge the checkpoint from its nodes first")
    found: list[Opened] = []
    notes: list[Note] = []
    newer: list[tuple[Found, str]] = []
    targets = [locate(path, None, also, steps=choice.says_something) for path in paths]
    if choice.says_something and all(target.run is None for target in targets):
        for place in (found.places[0] for target in targets for found in target.checkpoints if found.places):
            if isinstance(place.match.trouble, Undecidable):
                raise place.match.trouble  # there are several, and nothing counts them
        what = "this is one checkpoint, which has" if len(paths) == 1 else "these are checkpoints, which have"
        raise UsageError(f"{what} no steps to choose from", hint="pass the run, or several checkpoints")
    for path, target in zip(paths, targets, strict=True):
        several = target.run is not None and len(target.checkpoints) > 1
        if not choice.says_something and several and len(paths) == 1:
            steps = ", ".join(dict.fromkeys(str(checkpoint.step) for checkpoint in target.checkpoints))
            raise UsageError("which steps of the run should be averaged?", expected=f"some of {steps}", hint=_choices_of(target))

        def open_found(checkpoint: Found, path: Path = path, target: Target = target) -> Opened:
            only = replace(target, checkpoints=(checkpoint,), trackers=(), folders=(), also=())
            return open_checkpoint(
                path, files, type=type, step=checkpoint.step, base=base, also=also, shard_order=shard_order, located=only
            )

        if choice.says_something and target.run is not None:
            steps_read = _of_one_component(_steps_of(target, choice, open_found, notes, newer, type, files), notes)
            notes += also_notes(target, [(opened.found, [one.name for one in opened.components]) for opened in steps_read])
            found += steps_read
        else:
            found.append(open_checkpoint(path, files, type=type, base=base, also=also, shard_order=shard_order, located=target))
            notes += [note for note in found[-1].notes if note.code == "step-skipped"]
    if len(found) < 2:
        why = f": {notes[0].text}" if notes else ""
        raise UsageError(
            f"an average needs at least two checkpoints; found {len(found)}{why}",
            path=paths[0],
            hint="ckpt merge writes a single one" if found else None,
        )
    over = newer_infos(targets[0], found[-1].found, newer) if len(paths) == 1 else ()
    return Snapshots(tuple(found), (*notes, *_twice(found), *_of_older(found)), over)


def _choices_of(target: Target) -> str | None:
    """How the existing steps can be chosen; None if there are fewer than two."""
    steps = list(dict.fromkeys(found.step for found in target.checkpoints if found.step is not None and target.option(found) is not None))
    if target.counted_anew:
        return f"pass --all, --last 2{f', or --steps {steps[-2]},{steps[-1]}' if len(steps) > 1 else ''}"
    if len(steps) < 2:
        return None
    first, last = steps[-2:]
    return f"pass --all, --last 2, --from {first} --to {last}, or --steps {first},{last}"


def _of_one_component(found: list[Opened], notes: list[Note]) -> list[Opened]:
    """Leaves out a step whose components differ from most others: a step being written may have only its EMA so far."""
    names = [tuple(component.name for component in opened.components) for opened in found]
    usual = max(dict.fromkeys(reversed(names)), key=names.count, default=())
    for opened, own in zip(found, names, strict=True):
        if own != usual:
            text = f"{opened.found.path.name} is left out: it has {few(own)} where the others have {few(usual)}"
            notes.append(Note("warning", "step-skipped", text))
    return [opened for opened, own in zip(found, names, strict=True) if own == usual]


def _steps_of(
    target: Target,
    choice: StepChoice,
    open_found: Callable[[Found], Opened],
    notes: list[Note],
    newer: list[tuple[Found, str]],
    type: str | None,
    files: Files,
) -> list[Opened]:
    there_by_name: list[Found | Blocked] = [*target.checkpoints, *target.blocked]
    chosen = choice.among([step for step in (listed.step for listed in there_by_name) if step is not None])
    if choice.last is None:
        target.check_readable(lambda blocked: blocked.step in chosen, CHOOSE)
    candidates = [found for found in target.checkpoints if found.step in chosen]
    lacking = set(choice.steps) - chosen
    bare = next((folder for folder in target.bare if step_of(folder) in lacking), None)
    if bare is not None:
        raise NotFound("no weights were recognised in this step folder", path=bare)
    if lacking:
        raise no_step(target, min(lacking))
    if not candidates:
        there = ", ".join(dict.fromkeys(str(checkpoint.step) for checkpoint in target.checkpoints))
        raise UsageError("no step of the run is chosen", path=target.path, expected=f"some of the steps {there}", hint=_choices_of(target))
    if choice.steps:
        _refuse_twins(target, candidates)
        for step in choice.steps:
            if alike := numbered_alike(target, step):
                raise _twin_error(target, step, alike)
    elif len(counted := by_counter(candidates)) > 1:
        raise UsageError(
            f"the numbers of these steps are not of one kind: {told_counters(counted)}",
            path=target.path,
            hint="choose steps with --steps, or pass their folders",
        )
    elif target.counted_anew and (choice.begin, choice.end, choice.every) != (None, None, None):
        text = "steps are counted anew in each epoch of this run, so a range of numbers is not one of steps"
        raise UsageError(text, path=target.path, hint="choose steps with --last or --all, or pass their folders")
    whole: list[Opened] = []
    passed, age = Passed(), target.age

    def may_pass(candidate: Found, error: CkptError) -> bool:
        if not isinstance(error, PASSED) or not (choice.steps or isinstance(error, Undecidable) or contradicts(candidate, error)):
            return isinstance(error, PASSED)
        if len(choice.steps) > 2:
            error.hint = ", or ".join(filter(None, (error.hint, f"leave step {candidate.step} out")))
        return False

    def is_wanted(candidate: Found) -> bool:
        """Folders of one step are all looked at, to refuse twins."""
        return choice.last is None or len(whole) < choice.last or age(candidate) == age(whole[-1].found)

    wanted = itertools.takewhile(is_wanted, reversed(candidates))
    for _, opened in newest_first(wanted, open_found, passed, may_pass):
        whole.append(opened)
    notes += passed.notes(target, "left out")
    newer += [(other, passed.reasons[other.path]) for other, _ in passed.errors]
    _refuse_twins(target, [opened.found for opened in reversed(whole)])
    reach = min((age(opened.found) for opened in whole), default=(0, 0)) if len(whole) == choice.last else (0, 0)
    if choice.last is not None:
        target.check_readable(lambda blocked: blocked.step in chosen and age(blocked) >= reach, CHOOSE)
    known = choice.among([*(step_of(folder) or 0 for folder in target.bare), *chosen]) if not choice.steps else set()
    notes += bare_notes(target, lambda folder: (step_of(folder) or 0) in known and age(folder) >= reach)
    if not whole and isinstance(error := why_none(target, passed.errors, type, files), NotFound):
        raise error
    if choice.last is not None and len(whole) < choice.last:
        notes.append(
            Note(
                "warning", "fewer-steps", f"only {plural(len(whole), 'complete step was', 'complete steps were')} found, not {choice.last}"
            )
        )
    if whole:
        newest = whole[0]
        unasked = not choice.steps and choice.end is None
        told = (
            [
                *newest_notes(target, newest.found, lambda found: step_info(found).problem is None),
                *inner_run_notes(target, newest.found, files),
            ]
            if unasked
            else told_by_trackers(target, newest.found)
        )
        whole[0] = replace(newest, notes=(*told, *newest.notes))
    return whole[::-1]


def _refuse_twins(target: Target, chosen: Sequence[Found]) -> None:
    """Raise AmbiguousStep if one step lies in two folders: it would count twice, or one of them is another training."""
    age, of_age = target.age, dict[Age, list[Found]]()
    for found in chosen:
        of_age.setdefault(age(found), []).append(found)
    for twins in reversed(of_age.values()):
        if len(twins) > 1 and twins[0].step is not None:
            raise _twin_error(target, twins[0].step, twins)


def _twin_error(target: Target, step: int, twins: Sequence[Dated]) -> CkptError:
    error = ambiguous(target, step, twins)
    error.hint = "pass the step folders that are meant instead of the run"
    return error


def _of_older(found: Sequence[Opened]) -> list[Note]:
    """Notes about all checkpoints except the newest, with their names; what is said alike of several is said once.

    In what their side files differ is said of the average itself.
    """
    passed = {("warning", "step-skipped"), ("info", "tracker"), ("warning", STEP_SETTINGS), ("warning", STEP_TENSORS)}
    said: dict[Note, list[str]] = {}
    for opened in found[:-1]:
        for note in opened.notes:
            if (note.level, note.code) not in passed:
                said.setdefault(note, []).append(opened.found.path.name)
    return [Note(note.level, note.code, f"{few(list(dict.fromkeys(names)), 3)}: {note.text}") for note, names in said.items()]


def _twice(found: Sequence[Opened]) -> list[Note]:
    """Warnings about checkpoints whose weights are the same bytes of the same files, also through links."""
    seen: dict[frozenset[tuple[object, ...]], list[Opened]] = {}
    for opened in found:
        seen.setdefault(places_of(opened.components[0].component.tensors.values()), []).append(opened)
    return [Note("warning", "same-twice", _said_of(held)) for place, held in seen.items() if place and len(held) > 1]


def _said_of(held: Sequence[Opened]) -> str:
    first, *others = dict.fromkeys(opened.found.path for opened in held)
    same = f", also as {few([str(path) for path in others])}" if others else ""
    return f"{first} ({held[0].components[0].name}) is averaged {len(held)} times{same}"
