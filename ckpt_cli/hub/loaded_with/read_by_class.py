"""The files that a class of transformers reads beside its weights, under names of its own: voices, adapters per language.

Some are pickles or weights, which are assets nowhere else. They are passed on as they are, and never opened here. Those that a class
puts in the place of tensors of the model are compared with these elsewhere (`ckpt_cli.discover.forms.tensors_beside`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import files_in, is_file, stays_inside
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.config import Config, architecture
from ckpt_cli.hub.loaded_with.needs import table

VOICES = "speaker_embeddings_path.json"
"""What names further files: those of the voices of Bark."""

LARGEST = 4 << 20
"""Bytes of such a list."""


def files_read(config: Config, folders: Sequence[Path]) -> dict[str, Path]:
    """The files that the model of a config reads beside its weights, by name, from the first of several folders that has each."""
    expressions = _read().get(str(config.get("model_type")), ())
    found: dict[str, Path] = {}
    for folder in folders if expressions else ():
        for path in files_in(folder, lambda name: any(expression.fullmatch(name) for expression in expressions)):
            if path.name not in found:
                found[path.name] = path
                found |= _named_in(path) if path.name == VOICES else {}
    return found


def lacking_files(config: Config, files: Collection[str]) -> list[str]:
    """The files without which the class of a config does not load, whatever it is asked for, and that are not among ``files``."""
    kind = f"{config.get('model_type')}/{architecture(config)}"
    return [name for name, read in table()["beside"].items() if read["required"] and kind in read["classes"] and name not in files]


def asked_for(name: str, config: Config) -> str | None:
    """What a user asks the model of a config for, such as a language, to have this file read; None if the file is no such.

    >>> asked_for("adapter.fra.safetensors", {"model_type": "wav2vec2"})
    'fra'
    """
    for expression in _read().get(str(config.get("model_type")), ()):
        found = expression.fullmatch(name)
        if found is not None and found.groups():
            return str(found[1])
    return None


@cache
def _read() -> Mapping[str, tuple[re.Pattern[str], ...]]:
    """What is read, by the type of a model: a place in a name is for what the user asks for, such as a language."""
    found: dict[str, list[re.Pattern[str]]] = {}
    for name, read in table()["beside"].items():
        expression = re.compile(re.escape(name).replace(re.escape("{}"), r"([^/]+)"))
        for model_type in sorted({kind.split("/")[0] for kind in read["classes"]}):
            found.setdefault(model_type, []).append(expression)
    return {model_type: tuple(expressions) for model_type, expressions in found.items()}


def _named_in(path: Path) -> dict[str, Path]:
    """The files beside a list that are named in it."""
    content: Any = None
    with contextlib.suppress(CkptError):  # what cannot be read is found elsewhere
        content = parse_json(read_small(path, LARGEST))
    named = {name for name in _texts(content) if stays_inside(name)}
    return {name: path.parent / name for name in sorted(named) if is_file(path.parent / name)}


def _texts(content: Any) -> Iterator[str]:
    """The values that are texts, of an object or the objects in it."""
    for value in content.values() if isinstance(content, dict) else ():
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from (name for name in value.values() if isinstance(name, str))
