"""`verify`: proves that a model folder is what it should be, or says in findings what is wrong with it. Nothing is written."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ckpt_cli.assets import CONFIG, resolve_base
from ckpt_cli.comparing import compare_tensors
from ckpt_cli.config_checks import ConfigCheck, check_config
from ckpt_cli.drift_plot import check_plot, draw
from ckpt_cli.errors import NotFound, UsageError
from ckpt_cli.files import Files, as_paths
from ckpt_cli.findings import finding
from ckpt_cli.folder_checks import FolderCheck, WeightSet, check_folder, is_model_folder
from ckpt_cli.formats.base import Naming, ShardOrder
from ckpt_cli.formats.hub_folder import FORMAT
from ckpt_cli.locate import locate
from ckpt_cli.lora_merge import adapters_alone
from ckpt_cli.lora_names import has_adapters
from ckpt_cli.manifest import Manifest
from ckpt_cli.merge_plan import MergeOptions, Part, planned_parts
from ckpt_cli.model import Tensor
from ckpt_cli.model_config import architecture
from ckpt_cli.opening import Opened, open_checkpoint
from ckpt_cli.probe import same_values
from ckpt_cli.progress import Progress
from ckpt_cli.publishing import as_tuples
from ckpt_cli.report import BaseComparison, Finding, SourceComparison, VerifyResult
from ckpt_cli.source_checks import Wanted, compare_with_source
from ckpt_cli.value_checks import check_values

AVERAGE = "average"
STATE = "extract-state"


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of `verify`, with the meaning that ``ckpt verify --help`` gives them.

    ``sample`` is a share of the values (0 to 1), which is then read instead of all; ``names``, ``key_map``, ``include`` and
    ``exclude`` say how tensors of ``against`` were named and chosen, where the manifest of the output does not.
    """

    full: bool = False
    sample: float | None = None
    names: Naming | None = None
    key_map: str | os.PathLike[str] | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    shard_order: ShardOrder = "auto"
    jobs: int | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """What is verified: tensors by name of one set of weights (the main one), and what was found by looking at files.

    ``stored`` are the tensors as the files have them, whose bytes are read; for a model folder these are the same.
    """

    path: Path
    component: str
    format: str
    files: int
    tensors: Mapping[str, Tensor]
    stored: Mapping[str, Tensor]
    readable: bool
    folder: FolderCheck | None
    config_home: Path | None
    findings: tuple[Finding, ...]

    @property
    def manifest(self) -> Manifest | None:
        return self.folder.manifest if self.folder is not None else None

    @property
    def is_model(self) -> bool:
        return self.manifest is None or self.manifest.command != STATE


