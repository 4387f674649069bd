"""Compares the counts in config.json (layers, experts, rows, towers) with the tensors.

For models of an unknown class, this is all that can be compared. Only what no sound model lacks is called missing: layers between, or
after, layers that are alike; experts of a numbered list. Multi-token prediction is looked for in any case, since no class of
transformers has a place for it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.known_names import types_of
from ckpt_cli.hub.classes.prediction import AROUND, PART, asked_layers, lost_tensors, of_prediction, prediction_layers
from ckpt_cli.hub.config import Config, architecture, expert_count, is_quantised, layer_count, levels
from ckpt_cli.hub.entries.written import as_number
from ckpt_cli.hub.tied_names import EMBEDDINGS
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few, plural, printable

Stacks = Mapping[str, Mapping[int, set[str]]]
"""Stack -> number -> what follows the number in the names of its tensors."""

STACK = re.compile(r"(?P<stack>(?:.+\.)?(?:layers|h|blocks))\.(?P<number>[0-9]{1,9})\.")
EXPERTS = re.compile(r"(?P<stack>(?:.+\.)?experts)\.(?P<number>[0-9]{1,9})\.")
NUMBERED = re.compile(r"[0-9](?![^.])")
"""The end of a part of a name that has a number, as layers have in all ways to name them."""

BLOCK = 4
"""Tensors that the smallest layer of a transformer has; a stack of less may be linear layers with activations between."""

LONG = 6
"""The shortest stack in which one layer may be reported as unlike all others: in necks of four layers, each may differ."""

PLACE = re.compile(r"layer|period|interval|every|freq|offset|stride|step|pattern|skip|first|start|ind(ex|ices)|idx|_at$", re.IGNORECASE)
"""In keys of a config, words for places of layers."""

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

LISTED = 256
"""Numbers of one gap that are listed."""

TOWERS = {
    "vision_config": re.compile(r"vis|image|siglip|clip|vit", re.IGNORECASE),
    "audio_config": re.compile(r"audio|speech|whisper|sound", re.IGNORECASE),
}
"""Configs of parts, and what occurs in the names of their tensors."""


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


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A count in config.json that differs from the tensors.

    ``lacking``: globs for missing tensors that a loader needs; empty for mere oddities.
    """

    code: str
    text: str
    lacking: tuple[str, ...] = ()


def mismatches(config: Config, shapes: Mapping[str, Shape], *, known: bool, namings: Sequence[Collection[str]] = ()) -> list[Mismatch]:
    """All counts in which config and tensors differ; ``known``: the class was compared, which covers most of them.

    ``namings`` are the names, in memory and on the hub, of a class of which only these are known.
    """
    # What code of another loader makes of a count is not known.
    found = [*_odd_counts(config, "odd-count" if _is_of_transformers(config) else "unusual-count")]
    found += [Mismatch("odd-setting", f"config.json says {text}") for text in odd_settings(config)]
    found += [*_prediction(config, shapes), *_types(config), *_quantised(config, shapes)]
    if not known:
        stacks = _numbers(STACK, shapes)
        found += [
            *_no_layers(config, stacks, shapes),
            *_layers(config, stacks, shapes),
            *_parts(config, stacks),
            *_experts(config, shapes),
            *_towers(config, shapes, namings),
        ]
    if not known and not is_quantised(config):
        found += _rows(config, shapes)
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


def _numbers(expression: re.Pattern[str], shapes: Mapping[str, Shape]) -> Stacks:
    """The numbered modules that an expression finds in the names of tensors."""
    found: dict[str, dict[int, set[str]]] = {}
    for name, match in ((name, expression.match(name)) for name in shapes):
        if match:
            found.setdefault(match["stack"], {}).setdefault(int(match["number"]), set()).add(name[match.end() :])
    return found


