"""What is said of a base before anything is taken from it, and when it is refused."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_cli.base_model.opened import Base
from ckpt_cli.base_model.resemblance import Resemblance, config_doubt, resemblance
from ckpt_cli.errors import Inconsistent
from ckpt_cli.formats.torch_files.heads import are_heads
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.settings import different_settings, settings_notes
from ckpt_cli.names import few, printable
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor


def checked_base(
    base: Base,
    mine: Mapping[str, Tensor],
    *,
    config: Config,
    own_config: bool,
    taken: bool,
    by_name: bool = False,
    computed: bool = False,
    unfiltered: Mapping[str, Tensor] | None = None,
) -> tuple[Note, ...]:
    """Notes about the base of an output. Raises Inconsistent if it is another model and anything is ``taken`` from it.

    ``by_name``: tensors or dtypes are taken from it by name, which needs names that mean the same on both sides. ``computed``: weights of
    the base get into the output, which has the config of the run. ``own_config``: the config is the run's own, not the base's;
    ``unfiltered``: all tensors, where filters left some out.
    """
    settings = different_settings(config, base.config) if own_config else []
    differing = settings_notes(settings, "base", "base-settings")
    if base.component is None:
        doubt = config_doubt(config, base.config) if own_config else None
        notes = () if doubt is None else (Note("warning", "other-base", f"the base may be another model: {doubt}"),)
        return (*notes, *differing, *_unread(base))
    if taken and are_heads(mine) and base.component.tensors.keys().isdisjoint(mine):
        raise Inconsistent(
            f"these are tensors of a head alone, which the base does not have: {few(list(mine), 2)}",
            path=base.folder,
            expected="a model, or the adapter that was trained with the head",
            hint="pass the folder or file of the model or the adapter, or leave out --base to write the head",
        )
    found = resemblance(mine, base.component.tensors, config, base.config, kinds_known=own_config)
    if not found.same_model and unfiltered is not None:
        found = resemblance(unfiltered, base.component.tensors, config, base.config, kinds_known=own_config)
    heads = next((setting.text("base") for setting in settings if setting.divides_heads), None)
    refused = _refusal(found, heads, taken=taken, by_name=by_name, computed=computed)
    if refused is not None:
        message, expected, hint = refused
        raise Inconsistent(message, path=base.folder, expected=expected, hint=hint)
    if found.renamed:
        text = "the base has tensors of the same shapes under other names: names were not compared (rename them with --key-map)"
        return (Note("warning", "other-base", text), *differing)
    if not found.same_model:
        told = "may be" if found.undecided else "is"
        return (Note("warning", "other-base", f"the base {told} another model: {found.why}"),)
    return (*(_other_kind(config, base.config, found) if own_config else ()), *differing)


def _refusal(found: Resemblance, heads: str | None, *, taken: bool, by_name: bool, computed: bool) -> tuple[str, str, str] | None:
    """Why nothing can be taken from a base: what is wrong, expected, and a hint; ``heads`` are settings that divide them otherwise."""
    if found.renamed:
        text = f"the base has tensors of the same shapes under other names, so nothing can be taken from it by name: {found.numbers}"
        hint = "rename the tensors of the run as the base has them with --key-map, or pass a base with these names"
        return (text, "a base with the names of the output", hint) if by_name else None
    if found.undecided and taken:
        return (
            f"too few tensors have a name of the base to tell whether it is the model that training started from: {found.numbers}",
            "the names of the base in the run",
            "if it is that model, rename the other tensors with --key-map, otherwise pass the right one as --base",
        )
    if not found.same_model and taken:
        return f"the base is another model: {found.why}", "the model that training started from", "pass that model as --base"
    if found.same_model and heads is not None and computed:
        return (
            f"the base divides its projections into other heads, so its weights mean nothing under this config.json: {heads}",
            "a base with the heads of the run's config.json",
            "pass the model that training started from, or correct config.json",
        )
    return None


def _unread(base: Base) -> tuple[Note, ...]:
    """A note about weights of a base that cannot be read, so nothing was compared with them."""
    if base.trouble is None:
        return ()
    return (Note("warning", "base-unread", f"nothing was compared with the weights of the base: {base.trouble.message}"),)


def _other_kind(config: Config, base_config: Config, found: Resemblance) -> tuple[Note, ...]:
    """A note about a base of another type whose tensors fit: a language model inside a larger model, or a converted one."""
    kinds = config.get("model_type"), base_config.get("model_type")
    if not found.comparable or not all(isinstance(kind, str) for kind in kinds) or kinds[0] == kinds[1]:
        return ()
    text = f"config.json says {printable(kinds[0])}, the base's says {printable(kinds[1])}: {found.numbers}"
    return (Note("warning", "other-base", text),)
