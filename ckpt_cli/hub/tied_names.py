"""Names of embeddings and of the output heads that are tied to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

KEY = "tie_word_embeddings"
SAYINGS = tuple((outer, inner) for outer in (None, False, True) for inner in (None, False, True))
"""What a config, and that of the language model inside, can say of this; None: nothing."""

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")
RARE_EMBEDDINGS = ("embeddings.weight", "word_embedding.weight", "token_embedding.weight", "tokens_embed.weight")
"""Those of Mamba, RWKV and XLM, of XLNet, of CLIP and SigLIP, and of the first GPT. Beside one of the usual names they are other things."""

HEADS = ("lm_head.weight", "embed_out.weight")
SHARED = "shared.weight"
"""The one embedding of encoder and decoder (T5, BART), which each of them, and the head, call by a name of their own."""

MODULES = frozenset(name.removesuffix(".weight") for name in (*EMBEDDINGS, *HEADS))
"""The modules that these are weights of."""


def tied_pair(names: Sequence[str]) -> tuple[str, str] | None:
    """(head, embedding) among tensor names, if there is exactly one of each."""
    heads, embeddings = [name for name in names if last_two(name) in HEADS], embeddings_in(names)
    return (heads[0], embeddings[0]) if len(heads) == len(embeddings) == 1 else None


def embeddings_in(names: Iterable[str]) -> list[str]:
    """The input embeddings among tensor names: those of the usual names, or where there is none those of rarer ones.

    >>> embeddings_in(["backbone.embeddings.weight"]), embeddings_in(["text.token_embedding.weight", "model.embed_tokens.weight"])
    (['backbone.embeddings.weight'], ['model.embed_tokens.weight'])
    """
    listed = list(names)
    return next(filter(None, ([name for name in listed if last_two(name) in known] for known in (EMBEDDINGS, RARE_EMBEDDINGS))), [])


def last_two(name: str) -> str:
    """The end of a tensor's name by which embeddings and heads are known: the module and its parameter."""
    return ".".join(name.split(".")[-2:])
