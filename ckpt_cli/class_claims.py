"""What an output may say about its names, and why it is refused: the outcome of comparing it with the class of its config.

Decided before anything is written. Tensors that the class needs and nobody has are an error; whatever else differs is a warning.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_cli.class_fit import Fit, KnownClass, claim, compared
from ckpt_cli.config_counts import Mismatch, mismatches
from ckpt_cli.errors import MissingTensors
from ckpt_cli.findings import shape_text
from ckpt_cli.formats.base import Naming
from ckpt_cli.geometry import Shape
from ckpt_cli.model import Note
from ckpt_cli.model_config import Config
from ckpt_cli.names import few, foreign_names, printable
from ckpt_cli.patterns import pattern_of, ranged
from ckpt_cli.report import ClassComparison

ADVICE = {
    "extra-tensors": "--exclude leaves them out, --key-map renames them",
    "extra-layers": "restore config.json from the run",
    "extra-experts": "restore config.json from the run",
    "vocabulary-rows": "set vocab_size in config.json, or pad or cut the embedding",
    "no-prediction-layers": "speculative decoding needs them: --carry-from-base takes them from the base",
    "no-tower": "--carry-from-base takes them from the base",
}
"""What can be done about what is odd; the last two need a base with such tensors."""


@dataclass(frozen=True, slots=True)
class Claim:
    """``text`` is all that is said of names. ``lacking``: tensors (or globs) that a loader needs, and what is known of them."""

    text: str
    fit: Fit | None
    notes: tuple[Note, ...]
    lacking: Mapping[str, str]
    named: str = "the model"

    @property
    def comparison(self) -> ClassComparison | None:
        """The comparison with the class as a result, None if there was none."""
        if self.fit is None:
            return None
        fit = self.fit
        return ClassComparison(
            architecture=printable(fit.kind),
            origin=fit.origin,
            shapes=fit.expected is not None,
            expected=fit.expected,
            fitting=fit.fitting,
            missing=tuple(fit.missing),
            reshaped=tuple(fit.reshaped),
            extra=fit.extra,
        )


def claim_for(
    shapes: Mapping[str, Shape],
    kind: KnownClass | str,
    naming: Naming,
    config: Config,
    *,
    on_purpose: Collection[str] = (),
    change: tuple[str, str] = ("", ""),
) -> Claim:
    """Compare what will be written with the class (``kind``) and with the counts of its config.

    ``change`` is the prefix of all names that was taken away for that, and the one that was added. ``on_purpose`` are names that
    filters, a key map or --intersect left out: they are not lacking.
    """
    odd = mismatches(config, {**shapes, **dict.fromkeys(on_purpose, ())}, known=isinstance(kind, KnownClass) and kind.has_shapes)
    counted = {item.lacking: item.text for item in odd if item.lacking is not None}
    notes = [Note("warning", item.code, _advised(item)) for item in odd if item.lacking is None]
    if not isinstance(kind, KnownClass):
        return Claim(f"as trained, not compared: {kind}", None, tuple(notes), counted)
    fit = compared(shapes, kind, (naming,))
    if not fit.fitting and naming == "native":
        text = f"as trained: none of them is one of {printable(kind.kind)} ({kind.origin})"
        return Claim(text, fit, (*notes, Note("warning", "native-names", f"names are {text}")), {}, printable(kind.kind))
    absent = {name: shape for name, shape in fit.missing.items() if name not in on_purpose}
    if not kind.has_shapes:
        notes += _unproved(absent, kind) if fit.fitting else ()
        lacking = counted if fit.fitting else {**counted, "*": f"none of the names is one of {printable(kind.kind)}"}
    else:
        lacking = {name: shape_text(shape) for name, shape in absent.items()}
    notes += _different_shapes(fit, kind)
    foreign = fit.extra if len(fit.extra) <= len(shapes) // 2 or fit.fitting else ()
    if foreign:
        kinds = few(_grouped(foreign))
        if not kind.has_shapes:
            text = f"{len(foreign)} names are not among those known of {printable(kind.kind)}: {kinds}"
            notes.append(Note("warning", "unknown-names", f"{text}; with transformers installed they are compared"))
        else:
            plural = "tensor has" if len(foreign) == 1 else "tensors have"
            text = f"{len(foreign)} {plural} no place in {printable(kind.kind)}, whose loader ignores them: {kinds}"
            notes.append(Note("warning", "extra-tensors", f"{text}; {ADVICE['extra-tensors']}"))
    old, new = map(printable, change)
    done = f", {old} was taken away from every name" if old else f", {new} was put in front of every name" if new else ""
    text = f"{claim(fit)}{done}{', the class of its model type that fits' if kind.chosen else ''}"
    return Claim(text, fit, tuple(notes), lacking, printable(kind.kind))


def without_allowed(made: Claim, allowed: Sequence[str]) -> Claim:
    """A claim in which tensors that ``allowed`` (globs) names are no longer lacking, but told."""
    if not allowed:
        return made
    let_go = [name for name in made.lacking if any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)]
    unused = [pattern for pattern in allowed if not any(fnmatch.fnmatchcase(name, pattern) for name in made.lacking)]
    notes = [Note("warning", "unused-pattern", f"--allow-missing {printable(p)} matches nothing that is missing") for p in unused]
    if let_go:
        text = f"{len(let_go)} of the tensors of {made.named} are missing, as --allow-missing says: {few(_grouped(let_go))}"
        notes.append(Note("warning", "missing-allowed", text))
    lacking = {name: what for name, what in made.lacking.items() if name not in let_go}
    return Claim(made.text, made.fit, (*made.notes, *notes), lacking, made.named)


def refuse_lacking(made: Claim, names: Collection[str], base: Collection[str] | None, naming: Naming) -> None:
    """Raise MissingTensors if a loader needs tensors that nobody has; ``base`` are the names that could be taken from the base."""
    if not made.lacking:
        return
    absent = _grouped(list(made.lacking))
    shown = f"'{_glob(list(made.lacking))}'"
    foreign = foreign_names(names)
    there = [name for name in made.lacking if base is not None and _in(base, name)]
    details = [f"{name}: {what}" for name, what in made.lacking.items()] if len(made.lacking) > 1 else []
    if made.fit is not None and not made.fit.fitting:
        own = f"these are {foreign}'s own names: " if foreign else ""
        hint = f"{own}rename them with --key-map, or pass --names native to keep them as they are"
        message = f"no tensor has a name of {made.named}"
        details = [f"in the checkpoint: {few(list(names), 3)}", f"in {made.named}: {few(list(made.fit.missing), 3)}"]
    elif there and len(there) == len(made.lacking):
        hint = f"the base has them: pass --carry-from-base {shown} to take them from there"
        message = _counted(made, absent)
    else:
        hint = f"--allow-missing {shown} writes the folder without them"
        if base is None:
            hint = f"--base DIR with --carry-from-base {shown} takes them from the base model; {hint}"
        message = _counted(made, absent)
    raise MissingTensors(
        message,
        details=details,
        expected=f"{made.fit.expected} tensors of {made.named} ({made.fit.origin})" if made.fit and made.fit.expected else None,
        hint=hint,
    )


def _counted(made: Claim, absent: Sequence[str]) -> str:
    if made.fit is None or made.fit.expected is None:
        return next(iter(made.lacking.values()))
    which = f": {absent[0]}" if len(absent) == 1 else ""
    return (
        f"{len(made.lacking)} of the {made.fit.expected} tensors of {made.named} {'is' if len(made.lacking) == 1 else 'are'} missing{which}"
    )


def _glob(names: Sequence[str]) -> str:
    """One glob for all of these names: with their numbers open, or what they all begin with."""
    if len(names) == 1:
        return names[0]
    patterns = {pattern_of(name)[0].replace("{}", "*") for name in names}
    if len(patterns) == 1:
        return patterns.pop()
    parts = [name.split(".") for name in (min(names), max(names))]
    shared = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*parts, strict=False)))
    return ".".join([*(part for part, _ in shared), "*"])


def _in(base: Collection[str], name: str) -> bool:
    return name in base or ("*" in name and any(fnmatch.fnmatchcase(other, name) for other in base))


def _advised(item: Mismatch) -> str:
    return f"{item.text}; {ADVICE[item.code]}"


def _unproved(absent: Mapping[str, Shape], kind: KnownClass) -> list[Note]:
    """Names by pattern that no tensor has. The shipped names are those of one config, so that this proves nothing."""
    wanted = [name.replace("{}", "*") for name in absent if not name.endswith("bias")]
    if not wanted:
        return []
    text = (
        f"{printable(kind.kind)} usually has tensors that are not here: {few(wanted)}; with transformers installed this is compared exactly"
    )
    return [Note("warning", "missing-kinds", text)]


def _different_shapes(fit: Fit, kind: KnownClass) -> Iterator[Note]:
    if fit.reshaped:
        (name, (wanted, held)), *others = fit.reshaped.items()
        more = f" and {len(others)} more" if others else ""
        text = f"{printable(name)} is {shape_text(held)}, and {printable(kind.kind)} with this config.json has {shape_text(wanted)}{more}"
        yield Note("warning", "other-shapes", f"{text}: correct config.json, or loading fails")


def _grouped(names: Sequence[str]) -> list[str]:
    """Names that differ in numbers only, as one with the range of the numbers."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        pattern, numbers = pattern_of(name)
        groups.setdefault(pattern, []).append(numbers)
    return [ranged(pattern, numbers) for pattern, numbers in groups.items()]
