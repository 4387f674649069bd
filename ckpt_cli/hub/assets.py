"""The files besides weights that a model folder needs: config, generation config, tokenizer, processor, custom code.

They are copied byte for byte from wherever the run keeps them; only the dtype in config.json is set to what was written.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import CkptError, NotFound
from ckpt_cli.files.folders import Folders, folders_in, is_file, is_folder, is_there, similar_hint
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import Watched, read_small, side_file
from ckpt_cli.hub.beside.names import (
    ASSET_PATTERN,
    CODE_FOLDER,
    NO_ASSETS,
    OF_VOCABULARY,
    TEMPLATE_FOLDER,
    TOKENIZER_CONFIG,
    VOCABULARIES,
    has_weight_suffix,
    is_asset_name,
    is_unknown,
)
from ckpt_cli.hub.config import architecture
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.hub.critics import repaired_class
from ckpt_cli.hub.custom_code import custom_code, missing_code
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG
from ckpt_cli.hub.tokenizer_file import TOKENIZER, Tokenizer, tokenizer_at
from ckpt_cli.names import few, printable
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Note

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
HUB_FOLDER = "huggingface"
AUXILIARY = "ae.safetensors"
"""BAGEL's image decoder, which no training changes: the one weights file that is passed on as it is."""

OF_BAGEL = ("llm_config.json", "ema.safetensors")
NO_CODE = VOCABULARIES | OF_VOCABULARY
MAX_CONFIG = 4 << 20
"""Bytes of a config; what is larger is a vocabulary."""

MODULES = "modules.json"
"""The parts of a model of sentence-transformers, each in a folder of its own."""


class Seen(dict[Path, Watched]):
    """Files as they were before anything was read of them; ``broken`` are links in their folders that lead nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: list[Path] = []

    def at(self, path: Path) -> Watched:
        """A file as it was when it was first asked for. Raises what opening raises."""
        return self[path] if path in self else self.setdefault(path, side_file(path))


@dataclass(frozen=True, slots=True)
class Assets:
    """Asset files by name, where each comes from, the parsed config (empty if there is none), and tokenizer.json if there is one.

    ``made``: there is no config.json, and ``config`` is what the training's arguments say. ``unused`` are files of the run's tokenizer,
    which is not usable alone, so that all of it is that of the base. ``watched`` are the files, and others that say what the weights
    mean, as they were before any of them was read. ``broken`` are links that lead nowhere, in whose place there is nothing of the run.
    """

    files: Mapping[str, Path]
    config: Mapping[str, Any]
    tokenizer: Tokenizer | None = None
    made: bool = False
    unused: tuple[str, ...] = ()
    watched: tuple[Watched, ...] = ()
    broken: tuple[Path, ...] = ()

    @property
    def names(self) -> list[str]:
        return sorted({*self.files, *([CONFIG] if self.made else ())})

    @property
    def lacking(self) -> list[str]:
        """What a usable model folder still needs."""
        lacks = [] if CONFIG in self.names else [CONFIG]
        if not _has_tokenizer(self.files):
            lacks.append("a tokenizer")
        return lacks


def find_assets(homes: Sequence[Path], base: Path | None = None) -> Assets:
    """The assets of a component: from the ``huggingface`` folder in each home or the home itself, then from ``base``.

    The first folder with a config.json decides for the run, and if that has no tokenizer, the first one with a tokenizer; ``base`` only
    adds names that the run lacks, and a tokenizer is all of the run or all of the base. Of a base, everything is an asset but weights,
    what a training leaves, and its README, which describes another model; a file of such a name beside the run's assets comes from there.
    Of Python files only those that a config names as its custom code, and what these import: trainers leave scripts such as
    ``zero_to_fp32.py``.
    Raises Unreadable, LfsPointer, and CorruptFile for the config.
    """
    files, without, seen = dict[str, Path](), dict[str, Path](), Seen()
    folders = [(folder, is_hub) for home in homes for folder, is_hub in ((home / HUB_FOLDER, True), (home, False))]
    for folder, is_hub in folders:
        found = _listed(folder, seen, everything=is_hub)
        if CONFIG in found and CONFIG not in files:
            files, without = found, files
        elif CONFIG in files:
            without |= {name: path for name, path in found.items() if name not in without}
        else:
            files |= {name: path for name, path in found.items() if name not in files}
        if CONFIG in files and _has_tokenizer(files):
            break
    if CONFIG in files and not _has_tokenizer(files):
        files |= _tokenizer_of(without, files)
    unused: list[str] = []
    broken = list(seen.broken)
    if base is not None:
        seen.broken.clear()
        configs = _texts(files.values(), seen)
        inner = _listed(base / HUB_FOLDER, seen, everything=True, configs=configs)
        others = {**_listed(base, seen, everything=CONFIG not in inner, configs=configs), **inner}
        if _has_tokenizer(others) and not _has_tokenizer(files):
            unused = sorted(filter(_is_of_tokenizer, files))
            files = {name: path for name, path in files.items() if name not in unused}
        own = dict(files)
        for name, path in others.items():
            if not name.startswith("README") and not _is_decided(name, own):
                files.setdefault(name, path if unused else _of_run(name, own) or path)
        others_broken = [path for path in seen.broken if not path.name.startswith("README") and not _is_decided(path.name, own)]
        broken += [path for path in others_broken if path.name not in files]
    adapters = [path for path in (home / ADAPTER_CONFIG for home in homes) if is_file(path)]
    watched = tuple(seen.at(path) for path in (*files.values(), *adapters))
    config = read_config(files[CONFIG]) if CONFIG in files else {}
    tokenizer = tokenizer_at(files[TOKENIZER]) if TOKENIZER in files else None
    return Assets(files, config, tokenizer, unused=tuple(unused), watched=watched, broken=tuple(broken))


def _has_tokenizer(names: Iterable[str]) -> bool:
    return any(name in VOCABULARIES or name.endswith(".tiktoken") for name in names)


def _tokenizer_of(others: Mapping[str, Path], files: Mapping[str, Path]) -> dict[str, Path]:
    """The tokenizer of the nearest other folder of the run that has one, where that of the config has none: all of it from there."""
    folder = next((path.parent for name, path in others.items() if _has_tokenizer([name])), None)
    return {name: path for name, path in others.items() if path.parent == folder and name not in files and _is_of_tokenizer(name)}


def _of_run(name: str, own: Mapping[str, Path]) -> Path | None:
    """The run's own file of a name that only a base tells to be an asset, which is beside the assets of the run."""
    folders = dict.fromkeys(path.parent for path in own.values()) if is_unknown(name) else ()
    return next((folder / name for folder in folders if is_file(folder / name)), None)


