"""Configs of transformers that a checkpoint holds itself, as plain values: what training built the model of.

Composer keeps one at ``state.integrations.huggingface.model.config.content``, Lightning what the user saved as hyper-parameters, and other
programs ``config.to_dict()`` or the config itself beside the weights.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_cli.errors import CorruptFile
from ckpt_cli.files.pickle_nodes import Call, Global, as_dict, attributes
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.tensors.plain_values import TorchName, ValueReader

MAX_DICTS = 1 << 12
"""So many are looked into, those near the top first."""

MAX_DEPTH = 10
SIZES = ("hidden_size", "n_embd", "d_model", "text_config")
SIGNS = ("architectures", "transformers_version", *SIZES)
TYPE, CLASS, CONTENT = "model_type", "class", "content"
"""The entry without which nothing is a config; and Composer's class of the model, beside the content."""

SETTINGS = re.compile(r"(\w+_)?(args|arguments|config|cfg|hparams|params|hyper_?param(eter)?s|kwargs|settings|options)", re.ASCII)
"""What programs call settings of their own, which name no type of a model."""


@dataclass(frozen=True, slots=True)
class KeptConfig:
    """A config, the keys that lead to it, and whether all of it is plain; or, if it is none, settings of the program that trained."""

    where: str
    config: Mapping[str, Any]
    is_plain: bool
    is_config: bool = True


def configs_in(file: TorchFile) -> list[KeptConfig]:
    """The configs in a file of torch.save, and settings under names of such. Raises CorruptFile for values that cannot be read."""
    found: list[KeptConfig] = []
    pending: deque[tuple[tuple[str, ...], Any, object]] = deque([((), file.root, None)])
    for _ in range(MAX_DICTS):
        if not pending:
            break
        path, node, named = pending.popleft()
        pairs = _pairs(node) if not _names_settings(path) else _fields(node)
        if pairs is None or len(path) > MAX_DEPTH:
            continue
        if is_config(pairs):
            values = {key: ValueReader(file).read(value) for key, value in pairs.items()}
            found.append(kept_config(path, values, named))
            continue
        if any(map(_names_settings, zip(path))) and (plain := settings_of(node)):
            found.append(KeptConfig(".".join(path), plain, True, is_config=False))
        inner = pairs.get(CLASS)
        below = [((*path, key), value) for key, value in pairs.items() if isinstance(key, str)]
        pending += [(way, value, inner) for way, value in below if (_fields if _names_settings(way) else _pairs)(value) is not None]
    return found


def settings_of(node: object) -> dict[str, Any]:
    """The plain entries of a dict or of any object, and the dicts of such among them; empty of anything else."""
    found: dict[str, Any] = {}
    for key, value in (_fields(node) or {}).items():
        inner = as_dict(value) if isinstance(value, (Call, dict)) else None
        if isinstance(key, str) and (_is_plain(value) or (inner is not None and all(map(_is_plain, inner.values())))):
            found[key] = value if inner is None else inner
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(each is None or isinstance(each, (str, int, float)) for each in value)
    return value is None or isinstance(value, (str, int, float))


def _names_settings(path: tuple[str, ...]) -> bool:
    return bool(path) and SETTINGS.fullmatch(path[-1]) is not None


def _fields(node: object) -> Mapping[Any, Any] | None:
    """The entries of a dict, or the attributes of an object of any class, such as argparse's or a dataclass."""
    pairs = _pairs(node)
    if pairs is None and isinstance(node, Call) and node.state is not None:
        with contextlib.suppress(CorruptFile):
            return attributes(node.state)
    return pairs


def is_config(pairs: Mapping[Any, Any]) -> bool:
    """Whether a dict is surely a config of transformers."""
    return isinstance(pairs.get(TYPE), str) and any(pairs.get(sign) is not None for sign in SIGNS)


def kept_config(path: Iterable[str], values: Mapping[Any, Any], named: object) -> KeptConfig:
    """A config of plain ``values``, with the class that is ``named`` beside it if it does not name one itself."""
    lost: list[str] = []
    config = dict(_plain(values, lost))
    if not config.get("architectures") and isinstance(named, str) and "." in named:
        config["architectures"] = [named.rpartition(".")[2]]
    return KeptConfig(".".join(path), config, not lost)


def _pairs(node: object) -> Mapping[Any, Any] | None:
    """The entries of a dict of any class, or of a pickled config of transformers, whose class says the type; None for anything else."""
    if isinstance(node, Call) and isinstance(node.target, Global):
        module = node.target.module.split(".")
        if module[:2] == ["transformers", "models"] and len(module) == 4 and node.target.name.endswith("Config"):
            return {TYPE: module[2], **attributes(node.state)} if node.state is not None else None
    return node.pairs if isinstance(node, Call) and node.pairs and as_dict(node) is None else as_dict(node)


def _plain(values: Mapping[Any, Any], lost: list[str]) -> Iterator[tuple[str, Any]]:
    """The entries as JSON has them; keys of what it cannot say go to ``lost``."""
    for key, value in values.items():
        name = str(key)
        if isinstance(value, Mapping):
            yield name, dict(_plain(value, lost))
        elif isinstance(value, TorchName):
            yield name, value.name
        elif isinstance(value, (list, tuple)) and all(each is None or isinstance(each, (str, int, float)) for each in value):
            yield name, list(value)
        elif value is None or isinstance(value, (str, int, float)):
            yield name, value
        else:
            lost.append(name)
