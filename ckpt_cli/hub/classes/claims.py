"""The result of comparing an output with the class of its config: what is reported about its names, and why it is refused.

Decided before anything is written. Missing tensors of the class are an error; all other differences are warnings.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_cli.boxes import Shape, shape_text
from ckpt_cli.errors import Inconsistent, MissingTensors
from ckpt_cli.hub.classes.absent.another_model import another_model, named_otherwise
from ckpt_cli.hub.classes.absent.other_names import flags, under_other_names
from ckpt_cli.hub.classes.absent.own_words import own_text, replaced_text
from ckpt_cli.hub.classes.config_counts import mismatches
from ckpt_cli.hub.classes.expected_tensors import Doubtful
from ckpt_cli.hub.classes.fit import Fit, KnownClass, claim, doubled, misread_text, needs, usual_but_absent
from ckpt_cli.hub.classes.in_memory.shadowed import shadowed_names
from ckpt_cli.hub.classes.prefixes import compared_under
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.layers.later import ADVICE as WHOLE
from ckpt_cli.name_patterns import grouped, pattern_of
from ckpt_cli.names import Naming, few, foreign_names, plural, printable
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

ADVICE = {
    "uneven-layers": "ckpt verify with --base shows whether the base has it",
    "odd-count": "correct config.json",
    "unusual-count": "most loaders fail: correct config.json, unless the model's own code accepts it",
    "odd-setting": "what the model computes depends on it: correct config.json",
    "other-model-type": "loaders choose by model_type: correct config.json",
    "no-scales": "loaders would look for scales: remove quantization_config, if the weights are plain",
    "extra-tensors": "--exclude leaves them out, --key-map renames them",
    "no-layers": WHOLE,
    "extra-layers": "restore config.json from the run",
    "extra-experts": "restore config.json from the run",
    "class-rows": "set num_classes and label_names in config.json to those of the training",
    "vocabulary-rows": "set vocab_size in config.json, or pad or cut the embedding",
    "no-prediction-layers": "speculative decoding needs them: --carry-from-base takes them from the base",
    "unbuildable-config": "loading fails in the same way: correct config.json",
    "unasked-class": "tensors that are lost pass unnoticed: mend that, then run ckpt verify",
    "replaced-tensors": "what loads the model by its model_type makes new ones",
    "tied-alone": "loaders that skip what is tied find neither: rename it with",
    "doubled-prefix": "--key-map renames them",
    "misread-square": "load it with the version of transformers that saved it",
    "lost-head": "other loaders make a new one: --carry-from-base takes it from the base",
    "no-tower": "--carry-from-base takes them from the base",
}
"""What can be done about what is odd; what is carried needs a base with such tensors."""

OTHER_HEAD = "if they were trained, and lm_head was not, --exclude lm_head.weight writes the class that has them into config.json"
"""The same about the head of a classifier beside that of a language model."""


@dataclass(frozen=True, slots=True)
class Claim:
    """``text`` is the report about names.

    ``lacking``: missing tensors (or globs) that a loader needs, and what is known about them; ``shortage`` says so in one sentence, where
    no class says how many there are. ``let_go`` are those that may be missing. ``odd_counts`` of config.json make loaders fail.
    ``optional`` are tensors that are not there, which loaders make anew without a word; nobody left them out on purpose.
    """

    text: str
    fit: Fit | None
    notes: tuple[Note, ...]
    lacking: Mapping[str, str]
    named: str = "the model"
    mixed: tuple[str, ...] = ()
    shortage: str = ""
    let_go: tuple[str, ...] = ()
    odd_counts: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether all tensors of a class were found, in the shapes that it has; but for those that make no difference."""
        fit = self.fit
        return fit is not None and fit.expected is not None and not (fit.missing or fit.reshaped or fit.computing)

    @property
    def computing(self) -> tuple[str, ...]:
        """Those of the ``optional`` tensors with which the model computes."""
        return tuple(name for name in self.optional if self.fit is not None and name in self.fit.computing)


