"""What an output is compared with by ``verify --against``: its source, planned again with the options in the manifest."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from ckpt_cli import shell
from ckpt_cli.discover.beside.folders import ADAPTER_WEIGHTS
from ckpt_cli.discover.components import expanded
from ckpt_cli.discover.found import Found, Target
from ckpt_cli.discover.locate import locate
from ckpt_cli.discover.open import Opened, open_checkpoint
from ckpt_cli.drafting.draft import Draft
from ckpt_cli.dtypes import BY_CODE, Dtype
from ckpt_cli.errors import CkptError, CorruptFile, NotFound, Unreadable, UsageError
from ckpt_cli.files.folders import is_there, status_of
from ckpt_cli.files.leftovers.written_over import written_over
from ckpt_cli.files.manifest import Manifest, foreign_entries
from ckpt_cli.files.source import Files
from ckpt_cli.formats.registry import format_of
from ckpt_cli.formats.step_names import number_in_manifest, step_of
from ckpt_cli.hub.assets import CONFIG
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.megatron.config import check_config
from ckpt_cli.hub.peft_names import has_adapters, parse_peft
from ckpt_cli.lora.merge import adapters_alone, exported_scales
from ckpt_cli.lora.parts import within_part
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.merging.plan import planned_drafts
from ckpt_cli.names import LoraMode, Naming, ShardOrder, few
from ckpt_cli.output.plan import OutputTensor
from ckpt_cli.results.verify import Finding, SourceComparison
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.urls import URL, full_name, is_unnamed, recorded
from ckpt_cli.verifying.adapter import scales
from ckpt_cli.verifying.findings import finding
from ckpt_cli.verifying.source import Wanted
from ckpt_cli.verifying.values import not_finite

AVERAGE = "average"
MERGE = "merge"
UNSAID = frozenset({"overwrite", "in_place", "jobs", "dry_run", "verify", "checksum", "strict"})
"""Options that do not change what is written."""

SAYABLE = frozenset({"names", "key_map", "include", "exclude", "lora_alpha"})
"""Options that `verify` also has."""


def merged_from(manifest: Manifest | None, source: Found) -> Manifest | None:
    """The manifest of an output if it was merged from this source, or one like it; None if the source is to be taken as it is."""
    if manifest is None or manifest.command != MERGE:
        return None
    return manifest if not _is_plain(source) or full_name(source.path) == manifest.facts.get("checkpoint") else None


def _is_plain(source: Found) -> bool:
    """Whether loaders read the files as they are. Adapters are none: they are loaded on top of a model."""
    return all(format_of(place.match).is_loaded and not ADAPTER_WEIGHTS.fullmatch(place.match.first.name) for place in source.places)


def _base_of(manifest: Manifest | None, folder: Path) -> Path | None:
    """The base that the merge of a folder had. Raises CorruptFile, and UsageError for one in a store that the caller did not name."""
    base = manifest.facts.get("base") if manifest is not None else None
    if isinstance(base, str) and ("\0" in base or not base.isprintable()):
        raise CorruptFile("the manifest names no valid base", path=folder)
    path = recorded(base) if isinstance(base, str) else None
    if path is not None and is_unnamed(path):
        text = "the base of this merge is in a store, and what is asked there is not for a manifest to decide"
        raise UsageError(text, path=folder, expected=f"a word that {base} may be read", hint=f"pass --base {shell.path(path)}")
    return path


def planned_source(
    folder: Path, tensors: Mapping[str, Tensor], manifest: Manifest | None, opened: Opened, said: Mapping[str, Any], files: Files
) -> tuple[Draft, dict[str, Wanted]]:
    """The part of a merge that made these tensors of a folder, and what it would write, by name.

    ``said`` are options of the user. The manifest is used if the source is what was merged; another Hugging Face folder is
    taken as it is. Raises UsageError for an average, which equals none of its checkpoints, and for a model that another program made of
    adapters alone, and what planning a merge raises.
    """
    known = merged_from(manifest, opened.found)
    if manifest is not None and manifest.command == AVERAGE and not _is_plain(opened.found):
        averaged = manifest.facts.get("averaged")
        count = len(averaged) if isinstance(averaged, list) else "several"
        proof = ", which uses its checksums" if any(manifest.checksums.values()) else ""
        hint = f"compare it with another average, or pass --full{proof}"
        raise UsageError(f"this is an average of {count} checkpoints, which equals none of them", path=folder, hint=hint)
    options, base = remade_options(known, said), _base_of(known, folder)
    if base is None and not has_adapters(tensors) and all(adapters_alone(one.component.tensors) for one in opened.components):
        # Other programs round the sums otherwise (docs/lora.md), so that bits would not prove what they made of a base either.
        raise UsageError(
            "--against names LoRA adapters alone, and nothing here says that ckpt fused them into this model, nor with which base",
            path=opened.found.path,
            expected="an output of ckpt merge with --base, whose manifest says so",
            hint=f"fuse them once more, and look how far the two are apart: {_fused_again(opened, folder)}",
        )
    parts = planned_drafts(opened, base, options, files)
    names = {Path(tensor.pieces[0].source.path).name for tensor in tensors.values() if tensor.pieces}
    part = next((part for part in parts if names & {file.name for file in part.plan.files} and len(parts) > 1), parts[0])
    kept = known.kept_in_fp32 if known is not None else ()
    wanted = {output.name: Wanted(output.tensor, _dtype_of(output, kept) if known is not None else None) for output in part.plan.tensors}
    for head, partner in part.selection.tied.items():
        if head in tensors and partner in wanted:
            wanted[head] = wanted[partner]
    return part, wanted


def _fused_again(opened: Opened, folder: Path) -> str:
    """The commands that fuse adapters and show the difference from a model that was made of them elsewhere."""
    merged = shell.path(f"{folder.name}_again")
    return f"ckpt merge {shell.path(opened.found.path)} --base BASE -o {merged}, then ckpt diff {merged} {shell.path(folder)}"


def _dtype_of(output: OutputTensor, kept: Collection[str]) -> Dtype:
    """The dtype that a merge wrote a tensor in; ``kept`` are those that its manifest says are in fp32."""
    return BY_CODE["F32"] if output.name in kept and output.tensor.dtype.kind == "float" else output.dtype


def different_scales(folder: Path, tensors: Mapping[str, Tensor], part: Draft, alpha: float | None) -> list[Finding]:
    """Modules that an exported adapter's config scales differently from the run."""
    if part.lora is None or part.lora.outcome != "exported":
        return []
    weights = within_part(parse_peft(part.opened.component.tensors)).tensors
    mine, theirs = scales(folder, tensors, weights), exported_scales(part.opened, alpha)
    return [
        finding("different-scale", f"{mine[module]:.6g}, but the run says {scale:.6g}", tensor=module, file="adapter_config.json")
        for module, scale in theirs.items()
        if module in mine and mine[module] != scale
    ]


