"""Merging the training state of all ranks: one scheduler, random states by rank, counters, files copied unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_cli.discover.counters import (
    SCHEDULERS,
    STEPS,
    counter_of,
    disagreement,
    foreign_step,
    natural,
    nodes_disagree,
    scheduler_step,
    step_note,
    trainer_step,
    two_steps_notes,
)
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.discover.optimizers.mixed_saves import mixed_notes
from ckpt_cli.discover.state_files import StateFile, find_state_files, unknown_notes
from ckpt_cli.errors import CorruptFile, reading
from ckpt_cli.files.folders import is_folder
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import Files, read_small
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.ages import age_notes
from ckpt_cli.formats.registry import format_of
from ckpt_cli.formats.step_names import counts_other
from ckpt_cli.names import few
from ckpt_cli.state.agreement.random_states import form_notes
from ckpt_cli.state.before import notes_of_before
from ckpt_cli.state.ranks import checked_ranks, counted_ranks
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.plain_values import MAX_DEPTH, TensorValue, Unrepresented, ValueReader, equal, unrepresented

RANDOMS = ("rng", "rng_state", "rng_states", "torch_rng_state")
RANDOM_NAMES = {
    "cpu": ("cpu", "torch", "torch_manual_seed", "torch_rng_state"),
    "numpy": ("numpy", "numpy_random_seed", "np_rng_state"),
    "random": ("random", "python", "random_state", "random_rng_state"),
    "cuda": ("cuda", "torch_cuda_manual_seed", "cuda_rng_state"),
    "npu": ("npu", "torch_npu_manual_seed"),
    "xpu": ("xpu", "torch_xpu_manual_seed"),
    "musa": ("musa", "torch_musa_manual_seed"),
    "hpu": ("hpu", "torch_hpu_manual_seed"),
    "mlu": ("mlu", "torch_mlu_manual_seed"),
}
"""Name in the result -> what trainers call it. All but the first three are devices, of which every rank has one."""

DEVICES = tuple(RANDOM_NAMES)[3:]
DATALOADERS = ("dataloader", "train_dataloader", "data_loader")
EPOCHS = ("epoch", "current_epoch")
OF_KINDS = {"random": "random state", "scheduler": "scheduler", "scaler": "scaler"}
WITH_WEIGHTS, AS_SAVED = "_with_weights", "_as_saved"
"""What is put behind the names of values that another one has the name of."""

COUNTING = ("train_state", "trainer_state", "progress", "timestamp")
"""Keys under which trainers keep counters, besides the top level. Configs are not state."""


@dataclass(slots=True)
class TrainingState:
    """What was found. ``extra`` is for `torch.load`, ``training`` for people and programs that read JSON.

    ``scheduler`` is None if there is none; ``copies`` are files to pass on (name -> path); ``dataloader`` is a state of
    dataloaders that lay among other things; ``sources`` are the files that were read, ``of_ranks`` those of them, and of the copied ones,
    that several ranks wrote.
    """

    extra: dict[str, Any] = field(default_factory=dict)
    scheduler: Any = None
    training: dict[str, Any] = field(default_factory=dict)
    dataloader: Any = None
    copies: dict[str, Path] = field(default_factory=dict)
    sources: list[Path] = field(default_factory=list)
    of_ranks: list[Path] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    ranks: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.extra or self.scheduler is not None or self.dataloader is not None or self.copies or self.sources)


def read_state(found: Found, place: Place, files: Files, *, optimizer: bool = False) -> TrainingState:
    """The training state of one component of a checkpoint; ``optimizer``: an optimizer that the step before has is missed, too.

    Raises CorruptFile for state files that cannot be read, MixedWorldSizes for files of two saves.
    """
    state = TrainingState()
    homes = [place.home, *place.more_homes, found.path]
    homes += [root for root in (place.match.root, *place.match.more_roots) if is_folder(root)]
    listed = find_state_files(homes)
    by_rank: dict[int, dict[str, Any]] = {}
    shared: dict[str, Any] = {}
    randoms: dict[int, Any] = {}
    schedulers: dict[int, tuple[Path, Any]] = {}
    for file in listed:
        if file.kind == "copied":
            state.copies[file.copy_name] = file.path
        elif file.kind == "json":
            files.watch(file.path)
            _add_json(file.path, state)
        else:
            value = _read(file, files, state)
            if file.kind == "random":
                _check_twin(file, value, randoms.setdefault(file.rank or 0, value), state)
            elif file.kind == "scheduler":
                _check_twin(file, value, schedulers.setdefault(file.number, (file.path, value))[1], state)
            elif file.kind == "scaler":
                _check_twin(file, value, shared.setdefault(file.path.stem, value), state)
            elif not isinstance(value, dict):
                _lose(state, "", "not a dict of states", file.path)
                state.copies[file.copy_name] = file.path
            else:
                target = shared if file.rank is None else by_rank.setdefault(file.rank, {})
                target.update((str(key), item) for key, item in value.items())
    known = format_of(place.match)
    state.notes += known.doubts(place.match, files)
    by_format = known.training_states(place.match, files)
    read = {path for own in by_format.values() for path in own.sources.values()}
    state.notes += unknown_notes(homes, {*place.match.files, *read})
    for rank, own in by_format.items():
        for name, value in own.values.items():
            by_rank.setdefault(rank, {})[name] = value
            state.sources.append(own.sources[name])
            state.of_ranks.append(own.sources[name])
            for inner, what in unrepresented(value):
                _lose(state, f"{name}.{inner}" if inner else name, what, own.sources[name])
    state.of_ranks += [file.path for file in listed if file.rank is not None]
    state.notes += age_notes([files.source(path) for path in state.of_ranks])
    inside, where = known.training_state(place.match, files)
    for name, what in unrepresented(inside):
        _lose(state, name, what, where)
    if inside:
        state.sources.append(where)
    shared = _united(inside, shared, where, state)
    _number_schedulers(schedulers, place.match.number, shared, state)
    counted = counted_ranks(place, homes, listed, len(by_format), files)
    state.ranks, notes = checked_ranks(listed, {*by_rank, *randoms}, counted, told=bool(by_format))
    state.notes += notes
    _check_steps(by_rank, homes, state)
    state.notes += notes_of_before(found, place, homes, optimizer=optimizer)
    _merge_schedulers(by_rank, shared, state)
    _merge_randoms(by_rank, shared, randoms, state)
    _merge_rest(by_rank, shared, state)
    _describe(found, state)
    # Another model's scheduler may count in another way than the first, which the other folders are asked for.
    stands = scheduler_step(state.scheduler) if not place.match.number else None
    foreign = foreign_step(found, place, stands, files) if stands is not None else None
    if not any(note.code == "step-differs" for note in state.notes):
        state.notes += mixed_notes(found, place, files) or ([Note("warning", "step-differs", foreign)] if foreign is not None else [])
    return state


# -- reading ---------------------------------------------------------------------------------------------------------


def _read(file: StateFile, files: Files, state: TrainingState) -> Any:
    torch_file = TorchFile(files.source(file.path))
    state.sources.append(file.path)
    with reading(file.path):
        value = ValueReader(torch_file).read(torch_file.root)
    lost = list(unrepresented(value))
    for name, what in lost:
        _lose(state, name, what, file.path)
    if lost:
        state.copies[file.copy_name] = file.path
    return value


def _check_twin(file: StateFile, value: Any, held: Any, state: TrainingState) -> None:
    """A second file of the same state, as two programs leave in one folder, is passed on as it is: which is right nothing tells."""
    if value is not held and not equal(value, held):
        state.copies[file.copy_name] = file.path
        text = f"{file.path.name} is another {OF_KINDS[file.kind]} than the one that was read first: it is passed on as it is"
        state.notes.append(Note("info" if file.kind == "random" else "warning", "second-state", text))


def _united(inside: Mapping[str, Any], shared: Mapping[str, Any], where: Path, state: TrainingState) -> dict[str, Any]:
    """What lies with the weights and in files beside them, each under its name; of two values of one name both are kept."""
    kept = {**inside, **shared}
    for name in (name for name in inside.keys() & shared.keys() if not equal(inside[name], shared[name])):
        kept[f"{name}{WITH_WEIGHTS}"] = inside[name]
        text = f"{name} of {where.name} is another than that of the files beside it: it is kept as {name}{WITH_WEIGHTS}"
        state.notes.append(Note("warning", "second-state", text))
    return kept


def _lose(state: TrainingState, name: str, what: str, where: Path) -> None:
    state.lost.append(f"{name or 'the whole file'} in {where.name}: {what}")


def _add_json(path: Path, state: TrainingState) -> None:
    with reading(path):
        content = parse_json(read_small(path))
    if _depth(content) > MAX_DEPTH:
        raise CorruptFile("the file is nested too deeply", path=path, expected="what trainers write")
    if path.name == "trainer_state.json":
        state.training["trainer_state"] = content
    elif isinstance(content, dict) and (path.stem != "metadata" or "train_steps" in content):
        state.training[path.stem] = content
    else:
        return
    state.sources.append(path)


def _depth(content: Any) -> int:
    """The nesting depth of lists and dicts, counted up to one more than is accepted."""
    level, depth = [content], 0
    while level and depth <= MAX_DEPTH:
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
            if isinstance(inner, (dict, list))
        ]
        depth += 1
    return depth


def _check_steps(by_rank: Mapping[int, dict[str, Any]], homes: Sequence[Path], state: TrainingState) -> None:
    """Ranks whose states are from different steps: a node's folder of an older save was joined, or copied over this one."""
    counters = {rank: number for rank, values in sorted(by_rank.items()) if (number := counter_of(values)) is not None}
    text = disagreement(counters, max(counters) + 1 if counters else 0) or nodes_disagree(homes)
    if text is not None:
        state.notes.append(Note("warning", "ranks-of-steps", text))