def claim_for(
    shapes: Mapping[str, Shape],
    kind: KnownClass | str,
    naming: Naming,
    config: Config,
    *,
    on_purpose: Collection[str] = (),
    change: str = "",
    beside: Collection[str] = (),
    uncommon: Collection[str] = (),
    told: Collection[str] = (),
) -> Claim:
    """Compare a planned output with the class (``kind``) and with the counts in its config.

    ``change`` says which prefix was removed from names for this, or without a comparison, or added to them. ``on_purpose`` are names that
    filters or a key map left out: they are not lacking. ``uncommon`` are those that --intersect left out, which proves nothing: they are
    lacking where the class has them, also if a loader can do without. ``beside`` are names that the model has of which these are an
    average: they are lacking too, unless the tensors of the class are known. Of those that have no place something is ``told`` already.
    """
    fit = compared_under(shapes, kind, naming) if isinstance(kind, KnownClass) else None
    known, namings = (kind.has_shapes, kind.namings) if isinstance(kind, KnownClass) else (False, ())
    odd = mismatches(config, {**shapes, **dict.fromkeys(on_purpose, ())}, known=known, namings=namings)
    by_config = {glob: item.text for item in odd for glob in item.lacking}
    counted = dict(by_config)
    counts = tuple(item.text for item in odd if item.code == "odd-count")
    notes = [Note("warning", item.code, f"{item.text}; {ADVICE[item.code]}") for item in odd if not item.lacking]
    unknown = kind.unknown if isinstance(kind, KnownClass) else kind
    if isinstance(unknown, Doubtful):
        notes.append(Note("warning", unknown.code, f"{unknown}; {ADVICE[unknown.code]}"))
    absent_beside = [name for name in beside if name not in shapes and name not in on_purpose]
    shortage = f"the model beside it has {few(grouped(absent_beside), 3)}, missing here" if absent_beside else ""
    counted |= dict.fromkeys(absent_beside, "the model beside it has this tensor")
    if not isinstance(kind, KnownClass) or fit is None:
        left_out = [name for name in uncommon if name not in shapes]
        if left_out:
            them = "it" if len(left_out) == 1 else "them"
            text = f"--intersect leaves out {few(grouped(left_out), 3)}, and nothing tells whether the model needs {them}: {kind}"
            notes.append(Note("warning", "left-out-unproved", text))
        text = f"{change or 'as the training named them'}, not compared: {kind}"
        return Claim(text, None, tuple(notes), counted, shortage=shortage, odd_counts=counts)
    if naming == "native" and (fit.is_foreign or fit.is_of_others):
        text = f"as the training named them: {named_otherwise(fit, len(shapes))} ({kind.origin})"
        fit = replace(fit, reshaped={}, cut=(), surplus=())  # what has a name of the class by chance says nothing about shapes
        return Claim(text, fit, (*notes, Note("warning", "native-names", f"names are {text}")), {}, printable(kind.kind), odd_counts=counts)
    fit = fit.needing([name for name in fit.computing if name in uncommon])
    absent = {name: shape for name, shape in fit.missing.items() if name not in on_purpose}
    optional = tuple(name for name in fit.optional if name not in on_purpose and not fit.is_foreign and kind.has_shapes)
    if not kind.has_shapes:
        left_out = [name for name in uncommon if name not in shapes and needs(kind, name)]
        counted |= dict.fromkeys(left_out, "--intersect leaves it out, and the class has it")
        notes += () if fit.is_foreign else _unproved([name for name in usual_but_absent(fit) if name not in on_purpose], kind)
        lacking = counted if not fit.is_foreign else {**counted, "*": f"none of the names is one of {printable(kind.kind)}"}
    else:
        lacking = {name: shape_text(shape) for name, shape in absent.items()} | by_config
    notes += _different_shapes(fit, kind)
    if fit.replaced:
        notes.append(Note("warning", "replaced-tensors", replaced_text(fit.own, fit.kind, list(fit.replaced))))
    if fit.misread:
        notes.append(Note("warning", "misread-square", f"{misread_text(fit, kind)}; {ADVICE['misread-square']}"))
    if fit.doubles:
        notes.append(Note("warning", "doubled-prefix", f"{doubled(fit, shapes)}; {ADVICE['doubled-prefix']}"))
    for name, owner in fit.stand_ins.items():
        text = f"{printable(name)} and {printable(owner)} are tied, and only the first is there: transformers takes it for both"
        notes.append(Note("warning", "tied-alone", f"{text}; {ADVICE['tied-alone']} --key-map '{printable(name)}={printable(owner)}'"))
    mixed = tuple(name for name in fit.extra if kind.knows(name))
    patterns = {pattern_of(name)[0] for name in (*kind.known.hub, *kind.known.native)}
    beyond = [name for name in fit.extra if name not in mixed and fit.expected is not None and pattern_of(name)[0] in patterns]
    if beyond:
        text = (
            f"{plural(len(beyond), 'tensor is', 'tensors are')} of layers or experts beyond those of config.json: {few(grouped(beyond), 3)}"
        )
        notes.append(Note("warning", "extra-layers", f"{text}; {ADVICE['extra-layers']}"))
    shadowed = tuple(name for name in shadowed_names(kind, shapes) if name in fit.extra)  # no loader ignores these
    known_of = tuple(name for name in fit.extra if fit.name_in(shapes, name) in told)
    fit = replace(fit, extra=tuple(name for name in fit.extra if name not in {*mixed, *beyond, *shadowed, *known_of}))
    foreign = fit.extra if len(fit.extra) <= len(shapes) // 2 or not fit.is_foreign else ()
    if foreign:
        kinds = few(grouped(foreign))
        if kind.own:
            text = f"{plural(len(foreign), 'tensor is', 'tensors are')} of {printable(kind.own)} itself: {kinds}"
            notes.append(Note("info", "own-tensors", f"{text}; {printable(kind.kind)}, of its model type, has no place for them"))
        elif not kind.has_shapes:
            text = f"{plural(len(foreign), 'name is', 'names are')} not among those known for {printable(kind.kind)}: {kinds}"
            notes.append(Note("warning", "unknown-names", f"{text}; they were not compared: {kind.unknown}"))
        else:
            said = plural(len(foreign), "tensor has", "tensors have")
            text = f"{said} no place in {printable(kind.kind)}, whose loader ignores them: {kinds}"
            trained = [name for name in foreign if name in ("score.weight", "score.bias")]
            advice = OTHER_HEAD if trained and len(trained) == len(foreign) and "lm_head.weight" in shapes else ADVICE["extra-tensors"]
            notes.append(Note("warning", "extra-tensors", f"{text}; {advice}"))
    done = f", {change}" if change else ""
    text = f"{claim(fit)}{done}{', the class of its model type that fits' if kind.chosen else ''}"
    fit = replace(fit, extra=(*fit.extra, *mixed, *beyond, *shadowed, *known_of))
    shortage = "" if kind.has_shapes else shortage
    return Claim(text, fit, tuple(notes), lacking, printable(kind.kind), mixed, shortage, odd_counts=counts, optional=optional)


