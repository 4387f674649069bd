"""Ids of the tokens in whose place a model puts images, sounds or videos: config.json has one, and the tokenizer gives one.

A processor writes the token into the text, and the model looks for the id of its config (``image_token_id``, in older configs
``image_token_index``). With two ids it finds none, or stops with an error (transformers: "Image features and image tokens do not match").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_cli.hub.beside.names import TOKENIZER_CONFIG
from ckpt_cli.hub.beside.processors import PROCESSOR
from ckpt_cli.hub.beside.told_tokens import SPECIAL_TOKENS, content_of, words
from ckpt_cli.hub.config import Config, levels
from ckpt_cli.hub.tokenizer_file import TOKENIZER, TokenizerFile
from ckpt_cli.names import printable

CODE = "placeholder-ids"

ID = re.compile(r"(?P<kind>[a-z_]*(image|video|audio|speech|vision|boi|eoi|boa|eoa)[a-z_]*)_token_(id|index)")
SOUNDS = re.compile("audio|speech|sound|boa|eoa", re.IGNORECASE)
PICTURES = re.compile("image|img|patch|video|vision|visual|pixel|boi|eoi", re.IGNORECASE)

Files = Mapping[str, Path]
"""Files beside the weights by name."""

SOURCES = (PROCESSOR, TOKENIZER_CONFIG, SPECIAL_TOKENS)
"""Files that name such tokens: under ``image_token``, or so in a table of more special tokens."""


def other_placeholders(files: Files, config: Config, tokenizer: TokenizerFile | None) -> Iterator[tuple[str, str]]:
    """(kind, text) for ids of a config that are not those of the tokens which the files beside it name.

    Nothing is said where the id of the config is that of another token of this kind: Llama 4 looks for the patches of an image.
    """
    if tokenizer is None or not tokenizer.listed:
        return
    named = _named(files)
    tokens = {number: token for token, number in tokenizer.listed.items()}
    for kind, (key, wanted) in placeholders(config).items():
        token, file = named.get(kind, ("", ""))
        given = tokenizer.listed.get(token)
        if given is None or given == wanted or _is_alike(kind, tokens.get(wanted, "")):
            continue
        text = f"it says {key} {wanted}, but {TOKENIZER} gives {printable(token)} ({file}) the id {given}"
        yield kind, f"{text}: the model does not find the place of {_what(kind)}"


def placeholders_of_base(files: Files, config: Config, base_files: Files, base: Config) -> Iterator[tuple[str, str]]:
    """(kind, text) for ids of a config that are not those of its base, where the tokenizer is the base's."""
    if TOKENIZER not in files or files[TOKENIZER] != base_files.get(TOKENIZER):
        return
    theirs = placeholders(base)
    for kind, (key, wanted) in placeholders(config).items():
        if kind in theirs and theirs[kind][1] != wanted:
            text = f"it says {key} {wanted}, that of the base {theirs[kind][1]}, and {TOKENIZER} is the base's"
            yield kind, f"{text}: the model does not find the place of {_what(kind)}"


def placeholders(config: Config) -> dict[str, tuple[str, int]]:
    """Kind -> the entry of a config, or of one of its parts, and the id there; some models have negative ones of their own."""
    found: dict[str, tuple[str, int]] = {}
    for level in levels(config):
        for key, value in level.items():
            if (match := ID.fullmatch(key)) is not None and type(value) is int and value >= 0:
                found.setdefault(match["kind"], (key, value))
    return found


def _named(files: Files) -> dict[str, tuple[str, str]]:
    """Kind -> a token, and the file that names it."""
    found: dict[str, tuple[str, str]] = {}
    for name in SOURCES:
        content = content_of(files, name)
        more = content.get("extra_special_tokens")
        for said in (content, more if isinstance(more, dict) else {}):
            for key, value in said.items():
                kind = key.removesuffix("_token")
                if kind != key and (word := next(words(value), None)) is not None:
                    found.setdefault(kind, (word, name))
    return found


def _is_alike(kind: str, token: str) -> bool:
    return any(pattern.search(kind) and pattern.search(token) for pattern in (SOUNDS, PICTURES))


def _what(kind: str) -> str:
    return "sounds" if SOUNDS.search(kind) else "videos" if "video" in kind else "images"
