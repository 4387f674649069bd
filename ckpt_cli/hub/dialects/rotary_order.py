"""In which order a trainer keeps the rows of queries and keys that rotary embedding turns, where a class wants another.

Facts: Meta's models turn neighbouring rows as one complex number, and so do those that torchtitan, torchtune and fairseq2 made after them;
transformers turns row i of a head with row i + half, and converters reorder the rows (``_permute`` of torchtitan's Llama3StateDictAdapter,
torchtune's ``tune_to_hf``, fairseq2's ``save_as_hg_llama``). torchtitan's Qwen3 and gpt-oss turn halves under the names of its Llama, and
Llama 4 neighbours in both: which model it is decides, not names alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckpt_cli.hub.config import Config, levels, model_type
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few, printable
from ckpt_cli.tensors.component import Note

ROTARY_ORDER = "rotary-order"


@dataclass(frozen=True, slots=True)
class Neighbours:
    """A trainer whose ``turned`` tensors have neighbouring rows turned, in models of the ``types`` of transformers.

    Where others name queries and keys alike, ``sign`` is a tensor that only this trainer has.
    """

    trainer: str
    turned: re.Pattern[str]
    types: frozenset[str]
    converter: str
    sign: re.Pattern[str] | None = None

    def names(self, name: str) -> bool:
        return self.turned.fullmatch(name) is not None


MISTRAL = frozenset({"mistral", "mixtral", "ministral", "ministral3", "mistral3", "pixtral", "voxtral"})
"""Mistral's own files, and those of its trainer, have Meta's names and order."""

TRAINERS = (
    Neighbours(
        "Meta's Llama, torchtitan and Mistral",
        re.compile(r"(.*\.)?layers\.[0-9]+\.attention\.(qkv_linear\.)?w[qk]\.(weight|bias)"),
        MISTRAL | {"llama", "mllama", "mllama_text_model"},
        "torchtitan's convert_to_hf.py or transformers' convert_llama_weights_to_hf.py",
    ),
    Neighbours(
        "torchtune",
        re.compile(r"(.*\.)?layers\.[0-9]+\.attn\.[qk]_proj\.(weight|bias)"),
        frozenset({"llama", "mistral", "gemma", "gemma2"}),
        "torchtune's tune_to_hf",
        re.compile(r"(.*\.)?layers\.[0-9]+\.sa_norm\.scale"),
    ),
    Neighbours(
        "fairseq2",
        re.compile(r"(.*\.)?decoder\.layers\.[0-9]+\.self_attn\.[qk]_proj\.(weight|bias)"),
        frozenset({"llama"}),
        "fairseq2's own converter to Hugging Face",
        re.compile(r"(.*\.)?decoder_frontend\.embed\.weight"),
    ),
)


def order_notes(mapped: Mapping[str, str | None], fits: Callable[[str], bool], config: Config, kind: str) -> list[Note]:
    """A warning about queries and keys that a key map gives the names of a class which turns other rows than their trainer.

    ``mapped`` are new names by those of the trainer, ``fits`` tells which of them are written and the class has; ``config`` and ``kind``
    are those of the class.
    """
    types = {model_type(level) for level in levels(config)}
    for trainer in TRAINERS:
        if not types & trainer.types or not (trainer.sign is None or any(map(trainer.sign.fullmatch, mapped))):
            continue
        changed = [new for old, new in mapped.items() if new is not None and trainer.names(old) and not trainer.names(new)]
        renamed = [new for new in changed if fits(new)]
        if renamed:
            text = (
                f"{few(grouped(renamed), 3)} had names of {trainer.trainer}, whose rotary embedding turns neighbouring rows of a head; "
                f"{printable(kind)} turns its halves, and --key-map moves no rows: unless the training turned halves too, the model "
                f"computes something else. {trainer.converter} gives them their order"
            )
            return [Note("warning", ROTARY_ORDER, text)]
    return []
