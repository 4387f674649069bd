"""Whether a model ties its output head to its input embedding."""

from __future__ import annotations

from ckpt_cli.hub.classes.expected_tensors import expected_tensors
from ckpt_cli.hub.classes.rules import rules_for
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.tied_names import HEADS, last_two

KEY = "tie_word_embeddings"


def ties_embeddings(config: Config, default: bool = False) -> bool:
    """Whether the output head is tied to the input embedding; ``default`` is what the architecture does if the config says nothing.

    The head belongs to the outer model, so transformers 5 looks at the outer config. Some classes also follow that of their
    language model (`text_config`), where transformers 4 wrote it, others ignore it: the class is asked where only that one ties.
    Unasked, an explicit no at the top counts (a head that is stored twice does no harm), and silence means what the class does.
    """
    outer, inner = config.get(KEY), config.get("text_config")
    if isinstance(outer, bool) and (outer or not _says_so(inner)):
        return outer
    if not _says_so(inner):
        return False if isinstance(inner, dict) and inner.get(KEY) is False else default
    expected = expected_tensors(config)
    if not isinstance(expected, str):
        return any(last_two(name) in HEADS for pair in expected.tied.items() for name in pair)
    rules = rules_for(config)
    return outer is None and (rules is None or rules.ties)


def _says_so(level: object) -> bool:
    return isinstance(level, dict) and level.get(KEY) is True
