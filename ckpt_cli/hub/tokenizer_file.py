"""What a tokenizer.json says of tokens and their ids, read once: of a large vocabulary, parsing takes a second and much memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.hub.text_assets import read_text

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """``ids`` are those of the vocabulary and of tokens that were added to it, by kind; ``digest`` is equal for two files with equal ids.

    ``marked``: the file begins with a byte order mark. ``trouble``: it cannot be read, so that nothing is known.
    """

    ids: tuple[tuple[str, tuple[int, ...]], ...] = ()
    digest: str | None = None
    marked: bool = False
    trouble: CkptError | None = None


Tokenizer = Callable[[], TokenizerFile]
"""A file that is read when something is asked about it, and once."""


def tokenizer_at(path: Path) -> Tokenizer:
    """The tokenizer.json at a path."""
    return cache(lambda: _read(path))


def _read(path: Path) -> TokenizerFile:
    try:
        text = read_text(path)
    except CkptError as error:
        return TokenizerFile(trouble=error)
    if text.trouble is not None:
        return TokenizerFile(marked=text.marked, trouble=text.trouble)
    model = text.content.get("model") if isinstance(text.content, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = tuple((kind, tuple(ids)) for kind, ids in _tokens(text.content, vocabulary))
    digest = hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest() if isinstance(vocabulary, (dict, list)) else None
    return TokenizerFile(found, digest, text.marked)


def _tokens(content: Any, vocabulary: Any) -> Iterator[tuple[str, list[int]]]:
    """Ids of the vocabulary, and of tokens that were added."""
    if isinstance(vocabulary, dict):
        yield "tokens", [token for token in vocabulary.values() if type(token) is int]
    elif isinstance(vocabulary, list):
        yield "tokens", list(range(len(vocabulary)))
    added = content.get("added_tokens") if isinstance(content, dict) else None
    if isinstance(added, list):
        own = set(vocabulary) if isinstance(vocabulary, dict) else set()
        entries = [token for token in added if isinstance(token, dict) and isinstance(token.get("content"), str)]
        entries = [token for token in entries if token["content"] not in own]
        yield "added tokens", [token["id"] for token in entries if type(token.get("id")) is int]
