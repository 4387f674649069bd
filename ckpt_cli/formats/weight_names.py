"""Names of files that may hold weights: in forms that are read and in those of other programs, finished or not.

Nothing is read by these names. They say that a folder is not empty of weights, so that others in it are not the only ones.
"""

from __future__ import annotations

import re

from ckpt_cli.formats.training_state_names import is_state_file

FORMS = re.compile(
    r".*\.(safetensors|bin|pt|pth|th|ckpt|distcp|msgpack|gguf|ggml|npz|npy|h5|hdf5|keras|onnx(_data)?|tflite|pb|ot|pdparams|mindir|engine|mlmodel)"
    r"([._~-].*)?|.*\.data-[0-9]+-of-[0-9]+|(.*[._-])?(ckpt|checkpoint|model|variables)([._-].*)?\.index|_METADATA|manifest\.ocdbt|\.zarray",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
"""What follows the ending belongs to a file that is being written or copied (``.tmp``, ``.incomplete``, ``.part``, ``.XaBc12``)."""

ANY_FORM = re.compile(
    r"(.*[._-])?(models?|weights|params|net(work)?|policy|actor|generator|state_dict|checkpoint|ckpt|snapshot)([._-].*)?\.(pkl|pickle|params|zip|tar|tgz|zst|gz|bz2|xz|7z)",
    re.ASCII | re.IGNORECASE,
)
"""Endings that say nothing, where the name says model."""

TEXTS = re.compile(r".*\.(json|jsonl|md|txt|ya?ml|toml|csv|log|lock|md5|sha[0-9]*|sig|asc|metadata|py|html|png)", re.ASCII | re.IGNORECASE)
OTHER = re.compile(
    r"((.*[._-])?(tokenizer|vocab|replay|buffer|dl_state|custom_checkpoint|meta)([._-].*)?"
    r"|(args|arguments|config|hparams|hyper_?parameters|info|metadata|misc|step|epoch|progress|vec_normali[sz]e|normali[sz](er|ation)|norm_stats))"
    r"\.[a-z0-9]+",
    re.ASCII | re.IGNORECASE,
)
"""Pickles and the like of trainers, beside those of `training_state_names`."""

AVERAGED = re.compile(r"(.*[._-])?(ema|swa|averaged?)([._-].*)?", re.ASCII | re.IGNORECASE)
"""A file or folder that is called like an average, by any word of its name: ``ema_checkpoint-200``, ``model-swa.pt``."""


def may_hold_weights(name: str) -> bool:
    """Whether a file may hold weights by its name, whatever program reads it.

    >>> [may_hold_weights(name) for name in ("model.msgpack", "model.safetensors.tmp", "ckpt-5.index", "rng_state.pth", "model.bin.json")]
    [True, True, True, False, False]
    """
    if is_state_file(name.lstrip(".")) or TEXTS.fullmatch(name) or OTHER.fullmatch(name):
        return False
    return FORMS.fullmatch(name) is not None or ANY_FORM.fullmatch(name) is not None
