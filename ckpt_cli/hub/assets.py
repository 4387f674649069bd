"""The files besides weights that a model folder needs: config, generation config, tokenizer, processor, custom code.

They are copied byte for byte from wherever the run keeps them; only the dtype in config.json is set to what was written.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_cli import shell
from ckpt_cli.boxes import Shape
from ckpt_cli.errors import CkptError, NotFound, Unreadable
from ckpt_cli.files.folders import folders_in, is_file, is_folder, is_there, similar_hint
from ckpt_cli.files.source import Watched
from ckpt_cli.files.streams.pipes import refuse_pipe
from ckpt_cli.hub.beside.families import choose, is_decided
from ckpt_cli.hub.beside.listed import Listed, Seen, json_of, listed
from ckpt_cli.hub.beside.named import named_by, not_passed_on
from ckpt_cli.hub.beside.names import AUXILIARY as AUXILIARY
from ckpt_cli.hub.beside.names import CONFIG as CONFIG
from ckpt_cli.hub.beside.near_names import near_notes
from ckpt_cli.hub.beside.tokenizers import has_vocabulary
from ckpt_cli.hub.beside.whole import lacking_processors, lacks_tokenizer, tokenizer_of
from ckpt_cli.hub.config import architecture
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.hub.critics import repaired_class
from ckpt_cli.hub.entries.wrapped import unwrapped_entries
from ckpt_cli.hub.loaded_with.read_by_class import files_read, lacking_files
from ckpt_cli.hub.loaded_with.read_by_processor import lacking_of_processors, processor_classes, read_by_processors
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG
from ckpt_cli.hub.tokenizer_file import TOKENIZER, Tokenizer, tokenizer_at
from ckpt_cli.hub_ids import commit_of, hub_cache, of_path
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

GENERATION_CONFIG = "generation_config.json"
HUB_FOLDER = "huggingface"
MODULES = "modules.json"
"""The parts of a model of sentence-transformers, each in a folder of its own."""


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
    a base that were not copied, since they may be weights. ``lost`` is what another step has of them. ``choices`` is what is said of
    files that were not taken beside these. ``unsaid`` are entries of config.json that are not true of what is written.
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
    choices: tuple[Note, ...] = ()
    unsaid: tuple[str, ...] = ()

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
        return [*lacks, *lacking_files(self.config, self.files), *lacking_of_processors(self.processors, self.files)]

    @property
    def processors(self) -> Mapping[str, str]:
        """The classes, of those that read more than the usual files, which the files or the config name, each with the file that does."""
        return processor_classes(self.files, self.config)


def find_assets(homes: Sequence[Path], base: Path | None = None, doubtful: Sequence[Path] = ()) -> Assets:
    """The assets of a component: from the ``huggingface`` folder in each home or the home itself, then ``base``, then ``doubtful``.

    Every family of files is that of the nearest folder which has it (`ckpt_cli.hub.beside.families`). Of a base, everything is an asset
    but weights, what a training leaves, and its README, which describes another model; a file of such a name beside the run's assets
    comes from there. What the model of the config, or the class of its processor, reads under a name of its own is an asset, whatever it
    is. Of Python files only those
    that a config names as its custom code, and what these import: trainers leave scripts such as ``zero_to_fp32.py``.
    Raises Unreadable, LfsPointer, and CorruptFile for the config.
    """
    near, seen = dict[str, Path](), Seen()
    places, broken = list[Listed](), list[Path]()
    no_configs, aside = dict[Path, str](), list[Path]()
    configs = partial(_json_of, near, seen)
    for home in homes:
        for folder, is_hub in ((home / HUB_FOLDER, True), (home, False)):
            try:
                found = listed(folder, seen, everything=is_hub, configs=configs)
            except Unreadable:
                if CONFIG in near and has_vocabulary(near):
                    continue  # what lies farther away is no longer needed
                raise
            broken += [path for path in found.broken if path.name not in near and not is_decided(path.name, near)]
            no_configs |= found.no_configs if CONFIG not in near else {}
            places.append(found)
            near |= {name: path for name, path in found.files.items() if name not in near}
    last = _of_base(base, seen, configs) if base is not None else None
    chosen = choose(places, last, [listed(folder, seen, everything=False, configs=configs) for folder in doubtful])
    files = dict(chosen.files)
    if last is not None:
        broken += [path for path in last.broken if not is_decided(path.name, near) and path.name not in files]
        no_configs |= last.no_configs
    config = read_config(files[CONFIG]) if CONFIG in files else {}
    sides = [*(place.folder for place in places), *([base / HUB_FOLDER, base] if base is not None else [])]
    files |= files_read(config, sides)
    kinds = {**processor_classes(files, config), **(processor_classes(last.files, {}) if last is not None else {})}
    files |= read_by_processors(kinds, sides)
    named = named_by(files)
    files |= named.files
    for place in (*places, *([last] if last is not None else [])):
        aside += [path for path in place.aside if files.get(path.name) != path]
    adapters = [path for path in (home / ADAPTER_CONFIG for home in homes) if is_file(path)]
    watched = tuple(seen.at(path) for path in (*files.values(), *adapters))
    tokenizer = tokenizer_at(files[TOKENIZER], files) if TOKENIZER in files else None
    of_run = {name for place in places for name in place.files}
    told = near_notes([path for place in places for path in place.near], of_run, files, last.files if last is not None else {})
    passed = (tuple(broken), no_configs, tuple(aside))
    choices = (*chosen.notes, *told, *not_passed_on(named.lacking))
    return Assets(files, config, tokenizer, False, chosen.unused, watched, *passed, choices=choices)


def _of_base(base: Path, seen: Seen, configs: Callable[[], Sequence[Any]]) -> Listed:
    """What there is in a base, and in its `HUB_FOLDER`, which counts before it."""
    inner = listed(base / HUB_FOLDER, seen, everything=True, configs=configs)
    outer = listed(base, seen, everything=CONFIG not in inner.files, configs=configs)
    files = {name: path for name, path in {**outer.files, **inner.files}.items() if not name.startswith("README")}
    broken = [path for path in (*inner.broken, *outer.broken) if not path.name.startswith("README")]
    return Listed(base, files, tuple(broken), {**inner.no_configs, **outer.no_configs}, (*inner.aside, *outer.aside))


def _json_of(files: Mapping[str, Path], seen: Seen) -> list[Any]:
    return json_of(files.values(), seen)


def files_beside(homes: Iterable[Path]) -> dict[str, Path]:
    """All asset files in folders and the `HUB_FOLDER` of each, by their names, the nearest of each name. Raises Unreadable."""
    found: dict[str, Path] = {}
    for home in homes:
        inner, outer = listed(home / HUB_FOLDER, Seen(), everything=True), listed(home, Seen(), everything=False)
        found = {**outer.files, **inner.files, **found}
    return found


def files_of(folder: Path) -> Mapping[str, Path]:
    """The asset files that a loader finds in one folder, by their names there. Raises Unreadable, and for code what reading it raises."""
    return listed(folder, Seen(), everything=False).files


def resolve_base(base: str) -> Path:
    """The folder of ``--base``: a path, or a Hub ID whose snapshot is in the local Hub cache. Nothing is downloaded.

    Raises NotFound, Unreadable for a pipe.
    """
    folder = Path(base)
    if is_folder(folder):
        return Path(os.path.realpath(folder)) if ".." in folder.parts else folder
    refuse_pipe(base)
    hint = (
        f"pass the folder of the file: --base {shell.path(folder.parent)}"
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
                hint=f"pass the path of one of them, such as --base {shell.path(found[0])}",
                details=[str(snapshot) for snapshot in found],
            )
        if not is_there(folder.parent):
            cached = {name.lower(): name for name in _cached_models(repository.parent) if name != base}
            near = difflib.get_close_matches(base.lower(), cached, n=1) if not snapshots else []
            hint = f"did you mean {cached[near[0]]}?" if near else f"download it first, ckpt never does: hf download {base}"
    elif not is_there(folder) and (named := of_path(base)) is not None:
        hint = named.advice(as_base=True)
    raise NotFound("no such base model", path=base, expected="a folder, or a Hub ID in the local Hub cache", hint=hint)


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


# -- what the config says about the weights --------------------------------------------------------------------------


def config_notes(config: Mapping[str, Any], shapes: Mapping[str, Shape], dtypes: set[str], *, of_base: bool = False) -> list[Note]:
    """Notes about a config that contradicts the weights (by name) so that loading would silently go wrong, and what was done about it.

    A config ``of_base`` says nothing of the class that was trained, which may pool its outputs in a way of its own.
    """
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
        if of_base:
            text = f"{text}, which may be another class than was trained, as config.json is that of the base: compare what both compute"
        notes.append(Note("warning" if of_base else "info", "class-repaired", text))
    elif value_heads and any(isinstance(a, str) and a.endswith(("ForCausalLM", "ForConditionalGeneration")) for a in architectures):
        text = f"config.json says {architectures[0]}, but the weights have {value_heads[0]}: load them with the class that trained them"
        notes.append(Note("warning", "value-head", text))
    if plain := unwrapped_entries(config, shapes):
        said = f"config.json says {few([f'{key} {config[key]}' for key in plain])}, for which its class adds adapters"
        notes.append(Note("info", "class-repaired", f"{said}, and the weights have none: it now says 0"))
    wanted = config.get("dtype", config.get("torch_dtype"))
    if wanted == "bfloat16" and dtypes == {"F32"}:
        notes.append(Note("info", "fp32-masters", "these are float32 masters of a bfloat16 model: --dtype bf16 halves the output"))
    return notes
