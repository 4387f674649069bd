"""Folders below a folder that hold weights, and what they may be by their names: the model, or something else that was saved with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpt_cli.errors import Unsupported
from ckpt_cli.files.folders import Folders, place_of
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.deepspeed.names import UNIVERSAL
from ckpt_cli.formats.registry import format_of, recognise
from ckpt_cli.formats.sets.kinds import MARKS, RANK_FOLDER, WEAK
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.formats.trainers import OPTIMIZERS, ROLES, RUNS, STATES, WEIGHTS, has_form
from ckpt_cli.formats.training_state_names import is_state_file, is_state_key
from ckpt_cli.formats.weight_names import may_hold_weights
from ckpt_cli.hub.assets import AUXILIARY
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG

DEPTH = 3
"""Levels of folders in which a model may lie: below a role folder, lerobot and NeMo RL have two."""

DEEPEST = 6
"""Levels that are looked at."""

MAX_FOLDERS = 256

Kind = Literal["model", "average", "adapter", "output", "companion", "copy", "part", "apart"]
"""What a folder may be, by names.

``companion``: another module of the same training (an encoder, a VAE); ``copy``: another model or another step of this one (a critic, a
reference, a backup); ``part``: what one rank keeps; ``apart``: roles, steps and runs, which have rules of their own; ``output``: of ckpt.
"""

ADAPTER_WEIGHTS = re.compile(r"adapter_model\.(safetensors|bin)")

LOGS = re.compile(r"\..*|(eval|logs?|samples?|wandb|tensorboard|runs?|cache)([_-].*)?", re.IGNORECASE)
COMPANIONS = re.compile(r"vae|.*lora.*|.*adapter.*|.*encoder.*|.*tokenizer.*", re.IGNORECASE)
COPIES = re.compile(
    r"(base|init(ial)?|original|best|latest|last)([_-].*)?|"
    r"(.*[ ._-])?(ref(erence)?|old(er)?|prev(ious)?|back-?ups?|bak|target|teacher|discriminator|critic|draft(er)?|frozen|stale|obsolete|"
    r"deprecated|archived?|trash|deleted|te?mp|partial|incomplete|unfinished|failed|broken|corrupt(ed)?|copy)([_-]?(net(work)?|model|policy|weights|critic|ckpt|checkpoint|step))?s?[0-9]*"
    r"([ ._(-].*)?",
    re.IGNORECASE,
)
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class Held:
    """A folder that holds weights: its ``name`` below the folder that was searched; ``matches`` are empty for what cannot be read."""

    path: Path
    name: str
    kind: Kind
    matches: tuple[Match, ...]


def held_below(top: Path, there: Folders) -> list[Held] | None:
    """The folders with weights below a folder, the nearest first; None if there are more folders than a checkpoint has.

    Those of optimizers, training state and logs are not looked into. One that cannot be looked at may hold anything: raises Unreadable.
    """
    held: list[Held] = []
    level, seen = [top], {place_of(top)}
    for depth in range(DEEPEST):
        empty: list[Path] = []
        below = (child for folder in level for child in there.folders(folder, is_searched))
        for child in sorted(below, key=lambda path: path.is_symlink()):
            place = place_of(child)
            if place in seen:
                continue  # a link to what was seen is no second folder
            seen.add(place)
            if len(seen) > MAX_FOLDERS:
                return None if depth < DEPTH else held
            found = recognise(child, there)
            read = tuple(match for match in found if is_read(match))
            if found or files_with_weights(child, there) or there.is_file(child / ADAPTER_CONFIG):
                kind = _kind(child, top, there) if depth < DEPTH else "apart"
                held.append(Held(child, child.relative_to(top).as_posix(), kind, read))
            if not read:
                empty.append(child)
        level = empty
    return held


def files_with_weights(folder: Path, there: Folders) -> list[str]:
    """The files of a folder that may hold weights in any form, but for averages."""
    files = there.files(folder, lambda name: name != AUXILIARY and may_hold_weights(name))
    return [path.name for path in files if not is_average_name(path.name.partition(".")[0])]


def is_read(match: Match) -> bool:
    """Whether a match is a model that can be read: not an adapter, and no form that is refused by its name."""
    adapter = match.first.name.startswith("adapter_model.")
    return not (adapter or format_of(match).is_refused or isinstance(match.trouble, Unsupported))


def is_searched(name: str) -> bool:
    if is_of_trainer(name):
        return True
    if name == UNIVERSAL:
        return False  # a folder for each parameter
    state = is_state_key(name) or is_state_file(name) or any(has_form(name, (path.split("/")[0],)) for path in (*OPTIMIZERS, *STATES))
    return not (state or LOGS.fullmatch(name))


def is_of_trainer(name: str) -> bool:
    """Whether a folder is called like one in which a trainer puts the weights themselves."""
    return any(has_form(name, (path.split("/")[0],)) for path in WEIGHTS)


def _kind(folder: Path, top: Path, there: Folders) -> Kind:
    if there.is_file(folder / MANIFEST):
        return "output"
    if there.is_file(folder / ADAPTER_CONFIG) or there.files(folder, ADAPTER_WEIGHTS.fullmatch):
        return "adapter"
    return next((kind for kind in map(kind_of, folder.relative_to(top).parts) if kind != "model"), "model")


def kind_of(name: str) -> Kind:
    """What a folder may be, by its name.

    >>> [kind_of(name) for name in ("my_net", "target_net", "LoRA", "ema", "rank0", "checkpoint-5")]
    ['model', 'copy', 'companion', 'average', 'part', 'apart']
    """
    if is_average_name(name):
        return "average"
    if is_of_trainer(name):
        return "model"
    if name in (*ROLES, *RUNS) or step_of(Path(name)) is not None or name.startswith("models--"):
        return "apart"
    if RANK_FOLDER.fullmatch(name) or any(mark.regex.search(name) for mark in (*MARKS, WEAK)):
        return "part"
    words = CAMEL.sub("_", name.replace("LoRA", "lora"))
    if COPIES.fullmatch(words):
        return "copy"
    return "companion" if COMPANIONS.fullmatch(words) else "model"
