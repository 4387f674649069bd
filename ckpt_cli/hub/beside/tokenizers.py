"""Whether the files of a tokenizer are all there: those that its class reads, which its config, the model's, or the type of that names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ckpt_cli.hub.beside.names import OF_VOCABULARY, TOKENIZER_CONFIG, VOCABULARIES
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.loaded_with.needs import table

ANY = "TokenizersBackend"
"""The class for whatever the `tokenizers` library reads."""

SAME = frozenset({ANY, "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer", "MistralCommonBackend"})
"""Names for that, without the ``Fast`` at the end."""

CONVERTED = re.compile(r"tokenizer\.json|tekken\.json|tokenizer\.model.*|tiktoken\.model|.*\.tiktoken")
"""What such a tokenizer is read from, or made of, whatever its class: alone it is enough."""

PAIRED = frozenset({"vocab.json"})
"""What is no tokenizer alone, but for some classes: a vocabulary whose merges are in another file."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """``there``: there is a vocabulary, or the class needs none. ``lacking``: files that ``kind``, its class, needs besides those."""

    there: bool
    lacking: tuple[str, ...] = ()
    kind: str = ""

    @property
    def is_whole(self) -> bool:
        return self.there and not self.lacking


def has_vocabulary(names: Iterable[str]) -> bool:
    """Whether a vocabulary is among these files."""
    return any(name in VOCABULARIES or name.endswith(".tiktoken") for name in names)


def is_trace(name: str) -> bool:
    """Whether a file shows that there is a tokenizer, or was one."""
    return name in VOCABULARIES | OF_VOCABULARY | {TOKENIZER_CONFIG} or name.endswith(".tiktoken")


def tokenizer_files(names: Collection[str], config: Config, said: Config) -> TokenizerFiles:
    """What there is of a tokenizer; ``config`` is that of the model, ``said`` the tokenizer_config.json."""
    there, kinds = has_vocabulary(names), _classes(config, said)
    if not kinds:
        return TokenizerFiles(there)
    missing = {kind: _missing(kind, names) for kind in kinds}
    kind = min(missing, key=lambda kind: len(missing[kind]))
    if not missing[kind]:
        return TokenizerFiles(True)
    return TokenizerFiles(there, missing[kind] if there else (), kind)


def _missing(kind: str, names: Collection[str]) -> tuple[str, ...]:
    """What a class needs besides these files. Where the table names no vocabulary, other versions of the class may have one."""
    entry: dict[str, Any] = {"files": [], "json": True} if kind == ANY else table()["tokenizers"][kind]
    if entry["json"]:
        if any(map(CONVERTED.fullmatch, names)):
            return ()
        if not entry["files"]:
            return () if has_vocabulary(set(names) - PAIRED) or "merges.txt" in names else ("tokenizer.json",)
    return tuple(name for name in entry["files"] if name not in names)


def _classes(config: Config, said: Config) -> list[str]:
    """The classes that a tokenizer may be read as, by names of the table; none if that is code of its own, or not known."""
    custom = said.get("auto_map")
    if isinstance(custom, list) or (isinstance(custom, dict) and "AutoTokenizer" in custom):
        return []
    model_type = config.get("model_type")
    own = table()["types"].get(model_type, "") if isinstance(model_type, str) else ""
    named = next((name for name in (said.get("tokenizer_class"), config.get("tokenizer_class")) if isinstance(name, str) and name), None)
    if named is None:
        return [] if own == "" else _known([own or ANY])
    found = _known([named])
    return [*found, *_known([own])] if found and own and model_type in table()["distrusted"] else found


def _known(names: Iterable[str]) -> list[str]:
    plain = [ANY if name.removesuffix("Fast") in SAME else name.removesuffix("Fast") for name in names]
    return [name for name in plain if name == ANY or name in table()["tokenizers"]]