def without_allowed(made: Claim, allowed: Sequence[str]) -> Claim:
    """A claim in which tensors that match ``allowed`` (globs) are no longer lacking, but noted."""
    if not allowed:
        return made
    absent = (*made.lacking, *made.optional)
    let_go = [name for name in absent if any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)]
    others = () if made.lacking or made.fit is None or not made.fit.is_of_others else made.fit.missing  # nothing of it is asked for
    unused = [pattern for pattern in allowed if not any(fnmatch.fnmatchcase(name, pattern) for name in (*absent, *others))]
    notes = [Note("warning", "unused-pattern", f"--allow-missing {printable(p)} matches no missing tensor") for p in unused]
    if let_go:
        text = f"missing, as --allow-missing permits: {few(grouped(let_go))} of {made.named}"
        notes.append(Note("warning", "missing-allowed", text))
    lacking = {name: what for name, what in made.lacking.items() if name not in let_go}
    optional = tuple(name for name in made.optional if name not in let_go)
    return replace(made, notes=(*made.notes, *notes), lacking=lacking, let_go=tuple(let_go), optional=optional)


def refuse_lacking(
    made: Claim,
    names: Mapping[str, Shape],
    base: Mapping[str, Tensor] | None,
    naming: Naming,
    uncommon: Collection[str] = (),
    trained: Collection[str] = (),
) -> None:
    """Raise MissingTensors if tensors that a loader needs are missing, Inconsistent if some are not whole or most have other shapes.

    ``base`` are the tensors that could be taken from the base, ``uncommon`` those that --intersect left out, ``trained`` the names that
    a key map would see.
    """
    if made.mixed:
        many = plural(len(made.mixed), "tensor has its name", "tensors have their names")
        fused = [name for name in made.mixed if _beside_single_experts(name, names)]
        whole = made.fit is not None and not made.lacking and not made.fit.reshaped
        others = _globs(list(made.mixed), [name for name in names if name not in made.mixed])
        raise Inconsistent(
            f"{many} in memory, the others have those of the hub, of {made.named}: {few(grouped(made.mixed), 3)}",
            tensor=made.mixed[0],
            expected="fused or single experts, as no loader accepts both" if fused else "the names of the hub, or those in memory",
            hint=f"without these the model is whole: {flags('--exclude', others)} leaves them out" if whole else None,
        )
    if made.fit is not None and len(made.fit.reshaped) > made.fit.fitting:
        (name, (wanted, held)) = next(iter(made.fit.reshaped.items()))
        raise Inconsistent(
            f"config.json is for another model: {len(made.fit.reshaped)} of {made.fit.expected} tensors have other shapes than it says",
            tensor=name,
            expected=f"{shape_text(wanted)} by config.json ({made.named}); the checkpoint has {shape_text(held)}",
            hint="replace it with the config.json of this model; if it came from --base, pass the model that training started from",
        )
    _refuse_cut(made, names, base)
    _refuse_surplus(made, names)
    if not made.lacking:
        return
    absent = grouped(list(made.lacking))
    foreign = foreign_names(names)
    globs = _globs(list(made.lacking), names)
    said = "" if _of_class(made) else _counted(made, absent)
    details = [name if what == said else f"{name}: {what}" for name, what in made.lacking.items()] if len(made.lacking) > 1 else []
    own = f"these are names of {foreign}: " if foreign else ""
    message, elsewhere = _counted(made, absent), under_other_names(made.fit, made.lacking, names, trained)
    if made.fit is not None and made.fit.is_foreign:
        hint = f"{own}rename them with --key-map, or pass --names native to keep them as they are"
        message = f"no tensor has a name of {made.named}"
        details = [f"in the checkpoint: {few(list(names), 3)}", f"in {made.named}: {few(list(made.fit.missing), 3)}"]
    elif made.lacking.keys() <= set(uncommon):
        hint = f"average checkpoints that all have them alike; {flags('--allow-missing', globs)} writes the folder without them"
    elif made.fit is not None and made.fit.is_of_others and not elsewhere.places_all:
        # A base has all that is missing, untrained: what was trained is here under other names, or is another model.
        other = another_model(made.fit, names) if _of_class(made) and not foreign else ""
        hint = elsewhere.hint or other if not foreign else ""
        hint = hint or f"{own}rename them with --key-map"
    else:
        # What was trained is never taken from the base, where it is not.
        left = [name for name in made.lacking if name not in elsewhere.there]
        globs, more = _globs(left, [*names, *elsewhere.there]), ""
        if left and all(base is not None and _in(base, name) for name in left):
            which = "the others" if elsewhere.there else "them"
            more = f"the base has {which}: pass {flags('--carry-from-base', globs)} to take them from there"
            if not _of_class(made):
                more = f"{more}; {flags('--allow-missing', globs)} writes the folder without them"
        elif left:
            more = f"{flags('--allow-missing', globs)} writes the folder without them"
            if base is None:
                more = f"--base DIR with {flags('--carry-from-base', globs)} takes them from the base model; {more}"
        another = "" if elsewhere.hint or not _of_class(made) else another_model(made.fit, names)
        more = f"{another}; if not, {more}" if another and more else another or more
        hint = elsewhere.hint if elsewhere.are_all else "; ".join(filter(None, (elsewhere.hint, more)))
    raise MissingTensors(
        message,
        details=details,
        expected=f"{made.fit.expected} tensors of {made.named} ({made.fit.origin}){own_text(made.fit.own, made.fit.kind)}"
        if made.fit and _of_class(made)
        else None,
        hint=hint,
    )


