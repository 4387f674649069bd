"""What a merge is made of: a folder to be written, and the components in it, planned."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.base_model.opened import Base
from ckpt_cli.discover.default_output import default_output
from ckpt_cli.discover.open import Opened, OpenedComponent
from ckpt_cli.hub.classes.claims import Claim
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.output import plan
from ckpt_cli.output.select import Selection
from ckpt_cli.output.target import check_target
from ckpt_cli.results.lora import LoraInfo
from ckpt_cli.tensors.component import Note


@dataclass(frozen=True, slots=True)
class Part:
    """One component on its way into a folder; ``claim`` is the report about its names, ``lora`` the result for its adapters.

    ``carried`` are tensors that --carry-from-base took from the base, ``filled`` those that --fill-missing-from-base did; ``fused`` the
    checksums of the adapters that are in the weights.
    """

    opened: OpenedComponent
    selection: Selection
    plan: plan.Plan
    notes: tuple[Note, ...]
    claim: Claim
    lora: LoraInfo | None = None
    carried: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()

    @property
    def left_out(self) -> set[str]:
        """The names of all tensors that a whole output would have, besides those that it has."""
        before = self.opened.made.left_out if self.opened.made is not None else ()
        return {*before, *self.selection.filtered, *self.selection.unmapped, *self.claim.let_go} - {each.name for each in self.plan.tensors}

    @property
    def from_base(self) -> frozenset[str]:
        """Tensors that are the base's own: comparing them with it says nothing."""
        return frozenset((*self.carried, *self.filled))


@dataclass(frozen=True, slots=True)
class Job:
    """One output folder: one component, or several that share it."""

    parts: tuple[Part, ...]
    output: Path
    plan: plan.Plan
    side_files: Mapping[str, bytes | Path]
    state_files: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "+".join(part.opened.name for part in self.parts)


def target_of(
    opened: Opened, first: OpenedComponent, output: str | os.PathLike[str] | None, options: MergeOptions, *, one_of_many: bool
) -> Path:
    """The folder that a component is written to."""
    if options.in_place:
        return first.place.home
    if output is None:
        return default_output(opened.found, first.name)
    given = Path(os.path.abspath(output))
    return given / first.name if one_of_many else given


def check_place_of(
    opened: Opened, group: tuple[OpenedComponent, ...], target: Path, whole: plan.Plan, base: Base | None, options: MergeOptions
) -> None:
    """Raise OutputError for a folder that exists, or that is inside the input."""
    if options.in_place:
        return
    roots = [root for component in group for root in (component.component.root, *component.place.match.more_roots)]
    check_target(target, [opened.found.path, *roots, *([base.folder] if base else [])], overwrite=options.overwrite)
    read = [Path(source.path) for source in whole.sources]
    check_target(target, [path for path in read if path.resolve().is_relative_to(target.resolve())], overwrite=options.overwrite)
