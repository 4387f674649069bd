"""Layers of multi-token prediction: which tensors belong to them, and what such a layer lost.

No class of transformers has a place for them, so they are compared with the ordinary layers of the same model. They are either beyond its
last layer (DeepSeek, GLM, Ling), or in a part of their own (Qwen, MiMo, Ernie, Nemotron). Each is an ordinary layer and what joins
hidden states with embeddings; of one that is built otherwise, only what is numbered is judged.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_cli.hub.config import Config, expert_count, is_quantised, levels
from ckpt_cli.hub.layers.counts import layer_count
from ckpt_cli.hub.layers.stacks import LAYER

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers", "num_mtp_modules")
PART = re.compile(r"(^|\.)(mtp|mtp_[a-z_]+|eh_proj|nextn_predict_layers|enorm|hnorm)(\.|$)")
OWN = re.compile(
    r"(?P<stack>(?P<part>(?:.+\.)?mtp)(?:\.layers)?|(?:.+\.)?(?:mtp_layers|mtp_block|nextn_predict_layers))\.(?P<number>[0-9]{1,9})\.(?P<leaf>.+)"
)
BESIDE = re.compile(r"(?P<before>(?:.+\.)?)(?P<joint>mtp_(?:linear_proj|emb_norm|hidden_norm))\.(?P<number>[0-9]{1,9})\.(?P<end>.+)")
"""What Ernie stores beside its blocks, with the same numbers."""

EXPERT = re.compile(r"(?P<list>(?:.+\.)?experts)\.(?P<number>[0-9]{1,9})\.(?P<rest>.+)")
JOINTS = (
    ("eh_proj", "enorm", "hnorm"),
    ("e_proj", "h_proj", "enorm", "hnorm"),
    ("input_proj", "token_layernorm", "hidden_layernorm"),
    ("mtp_linear_proj", "mtp_emb_norm", "mtp_hidden_norm"),
)
"""What joins hidden states with embeddings, in each layer: all of one of these rows."""

AROUND = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
"""What Qwen has once, around its layers."""

ENDS = ("shared_head", "final_layernorm", "norm", "embed_tokens", "lm_head")
"""Other modules of such a layer: how it ends, and copies of embedding and head."""

TOWER = re.compile(r"vis|image|siglip|clip|vit|audio|speech|whisper|sound|talker", re.IGNORECASE)
"""What occurs in the names of stacks that are not the language model's."""

LISTED = 256


@dataclass(slots=True)
class _Layer:
    """A layer of multi-token prediction; ``default`` is the row of `JOINTS` that it must have; ``leaves`` follow its name."""

    name: str
    default: tuple[str, ...] = ()
    beyond: bool = False
    leaves: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Lost:
    """What the layer of a name lacks; ``like`` is the ordinary layer that has it, "" if none tells."""

    layer: str
    lacking: tuple[str, ...]
    like: str = ""


def asked_layers(config: Config) -> tuple[str, int, int | None]:
    """The key that counts the layers of multi-token prediction, how many it says, and the number of the first; ("", 0, None) for none."""
    for level in levels(config):
        key = next((key for key in COUNTS if type(level.get(key)) is int and level[key] > 0), None)
        if key is not None:
            layers = layer_count(level)
            return key, level[key], layer_count(config) if layers is None else layers
    return "", 0, None


def of_prediction(config: Config, names: Iterable[str]) -> list[str]:
    """The names that belong to the layers of multi-token prediction that a config counts."""
    key, count, first = asked_layers(config)
    return [name for name in names if PART.search(name) or _beyond(name, count, first)] if key else []


def _beyond(name: str, count: int, first: int | None) -> bool:
    match = LAYER.search(name) if count else None
    return match is not None and first is not None and first <= int(match["number"]) < first + count


def prediction_layers(config: Config, names: Collection[str]) -> list[str]:
    """The names of these layers: of those that a config counts, and of those that are named for what they are."""
    return list(_layers(config, names, _ordinary(config, names)[0])) if _may_have(config, names) else []


def _may_have(config: Config, names: Iterable[str]) -> bool:
    return bool(asked_layers(config)[0]) or any("mtp" in name or "nextn" in name for name in names)


def lost_tensors(config: Config, names: Collection[str]) -> Iterator[Lost]:
    """What layers of multi-token prediction that are there lack. Of quantised models, whose scales differ, whole modules are compared."""
    if not _may_have(config, names):
        return
    quantised = is_quantised(config)
    names = {name.rpartition(".")[0] + ".*" for name in names} if quantised else names
    stack, ordinary = _ordinary(config, names)
    layers = _layers(config, names, stack)
    for layer in layers.values():
        yield from _lost(layer, ordinary, expert_count(config), "*" if quantised else "weight")
    yield from _lost_around(config, names, list(layers), "*" if quantised else "weight")


