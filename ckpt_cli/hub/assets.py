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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import CkptError, NotFound
from ckpt_cli.files.folders import Folders, files_in, folders_in, is_file, is_folder, is_there, similar_hint
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import Watched, read_small, side_file
from ckpt_cli.hub.beside.model_config import no_model_config
from ckpt_cli.hub.beside.names import (
    ASSET_PATTERN,
    CODE_FOLDER,
    MAX_UNKNOWN,
    NO_ASSETS,
    OF_FOLDERS,
    OF_VOCABULARY,
    ROBOT_FOLDER,
    TEMPLATE_FOLDER,
    TOKENIZER_CONFIG,
    VOCABULARIES,
    has_weight_suffix,
    is_asset_name,
    is_put_aside,
    is_unknown,
)
from ckpt_cli.hub.beside.read_by_class import files_read, lacking_files
from ckpt_cli.hub.beside.tokenizers import has_vocabulary, is_trace
from ckpt_cli.hub.beside.whole import lacking_processors, lacks_tokenizer, tokenizer_of
from ckpt_cli.hub.config import architecture
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.hub.critics import repaired_class
from ckpt_cli.hub.custom_code import custom_code
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG
from ckpt_cli.hub.tokenizer_file import TOKENIZER, Tokenizer, tokenizer_at
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
    """Files as they were before anything was read of them; ``broken`` are links in their folders that lead nowhere.

    ``no_configs`` are files named config.json that hold something else, and what; ``aside`` are copies, archives and large unknown files.
    """

    def __init__(self) -> None:
        super().__init__()
        self.broken: list[Path] = []
        self.no_configs: dict[Path, str] = {}
        self.aside: list[Path] = []

    def at(self, path: Path) -> Watched:
        """A file as it was when it was first asked for. Raises what opening raises."""
        return self[path] if path in self else self.setdefault(path, side_file(path))


@dataclass(frozen=True, slots=True)
class Lost:
    """Files by name that another ``step`` of the run has, and that a step and its base lack."""

    step: str = ""
    files: Mapping[str, Path] = field(default_factory=dict)


NOTHING_LOST = Lost()


@dataclass(frozen=True, slots=True)
class Assets:
    """Asset files by name, where each comes from, the parsed config (empty if there is none), and tokenizer.json if there is one.

    ``made``: there is no config.json, and ``config`` is what the training's arguments say. ``unused`` are files of the run's tokenizer,
    which is not usable alone, so that all of it is that of the base. ``watched`` are the files, and others that say what the weights
    mean, as they were before any of them was read. ``broken`` are links that lead nowhere, in whose place there is nothing of the run.
    ``no_configs`` are files named config.json that were passed over, each with what it holds; ``aside`` are files of
    a base that were not copied, since they may be weights. ``lost`` is what another step has of them.
    """

    files: Mapping[str, Path]
    config: Mapping[str, Any]
    tokenizer: Tokenizer | None = None
    made: bool = False
    unused: tuple[str, ...] = ()
    watched: tuple[Watched, ...] = ()
    broken: tuple[Path, ...] = ()
    no_configs: Mapping[Path, str] = field(default_factory=dict)
    aside: tuple[Path, ...] = ()
    lost: Lost = NOTHING_LOST

    @property
    def names(self) -> list[str]:
        return sorted({*self.files, *([CONFIG] if self.made else ())})

    @property
    def lacking(self) -> list[str]:
        """What a usable model folder still needs."""
        lacks = [] if CONFIG in self.names else [CONFIG]
        if lacks_tokenizer(self.files, self.config):
            lacks.append("a tokenizer")
        lacks += [*tokenizer_of(self.files, self.config).lacking, *lacking_processors(self.files, self.config)]
        return [*lacks, *lacking_files(self.config, self.files)]


