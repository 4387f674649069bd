"""What a class of a processor or a tokenizer reads besides the usual files: folders of further tokenizers, a language model.

Whichever model it is of: ``processor_class`` of a side file may name another class than the model's type has, as for a language model
that was added to a model for speech.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

from ckpt_cli.files.folders import files_in, is_file, is_folder
from ckpt_cli.hub.beside.names import TOKENIZER_CONFIG, has_weight_suffix, is_put_aside
from ckpt_cli.hub.beside.processors import OF_VIDEOS, PREPROCESSOR, PROCESSOR, content_of
from ckpt_cli.hub.beside.tokenizers import has_vocabulary
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.loaded_with.needs import TOKENIZER, table

NAMING = (PROCESSOR, PREPROCESSOR, OF_VIDEOS, TOKENIZER_CONFIG)
"""The files that may name the class of a processor."""

ALL_OF = "/{}"
"""The end of the name of a folder all of which is read."""


def processor_classes(files: Mapping[str, Path], config: Config) -> dict[str, str]:
    """The classes in the table that side files by name, or a config, lead to, each with the name of the file that does."""
    said = {name: content_of(files[name]) for name in NAMING if name in files}
    found = dict[str, str]()
    for name, content in (*said.items(), ("config.json", config)):
        for kind in (content.get("processor_class"), content.get("tokenizer_class")):
            if isinstance(kind, str) and kind in table()["processors"]:
                found.setdefault(kind, name)
    of_type = _of_types().get(str(config.get("model_type")), ())
    return {**dict.fromkeys(of_type, "config.json"), **found}


def read_by_processors(kinds: Collection[str], folders: Sequence[Path]) -> dict[str, Path]:
    """The files that classes of the table read, by their paths in a model folder: all of a class from the first folder that has any."""
    found: dict[str, Path] = {}
    for kind in kinds:
        found |= next(filter(None, (dict(_read_in(kind, folder)) for folder in folders)), {})
    return found


def names_read(kinds: Collection[str], names: Collection[str]) -> set[str]:
    """Those of the names of side files that classes of the table read."""
    read = [wanted for kind in kinds for wanted in table()["processors"][kind]["read"]]
    return {name for name in names for wanted in read if name == wanted or f"{name.partition('/')[0]}{ALL_OF}" == wanted != name}


def folders_read(folder: Path) -> set[str]:
    """The names of the folders in a folder that the class which its side files name reads: they hold no part of the model."""
    kinds = processor_classes({name: folder / name for name in NAMING if is_file(folder / name)}, {})
    return {name.removesuffix(ALL_OF) for kind in kinds for name in _read(kind) if name.endswith(ALL_OF)}


def lacking_of_processors(kinds: Collection[str], names: Collection[str]) -> dict[str, str]:
    """What classes of the table do not load without, and is not among the names of side files; each with its class."""
    lacking = dict[str, str]()
    for kind in kinds:
        required = (name for name, needed in table()["processors"][kind]["read"].items() if needed)
        lacking |= {name.removesuffix("{}"): kind for name in required if not names_read([kind], _below(name, names))}
    return lacking


def tokenizers_in_folders(names: Collection[str], config: Config) -> bool:
    """Whether a model's type has its tokenizers in folders below, and they are there: it has none in the folder itself."""
    wanted = [name for kind in _of_types().get(str(config.get("model_type")), ()) for name, needed in _read(kind).items() if needed]
    return bool(wanted) and all(has_vocabulary(PurePosixPath(name).name for name in _below(each, names)) for each in wanted)


def _below(wanted: str, names: Collection[str]) -> list[str]:
    folder = wanted.removesuffix("{}")
    return [name for name in names if name == wanted or (wanted.endswith(ALL_OF) and name.startswith(folder))]


def _read_in(kind: str, folder: Path) -> Iterator[tuple[str, Path]]:
    for name in _read(kind):
        below = folder / name.removesuffix(ALL_OF)
        if not name.endswith(ALL_OF):
            yield from ((name, each) for each in (below,) if is_file(each))
        elif is_folder(below):
            weights = not below.name.endswith(TOKENIZER)  # an n-gram model may be called like weights, and a pickle is no vocabulary
            for path in files_in(below, lambda inner: not inner.startswith(".") and not is_put_aside(inner)):
                if weights or not has_weight_suffix(path.name):
                    yield f"{below.name}/{path.name}", path


def _read(kind: str) -> Mapping[str, bool]:
    read: Mapping[str, bool] = table()["processors"][kind]["read"]
    return read


@cache
def _of_types() -> Mapping[str, tuple[str, ...]]:
    """The classes by the types of models that they are the usual ones of."""
    pairs = [(model_type, kind) for kind, entry in table()["processors"].items() for model_type in entry["types"]]
    return {model_type: tuple(kind for each, kind in pairs if each == model_type) for model_type, _ in pairs}