def verify(
    path: str | os.PathLike[str],
    *,
    type: str | None = None,
    step: int | None = None,
    also: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    against: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    plot: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> VerifyResult:
    """Check a model folder, or a sharded checkpoint, and report findings.

    Always: headers, index, sizes, manifest, and whether config.json, tokenizer and tensors belong together; no weight byte is
    read. ``full=True`` reads every byte; ``against`` names the source that the output must equal, bit for bit; ``base`` a model
    or checkpoint to compare with, whose differences are information; ``plot`` a picture of these (.png, .svg, .html).
    ``options`` are the fields of `VerifyOptions`.

    Raises InputError and IncompleteError for what cannot be opened at all, UsageError.
    """
    try:
        chosen = VerifyOptions(**as_tuples(options))
    except TypeError as error:
        raise UsageError(f"unknown option: {error}", expected=", ".join(VerifyOptions.__slots__)) from None
    _check_options(chosen)
    if plot is not None:
        if base is None:
            raise UsageError("--plot draws how far tensors moved from a base", hint="pass --base as well")
        check_plot(plot)
    started = time.monotonic()
    with Files() as files:
        subject = _subject(Path(path), files, type, step, as_paths(also), chosen.shard_order)
        found = list(subject.findings)
        config = _config(subject)
        found += config.findings
        levels, checksums, read = ["headers"], 0, 0
        if chosen.full or chosen.sample is not None:
            levels.append("full" if chosen.sample is None else "sample")
            values = check_values(subject.stored, _checksums(subject), sample=chosen.sample, jobs=chosen.jobs, progress=progress)
            found += values.findings
            found += _ties(subject, config)
            checksums, read = values.checksums, values.bytes_read
        sources: tuple[SourceComparison, ...] = ()
        if against is not None:
            levels.append("against")
            different, source = _against(subject, Path(against), files, type, chosen, progress)
            wrong = {item.tensor for item in different}
            found = [_as_in_source(item) if item.tensor not in wrong else item for item in found] + different
            sources = (source,)
        comparison = None
        if base is not None:
            levels.append("base")
            comparison = _against_base(subject, base, files, chosen, progress)
            if plot is not None:
                draw(comparison, plot, name=str(subject.path))
    return _report(subject, config, found, levels, started, checksums=checksums, bytes_read=read, against=sources, comparison=comparison)


def verify_written(
    folder: Path, parts: Sequence[Part], source: Path, *, jobs: int | None = None, progress: Progress | None = None
) -> tuple[VerifyResult, ...]:
    """Check a folder that was just written of planned components: headers, config, and every byte against the source."""
    results = []
    with Files() as files:
        checked = check_folder(folder, files)
        for part in parts:
            started = time.monotonic()
            names = {file.name for file in part.plan.files}
            weights = next(weights for weights in checked.sets if names & {path.name for path in weights.files})
            subject = _set_subject(folder, checked, weights)
            config = _config(subject)
            wanted = {output.name: Wanted(output.tensor, output.dtype) for output in part.plan.tensors}
            different, compared = compare_with_source(subject.tensors, wanted, jobs=jobs, progress=progress)
            summary = _summary(source, part, subject.tensors, wanted, compared, different)
            found = [*subject.findings, *config.findings, *different]
            results.append(_report(subject, config, found, ["headers", "against"], started, against=(summary,)))
    return tuple(results)


def _report(
    subject: Subject,
    config: ConfigCheck,
    found: Sequence[Finding],
    levels: Sequence[str],
    started: float,
    **measured: Any,
) -> VerifyResult:
    """The result, gravest findings first."""
    tensors = subject.tensors.values()
    dtypes: Counter[str] = Counter()
    for tensor in tensors:
        dtypes[tensor.dtype.code] += tensor.numel
    return VerifyResult(
        path=str(subject.path),
        component=subject.component,
        format=subject.format,
        files=subject.files,
        tensors=len(subject.tensors),
        elements=sum(tensor.numel for tensor in tensors if tensor.alias_of is None),
        bytes=sum(tensor.nbytes for tensor in tensors if tensor.alias_of is None),
        dtypes=dict(dtypes),
        architecture=architecture(config.config),
        made_from=_made_from(subject.manifest),
        levels=tuple(levels),
        expected=config.expected,
        naming=config.naming,
        findings=tuple(sorted(found, key=lambda item: ("error", "warning", "info").index(item.severity))),
        seconds=time.monotonic() - started,
        **measured,
    )


def _check_options(options: VerifyOptions) -> None:
    if options.sample is not None and not 0 < options.sample <= 1:
        raise UsageError("--sample is out of range", expected="more than 0% and at most 100%")
    if options.jobs is not None and not 1 <= options.jobs <= 256:
        raise UsageError("--jobs is out of range", expected="1 to 256")


# -- what is verified ------------------------------------------------------------------------------------------------


def _subject(path: Path, files: Files, type: str | None, step: int | None, also: tuple[Path, ...], order: ShardOrder) -> Subject:
    """The weights that a path means. Folders of safetensors files are taken as they are, damaged or not."""
    if step is None and os.path.isdir(path) and is_model_folder(path):
        return _folder_subject(path, files, type)
    opened = open_checkpoint(path, files, type=type, step=step, also=also, shard_order=order)
    first = opened.components[0]
    root = first.component.root
    if first.component.format == FORMAT and os.path.isdir(root):
        return _folder_subject(root, files, first.place.match.component if type is not None else None)
    home = first.assets.files[CONFIG].parent if CONFIG in first.assets.files else None
    tensors, component = _tensors(opened, files), first.component
    return Subject(opened.found.path, first.name, component.format, len(component.files), tensors, component.tensors, True, None, home, ())


def _tensors(opened: Opened, files: Files) -> dict[str, Tensor]:
    """The tensors of the first component of a checkpoint, as a merge would write them."""
    alone = adapters_alone(opened.components[0].component.tensors)
    options = MergeOptions(allow_unequal_replicas=True, lora="keep" if alone else None)
    part = planned_parts(opened, None, options, files)[0]
    return {output.name: output.tensor for output in part.plan.tensors}


def _folder_subject(folder: Path, files: Files, type: str | None) -> Subject:
    checked = check_folder(folder, files)
    if not checked.sets:
        if not checked.findings:
            raise NotFound("there are no weights to verify", path=folder, expected="safetensors files")
        return Subject(folder, type or "model", FORMAT, 0, {}, {}, False, checked, folder, checked.findings)
    return _set_subject(folder, checked, _chosen(checked.sets, type, folder))


def _set_subject(folder: Path, checked: FolderCheck, weights: WeightSet) -> Subject:
    files_read = len(weights.files) + (weights.index is not None)
    return Subject(
        folder, weights.name, FORMAT, files_read, weights.tensors, weights.tensors, weights.readable, checked, folder, checked.findings
    )


def _chosen(sets: Sequence[WeightSet], type: str | None, folder: Path) -> WeightSet:
    usual = {"regular": "model", "main": "model"}
    # A folder with one set of weights has no names for components: what was merged into it is what is meant.
    if type is None or usual.get(type, type) == "model" or len(sets) == 1:
        return sets[0]
    for weights in sets:
        if weights.name == type:
            return weights
    raise NotFound(f"there is no component {type}", path=folder, expected=", ".join(weights.name for weights in sets))


def _config(subject: Subject) -> ConfigCheck:
    if not subject.is_model:
        return ConfigCheck({}, ())
    if subject.config_home is None:
        return ConfigCheck({}, (finding("no-config", "names and shapes were not compared"),))
    if has_adapters(subject.tensors):
        return ConfigCheck({}, (finding("not-compared", "these are LoRA adapters, which a model class knows nothing of"),))
    # Of a damaged file, what is missing is known already.
    tensors = subject.tensors if subject.readable else {}
    checked = check_config(subject.config_home, tensors, written=subject.folder is not None)
    if not subject.readable:
        return ConfigCheck(checked.config, tuple(item for item in checked.findings if item.code == "damaged-config"))
    return checked


def _checksums(subject: Subject) -> dict[str, int]:
    """The CRC-32 of tensors that the manifest has, by name; of other files than these it says nothing."""
    if subject.manifest is None:
        return {}
    owners = {name: Path(tensor.pieces[0].source.path).name for name, tensor in subject.tensors.items() if tensor.pieces}
    known = subject.manifest.checksums
    return {name: known[file][name] for name, file in owners.items() if name in known.get(file, {})}


def _ties(subject: Subject, config: ConfigCheck) -> list[Finding]:
    """Tied tensors that are stored: with other values, a loader ignores one of them."""
    found = []
    for item in config.findings:
        if item.code == "tied-stored" and item.tensor is not None:
            partner = subject.tensors.get(item.message.rpartition(" ")[2])
            if partner is not None and not same_values(subject.tensors[item.tensor], partner):
                found.append(finding("tied-differ", f"{partner.name} has other values", tensor=item.tensor))
    return found


# -- against its source ----------------------------------------------------------------------------------------------


def _against(
    subject: Subject, path: Path, files: Files, type: str | None, options: VerifyOptions, progress: Progress | None
) -> tuple[list[Finding], SourceComparison]:
    """Compare with the checkpoint that the output was made from, planned anew with the options that the manifest names."""
    manifest = subject.manifest
    opened = _source(path, files, type, manifest, options)
    plain = all(component.component.format == FORMAT for component in opened.components)
    if manifest is not None and manifest.command == AVERAGE and not plain:
        count = len(manifest.facts.get("averaged") or ())
        hint = "compare it with another average, or pass --full, which uses its checksums"
        raise UsageError(f"this is an average of {count} checkpoints, which equals none of them", path=subject.path, hint=hint)
    merged = _merge_options(None if plain else manifest, options)
    base = manifest.facts.get("base") if manifest is not None and not plain else None
    parts = planned_parts(opened, Path(base) if isinstance(base, str) else None, merged, files)
    names = {Path(tensor.pieces[0].source.path).name for tensor in subject.tensors.values() if tensor.pieces}
    part = next((part for part in parts if names & {file.name for file in part.plan.files} and len(parts) > 1), parts[0])
    known = manifest is not None and not plain
    wanted = {output.name: Wanted(output.tensor, output.dtype if known else None) for output in part.plan.tensors}
    for head, partner in part.selection.tied.items():
        if head in subject.tensors and partner in wanted:
            wanted[head] = wanted[partner]
    found, compared = compare_with_source(subject.tensors, wanted, jobs=options.jobs, progress=progress)
    changed = _changed_sources(manifest) if known else []
    return [*found, *changed], _summary(opened.found.path, part, subject.tensors, wanted, compared, found)


def _changed_sources(manifest: Manifest | None) -> list[Finding]:
    """Files that the manifest names and that are no longer as they were: a hint where values differ."""
    listed = manifest.facts.get("sources") if manifest is not None else None
    found = []
    for source in listed if isinstance(listed, list) else []:
        if isinstance(source, dict) and isinstance(source.get("path"), str):
            try:
                status = os.stat(source["path"])
            except (OSError, ValueError):
                found.append(finding("changed-source", "is not where it was", file=source["path"]))
                continue
            if (status.st_size, status.st_mtime_ns) != (source.get("size"), source.get("mtime_ns")):
                found.append(finding("changed-source", "has another size or time than when it was merged", file=source["path"]))
    return found


def _summary(
    source: Path, part: Part, tensors: Mapping[str, Tensor], wanted: Mapping[str, Wanted], compared: int, found: Sequence[Finding]
) -> SourceComparison:
    common = [name for name in wanted if name in tensors]
    cast = sum(wanted[name].tensor.dtype != tensors[name].dtype for name in common)
    return SourceComparison(
        source=str(source), component=part.opened.name, tensors=len(common), bytes=compared, cast=cast, different=len(found)
    )


def _as_in_source(item: Finding) -> Finding:
    """A matrix of zeros that the source has as well is what was trained."""
    return finding("zeros", item.message, tensor=item.tensor, file=item.file, **item.numbers) if item.code == "all-zero" else item


def _source(path: Path, files: Files, type: str | None, manifest: Manifest | None, options: VerifyOptions) -> Opened:
    """The source: of a run the step that the manifest names, and the components that it names."""
    step = manifest.facts.get("step") if manifest is not None else None
    target = locate(path, None)
    known = {found.step for found in target.checkpoints} if target.run is not None else set()
    component = str(manifest.facts.get("component")) if manifest is not None and manifest.command == "merge" else None
    places = {place.name for found in target.checkpoints for place in found.places}
    wanted = type or (component if component in places else "both" if component == "model+ema" else None)
    ema_from_model = manifest is not None and manifest.options.get("ema_from_model") is True
    return open_checkpoint(
        path,
        files,
        type=wanted,
        step=step if isinstance(step, int) and step in known else None,
        shard_order=options.shard_order,
        ema_from_model=ema_from_model,
    )


def _merge_options(manifest: Manifest | None, options: VerifyOptions) -> MergeOptions:
    """How the output was made: by its manifest, and by what the user says."""
    known = {field.name for field in fields(MergeOptions)} - {"in_place", "verify"}
    made = {name: value for name, value in (manifest.options if manifest is not None else {}).items() if name in known}
    made |= {name: tuple(made[name]) for name in ("include", "exclude") if isinstance(made.get(name), list)}
    said = {name: getattr(options, name) for name in ("names", "key_map", "include", "exclude") if getattr(options, name)}
    try:
        return MergeOptions(**{**made, **said, "compare": False, "max_shard_size": None, "allow_unequal_replicas": True})
    except TypeError:
        return MergeOptions(**said)


def _made_from(manifest: Manifest | None) -> str | None:
    """The checkpoint that an output was merged from, if it still is where it was."""
    source = manifest.facts.get("checkpoint") if manifest is not None and manifest.command == "merge" else None
    return source if isinstance(source, str) and os.path.exists(source) else None


# -- against a base --------------------------------------------------------------------------------------------------


def _against_base(
    subject: Subject,
    base: str | os.PathLike[str],
    files: Files,
    options: VerifyOptions,
    progress: Progress | None,
) -> BaseComparison:
    """The drift of every tensor since the base, which may be anything that can be opened."""
    try:
        path = resolve_base(os.fspath(base))
    except NotFound:
        path = Path(base)
    opened = open_checkpoint(path, files, shard_order=options.shard_order)
    reference = _tensors(opened, files)
    name = str(opened.found.path)
    return compare_tensors(subject.tensors, reference, name, jobs=options.jobs, progress=progress, sample=options.sample)
