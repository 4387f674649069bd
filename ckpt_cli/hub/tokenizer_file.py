"""What a tokenizer.json says of tokens and their ids, read once: of a large vocabulary, parsing takes a second and much memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.hub.beside.told_tokens import Told, told_tokens
from ckpt_cli.hub.contents.tokenizer_steps import steps_of
from ckpt_cli.hub.text_assets import read_text

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """``ids`` are those of the vocabulary and of tokens that were added to it, by kind; ``digest`` is equal for two equal vocabularies.

    ``added`` are the tokens that the vocabulary lacks, with their ids, and ``listed`` all that the file lists as added. ``told`` are
    tokens that files beside it name, ``held`` the ids of those that it has, and ``following`` is the id that the next one gets.
    ``steps`` are digests of what it does with a text, by name. ``marked``: the file begins with a byte order mark. ``trouble``: it
    cannot be read, so that nothing is known.
    """

    ids: tuple[tuple[str, tuple[int, ...]], ...] = ()
    digest: str | None = None
    added: tuple[tuple[str, int], ...] = ()
    told: tuple[Told, ...] = ()
    held: Mapping[str, int] = field(default_factory=dict)
    following: int | None = None
    steps: Mapping[str, str] = field(default_factory=dict)
    listed: Mapping[str, int] = field(default_factory=dict)
    marked: bool = False
    trouble: CkptError | None = None

    def gives_other_ids(self, other: TokenizerFile) -> bool:
        """Whether one id stands for two tokens, or one token has two ids. What only one of the two adds is no contradiction."""
        if self.digest is None or other.digest is None:
            return False
        theirs, named = dict(other.added), {number: token for token, number in other.added}
        pairs = ((theirs.get(token, number), named.get(number, token)) != (number, token) for token, number in self.added)
        return self.digest != other.digest or any(pairs)


NOTHING: Mapping[str, Path] = MappingProxyType({})
Tokenizer = Callable[[], TokenizerFile]
"""A file that is read when something is asked about it, and once."""


def tokenizer_at(path: Path, beside: Mapping[str, Path] = NOTHING) -> Tokenizer:
    """The tokenizer.json at a path, and what files ``beside`` it, by name, tell of tokens."""
    return cache(lambda: _read(path, beside))


def _read(path: Path, beside: Mapping[str, Path]) -> TokenizerFile:
    try:
        text = read_text(path)
    except CkptError as error:
        return TokenizerFile(trouble=error)
    if text.trouble is not None:
        return TokenizerFile(marked=text.marked, trouble=text.trouble)
    model = text.content.get("model") if isinstance(text.content, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    digest = hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest() if isinstance(vocabulary, (dict, list)) else None
    added = _added(text.content, vocabulary)
    own, listed = _ids(vocabulary), _listed(text.content)
    ids = (("tokens", tuple(number for number in own if number not in listed)), ("added tokens", tuple(sorted(listed))))
    told = told_tokens(beside)
    held = _held({each.token for each in told}, vocabulary, added)
    following = max([len(own), *(number + 1 for _, number in added)]) if digest is not None else None
    known = tuple(each for each in ids if each[1])
    return TokenizerFile(known, digest, added, told, held, following, steps_of(text.content), _entries(text.content), text.marked)


def _held(words: set[str], vocabulary: Any, added: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """The ids of those words that are tokens."""
    found = {word: number for word, number in added if word in words}
    if isinstance(vocabulary, dict):
        return found | {word: vocabulary[word] for word in words if type(vocabulary.get(word)) is int}
    entries = enumerate(vocabulary) if isinstance(vocabulary, list) else ()
    return found | {entry[0]: number for number, entry in entries if isinstance(entry, list) and entry and entry[0] in words}


def _ids(vocabulary: Any) -> tuple[int, ...]:
    """The ids of a vocabulary, which is a dict, or a list in their order."""
    if isinstance(vocabulary, dict):
        return tuple(token for token in vocabulary.values() if type(token) is int)
    return tuple(range(len(vocabulary))) if isinstance(vocabulary, list) else ()


def _listed(content: Any) -> frozenset[int]:
    """The ids of all tokens that are listed as added: a vocabulary may have some of them itself, such as the mask of BART."""
    return frozenset(_entries(content).values())


def _entries(content: Any) -> dict[str, int]:
    """All tokens that are listed as added, with their ids."""
    listed = content.get("added_tokens") if isinstance(content, dict) else None
    found = [(token.get("content"), token.get("id")) for token in listed if isinstance(token, dict)] if isinstance(listed, list) else []
    return {token: number for token, number in found if isinstance(token, str) and type(number) is int}


def _added(content: Any, vocabulary: Any) -> tuple[tuple[str, int], ...]:
    """Tokens that were added to a vocabulary, with their ids."""
    own = vocabulary if isinstance(vocabulary, dict) else {}
    return tuple((token, number) for token, number in _entries(content).items() if token not in own)
