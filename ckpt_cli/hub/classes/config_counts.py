"""Compares the counts in config.json (layers, experts, rows, towers) with the tensors.

For models of an unknown class, this is all that can be compared. Only what no sound model lacks is called missing: layers between, or
after, layers that are alike; experts of a numbered list. Multi-token prediction is looked for in any case, since no class of
transformers has a place for it.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.known_names import types_of
from ckpt_cli.hub.classes.prediction import AROUND, PART, asked_layers, lost_tensors, of_prediction, prediction_layers
from ckpt_cli.hub.classes.tying import lost_head
from ckpt_cli.hub.config import EXPERT_COUNTS, Config, architecture, expert_count, is_quantised, levels
from ckpt_cli.hub.entries.written import as_number
from ckpt_cli.hub.layers.compared import layer_mismatches
from ckpt_cli.hub.layers.counts import TOWERS
from ckpt_cli.hub.layers.mismatch import Mismatch
from ckpt_cli.hub.layers.stacks import LISTED, holes
from ckpt_cli.hub.layers.uneven import missing_modules
from ckpt_cli.hub.tied_names import EMBEDDINGS
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few, plural, printable

EXPERTS = re.compile(r"(?P<stack>(?:.+\.)?experts)\.(?P<number>[0-9]{1,9})\.")
SCALE = re.compile(r"scale|qweight|qzeros|absmax|SCB|quant|zero_point|codebook|_packed|blocks$|lut", re.IGNORECASE)
"""What the names of tensors beside quantised weights have in them."""

STORED = re.compile(
    rf"{SCALE.pattern}|bitmask|\.compressed$|centroids|\.codes$|idxs$|\.indices$|_offsets$|(?-i:\.(B|s|s_channel|s_group|S[UV]|s[uv]h|trellis)$)",
    re.IGNORECASE,
)
"""The same, and what the names of compressed weights without scales have: values and their places, centroids and codes.

