"""A tokenizer that a checkpoint holds inside, as those of Composer do: it is not written, and a base may have another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import read_small
from ckpt_cli.formats.kept_configs import CONTENT, KeptConfig
from ckpt_cli.hub.assets import Assets
from ckpt_cli.hub.beside.names import TOKENIZER_CONFIG
from ckpt_cli.hub.beside.tokenizers import has_vocabulary
from ckpt_cli.hub.beside.told_tokens import told_tokens, words
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.hub.contents.templates import templates_in
from ckpt_cli.names import printable
from ckpt_cli.tensors.component import Note

END, FORM = "eos_token", "file_extension"
TEMPLATES = ("chat_template.json", TOKENIZER_CONFIG)
"""Files with a chat template as an entry."""

TEMPLATE = "chat_template.jinja"
SAVED = "save the tokenizer with the program that trained, into the folder of the output"


def is_tokenizer(kept: KeptConfig) -> bool:
    """Whether settings in a checkpoint are the tokenizer_config.json of one."""
    keys = [key for key in kept.where.split(".") if key != CONTENT]
    return bool(keys) and keys[-1] == TOKENIZER_CONFIG.removesuffix(".json") and FORM not in kept.config


def tokenizer_notes(kept: KeptConfig, assets: Assets) -> list[Note]:
    """A warning where the output has no tokenizer, one that ends texts otherwise, or another chat template."""
    inside = f"the checkpoint holds the tokenizer of the training (at {printable(kept.where)})"
    if not has_vocabulary(assets.files):
        return [Note("warning", "kept-tokenizer", f"{inside}, which is not written: {SAVED}")]
    differing = []
    own = next((each.token for each in told_tokens(assets.files) if each.role == END), None)
    end = next(words(kept.config.get(END)), None)
    if end is not None and end != own:
        differing.append(f"ends texts with {printable(end)} ({'nothing' if own is None else printable(own)} here)")
    templates = {text.strip() for text in templates_in(kept.config)}
    if templates and not templates & {text.strip() for text in _templates(assets.files)}:
        differing.append("has another chat template")
    if not differing:
        return []
    return [Note("warning", "kept-tokenizer", f"{inside}, which {' and '.join(differing)}, and is not written: {SAVED}")]


def _templates(files: Mapping[str, Path]) -> Iterator[str]:
    for name in TEMPLATES:
        if name in files:
            with contextlib.suppress(CkptError):
                content: Mapping[str, Any] = read_config(files[name])
                yield from templates_in(content)
    if TEMPLATE in files:
        with contextlib.suppress(CkptError):
            yield read_small(files[TEMPLATE]).decode(errors="replace")