def _is_of_tokenizer(name: str) -> bool:
    known = VOCABULARIES | OF_VOCABULARY | {TOKENIZER_CONFIG}
    return name in known or name.startswith("chat_template") or ASSET_PATTERN.fullmatch(name) is not None


def _is_decided(name: str, files: Mapping[str, Path]) -> bool:
    """Whether the run has in another file what this one of the base would say: its vocabulary, or the chat template."""
    if name in VOCABULARIES | OF_VOCABULARY | {TOKENIZER_CONFIG} or name.endswith(".tiktoken"):
        return any(own in VOCABULARIES or own.endswith(".tiktoken") for own in files)
    if name.startswith("chat_template"):
        if any(own.startswith("chat_template") for own in files):
            return True
        with contextlib.suppress(CkptError):
            config = parse_json(read_small(files[TOKENIZER_CONFIG])) if TOKENIZER_CONFIG in files else None
            return isinstance(config, dict) and config.get("chat_template") is not None
    return False


def lacking_notes(assets: Assets, base: Path | None, output: Path) -> list[Note]:
    """What an output lacks to be usable, and where it may come from. An output that is added to a folder has what is in that."""
    notes, lacking = [], [what.removeprefix("a ") for what in assets.lacking]
    told = [
        path
        for path in assets.broken
        if (path.name == CONFIG and CONFIG in lacking) or ("tokenizer" in lacking and _has_tokenizer([path.name]))
    ]
    for path in (path for path in assets.broken if path not in told):
        instead = f": {assets.files[path.name]} was taken" if path.name in assets.files else ""
        notes.append(Note("warning", "lacks-asset", f"{_broken_text(path)}{instead}"))
    if lacking:
        cure = "pass --base DIR with the model that training started from"
        if base is not None:
            cure = f"the base has none either; copy {'it' if len(lacking) == 1 else 'both'} from the model that training started from"
        if told:
            cure = "; ".join(map(_broken_text, told))
        notes.append(Note("warning", "lacks-asset", f"the output has no {' and no '.join(lacking)}: {cure}"))
    if assets.unused:
        text = f"the tokenizer is that of the base: the run has only {few(assets.unused)}, which alone is no tokenizer"
        notes.append(Note("warning", "tokenizer-of-base", text))
    modules = {path.stem: path for name, path in assets.files.items() if name.endswith(".py")}
    code = missing_code(modules, _texts(assets.files.values(), Seen()))
    if code:
        text = f"{few(code)}, which auto_map or another module names, is not among the files: the model does not load without"
        notes.append(Note("warning", "lacks-code", text))
    parts = _parts_elsewhere(assets)
    if parts and not _is_same(assets.files[MODULES].parent, output):
        text = f"{MODULES} names {few(parts)}, folders that are not written: copy them from {assets.files[MODULES].parent}"
        notes.append(Note("warning", "lacks-part", text))
    for folder in (each for each in _folders_beside(assets) if not _is_same(each.parent, output)):
        text = f"{printable(str(folder))}, which transformers reads, is a folder that is not written: copy it into the output"
        notes.append(Note("warning", "lacks-part", text))
    return notes


