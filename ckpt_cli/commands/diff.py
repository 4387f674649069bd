"""`diff`: how far the tensors of one readable thing are from those of another. It writes nothing but a picture or a page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import Unpack

from ckpt_cli import shell
from ckpt_cli.base_model.alike import seen_alike
from ckpt_cli.base_model.resemblance import resemblance
from ckpt_cli.commands.opening import Named, named_tensors, opened_component
from ckpt_cli.discover.around.given_otherwise import give
from ckpt_cli.discover.found import Found
from ckpt_cli.discover.locate import locate
from ckpt_cli.discover.newest import short_reason, skipped_notes
from ckpt_cli.discover.open import Opened
from ckpt_cli.discover.steps import with_step
from ckpt_cli.errors import CkptError, DifferentTensors, UsageError, within_memory
from ckpt_cli.files.source import Files
from ckpt_cli.given import PathLike, boundary, int_of, optional_path, options_of, parse_list, path_of, paths_of, progress_of, text_of
from ckpt_cli.hub.classes.computed.coded_floats import coded_floats
from ckpt_cli.hub.classes.computed.codes import SCALES
from ckpt_cli.hub.classes.dtypes import quantised_names
from ckpt_cli.hub.classes.shapes.turned import turned_notes
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.hub.settings import different_settings, settings_notes
from ckpt_cli.loading.options import OpenOptions
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import Naming, few, plural, printable
from ckpt_cli.progress import Progress
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.diff import DiffResult, DiffSide
from ckpt_cli.results.drift import BaseComparison
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor, same_bytes
from ckpt_cli.verifying.adapter import scales
from ckpt_cli.verifying.drift.compare import compare_tensors
from ckpt_cli.verifying.drift.page import drift_page
from ckpt_cli.verifying.drift.plot import check_plot, draw
from ckpt_cli.verifying.drift.single_file import check_page, publish_file
from ckpt_cli.verifying.options import DiffKeywords, DiffOptions

TRIED = 3
"""How many other steps are opened for a hint, or for one that has both components."""

PAIR = "two, separated by a comma: the first of A, the second of B"


@dataclass(frozen=True, slots=True)
class Side:
    """Where one side is: a path, and which step and component of it."""

    path: Path
    step: int | None
    type: str | None
    also: tuple[Path, ...] = ()


@boundary
@within_memory
def diff(
    before: PathLike,
    after: PathLike | None = None,
    *,
    type: str | Sequence[str] | None = None,
    steps: int | str | Sequence[int] | None = None,
    also: PathLike | Sequence[PathLike] = (),
    plot: PathLike | None = None,
    html: PathLike | None = None,
    progress: Progress | None = None,
    **options: Unpack[DiffKeywords],
) -> DiffResult:
    """How far every tensor of ``after`` is from the same tensor of ``before``, each a run, a checkpoint, a folder or a file.

    Without ``after`` two ``steps`` of one run are compared (``steps=(100, 200)``), or two components (``type="model,ema"``); a single
    step or component means that of both, and ``also`` are folders with more files of them, from other nodes. ``plot`` draws a map (.png,
    .svg, .html), ``html`` writes a page that sorts and explains itself. ``options`` are those of `DiffKeywords`. Differences are
    information, never an error.

    Raises InputError and IncompleteError for what cannot be opened, DifferentTensors if no name is common, UsageError, OutputError.
    """
    chosen, progress = options_of(DiffOptions, options), progress_of(progress)
    picture, page = optional_path(plot, "--plot", use="local"), optional_path(html, "--html", use="local")
    places = _places(before, after, type, steps, paths_of(also, "--also"))
    _check_options(chosen, picture, page)
    started = time.monotonic()
    with Files() as files:
        give(files, (place.path for place in places))
        sides, passed = _sides(places, files, chosen)
        _refuse_itself(sides)
        named = _alike_named(sides, files, chosen)
        tensors = [side.tensors for side in named]
        configs = [side.components[0].assets.config for side in sides]
        alike, turned = seen_alike(tensors[0], tensors[1], (configs[1], configs[0]))
        if not alike.keys() & tensors[1].keys():
            raise DifferentTensors("the two have no tensor name in common", path=places[1].path, expected=f"tensors of {places[0].path}")
        tensors = [alike, tensors[1]]
        comparison = compare_tensors(tensors[1], tensors[0], _called(sides[0]), jobs=chosen.jobs, progress=progress, sample=chosen.sample)
        files.check_unchanged()
    name = _called(sides[1])
    if picture is not None:
        draw(comparison, picture, name=name)
    if page is not None:
        publish_file(drift_page(comparison, name).encode(), page, "page")
    rescaled = _rescaled(sides)
    doubts = (*_doubts(sides, tensors), *turned_notes(turned, "the first"), *_scale_notes(rescaled), *_codes_notes(tensors[1], comparison))
    opened = [NoteInfo.of(note) for note in (*passed, *sides[0].notes, *sides[1].notes, *doubts)]
    return DiffResult(
        before=_side(sides[0], tensors[0]),
        after=_side(sides[1], tensors[1]),
        naming=named[0].part.selection.naming,
        identical=_is_identical(comparison) and not rescaled,
        compared=comparison.compared,
        rescaled=len(rescaled),
        comparison=comparison,
        written=tuple(str(path) for path in (picture, page) if path is not None),
        notes=tuple(dict.fromkeys((*opened, *named[0].notes, *named[1].notes))),
        seconds=time.monotonic() - started,
    )


def _places(before: object, after: object, type: object, steps: object, also: tuple[Path, ...]) -> tuple[Side, Side]:
    """The two sides. Raises UsageError if there is only one."""
    first = path_of(before, "A")
    second = path_of(after, "B") if after is not None else first
    if also and after is not None:
        raise UsageError(
            "--also applies to one run, but two paths were given",
            hint="of one run pass its folder and --steps A,B; else merge what is on several nodes first, and compare the outputs",
        )
    kinds = _two([text_of(part, "--type") for part in type.split(",")] if isinstance(type, str) else type, "--type")
    numbers = _two(parse_list(steps, int, "--steps") if isinstance(steps, str) else steps, "--steps")
    chosen = [int_of(step, "--steps") for step in numbers]
    named = [text_of(kind, "--type") for kind in kinds]
    places = [Side(path, step, kind, also) for path, step, kind in zip((first, second), chosen, named, strict=True)]
    if after is None and places[0] == places[1]:
        locate(first, None, also)
        expected = "a second path, --steps A,B of a run, or --type A,B"
        given = shell.path(first)
        hint = f"{_two_steps(first)}ckpt diff {given} OTHER; ckpt detect {given} lists steps and components"
        raise UsageError("there is nothing to compare it with", expected=expected, hint=hint)
    return places[0], places[1]


def _two_steps(run: Path) -> str:
    """The command that compares the last two steps of a run, to stand before another; empty for anything else."""
    try:
        target = locate(run, None, ())
    except CkptError:
        return ""
    age = target.age
    last = list({age(found): found for found in target.checkpoints if found.step is not None}.values())[-2:]
    if len(last) < 2:
        return ""
    if all(target.option(found) for found in last):
        return f"ckpt diff {shell.path(run)} --steps {last[0].step},{last[1].step}, or "
    return f"ckpt diff {' '.join(shell.path(found.path) for found in last)}, or "


def _two(value: object, option: str) -> tuple[object, object]:
    """A value for each side: one for both, or two."""
    if value is None or isinstance(value, (str, int)) or not isinstance(value, Sequence):
        return value, value
    if len(value) not in (1, 2):
        raise UsageError(f"{option} has {plural(len(value), 'value')}", expected=f"one for both, or {PAIR}")
    return value[0], value[-1]


def _check_options(options: DiffOptions, picture: Path | None, page: Path | None) -> None:
    if options.sample is not None and not 0 < options.sample <= 1:
        raise UsageError("--sample is out of range", expected="more than 0% and at most 100%", hint="5% is 0.05")
    if options.jobs is not None and not 1 <= options.jobs <= 256:
        raise UsageError("--jobs is out of range", expected="1 to 256", hint="leave --jobs out, and ckpt chooses")
    if picture is not None:
        check_plot(picture)
    if page is not None:
        check_page(page)
        if page == picture:
            raise UsageError("--plot and --html are the same file", hint="choose another name for one of them")


def _sides(places: tuple[Side, Side], files: Files, options: DiffOptions) -> tuple[list[Opened], list[Note]]:
    """Both sides; two components of a run at the same step, where none was asked for, and warnings about newer steps of which one lacks."""
    two_steps = places[0].path == places[1].path and places[0].step != places[1].step
    try:
        sides = [_opened_step(place, files, options) if two_steps else _opened(place, files, options) for place in places]
    except CkptError as error:
        # What opening proposes is one step, which here would be that of both.
        rest = [part for part in (error.hint or "").split(", or ") if part and "--step" not in part]
        error.hint = _whole_steps(places, files, options) or ", or ".join(rest) or None
        raise
    first, second = (side.found for side in sides)
    if places[0].path != places[1].path or places[0].step is not None or first.step is None or second.step is None:
        return sides, []
    target = sides[0].target
    age = target.age
    if age(first) == age(second):
        return sides, []
    notes = [note for side in sides for note in side.notes if note.code == "step-skipped"]
    passed: dict[Path, str] = {}
    for found in reversed([each for each in _steps(places[0].path) if age(each) <= min(age(first), age(second))][-TRIED:]):
        try:
            common = [_opened(replace(place, step=found.step), files, options) for place in places]
        except CkptError as error:
            passed[found.path] = short_reason(error, found.path)
        else:
            return common, [*notes, *skipped_notes(target, passed)]
    components = " and ".join(side.components[0].name for side in sides)
    both = target.option(first) and target.option(second)
    named = f"--steps {first.step},{second.step}" if both else f"{shell.path(first.path)} and {shell.path(second.path)}"
    hint = f"pass {named} to compare these two"
    raise UsageError(f"no step has both {components} whole", path=places[0].path, expected="two components of one step", hint=hint)


def _steps(run: Path) -> list[Found]:
    """The steps of a run, oldest first, that can be asked for by number."""
    try:
        target = locate(run, None, ())
    except CkptError:
        return []
    known = {found.step: found for found in target.checkpoints if found.step is not None and target.option(found) is not None}
    return list(known.values())


def _whole_steps(places: tuple[Side, Side], files: Files, options: DiffOptions) -> str | None:
    """A hint with steps of one run that can be compared: those that were asked for, where they are whole, and else the newest that are."""
    asked = [place.step for place in places]
    if places[0].path != places[1].path or None in asked or asked[0] == asked[1]:
        return None

    def is_whole(step: int | None, place: Side) -> bool:
        try:
            return bool(_opened(replace(place, step=step), files, options))
        except CkptError:
            return False

    kept = [step if is_whole(step, place) else None for step, place in zip(asked, places, strict=True)]
    # The newer one first: where both are replaced, B is to be the newer.
    for at, place in reversed(list(enumerate(places))):
        if kept[at] is None:
            others = [step for step in (found.step for found in reversed(_steps(place.path))) if step not in (*asked, *kept)][:TRIED]
            kept[at] = next((step for step in others if is_whole(step, place)), None)
    return None if None in kept else f"pass --steps {kept[0]},{kept[1]}, which are whole"


def _opened_step(place: Side, files: Files, options: DiffOptions) -> Opened:
    """One of two steps; an error says which."""
    try:
        return _opened(place, files, options)
    except CkptError as error:
        if place.step is not None and f"step {place.step}" not in error.message:
            error.message = f"step {place.step}: {error.message}"
        raise


def _opened(place: Side, files: Files, options: DiffOptions) -> Opened:
    settings = OpenOptions(shard_order=options.shard_order)
    located = None
    if place.also:
        # All steps together: another node may hold files of one of the two only.
        located = with_step(locate(place.path, None, place.also, steps=place.step is not None), place.step)
    return opened_component(place.path, files, place.type, place.step, None, place.also, settings, located)[0]


def _refuse_itself(sides: Sequence[Opened]) -> None:
    """Raise UsageError if both sides are the same bytes of the same files, under whatever names."""
    first, second = (side.components[0].component.tensors.values() for side in sides)
    if same_bytes(first, second):
        text = f"both are the same weights in the same files, so there is nothing to compare: {_called(sides[0])}"
        raise UsageError(text, path=sides[1].found.path, hint="pass another checkpoint, step or component as one of the two")


def _alike_named(sides: Sequence[Opened], files: Files, options: DiffOptions) -> list[Named]:
    """Both under the names of the hub, or as trained: whichever both have more of."""

    def under(naming: Naming) -> list[Named]:
        settings = OpenOptions(
            names=naming, include=options.include, exclude=options.exclude, shard_order=options.shard_order, allow_unequal_replicas=True
        )
        return [named_tensors(side, None, files, settings, naming) for side in sides]

    found = under(options.names or "hub")
    if options.names is not None or _common(found) == min(len(side.tensors) for side in found):
        return found
    native = under("native")
    return native if _common(native) > _common(found) else found


def _common(named: Sequence[Named]) -> int:
    return len(named[0].tensors.keys() & named[1].tensors.keys())


def _doubts(sides: Sequence[Opened], tensors: Sequence[Mapping[str, Tensor]]) -> list[Note]:
    """A warning about two that are hardly the same model, or compute something else with weights of the same shapes."""
    configs = [side.components[0].assets.config for side in sides]
    alike = resemblance(tensors[1], tensors[0], configs[1], configs[0])
    if not alike.renamed and alike.same_model:
        return [*settings_notes(different_settings(configs[1], configs[0]), "first")]
    numbers = f"{alike.common} of {alike.base} and {alike.mine} tensors have the same name, {alike.alike} also the same shape"
    return [Note("warning", "other-model", f"these may be two models: {numbers}")]


def _rescaled(sides: Sequence[Opened]) -> dict[str, tuple[float, float]]:
    """The modules that the configs of two adapters scale differently, with the factors of both."""
    parts = [side.components[0].component for side in sides]
    if not all(has_adapters(part.tensors) for part in parts):
        return {}
    first, second = (scales(part.root, part.tensors) for part in parts)
    return {module: (first[module], second[module]) for module in sorted(first.keys() & second.keys()) if first[module] != second[module]}


def _scale_notes(rescaled: Mapping[str, tuple[float, float]]) -> list[Note]:
    """A warning about two adapters whose configs scale the same factors differently."""
    if not rescaled:
        return []
    module, (first, second) = next(iter(rescaled.items()))
    values = f"{printable(module)} by {second:.6g}, in the first by {first:.6g}"
    return [Note("warning", "different-scale", f"adapter_config.json scales {plural(len(rescaled), 'module')} differently: {values}")]


def _codes_notes(tensors: Mapping[str, Tensor], comparison: BaseComparison) -> list[Note]:
    """A warning about distances between codes whose scales differ too: they are not those of the weights."""
    fixed = quantised_names(tensors, quantised=False) | coded_floats(tensors)
    drifts = [drift for drift in comparison.drifts if drift.name in fixed and drift.kind == "floating"]
    is_scale = {drift.name: SCALES.fullmatch(drift.name.rpartition(".")[2]) is not None for drift in drifts}
    codes = [name for name, is_one in is_scale.items() if not is_one]
    if not codes or len(codes) == len(drifts):
        return []
    text = f"{few(grouped(codes), 3)}: codes are compared as they are stored, and their scales differ: distances are not those of weights"
    return [Note("warning", "codes-compared", text)]


def _called(side: Opened) -> str:
    """What a side is called in pictures: its folder and, where it is not the main one, its component."""
    component = side.components[0]
    main = side.found.places[0].name
    return str(side.found.path) + (f" ({component.name})" if component.name != main else "")


def _side(side: Opened, tensors: Mapping[str, Tensor]) -> DiffSide:
    return DiffSide(
        path=str(side.found.path),
        step=side.found.step,
        component=side.components[0].name,
        format=side.components[0].component.format,
        tensors=len(tensors),
        elements=sum(tensor.numel for tensor in tensors.values()),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
    )


def _is_identical(found: BaseComparison) -> bool:
    return not (found.missing or found.extra or found.reshaped or found.other_dtype or found.drifts)
