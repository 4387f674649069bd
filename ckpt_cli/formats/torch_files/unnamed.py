"""Whether a file of ``torch.save`` holds weights where its name does not tell: by what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.torch_files.averages import named_tensors
from ckpt_cli.formats.torch_files.matrices import dimensions_of, is_optimizer, pairs_of
from ckpt_cli.formats.training_state_names import is_of_training, is_record_key, is_state_key, is_statistics_key
from ckpt_cli.formats.unused.search import DataSearch


def are_weights(path: Path, files: Files) -> bool:
    """Whether a file is a matrix of floats, a dict of weights, or has such a dict in it. False for what torch did not write."""
    stem = path.name.partition(".")[0]
    try:
        file = files.parsed(path, TorchFile)
        if (dimensions_of(file.root) or 0) > 1:
            return not is_record_key(stem) and not is_state_key(stem) and _is_float(file.root, file)
        entries = pairs_of(file.root)
        return entries is not None and any(_is_state_dict(key, node, file) for key, node in ((stem, file.root), *entries.items()))
    except CkptError:
        return False


def needed_in_state(path: Path, files: Files) -> list[str]:
    """The keys of a file of training state under which weights, or statistics of what goes in or comes out, are. None of other files.

    Of a file that is a state dict itself, they are the names of its tensors.
    """
    try:
        file = files.parsed(path, TorchFile)
        entries = pairs_of(file.root) or {}
        statistics = DataSearch().keys({key: node for key, node in entries.items() if is_statistics_key(key)})
        found = [str(key) for key, node in entries.items() if key in statistics or _is_state_dict(key, node, file, least=2)]
        own = {key: node for key, node in entries.items() if not is_of_training(key)}
        return found or (list(map(str, own)) if _is_state_dict("", own, file, least=2) else [])
    except CkptError:
        return []


def _is_state_dict(key: object, node: Any, file: TorchFile, *, least: int = 1) -> bool:
    """Whether a dict holds floats under names, and under a key that speaks of numbers a matrix of them."""
    if is_state_key(key) or not isinstance(key, str) or pairs_of(node) is None:
        return False
    entries: Mapping[Any, Any] = named_tensors(node)[0] or {}
    if is_optimizer(entries):
        return False
    least = 2 if is_record_key(key) else least
    return any(isinstance(name, str) and (dimensions_of(each) or 0) >= least and _is_float(each, file) for name, each in entries.items())


def _is_float(node: object, file: TorchFile) -> bool:
    """Whether a tensor holds floats; one that does not say so plainly may."""
    try:
        tensor = file.tensor(node)
    except CkptError:
        return True
    return tensor is None or tensor.dtype.kind not in ("int", "bool")
