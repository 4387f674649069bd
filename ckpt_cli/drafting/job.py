"""A folder to be written: its drafts, its plan, its side files, and what manifest, approval and result of every command have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from typing_extensions import Self

from ckpt_cli.base_model.opened import Base
from ckpt_cli.discover.beside.outputs import changed_side_notes, lost_side_notes
from ckpt_cli.discover.open import OpenedComponent
from ckpt_cli.drafting.draft import UNPLANNED, Draft, Options, Setting
from ckpt_cli.drafting.held_beside import tell_what_is_there
from ckpt_cli.drafting.parts_of_base import parts_of_base
from ckpt_cli.errors import Inconsistent, MissingTensors
from ckpt_cli.files.crc32 import crc_of_content
from ckpt_cli.files.manifest import BESIDE, FUSED, KEPT, LEFT_OUT
from ckpt_cli.files.source import Files, Watched
from ckpt_cli.hub.assets import CONFIG
from ckpt_cli.hub.beside.families import is_decided
from ckpt_cli.hub.beside.lacking import lacking_beside_adapter, lacking_notes
from ckpt_cli.hub.classes.claims import Claim, refuse_lacking
from ckpt_cli.hub.classes.in_memory.shadowed import refuse_shadowed
from ckpt_cli.hub.text_assets import text_notes
from ckpt_cli.hub.tokenizer_file import TOKENIZER
from ckpt_cli.names import printable, stripped_names
from ckpt_cli.output import manifest
from ckpt_cli.output.interrupted.place import refuse_held
from ckpt_cli.output.key_map import lasting_key_map
from ckpt_cli.output.options import PUSHING, WritingOptions
from ckpt_cli.output.plan import Plan
from ckpt_cli.output.publish import (
    Order,
    OutputFolder,
    Publication,
    SideFiles,
    model_files,
    overflow_notes,
    refuse_overflows,
    written_facts,
)
from ckpt_cli.output.strict import refuse_warnings
from ckpt_cli.output.target import check_target
from ckpt_cli.output.writer import Written
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.written import ClassComparison
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

PASSING = PUSHING | {"dry_run", "overwrite", "jobs", "checksum", "part", "engine", "ray_address", "ray_parts", "write"}
"""Options that do not change what is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One output folder: one component, or several that share it. ``facts`` are those of the command, for the manifest.

    ``notes`` is all that is known before anything is written; ``watched`` are sources besides those of the weights.
    """

    drafts: tuple[Draft, ...]
    output: Path
    plan: Plan
    side_files: SideFiles
    notes: tuple[Note, ...]
    facts: Mapping[str, Any]
    state_files: tuple[str, ...] = ()
    watched: tuple[Watched, ...] = ()

    @classmethod
    def of(
        cls,
        drafts: Sequence[Draft],
        output: Path,
        whole: Plan,
        setting: Setting[Options],
        facts: Mapping[str, Any],
        side_files: SideFiles | None = None,
        **more: Any,
    ) -> Self:
        """The folder of drafts, with the assets of the first one unless ``side_files`` says what goes beside the weights."""
        first = drafts[0]
        if side_files is None:
            written = {file.name for file in whole.files}
            side_files = {name: content for name, content in model_files(first.assets, whole).items() if name not in written}
        texts = {name: path for name, path in first.assets.files.items() if name in side_files}
        base = setting.base.folder if setting.base is not None else None
        notes = (
            *(note for draft in drafts for note in draft.notes),
            *_lacking(first, base, output, side_files),
            *(() if first.is_adapter else parts_of_base(setting.base, drafts, output)),  # it is loaded with the base as it is
            *_unlike_manifests(first, setting.base, side_files),
            *text_notes(texts, {TOKENIZER: first.assets.tokenizer}),
        )
        notes = tuple(dict.fromkeys(notes))
        beside = [each for draft in drafts for source in draft.sources for each in (*source.assets.watched, *source.component.watched)]
        beside += setting.base.watched if setting.base is not None else ()
        weights = {source.identity.path for source in whole.sources}
        watched = tuple({each.identity: each for each in beside if each.identity.path not in weights}.values())
        return cls(
            drafts=tuple(drafts), output=output, plan=whole, side_files=side_files, notes=notes, facts=facts, watched=watched, **more
        )

    @property
    def name(self) -> str:
        return "+".join(draft.opened.name for draft in self.drafts)

    def met(self, written: Written) -> list[Note]:
        """Notes about values that were found while writing, if they are allowed."""
        return overflow_notes(written)

    def approve(self, written: Written, options: WritingOptions) -> None:
        """Raise CastOverflow or Warned for what was found while writing, before anything is published."""
        if not options.allow_overflow:
            refuse_overflows(written, self.plan)
        if options.strict:
            refuse_warnings(self.met(written))

    def order(self, command: str, options: WritingOptions, *, in_place: bool = False, passing: Iterable[str] = ()) -> Order:
        """What `publish` needs; ``passing`` are more options that do not change what is written."""
        return Order(
            self.plan,
            self.side_files,
            OutputFolder(self.output, options.overwrite, in_place),
            lambda written: self._manifest(command, options, {*PASSING, *passing}, written),
            approve=lambda written: self.approve(written, options),
            watched=self.watched,
        )

    def _manifest(self, command: str, options: WritingOptions, passing: set[str], written: Written) -> bytes:
        facts = {
            **self.facts,
            "elements": self.plan.elements,
            "dropped": dict(self.plan.dropped),
            BESIDE: manifest.listed(self.watched),
            "names": [draft.claim.text for draft in self.drafts],
            KEPT: sorted(self.plan.kept),
            LEFT_OUT: sorted({name for draft in self.drafts for name in draft.left_out}),
            FUSED: sorted({digest for draft in self.drafts for digest in draft.fused}),
        }
        settings = {name: getattr(options, name) for name in (field.name for field in fields(options)) if name not in passing}
        settings["key_map"] = lasting_key_map(options.key_map)
        return manifest.build(command, self.plan, written, options=settings, side_files=self.side_files, facts=facts)

    def result(self, options: WritingOptions, published: Publication) -> dict[str, Any]:
        """The fields of a `WrittenFolder`."""
        first = self.drafts[0]
        notes = dict.fromkeys((*self.notes, *self.met(published.written), *published.notes))
        beside = published.written.side_files
        if options.dry_run:
            with Files() as files:
                copied = {name: content for name, content in published.side_files.items() if name not in self.state_files}
                beside = {name: crc_of_content(content, files) for name, content in copied.items()}
        return {
            **written_facts(self.plan, self.output, published, options.jobs, not_assets=self.state_files),
            "component": self.name,
            "side_checksums": dict(beside),
            "output": str(self.output),
            "naming": first.claim.text,
            "compared": _class_comparison(first.claim),
            "carried": tuple(name for draft in self.drafts for name in draft.carried),
            "renamed": sum(draft.selection.renamed for draft in self.drafts),
            "left_out": sum(draft.selection.left_out for draft in self.drafts),
            "lacking": () if first.is_adapter else tuple(first.assets.lacking),
            "notes": tuple(NoteInfo.of(note) for note in notes),
        }


def _lacking(draft: Draft, base: Path | None, output: Path, side_files: SideFiles) -> list[Note]:
    """What the files beside a draft lack; an adapter is loaded on a model, and need not have all that belongs to one."""
    if not draft.is_adapter:
        return lacking_notes(draft.assets, base, output)
    files = {name: path for name, path in draft.assets.files.items() if name in side_files}
    return lacking_beside_adapter(replace(draft.assets, files=files), output)


def _unlike_manifests(draft: Draft, base: Base | None, side_files: SideFiles) -> list[Note]:
    """Warnings about files that the manifests of a draft's sources and base list, and that are not there any more, or changed."""
    files, written = draft.assets.files, {*side_files, *draft.assets.lost.files}
    notes = [note for source in draft.sources for note in lost_side_notes(source.component.root, source.made, written)]
    notes += [note for source in draft.sources for note in changed_side_notes(source.component.root, source.made, files.values())]
    if base is not None and not draft.is_adapter and (made := base.manifest) is not None:
        of_run = {name: path for name, path in files.items() if not path.is_relative_to(base.folder)}
        notes += lost_side_notes(base.folder, made, {*written, *(name for name in made.side_files if is_decided(name, of_run))})
        notes += changed_side_notes(base.folder, made, files.values())
    return notes