def different_arguments(config: Config, part: Draft) -> list[Finding]:
    """What the config of an output with the hub's names says otherwise than the arguments of a training with Megatron."""
    if not config or part.selection.naming != "hub":
        return []
    try:
        check_config(config, part.opened.component.arguments)
    except CkptError as error:
        return [finding("other-arguments", error.message, file=CONFIG)]
    return []


def open_source(
    path: Path,
    files: Files,
    folder: Path,
    manifest: Manifest | None,
    *,
    type: str | None,
    step: int | None,
    also: tuple[Path, ...] = (),
    shard_order: ShardOrder = "auto",
) -> Opened:
    """The source of an output folder: for a run, the step (and components) that the manifest names, unless others are requested."""
    said = number_in_manifest(manifest.facts) if manifest is not None else None
    target = locate(path, None, also)
    known = {found.step for found in target.checkpoints} if target.run is not None else set()
    if step is None and said is not None and known and manifest is not None and manifest.command == MERGE:
        unread = (*(each.step for each in target.blocked), *map(step_of, (*target.bare, *target.partial)))
        if said not in (*known, *unread):
            raise _gone(target, said, known, manifest)
        known |= {said}  # a step that is not whole is refused where it is opened, and no other one takes its place
    component = str(manifest.facts.get("component")) if manifest is not None and manifest.command == "merge" else None
    places = {place.name for found in target.checkpoints for place in found.places}
    if component is not None and component not in places:
        # It may be one of several in a folder or a file, which names alone do not tell.
        places |= {place.name for place in expanded(target.checkpoints[-1], files).places}
    wanted = type or (component if component in places else "both" if component == "model+ema" else None)
    merged = next((made for found in target.checkpoints if (made := merged_from(manifest, found)) is not None), None)
    ema_from_model = manifest is not None and manifest.options.get("ema_from_model") is True
    return open_checkpoint(
        path,
        files,
        type=wanted,
        step=step if step is not None else said if said in known else None,
        base=_base_of(merged, folder),
        also=also,
        shard_order=_order(manifest, shard_order),
        ema_from_model=ema_from_model,
    )


