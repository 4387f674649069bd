"""Header level of `verify` for LoRA, in whatever file it is: whether factors are complete and match adapter_config.json."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_cli.discover.beside.folders import ADAPTER_WEIGHTS
from ckpt_cli.errors import CkptError, Unsupported
from ckpt_cli.files.folders import files_in, is_file
from ckpt_cli.files.manifest import Manifest
from ckpt_cli.formats.safetensors.scan import WeightSet
from ckpt_cli.hub.adapters.mlx import WAY, trained_layers
from ckpt_cli.hub.assets import CONFIG as MODEL_CONFIG
from ckpt_cli.hub.assets import find_assets
from ckpt_cli.hub.layers.later import CODE as PART
from ckpt_cli.hub.peft_names import PeftState, has_adapters, parse_peft
from ckpt_cli.lora.config import CONFIG, AdapterFacts, adapter_facts
from ckpt_cli.lora.digest import adapter_digest
from ckpt_cli.lora.fit import adapter_rank, check_variant, cut_factor, lacks_base, layout_doubt, pattern_key
from ckpt_cli.lora.merge import saved_names, scales_of
from ckpt_cli.lora.on_base.adapted import adapted_name
from ckpt_cli.lora.parts import within_part
from ckpt_cli.lora.whole import lacking_parts, left_out, left_out_text, stored_of
from ckpt_cli.names import few
from ckpt_cli.results.verify import Finding
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.verifying.findings import finding, unread


def check_adapter(homes: Sequence[Path], tensors: Mapping[str, Tensor]) -> list[Finding]:
    """Both factors of every module, of one rank, the one that the files in ``homes`` name; modules that the config targets, an alpha."""
    known = True
    try:
        facts = adapter_facts(homes, None)
        known = bool(facts.looked_in)
        state = within_part(parse_peft(tensors))
        check_variant(state, facts)
        found = [
            finding("damaged-adapter", left_out_text(setting, modules), tensor=stored_of(state, modules[0]), file=CONFIG)
            for setting, modules in left_out(state, facts).items()
        ]
        for adapter in state.adapters if known else ():
            rank = adapter_rank(adapter, state.tensors, facts)
            key = pattern_key(adapter, adapted_name(adapter, state.tensors), facts)
            facts.check_rank(key, rank)
            facts.scale(key, rank)
        found += _cut(state)
        found += _lacking(state, facts, homes)
        found += [finding(note.code, note.text, file=CONFIG) for note in facts.notes if note.level == "warning"]
        doubt = layout_doubt(state, facts)
        found += [finding("expert-layout", doubt, file=CONFIG)] if doubt is not None else []
    except Unsupported as error:
        # Of files with several adapters, or of other kinds, nothing is known: that is damage only where a config says LoRA.
        code = "damaged-adapter" if known else "not-compared"
        return [finding(code, error.message, tensor=error.tensor, file=CONFIG if known else None)]
    except CkptError as error:
        # What has a name is in the weights, and what was read of the config in no one tensor.
        return [unread("damaged-adapter", error, CONFIG if known and error.tensor is None else None)]
    return found


def _cut(state: PeftState) -> Iterator[Finding]:
    """Factors that are a part of what the weights beside them ask for."""
    for adapter in state.adapters:
        weight = state.tensors.get(f"{adapter.module}.weight")
        if weight is not None and weight.dtype.kind == "float" and (cut := cut_factor(adapter, weight)) is not None:
            yield finding("damaged-adapter", f"{cut[1]} that {weight.name} asks for", tensor=cut[0].name)


def _lacking(state: PeftState, facts: AdapterFacts, homes: Sequence[Path]) -> Iterator[Finding]:
    """Parts of the adapter that are missing, by its config and the weights beside it."""
    try:
        config = find_assets(homes).config
    except CkptError:
        config = {}  # a finding of its own where the model's config counts
    base = {} if lacks_base(state) else state.tensors
    for lacking in lacking_parts(state, facts, saved_names(state), config, base, state.tensors):
        code = "damaged-adapter" if lacking.sure else "partial-adapter"
        yield finding(code, lacking.text, tensor=lacking.tensor, file=CONFIG)


def check_on_top(
    folder: Path, model: Mapping[str, Tensor], sets: Sequence[WeightSet] = (), manifest: Manifest | None = None
) -> Iterator[Finding]:
    """An adapter_config.json beside a model: transformers then loads an adapter too, whether the weights have it already or not."""
    if not model or has_adapters(model) or not is_file(folder / CONFIG):
        return
    if not (held := [path.name for path in files_in(folder, ADAPTER_WEIGHTS.fullmatch)]):
        text = "no weights of an adapter are beside it: with PEFT installed, from_pretrained fails"
        yield finding("adapter-on-top", text, file=CONFIG)
        return
    stems = [name.partition(".")[0] for name in held]
    adapters = [weights.tensors for weights in sets if weights.name in stems and weights.readable]
    fused = manifest.fused_adapters if manifest is not None else ()
    if fused and any(_digest(tensors) in fused for tensors in adapters):
        yield finding("adapter-twice", f"the manifest says that the weights have the adapter of {few(held)}", file=CONFIG)
        return
    adds = f"adds the adapter of {few(held)} to these weights"
    if not is_file(folder / MODEL_CONFIG):
        adds = f"passes over these weights for the base that it names and the adapter of {few(held)}, since there is no {MODEL_CONFIG}"
    # Newer versions read no pickles of adapters.
    fails = "" if any(name.endswith(".safetensors") for name in held) else ", or fails, as its version is"
    yield finding("adapter-on-top", f"with PEFT installed, from_pretrained {adds}{fails}", file=CONFIG)


def _digest(tensors: Mapping[str, Tensor]) -> str | None:
    with contextlib.suppress(CkptError):
        return adapter_digest(parse_peft(tensors).exported)
    return None


def no_factors(folder: Path, names: Iterable[str] = ()) -> list[Finding]:
    """An adapter folder without factors: damaged if its config says LoRA, of another kind otherwise; ``names`` are those of its tensors."""
    if (text := trained_layers((folder,), names)) is not None:
        return [finding(PART, f"{text}; {WAY}")]
    try:
        adapter_facts((folder,), None)
    except Unsupported as error:
        return [finding("not-compared", error.message)]
    except CkptError as error:
        return [finding("damaged-adapter", error.message, file=CONFIG)]
    return [finding("damaged-adapter", "the config describes LoRA, but the weights hold no LoRA factors", file=CONFIG)]


def scales(folder: Path, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None) -> dict[str, float]:
    """The scale of each module by the files of a PEFT folder; empty if they do not say it.

    ``weights`` are those that the adapters are for, where they lie elsewhere.
    """
    try:
        facts, state = adapter_facts((folder,), None), within_part(parse_peft(tensors))
        return scales_of(state, facts, weights if weights is not None else state.tensors)
    except CkptError:
        return {}