def find_assets(homes: Sequence[Path], base: Path | None = None) -> Assets:
    """The assets of a component: from the ``huggingface`` folder in each home or the home itself, then from ``base``.

    The first folder with a config.json of a model decides for the run, and if that has no tokenizer, the first one with a tokenizer;
    ``base`` only adds names that the run lacks, and a tokenizer is all of the run or all of the base. Of a base, everything is an asset
    but weights, what a training leaves, and its README, which describes another model; a file of such a name beside the run's assets
    comes from there. What the model of the config reads under a name of its own is an asset, whatever it is. Of Python files only those
    that a config names as its custom code, and what these import: trainers leave scripts such as ``zero_to_fp32.py``.
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
        if CONFIG in files and has_vocabulary(files):
            break
    if CONFIG in files and not has_vocabulary(files):
        files |= _tokenizer_of(without, files)
    unused: list[str] = []
    broken = list(seen.broken)
    if base is not None:
        seen.broken.clear()
        configs = json_of(files.values(), seen)
        inner = _listed(base / HUB_FOLDER, seen, everything=True, configs=configs)
        others = {**_listed(base, seen, everything=CONFIG not in inner, configs=configs), **inner}
        if _has_whole_tokenizer(others, files) and not _has_whole_tokenizer(files, others):
            unused = sorted(filter(is_of_tokenizer, files))
            files = {name: path for name, path in files.items() if name not in unused}
        own = dict(files)
        for name, path in others.items():
            if not name.startswith("README") and not is_decided(name, own):
                files.setdefault(name, path if unused else _of_run(name, own) or path)
        others_broken = [path for path in seen.broken if not path.name.startswith("README") and not is_decided(path.name, own)]
        broken += [path for path in others_broken if path.name not in files]
    files |= _in_folders(files)
    config = read_config(files[CONFIG]) if CONFIG in files else {}
    files |= files_read(config, [*(folder for folder, _ in folders), *([base / HUB_FOLDER, base] if base is not None else [])])
    adapters = [path for path in (home / ADAPTER_CONFIG for home in homes) if is_file(path)]
    watched = tuple(seen.at(path) for path in (*files.values(), *adapters))
    tokenizer = tokenizer_at(files[TOKENIZER], files) if TOKENIZER in files else None
    aside = tuple(path for path in seen.aside if files.get(path.name) != path)
    return Assets(files, config, tokenizer, False, tuple(unused), watched, tuple(broken), seen.no_configs, aside)


def _in_folders(files: Mapping[str, Path]) -> dict[str, Path]:
    """What is loaded from folders beside a tokenizer and a config, by its path there."""
    beside = dict.fromkeys(path.parent / TEMPLATE_FOLDER for name, path in files.items() if is_of_tokenizer(name))
    beside |= {files[CONFIG].parent / name: None for name in (CODE_FOLDER, ROBOT_FOLDER)} if CONFIG in files else {}
    found: dict[str, Path] = {}
    for folder in beside:
        if is_folder(folder):
            inner = [path for path in files_in(folder, lambda _: True) if OF_FOLDERS[folder.name].fullmatch(path.name)]
            found = {**{f"{folder.name}/{path.name}": path for path in inner}, **found}
    return found


def _tokenizer_of(others: Mapping[str, Path], files: Mapping[str, Path]) -> dict[str, Path]:
    """The tokenizer of the nearest other folder of the run that has one, where that of the config has none: all of it from there."""
    folder = next((path.parent for name, path in others.items() if has_vocabulary([name])), None)
    return {name: path for name, path in others.items() if path.parent == folder and name not in files and is_of_tokenizer(name)}


def files_beside(homes: Iterable[Path]) -> dict[str, Path]:
    """All asset files in folders and the `HUB_FOLDER` of each, by their names, the nearest of each name. Raises Unreadable."""
    found: dict[str, Path] = {}
    for home in homes:
        found = {**_listed(home, Seen(), everything=False), **_listed(home / HUB_FOLDER, Seen(), everything=True), **found}
    return {**found, **_in_folders(found)}


def files_of(folder: Path) -> dict[str, Path]:
    """The asset files that a loader finds in one folder, by their names there. Raises Unreadable, and for code what reading it raises."""
    found = _listed(folder, Seen(), everything=False)
    return {**found, **_in_folders(found)}


def home_of(name: str, path: Path) -> Path:
    """The folder that an asset is loaded from, also one in a folder of that."""
    return path.parents[name.count("/")]


def _of_run(name: str, own: Mapping[str, Path]) -> Path | None:
    """The run's own file of a name that only a base tells to be an asset, which is beside the assets of the run."""
    folders = dict.fromkeys(path.parent for path in own.values()) if is_unknown(name) else ()
    return next((folder / name for folder in folders if is_file(folder / name)), None)


