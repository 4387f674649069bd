"""The numbers of layers in a config, in every dialect: ``num_hidden_layers``, ``n_layer``, ``decoder_layers``, ``vision_config.depth``.

A count is any whole number whose key has a word for layers. The other words of the key, and those of the part of the config that it
stands in, say which layers are meant: they are looked for in the names of tensors, so that no list of keys is needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_cli.hub.config import Config, model_type

LAYERS = frozenset({"layer", "layers", "block", "blocks", "depth", "depths"})
"""Words for layers, in keys."""

OF_STAGES = frozenset({"layers", "blocks", "depths", "repeats"})
"""Words for layers of several stages, which are listed."""

MOST_STAGES = 8
"""A longer list has places of layers."""

PLAIN = frozenset({"num", "n", "nb", "no", "number", "count", "of", "total", "hidden", "transformer"})
"""Words that do not tell which layers are meant."""

MODEL = frozenset({"text", "language", "lang", "llm", "lm", "vlm", "model", "config", "cfg", "base", "backbone"})
"""Words for the language model, or for all of it, in the names of parts of a config."""

SIDES = frozenset({"encoder", "decoder"})

TOWERS = {
    "vision": re.compile(r"vis|image|siglip|clip|vit", re.IGNORECASE),
    "audio": re.compile(r"audio|speech|whisper|sound", re.IGNORECASE),
}
"""Towers, and what occurs in the names of their tensors, and in those of their parts of a config."""

OF_TEXTS = re.compile(r"(^|[._])(text|language|llm)(?![a-z])")
"""What occurs in the names of tensors of language models, also where the whole model is called after a tower (``owlvit.text_model``)."""

LOOPED = re.compile(r"recurr|loop|cycle|layer_shar|(?<!kv_)shared?_(layer|block)|hidden_groups|depth_(coeff|mult)|ut_steps", re.IGNORECASE)
"""In keys: layers are used several times, or a factor scales their count, so that fewer may be there than it says."""

TEXTS = ("text_config", "llm_config", "language_config")
"""Parts of a config that are the language model's."""

ONE_LESS = ("mask2former", "oneformer")
"""Models whose ``decoder_layers`` count the learned queries as one."""

USUAL = "num_hidden_layers"
DEEPEST = 4


@dataclass(frozen=True, slots=True)
class Count:
    """A number of layers in a config.

    ``name`` is its key, with the names of the parts around it. ``tower`` and ``words`` say which layers are meant: without either, those
    of the whole model, or of its language model. ``is_listed``: it is the length of a list, one of its numbers, or their sum.
    """

    name: str
    number: int
    tower: str | None
    words: frozenset[str]
    is_listed: bool = False

    @property
    def is_main(self) -> bool:
        return not self.words and self.tower is None

    def means(self, stack: str, tower: str | None) -> bool:
        """Whether a stack of that name, which is a part of that tower, may be what is counted: all but towers, unless words tell."""
        return self.tower == tower and self.words <= {word for part in stack.split(".") for word in words_of(part)}


def words_of(name: str) -> list[str]:
    """The words of a key, or of a part of a name.

    >>> words_of("num_decoderLayers")
    ['num', 'decoder', 'layers']
    """
    return [word.lower() for word in re.split(r"[_\-]+|(?<=[a-z])(?=[A-Z])", name) if word]


def tower_of(name: str) -> str | None:
    """The tower that a name belongs to, None if it is that of another part."""
    if OF_TEXTS.search(name):
        return None
    return next((tower for tower, words in TOWERS.items() if words.search(name)), None)


def counts_layers(key: str) -> bool:
    """Whether a key counts the layers of a model, and not those of a part."""
    words = {*words_of(key)}
    return not LAYERS.isdisjoint(words) and words <= LAYERS | PLAIN


def layer_count(config: Config) -> int | None:
    """The number of layers of the model, or of its language model; None where no whole number says it."""
    for level in (config, *(config[part] for part in TEXTS if isinstance(config.get(part), Mapping))):
        found = {key: value for key, value in level.items() if type(value) is int and counts_layers(key)}
        if found:
            return found.get(USUAL, next(iter(found.values())))
    return None


def most_layers(config: Config) -> int:
    """`layer_count`, or what a config without it counts as the most: layers of an encoder or a tower, of all stages. 0 for none."""
    found = [count.number for count in layer_counts(config) if {*words_of(count.name.rpartition(".")[2])} <= LAYERS | PLAIN | SIDES]
    return layer_count(config) or max(found, default=0)


def layer_counts(config: Config) -> list[Count]:
    """All numbers of layers in a config and its parts, also where they are written as "2" or 2.0."""
    return list(_counts(config, ()))


def _counts(config: Config, parts: tuple[str, ...]) -> Iterator[Count]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            if len(parts) < DEEPEST:
                yield from _counts(value, (*parts, key))
        elif isinstance(value, (list, tuple)):
            yield from (_count(parts, key, number, is_listed=True) for number in _listed(key, value))
        elif not LAYERS.isdisjoint(words_of(key)) and (number := whole(value)) is not None and number > 0:
            yield _count(parts, key, number - (key == "decoder_layers" and model_type(config) in ONE_LESS))


def _count(parts: Sequence[str], key: str, number: int, *, is_listed: bool = False) -> Count:
    name = ".".join((*parts, key))
    around = {word for part in parts for word in words_of(part)} - MODEL
    own = set() if is_listed else {*words_of(key)} - PLAIN - LAYERS
    tower = tower_of(name)
    return Count(name, number, tower, frozenset(word for word in around | own if tower_of(word) is None), is_listed)


def _listed(key: str, values: Collection[object]) -> set[int]:
    """What a list tells: how long it is, and if it is one of counts, its numbers and their sum."""
    numbers = [value for value in values if type(value) is int]
    are_counts = len(numbers) == len(values) <= MOST_STAGES and not OF_STAGES.isdisjoint(words_of(key))
    return {len(values), *numbers, sum(numbers)} if are_counts else {len(values)}


def may_loop(config: Config) -> bool:
    """Whether a model may use layers several times, so that its config counts more than there are."""
    return any(
        (LOOPED.search(key) and value not in (None, False)) or (isinstance(value, Mapping) and may_loop(value))
        for key, value in config.items()
    )


def whole(value: object) -> int | None:
    """A number of parts, even if a config writes it as "2" or 2.0."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 10**9:
        return int(value)
    return value if type(value) is int else None
