"""`verify`: checks a model folder and reports problems as findings. It writes nothing but a plot."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from ckpt_cli.base_model.checks import settings_text
from ckpt_cli.base_model.resemblance import resemblance
from ckpt_cli.base_model.settings import different_settings
from ckpt_cli.commands.verify_source import (
    changed_sources,
    different_arguments,
    different_scales,
    made_by,
    made_from,
    made_of,
    open_source,
    planned_source,
    summary_of,
)
from ckpt_cli.commands.verify_subjects import Subject, find_subjects, is_output, merged_tensors, set_subject
from ckpt_cli.discover.locate import locate
from ckpt_cli.discover.open import Opened, open_checkpoint
from ckpt_cli.drafting.draft import Draft
from ckpt_cli.errors import NotFound, UsageError, within_memory
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.source import Files
from ckpt_cli.given import PathLike, boundary, int_of, optional_path, options_of, path_of, path_text, paths_of, progress_of, text_of
from ckpt_cli.hub.assets import CONFIG, resolve_base
from ckpt_cli.hub.config import architecture
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.lora.config import CONFIG as ADAPTER_CONFIG
from ckpt_cli.names import printable
from ckpt_cli.progress import Progress
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.drift import BaseComparison
from ckpt_cli.results.verify import Finding, SourceComparison, VerifyResult
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import same_values
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.torn import torn_files
from ckpt_cli.verifying.adapter import check_adapter, no_factors
from ckpt_cli.verifying.config import ConfigCheck, check_config, without_config
from ckpt_cli.verifying.drift.compare import compare_tensors
from ckpt_cli.verifying.drift.plot import check_plot, draw
from ckpt_cli.verifying.findings import finding
from ckpt_cli.verifying.folder import check_folder
from ckpt_cli.verifying.left_out import left_out, partial_output
from ckpt_cli.verifying.options import VerifyKeywords, VerifyOptions
from ckpt_cli.verifying.source import Wanted, compare_with_source, damaged_records
from ckpt_cli.verifying.values import check_values, check_weights_beside

UNREAD = ("damaged-config", "lfs-pointer", "unreadable-file")
"""What can be found about a config that is not compared with anything."""


@boundary
@within_memory
def verify(
    path: PathLike,
    *,
    type: str | None = None,
    step: int | None = None,
    also: PathLike | Sequence[PathLike] = (),
    against: PathLike | None = None,
    base: PathLike | None = None,
    plot: PathLike | None = None,
    progress: Progress | None = None,
    **options: Unpack[VerifyKeywords],
) -> VerifyResult:
    """Check a model folder, or a sharded checkpoint, and report findings.

    Always: headers, index, sizes, manifest, and whether config.json, tokenizer and tensors match; no weights are
    read. ``full=True`` reads every byte; ``against`` names the source that the output must equal, bit for bit; ``base`` a model
    or checkpoint to compare with, whose differences are information; ``plot`` a picture of these (.png, .svg, .html).
    ``options`` are those of `VerifyKeywords`.

    Raises InputError and IncompleteError for what cannot be opened at all, UsageError.
    """
    chosen, progress = options_of(VerifyOptions, options), progress_of(progress)
    path, source, picture = path_of(path), optional_path(against, "--against"), optional_path(plot, "--plot", use="local")
    component, step, nodes = text_of(type, "--type"), int_of(step, "--step"), paths_of(also, "--also")
    reference = path_text(base, "--base") if base is not None else None
    _check_options(chosen)
    if picture is not None:
        if reference is None:
            raise UsageError("--plot draws how far tensors moved from a base", hint="ckpt verify PATH --base DIR --plot FILE")
        check_plot(picture)
    started = time.monotonic()
    with Files(progress=progress) as files:
        of_source = source is not None and is_output(path)
        subjects = find_subjects(
            path, files, component, None if of_source else step, () if of_source else nodes, chosen.lora_alpha, chosen.shard_order
        )
        subject = subjects[0]
        found, levels, checksums, read = list(subject.findings), ["headers"], 0, 0
        configs = [_config(one) for one in subjects]
        for one, config in zip(subjects, configs, strict=True):
            found += [*left_out(one.manifest, config, chosen.include, chosen.exclude), *partial_output(one.manifest, config)]
            found += [finding(t.code, t.text, file=Path(t.path).name, bytes=t.holes) for t in torn_files(one.stored.values(), ends=False)]
        if chosen.full or chosen.sample is not None:
            levels.append("full" if chosen.sample is None else "sample")
            values = [
                check_values(one.stored, _checksums(one), sample=chosen.sample, jobs=chosen.jobs, progress=progress) for one in subjects
            ]
            if subject.manifest is not None and chosen.sample is None:
                values.append(check_weights_beside(subject.path, subject.manifest.side_checksums, files))
            found += [item for checked in values for item in checked.findings]
            found += [item for one, config in zip(subjects, configs, strict=True) for item in _ties(one, config)]
            checksums, read = sum(checked.checksums for checked in values), sum(checked.bytes_read for checked in values)
        notes = [note for one in subjects for note in one.notes]
        sources: list[SourceComparison] = []
        if source is not None:
            levels.append("against")
            for one, config in zip(subjects, configs, strict=True):
                opened = open_source(
                    source,
                    files,
                    one.manifest,
                    type=component,
                    step=step if of_source else None,
                    also=nodes if of_source else (),
                    shard_order=chosen.shard_order,
                )
                notes += opened.notes
                different, summary = _against(one, config, opened, files, chosen, progress)
                wrong = {item.tensor for item in different}
                found = [_as_in_source(item) if item.tensor not in wrong else item for item in found] + different
                sources.append(summary)
        comparison = None
        if reference is not None:
            levels.append("base")
            comparison, other, said = _against_base(subject, configs[0], reference, files, chosen, progress)
            notes += said
            found += [*other, *_not_numbers(comparison)]
            if picture is not None:
                draw(comparison, picture, name=str(subject.path))
        files.check_unchanged()
    measured: dict[str, Any] = {"checksums": checksums, "bytes_read": read, "against": tuple(sources), "comparison": comparison}
    measured["notes"] = tuple(NoteInfo.of(note) for note in dict.fromkeys(notes))
    return _report(subjects, configs[0], found, levels, started, **measured)


def verify_written(
    folder: Path, parts: Sequence[Draft], source: Path, *, jobs: int | None = None, progress: Progress | None = None
) -> tuple[VerifyResult, ...]:
    """Check a folder just written from planned components: headers, config, and every byte against the source."""
    results = []
    with Files() as files:
        checked = check_folder(folder, files)
        for part in parts:
            started = time.monotonic()
            names = {file.name for file in part.plan.files}
            weights = next((one for one in checked.sets if names & {path.name for path in one.files}), checked.sets[0])
            subject = set_subject(folder, checked, weights)
            config = _config(subject)
            wanted = {output.name: Wanted(output.tensor, output.dtype) for output in part.plan.tensors}
            different, compared = compare_with_source(subject.tensors, wanted, jobs=jobs, progress=progress)
            summary = summary_of(source, part, subject.tensors, wanted, compared, different)
            damaged = damaged_records(wanted, part.opened.component.tensors.values(), jobs=jobs, progress=progress)
            found = [*subject.findings, *left_out(subject.manifest, config), *different, *damaged]
            results.append(_report([subject], config, found, ["headers", "against"], started, against=(summary,)))
        files.check_unchanged()
    return tuple(results)


def _report(
    subjects: Sequence[Subject],
    config: ConfigCheck,
    found: Sequence[Finding],
    levels: Sequence[str],
    started: float,
    **measured: Any,
) -> VerifyResult:
    """The result, most severe findings first."""
    subject, named = subjects[0], architecture(config.config)
    tensors = [tensor for one in subjects for tensor in one.tensors.values()]
    dtypes: Counter[str] = Counter()
    for tensor in tensors:
        dtypes[tensor.dtype.code] += tensor.numel
    return VerifyResult(
        path=str(subject.path),
        component="+".join(one.component for one in subjects),
        format=subject.format,
        files=sum(one.files for one in subjects),
        tensors=len(tensors),
        elements=sum(tensor.numel for tensor in tensors if tensor.alias_of is None),
        bytes=sum(tensor.nbytes for tensor in tensors if tensor.alias_of is None),
        dtypes=dict(dtypes),
        architecture=printable(named) if named is not None else None,
        made_from=made_from(subject.manifest),
        made_of=made_of(subject.manifest),
        made_by=made_by(subject.manifest, subject.path),
        levels=tuple(levels),
        expected=config.expected,
        naming=config.naming,
        names=config.names,
        wrapped=config.wrapped,
        findings=tuple(sorted(_without_repeats(found), key=lambda item: ("error", "warning", "info").index(item.severity))),
        seconds=time.monotonic() - started,
        **measured,
    )


def _without_repeats(found: Sequence[Finding]) -> list[Finding]:
    """Drops "file changed" findings for files that are known to be damaged."""
    damaged = {item.file for item in found if item.severity == "error" and item.tensor is None}
    return [item for item in found if item.code != "changed-side-file" or item.file not in damaged]


def _check_options(options: VerifyOptions) -> None:
    if options.sample is not None and not 0 < options.sample <= 1:
        raise UsageError("--sample is out of range", expected="more than 0% and at most 100%")
    if options.jobs is not None and not 1 <= options.jobs <= 256:
        raise UsageError("--jobs is out of range", expected="1 to 256")


# -- levels ----------------------------------------------------------------------------------------------------------


def _config(subject: Subject) -> ConfigCheck:
    if not subject.is_model:
        return ConfigCheck({}, ())
    if has_adapters(subject.tensors):
        known = check_adapter(subject.homes, subject.tensors)
        return ConfigCheck({}, (*known, finding("not-compared", "these are LoRA adapters, which are not part of a model class")))
    if subject.config_home is None:
        return without_config(subject.tensors, written=False)
    if subject.folder is not None and subject.readable and not is_file(subject.config_home / CONFIG):
        adapter = is_file(subject.config_home / ADAPTER_CONFIG)
        lacking = no_factors(subject.config_home) if adapter else []
        checked = without_config(subject.tensors, written=not adapter)
        return replace(checked, findings=(*lacking, *checked.findings))
    # Of a damaged file, what is missing is known already.
    tensors = subject.tensors if subject.readable else {}
    checked = check_config(subject.config_home, tensors, written=subject.folder is not None)
    if not subject.readable:
        return ConfigCheck(checked.config, tuple(item for item in checked.findings if item.code in UNREAD))
    return checked


def _checksums(subject: Subject) -> dict[str, int]:
    """The CRC-32 of tensors that the manifest has, by name; other files are not covered."""
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
            partner = subject.tensors.get(str(item.numbers.get("partner")))
            if partner is not None and not same_values(subject.tensors[item.tensor], partner):
                found.append(finding("tied-differ", f"{partner.name} has other values", tensor=item.tensor))
    return found


# -- against its source ----------------------------------------------------------------------------------------------


def _against(
    subject: Subject, config: ConfigCheck, opened: Opened, files: Files, options: VerifyOptions, progress: Progress | None
) -> tuple[list[Finding], SourceComparison]:
    """Compare with the checkpoint that the output was made from."""
    manifest = subject.manifest
    if _files_of(subject.stored.values()) == _files_of(opened.components[0].component.tensors.values()) != set():
        hint = "pass the checkpoint that it was made from, or --full to check its values without one"
        raise UsageError("--against names what is verified itself, so there is nothing to compare", path=subject.path, hint=hint)
    part, wanted = planned_source(subject.path, subject.tensors, manifest, opened, options.said, files)
    if not subject.readable:
        # What lies in a file that cannot be read is known to be lost.
        wanted = {name: tensor for name, tensor in wanted.items() if name in subject.tensors}
    found, compared = compare_with_source(subject.tensors, wanted, jobs=options.jobs, progress=progress)
    if subject.folder is not None:
        found += different_scales(subject.path, subject.tensors, part, options.lora_alpha)
        found += different_arguments(config.config, part)
    summary = summary_of(opened.found.path, part, subject.tensors, wanted, compared, found)
    damaged = damaged_records(wanted, part.opened.component.tensors.values(), jobs=options.jobs, progress=progress)
    return [*found, *damaged, *changed_sources(manifest)], summary


def _files_of(tensors: Iterable[Tensor]) -> set[tuple[int, int]]:
    """The files that tensors lie in, whatever they are called here."""
    origins = {origin.identity for tensor in tensors for piece in tensor.pieces for origin in piece.source.origins}
    return {(identity.device, identity.inode) for identity in origins}


def _as_in_source(item: Finding) -> Finding:
    """A matrix of zeros that is also zero in the source was trained that way."""
    return finding("zeros", item.message, tensor=item.tensor, file=item.file, **item.numbers) if item.code == "all-zero" else item


# -- against a base --------------------------------------------------------------------------------------------------


def _against_base(
    subject: Subject,
    config: ConfigCheck,
    base: str,
    files: Files,
    options: VerifyOptions,
    progress: Progress | None,
) -> tuple[BaseComparison, list[Finding], Sequence[Note]]:
    """The drift of every tensor since the base, which may be anything that can be opened.

    Also whether it is a base of this model, and the notes from opening it.
    """
    try:
        path = resolve_base(base)
    except NotFound:
        path = Path(base)
    opened = open_checkpoint(path, files, shard_order=options.shard_order, located=locate(path))
    if has_adapters(subject.tensors):
        hint = "fuse them first: ckpt merge with --base, then verify the result"
        raise UsageError("these are LoRA adapters alone, which a base does not have", path=subject.path, hint=hint)
    reference = merged_tensors(opened, files, options.lora_alpha)
    name = str(opened.found.path)
    comparison = compare_tensors(subject.tensors, reference, name, jobs=options.jobs, progress=progress, sample=options.sample)
    settings = different_settings(config.config, opened.components[0].assets.config)
    said = [finding("base-settings", settings_text(settings), file=CONFIG)] if settings else []
    alike = resemblance(subject.tensors, reference, config.config, opened.components[0].assets.config)
    numbers: dict[str, Any] = {"common": alike.common, "alike": alike.alike, "tensors": alike.mine, "base_tensors": alike.base}
    if alike.renamed:
        return comparison, [finding("other-names", alike.numbers, file=name, **numbers), *said], opened.notes
    return comparison, said if alike.same_model else [finding("other-base", alike.why, file=name, **numbers)], opened.notes


def _not_numbers(comparison: BaseComparison) -> list[Finding]:
    """Tensors whose distance to the base is not a number."""
    return [
        finding("not-a-number", f"the largest difference is {drift.max_abs}", tensor=drift.name)
        for drift in comparison.drifts
        if drift.max_abs is not None and not math.isfinite(drift.max_abs)
    ]
