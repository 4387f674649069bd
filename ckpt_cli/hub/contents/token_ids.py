"""Which ids the files of a tokenizer give to tokens where there is no tokenizer.json, and which of two tokenizers contradict each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small

LINES = frozenset({"vocab.txt"})
"""Tables with a token in each line, whose id is its place."""

TABLES = frozenset({"vocab.json", "added_tokens.json", "vocab-src.json", "vocab-tgt.json", "target_vocab.json", "entity_vocab.json"})
"""Tables from tokens to ids in JSON; one of several languages (MMS) has a table for each."""

DECODER = "added_tokens_decoder"
"""The entry of tokenizer_config.json that names added tokens by their ids."""

OPAQUE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model", "spm_char.model", "tekken.json")
OPAQUE_SUFFIXES = (".tiktoken", ".spm")
"""Vocabularies that are compared as a whole."""

Ids = Mapping[str, int]


def contradicting(one: Mapping[str, Path], other: Mapping[str, Path]) -> str | None:
    """A file in which two tokenizers give other ids to tokens, None if they do not. What only one of the two adds is no contradiction.

    ``one`` and ``other`` are files by name. A vocabulary that is no text may only be another form of the same one: then the two differ.
    """
    for name in sorted(one.keys() & other.keys()):
        if not _is_known(name):
            continue
        first, second = _content(one[name]), _content(other[name])
        if first is None or second is None or first == second:
            continue
        if _is_opaque(name) or any(map(_contradict, *_paired(tables(name, first), tables(name, second)))):
            return name
    return None


def tables(name: str, content: bytes) -> dict[str, dict[str, int]]:
    r"""The ids of tokens in a file, by language where it has several.

    >>> tables("vocab.txt", b"a\nb\n")
    {'': {'a': 0, 'b': 1}}
    """
    if name in LINES:
        lines = content.decode(errors="replace").splitlines()
        return {"": {token: number for number, token in enumerate(lines)}}
    parsed: Any = None
    with contextlib.suppress(CkptError):
        parsed = parse_json(content)
    if not isinstance(parsed, dict):
        return {}
    if name not in TABLES:
        decoder = parsed.get(DECODER)
        entries = decoder.items() if isinstance(decoder, dict) else ()
        return {"": _ids((entry.get("content"), number) for number, entry in entries if isinstance(entry, dict))}
    found = {key: _ids(value.items()) for key, value in parsed.items() if isinstance(value, dict)}
    return found or {"": _ids(parsed.items())}


def _ids(pairs: Iterable[tuple[Any, Any]]) -> dict[str, int]:
    numbered = ((token, int(number) if isinstance(number, str) and number.isdecimal() else number) for token, number in pairs)
    return {token: number for token, number in numbered if isinstance(token, str) and type(number) is int}


def _paired(one: Mapping[str, Ids], other: Mapping[str, Ids]) -> tuple[list[Ids], list[Ids]]:
    common = sorted(one.keys() & other.keys())
    return [one[key] for key in common], [other[key] for key in common]


def _contradict(one: Ids, other: Ids) -> bool:
    named = {number: token for token, number in other.items()}
    return any(other.get(token, number) != number or named.get(number, token) != token for token, number in one.items())


def _is_known(name: str) -> bool:
    return name in LINES | TABLES or name == "tokenizer_config.json" or _is_opaque(name)


def _is_opaque(name: str) -> bool:
    return name in OPAQUE or name.endswith(OPAQUE_SUFFIXES)


def _content(path: Path) -> bytes | None:
    with contextlib.suppress(CkptError):
        return read_small(path)
    return None
