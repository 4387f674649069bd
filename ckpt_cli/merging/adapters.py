"""Adapters in a merge: fused, or exported as a folder of their own, and the base that they meet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ckpt_cli.base_model.opened import Base
from ckpt_cli.discover.beside.outputs import partial_notes
from ckpt_cli.discover.open import OpenedComponent
from ckpt_cli.drafting.draft import Draft, Setting
from ckpt_cli.drafting.header_metadata import carried_metadata
from ckpt_cli.drafting.steps import copies_compared
from ckpt_cli.formats.safetensors.names import ADAPTER
from ckpt_cli.hub.assets import AUXILIARY
from ckpt_cli.hub.beside.listed import Seen, json_of
from ckpt_cli.hub.classes.claims import Claim
from ckpt_cli.hub.custom_code import custom_code
from ckpt_cli.hub.peft_names import parse_peft
from ckpt_cli.hub.text_assets import unmarked
from ckpt_cli.lora.alphas.in_header import HEADER_KEY
from ckpt_cli.lora.config import CONFIG as ADAPTER_CONFIG
from ckpt_cli.lora.config import adapter_facts
from ckpt_cli.lora.digest import adapter_digest
from ckpt_cli.lora.fit import lacks_base
from ckpt_cli.lora.merge import adapters_alone, exported_adapter, refuse_unfused
from ckpt_cli.merging.frozen import frozen_notes
from ckpt_cli.merging.left_to_base import beside_notes, export_notes
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.merging.trained_on import fused_before, trained_on_notes
from ckpt_cli.names import LoraMode
from ckpt_cli.output.plan import make_plan
from ckpt_cli.output.publish import SideFiles
from ckpt_cli.output.select import PEFT, Selection, is_wanted
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.torn import torn_notes

MODEL_CONFIGS = ("config.json", "generation_config.json", "llm_config.json", "vit_config.json", ADAPTER_CONFIG, AUXILIARY)
"""Assets that make a folder a model."""


def lora_mode(group: Sequence[OpenedComponent], setting: Setting[MergeOptions]) -> LoraMode:
    """What happens to adapters: as requested, or fused; adapters alone are exported if there is no base."""
    if setting.options.lora is not None:
        return setting.options.lora
    return "export" if setting.base is None and all(adapters_alone(component.component.tensors) for component in group) else "fuse"


def refuse_other_adapters(component: OpenedComponent, options: MergeOptions) -> None:
    """Raise Unsupported for adapters of another kind than PEFT's LoRA, unless they are kept, or left out by a filter."""
    if options.lora == "keep":
        return
    wanted = [name for name in component.component.tensors if is_wanted(name, options.include, options.exclude)]
    refuse_unfused(component, wanted)


def adapter_draft(component: OpenedComponent, setting: Setting[MergeOptions]) -> tuple[Draft, bytes]:
    """The adapters of a component, planned, and their config."""
    base, options = setting.base, setting.options
    reference = base.component if base is not None else None
    folder = absolute(base.folder) if base is not None else None
    adapter = exported_adapter(component, folder, options.lora_alpha, reference)
    renamed = sum(component.component.tensors.get(name) is not tensor for name, tensor in adapter.tensors.items())
    selection = Selection(dict(adapter.tensors), {}, renamed, (), (), {}, PEFT, "native")
    notes = (*adapter.notes, *copies_compared(adapter.tensors.values(), setting))
    if base is not None:
        notes = (*notes, *trained_on_notes(adapter_facts(component.homes, options.lora_alpha).config, base))
    if options.lora is None:
        text = "adapters without their base model: exported as a PEFT folder; pass --base to fuse them"
        notes = (*notes, Note("info", "lora-alone", text))
    notes = (*notes, *export_notes(component, setting, adapter.config))
    stored = component.component.tensors
    plan = partial(make_plan, selection.tensors, dtype=options.dtype or "keep", weights_name=ADAPTER)
    said = {key: value for key, value in component.component.metadata.items() if key != HEADER_KEY}  # adapter_config.json has it
    metadata, told = carried_metadata(said, stored, made := plan())
    told += [*partial_notes(component.component, component.made, {output.name for output in made.tensors}), *torn_notes(stored.values())]
    draft = Draft(
        (component,),
        component.assets,
        stored,
        selection,
        (*notes, *told),
        lora=adapter.info,
        claim=Claim("those of PEFT's adapter files", None, (), {}),
        plan=plan(metadata=metadata) if metadata else made,
    )
    return draft, adapter.config


def adapter_files(component: OpenedComponent, config: bytes) -> SideFiles:
    """What goes beside exported adapters: no config.json, or loaders would take the folder for a model.

    Of Python files only those that what is beside them names, such as the code of a tokenizer: that of the model is the base's.
    """
    files = {name: path for name, path in component.assets.files.items() if name not in MODEL_CONFIGS}
    modules = {name.removesuffix(".py"): path for name, path in files.items() if name.endswith(".py")}
    texts = {name: path for name, path in files.items() if not name.endswith(".py")}
    code = custom_code(modules, json_of(texts.values(), Seen()), component.place.home)
    return {**{name: unmarked(path) for name, path in texts.items()}, **code, ADAPTER_CONFIG: config}


def fused_adapters(
    component: OpenedComponent, base: Base | None, before: tuple[str, ...], options: MergeOptions
) -> tuple[tuple[str, ...], tuple[Note, ...]]:
    """The checksums of all adapters that the output will hold, and notes about the base that they meet.

    Raises what `fused_before`, `frozen_notes` and `beside_notes` do.
    """
    state = parse_peft(component.component.tensors)
    digest = adapter_digest(state.exported)
    if base is None or base.component is None:
        return (*before, digest), ()
    if not lacks_base(state):
        return (*before, digest), tuple(frozen_notes(component, base, state, options.lora_alpha))
    fused_before(base, digest, component.component)
    notes = trained_on_notes(adapter_facts(component.homes, None).config, base)
    notes += beside_notes(component, base, options)
    return (*before, *base.fused_adapters, digest), tuple(notes)
