"""Making an output match a base model: the same names, shapes and dtypes, with every change reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckpt_cli.base_model.alike import named_alike, only_renamed
from ckpt_cli.boxes import Shape
from ckpt_cli.drafting.draft import Draft, Setting
from ckpt_cli.drafting.steps import copies_compared, noted
from ckpt_cli.dtypes import Dtype
from ckpt_cli.errors import Inconsistent
from ckpt_cli.hub.bagel import PATCH_EMBEDDING, QK_NORMS
from ckpt_cli.hub.classes.shapes.turned import turned_alike, turned_notes
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.ties import tied_together
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.names import few, plural, printable
from ckpt_cli.output.select import Selection, is_wanted
from ckpt_cli.tensors.casting import can_cast
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.views import merged, permuted, unfolded


@dataclass(frozen=True, slots=True)
class BaseForm:
    """Tensors under the names, in the order and with the shapes of the base; ``dtypes`` are those of the base."""

    tensors: dict[str, Tensor]
    dtypes: dict[str, Dtype]
    dropped: dict[str, str]
    notes: tuple[Note, ...]


def matched_with_base(draft: Draft, setting: Setting[MergeOptions]) -> Draft:
    """A draft in the form of the base, if there are weights of one."""
    stored, options, selection = setting.of_base, setting.options, draft.selection
    if stored is None:
        return draft
    # Under the names of the run, unless these are for tensors of another cut: the form of the base is what is asked for.
    alike = named_alike(stored, draft.tensors, selection.kind, selection.naming, draft.assets.config)
    held = alike if only_renamed(stored, alike) else stored
    notes = []
    for head, embedding in _lacking_ties(selection, held, draft.assets.config, options).items():
        selection = selection.with_head(head, embedding)
        notes.append(Note("info", "tied-head", f"{head} is written as {embedding}, to which it is tied, as the base stores it"))
    mine, turned = turned_alike(selection.tensors, held, setting.base.config if setting.base is not None else {}, draft.assets.config)
    notes += turned_notes(turned, "the run")
    matched = match_base(mine, held, fill_missing=options.fill_missing_from_base, drop_extra=options.drop_extra)
    filled = tuple(name for name in matched.tensors if name not in selection.tensors)
    notes += [*copies_compared((matched.tensors[name] for name in filled), setting), *matched.notes]
    selection = replace(selection, tensors=matched.tensors, dropped={**selection.dropped, **matched.dropped})
    dtypes = matched.dtypes if options.dtype is None else {}
    return noted(replace(draft, selection=selection, dtypes=dtypes, filled=filled, by_base=True), notes)


def _lacking_ties(selection: Selection, base: Mapping[str, Tensor], config: Config, options: MergeOptions) -> dict[str, str]:
    """Tied tensors that a base stores and the selection lacks because they are tied, not because a filter or a key map left them out."""
    lacking = {head: embedding for head, embedding in selection.tied.items() if head in base and embedding in base}
    together = tied_together({*base, *selection.tensors}, config, selection.kind, selection.naming)
    trained = {together[name]: name for name in selection.tensors if name in together}
    there = {*selection.tensors, *selection.on_purpose}
    absent = [name for name in base if name not in there and is_wanted(name, options.include, options.exclude)]
    return lacking | {name: trained[together[name]] for name in absent if together.get(name) in trained}


def match_base(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor], *, fill_missing: bool, drop_extra: bool) -> BaseForm:
    """Bring ``tensors`` into the form of ``base``.

    Only one reshaping is supported: a 4-D patch embedding becomes the base's 2-D linear weight, or the other way round, with
    the axis order of ``patchify`` (height, width, channel). Raises Inconsistent with everything that differs.
    """
    missing = [name for name in base if name not in tensors]
    extra = [name for name in tensors if name not in base]
    matched: dict[str, Tensor] = {}
    notes: list[Note] = []
    wrong: list[str] = []
    for name, target in base.items():
        if name not in tensors:
            matched[name] = target
            continue
        fitted = _fit(name, tensors[name], target.shape)
        if fitted is None or not can_cast(fitted.dtype, target.dtype):
            wrong.append(f"{printable(name)}: {tensors[name].dtype} {list(tensors[name].shape)}, base {target.dtype} {list(target.shape)}")
        else:
            matched[name] = fitted
            if fitted is not tensors[name]:
                text = f"{printable(name)}: {list(tensors[name].shape)} was converted to the base's {list(target.shape)}"
                notes.append(Note("info", "reshaped", text))
    if wrong:
        raise Inconsistent(
            f"{plural(len(wrong), 'tensor')} cannot be given the base's shape or dtype: {few(wrong)}",
            hint="check that --base is the model that training started from",
        )
    if missing and not fill_missing:
        raise Inconsistent(
            f"the run lacks {len(missing)} of the base's {plural(len(base), 'tensor')}: {few(missing)}",
            expected="all tensors of the base",
            hint="pass --fill-missing-from-base to take them from the base",
        )
    if extra and not drop_extra:
        raise Inconsistent(
            f"the run has {plural(len(extra), 'tensor')} that the base lacks: {few(extra)}",
            expected="only tensors of the base",
            hint="pass --drop-extra to leave them out",
        )
    if missing:
        notes.append(Note("warning", "filled", f"{plural(len(missing), 'tensor was', 'tensors were')} taken from the base: {few(missing)}"))
    dropped = dict.fromkeys(extra, "not in the base")
    return BaseForm(matched, {name: tensor.dtype for name, tensor in base.items()}, dropped, (*notes, *_qk_norm_notes(tensors, base)))


def _fit(name: str, tensor: Tensor, shape: Shape) -> Tensor | None:
    """The tensor in the base's shape, or None."""
    if tensor.shape == shape:
        return tensor
    if not name.endswith(PATCH_EMBEDDING):
        return None
    if len(tensor.shape) == 4 and len(shape) == 2:
        out, channels, height, width = tensor.shape
        return merged(merged(permuted(tensor, (0, 2, 3, 1)), 1), 1) if shape == (out, height * width * channels) else None
    if len(tensor.shape) == 2 and len(shape) == 4:
        out, channels, height, width = shape
        if tensor.shape == (out, height * width * channels):
            return permuted(unfolded(tensor, 1, (height, width, channels)), (0, 3, 1, 2))
    return None


def _qk_norm_notes(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> list[Note]:
    here, there = (any(part in QK_NORMS for name in names for part in name.split(".")) for names in (tensors, base))
    if here == there:
        return [Note("info", "qk-norm", f"query and key norms: {'in both' if here else 'in neither'}")]
    return [Note("warning", "qk-norm", f"query and key norms: {'only in the run' if here else 'only in the base'}")]
