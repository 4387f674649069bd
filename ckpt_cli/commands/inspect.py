"""`detect`, `inspect` and `report`: what is there, in totals, in groups of similar tensors, and step by step."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckpt_cli.discover.beside.final_model import stray_notes
from ckpt_cli.discover.beside.outputs import changed_side_notes, lost_side_notes, partial_notes
from ckpt_cli.discover.beside.uncounted import uncounted_notes
from ckpt_cli.discover.components import component_names, expanded
from ckpt_cli.discover.forms.states_inside import state_inside_notes
from ckpt_cli.discover.found import Target
from ckpt_cli.discover.locate import locate
from ckpt_cli.discover.newest import mixed_notes
from ckpt_cli.discover.open import Opened, describe_checkpoint, open_checkpoint
from ckpt_cli.discover.step_infos import listed_component, steps_of
from ckpt_cli.errors import AmbiguousStep, CkptError, CorruptFile, IncompleteError, NotFetched, Unsupported, UsageError, within_memory
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ShardOrder
from ckpt_cli.formats.safetensors.names import ADAPTER_STEM
from ckpt_cli.given import PathLike, boundary, int_of, optional_path, parse_share, path_of, path_text, paths_of, progress_of, text_of
from ckpt_cli.hub.adapters.other_kinds import other_adapters
from ckpt_cli.hub.beside.lacking import lost_notes
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.name_patterns import pattern_of, ranged
from ckpt_cli.progress import Progress
from ckpt_cli.results.checkpoint import Checkpoint, NoteInfo, TensorInfo
from ckpt_cli.results.drift import BaseComparison
from ckpt_cli.results.envelope import ErrorInfo
from ckpt_cli.results.inspect import DetectResult, InspectResult, ReportResult, TensorGroup
from ckpt_cli.results.statistics import StatsResult
from ckpt_cli.tensors.component import Component, Note


@boundary
@within_memory
def detect(
    path: PathLike,
    *,
    type: str | None = None,
    step: int | None = None,
    also: PathLike | Sequence[PathLike] = (),
    progress: Progress | None = None,
) -> DetectResult:
    """What a path holds: trainer, steps, components, world size, completeness.

    Reads pickles and headers of the chosen step (the newest complete one), never weights. Raises NotFound,
    NotRecognised or Unreadable; an incomplete checkpoint, or a newest step that is there more than once, is not an error here; it is
    reported as ``problem``.
    """
    path, component, step, nodes = path_of(path), text_of(type, "--type"), int_of(step, "--step"), paths_of(also, "--also")
    progress = progress_of(progress)
    try:
        with Files(progress=progress, values=False) as files:
            opened = open_checkpoint(path, files, type=component, step=step, also=nodes)
            lost = lost_notes(opened.components[0].assets)
            checkpoint = describe_checkpoint(opened, [*_partial_notes(opened), *_other_step_notes(opened), *lost])
            refused = _refused(opened)
    except (IncompleteError, CorruptFile, NotFetched, Unsupported, AmbiguousStep) as error:
        target = locate(path, step, nodes)
        with Files(progress=progress, values=False) as files:
            found = expanded(target.checkpoints[-1], files)
        names: list[str] = []
        with contextlib.suppress(IncompleteError):
            names = component_names(found, component)
        components = [listed_component(place) for place in found.places]
        # Which of several folders is meant is no trouble of the files in them.
        problem = None if isinstance(error, AmbiguousStep) else error.message
        checkpoint = Checkpoint(
            path=str(found.path),
            step=found.step,
            run=str(target.run) if target.run else None,
            framework=found.trainer(target.run),
            components=tuple(
                info.model_copy(update={"problem": info.problem or problem}) if info.name in names else info for info in components
            ),
            steps=steps_of(target, {}),
        )
        return DetectResult(checkpoint=checkpoint, problem=error.message, exit_code=error.exit_code, error=ErrorInfo.of(error))
    if refused is not None:
        told = ErrorInfo.of(refused)
        return DetectResult(checkpoint=checkpoint, problem=refused.message, exit_code=refused.exit_code, error=told)
    return DetectResult(checkpoint=checkpoint)


def _refused(opened: Opened) -> CkptError | None:
    """The error that a merge ends with for adapters in what was opened, whose files are whole."""
    if not any(_may_be_adapters(each.component) for each in opened.components):
        return None
    from ckpt_cli.lora.merge import refuse_unmergeable  # `detect` is to start fast

    try:
        for each in opened.components:
            refuse_unmergeable(each)
    except CkptError as error:
        return error
    return None


def _may_be_adapters(component: Component) -> bool:
    named = any(path.name.startswith(ADAPTER_STEM) for path in component.files)
    return named or has_adapters(component.tensors) or other_adapters(component.tensors) is not None


@boundary
@within_memory
def inspect(
    path: PathLike,
    *,
    type: str | None = None,
    step: int | None = None,
    also: PathLike | Sequence[PathLike] = (),
    base: PathLike | None = None,
    shard_order: ShardOrder = "auto",
    stats: bool = False,
    histogram: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> InspectResult:
    """Every tensor of a checkpoint with shape, dtype and layout, and the same in groups per layer pattern.

    ``stats`` reads all values too, through small buffers, and gives a `StatsResult`; ``histogram`` counts their exponents as well.

    Raises InputError for files that cannot be read, IncompleteError for an incomplete checkpoint.
    """
    path, component, step, nodes = path_of(path), text_of(type, "--type"), int_of(step, "--step"), paths_of(also, "--also")
    workers, progress = int_of(jobs, "--jobs"), progress_of(progress)
    if workers is not None and not 1 <= workers <= 256:
        raise UsageError("--jobs is out of range", expected="1 to 256", hint="leave --jobs out, and ckpt chooses")
    with Files(progress=progress, values=stats or histogram) as files:

        def opened_with(folder: Path | None) -> Opened:
            return open_checkpoint(path, files, type=component, step=step, base=folder, also=nodes, shard_order=shard_order)

        from ckpt_cli.merging.trained_on import opened_on_base  # `detect`, which is here too, is to start fast

        opened, _ = opened_on_base(path_text(base, "--base") if base is not None else None, opened_with)
        checkpoint = describe_checkpoint(opened, _partial_notes(opened), tensors=True)
        measured = {}
        if stats or histogram:
            from ckpt_cli.verifying.statistics import tensor_stats  # starting is to stay fast where no values are read

            for one in opened.components:
                measured[one.name] = tensor_stats(one.component.tensors, histogram=histogram, jobs=workers, progress=progress)
            files.check_unchanged()
    groups = {info.name: group_tensors(info.tensors) for info in checkpoint.components if info.tensors is not None}
    if not measured:
        return InspectResult(checkpoint=checkpoint, groups=groups)
    each, together = ({name: found[i] for name, found in measured.items()} for i in (0, 1))
    return StatsResult(checkpoint=checkpoint, groups=groups, stats=each, stat_groups=together)


@boundary
@within_memory
def report(
    path: PathLike,
    *,
    type: str | None = None,
    also: PathLike | Sequence[PathLike] = (),
    drift: bool = False,
    sample: float | str | None = None,
    html: PathLike | None = None,
    progress: Progress | None = None,
) -> ReportResult:
    """A run step by step: is it complete, can it be merged, how large are weights and optimizer, what could be freed.

    ``drift`` reads the weights of all steps that can be merged, each compared with the one before; ``sample`` is the share of the elements
    that is read for it, and ``html`` a page to write. Nothing is removed.

    Raises NotFound, NotRecognised, Unreadable, UsageError, OutputError.
    """
    # Starting is to stay fast where no steps are reported.
    from ckpt_cli.reporting.drift import run_map
    from ckpt_cli.reporting.page import run_page
    from ckpt_cli.reporting.sizes import disk_size
    from ckpt_cli.reporting.steps import newest_of, reported, rows_of
    from ckpt_cli.verifying.drift.single_file import check_page, publish_file

    path, component, nodes = path_of(path), text_of(type, "--type"), paths_of(also, "--also")
    page = optional_path(html, "--html", use="local")
    if sample is not None and not drift:
        raise UsageError("--sample is about --drift, which was not asked for", hint="pass --drift")
    if page is not None:
        check_page(page)
    started, progress = time.monotonic(), progress_of(progress)
    target = locate(path, None, nodes, steps=True)
    rows = rows_of(target, component, progress)
    moved: dict[Path, BaseComparison] = {}
    if drift:
        from ckpt_cli.commands.diff import diff  # starting is to stay fast where no values are read

        whole = [row for row in rows if row.problem is None and row.step is not None]
        for before, row in itertools.pairwise(whole):
            if before.tensors.keys() & row.tensors.keys():
                # What other nodes hold of the steps is added where the run is passed.
                pair = (target.path,) if nodes else (before.path, row.path)
                chosen = [step for step in (before.step, row.step) if step is not None] if nodes else None
                found = diff(*pair, type=component, steps=chosen, also=nodes, sample=sample, progress=progress)
                moved[row.path] = found.comparison
    steps = [(row.step, row.label, moved[row.path].groups) for row in rows if row.path in moved and row.step is not None]
    newest = newest_of(rows)
    result = ReportResult(
        path=str(target.run or target.path),
        framework=target.checkpoints[-1].trainer(target.run) if target.checkpoints else "unknown",
        steps=reported(rows, moved),
        size=disk_size(row.sizes for row in rows),
        newest=None if newest is None else str(newest.path),
        drift=run_map(steps),
        sample=None if sample is None else parse_share(str(sample)),
        written=None if page is None else str(page),
        notes=tuple(map(NoteInfo.of, (*stray_notes(target), *_report_notes(target)))),
        seconds=time.monotonic() - started,
    )
    if page is not None:
        publish_file(run_page(result).encode(), page, "page")
    return result


def _report_notes(target: Target) -> list[Note]:
    """What is said of the steps as a whole, and of saves beside them that are none by their names."""
    if not target.checkpoints:
        return []
    last = target.checkpoints[-1]
    beside = uncounted_notes(target, last) if target.run is not None else state_inside_notes(last)
    return [*mixed_notes(target, last), *(note for note in beside if note.level == "warning")]


def _partial_notes(opened: Opened) -> list[Note]:
    """What outputs of ckpt lack by their manifests, of tensors and of files beside these, and which of those changed."""
    notes = [note for each in opened.components for note in partial_notes(each.component, each.made)]
    for each in opened.components:
        root, made = each.component.root, each.made
        notes += lost_side_notes(root, made, each.assets.names) + changed_side_notes(root, made, each.assets.files.values())
    return [*dict.fromkeys(notes)]


def _other_step_notes(opened: Opened) -> list[Note]:
    """Of which step ``--type`` takes a component that is not whole in the step chosen for another one, as names tell."""
    target, notes = opened.target, []
    if not opened.chosen or target.blocked:
        return []
    for place in opened.found.places:
        problem = listed_component(place).problem
        if problem is None or place.name in {one.name for one in opened.components}:
            continue
        whole = (found for found in reversed(target.checkpoints)
                 if any(other.name == place.name and listed_component(other).problem is None for other in found.places))  # fmt: skip
        text, other = f"{place.name} of step {target.called(opened.found)} cannot be merged: {problem}", next(whole, None)
        if other is not None:
            text += f"; by the names of the files, --type {place.name} takes step {target.called(other)}"
        notes.append(Note("info", "other-component", text))
    return notes


def group_tensors(tensors: Iterable[TensorInfo]) -> tuple[TensorGroup, ...]:
    """Group names that differ in numeric parts only, where shape, dtype and layout agree and the numbers leave no gap.

    If a pattern needs several rows, the smaller ones are marked ``odd``: the one layer that differs from the others is what
    people look for.
    """
    patterns: dict[str, list[tuple[TensorInfo, tuple[int, ...]]]] = {}
    for tensor in tensors:
        pattern, numbers = pattern_of(tensor.name)
        patterns.setdefault(pattern, []).append((tensor, numbers))
    rows: list[TensorGroup] = []
    for pattern, members in patterns.items():
        alike: dict[tuple[object, ...], list[tuple[TensorInfo, tuple[int, ...]]]] = {}
        for member in members:
            alike.setdefault((member[0].shape, member[0].dtype, _layout(member[0])), []).append(member)
        forms = Counter((info.shape, info.dtype, _form(info)) for info, _ in members)
        largest = max(forms.values())
        for group in alike.values():
            first = group[0][0]
            odd = len(forms) > 1 and forms[first.shape, first.dtype, _form(first)] < largest
            rows += [_row(pattern, block, odd) for block in _blocks(group)]
    return tuple(rows)


def _blocks(group: Sequence[tuple[TensorInfo, tuple[int, ...]]]) -> list[list[tuple[TensorInfo, tuple[int, ...]]]]:
    """Split a group so that the numbers of each block are a full product of ranges."""
    if not group[0][1] or _is_product([numbers for _, numbers in group]):
        return [list(group)]
    blocks: list[list[tuple[TensorInfo, tuple[int, ...]]]] = []
    for member in sorted(group, key=lambda member: member[1]):
        last = blocks[-1] if blocks else None
        if last is not None and last[-1][1][1:] == member[1][1:] and last[-1][1][0] + 1 == member[1][0]:
            last.append(member)
        else:
            blocks.append([member])
    return blocks


def _layout(tensor: TensorInfo) -> str:
    return f"same storage as {tensor.alias_of}" if tensor.alias_of else tensor.layout


def _form(tensor: TensorInfo) -> str:
    """The layout as far as it tells a tensor from others: where a flat vector of many tensors is cut says nothing about one of them."""
    return _layout(tensor) if tensor.alias_of else tensor.layout.partition("flat x")[0].rstrip(", ")


def _is_product(numbers: Sequence[tuple[int, ...]]) -> bool:
    size = 1
    for column in zip(*numbers, strict=True):
        values = set(column)
        if max(values) - min(values) + 1 != len(values):
            return False
        size *= len(values)
    return size == len(set(numbers)) == len(numbers)


def _row(pattern: str, members: Sequence[tuple[TensorInfo, tuple[int, ...]]], odd: bool) -> TensorGroup:
    first = members[0][0]
    return TensorGroup(
        pattern=ranged(pattern, [numbers for _, numbers in members]),
        count=len(members),
        shape=first.shape,
        dtype=first.dtype,
        layout=_layout(first),
        elements=sum(tensor.elements for tensor, _ in members if tensor.alias_of is None),
        odd=odd,
    )
