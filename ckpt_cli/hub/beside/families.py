"""Which of several folders each side file is taken from: files that are only right together come from one.

Each family of files is decided by itself, by the nearest folder that has it: config, settings for generation, a tokenizer with its files,
chat templates, processors, code for generation. What belongs to no family is taken by its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.beside.listed import Listed
from ckpt_cli.hub.beside.names import (
    ASSET_PATTERN,
    AUXILIARY,
    CODE_FOLDER,
    CONFIG,
    OF_VOCABULARY,
    ROBOT_ASSETS,
    ROBOT_FOLDER,
    TEMPLATE_FOLDER,
    TOKENIZER_CONFIG,
    VOCABULARIES,
    is_asset_name,
    is_unknown,
)
from ckpt_cli.hub.beside.processors import NAMES as PROCESSORS
from ckpt_cli.hub.beside.processors import PROCESSOR, content_of, contradicted, settings_beside
from ckpt_cli.hub.beside.tokenizers import has_vocabulary, is_trace
from ckpt_cli.hub.beside.whole import tokenizer_of
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.hub.contents.templates import templates_in
from ckpt_cli.hub.tokenizer_file import TOKENIZER, tokenizer_at
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

OF_TEMPLATES, OF_GENERATION = f"{TEMPLATE_FOLDER}/", f"{CODE_FOLDER}/"
TOGETHER = (OF_GENERATION, f"{ROBOT_ASSETS}/", f"{ROBOT_FOLDER}/")
"""Folders of which one place gives all: code for generation, and what policies for robots are scaled with."""
SETTINGS = (TOKENIZER_CONFIG, "special_tokens_map.json")
"""What says of a vocabulary which of its tokens end a text and what else its class is to know."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The files by name. ``unused`` are those of the run's tokenizer where that of the base is taken; ``notes`` say what else was not."""

    files: Mapping[str, Path]
    unused: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()


def choose(run: Sequence[Listed], base: Listed | None, doubtful: Sequence[Listed] = ()) -> Chosen:
    """The files of the folders of a run, the nearest first, and of its base, which comes after them, and last those of doubtful folders."""
    places = [*run, *([base] if base is not None else [])]
    places += [_lacked(place, tuple(places)) for place in doubtful]
    config = _config(places)
    chosen = _tokenizer_place(places, config)
    files, notes = _tokenizer(places, chosen)
    left = _left(places, chosen, files)
    is_of_base = chosen is not None and places[chosen] is base
    unused = tuple(left) if is_of_base else ()
    left = {name: path for name, path in left.items() if not _same_content(path, files.get(name))}
    if left and chosen is not None and not is_of_base:
        text = f"the tokenizer is that of {places[chosen].folder}: {few(list(map(str, left.values())), 3)}, which alone is no tokenizer,"
        notes.append(Note("warning", "tokenizer-elsewhere", f"{text} {'is' if len(left) == 1 else 'are'} not used"))
    processors, told = _processors(places)
    templates = _templates(places, files)
    told += _other_template(processors, templates, files)
    files |= processors | templates
    for folder in TOGETHER:
        files |= next((found for place in places if (found := place.only(partial(_is_below, folder)))), {})
    for place in places:
        files |= {name: path for name, path in place.files.items() if name not in files and _is_plain(name)}
    for place in (*_giving(places, files), *places):
        files |= {name: path for name, path in place.files.items() if name not in files and _is_code(name)}
    own = {path.parent: None for path in files.values() if base is None or path not in base.files.values()}
    giving = _giving(places, files)
    for place in (*(place for place in giving if place is not base), *([base] if base is not None else [])):
        for name, path in place.files.items():
            if name not in files and not _is_of_family(name):
                files[name] = (_beside(name, own) if place is base and not unused else None) or path
    return Chosen(files, unused, (*notes, *told))


def _lacked(place: Listed, others: Sequence[Listed]) -> Listed:
    """A doubtful folder with what goes with a config or a tokenizer only where no other place has any."""
    has_config = any(CONFIG in other.files for other in others)
    has_tokenizer = any(has_vocabulary(other.files) for other in others)

    def is_lacked(name: str) -> bool:
        if is_of_tokenizer(name) or is_template(name):
            return not has_tokenizer
        return name in PROCESSORS or not has_config

    return replace(place, files=place.only(is_lacked))


