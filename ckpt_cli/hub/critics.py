"""The class that config.json should name where it names another: FSDP2's of the model, or a critic's language model.

verl and its relatives train value models as ``...ForTokenClassification`` (``score.weight`` and ``score.bias``) and save the config
of the language model, whose class would ignore the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.rules import knows
from ckpt_cli.hub.config import Config, architecture, with_plain_class

LANGUAGE_MODEL = "ForCausalLM"
USUAL_LABELS = 2
"""What a config without any word about labels means."""


def repaired_class(config: Config, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """The entries that config.json needs so that its class is the model's, with the head of these weights; empty if it is right or unknown.

    ``shapes`` are the tensors that are written. A head with a bias is that of token classification, one without that of
    sequence classification (transformers, ``modeling_layers.py``).
    """
    name, head = architecture(config), shapes.get("score.weight")
    plain = {"architectures": [name]} if name is not None and with_plain_class(config) is not config else {}
    if name is None or not name.endswith(LANGUAGE_MODEL) or head is None or len(head) != 2 or "lm_head.weight" in shapes:
        return plain
    kind = "ForTokenClassification" if "score.bias" in shapes else "ForSequenceClassification"
    wanted = name.removesuffix(LANGUAGE_MODEL) + kind
    if not knows(config.get("model_type"), wanted):
        return plain
    labels = config.get("num_labels", len(config["id2label"]) if isinstance(config.get("id2label"), Mapping) else USUAL_LABELS)
    return {"architectures": [wanted], **({"num_labels": head[0]} if labels != head[0] else {})}
