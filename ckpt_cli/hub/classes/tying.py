"""Whether a model ties its output head to its input embedding."""

from __future__ import annotations

from ckpt_cli.hub.classes.rules import ties_of
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.tied_names import KEY, SAYINGS


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


def _said(level: object) -> bool | None:
    said = level.get(KEY) if isinstance(level, dict) else None
    return said if isinstance(said, bool) else None
