"""Tokens that the files beside a vocabulary name: loading adds those that the vocabulary lacks, with ids behind all others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.beside.names import TOKENIZER_CONFIG

SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
DECODER = "added_tokens_decoder"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Entries for one token each, in the order in which transformers adds them."""
USED = frozenset({"bos_token", "eos_token", "sep_token", "pad_token", "cls_token"})
"""Those that begin, end, part or fill texts, whatever these say."""
MORE = ("extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True, slots=True)
class Told:
    """A ``token`` that a ``file`` names, as ``role`` if it is one of `ROLES`, and with ``id`` if the file says one."""

    file: str
    token: str
    role: str = ""
    id: int | None = None

    @property
    def text(self) -> str:
        return f"{self.role} {self.token}".strip()


def told_tokens(files: Mapping[str, Path]) -> tuple[Told, ...]:
    """What is told of tokens, in the order in which transformers adds them. Files that cannot be read tell nothing.

    Only a tokenizer_config.json without its own list of added tokens is completed by the two older files.
    """
    config = content_of(files, TOKENIZER_CONFIG)
    decoder = config.get(DECODER)
    found = [*_numbered(TOKENIZER_CONFIG, decoder)] if isinstance(decoder, dict) else []
    sources = {TOKENIZER_CONFIG: config}
    if not isinstance(decoder, dict):
        found += [Told(ADDED_TOKENS, token, id=number) for token, number in content_of(files, ADDED_TOKENS).items() if type(number) is int]
        sources = {SPECIAL_TOKENS: content_of(files, SPECIAL_TOKENS), **sources}
    for role in ROLES:
        named = [Told(name, word, role) for name, said in sources.items() for word in words(said.get(role))]
        found += named[:1]
    more = ((name, each) for name, said in sources.items() for key in MORE for each in _several(said.get(key)))
    return (*found, *(Told(name, word) for name, each in more for word in words(each)))


def with_ids(told: Iterable[Told], held: Mapping[str, int], following: int) -> Iterator[tuple[Told, int, bool]]:
    """Tokens with the ids that they get beside a tokenizer.json, and whether it lacks them: these are counted on from ``following``."""
    given: dict[str, int] = {}
    for each in told:
        if each.token not in held:
            given.setdefault(each.token, following + len(given))
        yield each, held.get(each.token, given.get(each.token, following)), each.token in given


def _numbered(name: str, decoder: Mapping[str, Any]) -> Iterator[Told]:
    """Added tokens by their ids, in their order."""
    listed = {int(key): value for key, value in decoder.items() if key.isascii() and key.isdecimal() and len(key) < 19}
    for number, value in sorted(listed.items(), key=lambda item: item[0]):
        yield from (Told(name, word, id=number) for word in words(value))


def words(value: Any) -> Iterator[str]:
    """The text of a token, which is a string or an object with its settings."""
    word = value.get("content") if isinstance(value, dict) else value
    if isinstance(word, str) and word:
        yield word


def _several(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()


def content_of(files: Mapping[str, Path], name: str) -> Mapping[str, Any]:
    """The JSON object in one of the files; empty without one that can be read."""
    content: Any = None
    if name in files:
        with contextlib.suppress(CkptError):  # what cannot be read is found elsewhere
            content = parse_json(read_small(files[name]))
    return content if isinstance(content, dict) else {}