def _gone(target: Target, said: int, known: Collection[int | None], manifest: Manifest) -> NotFound:
    """The error for a run without the step that an output was merged from: any other one has other values."""
    there = few([str(step) for step in sorted(step for step in known if step is not None)], 6)
    proof = "--full checks the values by the checksums in the manifest, without a source; " if any(manifest.checksums.values()) else ""
    return NotFound(
        f"this was merged from step {said}, which is not in this run, or not any more",
        path=target.path,
        expected=f"step {said}; there are {there}",
        hint=f"{proof}--step N compares with another step all the same",
    )


def _order(manifest: Manifest | None, asked: ShardOrder) -> ShardOrder:
    """The user's option, or else that of the merge."""
    said = manifest.options.get("shard_order") if manifest is not None else None
    known: tuple[ShardOrder, ...] = get_args(ShardOrder)
    return next((order for order in known if order == said), asked) if asked == "auto" else asked


def remade_options(manifest: Manifest | None, said: Mapping[str, Any]) -> MergeOptions:
    """How an output was made: by its manifest and the user's options. Options that only concern writing are left out.

    Which tensors were kept in fp32 is for the manifest to say: older ones of ckpt cast all, and others may know more classes.

    Raises CorruptFile for a manifest with options that no merge has.
    """
    made: dict[str, Any] = {}
    for field in fields(MergeOptions):
        value = manifest.options.get(field.name) if manifest is not None else None
        if value is None or field.name in UNSAID | {"compare", "max_shard_size", "allow_unequal_replicas"}:
            continue
        made[field.name] = tuple(value) if isinstance(value, list) else value
        if field.name not in said and not _fits(made[field.name], field.default, field.name):
            hint = f"pass --{field.name.replace('_', '-')} yourself" if field.name in SAYABLE else None
            raise CorruptFile(f"the manifest has no valid option {field.name}", hint=hint)
    return MergeOptions(**{**made, **said, "allow_unequal_replicas": True, "cast_all": True})


def _fits(value: object, default: object, name: str) -> bool:
    """Whether a value has the type of an option."""
    if isinstance(default, tuple):
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if isinstance(default, bool):
        return isinstance(value, bool)
    if name == "lora_alpha":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    allowed = {"names": get_args(Naming), "lora": get_args(LoraMode), "shard_order": get_args(ShardOrder)}.get(name)
    return isinstance(value, str) and (allowed is None or value in allowed)


def summary_of(
    source: Path, part: Draft, tensors: Mapping[str, Tensor], wanted: Mapping[str, Wanted], compared: int, found: Sequence[Finding]
) -> SourceComparison:
    """What was compared with a planned component, in numbers."""
    shared = [name for name in wanted if name in tensors]
    common = [name for name in shared if name not in part.from_base]
    cast = sum(wanted[name].tensor.dtype != tensors[name].dtype for name in common)
    lora = part.lora if part.lora is not None and part.lora.outcome == "fused" else None
    return SourceComparison(
        source=str(source),
        component=part.opened.name,
        tensors=len(common),
        from_base=len(shared) - len(common),
        bytes=compared - sum(wanted[name].tensor.nbytes for name in shared if name in part.from_base),
        cast=cast,
        different=len({item.tensor for item in found if item.tensor is not None}),
        lora=lora,
    )


