"""Whether the tokenizer of a base has all tokens of a training that goes without one of its own: the rows of the embedding tell."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_cli.base_model.opened import Base
from ckpt_cli.hub.assets import Assets
from ckpt_cli.hub.beside.tokenizers import has_vocabulary
from ckpt_cli.hub.beside.told_tokens import with_ids
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.tokenizer import embedding_of
from ckpt_cli.hub.tokenizer_file import TokenizerFile
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

PADDED_TO = tuple(1 << power for power in range(3, 11))
"""Multiples that embeddings are padded to: for the hardware, and by Megatron for each rank of tensor parallelism."""


def base_tokenizer_notes(base: Base, assets: Assets, tensors: Mapping[str, Tensor]) -> list[Note]:
    """What is said of the tokenizer of a base where the embedding has more rows than that base, and than its tokenizer has tokens.

    Tokens that a training added have rows, and no others have, unless the embedding was padded.
    """
    if not any(has_vocabulary([name]) and base.assets.files.get(name) == path for name, path in assets.files.items()):
        return []
    rows, before = _rows(tensors), _rows(base.component.tensors) if base.component is not None else None
    before = before or _vocabulary_size(base.config)
    tokens = _tokens(assets.tokenizer()) if assets.tokenizer is not None else None
    known = [number for number in (before, tokens) if number]
    if rows is None or not known or rows == before or rows <= (tokens or max(known)):
        return []
    there = [f"that of the base {before}"] if before else []
    there += [f"the tokenizer, which is the base's, has {tokens} tokens" if tokens else "the tokenizer is the base's"]
    text = f"the embedding has {rows} rows, {', '.join(there)}"
    if any(rows == -(-number // multiple) * multiple for number in known for multiple in PADDED_TO):
        return [Note("info", "base-tokenizer", f"{text}: padding explains that, or tokens that the training added, which would be missing")]
    why = "more than padding explains, so tokens that the training added are likely to be missing"
    return [Note("warning", "base-tokenizer", f"{text}: {why}; copy the tokenizer of the training beside its weights")]


def _tokens(tokenizer: TokenizerFile) -> int | None:
    """How many rows its ids need, with those of tokens that loading adds; None where that is not known."""
    if tokenizer.following is None:
        return None
    loaded = [number for _, number, _ in with_ids(tokenizer.told, tokenizer.held, tokenizer.following)]
    return max(tokenizer.following, *(max(ids) + 1 for _, ids in tokenizer.ids), *(number + 1 for number in loaded))


def _rows(tensors: Mapping[str, Tensor]) -> int | None:
    embedding = embedding_of(tensors)
    return embedding.shape[0] if embedding is not None else None


def _vocabulary_size(config: Config) -> int | None:
    """What a config says of itself, or of its language model."""
    text = config.get("text_config")
    sizes = [level.get("vocab_size") for level in (config, text) if isinstance(level, Mapping)]
    return next((size for size in sizes if type(size) is int), None)