def _layers(config: Config, names: Iterable[str], ordinary: str) -> dict[str, _Layer]:
    """These layers by name; those beyond the last one are in the stack of the ``ordinary`` ones."""
    _, count, first = asked_layers(config)
    found: dict[str, _Layer] = {}
    for name in names:
        if "mtp" not in name and "nextn" not in name:
            if _beyond(name, count, first) and (match := LAYER.search(name)) is not None and name[: match.end()] == ordinary:
                where = f"{ordinary}.{match['number']}"
                found.setdefault(where, _Layer(where, JOINTS[0], beyond=True)).leaves.add(match["leaf"])
        elif (joint := BESIDE.fullmatch(name)) is not None:
            where = f"{joint['before']}mtp_block.{joint['number']}"
            found.setdefault(where, _Layer(where, JOINTS[3])).leaves.add(f"{joint['joint']}.{joint['end']}")
        elif (own := OWN.fullmatch(name)) is not None:
            where = f"{own['stack']}.{own['number']}"
            row = JOINTS[2] if own["stack"].endswith("mtp_layers") else JOINTS[3] if own["stack"].endswith("mtp_block") else ()
            found.setdefault(where, _Layer(where, row)).leaves.add(own["leaf"])
    return found


def _ordinary(config: Config, names: Iterable[str]) -> tuple[str, dict[str, set[str]]]:
    """The stack of the language model's layers, and these by name in order: as many as the config says, or the most."""
    stacks: dict[str, dict[int, set[str]]] = {}
    wanted = layer_count(config)
    for name in names:
        match = LAYER.search(name) if "mtp" not in name else None
        if match is not None and (wanted is None or int(match["number"]) < wanted):
            stacks.setdefault(name[: match.end()], {}).setdefault(int(match["number"]), set()).add(match["leaf"])
    if not stacks:
        return "", {}
    stack = max(stacks, key=lambda stack: (not TOWER.search(stack), len(stacks[stack]) == wanted, len(stacks[stack])))
    return stack, {f"{stack}.{number}": stacks[stack][number] for number in sorted(stacks[stack])}


def _children(leaves: Iterable[str]) -> dict[str, set[str]]:
    """Leaves by the module in front; what is computed anew when loading is left out."""
    found: dict[str, set[str]] = {}
    for leaf in leaves:
        if not leaf.endswith("inv_freq"):
            found.setdefault(leaf.split(".")[0], set()).add(leaf)
    return found


def _lost(layer: _Layer, ordinary: Mapping[str, set[str]], experts: int | None, end: str) -> Iterator[Lost]:
    """What one layer lacks of its own modules, of those of an ordinary layer, and of what joins it to the model."""
    mine, theirs = _children(layer.leaves), {name: _children(leaves) for name, leaves in ordinary.items()}
    known = {child for children in theirs.values() for child in children}
    lacking: list[str] = []
    for child in mine.keys() & known:
        lacking += _lost_inside(mine[child], [children[child] for children in theirs.values() if child in children], experts)
    extras = mine.keys() - known
    joints = max(JOINTS, key=lambda row: (len(extras & {*row}), row == layer.default))
    joints = joints if extras & {*joints} else layer.default
    like = ""
    if not extras - {*joints, *ENDS}:
        if theirs:
            # A later layer rather than one of the first, which are often dense.
            like = max(reversed(theirs), key=lambda name: (len(theirs[name].keys() & mine.keys()), len(ordinary[name] & layer.leaves)))
            lacking += [leaf for child, leaves in theirs[like].items() if child not in mine for leaf in leaves]
        lacking += [f"{child}.{end}" for child in joints if child not in mine]
        if layer.beyond and not any(leaf.startswith(("shared_head.norm", "final_layernorm", "norm.")) for leaf in layer.leaves):
            lacking.append(f"shared_head.norm.{end}")
    if lacking:
        yield Lost(layer.name, tuple(_named(layer.name, leaf) for leaf in sorted(lacking)), like)


def _lost_inside(mine: set[str], kinds: Sequence[set[str]], experts: int | None) -> list[str]:
    """What a module lacks of the same module of the ordinary layer that is most like it; built otherwise, what its experts lack."""
    best = max(reversed(kinds), key=lambda kind: (len(kind & mine), -len(kind)))
    if not mine - set().union(*kinds):
        return sorted(best - mine)
    numbered = [match for match in map(EXPERT.fullmatch, mine) if match is not None]
    stacks = {(match["list"], match["rest"]) for match in numbered}
    last = max((int(match["number"]) for match in numbered), default=-1)
    wanted = max(last + 1, experts or 0)
    if not numbered or wanted > 2 * len(mine) + LISTED:
        return []
    return sorted({f"{where}.{number}.{rest}" for where, rest in stacks for number in range(wanted)} - mine)


def _named(layer: str, leaf: str) -> str:
    """The name of a tensor of a layer."""
    if not leaf.startswith(JOINTS[3]):
        return f"{layer}.{leaf}"
    stack, _, number = layer.rpartition(".")
    joint, _, end = leaf.partition(".")
    return f"{stack.removesuffix('mtp_block')}{joint}.{number}.{end}"


def _lost_around(config: Config, names: Collection[str], layers: Sequence[str], end: str) -> Iterator[Lost]:
    """What Qwen's layers lack around them."""
    for part in dict.fromkeys(match["part"] for match in map(OWN.fullmatch, (f"{layer}.x" for layer in layers)) if match and match["part"]):
        start = f"{part}."
        around = {name.removeprefix(start).split(".")[0] for name in names if name.startswith(start)} - {"layers"}
        mine = around & {*AROUND}
        alone = not around and "qwen" in str(config.get("model_type"))
        if (len(mine) > 1 or mine - {"norm"} or alone) and not around - {*AROUND}:
            lacking = tuple(f"{start}{child}.{end}" for child in AROUND if child not in mine)
            if lacking:
                yield Lost(part, lacking)