def refuse_drafts(drafts: Sequence[Draft], setting: Setting[Options]) -> None:
    """Raise MissingTensors or Inconsistent for a draft that a loader of its model would not accept."""
    for draft in drafts:
        _refuse_odd_counts(draft)
        refuse_shadowed(draft.selection.kind, draft.tensors)
        shapes = {name: tensor.shape for name, tensor in draft.tensors.items()}
        # A key map replaces what is done about names without one, and is not combined with another.
        plain = not setting.rules and not draft.selection.change
        trained = set(stripped_names(draft.stored).values()) if plain else ()
        try:
            refuse_lacking(draft.claim, shapes, _asked_for_more(draft, setting), setting.options.names, draft.uncommon, trained)
        except MissingTensors as error:
            tell_what_is_there(error, draft, setting.base.folder if setting.base is not None else None)
            raise


def _asked_for_more(draft: Draft, setting: Setting[Options]) -> Mapping[str, Tensor] | None:
    """The tensors of the base, named like those of a draft, where some of these are missing or not whole; None without a base."""
    if setting.of_base is None:
        return None
    cut = draft.claim.fit.cut if draft.claim.fit is not None else ()
    return setting.alike(draft)[0] if draft.claim.lacking or cut else setting.of_base


def _refuse_odd_counts(draft: Draft) -> None:
    """Raise Inconsistent for a config.json from which loaders build nothing, or another model."""
    counts = draft.claim.odd_counts
    if counts:
        raise Inconsistent(
            counts[0],
            path=draft.assets.files.get(CONFIG),
            expected=f"a config.json from which {draft.claim.named} can be built",
            hint="correct config.json",
            details=counts if len(counts) > 1 else (),
        )


def check_output(
    target: Path, paths: Iterable[Path], components: Iterable[OpenedComponent], setting: Setting[Options], whole: Plan = UNPLANNED
) -> None:
    """Raise OutputError for a folder that exists (unless in a dry run), is being written, or is in or around what is read."""
    refuse_held(target)
    roots = [root for c in components for root in (c.component.root, *c.place.match.more_roots, *c.place.more_homes)]
    base = [setting.base.folder] if setting.base is not None else []
    read = [Path(source.path) for source in whole.sources]
    check_target(target, [*paths, *roots, *base], overwrite=setting.options.overwrite, read=read, dry_run=setting.options.dry_run)


def _class_comparison(claim: Claim) -> ClassComparison | None:
    """The comparison with the class as a result, None if there was none."""
    fit = claim.fit
    if fit is None:
        return None
    return ClassComparison(
        architecture=printable(fit.kind),
        origin=fit.origin,
        shapes=fit.expected is not None,
        expected=fit.expected,
        fitting=fit.fitting,
        missing=tuple(fit.missing),
        optional=tuple(fit.optional) if fit.expected is not None else (),
        reshaped=tuple(fit.reshaped),
        extra=fit.extra,
    )
