"""`verify`: checks a model folder and reports problems as findings. It writes nothing but a plot."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from ckpt_cli import shell
from ckpt_cli.base_model.alike import seen_alike
from ckpt_cli.base_model.resemblance import resemblance
from ckpt_cli.commands.verify_source import (
    as_in_source,
    changed_sources,
    different_arguments,
    different_scales,
    made_at,
    made_by,
    made_from,
    made_of,
    merged_from,
    open_source,
    planned_source,
    summary_of,
)
from ckpt_cli.commands.verify_subjects import (
    Subject,
    config_of,
    find_subjects,
    in_parts,
    is_output,
    merged_tensors,
    refuse_itself,
    set_subject,
    values_of,
)
from ckpt_cli.discover.around.given_otherwise import give
from ckpt_cli.discover.locate import locate
from ckpt_cli.discover.open import Opened, open_checkpoint
from ckpt_cli.drafting.draft import Draft
from ckpt_cli.errors import NotFound, UsageError, within_memory
from ckpt_cli.files.source import Files
from ckpt_cli.given import PathLike, boundary, optional_path, path_of, path_text, paths_of, progress_of
from ckpt_cli.hub.assets import resolve_base
from ckpt_cli.hub.classes.shapes.turned import turned_notes
from ckpt_cli.hub.config import architecture
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.lora.alphas.guessed import GUESSED
from ckpt_cli.merging.left_to_base import REPEATED
from ckpt_cli.merging.trained_on import recorded_snapshot
from ckpt_cli.names import few, printable
from ckpt_cli.output.part import AUTO, WHOLE_FILES, Part
from ckpt_cli.progress import Progress
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.drift import BaseComparison
from ckpt_cli.results.verify import SEVERITIES, Finding, SourceComparison, VerifyPart, VerifyResult
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.records import DamagedRecord
from ckpt_cli.tensors.torn import torn_files
from ckpt_cli.verifying.checks import ALL, Checks, ChecksOfPart, by_component, without_repeats
from ckpt_cli.verifying.config import ConfigCheck
from ckpt_cli.verifying.drift.compare import compare_tensors
from ckpt_cli.verifying.drift.findings import lacking_findings, not_numbers, settings_findings, unlike_findings, without_replaced
from ckpt_cli.verifying.drift.plot import check_plot, draw
from ckpt_cli.verifying.findings import finding
from ckpt_cli.verifying.folder import check_folder
from ckpt_cli.verifying.gathering import GatheredChecks, answered, read_parts, result_of
from ckpt_cli.verifying.launched import check_beside_of, parts_of_nodes, parts_that_meet
from ckpt_cli.verifying.left_out import left_out, partial_output
from ckpt_cli.verifying.options import Asked, Reading, VerifyKeywords, VerifyOptions
from ckpt_cli.verifying.side_files import different_side_files
from ckpt_cli.verifying.source import Wanted, compare_with_source, damaged_records
from ckpt_cli.verifying.values import check_headers


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
    gather: PathLike | Sequence[PathLike] = (),
    progress: Progress | None = None,
    **options: Unpack[VerifyKeywords],
) -> VerifyResult:
    """Check a model folder, or a sharded checkpoint, and report findings.

    Always: headers, index, sizes, manifest, and whether config.json, tokenizer and tensors match; no weights are
    read. ``full=True`` reads every byte; ``against`` names the source that the output must equal, bit for bit; ``base`` a model
    or checkpoint to compare with, whose differences are information; ``plot`` a picture of these (.png, .svg, .html).
    ``gather`` are the documents of all parts (`verify_part`): what they read is not read again, and options come from them.
    ``options`` are those of `VerifyKeywords`.

    Raises InputError and IncompleteError for what cannot be opened at all, UsageError; of parts also MissingParts.
    """
    documents = paths_of(gather, "--gather")
    if documents and options.get("engine") == "ray":
        raise UsageError("--gather reads no weights, so --engine ray does not apply", hint="leave out one of them")
    asked, progress = Asked.of(path, options, type=type, step=step, also=also, against=against), progress_of(progress)
    picture = optional_path(plot, "--plot", use="local")
    reference = path_text(base, "--base") if base is not None else None
    if picture is not None:
        if reference is None:
            raise UsageError("--plot draws how far tensors moved from a base", hint="ckpt verify PATH --base DIR --plot FILE")
        check_plot(picture)
    if documents:
        parts = read_parts(documents)
    elif asked.options.engine == "ray":
        parts = parts_of_nodes(verify_part, asked, progress)
    else:
        return _of_parts(asked, progress) if reference is None and in_parts(asked) else _verified(asked, ALL, progress, reference, picture)
    checks = GatheredChecks(parts)
    result = _verified(answered(asked, parts[0]), checks, progress, reference, picture)
    checks.finish()
    return result


@boundary
@within_memory
def verify_part(
    path: PathLike,
    part: str,
    *,
    type: str | None = None,
    step: int | None = None,
    also: PathLike | Sequence[PathLike] = (),
    against: PathLike | None = None,
    progress: Progress | None = None,
    **options: Unpack[VerifyKeywords],
) -> VerifyPart:
    """Do a part of what `verify` reads: ``part`` is "K/N", counted from 0, or "auto" for what a launcher says.

    The result is no verdict: `verify` gathers the JSON of all parts. Raises what `verify` raises.
    """
    chosen, started, progress = Part.chosen(part), time.monotonic(), progress_of(progress)
    asked = Asked.of(path, options, type=type, step=step, also=also, against=against, part=chosen)
    if chosen.whole_files:
        raise UsageError(f"{WHOLE_FILES} is for parts that write files", hint=f"pass --part {chosen.number}/{chosen.count}")
    checks = ChecksOfPart(chosen)
    _verified(asked, checks, progress)
    return result_of(checks, asked, time.monotonic() - started)


@boundary
@within_memory
def verify_launched(path: PathLike, *, progress: Progress | None = None, **given: Any) -> VerifyResult | VerifyPart:
    """As one of the processes that a launcher started: the part of this one, or, for the one that is done last, the result of all.

    The parts meet in a folder beside ``path``, which is gone afterwards. Arguments as of `verify_part`. Raises what `verify` raises, and
    NotWritable.
    """
    folder = path_of(path)
    check_beside_of(folder)
    part = verify_part(path, AUTO[0], progress=progress, **given)
    with parts_that_meet(folder, part) as documents:
        return verify(path, gather=documents, progress=progress, **given) if documents else part


def _of_parts(asked: Asked, progress: Progress | None) -> VerifyResult:
    """All parts of a model that has several, each compared with that of the same name in the source."""
    return VerifyResult.of_parts(str(asked.path), {name: _verified(each, ALL, progress) for name, each in in_parts(asked).items()})


def _verified(
    asked: Asked, checks: Checks, progress: Progress | None, reference: str | None = None, picture: Path | None = None
) -> VerifyResult:
    path, source, chosen, started = asked.path, asked.against, asked.options, time.monotonic()
    with Files(progress=progress) as files:
        give(files, (path, source, reference))
        of_source = source is not None and is_output(path)
        subjects = find_subjects(path, files, asked, of_source=of_source)
        subject, levels, checksums, read = subjects[0], ["headers"], 0, 0
        names = [one.component for one in subjects]
        if reference is not None and len(subjects) > 1:
            hint = f"pass one of them: --type {shell.word(names[0])}"
            raise UsageError(f"--base is compared with one component, and there are {len(names)}: {few(names)}", path=path, hint=hint)
        configs = [config_of(one) for one in subjects]
        found = [
            [
                *one.findings,
                *left_out(one.manifest, config, chosen.include, chosen.exclude),
                *partial_output(one.manifest, config),
                *(finding(t.code, t.text, file=Path(t.path).name, bytes=t.holes) for t in torn_files(one.stored.values(), ends=False)),
            ]
            for one, config in zip(subjects, configs, strict=True)
        ]
        if chosen.full or chosen.sample is not None:
            levels.append("full" if chosen.sample is None else "sample")
            values = values_of(subjects, [config.findings for config in configs], files, chosen, progress, checks)
            found = [[*items, *outcome.findings] for items, outcome in zip(found, values, strict=True)]
            if subject.manifest is not None and chosen.full:
                found[0] += check_headers(subject.path, subject.manifest.headers, files, found[0])
            checksums, read = sum(outcome.compared for outcome in values), sum(outcome.bytes_read for outcome in values)
        notes = [note for one in subjects for note in one.notes]
        sources: list[SourceComparison] = []
        if source is not None:
            levels.append("against")
            for number, (one, config) in enumerate(zip(subjects, configs, strict=True)):
                opened = open_source(
                    source,
                    files,
                    one.path,
                    one.manifest,
                    type=one.component if len(subjects) > 1 and one.folder is None else asked.type,
                    step=asked.step if of_source else None,
                    also=asked.also if of_source else (),
                    shard_order=chosen.shard_order,
                )
                notes += opened.notes
                different, summary, guessed, wanted = _against(one, config, opened, files, chosen, progress, checks, number)
                notes += guessed
                wrong = {item.tensor for item in different}
                kept = [item if item.tensor in wrong else as_in_source(item, one.stored, wanted) for item in found[number]]
                found[number] = kept + different
                sources.append(summary)
        comparison = None
        if reference is not None:
            levels.append("base")
            comparison, found[0], said = _against_base(subject, configs[0], found[0], reference, files, chosen, progress)
            notes += said
            found[0] += not_numbers(comparison)
            if picture is not None and comparison is not None:
                draw(comparison, picture, name=str(subject.path))
        files.check_unchanged()
    measured: dict[str, Any] = {"checksums": checksums, "bytes_read": read, "against": tuple(sources), "comparison": comparison}
    measured["notes"] = tuple(NoteInfo.of(note) for note in dict.fromkeys(notes))
    config = ConfigCheck.of_components(dict(zip(names, configs, strict=True)))
    return _report(subjects, config, by_component(list(zip(names, found, strict=True))), levels, started, **measured)


def verify_written(
    folder: Path, name: Path, parts: Sequence[Draft], source: Path, records: Sequence[Finding] | None = None, **how: Unpack[Reading]
) -> tuple[VerifyResult, ...]:
    """Check a folder just written from planned components: headers, config, and every byte against the source.

    ``name`` is the one that the folder has or will have; ``records`` is what is wrong with those of the
    source, if they were read before (`damaged_of`).
    """
    results = []
    with Files() as files:
        checked = check_folder(folder, files)
        for part in parts:
            started = time.monotonic()
            names = {file.name for file in part.plan.files}
            weights = next((one for one in checked.sets if names & {path.name for path in one.files}), checked.sets[0])
            subject = set_subject(folder, checked, weights)
            config = config_of(subject)
            wanted = _wanted(part)
            different, compared = compare_with_source(subject.tensors, wanted, **how)
            summary = summary_of(source, part, subject.tensors, wanted, compared, different)
            damaged = damaged_of([part], **how) if records is None else records
            found = [*subject.findings, *left_out(subject.manifest, config), *different, *damaged]
            results.append(_report([replace(subject, path=name)], config, found, ["headers", "against"], started, against=(summary,)))
        files.check_unchanged()
    return tuple(results)


def damaged_of(parts: Sequence[Draft], **how: Unpack[Reading]) -> list[Finding]:
    """Findings about the records that planned components are made of."""
    return [item for part in parts for item in damaged_records(_wanted(part), part.opened.component.tensors.values(), **how)]


def _wanted(part: Draft) -> dict[str, Wanted]:
    return {output.name: Wanted(output.tensor, output.dtype) for output in part.plan.tensors}


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
        made_at=made_at(subject.manifest),
        made_by=made_by(subject.manifest, subject.path),
        levels=tuple(levels),
        expected=config.expected,
        naming=config.naming,
        names=config.names,
        wrapped=config.wrapped,
        findings=tuple(sorted(without_repeats(found), key=lambda item: SEVERITIES.index(item.severity))),
        seconds=time.monotonic() - started,
        **measured,
    )


# -- against its source ----------------------------------------------------------------------------------------------


def _against(
    subject: Subject,
    config: ConfigCheck,
    opened: Opened,
    files: Files,
    options: VerifyOptions,
    progress: Progress | None,
    checks: Checks,
    number: int,
) -> tuple[list[Finding], SourceComparison, list[Note], Mapping[str, Wanted]]:
    """Compare with the checkpoint that the output was made from, and what that would write.

    The notes are about what was taken for granted of its adapters.
    """
    manifest = subject.manifest
    hint = "pass the checkpoint that it was made from, or --full to check its values without one"
    refuse_itself(subject, opened, "--against", hint)
    part, wanted = planned_source(subject.path, subject.tensors, manifest, opened, options.said, files)
    if not subject.readable:
        # What lies in a file that cannot be read is known to be lost.
        wanted = {name: tensor for name, tensor in wanted.items() if name in subject.tensors}
    shared: dict[str, Any] = {"jobs": options.jobs, "progress": progress, "checks": checks}
    found, compared = compare_with_source(subject.tensors, wanted, name=f"against {number}", **shared)
    if subject.folder is not None:
        found += different_scales(subject.path, subject.tensors, part, options.lora_alpha)
        found += different_arguments(config.config, part)
        found += different_side_files(subject.folder.folder, part, merged_from(manifest, opened.found), files)
    summary = summary_of(opened.found.path, part, subject.tensors, wanted, compared, found)
    damaged = damaged_records(wanted, part.opened.component.tensors.values(), name=f"records {number}", **shared)
    guessed = [note for note in part.notes if note.code in (*GUESSED, *REPEATED)]
    return [*found, *damaged, *changed_sources(manifest)], summary, guessed, wanted


# -- against a base --------------------------------------------------------------------------------------------------


def _against_base(
    subject: Subject,
    config: ConfigCheck,
    found: Sequence[Finding],
    base: str,
    files: Files,
    options: VerifyOptions,
    progress: Progress | None,
) -> tuple[BaseComparison | None, list[Finding], Sequence[Note]]:
    """The drift of every tensor since the base, which may be anything that can be opened.

    Also what was found, with whether it is a base of this model, and the notes from opening it.
    """
    try:
        path = recorded_snapshot(base, resolve_base(base), subject.manifest)
    except NotFound:
        path = Path(base)
    opened = open_checkpoint(path, files, shard_order=options.shard_order, located=locate(path))
    if has_adapters(subject.tensors):
        hint = "fuse them first: ckpt merge with --base, then verify the result"
        raise UsageError("these are LoRA adapters alone, which a base does not have", path=subject.path, hint=hint)
    refuse_itself(subject, opened, "--base", "pass the model that training started from")
    its = opened.components[0].assets.config
    reference, turned = seen_alike(merged_tensors(opened, files, options.lora_alpha), subject.tensors, (config.config, its))
    notes = (*opened.notes, *turned_notes(turned, "the base"))
    name = str(opened.found.path)
    try:
        comparison = compare_tensors(subject.tensors, reference, name, jobs=options.jobs, progress=progress, sample=options.sample)
    except DamagedRecord as error:
        return None, [*found, finding("wrong-checksum", error.expected or "", tensor=error.tensor, file=error.path)], notes
    said = settings_findings(config.config, subject.config_home, opened.components[0].assets)
    alike = resemblance(subject.tensors, reference, config.config, its)
    numbers: dict[str, Any] = {"common": alike.common, "alike": alike.alike, "tensors": alike.mine, "base_tensors": alike.base}
    if alike.renamed:
        return comparison, [*found, finding("other-names", alike.numbers, file=name, **numbers), *said], notes
    if not alike.same_model:
        return comparison, [*found, finding("other-base", alike.why, file=name, **numbers)], notes
    said += unlike_findings(subject.tensors, reference, comparison, name)
    said += lacking_findings(subject.tensors, reference, config, its, subject.manifest, options.include, options.exclude)
    return comparison, [*without_replaced(found, config, reference, its), *said], notes
