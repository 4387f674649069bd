"""Names of embeddings and of the output heads that are tied to them."""

from __future__ import annotations

from collections.abc import Sequence

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")


def tied_pair(names: Sequence[str]) -> tuple[str, str] | None:
    """(head, embedding) among tensor names, if there is exactly one of each."""
    heads = [name for name in names if _last_two(name) in HEADS]
    embeddings = [name for name in names if _last_two(name) in EMBEDDINGS]
    return (heads[0], embeddings[0]) if len(heads) == len(embeddings) == 1 else None


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])
