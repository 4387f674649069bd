"""Header level of `verify`: whether config.json, tokenizer and weights match. Names, shapes and dtypes only."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_cli.boxes import Shape, shape_text
from ckpt_cli.dtypes import BY_TORCH, cast_name
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import files_in, is_file
from ckpt_cli.formats.safetensors.names import EMA, safetensors_part, stem_of
from ckpt_cli.hub.assets import CONFIG, GENERATION_CONFIG
from ckpt_cli.hub.bagel import MARKS
from ckpt_cli.hub.beside.codes import has_scales, no_scales_text
from ckpt_cli.hub.beside.model_config import no_model_config
from ckpt_cli.hub.beside.names import OF_CODES, OWN_CONFIGS, TOKENIZER_CONFIG
from ckpt_cli.hub.beside.processors import PREPROCESSOR, PROCESSOR
from ckpt_cli.hub.beside.told_tokens import ADDED_TOKENS, SPECIAL_TOKENS
from ckpt_cli.hub.classes.absent.own_words import replaced_text
from ckpt_cli.hub.classes.computed.stored_buffers import AGREES, DIFFERS, stored_buffers
from ckpt_cli.hub.classes.config_counts import mismatches, odd_settings
from ckpt_cli.hub.classes.dtypes import odd_dtypes
from ckpt_cli.hub.classes.expected_tensors import Doubtful
from ckpt_cli.hub.classes.fit import (
    NAMINGS,
    VALUE_HEAD,
    Fit,
    KnownClass,
    claim,
    compared,
    doubled,
    misread_text,
    usual_but_absent,
)
from ckpt_cli.hub.classes.in_memory.shadowed import shadowed_names
from ckpt_cli.hub.classes.precision.kept import kept_in_fp32
from ckpt_cli.hub.classes.prefixes import class_of, common_prefix, compared_within
from ckpt_cli.hub.config import Config, is_quantised, not_loaded
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.hub.contents.placeholders import other_placeholders
from ckpt_cli.hub.contents.processor_numbers import other_numbers
from ckpt_cli.hub.text_assets import check_text
from ckpt_cli.hub.tokenizer import endless, ids_beyond, special_ids_beyond, told_ids_beyond
from ckpt_cli.hub.tokenizer_file import TOKENIZER, tokenizer_at
from ckpt_cli.name_patterns import pattern_of
from ckpt_cli.names import printable
from ckpt_cli.results.verify import Finding
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.verifying.findings import finding, unread

OF_TOKENS = frozenset({TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, GENERATION_CONFIG, PREPROCESSOR, PROCESSOR})
"""What tells of tokens and their ids, besides config.json."""


@dataclass(frozen=True, slots=True)
class ConfigCheck:
    """``expected`` is how many tensors the model class has (None: not known), ``naming`` with which names they were compared.

    ``names`` is the result in one line. ``own`` is the class that the config names, where that of its model type was compared in its place,
    and ``replaced`` are tensors of the latter in whose place it may have others, as the class and as the weights would call them.
    """

    config: Config
    findings: tuple[Finding, ...]
    expected: int | None = None
    naming: str | None = None
    names: str | None = None
    wrapped: bool = False
    own: str = ""
    replaced: tuple[str, ...] = ()

    @classmethod
    def of_components(cls, configs: Mapping[str, ConfigCheck]) -> ConfigCheck:
        """The first of several, with how the names of each compare where that differs."""
        first = next(iter(configs.values()))
        if len({one.names for one in configs.values()}) == 1:
            return first
        return replace(first, names="; ".join(f"{name}: {one.names or 'not compared'}" for name, one in configs.items()))


def check_config(folder: Path, tensors: Mapping[str, Tensor], *, written: bool, loaded_as: str | None = None) -> ConfigCheck:
    """Compare tensors with the config.json and the tokenizer in a folder.

    ``written``: they are files for a loader, so that the dtype in the config counts; trainers keep float32 masters of a
    bfloat16 model. ``loaded_as`` is the file by which loaders find them.
    """
    path = folder / CONFIG
    why = no_model_config(path) if is_file(path) else ""
    if why is not None:
        for_others = any(is_file(folder / name) for name in OWN_CONFIGS)
        without = without_config(tensors, written=written and not for_others, instead=why)
        return replace(without, findings=(*without.findings, *_ids_beyond(folder, {}, tensors)))
    try:
        config = read_config(path)
        if written:
            check_text(path)
    except CkptError as error:
        return ConfigCheck({}, (unread("damaged-config", error, CONFIG),))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    kind = class_of(config, shapes)
    found = [*_dtype(config, tensors, kind)] if written else []
    found += _ids_beyond(folder, config, tensors)
    found += [*_settings_beside(folder), *_codes_beside(folder, tensors), *_name(folder, config, tensors, loaded_as)]
    found += [finding(note.code, note.text) for note in odd_dtypes(tensors, config, kind)]
    buffers = stored_buffers(tensors, config, kind)
    found += [finding(DIFFERS, text, tensor=name) for name, text in buffers.differing.items()]
    found += [finding(AGREES, f"{buffers.of} computes this anew, with the same values", tensor=name) for name in buffers.agreeing]
    known, namings = (kind.has_shapes, kind.namings) if isinstance(kind, KnownClass) else (False, ())
    found += _counted(config, tensors, known=known, namings=namings)
    unknown = kind.unknown if isinstance(kind, KnownClass) else kind
    if isinstance(unknown, Doubtful):
        found.append(finding(unknown.code, unknown, file=CONFIG))
    if not isinstance(kind, KnownClass):
        return ConfigCheck(config, (*found, *([] if isinstance(kind, Doubtful) else [finding("not-compared", kind)])))
    fit, different = _compared(shapes, kind, buffers.told)
    findings, line = (*found, *different), claim(fit)
    start = fit.wrapper + fit.doubles
    replaced = tuple(dict.fromkeys(n for name in fit.replaced for n in (name, start + name.removeprefix(fit.lacks))))
    return ConfigCheck(kind.config, findings, fit.expected, NAMINGS[fit.naming], line, bool(fit.wrapper), fit.own, replaced)


def _name(folder: Path, config: Config, tensors: Mapping[str, Tensor], loaded_as: str | None) -> Iterator[Finding]:
    """Weights that loaders pass over because of their name. BAGEL's own loader reads ``ema.safetensors``; parts lack their index."""
    if loaded_as is None or not config or safetensors_part(loaded_as) is not None:
        return
    bagel = loaded_as == EMA and (is_file(folder / "llm_config.json") or any(name.split(".")[0] in MARKS for name in tensors))
    passed_over = not_loaded(config, loaded_as) if not bagel else None
    if passed_over is not None:
        yield finding("unloaded-name", passed_over[0], file=loaded_as)


