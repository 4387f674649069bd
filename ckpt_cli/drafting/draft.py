"""A draft: one component on its way into a folder, and what is known about the output so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ckpt_cli.base_model.alike import laid_out_alike
from ckpt_cli.base_model.opened import Base
from ckpt_cli.discover.folder_style import FolderStyle, style_of
from ckpt_cli.discover.found import Found
from ckpt_cli.discover.open import OpenedComponent
from ckpt_cli.dtypes import Dtype
from ckpt_cli.hub.assets import Assets
from ckpt_cli.hub.classes.claims import Claim
from ckpt_cli.hub.classes.shapes.turned import Turned
from ckpt_cli.output.key_map import Rule
from ckpt_cli.output.options import WritingOptions
from ckpt_cli.output.plan import Combination, Plan
from ckpt_cli.output.select import OTHER, Selection
from ckpt_cli.results.checkpoint import LoraInfo
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

Options = TypeVar("Options", bound=WritingOptions)
UNNAMED, UNPLANNED = Claim("", None, (), {}), Plan((), None, None)


@dataclass(frozen=True, slots=True)
class Setting(Generic[Options]):
    """What all drafts of a command share."""

    options: Options
    base: Base | None
    style: FolderStyle
    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, found: Found, base: Base | None, rules: tuple[Rule, ...], options: Options) -> Setting[Options]:
        """That of a checkpoint: the base may decide the style of the folder too."""
        return cls(options, base, style_of(found, base.folder if base is not None else None), rules)

    @property
    def of_base(self) -> Mapping[str, Tensor] | None:
        """The weights of the base, None without any."""
        return self.base.component.tensors if self.base is not None and self.base.component is not None else None

    def alike(self, draft: Draft) -> tuple[Mapping[str, Tensor], Turned]:
        """The weights of the base, named and cut like those of a draft, and which of them were turned for it; none without any.

        Raises what `laid_out_alike` raises.
        """
        if self.base is None or self.base.component is None:
            return {}, Turned()
        selection, configs = draft.selection, (draft.assets.config, self.base.config)
        return laid_out_alike(self.base.component.tensors, draft.tensors, selection.kind, selection.naming, configs)


@dataclass(frozen=True, slots=True)
class Draft:
    """The tensors that would be written of one component, and what was found; `ckpt_cli.drafting.steps` make and check it.

    ``sources`` are the components that it is made of, from old to new, ``assets`` what goes beside it. ``stored`` are the tensors of the
    newest one before any was left out, ``selection`` those to write; ``combinations`` those that are computed from all sources, and
    ``uncommon`` names that not all sources have. ``by_base``: the base decides which tensors belong to the output. ``carried`` are tensors
    that --carry-from-base took from the base, ``filled`` those that --fill-missing-from-base did; ``fused`` the checksums of the adapters
    that are in the weights, ``lora`` the result for them. ``dtypes`` go before the option, ``claim`` is the report about names.
    """

    sources: tuple[OpenedComponent, ...]
    assets: Assets
    stored: Mapping[str, Tensor]
    selection: Selection
    notes: tuple[Note, ...] = ()
    combinations: Mapping[str, Combination] = field(default_factory=dict)
    uncommon: frozenset[str] = frozenset()
    by_base: bool = False
    carried: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()
    lora: LoraInfo | None = None
    dtypes: Mapping[str, Dtype] = field(default_factory=dict)
    claim: Claim = UNNAMED
    plan: Plan = UNPLANNED

    @property
    def opened(self) -> OpenedComponent:
        """The newest source."""
        return self.sources[-1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.selection.tensors

    @property
    def on_purpose(self) -> set[str]:
        """Names that were left out because the user named them, which --intersect did not."""
        return self.selection.on_purpose - self.uncommon

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter alone: exported for PEFT, or of another kind and kept as it is."""
        return self.selection.kind == OTHER or (self.lora is not None and self.lora.outcome == "exported")

    @property
    def left_out(self) -> set[str]:
        """The names of all tensors that a whole output would have, besides those that it has."""
        before = {name for source in self.sources if source.made is not None for name in source.made.left_out}
        now = {*self.selection.filtered, *self.selection.unmapped, *self.uncommon, *self.claim.let_go}
        return (before | now) - {output.name for output in self.plan.tensors}

    @property
    def from_base(self) -> frozenset[str]:
        """Tensors that are the base's own: comparing them with it says nothing."""
        return frozenset((*self.carried, *self.filled))
