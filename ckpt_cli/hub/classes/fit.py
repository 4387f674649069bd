"""Compares tensors with the model class that a config names: the only basis for reports about names.

The class comes from transformers (names and shapes, `expected_tensors`) or from the shipped names
(`known_names`). If neither knows it, nothing is compared, which is reported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.absent.own_class import comparable, replaced
from ckpt_cli.hub.classes.absent.own_words import own_text
from ckpt_cli.hub.classes.absent.tower_names import as_spelled
from ckpt_cli.hub.classes.computed.recomputed import is_idle
from ckpt_cli.hub.classes.config_counts import has_packed_codes
from ckpt_cli.hub.classes.expected_tensors import Expected, Unasked, expected_tensors
from ckpt_cli.hub.classes.in_memory.apart import heads_apart
from ckpt_cli.hub.classes.in_memory.older_words import todays_words
from ckpt_cli.hub.classes.known_names import ClassNames, class_names, fitting_class
from ckpt_cli.hub.classes.names import native_names, renamed_for_hub
from ckpt_cli.hub.classes.prediction import of_prediction
from ckpt_cli.hub.classes.rules import HubRules, rules_for
from ckpt_cli.hub.classes.shapes.config_numbers import config_numbers
from ckpt_cli.hub.classes.shapes.cut_tensors import Fitting, cut_tensors
from ckpt_cli.hub.classes.shapes.other_cuts import other_cuts
from ckpt_cli.hub.classes.shapes.turned import fitting_turned, misread
from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config, architecture, is_quantised
from ckpt_cli.hub.critics import repaired_class
from ckpt_cli.name_patterns import grouped, pattern_of
from ckpt_cli.names import few, printable

FitNaming = Literal["hub", "native", "older"]
ALL_NAMINGS: tuple[FitNaming, ...] = ("hub", "native", "older")

TRL = "pretrained_model."
"""What TRL's models with a value head put in front of the names of the model inside."""

VALUE_HEAD = re.compile(r"v_head\..*")

HARDLY = 3
"""So many times more tensors have no place in a class, and so many more of its own are missing, where names fit by chance."""