def as_in_source(item: Finding, tensors: Mapping[str, Tensor], wanted: Mapping[str, Wanted]) -> Finding:
    """What a source with the same values says of a finding about one of the ``tensors``: they were trained that way.

    A matrix of zeros is nothing odd then. Values that are not finite are still worth telling, unless a cast made them.
    """
    said: dict[str, Any] = {"tensor": item.tensor, "file": item.file, **item.numbers}
    if item.code == "all-zero":
        return finding("zeros", item.message, **said)
    if item.code != "non-finite" or item.tensor is None:
        return item
    held, source = tensors.get(item.tensor), wanted.get(item.tensor)
    if held is None or source is None or item.file not in {Path(piece.source.path).name for piece in held.pieces}:
        return item
    if source.tensor.dtype != held.dtype and not_finite(source.tensor) != not_finite(held):
        return item
    return finding("non-finite-in-source", f"{item.message}, as in the source", **said)


def changed_sources(manifest: Manifest | None) -> list[Finding]:
    """Files named in the manifest that have changed since: a hint if values differ."""
    listed = manifest.facts.get("sources") if manifest is not None else None
    found = []
    for source in listed if isinstance(listed, list) else []:
        # Which host is asked is not for a file to decide.
        if isinstance(source, dict) and isinstance(source.get("path"), str) and not URL.fullmatch(source["path"]):
            try:
                status = status_of(source["path"])
            except Unreadable as error:
                found.append(finding("changed-source", error.message, file=source["path"]))
                continue
            if status is None:
                found.append(finding("changed-source", "is no longer there", file=source["path"]))
            elif _times(status) != (source.get("size"), source.get("mtime_ns"), source.get("ctime_ns", status.st_ctime_ns)):
                found.append(finding("changed-source", "changed in size or time since the merge", file=source["path"]))
    return found


def _times(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def made_from(manifest: Manifest | None) -> str | None:
    """The checkpoint that an output was merged from, if it still exists there."""
    source = manifest.facts.get("checkpoint") if manifest is not None and manifest.command == MERGE else None
    path = recorded(source) if isinstance(source, str) else None
    try:
        return source if path is not None and isinstance(source, str) and not is_unnamed(path) and is_there(path) else None
    except Unreadable:
        return None  # only asked for the next command


def made_of(manifest: Manifest | None) -> str | None:
    """The component of that checkpoint: "model+ema" for two in one folder."""
    component = manifest.facts.get("component") if manifest is not None and manifest.command == MERGE else None
    return component if isinstance(component, str) and component.isprintable() else None


def made_at(manifest: Manifest | None) -> int | None:
    """The step of that checkpoint."""
    step = manifest.facts.get("step") if manifest is not None and manifest.command == MERGE else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _also(manifest: Manifest) -> list[str]:
    """The folders of other nodes that an output was merged from, as options."""
    said = manifest.facts.get("also")
    return [word for folder in (said if isinstance(said, list) else []) if isinstance(folder, str) for word in ("--also", folder)]


def _holds_others(folder: Path, manifest: Manifest) -> bool:
    """Whether `--overwrite` refuses a folder, for files or weights that ckpt did not write."""
    try:
        return bool(foreign_entries(folder) or written_over(folder, manifest))
    except CkptError:
        return True  # only asked for the next command


def made_by(manifest: Manifest | None, folder: Path) -> tuple[str, ...]:
    """The command that would write an output again, word by word; empty if there is no source, or weights that were saved there since."""
    source = made_from(manifest)
    if manifest is None or source is None or manifest.options.get("in_place") or _holds_others(folder, manifest):
        return ()
    words = ["ckpt", "merge", source, *_also(manifest), "-o", str(folder)]
    component, base = manifest.facts.get("component"), manifest.facts.get("base")
    if isinstance(component, str):
        words += ["--type", "both" if component == "model+ema" else component]
    if isinstance(base, str):
        words += ["--base", base]
    for field in fields(MergeOptions):
        value = manifest.options.get(field.name)
        if field.name in UNSAID or value in (None, False, [], field.default):
            continue
        flag = f"--{field.name.replace('_', '-')}"
        words += (
            [flag] if value is True else [word for item in (value if isinstance(value, list) else [value]) for word in (flag, str(item))]
        )
    return (*words, "--overwrite", "--verify")