def _settings_beside(folder: Path) -> Iterator[Finding]:
    """Numbers that are none in the other configs of a folder: of generation, processors, parts."""
    for path in files_in(folder, lambda name: name.endswith(CONFIG) and name != CONFIG):
        with contextlib.suppress(CkptError):  # what cannot be read is found elsewhere
            yield from (finding("odd-setting", f"it says {text}", file=path.name) for text in odd_settings(read_config(path)))


def _codes_beside(folder: Path, tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Files that tell engines of quantised weights where there are none."""
    if tensors and not has_scales(tensors):
        for path in files_in(folder, lambda name: OF_CODES.fullmatch(name) is not None):
            yield finding("no-scales", no_scales_text(path.name), file=path.name)


def without_config(tensors: Mapping[str, Tensor], *, written: bool, instead: str = "") -> ConfigCheck:
    """The finding if there is no config.json of a model: a warning if the files are for loaders, which know them by their names.

    ``instead`` is what a file of this name holds.
    """
    odd = odd_dtypes(tensors, {}, "there is no config.json")
    names = {Path(piece.source.path).name for tensor in tensors.values() for piece in tensor.pieces}
    code = "lacks-config" if written and any(stem_of(name) == "model" for name in names) else "no-config"
    told = finding(code, "without config.json, names and shapes were not compared")
    if instead:
        told = finding(
            "no-model-config", f"it is no config of a model, it holds {instead}: names and shapes were not compared", file=CONFIG
        )
    return ConfigCheck({}, (*(finding(note.code, note.text) for note in odd), *_counted({}, tensors), told))


def _counted(
    config: Config, tensors: Mapping[str, Tensor], *, known: bool = False, namings: Sequence[Collection[str]] = ()
) -> list[Finding]:
    """Counts in which tensors differ from a config, or from one another: layers that lack what others of their stack have."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    items = mismatches(config, shapes, known=known, namings=namings)
    return [finding(item.code, item.text, tensor=glob) for item in items for glob in item.lacking or (None,)]


def _dtype(config: Config, tensors: Mapping[str, Tensor], kind: KnownClass | str) -> Iterator[Finding]:
    """The dtype that a config names must be the one that most weights have, besides those that its class keeps in fp32.

    Of quantised models it means something else.
    """
    if is_quantised(config) or any(tensor.dtype.kind == "opaque" for tensor in tensors.values()):
        return
    text = config.get("text_config")
    levels = (config, text) if isinstance(text, Mapping) else (config,)
    named = next((level[key] for level in levels for key in ("dtype", "torch_dtype") if isinstance(level.get(key), str)), None)
    if named is None:
        return
    kept = kept_in_fp32(tensors, kind, config, cast_name(named))
    floats = {name: tensor for name, tensor in tensors.items() if tensor.dtype.kind == "float"}
    elements: Counter[str] = Counter()
    for tensor in [tensor for name, tensor in floats.items() if name not in kept] or floats.values():
        elements[tensor.dtype.code] += tensor.numel
    if not elements:
        return
    code, count = elements.most_common(1)[0]
    if named.removeprefix("torch.") not in BY_TORCH:
        yield finding("config-dtype", f"config.json says {named}, which is not a dtype", file=CONFIG)
    elif BY_TORCH[named.removeprefix("torch.")].code != code:
        message = f"config.json says {named}, but {count} of {sum(elements.values())} elements are {code}"
        yield finding("config-dtype", message, file=CONFIG, elements=count, of=sum(elements.values()))


# -- names and shapes ------------------------------------------------------------------------------------------------


def _compared(shapes: Mapping[str, Shape], kind: KnownClass, told: Collection[str]) -> tuple[Fit, list[Finding]]:
    """Differences to the tensors of the model class, under those of its names that fit best: of the hub, as in memory, or older ones.

    Of those that have no place something is ``told`` already.
    """
    change = common_prefix(kind, shapes)
    if change.removed and change.removed != f"{kind.known.prefix}." and not kind.own:
        fit = compared({change.of(name): shape for name, shape in shapes.items()}, kind)
        which = "every name begins" if change.whole else f"{len(change.names)} of {len(shapes)} names begin"
        whole = f"without it {fit.fitting} of {fit.expected or len(shapes)} fit {printable(kind.kind)}"
        return fit, [finding("prefixed-names", f"{which} with {change.removed}, which the class does not have; {whole}")]
    fit = compared_within(shapes, kind)
    if fit.is_foreign:
        return fit, [finding("unknown-names", f"none of {len(shapes)} names is one of {printable(kind.kind)} ({kind.origin})")]
    found = []
    if not kind.has_shapes:
        text = f"{printable(kind.kind)} usually has it ({fit.origin})"
        found += [finding("not-proved", text, tensor=name) for name in usual_but_absent(fit)]
    else:
        found += [
            finding("missing-tensor", f"the class has it with shape {shape_text(shape)} ({fit.origin})", tensor=name)
            for name, shape in fit.missing.items()
        ]
        for name, shape in fit.optional.items():
            code = "optional-tensor" if name in fit.computing else "recomputed-tensor"
            found.append(finding(code, f"the class has it with shape {shape_text(shape)} ({fit.origin})", tensor=name))
    for name, (wanted, stored) in fit.reshaped.items():
        code = "cut-tensor" if name in fit.cut else "wrong-shape"
        found.append(finding(code, f"{shape_text(stored)}, but the class has {shape_text(wanted)} ({fit.origin})", tensor=name))
    if fit.replaced:
        found.append(finding("replaced-tensors", replaced_text(fit.own, fit.kind, list(fit.replaced))))
    if fit.misread:
        found.append(finding("misread-square", misread_text(fit, kind)))
    patterns = {pattern_of(name)[0] for name in kind.known.hub} | {pattern_of(name)[0] for name in kind.known.native}
    mixed = [name for name in fit.extra if kind.knows(name)]
    found += [finding("mixed-names", "a name of the training among hub names, or the reverse", tensor=name) for name in mixed]
    shadowed = shadowed_names(kind, shapes)
    found += [finding("second-tensor", f"loaders take it for {owner}, which is here too", tensor=n) for n, owner in shadowed.items()]
    for name in [name for name in fit.extra if name not in mixed and name not in shadowed]:
        if fit.wrapper and VALUE_HEAD.fullmatch(name):
            found.append(finding("extra-tensor", "a value head of TRL beside the model", tensor=name))
            continue
        if fit.name_in(shapes, name) in told:
            continue
        held = shapes.get(fit.name_in(shapes, name))
        shown = f" (shape {shape_text(held)})" if held is not None else ""
        if name in fit.surplus:
            found.append(finding("wrong-shape", "an expert beyond those of the config: loaders make one tensor of all", tensor=name))
            continue
        if kind.own and pattern_of(name)[0] not in patterns:
            found.append(finding("own-tensor", f"of {printable(kind.own)} itself: {printable(kind.kind)} has none{shown}", tensor=name))
            continue
        if not kind.has_shapes:
            found.append(finding("unlisted-tensor", f"{printable(kind.kind)} has none in {fit.origin} by default{shown}", tensor=name))
            continue
        code = "extra-layer" if pattern_of(name)[0] in patterns else "extra-tensor"
        found.append(finding(code, f"the class has no tensor of this name{shown}", tensor=name))
    if fit.naming != "native":
        for code, pairs, ending in (("tied-alone", fit.stand_ins, ", which is not there"), ("tied-stored", fit.tied, "")):
            for name, owner in ((fit.name_in(shapes, name), fit.name_in(shapes, owner)) for name, owner in pairs.items()):
                found.append(finding(code, f"the config ties it to {owner}{ending}", tensor=name, partner=owner))
    if fit.doubles:
        found.append(finding("doubled-prefix", doubled(fit, shapes)))
    return fit, found


# -- tokenizer -------------------------------------------------------------------------------------------------------


def _ids_beyond(folder: Path, config: Config, tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Ids of the tokenizer and of the settings for generation for which the embedding has no row."""
    files = {path.name: path for path in files_in(folder, lambda name: name in OF_TOKENS)}
    tokenizer = tokenizer_at(files[TOKENIZER], files)() if TOKENIZER in files else None
    for item in ids_beyond(tokenizer, tensors) if tokenizer is not None else ():
        code = "vocabulary" if item.is_grave else "added-tokens"
        yield finding(code, item.text, tensor=item.embedding, file=TOKENIZER, largest=item.largest, rows=item.rows)
    for name, text in (*special_ids_beyond(files, config, tensors), *told_ids_beyond(tokenizer, files, tensors)):
        yield finding("token-ids", text, file=name)
    for name, text in other_numbers(files, config):
        yield finding("processor-numbers", text, file=name)
    for _, text in other_placeholders(files, config, tokenizer):
        yield finding("placeholder-ids", text, file=CONFIG)
    if (ending := endless(files, config)) is not None:
        yield finding("no-end", ending, file=GENERATION_CONFIG)