Marlin (``B``, ``s``), QuIP# (``SU``) and ExLlamaV3 (``suh``) call theirs otherwise.
"""

PACKED = re.compile(r"\.quant_state\.bitsandbytes__[a-z0-9]+")
"""The end of the name under which bitsandbytes stores how the codes of a weight of 4 bits are packed."""


COUNT = re.compile(
    r"(num|n|moe_num)_(\w+_)?(layers?|heads?|experts|experts_per_tok|embd|blocks|groups?)"
    r"|(encoder|decoder)_(layers|attention_heads|ffn_dim)"
    r"|(\w+_)?(hidden|intermediate|vocab)_size(_(?!ratio|factor|mult|scale)\w+)?|(\w+_)?(embed|head|ffn)_dim|d_model|d_ff|d_kv|depth|max_position_embeddings"
)
"""Names of what is counted in whole numbers: layers, heads, experts, rows, columns."""

SUBCONFIG_KEYS = ("encoder", "decoder")
"""Parts of a config that are called after what they build."""

NEEDED = ("num_hidden_layers", "hidden_size")
"""Counts that nothing else in a config stands for."""

POSITIONS = "max_position_embeddings"
"""A limit rather than a count in many models: -1 is none (XLNet), and a float does no harm."""

FACTOR = re.compile(
    r"\w*(scal(e|ing)|factor|multiplier|temperature|soft_?cap)\w*|(rope|rotary)_\w+|\w*(theta|base_freq)|(\w+_)?eps(ilon)?|query_pre_attn_scalar"
)
"""Numbers that others are multiplied with, divided by or raised to: a limit may be infinite, as those of time steps in Mamba2 are, but not
these."""


def mismatches(config: Config, shapes: Mapping[str, Shape], *, known: bool, namings: Sequence[Collection[str]] = ()) -> list[Mismatch]:
    """All counts in which config and tensors differ; ``known``: the class was compared, which covers most of them.

    ``namings`` are the names, in memory and on the hub, of a class of which only these are known.
    """
    # What code of another loader makes of a count is not known.
    found = [*_odd_counts(config, "odd-count" if _is_of_transformers(config) else "unusual-count")]
    found += [Mismatch("odd-setting", f"config.json says {text}") for text in odd_settings(config)]
    head = lost_head(config, shapes)
    found += [Mismatch("lost-head", head)] if head is not None else []
    found += [*_prediction(config, shapes), *_types(config), *_quantised(config, shapes)]
    if not known:
        found += layer_mismatches(config, shapes, predicted=any(PART.search(name) for name in shapes))
        found += [*_experts(config, shapes), *_towers(config, shapes, namings)]
    if not known and not is_quantised(config):
        found += [*_rows(config, shapes), *_classes(config, shapes)]
    return found


def _is_of_transformers(config: Config) -> bool:
    kind = architecture(config)
    return kind is not None and bool(types_of(kind)) and not config.get("auto_map")


def _odd_counts(config: Config, code: str, place: str = "") -> Iterator[Mismatch]:
    """Counts that are no whole numbers, in the config and in those of its parts: transformers, and Python, do not accept "2" or 2.0."""
    parts = {
        key: value for key, value in config.items() if isinstance(value, Mapping) and (key.endswith("_config") or key in SUBCONFIG_KEYS)
    }
    for key, value in config.items():
        if not COUNT.fullmatch(key):
            continue
        needed = value is None and key in NEEDED and not parts and not place and not config.get("auto_map")
        odd = isinstance(value, float) or (type(value) is int and value < 0)
        if needed or (odd and key != POSITIONS) or isinstance(value, (str, bool)):
            written = printable(json.dumps(value))
            yield Mismatch(code, f"config.json says {printable(place + key)} {written[:40]}, where a whole number is needed")
    for key, part in parts.items():
        yield from _odd_counts(part, code, f"{place}{key}.")


def odd_settings(config: Config) -> Iterator[str]:
    """Numbers at any depth that are NaN, or infinite where they decide what is computed. Counts are told by `_odd_counts`."""
    pending: deque[tuple[str, object, bool]] = deque((str(key), value, False) for key, value in config.items())
    told: set[str] = set()
    while pending:
        name, value, decides = pending.popleft()
        key = name.rpartition(".")[2]
        decides = decides or FACTOR.fullmatch(key) is not None
        value = as_number(value)
        if isinstance(value, Mapping):
            pending += [(f"{name}.{inner}", item, decides) for inner, item in value.items()]
        elif isinstance(value, list):
            pending += [(name, item, decides) for item in value if isinstance(item, (Mapping, list, float))]
        elif isinstance(value, float) and (math.isnan(value) or (decides and math.isinf(value))):
            is_part = all(part.endswith("_config") or part in SUBCONFIG_KEYS for part in name.split(".")[:-1])
            if name not in told and not (is_part and key != POSITIONS and COUNT.fullmatch(key)):
                yield f"{printable(name)} {json.dumps(value)}, where a finite number is needed"
            told.add(name)


def _types(config: Config) -> Iterator[Mismatch]:
    """Loaders choose a class by model_type, which may not be the class that the config names."""
    kind, model_type = architecture(config), config.get("model_type")
    others = types_of(kind) if kind is not None else []
    if others and model_type not in others and not config.get("auto_map"):
        text = f"config.json says model_type {printable(model_type)}, but {printable(kind)} is a class of {few(others, 3)}"
        yield Mismatch("other-model-type", text)


def _quantised(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    """Quantised weights have scales beside them, under one name or another, or are stored as values and their places."""
    if config.get("quantization_config") and not any(STORED.search(name) for name in shapes):
        yield Mismatch("no-scales", "config.json says that weights are quantised, but no tensor is named like a scale")


def _prediction(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    """Layers of multi-token prediction: fewer than the config says, or some that lack what ordinary layers have."""
    key, wanted, _ = asked_layers(config)
    there = prediction_layers(config, shapes)
    otherwise = [name for name in of_prediction(config, shapes) if name.split(".")[-2:-1] not in [[each] for each in AROUND]]
    if key and len(there) < wanted and (there or not otherwise):
        text = f"config.json says {plural(wanted, 'layer')} of multi-token prediction ({key}), but {_only(there)}"
        yield Mismatch("no-prediction-layers", text)
    for lost in lost_tensors(config, shapes):
        like = f", which {lost.like} has" if lost.like and not any(PART.search(name) for name in lost.lacking) else ""
        text = f"{lost.layer}, of multi-token prediction, lacks {few(grouped(list(lost.lacking)), 3)}{like}"
        yield Mismatch("missing-layers", text, lost.lacking)


def _only(layers: Sequence[str]) -> str:
    if not layers:
        return "none is there"
    return f"only {few(layers, 3)} {'is' if len(layers) == 1 else 'are'} there"


def _numbered_experts(shapes: Mapping[str, Shape]) -> dict[str, dict[int, set[str]]]:
    """Lists of experts by name: number -> what follows it in the names of tensors."""
    found: dict[str, dict[int, set[str]]] = {}
    for name, match in ((name, EXPERTS.match(name)) for name in shapes):
        if match:
            found.setdefault(match["stack"], {}).setdefault(int(match["number"]), set()).add(name[match.end() :])
    return found


def _experts(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    wanted = expert_count(config)
    for stack, experts in _numbered_experts(shapes).items():
        last = max(experts)
        beyond = range(last + 1, min(wanted or 0, last + 1 + LISTED))
        yield from missing_modules(stack, [*holes(experts), *beyond], len(experts))
        # Those beyond the count may be of another kind: experts that compute nothing have no matrices of their own (LongCat).
        counted = {number: leaves for number, leaves in experts.items() if wanted is None or number < wanted}
        every = set().union(*counted.values())
        lost = [f"{stack}.{number}.{leaf}" for number, leaves in sorted(counted.items()) for leaf in sorted(every - leaves)]
        if lost:
            yield Mismatch("missing-layers", f"{few(lost, 3)}: other experts have it", tuple(lost[:LISTED]))
        if wanted is not None and last + 1 > wanted and last + 1 - wanted not in _other_experts(config, wanted):
            yield Mismatch("extra-experts", f"config.json says {plural(wanted, 'expert')}, but {stack} has {last + 1}")


def _other_experts(config: Config, wanted: int) -> set[int]:
    """Numbers of experts that a list may have besides those that are counted: experts that compute nothing, or those of images (Ernie)."""
    found: set[int] = set()
    for level in levels(config):
        found |= {value for key, value in level.items() if "expert" in key and key not in EXPERT_COUNTS and type(value) is int}
        sizes = level.get("moe_intermediate_size")
        found |= {(len(sizes) - 1) * wanted} if isinstance(sizes, (list, tuple)) else set()
    return found


def _rows(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    text = config.get("text_config")
    sizes = [level.get("vocab_size") for level in (config, text) if isinstance(level, Mapping)]
    wanted = next((size for size in sizes if type(size) is int), None)
    rows = {name: shape[0] for name, shape in shapes.items() if ".".join(name.split(".")[-2:]) in EMBEDDINGS and len(shape) == 2}
    others = {value for level in levels(config) for key, value in level.items() if key.endswith("vocab_size") and type(value) is int}
    if wanted is not None and rows and max(rows.values()) < wanted and max(rows.values()) not in others:
        name = max(rows, key=lambda name: rows[name])
        yield Mismatch("vocabulary-rows", f"{name} has {rows[name]} rows, but config.json says vocab_size {wanted}")


def _classes(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    """Rows of the classifier of timm's and open_clip's models, which ``pretrained_cfg`` names, and names of labels in config.json."""
    said, wanted = config.get("pretrained_cfg"), config.get("num_classes")
    named = said.get("classifier") if isinstance(said, Mapping) else None
    if type(wanted) is not int or not wanted:
        return
    for name in named if isinstance(named, list) else [named]:
        shape = shapes.get(f"{name}.weight")
        if shape is not None and shape[0] != wanted:
            yield Mismatch("class-rows", f"{name}.weight has {shape[0]} rows, but config.json says num_classes {wanted}")
    labels = config.get("label_names")
    if isinstance(labels, (list, Mapping)) and len(labels) != wanted and named is not None:
        yield Mismatch("class-rows", f"config.json has {plural(len(labels), 'label')} in label_names, but says num_classes {wanted}")


def _towers(config: Config, shapes: Mapping[str, Shape], namings: Sequence[Collection[str]]) -> Iterator[Mismatch]:
    """Parts of the config without tensors, by their usual names: a class that names its part otherwise is not judged by these."""
    for tower, words in TOWERS.items():
        key = f"{tower}_config"
        if not all(any(words.search(name) for name in names) for names in namings):
            continue
        if isinstance(config.get(key), Mapping) and config[key] and not any(words.search(name) for name in shapes):
            yield Mismatch(
                "no-tower", f"config.json has {'an' if key[0] in 'aeiou' else 'a'} {key}, but no tensor is named like such a part"
            )


def has_packed_codes(names: Iterable[str]) -> bool:
    """Whether some weights are codes of 4 bits that bitsandbytes packed: bytes in rows of one, whatever the shape of the weight."""
    return any(PACKED.search(name) for name in names)