def _beside_single_experts(name: str, names: Collection[str]) -> bool:
    """Whether a tensor of fused experts has numbered ones beside it."""
    stack, found, rest = name.rpartition("experts.")
    single = re.compile(rf"{re.escape(stack + found)}[0-9]+\.")
    return bool(found) and not rest.split(".")[0].isdigit() and any(map(single.match, names))


def _counted(made: Claim, absent: Sequence[str]) -> str:
    of_class = _of_class(made)
    if made.fit is None or not of_class:
        return made.shortage or next(iter(made.lacking.values()))
    which = f": {absent[0]}" if len(absent) == 1 else ""
    return f"{len(of_class)} of the {made.fit.expected} tensors of {made.named} {'is' if len(of_class) == 1 else 'are'} missing{which}"


def _of_class(made: Claim) -> list[str]:
    """What is lacking of a class whose tensors are known; the rest is what the config counts beside them."""
    return [] if made.fit is None or made.fit.expected is None else [name for name in made.lacking if name in made.fit.missing]


def _globs(absent: Sequence[str], there: Collection[str]) -> list[str]:
    """Globs for missing names: each begins like no existing name, or is one name with its numbers open."""
    patterns = {pattern_of(name)[0].replace("{}", "*") for name in absent}
    if len(absent) == 1 or len(patterns) == 1:
        return [absent[0] if len(absent) == 1 else patterns.pop()]
    taken = {prefix for name in there for prefix in _prefixes(name)}
    chosen: list[str] = []
    for name in absent:
        free = next((prefix for prefix in _prefixes(name) if prefix not in taken), None)
        chosen.append(name if free is None else f"{free}.*")
    return list(dict.fromkeys(chosen))