def is_of_tokenizer(name: str) -> bool:
    """Whether a file goes with a tokenizer, all of which is that of the run or that of a base."""
    known = VOCABULARIES | OF_VOCABULARY | {TOKENIZER_CONFIG}
    return name in known or name.startswith("chat_template") or ASSET_PATTERN.fullmatch(name) is not None


def _has_whole_tokenizer(files: Mapping[str, Path], others: Mapping[str, Path]) -> bool:
    """Whether a tokenizer is among files, with all that its class reads; ``others`` may have the config of the model instead."""
    config: Mapping[str, Any] = {}
    with contextlib.suppress(CkptError):  # what cannot be read is found elsewhere
        config = next((read_config(each[CONFIG]) for each in (files, others) if CONFIG in each), {})
    return any(map(is_trace, files)) and tokenizer_of(files, config).is_whole


def is_decided(name: str, files: Mapping[str, Path]) -> bool:
    """Whether there is in another file what this one of a base or another step would say: its vocabulary, or the chat template."""
    if is_trace(name):
        return has_vocabulary(files) or (TOKENIZER_CONFIG in files and _has_whole_tokenizer(files, {}))
    if name.startswith("chat_template"):
        if any(own.startswith("chat_template") for own in files):
            return True
        with contextlib.suppress(CkptError):
            config = parse_json(read_small(files[TOKENIZER_CONFIG])) if TOKENIZER_CONFIG in files else None
            return isinstance(config, dict) and config.get("chat_template") is not None
    return False


def hub_cache() -> Path:
    """The local Hub cache, as huggingface_hub finds it: a variable that is set to nothing counts, and means the current folder."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.join("~", ".cache")), "huggingface")
    home = os.environ.get("HF_HOME", default)
    # The old name of the variable is still read, and goes after the new one.
    given = os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(_expanded(home), "hub")))
    return Path(_expanded(given))


def _expanded(path: str) -> str:
    """A path in a variable, in which ~ and other variables may be: nothing expands them in a Dockerfile or a unit file."""
    return os.path.expandvars(os.path.expanduser(path))


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
    if everything:
        aside = [path for path in found.values() if is_put_aside(path.name) or (is_unknown(path.name) and _is_large(path, seen))]
        seen.aside += aside
        found = {name: path for name, path in found.items() if path not in aside}
    if CONFIG in found:
        seen.at(found[CONFIG])
        why = no_model_config(found[CONFIG])
        if why is not None:
            seen.no_configs[found.pop(CONFIG)] = why
    modules = {path.stem: path for path in present if path.suffix == ".py"}
    code = custom_code(modules, [*json_of(found.values(), seen), *configs], folder) if modules else {}
    return found | code | _read_by(code.values(), there.files(folder, is_unknown) if code else [])


def _is_large(path: Path, seen: Seen) -> bool:
    return seen.at(path).identity.size > MAX_UNKNOWN


def _read_by(code: Iterable[Path], files: Sequence[Path]) -> dict[str, Path]:
    """The files that custom code names, such as a vocabulary of its tokenizer. Weights and pickles are none of them."""
    sources = []
    for path in code if files else ():
        with contextlib.suppress(CkptError):
            sources.append(read_small(path).decode("utf-8", "replace"))
    named = {path.name: path for path in files if any(f"{quote}{path.name}{quote}" in text for text in sources for quote in "\"'")}
    return {name: path for name, path in named.items() if not has_weight_suffix(name)}


def json_of(paths: Iterable[Path], seen: Seen) -> list[Any]:
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
