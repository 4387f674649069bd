"""What a comparison with a base finds.

Weights that have nothing in common, distances that are no numbers, and what only the base has where no class was compared.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli.base_model.ends import CODE, moved_end
from ckpt_cli.base_model.lacking import lacks_of_base, of_one_class
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import files_in
from ckpt_cli.files.manifest import Manifest
from ckpt_cli.hub.assets import CONFIG, GENERATION_CONFIG, Assets, find_assets
from ckpt_cli.hub.classes.fit import known_class
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.entries.generation import lost_settings
from ckpt_cli.hub.settings import different_settings, settings_text
from ckpt_cli.hub.ties import tied_together
from ckpt_cli.results.drift import BaseComparison, TensorDrift
from ckpt_cli.results.verify import Finding
from ckpt_cli.tensors.kinship import comparable, is_turned, strangers, unrelated
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.verifying.config import ConfigCheck
from ckpt_cli.verifying.findings import finding
from ckpt_cli.verifying.left_out import left_out


def lacking_findings(
    mine: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    config: ConfigCheck,
    base_config: Config,
    manifest: Manifest | None,
    include: Sequence[str],
    exclude: Sequence[str],
) -> list[Finding]:
    """Findings about tensors that only the base has, where no class is known that works without; both have the names of the output.

    What such a class has of its own, only a base of the same class tells.
    """
    found = []
    if config.expected is not None:
        optional = [item.tensor for item in config.findings if item.code == "optional-tensor" and item.tensor in base]
        why = "the base has it, and loaders would set it to its initial value"
        found = [finding("missing-of-base", why, tensor=name) for name in optional]
    if not base.keys() - mine.keys() or (config.expected is not None and not of_one_class(config.own, base_config)):
        return found
    kind = known_class(config.config, {name: tensor.shape for name, tensor in mine.items()})
    together = tied_together({*base, *mine}, config.config, kind, "hub")
    named = {**config.config, "architectures": [config.own]} if config.own else config.config
    lacks = lacks_of_base(mine, base, named, base_config, together)
    told = {item.tensor for item in config.findings}
    found += [finding("missing-of-base", what, tensor=name) for name, what in lacks.surely.items() if name not in told]
    found += [finding("left-out-of-base", lacks.why, tensor=name) for name in lacks.perhaps]
    return left_out(manifest, replace(config, findings=tuple(found)), include, exclude)


def without_replaced(found: Sequence[Finding], config: ConfigCheck, base: Collection[str], base_config: Config) -> list[Finding]:
    """Findings without that about tensors of another class that a base of the same class has as little."""
    explained = of_one_class(config.own, base_config) and not any(name in base for name in config.replaced)
    return [item for item in found if not (explained and item.code == "replaced-tensors")]


def settings_findings(config: Config, home: Path | None, base: Assets) -> list[Finding]:
    """Findings about what config.json and that of a base say otherwise, and about settings for generation that only that of the base has.

    And about a tokenizer that ends texts elsewhere than these settings. ``home`` is the folder of config.json.
    """
    settings = different_settings(config, base.config)
    found = [finding("base-settings", settings_text(settings, "base"), file=CONFIG)] if settings else []
    files = {path.name: path for path in files_in(home, (CONFIG, GENERATION_CONFIG).__contains__)} if home is not None else {}
    lost = lost_settings(base.config, base.files, config=config, files=files, where="here")
    found += [finding("generation-settings", lost, file=CONFIG)] if lost is not None else []
    with contextlib.suppress(CkptError):  # what cannot be read is found by other checks
        if home is not None and (moved := moved_end(base, find_assets((home,)))) is not None:
            found.append(finding(CODE, moved[1], file=moved[0]))
    return found


def unlike_findings(mine: Mapping[str, Tensor], base: Mapping[str, Tensor], comparison: BaseComparison, name: str) -> list[Finding]:
    """A finding about a base whose weights have nothing in common with these, or those about single layers that have not.

    Both have the names of the output.
    """
    measured = unrelated(mine, base)
    return [finding("unlike-base", measured, file=name)] if measured is not None else _unlike_layers(mine, base, comparison)


def _unlike_layers(mine: Mapping[str, Tensor], base: Mapping[str, Tensor], comparison: BaseComparison) -> list[Finding]:
    """Findings about matrices that have nothing in common with those of the base, while those of other layers have.

    A matrix of zeros has nothing in common with any other; ``comparison`` measured all of both, but what did not change.
    """
    changed = {drift.name: drift for drift in comparison.drifts}
    cosines = dict[str, tuple[float, int]]()
    for name in mine:
        if name in base and comparable(mine[name], base[name]):
            drift = changed.get(name)
            cosines[name] = (_cosine(drift), drift.compared) if drift is not None else (1.0, mine[name].numel)
    found = []
    for name in strangers(cosines):
        turned = is_turned(mine[name], base[name])
        what = "it is that of the base with its dimensions exchanged" if turned else f"cosine {abs(cosines[name][0]):.2f}"
        found.append(finding("unlike-layer", what, tensor=name))
    return found


def _cosine(drift: TensorDrift) -> float:
    """The cosine of a tensor and that of the base; 0 for zeros in place of what are none, and NaN where a number is none."""
    if drift.cosine is not None:
        return drift.cosine
    return 0.0 if drift.base_norm and drift.relative_l2 is not None and math.isfinite(drift.relative_l2) else math.nan


def not_numbers(comparison: BaseComparison | None) -> list[Finding]:
    """Tensors whose distance to the base is not a number."""
    return [
        finding("not-a-number", f"the largest difference is {drift.max_abs}", tensor=drift.name)
        for drift in (comparison.drifts if comparison is not None else ())
        if drift.max_abs is not None and not math.isfinite(drift.max_abs)
    ]
