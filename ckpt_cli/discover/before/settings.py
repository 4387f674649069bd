"""What the files beside the weights of a step say otherwise than those of the steps before and after it.

A training does not change how its weights are used, nor how its inputs are made: what one step alone says was edited, or is a file of
another run. Names of files are compared in `ckpt_cli.discover.before.side_files`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_cli.discover.before.steps import steps_around
from ckpt_cli.discover.beside.homes import homes_in_step
from ckpt_cli.discover.found import Found
from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.assets import CONFIG, Assets, find_assets
from ckpt_cli.hub.contents.side_files import differing
from ckpt_cli.hub.contents.token_ids import contradicting
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG, adapter_config
from ckpt_cli.hub.settings import different_settings
from ckpt_cli.hub.text_assets import read_text
from ckpt_cli.hub.tokenizer_file import TOKENIZER
from ckpt_cli.names import few, printable
from ckpt_cli.tensors.component import Note
from ckpt_cli.urls import is_remote

CODE = "step-settings"

OF_SCALES: Mapping[str, object] = {
    "lora_alpha": None, "r": None, "use_rslora": None, "use_dora": None, "alpha_pattern": None, "rank_pattern": None,
    "fan_in_fan_out": None, "init_lora_weights": True,
}  # fmt: skip
"""The entries of adapter_config.json that say what factors of these shapes mean, and what counts where they are not there."""

ADAPTED = ("rank_pattern", "r")
"""What a training by AdaLora changes from step to step."""


def step_settings_notes(found: Found, homes: Sequence[Path], assets: Assets) -> list[Note]:
    """A warning about files of a step that say something else than in the step before and in the one after, as far as there are such.

    Files in a store are not read for it. Of the neighbours only those in their own folders count: others are of all steps alike. What a
    step has in common with one of its neighbours is the later part of a training that was changed on purpose, or the earlier one.
    """
    own = [home for home in homes if home.is_relative_to(found.path)]
    if not own or is_remote(found.path):
        return []
    told: list[tuple[str, dict[str, str]]] = []
    with contextlib.suppress(CkptError):  # another step is only looked at for a warning
        for step in steps_around(found):
            folders = homes_in_step(step, own, found)
            told.append((step.name, {**_others(assets, _of_step(find_assets(folders), step), step.name), **_adapters(own, folders)}))
    if not told or not all(said for _, said in told):
        return []
    name, said = told[0]
    text = f"{few([f'{file} ({what})' if what else file for file, what in said.items()], 3)}: {name} says otherwise"
    return [Note("warning", CODE, f"{text}, and a training does not change that: was a file edited, or is it of another run?")]


def _of_step(assets: Assets, step: Path) -> Assets:
    """The assets with those of the step's own folder alone."""
    files = {name: path for name, path in assets.files.items() if path.is_relative_to(step)}
    return replace(assets, files=files, config=assets.config if CONFIG in files else {})


def _others(mine: Assets, others: Assets, label: str) -> dict[str, str]:
    """The files that differ, each with what differs in it, as (here, there) where that is short."""
    found = dict[str, str]()
    if mine.config and others.config:
        settings = different_settings(mine.config, others.config)
        if settings:
            found[CONFIG] = few([entry.pair for entry in settings], 3)
    for name, keys in differing(others, label, mine, "this step"):
        found[name] = few(keys, 3)
    if (file := _other_ids(mine, others)) is not None:
        found.setdefault(file, "ids of tokens")
    return found


def _other_ids(mine: Assets, others: Assets) -> str | None:
    """The file that gives other ids to tokens in the other step."""
    one, other = (side.files.get(TOKENIZER) for side in (mine, others))
    if mine.tokenizer is None and others.tokenizer is None:
        return contradicting(others.files, mine.files)
    if mine.tokenizer is None or others.tokenizer is None or one is None or other is None or read_small(one) == read_small(other):
        return None
    return TOKENIZER if others.tokenizer().gives_other_ids(mine.tokenizer()) else None


def _adapters(own: Sequence[Path], folders: Sequence[Path]) -> dict[str, str]:
    """What the adapter_config.json of two steps say otherwise of the scale of factors."""
    paths = adapter_config(own), adapter_config(folders)
    if paths[0] is None or paths[1] is None:
        return {}
    mine, others = (_object(path) for path in paths if path is not None)
    if mine.get("peft_type") != others.get("peft_type"):
        return {ADAPTER_CONFIG: "peft_type"}
    keys = [key for key in OF_SCALES if mine.get("peft_type") != "ADALORA" or key not in ADAPTED]
    pairs = {key: tuple(side.get(key, OF_SCALES[key]) or None for side in (mine, others)) for key in keys}
    differing = [f"{key} ({_shown(pair[0])}, {_shown(pair[1])})" for key, pair in pairs.items() if pair[0] != pair[1]]
    return {ADAPTER_CONFIG: few(differing, 3)} if differing else {}


def _object(path: Path) -> Mapping[str, Any]:
    content = read_text(path).content
    return content if isinstance(content, dict) else {}


def _shown(value: object) -> str:
    return "none" if value is None else printable(str(value))
