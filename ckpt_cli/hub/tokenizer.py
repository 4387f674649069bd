"""Token ids that have no row in the embedding, and the special ones that configs name, or forget to."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.hub.assets import CONFIG, GENERATION_CONFIG, Assets
from ckpt_cli.hub.beside.told_tokens import USED, told_tokens, with_ids
from ckpt_cli.hub.config import Config, writes_texts
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.hub.contents.placeholders import CODE as PLACEHOLDERS
from ckpt_cli.hub.contents.placeholders import other_placeholders, placeholders_of_base
from ckpt_cli.hub.contents.processor_numbers import CODE as NUMBERS
from ckpt_cli.hub.contents.processor_numbers import other_numbers
from ckpt_cli.hub.tied_names import SHARED, embeddings_in, last_two
from ckpt_cli.hub.tokenizer_file import TOKENIZER, TokenizerFile
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

SPECIAL = re.compile(r"((forced_)?(bos|eos)|pad|sep|cls|decoder_start)_token_id")
"""Ids that begin, end or fill a text."""

END = "eos_token_id"


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


def ids_beyond(tokenizer: TokenizerFile, tensors: Mapping[str, Tensor]) -> Iterator[Beyond]:
    """Tokens of a tokenizer whose ids have no row in the input embedding of a model. A file that cannot be read has none."""
    embedding = embedding_of(tensors)
    if embedding is None:
        return
    rows = embedding.shape[0]
    for kind, ids in tokenizer.ids:
        if ids and max(ids) >= rows:
            yield Beyond(kind, sum(token >= rows for token in ids), len(ids), max(ids), rows, embedding.name)


def special_ids_beyond(files: Mapping[str, Path], config: Config, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """(file name, text) for configs with special ids that have no row: generation with these never ends, or fails.

    Without an embedding among the tensors, ``vocab_size`` says how many rows there are.
    """
    embedding, text = embedding_of(tensors), config.get("text_config")
    levels = [level for level in (config, text) if isinstance(level, Mapping)]
    sizes = [level["vocab_size"] for level in levels if type(level.get("vocab_size")) is int]
    rows = embedding.shape[0] if embedding is not None else max(sizes, default=None)
    if rows is None:
        return
    generation = _generation(files) or {}
    for name, entries in ((GENERATION_CONFIG, [generation]), (CONFIG, levels if writes_texts(config) else [])):
        beyond = [f"{key} {value}" for entry in entries for key, value in _special(entry) if value >= rows]
        if beyond:
            yield name, f"{few(list(dict.fromkeys(beyond)))}: the embedding has {rows} rows"


def told_ids_beyond(tokenizer: TokenizerFile | None, files: Mapping[str, Path], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """(file name, text) for files beside a vocabulary that name tokens without a row: their ids are none that the model knows.

    Of the tokens that tokenizer.json has, only those count that begin, end or fill texts: the others are told by `ids_beyond`. Without
    a tokenizer.json, those whose ids are said.
    """
    embedding = embedding_of(tensors)
    if embedding is None:
        return
    if tokenizer is None:
        told = told_tokens(files)
        numbers = {each.token: each.id for each in told if each.id is not None}
        given = [(each, numbers[each.token], False) for each in told if each.token in numbers]
    elif tokenizer.following is not None:
        every = with_ids(tokenizer.told, tokenizer.held, tokenizer.following)
        given = [(each, number, new) for each, number, new in every if new or each.role in USED]
    else:
        return
    rows, beyond = embedding.shape[0], dict[str, dict[bool, list[str]]]()
    roles = {(each.file, each.token) for each, *_ in given if each.role}
    for each, number, new in given:
        if number >= rows and (each.role or (each.file, each.token) not in roles):
            beyond.setdefault(each.file, {}).setdefault(new, []).append(f"{each.text} ({number})")
    for name, found in beyond.items():
        lacking = f", which {TOKENIZER} lacks and loading adds"
        parts = [few(list(dict.fromkeys(words))) + (lacking if new else "") for new, words in found.items()]
        yield name, f"{'; '.join(parts)}: the embedding has {rows} rows"


def endless(files: Mapping[str, Path], config: Config) -> str | None:
    """Why texts of a model never end: settings for generation without the id that config.json gives the end. None for others.

    transformers takes this id from generation_config.json alone if there is one (``GenerationConfig`` of 5.x, 4.x).
    """
    ends, generation = _ends(config), _generation(files)
    if generation is None or generation.get(END) is not None or not ends or not writes_texts(config):
        return None
    return f"it has no {END}, and that of config.json ({ends[0]}) is not used beside it: texts never end"


def lost_end(files: Mapping[str, Path], config: Config, source: Mapping[str, Path]) -> str | None:
    """Where texts of a model without settings for generation no longer end, as those of its ``source`` say; None if they end as there."""
    if GENERATION_CONFIG in files or not writes_texts(config):
        return None
    lost = sorted({*_ids((_generation(source) or {}).get(END))} - {*_ends(config)})
    return f"at {few([str(end) for end in lost])}" if lost else None


def _other_end(assets: Assets, base: Assets | None) -> str | None:
    """How settings for generation that come from another place than config.json, as a base, end texts elsewhere. None if they do not.

    A training that teaches a model another end, as a chat template's, writes it into config.json. Settings of its own beside the
    config.json of its ``base`` are right. A config that the checkpoint holds lies in no folder.
    """
    files, wanted = assets.files, _ends(assets.config)
    own = files.get(CONFIG)
    if GENERATION_CONFIG not in files or (own is None and not assets.made):
        return None
    if own is not None and (files[GENERATION_CONFIG].parent == own.parent or (base is not None and base.files.get(CONFIG) == own)):
        return None
    there = _ids((_generation(files) or {}).get(END))
    if not there or not wanted or {*wanted} & {*there} or not writes_texts(assets.config):
        return None
    text = f"it comes from {files[GENERATION_CONFIG].parent.name}, and ends texts at {few([str(end) for end in there])}"
    return f"{text}, config.json at {few([str(end) for end in wanted])}, which is not used beside it"


def ends_used(files: Mapping[str, Path], config: Config) -> tuple[str, list[int]]:
    """The file that ends the texts of a model in transformers, and the ids of the end there: without settings for it, config.json."""
    generation = _generation(files)
    return (CONFIG, _ends(config)) if generation is None else (GENERATION_CONFIG, _ids(generation.get(END)))


def _ends(config: Config) -> list[int]:
    """The ids of the end that a config names, on its own level or that of its language model."""
    text = config.get("text_config")
    return [end for level in (config, text) if isinstance(level, Mapping) for end in _ids(level.get(END))]


def _ids(value: object) -> list[int]:
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]


def vocabulary_notes(assets: Assets, tensors: Mapping[str, Tensor], base: Assets | None = None) -> list[Note]:
    """Warnings about ids that are passed on with a model whose embedding is too small for them, and ends of texts that get lost.

    ``base`` is what lies beside the base, of which some of the assets may be.
    """
    notes, tokenizer = [], assets.tokenizer() if assets.tokenizer is not None else None
    if tokenizer is not None:
        beyond = ids_beyond(tokenizer, tensors)
        notes = [Note("warning", "vocabulary", f"{TOKENIZER}: {item.text}") for item in beyond if item.is_grave]
    return [
        *notes,
        *(Note("warning", "token-ids", f"{name}: {text}") for name, text in special_ids_beyond(assets.files, assets.config, tensors)),
        *(Note("warning", "token-ids", f"{name}: {text}") for name, text in told_ids_beyond(tokenizer, assets.files, tensors)),
        *(Note("warning", NUMBERS, f"{name}: {text}") for name, text in other_numbers(assets.files, assets.config)),
        *(Note("warning", PLACEHOLDERS, f"{CONFIG}: {text}") for text in _placeholders(assets, tokenizer, base)),
        *([Note("warning", "no-end", f"{GENERATION_CONFIG}: {text}")] if (text := endless(assets.files, assets.config)) else []),
        *([Note("warning", "other-end", f"{GENERATION_CONFIG}: {text}")] if (text := _other_end(assets, base)) else []),
    ]


def _placeholders(assets: Assets, tokenizer: TokenizerFile | None, base: Assets | None) -> list[str]:
    found = dict(placeholders_of_base(assets.files, assets.config, base.files, base.config)) if base is not None else {}
    return list({**found, **dict(other_placeholders(assets.files, assets.config, tokenizer))}.values())


def _generation(files: Mapping[str, Path]) -> Config | None:
    """The settings for generation among files; None without. What cannot be read is found elsewhere."""
    if GENERATION_CONFIG in files:
        with contextlib.suppress(CkptError):
            return read_config(files[GENERATION_CONFIG])
    return None


def embedding_of(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The input embedding of a model, by its name: of several the one with the most rows, as a part may have a smaller vocabulary.

    That of the language model of InstructBLIP has more than the one of its Q-Former; T5 and BART store one for encoder and decoder.
    """
    matrices = [name for name, tensor in tensors.items() if len(tensor.shape) == 2]
    shared = [name for name in matrices if last_two(name) == SHARED]
    return max((tensors[name] for name in embeddings_in(matrices) or shared), key=lambda tensor: tensor.shape[0], default=None)


def _special(entries: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in entries.items():
        if SPECIAL.fullmatch(key):
            yield from ((key, each) for each in _ids(value))
