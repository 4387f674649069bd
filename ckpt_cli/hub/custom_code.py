"""Which Python files of a model folder are its custom code: those that its configs name, and what these import. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ckpt_cli.files.folders import is_file
from ckpt_cli.files.source import read_small

MAX_DEPTH = 8
"""Levels of a config in which `auto_map` is looked for: sub-configs of multimodal models have their own."""

REFERENCE = re.compile(r"(?:.+--)?(?P<module>[A-Za-z_]\w*(?:/[A-Za-z_]\w*)*)\.(?P<name>[A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)*", re.ASCII)
"""``modeling_x.XForCausalLM``, in a folder ``sub/modeling_x.X``, or with the repository of the code: ``org/name--modeling_x.X``."""

FROM_MODULE = re.compile(r"^[ \t]*(?:from|import)[ \t]+\.+(?P<module>[A-Za-z_]\w*)", re.ASCII | re.MULTILINE)
NAMES_FROM = re.compile(
    r"^[ \t]*from[ \t]+\.(?P<module>[A-Za-z_]\w*)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n#]*)", re.ASCII | re.MULTILINE
)
FROM_FOLDER = re.compile(r"^[ \t]*from[ \t]+\.+[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n#]*)", re.ASCII | re.MULTILINE)


def custom_code(modules: Mapping[str, Path], configs: Iterable[Any], folder: Path) -> dict[str, Path]:
    """The files among ``modules`` (name without ``.py`` -> path) that parsed ``configs`` refer to, and what these import relatively.

    References are those of transformers (``auto_map``), diffusers-like ``custom_pipelines``, and ``modules.json``; modules in a folder of
    ``folder`` are looked for there. Packages are none: transformers looks for a file of the name that is imported, and fails without.
    """
    wanted = {match["module"] for config in configs for name in _references(config, 0) if (match := REFERENCE.fullmatch(name))}
    chosen: dict[str, Path] = {}
    while wanted:
        stem = wanted.pop()
        path = modules.get(stem)
        if path is None and "/" in stem and is_file(folder / f"{stem}.py"):
            path = folder / f"{stem}.py"
        if path is not None and f"{stem}.py" not in chosen:
            chosen[f"{stem}.py"] = path
            wanted |= _imports(stem, path)
    return chosen


COMMENT = re.compile(r"#[^\n]*")
ANY_NAME = re.compile(r"\bimport[ \t]*\(?[ \t]*\*|__getattr__|\b(globals|vars|setattr|exec)[ \t]*\(")
"""What gives a module names that its text need not have."""


def code_of(files: Mapping[str, Path]) -> Iterator[tuple[dict[str, Path], list[Path]]]:
    """The side files of a model folder, each time with the modules that they may name: first its own, then those of folders with code."""
    homes = {name: PurePosixPath(name).parent.as_posix() for name in files}
    inner = {home for name, home in homes.items() if name.endswith(".py")} & {
        home for name, home in homes.items() if name.endswith(".json")
    }
    inner.discard(".")
    yield _modules(files), [path for name, path in files.items() if homes[name] not in inner]
    for folder in sorted(inner):
        held = {PurePosixPath(name).name: path for name, path in files.items() if homes[name] == folder}
        yield _modules({**files, **held}), list(held.values())


def _modules(files: Mapping[str, Path]) -> dict[str, Path]:
    return {name.removesuffix(".py"): path for name, path in files.items() if name.endswith(".py")}


def missing_code(modules: Mapping[str, Path], configs: Iterable[Any]) -> list[str]:
    """Python files that ``auto_map`` names, or that those import relatively, and that are not among ``modules``.

    Code in another repository of the hub (``org/name--module.Class``) is loaded from there.
    """
    wanted, seen = {module for module, _ in _named(configs)}, set[str]()
    while wanted:
        stem = wanted.pop()
        if stem not in seen and stem in modules:
            wanted |= _imports(stem, modules[stem])
        seen.add(stem)
    return sorted(f"{stem}.py" for stem in seen - modules.keys())


def lacking_names(modules: Mapping[str, Path], configs: Iterable[Any]) -> list[str]:
    """Classes that ``auto_map`` names, and names that code imports from other code, whose module says nothing of them.

    So is a file that is empty, or was cut off where it is still Python. Each is called like ``MyModel of modeling_my.py``.
    """
    wanted, seen, found = _named(configs), set[str](), set[str]()
    texts = {stem: _text(path) for stem, path in modules.items()}
    while wanted:
        stem, name = wanted.pop()
        text = texts.get(stem)
        if text is None:
            continue  # it is missing as a whole
        if ANY_NAME.search(text) is None and re.search(rf"\b{name}\b", COMMENT.sub("", text)) is None:
            found.add(f"{name} of {stem}.py")
        if stem not in seen:
            seen.add(stem)
            for match in NAMES_FROM.finditer(text):
                module = f"{stem.rpartition('/')[0]}/{match['module']}".removeprefix("/")
                wanted |= {(module, each) for each in _listed(match["names"]) if each.isidentifier()}
    return sorted(found)


def _named(configs: Iterable[Any]) -> set[tuple[str, str]]:
    """The classes that configs name, with their modules. Code in another repository of the hub is loaded from there."""
    named = [name for config in configs if isinstance(config, dict) for name in _references(config, 0) if "--" not in name]
    return {(match["module"], match["name"]) for name in named if (match := REFERENCE.fullmatch(name))}


def _references(config: Any, depth: int) -> Iterator[str]:
    """Names of classes in the places of a config that may name custom ones."""
    if depth > MAX_DEPTH:
        return
    if isinstance(config, list):
        # modules.json of sentence-transformers: a list of objects with a "type".
        for item in config if depth == 0 else ():
            if isinstance(item, dict) and isinstance(item.get("type"), str):
                yield item["type"]
    elif isinstance(config, dict):
        for key, value in config.items():
            if key in ("auto_map", "custom_pipelines"):
                yield from _words(value, depth + 1)
            elif isinstance(value, dict):
                yield from _references(value, depth + 1)


def _words(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth <= MAX_DEPTH and isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _words(item, depth + 1)


def _imports(stem: str, path: Path) -> set[str]:
    """Modules beside it that a module imports: ``from .x import y``, ``from . import x``."""
    text, above = _text(path), stem.rpartition("/")[0]
    found = {match["module"] for match in FROM_MODULE.finditer(text)}
    for match in FROM_FOLDER.finditer(text):
        found |= set(_listed(match["names"]))
    return {f"{above}/{name}" if above else name for name in found}


def _listed(names: str) -> list[str]:
    """The names in the list of an import, without those that they get there."""
    return [name.split()[0] for name in COMMENT.sub("", names).strip("() \t\r\n\\").split(",") if name.split()]


def _text(path: Path) -> str:
    return read_small(path).decode("utf-8", "replace")
