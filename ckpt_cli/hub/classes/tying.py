"""Whether a model ties its output head to its input embedding, today and by the version of transformers that wrote its config."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ckpt_cli.hub.classes.known_names import likeliest_class
from ckpt_cli.hub.classes.rules import rules_for, ties_of
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.tied_names import HEADS, KEY, SAYINGS, SHARED, embeddings_in, last_two

FIRST = (5, 0)
OWN_HEAD_UNTIL: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("internvl", "janus", "ovis2", "deepseek_vl", "deepseek_vl_hybrid", "got_ocr2", "florence2"), FIRST),
    **dict.fromkeys(("mamba", "falcon_mamba", "camembert", "ibert", "cohere2_vision", "lfm2_vl", "shieldgemma2"), FIRST),
    **dict.fromkeys(("glmasr", "granite_speech"), (5, 9)),
}
"""Model types -> the last version from 5.0 on that was seen to give them a head of their own by default; 5.24 ties it.

By the configs of 5.0.0, 5.9.0 and 5.24.0 as they are without arguments.
"""

VERSION = re.compile(r"(\d{1,3})\.(\d{1,4})(?!\d)")


def ties_embeddings(config: Config) -> bool:
    """Whether the output head is tied to the input embedding: by the class, and what the config says.

    The head belongs to the outer model, so most classes look at the outer config. Some follow that of their language model
    (`text_config`), where transformers 4 wrote it, and if nothing is said, each does what it does. Of a class that is not known, the
    outer config counts.
    """
    outer, inner = _said(config), _said(config.get("text_config"))
    # A class that is not known yet takes seconds to ask: only where the outer config leaves it open.
    ties = ties_of(config, ask=outer is None or (inner is True and not outer))
    if ties is not None:
        return ties[SAYINGS.index((outer, inner))] == "1"
    return outer if outer is not None else inner is True


def says_tied(config: Config) -> bool:
    """Whether a config itself says that the head is tied, rather than leaving it to its class."""
    return True in (_said(config), _said(config.get("text_config")))


def own_head(config: Config) -> str | None:
    """Why a model that today's class ties has a head of its own, None where nothing tells that it has.

    transformers 5 leaves both as they are where a file has both and their values differ. T5 and its like say no with
    ``tie_word_embeddings``, which version 4 obeyed and version 5 no longer does; other defaults became another one.
    """
    if says_tied(config):
        return None
    outer, text = _said(config), config.get("text_config")
    version = _version(config)
    if version is not None and version < FIRST and isinstance(text, Mapping):
        # Version 4 asked the config of the language model, whatever the outer one said.
        own = _said(text) is False or _tied_by_default(text) is False
    elif outer is False or (outer is None and _said(text) is False):
        own = True
    else:
        own = outer is None and version is not None and FIRST <= version <= OWN_HEAD_UNTIL.get(str(config.get("model_type")), (0, 0))
    if not own:
        return None
    if False in (outer, _said(text)):
        return f"config.json says {KEY} false"
    return f"config.json is of transformers {config.get('transformers_version')}, which does not tie it"


def lost_head(config: Config, names: Collection[str]) -> str | None:
    """What is said of a model whose head of its own is not there, so that today's class takes its embedding; None for all others."""
    there = embeddings_in(names) or [name for name in names if last_two(name) == SHARED]
    if not there or any(last_two(name) in HEADS for name in names):
        return None
    why = own_head(config)
    rules = rules_for(config) if why is not None and ties_embeddings(config) else None
    heads = [name for name in rules.tied if name.endswith(HEADS)] if rules is not None else []
    return f"{heads[0]} is not there, although {why}: transformers 5 takes the embedding for it" if heads else None


def _tied_by_default(text: Mapping[str, object]) -> bool | None:
    """What the class of a language model does where its config says nothing; None where that is not known."""
    model_type = text.get("model_type")
    kind = likeliest_class(model_type, "ForCausalLM") if isinstance(model_type, str) else None
    ties = ties_of({"model_type": model_type, "architectures": [kind]}, ask=False) if kind is not None else None
    return None if ties is None else ties[SAYINGS.index((None, None))] == "1"


def _version(config: Config) -> tuple[int, int] | None:
    match = VERSION.match(str(config.get("transformers_version") or ""))
    return (int(match[1]), int(match[2])) if match is not None else None


def _said(level: object) -> bool | None:
    said = level.get(KEY) if isinstance(level, dict) else None
    return said if isinstance(said, bool) else None