def is_decided(name: str, files: Mapping[str, Path]) -> bool:
    """Whether there is in another file what this one of a base or another step would say: its vocabulary, or the chat template."""
    if is_trace(name):
        return has_vocabulary(files) or (TOKENIZER_CONFIG in files and has_whole_tokenizer(files, {}))
    if is_template(name):
        said = TOKENIZER_CONFIG in files and content_of(files[TOKENIZER_CONFIG]).get("chat_template") is not None
        return said or any(map(is_template, files))
    return False


def is_template(name: str) -> bool:
    return name.startswith(("chat_template", OF_TEMPLATES))


def is_of_tokenizer(name: str) -> bool:
    """Whether a file goes with a tokenizer, all of which is that of one place."""
    known = VOCABULARIES | OF_VOCABULARY | {TOKENIZER_CONFIG}
    return name in known or (ASSET_PATTERN.fullmatch(name) is not None and not name.endswith(".jinja"))


def has_whole_tokenizer(files: Mapping[str, Path], config: Config) -> bool:
    """Whether a tokenizer is among files, with all that its class reads; ``config`` is that of the model."""
    return any(map(is_trace, files)) and tokenizer_of(files, config).is_whole


def _giving(places: Sequence[Listed], files: Mapping[str, Path]) -> list[Listed]:
    """The places that some of the files are from."""
    return [place for place in places if any(files.get(name) == path for name, path in place.files.items())]


def _is_below(folder: str, name: str) -> bool:
    return name.startswith(folder)


def _is_code(name: str) -> bool:
    return name.endswith(".py") and not name.startswith(OF_GENERATION)


def _is_of_family(name: str) -> bool:
    return is_of_tokenizer(name) or is_template(name) or name in PROCESSORS or name.startswith(TOGETHER)


def _is_plain(name: str) -> bool:
    """Whether a file counts wherever it lies, by its name alone. Others do beside what is taken from there."""
    return (is_asset_name(name) or name == AUXILIARY) and not _is_of_family(name)


def _beside(name: str, folders: Mapping[Path, None]) -> Path | None:
    """The run's own file of a name that only a base tells to be an asset, which is beside the assets of the run."""
    return next((folder / name for folder in folders if is_file(folder / name)), None) if is_unknown(name) else None


def _config(places: Sequence[Listed]) -> Config:
    path = next((place.files[CONFIG] for place in places if CONFIG in place.files), None)
    with contextlib.suppress(CkptError):  # what cannot be read is found elsewhere
        return read_config(path) if path is not None else {}
    return {}


# -- tokenizers ------------------------------------------------------------------------------------------------------


def _tokenizer_place(places: Sequence[Listed], config: Config) -> int | None:
    """Where the tokenizer is: the nearest place with a whole one, or else with a vocabulary."""
    whole = (number for number, place in enumerate(places) if has_whole_tokenizer(place.files, config))
    partial = (number for number, place in enumerate(places) if has_vocabulary(place.files))
    return next(whole, next(partial, None))


def _tokenizer(places: Sequence[Listed], chosen: int | None) -> tuple[dict[str, Path], list[Note]]:
    """The files of the tokenizer, and what is said of them. Traces of one without a vocabulary are taken by their names."""
    if chosen is None:
        return {name: path for place in reversed(places) for name, path in place.only(is_of_tokenizer).items()}, []
    files = places[chosen].only(is_of_tokenizer)
    others = [place for number, place in enumerate(places) if number != chosen and TOKENIZER_CONFIG in place.files]
    if TOKENIZER_CONFIG in files or not others:
        return files, []
    for place in others:
        if not has_vocabulary(place.files) or _same_vocabulary(files, place.files):
            return {**place.only(SETTINGS.__contains__), **files}, []
    text = f"the tokenizer of {places[chosen].folder} has no {TOKENIZER_CONFIG}, which names the token that ends a text, for example"
    why = f"nothing shows that that of {others[0].folder} goes with the same vocabulary, so it was not taken"
    return files, [Note("warning", "tokenizer-settings", f"{text}; {why}")]


