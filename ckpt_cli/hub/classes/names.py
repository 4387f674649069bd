"""From the names and layouts of a model in memory to those on the hub: transformers' own conversions, as views of pieces.

What ``save_pretrained`` does with real tensors (``revert_weight_conversion`` of transformers) is done here with tensors
that are only described: names are matched in the same order by the same expressions, and every operation is a view.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ckpt_cli import shell
from ckpt_cli.boxes import Shape
from ckpt_cli.errors import Inconsistent, Unsupported
from ckpt_cli.hub.classes.gathered import TwoForms, applying, check_gathered, checked_axis, checked_parts
from ckpt_cli.hub.classes.rules import Conversion, HubRules, Renaming
from ckpt_cli.hub.classes.shapes.other_cuts import part_size
from ckpt_cli.hub.config import Config
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.views import concatenated, interleaved, sliced, stacked, transposed, unstacked

TRIED = 8
"""How many of the tensors of two forms are tried for a hint."""

Held = dict[str, list[Tensor]]
"""Pattern -> tensors that it gathered."""


def hub_tensors(tensors: Mapping[str, Tensor], rules: HubRules, config: Config) -> dict[str, Tensor]:
    """The tensors under the names that ``save_pretrained`` would give them, re-cut as it would.

    Every operation must be known (see `unknown_operations`). Raises Inconsistent if two get one name, if a rule gathers only some of
    what it joins, and where config and tensors disagree, naming tensor and rule.
    """
    state = _State(rules)
    names_in_memory = native_names(tensors, rules)
    native = {names_in_memory[name]: tensor for name, tensor in tensors.items()}
    cut = {new for name, new in names_in_memory.items() if rules.only_on_hub(name) or rules.is_cut(new)}
    gathered: dict[str, tuple[Conversion | None, Held, dict[str, list[str]]]] = {}
    for name in sorted(native, key=natural_key):
        # The expressions for names in memory may match parts of names of the hub, of tensors that were re-cut already.
        renamed, conversion, pattern = state.converted(name) if name not in cut else (name, None, name)
        if conversion is None:
            renamed, pattern = state.renamed(name), name
        first, held, names = gathered.setdefault(renamed, (conversion, {}, {}))
        names.setdefault(pattern, []).append(name)
        if first is not conversion or (conversion is None and held):
            raise TwoForms([each for listed in names.values() for each in listed], renamed)
        held.setdefault(pattern, []).append(native[name])
    result: dict[str, Tensor] = {}
    made_of: dict[str, list[str]] = {}
    for name, (conversion, held, names) in gathered.items():
        sources = [each for listed in names.values() for each in listed]
        if conversion is None:
            made = {name: _single(held)}
        else:
            with applying(conversion, next(iter(names.values()))[0]):
                check_gathered(conversion, names)
                _refuse_packed(held)
                made = _recut(name, conversion, held, config)
        for new, tensor in made.items():
            final = new if conversion is None else state.renamed(new)
            if final in result:
                raise TwoForms([*made_of[final], *sources], final)
            result[final] = tensor
            made_of[final] = sources
    return result


def _refuse_packed(held: Held) -> None:
    """Raise Unsupported for tensors to be re-cut whose elements hold several values each: rules count values."""
    packed = next((tensor for listed in held.values() for tensor in listed if tensor.dtype.values > 1), None)
    if packed is not None:
        text = f"{packed.dtype} is not re-cut for its name on the hub: {packed.dtype.values} values share a byte"
        raise Unsupported(text, hint="pass --names native to write it as the training named it")


def united(
    native: Mapping[str, Tensor], hub: HubRules, config: Config, exclude: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """The tensors as `hub_tensors` names and cuts them, and which were left out before that: own names, with those on the hub.

    Patterns are for names of the hub. Only where tensors do not go together under these, ``exclude`` leaves tensors out by their own
    names first. Raises what `hub_tensors` raises, with a hint at what goes together if one form is left out.
    """
    native = {name: tensor for name, tensor in native.items() if name not in hub.ignored}
    try:
        return hub_tensors(native, hub, config), {}
    except Inconsistent as error:
        left = [name for name in native if any(fnmatchcase(name, pattern) for pattern in exclude)]
        if not left:
            raise _with_hint(error, native, hub, config) from None
    rest = {name: tensor for name, tensor in native.items() if name not in left}
    try:
        return hub_tensors(rest, hub, config), {name: _on_hub(native[name], name, hub, config) for name in left}
    except Inconsistent as error:
        raise _with_hint(error, rest, hub, config) from None


def _on_hub(tensor: Tensor, name: str, hub: HubRules, config: Config) -> tuple[str, ...]:
    """The names that a tensor alone has on the hub."""
    try:
        return tuple(hub_tensors({name: tensor}, hub, config))
    except Inconsistent:  # a part of what is gathered
        return tuple(renamed_for_hub({name: tensor.shape}, hub))


def _with_hint(error: Inconsistent, native: Mapping[str, Tensor], hub: HubRules, config: Config) -> Inconsistent:
    """The error, with the tensors named that can be left out so that the others go together, if there are some."""
    forms = error.names if isinstance(error, TwoForms) else ()
    whole: dict[tuple[str, ...], int] = {}
    # One form may be a single tensor, or the parts of another one. What leaves the most tensors loses none of them.
    for names in [(name,) for name in forms[:TRIED]] + [forms[:-1], forms[1:]]:
        if names and len(names) < len(native):
            with contextlib.suppress(Inconsistent):
                rest = {name: tensor for name, tensor in native.items() if name not in names}
                whole[names] = len(hub_tensors(rest, hub, config))
    if whole:
        options = " ".join(f"--exclude {shell.word(name)}" for name in max(whole, key=whole.__getitem__))
        error.hint = f"the checkpoint holds one tensor in two forms: leave one of them out with {options}"
    return error


def native_tensors(tensors: Mapping[str, Tensor], rules: HubRules) -> Mapping[str, Tensor]:
    """The tensors under the names of the model in memory: hub names and names of older versions are changed."""
    names = native_names(tensors, rules)
    return {names[name]: tensor for name, tensor in tensors.items()}


def native_names(names: Iterable[str], rules: HubRules) -> dict[str, str]:
    """Each name as in memory; all unchanged if two would become one."""
    state = _State(rules)
    renamed = {name: state.older(name) for name in sorted(names, key=natural_key)}
    return renamed if len(set(renamed.values())) == len(renamed) else {name: name for name in renamed}


def renamed_for_hub(shapes: Mapping[str, Shape], rules: HubRules) -> dict[str, Shape]:
    """Shapes under the names of the hub, for names of older versions of transformers; what is re-cut is only renamed."""
    older, newer = _State(rules), _State(rules)
    names = {name: older.older(name) for name in sorted(shapes, key=natural_key)}
    return {newer.renamed(names[name]): shapes[name] for name in sorted(names, key=lambda name: natural_key(names[name]))}


def unknown_operations(rules: HubRules) -> list[str]:
    """Names of operations and renamings that cannot be applied here."""
    found = {operation["name"] for conversion in rules.conversions for operation in conversion.operations} - set(OPERATIONS)
    found |= {renaming.kind for renaming in (*rules.renamings, *rules.older)} - {"first", "paired", "shifted"}
    return sorted(found)


def natural_key(name: str) -> list[tuple[Any, ...]]:
    """Sorts names part by part, numbers as numbers (transformers' ``dot_natural_key``)."""
    parts: list[tuple[Any, ...]] = []
    for part in name.split("."):
        text = part.rstrip("0123456789")
        if part.isdecimal():
            parts.append((0, int(part)))
        else:
            parts.append((1, text, int(part[len(text) :])) if len(text) < len(part) else (1, text))
    return parts


class _State:
    """Applies expressions to names; some only count once another name has been seen."""

    def __init__(self, rules: HubRules) -> None:
        self._rules = rules
        self._active: set[int] = set()

    def converted(self, name: str) -> tuple[str, Conversion | None, str]:
        """The name under which the first conversion that matches gathers a tensor, and the pattern that matched."""
        for conversion in self._rules.conversions:
            renamed, pattern = self._apply(conversion.renaming, name)
            if pattern is not None:
                return renamed, conversion, pattern
        return name, None, name

    def renamed(self, name: str) -> str:
        for renaming in self._rules.renamings:
            name, _ = self._apply(renaming, name)
        return name

    def older(self, name: str) -> str:
        renamed = name
        for renaming in self._rules.older:
            renamed, _ = self._apply(renaming, renamed)
        return name if renamed != name and self._rules.in_memory(name, renamed) else renamed

    def _apply(self, renaming: Renaming, name: str) -> tuple[str, str | None]:
        parts = renaming.inside(name)
        if parts is None:
            return name, None
        prefix, inner = parts
        match = renaming.match.search(inner)
        if match is None:
            return name, None
        group = next(key for key, value in match.groupdict().items() if value is not None)
        branch, first = int(group[1:]), renaming.match.groupindex[group] + 1
        if renaming.kind == "paired":
            if branch == 0:
                self._active.add(id(renaming))
            elif id(renaming) not in self._active:
                return name, None
            target = re.sub(r"\\(\d+)", lambda found: match.group(first - 1 + int(found[1])), renaming.targets[branch])
        else:
            target = renaming.targets[0]
            if r"\1" in target:
                value = match.group(first)
                target = target.replace(r"\1", str(int(value) + renaming.offset) if renaming.kind == "shifted" else value)
        return prefix + inner.replace(match.group(0), target, 1), renaming.sources[branch]


def _recut(name: str, conversion: Conversion, held: Held, config: Config) -> dict[str, Tensor]:
    """The tensors that a conversion makes of what it gathered, by their names before the renamings."""
    sources, targets = conversion.renaming.sources, conversion.renaming.targets
    current = held
    for operation in conversion.operations:
        options = {key: value for key, value in operation.items() if key != "name"}
        current = OPERATIONS[operation["name"]](current, sources, targets, config, **options)
    full = name.replace("*.", "0.")
    for pattern in current:
        if pattern in full:
            before, _, after = full.partition(pattern)
            return {before + key + after: _only(tensors) for key, tensors in current.items()}
    return {key: _only(tensors) for key, tensors in current.items()}


# -- operations: gathered tensors, patterns of the sources and targets, config, options of the operation ------------------


def _only(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


def _single(held: Held) -> Tensor:
    return _only(next(iter(held.values())))


def _chunk(held: Held, _: Sequence[str], targets: Sequence[str], config: Config, dim: int, num_shards_attribute: str | None = None) -> Held:
    tensor = _single(held)
    if num_shards_attribute is not None:
        levels = [level for level in (config.get("text_config"), config) if isinstance(level, Mapping)]
        named = next((level[num_shards_attribute] for level in levels if num_shards_attribute in level), None)
        count = checked_parts(tensor, tensor.shape[checked_axis(tensor, dim)], named, f"parts ({num_shards_attribute} in config.json)")
        targets = [targets[0].replace("*", str(i)) for i in range(count)]
    axis = checked_axis(tensor, dim)
    length = tensor.shape[axis]
    size = part_size(length, len(targets)) if num_shards_attribute is None and length % len(targets) else None
    if size is None:
        size = length // checked_parts(tensor, length, len(targets), "equal parts")
    return {target: [sliced(tensor, axis, i * size, min((i + 1) * size, length))] for i, target in enumerate(targets)}


def _concatenate(
    held: Held, sources: Sequence[str], targets: Sequence[str], _: Config, dim: int, num_shards_attribute: str | None = None
) -> Held:
    tensors = [tensor for source in sources for tensor in held.get(source, [])]
    return {targets[0]: [concatenated(tensors, checked_axis(tensors[0], dim))]}


def _split_list(held: Held, _: Sequence[str], targets: Sequence[str], __: Config, dim: int) -> Held:
    result: Held = {}
    for pattern, tensors in held.items():
        tensor = _only(tensors)
        target = targets[0] if len(held) == 1 else pattern
        # One element has at least one dimension itself: a stack of numbers is no stack of experts.
        axis = checked_axis(tensor, dim, least=2)
        checked_parts(tensor, tensor.shape[axis], tensor.shape[axis], "elements of a list")
        result |= {target.replace("*", str(i)): [each] for i, each in enumerate(unstacked(tensor, axis))}
    return result


def _merge_list(held: Held, _: Sequence[str], targets: Sequence[str], __: Config, dim: int) -> Held:
    return {(targets[0] if len(held) == 1 else pattern): [stacked(tensors, dim)] for pattern, tensors in held.items()}


def _transpose(
    held: Held, sources: Sequence[str], targets: Sequence[str], _: Config, dim0: int, dim1: int, check_dims: bool = False
) -> Held:
    tensor = _single(held)
    target = targets[0] if len(targets) == 1 else sources[0]
    if check_dims:
        # While saving, transformers compares with the parameter of the same name, which has this very shape.
        return {target: [tensor]}
    return {target: [transposed(tensor, checked_axis(tensor, dim0), checked_axis(tensor, dim1))]}


def _interleave(held: Held, _: Sequence[str], targets: Sequence[str], __: Config, dim: int, inverse: bool = False) -> Held:
    tensor = _single(held)
    return {targets[0]: [interleaved(tensor, checked_axis(tensor, dim), inverse=inverse)]}


def _permute_for_rope(
    held: Held,
    sources: Sequence[str],
    targets: Sequence[str],
    config: Config,
    subconfig_key: str | None = None,
    permute_layer_names: Sequence[str] | None = None,
    inverse: bool = False,
) -> Held:
    result: Held = {}
    for pattern, tensors in held.items():
        target = targets[0] if len(targets) == len(sources) == 1 else pattern
        wanted = permute_layer_names is None or any(name in pattern for name in permute_layer_names)
        result[target] = [rotated_for(_only(tensors), config, subconfig_key, inverse=inverse)] if wanted else tensors
    return result


def rotated_for(tensor: Tensor, config: Config, subconfig_key: str | None, *, inverse: bool) -> Tensor:
    """The rows of a projection in the other order of rotary embeddings, for the number of heads in a config or in a part of it."""
    level = config.get(subconfig_key, config) if subconfig_key is not None else config
    heads = level.get("num_attention_heads", 1) if isinstance(level, Mapping) else 1
    return _rotated(tensor, heads, inverse)


def _rotated(tensor: Tensor, heads: int, inverse: bool) -> Tensor:
    """Rows of each head: pairs of neighbours become two halves, or (``inverse``) two halves pairs of neighbours."""
    rows = tensor.shape[checked_axis(tensor, 0)]
    length = rows // checked_parts(tensor, rows, heads, "heads (num_attention_heads in config.json)")
    checked_parts(tensor, length, 2, "halves of a head (num_attention_heads in config.json)")
    parts = [sliced(tensor, 0, head * length, (head + 1) * length) for head in range(heads)]
    return concatenated([interleaved(part, 0, inverse=inverse) for part in parts], 0)


OPERATIONS: dict[str, Any] = {
    "Chunk": _chunk,
    "Concatenate": _concatenate,
    "SplitModulelist": _split_list,
    "MergeModulelist": _merge_list,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _permute_for_rope,
}
"""transformers' operations by the name of their class (core_model_loading.py)."""
