"""What other programs write, told from the names of its files (or how a file begins), and what to do to get a model of it.

These are not formats: nothing is read of them. They are asked for where no format recognises anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.errors import Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import beginning_of


@dataclass(frozen=True, slots=True)
class Foreign:
    """A kind of files: ``sign`` is the name of one, or its path below a folder; a file with ``suffix`` that ``begins`` so is one too."""

    what: str
    sign: re.Pattern[str]
    hint: str
    begins: bytes = b""
    suffix: str = ""


def _kind(what: str, sign: str, hint: str, begins: bytes = b"", suffix: str = "") -> Foreign:
    return Foreign(what, re.compile(sign, re.ASCII | re.IGNORECASE), hint, begins, suffix)


UNPACK = "unpack it, and pass the folder that comes out; a file of torch.save needs a name that ends with .pt"
NOT_OF_TORCH = r"(?!.*(?-i:\.pth\.tar)\Z)"
"""What many trainers of images call files of torch.save (``checkpoint_0003.pth.tar``) are no archives, and are read."""
ORBAX = "restore it with orbax in JAX; MaxText has llama_mistral_mixtral_orbax_to_hf.py and others like it"
TENSORFLOW = "load it in transformers with from_tf=True (transformers < 5), and save_pretrained"
FOREIGN = (
    _kind(
        "a GGUF file of llama.cpp",
        r".*\.gguf",
        "GGUF is made from a model folder: use that; transformers reads some kinds of GGUF with gguf_file=",
        b"GGUF",
    ),
    _kind("an ONNX model", r".*\.(onnx|onnx_data)", "ONNX is exported from a model: use the folder that it was exported from"),
    _kind("a TensorFlow checkpoint", r".*\.data-[0-9]{5}-of-[0-9]{5}|saved_model\.pb", TENSORFLOW),
    _kind("a weights file of Keras or TensorFlow", r".*\.(h5|hdf5|keras)", TENSORFLOW, b"\x89HDF\r\n\x1a\n"),
    _kind("a weights file of Flax", r".*\.msgpack", "load it in transformers with from_flax=True (transformers < 5), and save_pretrained"),
    _kind("a checkpoint of orbax, as MaxText writes", r"(.*/)?(manifest\.ocdbt|_METADATA|_CHECKPOINT_METADATA|\.zarray)", ORBAX),
    _kind(
        "a distributed checkpoint of Paddle",
        r"[0-9]+\.metadata",
        "merge it where Paddle is installed: paddle.distributed.checkpoint, or PaddleNLP's merge tools",
    ),
    _kind("a weights file of Paddle", r".*\.(pdparams|pdopt)", "load it with PaddleNLP, and save safetensors"),
    _kind(
        "a checkpoint of nanotron",
        r"(.*/)?(checkpoint_metadata\.json|model_(weight|bias)_pp-rank-.*\.safetensors)",
        "convert it where nanotron is installed: examples/llama/convert_nanotron_to_hf.py",
    ),
    _kind(
        "a checkpoint of MindSpore",
        r"(.*/)?(rank_[0-9]+/.*\.ckpt|.*ckpt_strategy.*\.ckpt)",
        "merge it where MindSpore is installed (merge_sliced_parameter), and save safetensors (save_checkpoint with format)",
        b"\n",
        ".ckpt",
    ),
    _kind("an engine of TensorRT", r".*\.(engine|plan)", "engines are built from a model folder: use that"),
    _kind("a model of Core ML", r".*\.(mlmodel|mlpackage)(/.*)?", "it was converted from a model: use the folder of that"),
    _kind("a file of numpy arrays", r".*\.(npz|npy)", "save the arrays as safetensors: safetensors.numpy.save_file"),
    _kind("a run that Weights & Biases logged", r"(.*/)?run-.*\.wandb", "it holds logs; checkpoints lie where the trainer saved them"),
    _kind(
        "an archive of NeMo",
        r".*\.nemo",
        "unpack it (tar -xf), and pass what it has of the weights: model_weights.ckpt, or the folder model_weights",
    ),
    _kind("an archive", rf"{NOT_OF_TORCH}.*\.(tar|tgz|tbz2?|txz|tar\.\w+|zip|7z|rar)", UNPACK),
)
DEEP = 2
"""Levels of folders below the one that was given, in which signs are looked for."""

MOST = 200
"""Names that are looked at in each folder."""


def foreign_error(path: Path, there: Folders, levels: int = DEEP) -> Unsupported | None:
    """The error for a file or a folder of another program, None if nothing in it, down to some levels of folders, is a sign of one."""
    names = [path.name] if there.is_file(path) else _below(path, there, levels)
    for kind in FOREIGN:
        name = next((name for name in names if kind.sign.fullmatch(name)), None)
        if name is not None:
            seen = "" if name == path.name else f" ({name})"
            return Unsupported(f"this is {kind.what}{seen}, which is not read", path=path, hint=kind.hint)
    return None


def foreign_content(path: Path) -> Unsupported | None:
    """The error for a file that begins as those of another program do, whatever its name; also for one that safetensors wrote."""
    if beginning_of(path, 9)[8:] == b"{":
        return Unsupported("this is a safetensors file", path=path, hint="give it a name that ends with .safetensors")
    kind = next((k for k in FOREIGN if k.begins and path.name.endswith(k.suffix) and beginning_of(path, len(k.begins)) == k.begins), None)
    return None if kind is None else Unsupported(f"this is {kind.what}, which is not read", path=path, hint=kind.hint)


def _below(folder: Path, there: Folders, levels: int, prefix: str = "") -> list[str]:
    """The names of files in a folder and its folders, as paths below it, the nearest first."""
    entries = there.entries(folder)[:MOST]
    names = [f"{prefix}{entry.name}" for entry in entries]
    if levels:
        for entry in entries:
            if there.is_folder(entry):
                names += _below(entry, there, levels - 1, f"{prefix}{entry.name}/")
    return names
