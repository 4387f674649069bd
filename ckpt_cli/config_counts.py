"""What config.json itself says about how many layers, experts, rows and towers there are, against the tensors that are there.

For models whose class is not known, this is what can be compared; multi-token prediction is looked for in any case, since no class
of transformers has a place for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt_cli.assets import EMBEDDINGS
from ckpt_cli.geometry import Shape
from ckpt_cli.model_config import Config, expert_count, layer_count, levels

STACK = re.compile(r"(?P<stack>(?:.+\.)?(?:layers|h|blocks))\.(?P<number>[0-9]{1,9})\.")
EXPERTS = re.compile(r"(?P<stack>(?:.+\.)?experts)\.(?P<number>[0-9]{1,9})\.")
BLOCK = 4
"""Tensors that the smallest layer of a transformer has; a stack of less may be linear layers with activations between."""

MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers", "num_mtp_modules")
MTP_PART = re.compile(r"(^|\.)(mtp|mtp_layers|mtp_block|eh_proj|nextn_predict_layers|enorm|hnorm)(\.|$)")
TOWERS = {
    "vision_config": re.compile(r"vis|image|siglip|clip|vit", re.IGNORECASE),
    "audio_config": re.compile(r"audio|speech|whisper|sound", re.IGNORECASE),
}
"""Configs of parts, and what occurs in the names of their tensors."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Something that config.json counts otherwise than the tensors do.

    ``lacking``: a glob for tensors that are not there and that a loader needs; None for what is merely odd.
    """

    code: str
    text: str
    lacking: str | None = None


def mismatches(config: Config, shapes: Mapping[str, Shape], *, known: bool) -> list[Mismatch]:
    """Everything that config and tensors count differently; ``known``: the class was compared, which says more about all but MTP."""
    found = list(_prediction(config, shapes))
    if not known and config and "quantization_config" not in config:
        found += [*_layers(config, shapes), *_experts(config, shapes), *_rows(config, shapes), *_towers(config, shapes)]
    return found


def _prediction(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    """Layers of multi-token prediction: beyond the last layer (DeepSeek, GLM), or in a part of their own (Qwen, MiMo)."""
    for level in levels(config):
        key = next((key for key in MTP_COUNTS if type(level.get(key)) is int and level[key] > 0), None)
        if key is None:
            continue
        layers = level.get("num_hidden_layers")
        beyond = type(layers) is int and any(int(match["number"]) >= layers for match in map(STACK.match, shapes) if match)
        if not beyond and not any(MTP_PART.search(name) for name in shapes):
            plural = "" if level[key] == 1 else "s"
            text = f"config.json says {level[key]} layer{plural} of multi-token prediction ({key}), and there is none"
            yield Mismatch("no-prediction-layers", text)
        return


def _numbers(expression: re.Pattern[str], shapes: Mapping[str, Shape]) -> dict[str, dict[int, int]]:
    """Stack -> number -> tensors of it."""
    found: dict[str, dict[int, int]] = {}
    for match in map(expression.match, shapes):
        if match:
            counts = found.setdefault(match["stack"], {})
            counts[int(match["number"])] = counts.get(int(match["number"]), 0) + 1
    return found


def _layers(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    stacks = _numbers(STACK, shapes)
    for stack, counts in stacks.items():
        if max(counts.values()) >= BLOCK:
            yield from _holes(stack, counts, max(counts) + 1)
    wanted = layer_count(config)
    if not stacks or wanted is None:
        return
    stack = max(stacks, key=lambda name: len(stacks[name]))
    last = max(stacks[stack])
    if last + 1 < wanted:
        text = f"config.json says {wanted} layers, and {stack} ends with layer {last}"
        yield Mismatch("missing-layers", text, f"{stack}.{last + 1}.*")
    elif last + 1 > wanted and not any(MTP_PART.search(name) for name in shapes):
        yield Mismatch("extra-layers", f"config.json says {wanted} layers, and {stack} ends with layer {last}")


def _experts(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    wanted = expert_count(config)
    for stack, counts in _numbers(EXPERTS, shapes).items():
        yield from _holes(stack, counts, max(max(counts) + 1, wanted or 0))
        if wanted is not None and max(counts) + 1 > wanted:
            yield Mismatch("extra-experts", f"config.json says {wanted} experts, and {stack} has {max(counts) + 1}")


def _holes(stack: str, counts: Mapping[int, int], wanted: int) -> Iterator[Mismatch]:
    """Numbers below ``wanted`` that a stack of like modules lacks."""
    if len(counts) == wanted:
        return
    numbers = sorted(counts)
    first = next((place for place, number in enumerate(numbers) if place != number), len(numbers))
    text = f"{stack} has {len(counts)} of the numbers 0 to {wanted - 1}: {first} is the first that is missing"
    yield Mismatch("missing-layers", text, f"{stack}.{first}.*")


def _rows(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    text = config.get("text_config")
    sizes = [level.get("vocab_size") for level in (config, text) if isinstance(level, Mapping)]
    wanted = next((size for size in sizes if type(size) is int), None)
    embedding = next((name for name in shapes if ".".join(name.split(".")[-2:]) in EMBEDDINGS and len(shapes[name]) == 2), None)
    if wanted is not None and embedding is not None and shapes[embedding][0] != wanted:
        yield Mismatch("vocabulary-rows", f"{embedding} has {shapes[embedding][0]} rows, and config.json says vocab_size {wanted}")


def _towers(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    for key, words in TOWERS.items():
        if isinstance(config.get(key), Mapping) and config[key] and not any(words.search(name) for name in shapes):
            yield Mismatch("no-tower", f"config.json has a {key}, and no tensor has a name of such a part")
