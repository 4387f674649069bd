"""The files in which trainers note their settings, and what these say as plain values.

Arguments of LLaMA-Factory (training_args.yaml) and ms-swift (args.json), hyper-parameters of Lightning (hparams.yaml), configs of Hydra and
of programs that call the model's own differently (model_config.json), and the arguments that the Trainer pickles.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import Files, read_small
from ckpt_cli.files.texts.yaml_text import read_yaml
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.kept_configs import settings_of
from ckpt_cli.formats.trainers import RUNS
from ckpt_cli.hub.assets import CONFIG
from ckpt_cli.hub.beside.model_config import no_model_config

NAMES = re.compile(
    r"((train(ing|er)?|model|transformer|run|fine_?tun(e|ing)|sft|dpo|grpo|ppo|rm|exp(eriment)?|job|resolved|full|launch|script|cli|hydra"
    r"|axolotl|torchtune|llamaboard|project)[._-])*"
    r"(args|arguments|config|cfg|hparams|hyper_?param(eter)?s|settings|params|options)\.(json|ya?ml)",
    re.ASCII,
)
PICKLED = "training_args.bin"
OF_LOADING = "model_init_kwargs"
"""What TRL's arguments hand to ``from_pretrained``."""

INSIDE = (".hydra",)
MAX_BYTES = 1 << 20


def noted_settings(homes: Iterable[Path], files: Files) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The settings in the files of some folders, each with its file. What cannot be read says nothing."""
    there, homes = Folders(), list(homes)
    homes += [home.parent for home in homes if home.name in RUNS]
    for folder in dict.fromkeys(spot for home in homes for spot in (home, *(home / name for name in INSIDE))):
        with contextlib.suppress(CkptError):
            if not there.is_folder(folder):
                continue
            for path in there.files(folder, lambda name: NAMES.fullmatch(name) is not None or name == PICKLED):
                with contextlib.suppress(CkptError, UnicodeDecodeError):
                    content = _pickled(path, files) if path.name == PICKLED else _content(path)
                    if content:
                        yield path, content


def _content(path: Path) -> Mapping[str, Any]:
    if path.name == CONFIG and no_model_config(path) is None:
        return {}
    data = read_small(path, MAX_BYTES)
    content = parse_json(data, path.name) if path.suffix == ".json" else read_yaml(data.decode(), lambda _: None)
    return content if isinstance(content, dict) else {}


def _pickled(path: Path, files: Files) -> Mapping[str, Any]:
    """What the Trainer's own arguments say of loading the model: the others are about the training."""
    said = settings_of(files.parsed(path, TorchFile).root)
    inner = said.get(OF_LOADING)
    return inner if isinstance(inner, Mapping) else {}