# -- merging ---------------------------------------------------------------------------------------------------------


def _merge_schedulers(by_rank: Mapping[int, dict[str, Any]], shared: dict[str, Any], state: TrainingState) -> None:
    held = {}
    for rank, values in by_rank.items():
        name = next((name for name in SCHEDULERS if values.get(name) is not None), None)
        if name is not None:
            held[rank] = values.pop(name)
    _note_lacking("scheduler", held, by_rank, state)
    name = next((name for name in SCHEDULERS if shared.get(name) is not None), None)
    if name is not None:
        held.setdefault(-1, _single(shared.pop(name)))
    if not held:
        return
    first = min(held)
    state.scheduler = held[first]
    state.extra["lr_scheduler"] = state.scheduler
    different = [rank for rank in sorted(held) if not equal(held[rank], state.scheduler)]
    if different:
        text = f"the schedulers of ranks {few([str(rank) for rank in different])} differ from that of rank {first}, which was used"
        state.notes.append(Note("warning", "scheduler-differs", text))


def _note_lacking(what: str, held: Mapping[int, Any], by_rank: Mapping[int, Any], state: TrainingState) -> None:
    """Some ranks have a part of the state that others lack."""
    lacking = [str(rank) for rank in sorted(by_rank) if rank not in held]
    if held and lacking:
        text = f"{'rank' if len(lacking) == 1 else 'ranks'} {few(lacking)} saved no {what}, others did"
        state.notes.append(Note("warning", "missing-part", text))


