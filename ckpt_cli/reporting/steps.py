"""The rows of a run's report: what each step holds, whether it can be merged, and what of it is no longer needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ckpt_cli.discover.components import component_names, expanded
from ckpt_cli.discover.forms.archives import archive_of, where_it_is
from ckpt_cli.discover.found import Age, Found, Place, Target
from ckpt_cli.discover.newest import short_reason
from ckpt_cli.discover.open import describe_place
from ckpt_cli.errors import CkptError, CorruptFile, IncompleteError, MissingShard, PartOfSet, Undecidable, Unsupported
from ckpt_cli.files.source import Files
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.lora.merge import refuse_unmergeable
from ckpt_cli.names import few
from ckpt_cli.progress import Progress
from ckpt_cli.reporting.drift import total
from ckpt_cli.reporting.sizes import Sizes, folder_size, sizes_of
from ckpt_cli.results.drift import BaseComparison
from ckpt_cli.results.inspect import StepReport
from ckpt_cli.tensors.component import Component

UNFINISHED = "its name says that the save did not finish"
NO_WEIGHTS = "no weights were recognised in it"


State = Literal["whole", "damaged", "lacks-ranks", "unknown"]


@dataclass(frozen=True, slots=True)
class Part:
    """A component of a step: its files prove that it is damaged, or ranks are missing that other machines may have."""

    state: State
    files: frozenset[Path]
    world_size: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """A step: the error that a merge of it would end with, and the shape and dtype of each tensor that a merge would read.

    ``age`` is its place in the order of the run, ``label`` its name where the number does not tell it.
    ``unfinished``: its save did not finish; what cannot be read, or is not known, may be whole. ``whole`` are the components that a merge
    would write, ``broken`` says of others why these cannot be.
    """

    path: Path
    step: int | None
    age: Age = (0, 0)
    label: str | None = None
    components: tuple[str, ...] = ()
    sizes: Sizes = field(default_factory=Sizes)
    problem: str | None = None
    complete: bool = False
    unfinished: bool = False
    parts: Mapping[str, Part] = field(default_factory=dict)
    tensors: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()


def rows_of(target: Target, type: str | None, progress: Progress | None) -> list[Row]:
    """A row for every step folder of a run, oldest first; headers and pickles are read, no weights.

    Raises Unreadable for folders that can be listed only in part.
    """
    age, anew = target.age, target.counted_anew
    rows = [(age(found), _row(found, target, type, progress)) for found in target.checkpoints]
    rows += [(age(blocked), Row(blocked.path, blocked.step, problem=blocked.error.message)) for blocked in target.blocked]
    for path in (*target.bare, *target.partial):
        unfinished = path in target.partial
        archive = archive_of(path)
        problem = UNFINISHED if unfinished else NO_WEIGHTS if archive is None else where_it_is(archive)
        rows.append((age(path), Row(path, step_of(path), sizes=folder_size(archive or path), problem=problem, unfinished=unfinished)))
    made = [replace(row, age=new, label=target.label(row.path) if anew else None) for new, row in rows]
    return sorted(made, key=lambda row: (row.step is None, row.age, row.path))


def _row(listed: Found, target: Target, type: str | None, progress: Progress | None) -> Row:
    with Files(progress=progress) as files:
        found, errors, refused = expanded(listed, files), dict[str, CkptError](), dict[str, CkptError]()
        described: dict[str, Component] = {}
        for place in found.places:
            try:
                opened = describe_place(found, place.name, files, None, "auto")
                described[place.name] = opened.component
                refuse_unmergeable(opened)
            except CkptError as error:
                (errors if place.name not in described else refused)[place.name] = error
        wanted: Sequence[str] = ()
        try:
            wanted = component_names(found, type)
            trouble = next((found_in[name] for found_in in (errors, refused) for name in wanted if name in found_in), None)
        except CkptError as missing:
            trouble = missing
        tensors = {f"{name}: {tensor.name}": (tensor.shape, tensor.dtype) for name in wanted if name in described
                   for tensor in described[name].tensors.values()}  # fmt: skip
        return Row(
            found.path,
            found.step,
            components=tuple(place.name for place in found.places),
            sizes=sizes_of(found, list(described.values()), files),
            problem=None if trouble is None else short_reason(trouble, found.path),
            complete=trouble is None or isinstance(trouble, (Unsupported, Undecidable)),
            parts={place.name: _part(place, described.get(place.name), errors.get(place.name)) for place in found.places},
            tensors=tensors,
            whole=tuple(name for name in wanted if name in described),
            broken=tuple(f"{name}: {short_reason(error, found.path)}" for name, error in errors.items() if name not in wanted),
        )


def _part(place: Place, component: Component | None, error: CkptError | None) -> Part:
    state: State = "whole" if error is None else "unknown"
    if isinstance(error, (MissingShard, PartOfSet)):
        state = "lacks-ranks"
    elif isinstance(error, (IncompleteError, CorruptFile)) and not isinstance(error, Undecidable):
        state = "damaged"
    return Part(state, frozenset((*place.match.files, *(component.files if component is not None else ()))), place.match.world_size)


def freeable(row: Row, newest: Row, rows: Sequence[Row]) -> int:
    """Bytes of an older step that are needed neither to merge what is whole in it nor to go on from a step after it.

    Ranks are missing for good if the newest step has as many, all of them here: then no other machine writes any.
    """
    held = {id(other): other.sizes.places for other in rows}
    elsewhere = {place for other in rows if other is not row for place in held[id(other)]}
    if row.unfinished:
        return row.sizes.freed({file.path for file in row.sizes.files}, elsewhere)
    optimizer = row.sizes.of_optimizer
    replaced = any(
        other.sizes.replaces_optimizer_of(row.sizes, {place for older in rows if older.age < other.age for place in held[id(older)]})
        for other in rows
        if other.problem is None and other.age > row.age
    )
    lost = {name: part for name, part in row.parts.items() if part.state == "damaged" or _is_lost(part, newest.parts.get(name))}
    if lost and len(lost) == len(row.parts):
        kept = frozenset() if replaced else optimizer
        return row.sizes.freed({file.path for file in row.sizes.files} - kept, elsewhere)
    needed = {path for name, part in row.parts.items() if name not in lost for path in part.files}
    gone = {path for part in lost.values() for path in part.files} - needed
    return row.sizes.freed(gone | (optimizer if replaced and (row.complete or lost) else frozenset()), elsewhere)


def _is_lost(part: Part, newest: Part | None) -> bool:
    return (
        newest is not None and (part.state, newest.state) == ("lacks-ranks", "whole") and part.world_size == newest.world_size is not None
    )


def reported(rows: Sequence[Row], moved: Mapping[Path, BaseComparison]) -> tuple[StepReport, ...]:
    """The rows as results. What can be freed lies in steps before the newest one that can be merged."""
    newest = newest_of(rows)
    made, before = [], None
    for row in rows:
        is_older = newest is not None and row.step is not None and row.age < newest.age
        made.append(
            StepReport(
                step=row.step,
                label=row.label,
                path=str(row.path),
                components=row.components,
                complete=row.complete,
                mergeable=row.problem is None,
                problem=row.problem,
                partly_broken=f"{few(row.whole)} complete, {few(row.broken)}" if row.broken and row.problem is None else None,
                weights=row.sizes.weights,
                optimizer=row.sizes.optimizer,
                other=row.sizes.other,
                freeable=freeable(row, newest, rows) if newest is not None and is_older else 0,
                differs=_difference(before, row) if before is not None and row.problem is None else None,
                drift=total(moved[row.path].groups) if row.path in moved else None,
                coverage=moved[row.path].coverage if row.path in moved else None,
            )
        )
        before = row if row.problem is None else before
    return tuple(made)


def newest_of(rows: Sequence[Row]) -> Row | None:
    """The newest step that can be merged."""
    return next((row for row in reversed(rows) if row.problem is None), None)


def _difference(before: Row, row: Row) -> str | None:
    """How the tensors differ from those of the step before, from headers; None if names, shapes and dtypes are the same."""
    names = before.tensors.keys() | row.tensors.keys()
    different = sorted(name.partition(": ")[2] for name in names if before.tensors.get(name) != row.tensors.get(name))
    return f"other tensors than step {before.label or before.step}: {few(different, 2)}" if different else None