def _left(places: Sequence[Listed], chosen: int | None, files: Mapping[str, Path]) -> dict[str, Path]:
    """Files of tokenizers, of nearer places than the one that is taken."""
    nearer = places[:chosen] if chosen is not None else ()
    found = {name: path for place in reversed(nearer) for name, path in place.only(is_of_tokenizer).items()}
    return {name: path for name, path in sorted(found.items()) if files.get(name) != path}


def _same_vocabulary(one: Mapping[str, Path], other: Mapping[str, Path]) -> bool:
    """Whether two tokenizers have the same tokens under the same ids, as far as both have the same files."""
    common = [name for name in one if name in other and has_vocabulary([name])]
    return bool(common) and all(_same_tokens(name, one[name], other[name]) for name in common)


def _same_tokens(name: str, one: Path, other: Path) -> bool:
    if _same_content(one, other):
        return True
    if name != TOKENIZER:
        return False
    first, second = tokenizer_at(one)(), tokenizer_at(other)()
    return first.digest is not None and (first.digest, sorted(first.added)) == (second.digest, sorted(second.added))


def _same_content(one: Path, other: Path | None) -> bool:
    with contextlib.suppress(CkptError):
        return other is not None and read_small(one) == read_small(other)
    return False


# -- chat templates and processors -----------------------------------------------------------------------------------


def _templates(places: Sequence[Listed], tokenizer: Mapping[str, Path]) -> dict[str, Path]:
    """The chat templates of the nearest place that has any; those of others are none where the tokenizer has one inside."""
    said = tokenizer.get(TOKENIZER_CONFIG)
    inside = said is not None and content_of(said).get("chat_template") is not None
    for place in places:
        if found := place.only(is_template):
            return found
        if inside and said in place.files.values():
            return {}
    return {}


def _other_template(processors: Mapping[str, Path], templates: Mapping[str, Path], tokenizer: Mapping[str, Path]) -> list[Note]:
    """A chat template inside of the processor's file, which processors take before any other, where the run has one beside it."""
    path = processors.get(PROCESSOR)
    inside = list(templates_in(content_of(path))) if path is not None else []
    others = [*templates.values(), *(tokenizer[name] for name in (TOKENIZER_CONFIG,) if name in tokenizer)]
    others = [other for other in others if path is not None and other.parent != path.parent]
    for other in others:
        own = list(_templates_of(other))
        if inside and own and not set(inside) & set(own):
            text = f"{path} has a chat template inside, which processors use in place of that in {other}; the two differ"
            return [Note("warning", "other-template", text)]
    return []


def _templates_of(path: Path) -> Iterator[str]:
    if path.suffix == ".json":
        yield from templates_in(content_of(path))
        return
    with contextlib.suppress(CkptError):
        yield read_small(path).decode(errors="replace")


def _processors(places: Sequence[Listed]) -> tuple[dict[str, Path], list[Note]]:
    """The files of processors: those of a farther place only if they do not contradict a nearer one; and what is said of the others."""
    files: dict[str, Path] = {}
    notes: list[Note] = []
    for place in places:
        nearer = dict(files)
        for name, path in place.only(PROCESSORS.__contains__).items():
            parts: Mapping[str, Any] = contradicted(name, path, nearer) if name not in nearer else {}
            if parts:
                notes.append(_contradiction(name, path, parts, nearer))
            else:
                files.setdefault(name, path)
    return files, notes


def _contradiction(name: str, path: Path, parts: Mapping[str, str], nearer: Mapping[str, Path]) -> Note:
    others = sorted({str(nearer[other]) for other in parts.values()})
    text = f"{path} is not used: it sets {few(sorted(parts), 3)} otherwise than {few(others, 3)}"
    also = settings_beside(path, parts) if name == PROCESSOR and PROCESSOR not in nearer else []
    if not also:
        return Note("info", "other-processor", text)
    return Note("warning", "other-processor", f"{text}; what else is set there is missing too: {few(also, 4)}")