def _number_schedulers(schedulers: dict[int, tuple[Path, Any]], number: int, shared: dict[str, Any], state: TrainingState) -> None:
    """Of several schedulers of one save, that with the number of the model is its scheduler; the others keep names of their own."""
    own = schedulers.pop(number, None)
    if own is not None:
        shared.setdefault("lr_scheduler", own[1])
    shared |= {f"scheduler_{other}": value for other, (_, value) in schedulers.items()}
    if schedulers:
        files = few([path.name for path, _ in schedulers.values()], 3)
        text = f"{files}: kept as {few([f'scheduler_{other}' for other in schedulers], 3)}"
        text += f", beside {own[0].name} as lr_scheduler" if own is not None else f"; none has the number of this component ({number})"
        state.notes.append(Note("info" if own is not None else "warning", "other-schedulers", text))


def _single(value: Any) -> Any:
    """The scheduler of a list with one of them."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _merge_randoms(by_rank: Mapping[int, dict[str, Any]], shared: dict[str, Any], randoms: dict[int, Any], state: TrainingState) -> None:
    for rank, values in by_rank.items():
        for name in (name for name in RANDOMS if name in values):
            _take(randoms, {rank: values[name] if isinstance(values[name], dict) else {name: values[name]}}, values, name)
    _note_lacking("random state", randoms, by_rank, state)
    for name in (name for name in RANDOMS if name in shared):
        value = shared[name]
        alone = {} if value is None else {0: value if isinstance(value, dict) else {name: value}}
        _take(randoms, dict(enumerate(value)) if isinstance(value, list) else alone, shared, name)
    if not randoms:
        return
    state.ranks = max(state.ranks, max(randoms) + 1)
    state.notes += form_notes(randoms)
    merged: dict[str, Any] = {}
    first = randoms[min(randoms)]
    for name, aliases in RANDOM_NAMES.items():
        if name in DEVICES:
            states = [_device_state(randoms.get(rank), aliases, rank) for rank in range(state.ranks)]
            if any(value is not None for value in states):
                merged[name] = states
        else:
            value = _aliased(first, aliases)
            if value is not None:
                merged[name] = value
    if merged:
        state.extra["rng"] = merged
    state.extra |= {f"rng_rank_{rank}": randoms[rank] for rank in sorted(randoms)}


def _take(randoms: dict[int, Any], own: Mapping[int, Any], values: dict[str, Any], name: str) -> None:
    """Have the random states of ranks among all, and not among other ``values``. Of a rank that has another one already, it stays there."""
    if all(equal(randoms.setdefault(rank, value), value) for rank, value in own.items()):
        del values[name]


def _aliased(values: Any, aliases: Sequence[str]) -> Any:
    return next((values[name] for name in aliases if values.get(name) is not None), None) if isinstance(values, dict) else None


def _device_state(values: Any, aliases: Sequence[str], rank: int) -> Any:
    """A rank's state of its own device; some trainers save those of all devices that the rank could see."""
    value = _aliased(values, aliases)
    return value[rank % len(value)] if isinstance(value, (list, tuple)) and value else value