def _no_layers(config: Config, stacks: Stacks, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    """Tensors of so few numbered modules, whatever their names, that they may be those of a projector or a head alone.

    Where any layer is there, they are compared one by one. A model may have its layers in one tensor each, or use a few again and again.
    """
    if any(_is_block(layers, number) for layers in stacks.values() for number in layers):
        return
    wanted = layer_count(config) or 0
    numbered = {name[: match.end()] for name in shapes for match in NUMBERED.finditer(name)}
    if len(numbered) < wanted and not any(shape[:1] == (wanted,) and len(shape) > 1 for shape in shapes.values()):
        there = f"only {plural(len(numbered), 'numbered module')}" if numbered else "no numbered module"
        text = f"config.json says {plural(wanted, 'layer')}, and the tensors are of {there}: they may be those of one part of the model"
        yield Mismatch("no-layers", text)


def _layers(config: Config, stacks: Stacks, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    """Stacks of layers: what lies between layers that are alike, and for the one of the language model, what the config counts."""
    towers = [stack for stack in stacks if any(words.search(stack) for words in TOWERS.values())]
    models = [stack for stack in stacks if stack not in towers and stack.split(".")[-1] in ("layers", "h")]
    named = next((level for level in levels(config) if isinstance(level.get("num_hidden_layers"), (int, float, str))), {})
    wanted = layer_count(config) or _whole(named.get("num_hidden_layers"))
    counted = models[0] if len(models) == 1 and wanted is not None else None
    predicted = any(PART.search(name) for name in shapes)
    for stack, layers in stacks.items():
        yield from _uneven(stack, layers, config)
        if stack == counted and wanted is not None:
            if not any(max(other) + 1 == wanted == len(other) for other in stacks.values()):
                yield from _length(stack, layers, wanted, exact=not predicted)
            continue
        holes = _holes(layers)
        if 2 * len(holes) < len(layers):
            yield from _missing(stack, [number for number in holes if _are_alike(layers, number)], len(layers))


def _parts(config: Config, stacks: Stacks) -> Iterator[Mismatch]:
    """The layers of a tower against the config of the part."""
    for key, words in TOWERS.items():
        part = config.get(key)
        own = [stack for stack in stacks if words.search(stack) and "merger" not in stack]
        if isinstance(part, Mapping) and len(own) == 1:
            wanted = next((count for name in ("depth", "num_hidden_layers", "num_layers") if (count := _whole(part.get(name)))), None)
            if wanted is not None and len(set(map(frozenset, stacks[own[0]].values()))) == 1:
                yield from _length(own[0], stacks[own[0]], wanted, exact=False)


def _length(stack: str, layers: Mapping[int, set[str]], wanted: int, *, exact: bool) -> Iterator[Mismatch]:
    """A stack that has fewer layers than the config says; ``exact``: or more."""
    last = max(layers)
    absent = [*_holes(layers), *range(last + 1, min(wanted, last + 1 + LISTED))]
    if absent and last < wanted and _is_block(layers, last):
        listed = few([str(number) for number in absent], 3)
        which = f"layer {listed} is missing" if len(absent) == 1 else f"layers {listed} are missing"
        text = f"config.json says {plural(wanted, 'layer')}, but {stack} has {len(layers)}: {which}"
        yield Mismatch("missing-layers", text, tuple(f"{stack}.{number}.*" for number in absent))
    elif exact and last + 1 > wanted:
        yield Mismatch("extra-layers", f"config.json says {plural(wanted, 'layer')}, but {stack} ends with layer {last}")


def _uneven(stack: str, layers: Mapping[int, set[str]], config: Config) -> Iterator[Mismatch]:
    """A few layers that lack what at least as many others have, with nothing in its place."""
    kinds = Counter(frozenset(leaves) for leaves in layers.values())
    poorer = {
        number: fuller
        for number, leaves in sorted(layers.items())
        if (fuller := next((kind for kind, count in kinds.most_common() if leaves < kind and count >= kinds[frozenset(leaves)]), None))
    }
    lost = next((number for number, fuller in poorer.items() if _is_lost(layers, number, fuller, config)), None)
    few_of_many = 4 * len(poorer) <= len(layers) or len(layers) < BLOCK
    if lost is not None or (poorer and few_of_many and len(next(iter(poorer.values()))) >= BLOCK):
        number = lost if lost is not None else next(iter(poorer))
        absent, count = sorted(poorer[number] - layers[number]), kinds[poorer[number]]
        text = f"{stack}.{number} lacks {few(absent, 3)}, which {count} of the {len(layers)} layers have"
        lacking = tuple(f"{stack}.{number}.{leaf}" for leaf in absent[:LISTED]) if lost is not None else ()
        yield Mismatch("missing-layers" if lacking else "uneven-layers", text, lacking)


def _is_lost(layers: Mapping[int, set[str]], number: int, fuller: frozenset[str], config: Config) -> bool:
    """Whether one layer lost tensors, rather than being built without them.

    No class of transformers has, between two layers that are alike, a single one with parts of modules missing: first and last layers
    differ, and those at regular places. Of a short stack nothing is known, and a config may list the layers that differ.
    """
    absent = fuller - layers[number]
    if len(layers) < LONG or len(fuller) < BLOCK or any(frozenset(layers.get(beside, ())) != fuller for beside in (number - 1, number + 1)):
        return False
    if sum(not absent <= leaves for leaves in layers.values() if len(leaves & fuller) * 2 > len(fuller)) > 1:
        return False
    siblings = all(any(leaf.startswith(_around(name)) for leaf in layers[number]) for name in absent)
    return siblings and not any(_names_layer(level, number, len(layers)) for level in levels(config))


def _around(leaf: str) -> str:
    """The common prefix of a module's siblings: "mlp." for mlp.down_proj.weight, nothing for a norm's weight."""
    parts = leaf.split(".")
    return f"{parts[0]}." if len(parts) > 2 else ""


def _names_layer(level: Mapping[str, object], number: int, count: int) -> bool:
    """Whether an entry of a config may be about this very layer: a list of its kinds or of numbers, an interval, an offset."""
    for key, value in level.items():
        if isinstance(value, (list, tuple)) and 0 < len(value) <= count:
            if len(value) == count and value.count(value[number]) < count:
                return True
            if any(type(item) is int and item in (number, number + 1) for item in value):
                return True
        if PLACE.search(key) and type(value) is int and value in (number, number + 1):
            return True
    return False


def _whole(value: object) -> int | None:
    """A number of parts, even if a config writes it as "2" or 2.0."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 10**9:
        return int(value)
    return value if type(value) is int else None


def _is_block(layers: Mapping[int, set[str]], number: int) -> bool:
    return len(layers[number]) >= BLOCK


def _are_alike(layers: Mapping[int, set[str]], hole: int) -> bool:
    """Whether the layers around a hole are blocks with the same tensors; between others there may be a module without any."""
    before = max((number for number in layers if number < hole), default=None)
    after = min((number for number in layers if number > hole), default=None)
    return before is not None and after is not None and _is_block(layers, before) and layers[before] == layers[after]


def _experts(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    wanted = expert_count(config)
    for stack, experts in _numbers(EXPERTS, shapes).items():
        last = max(experts)
        beyond = range(last + 1, min(wanted or 0, last + 1 + LISTED))
        yield from _missing(stack, [*_holes(experts), *beyond], len(experts))
        every = set().union(*experts.values())
        lost = [f"{stack}.{number}.{leaf}" for number, leaves in sorted(experts.items()) for leaf in sorted(every - leaves)]
        if lost:
            yield Mismatch("missing-layers", f"{few(lost, 3)}: other experts have it", tuple(lost[:LISTED]))
        if wanted is not None and last + 1 > wanted:
            yield Mismatch("extra-experts", f"config.json says {plural(wanted, 'expert')}, but {stack} has {last + 1}")


def _holes(numbered: Mapping[int, object]) -> list[int]:
    """Missing numbers from 0 to the last one; at most as many as there are existing ones."""
    absent: list[int] = []
    expected = 0
    for number in sorted(numbered):
        absent += range(expected, min(number, expected + LISTED))
        expected = number + 1
    return absent


def _missing(stack: str, numbers: list[int], there: int) -> Iterator[Mismatch]:
    if numbers:
        first = ", ".join(map(str, numbers[:3])) + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")
        text = f"{stack} has {plural(there, 'module')}, but lacks {first}"
        yield Mismatch("missing-layers", text, tuple(f"{stack}.{number}.*" for number in numbers))


def _rows(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    text = config.get("text_config")
    sizes = [level.get("vocab_size") for level in (config, text) if isinstance(level, Mapping)]
    wanted = next((size for size in sizes if type(size) is int), None)
    rows = {name: shape[0] for name, shape in shapes.items() if ".".join(name.split(".")[-2:]) in EMBEDDINGS and len(shape) == 2}
    if wanted is not None and rows and max(rows.values()) < wanted:
        name = max(rows, key=lambda name: rows[name])
        yield Mismatch("vocabulary-rows", f"{name} has {rows[name]} rows, but config.json says vocab_size {wanted}")


def _towers(config: Config, shapes: Mapping[str, Shape], namings: Sequence[Collection[str]]) -> Iterator[Mismatch]:
    """Parts of the config without tensors, by their usual names: a class that names its part otherwise is not judged by these."""
    for key, words in TOWERS.items():
        if not all(any(words.search(name) for name in names) for names in namings):
            continue
        if isinstance(config.get(key), Mapping) and config[key] and not any(words.search(name) for name in shapes):
            yield Mismatch(
                "no-tower", f"config.json has {'an' if key[0] in 'aeiou' else 'a'} {key}, but no tensor is named like such a part"
            )


def has_packed_codes(names: Iterable[str]) -> bool:
    """Whether some weights are codes of 4 bits that bitsandbytes packed: bytes in rows of one, whatever the shape of the weight."""
    return any(PACKED.search(name) for name in names)