def _prefixes(name: str) -> Iterator[str]:
    """The prefixes of a name, up to each of its dots, the shortest first."""
    return itertools.accumulate(name.split(".")[:-1], lambda whole, part: f"{whole}.{part}")


def _in(base: Collection[str], name: str) -> bool:
    return name in base or ("*" in name and any(fnmatch.fnmatchcase(other, name) for other in base))


def _unproved(wanted: Sequence[str], kind: KnownClass) -> list[Note]:
    """Names by pattern that no tensor has. The shipped names come from one config, so this proves nothing."""
    if not wanted:
        return []
    text = f"{printable(kind.kind)} usually has tensors that are not here: {few(wanted)}; this is not proved: {kind.unknown}"
    return [Note("warning", "missing-kinds", text)]


def _different_shapes(fit: Fit, kind: KnownClass) -> Iterator[Note]:
    if fit.reshaped:
        (name, (wanted, held)), *others = fit.reshaped.items()
        more = f" ({plural(len(others), 'more tensor differs', 'more tensors differ')})" if others else ""
        text = f"{printable(name)} is {shape_text(held)}, but {printable(kind.kind)} with this config.json has {shape_text(wanted)}{more}"
        yield Note("warning", "other-shapes", f"{text}: loading fails, unless the run has another config.json")


def _refuse_surplus(made: Claim, names: Mapping[str, Shape]) -> None:
    """Raise Inconsistent for experts too many, which loaders join with the others, where what is beside them fits config.json."""
    fit = made.fit
    if fit is None:
        return
    many = [name for name in fit.surplus if not any(other.startswith(name.rpartition("experts.")[0]) for other in fit.reshaped)]
    if not many:
        return
    globs = _globs(many, [name for name in names if name not in many])
    if any(fnmatch.fnmatchcase(name, glob) for glob in globs for name in names if name not in many):
        globs = many
    whole = not made.lacking and not fit.reshaped
    raise Inconsistent(
        f"{plural(len(many), 'tensor is', 'tensors are')} of experts beyond those of config.json: {few(grouped(many), 3)}",
        tensor=many[0],
        expected=f"the experts that config.json counts ({made.named}): loaders make one tensor of all, and refuse one of another shape",
        hint=f"without these the model is whole: {flags('--exclude', globs)} leaves them out" if whole else None,
    )


def _refuse_cut(made: Claim, names: Mapping[str, Shape], base: Mapping[str, Tensor] | None) -> None:
    """Raise Inconsistent for tensors that have other shapes than the class and no config would explain, unless the base has them so."""
    fit = made.fit
    if fit is None:
        return
    cut = [name for name in fit.cut if not (base is not None and name in base and base[name].shape == fit.reshaped[name][1])]
    if not cut:
        return
    lines = [f"{name}: {shape_text(held)}, expected {shape_text(wanted)}" for name in cut for wanted, held in [fit.reshaped[name]]]
    wanted, held = fit.reshaped[cut[0]]
    there = [fit.name_in(names, name) for name in cut]
    globs = list(dict.fromkeys(pattern_of(name)[0].replace("{}", "*") for name in there))
    more = any(fnmatch.fnmatchcase(name, glob) for glob in globs for name in names if name not in there)
    excluding = flags("--exclude", there if more else globs)
    shape = "another shape" if len(cut) == 1 else "other shapes"
    grown = any(own > asked for name in cut for asked, own in zip(*fit.reshaped[name], strict=False))
    what = "unlike the others" if grown else "not whole"
    hint = "get it whole: it may have been cut, or be the part of one rank"
    if grown:
        hint = "it may be of another model, or have been cut or resized alone"
    raise Inconsistent(
        f"{plural(len(cut), 'tensor is', 'tensors are')} {what}: other tensors fit config.json, which asks for {shape} of "
        f"{few(grouped(cut), 3)}",
        tensor=there[0],
        expected=f"{shape_text(wanted)} by config.json ({made.named}); the checkpoint has {shape_text(held)}",
        hint="; ".join(filter(None, (f"{hint}; {excluding} leaves it out", another_model(fit, names) if _of_class(made) else ""))),
        details=lines if len(lines) > 1 else (),
    )