def _merge_rest(by_rank: Mapping[int, dict[str, Any]], shared: Mapping[str, Any], state: TrainingState) -> None:
    loaders: dict[str, Any] = {}
    for name, value in shared.items():
        if name in DATALOADERS:
            loaders[name] = value
        else:
            # What is made of random states and schedulers has names of ours.
            state.extra[name if name not in state.extra else f"{name}{AS_SAVED}"] = value
    ranks = sorted(by_rank)
    for name in dict.fromkeys(name for rank in ranks for name in by_rank[rank]):
        held = {rank: by_rank[rank][name] for rank in ranks if name in by_rank[rank]}
        if name in DATALOADERS:
            loaders |= {f"{name}_rank_{rank}": value for rank, value in held.items()}
            continue
        first = state.extra.setdefault(name, held[min(held)])
        if any(not equal(value, first) for value in held.values()):
            state.extra |= {f"{name}_rank_{rank}": value for rank, value in held.items()}
            if name != "rank":
                own = equal(first, held[min(held)])
                differs = (
                    f"differs between ranks: {name} is that of rank {min(held)}" if own else "of ranks is another than what they share"
                )
                text = f"{name} {differs}, all are {name}_rank_R"
                state.notes.append(Note("info", "ranks-differ", text))
    if loaders:
        state.dataloader = loaders


def _describe(found: Found, state: TrainingState) -> None:
    """``training``: step, epoch, learning rates and counters, gathered from wherever they are."""
    places: list[Mapping[str, Any]] = [value for value in state.training.values() if isinstance(value, dict)]
    places += [state.extra, *(state.extra[name] for name in COUNTING if isinstance(state.extra.get(name), dict))]
    said = _number(places, STEPS)
    step = found.step if found.step is not None and counts_other(found.numbered_at) is None else said
    if said is not None and found.step is not None and said != found.step:
        state.notes.append(step_note(found, said))
    if found.step is None and (saved := natural(state.extra.get("global_steps"))) is not None:
        state.notes += two_steps_notes(trainer_step(found.numbered_at), [saved])
    rates = state.scheduler.get("_last_lr") if isinstance(state.scheduler, dict) else None
    counters = {name: number for name, value in state.extra.items() if (number := _as_number(value)) is not None}
    state.training = {"step": step, "epoch": _number(places, EPOCHS), "lr": rates, "counters": counters, **state.training}


def _number(places: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    numbers = (_as_number(place.get(name)) for place in places for name in names)
    return next((number for number in numbers if number is not None), None)


def _as_number(value: Any) -> int | float | None:
    if isinstance(value, TensorValue) and value.shape == () and value.dtype.kind in ("int", "float"):
        value = value.numbers()[0]
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def without_unrepresented(value: Any) -> Any:
    """A value for loading: entries of dicts that could not be represented are left out, items of lists become None."""
    if isinstance(value, Unrepresented):
        return None
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not isinstance(item, Unrepresented) and not isinstance(key, Unrepresented)}
        return {key: without_unrepresented(item) for key, item in kept.items()}
    return type(value)(without_unrepresented(item) for item in value) if isinstance(value, (list, tuple)) else value