def _is_same(one: Path, other: Path) -> bool:
    return absolute(one) == absolute(other)


def _folders_beside(assets: Assets) -> list[Path]:
    """The folders beside a tokenizer and a config that are loaded with them."""
    tokenizer = dict.fromkeys(path.parent / TEMPLATE_FOLDER for name, path in assets.files.items() if _is_of_tokenizer(name))
    config = [assets.files[CONFIG].parent / CODE_FOLDER] if CONFIG in assets.files else []
    found = []
    for folder in (*tokenizer, *config):
        with contextlib.suppress(CkptError):
            if is_folder(folder):
                found.append(folder)
    return found


def _broken_text(path: Path) -> str:
    return f"{path} is a link to {os.readlink(path)}, which does not exist"


def _parts_elsewhere(assets: Assets) -> list[str]:
    """The folders of a model of sentence-transformers: pooling, and dense layers with weights of their own."""
    listed: Any = None
    if MODULES in assets.files:
        with contextlib.suppress(CkptError):
            listed = parse_json(read_small(assets.files[MODULES]))
    entries = listed if isinstance(listed, list) else []
    paths = [entry["path"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("path"), str) and entry["path"]]
    return [printable(path) for path in paths]


def hub_cache() -> Path:
    """The local Hub cache, as huggingface_hub finds it."""
    # Variables may begin with ~, which nothing expands in a Dockerfile or a unit file.
    home = os.environ.get("HF_HOME") or os.path.join("~", ".cache", "huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))


def resolve_base(base: str) -> Path:
    """The folder of ``--base``: a path, or a Hub ID whose snapshot is in the local Hub cache. Nothing is downloaded."""
    folder = Path(base)
    if is_folder(folder):
        return Path(os.path.realpath(folder)) if ".." in folder.parts else folder
    hint = (
        f"pass the folder of the file: --base {shlex.quote(str(folder.parent))}"
        if is_there(folder)
        else similar_hint(folder) or "check the path: nothing is there"
    )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and ".." not in base:
        repository = hub_cache() / f"models--{base.replace('/', '--')}"
        snapshots = _snapshots(repository)
        main = commit_of(repository, "main")
        found = [snapshot for snapshot in snapshots if main in (None, snapshot.name)]
        if len(found) == 1:
            return found[0]
        if len(found) > 1:
            raise NotFound(
                f"the Hub cache has {len(found)} snapshots of {base}, and no refs/main says which is meant",
                path=repository,
                expected="one snapshot, or refs/main",
                hint=f"pass the path of one of them, such as --base {shlex.quote(str(found[0]))}",
                details=[str(snapshot) for snapshot in found],
            )
        if not is_there(folder.parent):
            cached = {name.lower(): name for name in _cached_models(repository.parent) if name != base}
            near = difflib.get_close_matches(base.lower(), cached, n=1) if not snapshots else []
            hint = f"did you mean {cached[near[0]]}?" if near else f"download it first, ckpt never does: hf download {base}"
    raise NotFound("no such base model", path=base, expected="a folder, or a Hub ID in the local Hub cache", hint=hint)


def commit_of(repository: Path, revision: str) -> str | None:
    """The commit that a revision of a model in the local Hub cache is: a commit itself, or what a branch or tag points to there."""
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", revision, re.ASCII) or ".." in revision:
        return None
    try:
        commit = read_small(repository / "refs" / revision, 1 << 10).decode("ascii", "replace").strip()
    except CkptError:
        return None
    return commit if re.fullmatch(r"[0-9a-f]{40}", commit) else None


def _snapshots(repository: Path) -> list[Path]:
    try:
        return folders_in(repository / "snapshots", lambda name: re.fullmatch(r"[0-9a-f]{40}", name) is not None)
    except CkptError:
        return []


def _cached_models(cache: Path) -> list[str]:
    """The Hub IDs of the models in the local Hub cache."""
    try:
        folders = folders_in(cache, lambda name: name.startswith("models--"))
    except CkptError:
        return []  # only asked for a hint
    return [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]


def _listed(folder: Path, seen: Seen, *, everything: bool, configs: Sequence[Any] = ()) -> dict[str, Path]:
    """Asset files of a folder: by name, or ``everything`` that is no weights; code that its configs (or ``configs``) name."""

    def matters(name: str) -> bool:
        weights = has_weight_suffix(name) or NO_ASSETS.fullmatch(name) is not None or name == MANIFEST
        return name.endswith(".py") or is_asset_name(name) or name == AUXILIARY or (everything and not weights and not name.startswith("."))

    there = Folders()
    present = there.files(folder, matters)
    # What a loader needs may lie behind a link to a disk that is not mounted: that is not nothing.
    seen.broken += [path for path in there.entries(folder) if path.suffix != ".py" and matters(path.name) and there.is_broken(path)]
    bagel = any(path.name in OF_BAGEL for path in present)
    found = {path.name: path for path in present if path.suffix != ".py" and (path.name != AUXILIARY or bagel)}
    modules = {path.stem: path for path in present if path.suffix == ".py"}
    code = custom_code(modules, [*_texts(found.values(), seen), *configs]) if modules else {}
    return found | code | _read_by(code.values(), there.files(folder, is_unknown) if code else [])


def _read_by(code: Iterable[Path], files: Sequence[Path]) -> dict[str, Path]:
    """The files that custom code names, such as a vocabulary of its tokenizer. Weights and pickles are none of them."""
    sources = []
    for path in code if files else ():
        with contextlib.suppress(CkptError):
            sources.append(read_small(path).decode("utf-8", "replace"))
    named = {path.name: path for path in files if any(f"{quote}{path.name}{quote}" in text for text in sources for quote in "\"'")}
    return {name: path for name, path in named.items() if not has_weight_suffix(name)}


def _texts(paths: Iterable[Path], seen: Seen) -> list[Any]:
    """The content of JSON files. An unreadable one names no code; whether it may be broken is not decided here."""
    found = []
    for path in paths:
        if path.suffix == ".json" and path.name not in NO_CODE and seen.at(path).identity.size <= MAX_CONFIG:
            with contextlib.suppress(CkptError):
                found.append(parse_json(read_small(path), path.name))
    return found


# -- what the config says about the weights --------------------------------------------------------------------------


def config_notes(config: Mapping[str, Any], shapes: Mapping[str, Shape], dtypes: set[str]) -> list[Note]:
    """Notes about a config that contradicts the weights (by name) so that loading would silently go wrong, and what was done about it."""
    notes = []
    architectures = config.get("architectures") or []
    value_heads = [name for name in shapes if name.split(".")[0] in ("score", "v_head")]
    repaired = repaired_class(config, shapes)
    is_plain = bool(repaired) and repaired["architectures"] == [architecture(config)]
    if is_plain:
        text = f"config.json says {architectures[0]}, as FSDP2 calls the class: it now says {repaired['architectures'][0]}"
        notes.append(Note("info", "class-repaired", text))
    if repaired and not is_plain:
        text = f"config.json says {architectures[0]}, but the weights have {value_heads[0]}: it now says {repaired['architectures'][0]}"
        notes.append(Note("info", "class-repaired", text))
    elif value_heads and any(isinstance(a, str) and a.endswith(("ForCausalLM", "ForConditionalGeneration")) for a in architectures):
        text = f"config.json says {architectures[0]}, but the weights have {value_heads[0]}: load them with the class that trained them"
        notes.append(Note("warning", "value-head", text))
    wanted = config.get("dtype", config.get("torch_dtype"))
    if wanted == "bfloat16" and dtypes == {"F32"}:
        notes.append(Note("info", "fp32-masters", "these are float32 masters of a bfloat16 model: --dtype bf16 halves the output"))
    return notes
