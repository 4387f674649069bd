"""What a tokenizer.json says of token ids: those that have no row in the embedding, and whether two tokenizers agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, LfsPointer, NotFound
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.assets import Assets
from ckpt_cli.hub.tied_names import EMBEDDINGS
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Beyond:
    """``count`` of ``total`` ids have no row, up to the ``largest``; ``kind``: "tokens" or "added tokens"; ``embedding`` has ``rows``."""

    kind: str
    count: int
    total: int
    largest: int
    rows: int
    embedding: str

    @property
    def is_grave(self) -> bool:
        """Whether ids of the vocabulary itself have no row. Some models leave tokens that were added without one."""
        return self.kind != "added tokens"

    @property
    def text(self) -> str:
        return f"{self.count} of {self.total} {self.kind} have ids of {self.rows} and above, but the embedding has {self.rows} rows"


def ids_beyond(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[Beyond]:
    """Tokens of a tokenizer.json whose ids have no row in the input embedding of a model. A file that cannot be read has none."""
    embedding = next((t for name, t in tensors.items() if ".".join(name.split(".")[-2:]) in EMBEDDINGS and len(t.shape) == 2), None)
    if embedding is None:
        return
    rows = embedding.shape[0]
    for kind, ids in _tokens(_content(path)):
        if ids and max(ids) >= rows:
            yield Beyond(kind, sum(token >= rows for token in ids), len(ids), max(ids), rows, embedding.name)


def vocabulary_notes(assets: Assets, tensors: Mapping[str, Tensor]) -> list[Note]:
    """Warnings about a tokenizer that is passed on with a model whose embedding is too small for it."""
    path = assets.files.get(TOKENIZER)
    return (
        [Note("warning", "vocabulary", f"{TOKENIZER}: {item.text}") for item in ids_beyond(path, tensors) if item.is_grave] if path else []
    )


def vocabulary_digest(path: Path) -> str | None:
    """Equal for two tokenizers that give the same ids to the same tokens; None where the file does not say."""
    content = _content(path)
    model = content.get("model") if isinstance(content, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, (dict, list)):
        return None
    return hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()


def _content(path: Path) -> Any:
    """What is in the file; nothing if that is no JSON, which is found elsewhere. Raises Unreadable."""
    try:
        return parse_json(read_small(path))
    except (CorruptFile, NotFound, LfsPointer):
        return None


def _tokens(content: Any) -> Iterator[tuple[str, list[int]]]:
    """Ids of the vocabulary, and of tokens that were added."""
    model = content.get("model") if isinstance(content, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
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