@dataclass(frozen=True, slots=True)
class KnownClass:
    """A model class and its known tensors: all of them with shapes, or names by pattern.

    ``chosen``: the config names no class, and this one of its model type fits the tensors. ``unknown``: why shapes are unknown.
    ``own`` is the class that the config names, where transformers lacks it: ``kind`` is that of its model type which it is compared with.
    """

    kind: str
    known: Expected | ClassNames
    rules: HubRules | None
    config: Config
    chosen: bool = False
    unknown: str = ""
    own: str = ""

    @property
    def origin(self) -> str:
        return self.known.origin

    @property
    def has_shapes(self) -> bool:
        """Whether all tensors are known, with their shapes; otherwise only names by pattern are."""
        return isinstance(self.known, Expected)

    @property
    def namings(self) -> tuple[frozenset[str], ...]:
        """Its names by pattern, in memory and on the hub, where shapes are unknown."""
        return () if isinstance(self.known, Expected) else (self.known.native, self.known.hub)

    def count(self, shapes: Mapping[str, Shape]) -> int:
        """How many of these names the class knows, in memory or on the hub, in this or older versions of transformers."""
        unknown = [name for name in shapes if not self.knows(name)]
        if not unknown or self.rules is None:
            return len(shapes) - len(unknown)
        native = native_names(shapes, self.rules)
        return len(shapes) - sum(not self.knows(native[name]) for name in unknown)

    def knows(self, name: str) -> bool:
        """Whether a tensor of the class has this name, in memory or on the hub."""
        if isinstance(self.known, Expected):
            return name in self.known.native or name in self.known.hub or name in self.known.tied or name in self.known.hub_tied
        pattern = pattern_of(name)[0]
        return pattern in self.known.native or pattern in self.known.hub


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a comparison with a class.

    ``expected`` counts the tensors of the class that a file should have (None: only names by pattern were compared), ``fitting`` how
    many tensors fit. ``missing`` maps names to shapes, and so does ``optional``, of those that loaders make anew without a word;
    ``reshaped`` maps to the shape of the class and the one there is; ``cut`` are those of them whose shapes no other config would
    explain, by the ``proofs`` that others give; ``stand_ins`` maps tensors to those that the class ties them to, where only the first is
    there, ``tied`` those that are stored although the class ties them to others; ``extra`` has no place in the class, ``surplus`` are
    those of it that loaders join with others to a tensor of another shape; ``misread`` are square ones that loaders would have to turn, as
    they do with others of their module, and do not. ``own`` is the class that was compared as ``kind``, where transformers lacks it, and
    ``replaced`` are tensors of ``kind`` in whose place it may have others. Of patterns, ``missing`` and ``optional`` are those that no
    tensor has, with an empty shape.

    Names are those of the class; the file's own differ by a prefix, ending in a dot, if one of these is not empty: ``wrapper`` is
    the prefix that a wrapper (TRL's) adds to the model's names, ``doubles`` the base model's prefix if it is there twice,
    ``lacks`` that prefix if the file has none. With a module of the user's own class that is the model (``within``), they are the file's.
    """

    kind: str
    origin: str
    naming: FitNaming
    fitting: int
    expected: int | None
    missing: Mapping[str, Shape] = field(default_factory=dict)
    reshaped: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    cut: tuple[str, ...] = ()
    proofs: Fitting = field(default_factory=Fitting)
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    surplus: tuple[str, ...] = ()
    wrapper: str = ""
    doubles: str = ""
    lacks: str = ""
    unknown: str = ""
    optional: Mapping[str, Shape] = field(default_factory=dict)
    misread: tuple[str, ...] = ()
    own: str = ""
    replaced: Mapping[str, Shape] = field(default_factory=dict)
    within: str = ""

    @property
    def computing(self) -> dict[str, Shape]:
        """Those of the ``optional`` tensors with which the model computes."""
        return {name: shape for name, shape in self.optional.items() if not is_idle(name, shape)}

    def name_in(self, names: Container[str], name: str) -> str:
        """The name, in a file with these ``names``, of a tensor that the comparison calls ``name``."""
        other = self.wrapper + self.doubles + name.removeprefix(self.lacks)
        return other if other in names else name

    def needing(self, names: Collection[str]) -> Fit:
        """The comparison with ``optional`` tensors of these names counted as ``missing``."""
        needed = {name: shape for name, shape in self.optional.items() if name in names}
        rest = {name: shape for name, shape in self.optional.items() if name not in needed}
        return replace(self, missing={**self.missing, **needed}, optional=rest) if needed else self

    @property
    def is_foreign(self) -> bool:
        """Whether no tensor has a name of the class; one of another shape, and one that is tied to another, has."""
        return not (self.fitting or self.reshaped or self.stand_ins or self.tied)

    @property
    def is_of_others(self) -> bool:
        """Whether hardly any tensor has a name of the class, as ``norm.weight`` or ``lm_head.weight`` do by chance among other names."""
        placed = self.fitting + len(self.reshaped) + len(self.stand_ins) + len(self.tied)
        return placed * HARDLY < min(len(self.missing), len(self.extra))

    @property
    def faults(self) -> int:
        return len(self.missing) + len(self.reshaped) + len(self.extra)


def known_class(config: Config, shapes: Mapping[str, Shape]) -> KnownClass | str:
    """The class of a model, by its config and tensors, or why its tensors are unknown. Custom code is never run.

    A config that names no class means the one of its model type whose tensors fit; that of a critic the class with its head.
    """
    if is_quantised(config):
        return "the config says that weights are quantised: names and shapes depend on the method"
    if has_packed_codes(shapes):
        return "the weights are packed codes of bitsandbytes: names and shapes depend on the method"
    chosen = None
    if config and architecture(config) is None and not config.get("auto_map"):
        chosen = fitting_class(config, shapes)
        config = {**config, "architectures": [chosen]} if chosen is not None else config
    else:
        config = {**config, **repaired_class(config, shapes)}
    named = config
    config = comparable(config, shapes)
    kind, own = architecture(config), (architecture(named) or "") if config is not named else ""
    if not config:
        return "there is no config.json"
    if kind is None:
        return "config.json names no architecture"
    if not isinstance(config.get("model_type"), str):
        return "config.json names no model_type"
    expected = expected_tensors(config)
    rules = rules_for(config)
    shipped = class_names(config) if rules is not None and not config.get("auto_map") else None
    known = shipped if isinstance(expected, str) else expected
    if known is None:
        return expected if isinstance(expected, str) else ""
    known = as_spelled(known, shapes, config.get("model_type"))
    # Where names are known, what a machine lacks to tell more is no fault of the model.
    unknown = str(expected) if isinstance(expected, Unasked) else expected
    return KnownClass(kind, known, rules, config, chosen is not None, unknown if isinstance(unknown, str) else "", own)


def value_heads(names: Iterable[str]) -> list[str]:
    """Those of the names that TRL gives to the tensors of a value head."""
    return [name for name in names if VALUE_HEAD.fullmatch(name)]


def compared(shapes: Mapping[str, Shape], kind: KnownClass, namings: Sequence[FitNaming] = ALL_NAMINGS) -> Fit:
    """Differences to the tensors of a class, under those of the ``namings`` that fit best.

    TRL's prefix is ignored, and its value head has no place in the class.
    """
    heads = value_heads(shapes)
    inner = {name.removeprefix(TRL): shape for name, shape in shapes.items() if name not in heads}
    wrapped = bool(heads) and any(name.startswith(TRL) for name in shapes)
    held = inner if wrapped else dict(shapes)
    fits = [fit for naming in namings for fit in _fits(held, kind, naming)]
    best = min(fits, key=lambda fit: fit.faults)
    if best.reshaped:
        best = replace(best, cut=cut_tensors(best.reshaped, best.proofs, config_numbers(kind.config), best.stand_ins))
    if wrapped:
        best = replace(best, extra=(*best.extra, *heads), wrapper=TRL)
    return _of_own_class(best, shapes, kind) if kind.own else best


def _of_own_class(fit: Fit, shapes: Mapping[str, Shape], kind: KnownClass) -> Fit:
    """The comparison of a class that transformers lacks: what it has of its own may be in place of what the other class has."""
    others = replaced(fit, shapes, kind.known.prefix)
    cut = tuple(name for name in fit.cut if name.startswith(f"{kind.known.prefix}."))  # its head may have any size
    missing = {name: shape for name, shape in fit.missing.items() if name not in others}
    return replace(fit, own=kind.own, replaced=others, missing=missing, cut=cut)


def _fits(shapes: Mapping[str, Shape], kind: KnownClass, naming: FitNaming) -> Iterator[Fit]:
    if naming == "older":
        older = shapes if kind.rules is None else renamed_for_hub(shapes, kind.rules)
        yield from _older_fits(older, kind)
    else:
        yield _fit(shapes, kind, naming)


def _fit(held: Mapping[str, Shape], kind: KnownClass, naming: FitNaming) -> Fit:
    known = kind.known
    if isinstance(known, ClassNames):
        wanted = known.native if naming == "native" else known.hub
        patterns = {name: pattern_of(name)[0] for name in held}
        own = wanted | heads_apart(known.native, kind.rules)
        extra = _without_prediction(
            kind, [name for name, pattern in patterns.items() if pattern not in own and not _matches(known.ignored, name)]
        )
        needed = wanted - set(patterns.values()) - (_tied_patterns(kind, wanted) if ties_embeddings(kind.config) else set())
        lacking: dict[str, Shape] = dict.fromkeys(sorted(needed), ())
        optional = _popped(lacking, known.optional)
        count = len(held) - len(extra)
        return Fit(kind.kind, kind.origin, naming, count, None, lacking, extra=extra, unknown=kind.unknown, optional=optional)
    native = {name: shape for name, shape in known.native.items() if name in held or name not in known.tied}
    shapes = native if naming == "native" else known.hub
    tied = known.tied if naming == "native" else known.hub_tied
    stand_ins = _stand_ins(held, shapes, tied)
    owners = {owner: name for name, owner in stand_ins.items()}
    missing = {name: shape for name, shape in shapes.items() if not {name, tied.get(name), owners.get(name)} & held.keys()}
    optional = _popped(missing, known.optional)
    reshaped = {name: (shape, held[name]) for name, shape in shapes.items() if name in held and held[name] != shape}
    turned = fitting_turned(reshaped, kind.rules)
    fine = other_cuts(reshaped, held, kind.rules) | turned
    reshaped = {name: pair for name, pair in reshaped.items() if name not in fine}
    count = len(shapes) - len(missing) - len(optional) - len(reshaped) - len(stand_ins)
    # A loader that finds a tied tensor beside its owner takes its shape as seriously as that of any other.
    beside = {name: owner for name, owner in tied.items() if name in held and name not in shapes and owner in shapes}
    reshaped |= {name: (shapes[owner], held[name]) for name, owner in beside.items() if held[name] != shapes[owner]}
    stored = {name: owner for name, owner in beside.items() if name not in stand_ins and naming != "native"}
    places = {*shapes, *tied}
    extra = _without_prediction(kind, [name for name in held if name not in places and not _matches(known.ignored, name)])
    return Fit(
        kind.kind,
        kind.origin,
        naming,
        count,
        len(shapes),
        missing,
        reshaped,
        (),
        _proofs_of(held, shapes, stand_ins, (*missing, *optional, *extra)) if reshaped else Fitting(),
        stand_ins,
        stored,
        extra,
        _surplus(kind, extra, shapes),
        optional=optional,
        misread=misread(turned, held, kind.rules),
    )


def _popped(missing: dict[str, Shape], expressions: tuple[str, ...]) -> dict[str, Shape]:
    """What is removed from ``missing``: names that a loader may lack."""
    return {name: missing.pop(name) for name in [name for name in missing if _matches(expressions, name)]}


def _proofs_of(held: Mapping[str, Shape], shapes: Mapping[str, Shape], stand_ins: Mapping[str, str], unmatched: Iterable[str]) -> Fitting:
    """What fits; ``unmatched`` are the names that are missing, or have no place."""
    places = [*((name, name) for name in shapes if name in held), *stand_ins.items()]
    kinds = frozenset((pattern_of(owner)[0], shapes[owner]) for name, owner in places if held[name] == shapes[owner])
    return Fitting(kinds, frozenset({pattern_of(name)[0] for name in held} - {pattern_of(name)[0] for name in unmatched}))


def _without_prediction(kind: KnownClass, extra: Sequence[str]) -> tuple[str, ...]:
    """Names without those of the layers of multi-token prediction that the config counts: no class has a place for them, engines do."""
    counted = set(of_prediction(kind.config, extra)) if extra else set()
    return tuple(name for name in extra if name not in counted or kind.knows(name))


def _surplus(kind: KnownClass, extra: Sequence[str], shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    """Of tensors without a place: elements of a list that the class has, of which loading makes one tensor, beyond its last one."""
    firsts = {name: kind.rules.in_a_list(name) for name in extra} if kind.rules is not None else {}
    return tuple(name for name, first in firsts.items() if first in shapes)


def _stand_ins(held: Mapping[str, Shape], shapes: Mapping[str, Shape], tied: Mapping[str, str]) -> dict[str, str]:
    """Tensors that the class ties to another, which is not there: a loader may take the one for the other."""
    found: dict[str, str] = {}
    for name, owner in tied.items():
        if name in held and owner in shapes and owner not in held:
            found.setdefault(owner, name)
    return {name: owner for owner, name in found.items()}


def needs(kind: KnownClass, name: str) -> bool:
    """Whether a class of which only names by pattern are known has a tensor of this name, and neither ties it nor works without it."""
    tied = kind.rules is not None and ties_embeddings(kind.config)
    untied = not (tied and _tied_patterns(kind, frozenset({pattern_of(name)[0]})))
    return kind.knows(name) and untied and not (_matches(kind.known.optional, name) and is_idle(name, ()))


def _tied_patterns(kind: KnownClass, wanted: frozenset[str]) -> set[str]:
    """Names that may be missing since the class ties them, or may tie them, to others."""
    expressions = kind.rules.tied if kind.rules is not None else {}
    return {name for name in wanted if any(re.fullmatch(target, name.replace("{}", "0")) for target in expressions)}


def _older_fits(shapes: Mapping[str, Shape], kind: KnownClass) -> Iterator[Fit]:
    """Comparisons under other names that loaders of transformers understand: older words, the base model's prefix more or less."""
    words = {name: name if kind.knows(name) else todays_words(name) for name in shapes}
    start = f"{kind.known.prefix}."
    beside = {name for name, new in words.items() if kind.knows(new) and not new.startswith(start)}  # a head, which has no prefix
    for renamed, lacks, doubles in (
        (words, "", ""),
        ({name: new if name in beside else f"{start}{new}" for name, new in words.items()}, start, ""),
        ({name: new.removeprefix(start) for name, new in words.items()}, "", start),
    ):
        if len(set(renamed.values())) == len(shapes):
            fit = _fit({renamed[name]: shape for name, shape in shapes.items()}, kind, "older")
            yield replace(fit, lacks=lacks, doubles=doubles)


def _matches(expressions: tuple[str, ...], name: str) -> bool:
    return any(re.search(expression, name) for expression in expressions)


def usual_but_absent(fit: Fit) -> list[str]:
    """Names by pattern, of a class of which only these are known, that no tensor has; whether it has biases, settings decide."""
    usual = [*(name for name in fit.missing if not name.endswith("bias")), *fit.computing]
    return [name.replace("{}", "*") for name in usual] if fit.expected is None else []


NAMINGS: Mapping[FitNaming, str] = {"hub": "those of the hub", "native": "as the training named them", "older": "those of an older version"}


def doubled(fit: Fit, names: Collection[str]) -> str:
    """What is said of names that have the base model's prefix once too often."""
    count = sum(name.startswith(fit.doubles) for name in names)
    which = "all names begin" if count == len(names) else f"{count} of {len(names)} names begin"
    return f"{which} with {fit.doubles} once too often: transformers corrects that, engines that take names literally do not"


def misread_text(fit: Fit, kind: KnownClass) -> str:
    """What is said of square tensors that loaders take the wrong way round."""
    many = "it is" if len(fit.misread) == 1 else "they are"
    text = (
        f"{few(grouped(fit.misread), 3)} of {printable(kind.kind)}: {kind.origin} turns other tensors of the module, which are stored as "
    )
    return f"{text}older versions have them, and not these, since {many} square: it would compute with the wrong values"


def claim(fit: Fit) -> str:
    """The report about names, in numbers."""
    kind = printable(fit.kind)
    others = "".join(f", {printable(name)} in place of {printable(owner)}" for name, owner in fit.stand_ins.items())
    others += f", {len(fit.extra)} others" if fit.extra else ""
    whose = f"those of TRL, behind {fit.wrapper.removesuffix('.')}" if fit.wrapper else NAMINGS[fit.naming]
    if fit.expected is None:
        known = f"{fit.fitting} of {fit.fitting + len(fit.extra)} are known names of {kind} ({fit.origin})"
        absent = usual_but_absent(fit)
        more = f", which usually has {few(absent, 3)} too" if absent and fit.fitting else ""
        return f"{whose}: {known}{more}{own_text(fit.own, fit.kind)}; neither shapes nor counts were compared: {fit.unknown}"
    whose += f", behind {printable(fit.within)}" if fit.within else ""
    return f"{whose}: {fit.fitting} of {fit.expected} tensors of {kind} ({fit.origin}){others}{own_text(fit.own, fit.kind)}"
