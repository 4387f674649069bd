"""The files besides weights that a model folder needs: config, generation config, tokenizer, processor, custom code.

They are copied byte for byte from wherever the run keeps them; only the dtype that config.json names is set to what was written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, NotFound, reading
from ckpt_cli.files import files_in, read_small
from ckpt_cli.geometry import Shape
from ckpt_cli.manifest import NAME as MANIFEST
from ckpt_cli.model import Note
from ckpt_cli.safetensors_file import parse_json
from ckpt_cli.value_models import repaired_class

CONFIG = "config.json"
HUB_FOLDER = "huggingface"
ASSET_NAMES = frozenset(
    {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model",
        "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "image_processor.json",
        "feature_extractor.json", "chat_template.json", "chat_template.jinja", "modules.json", "LICENSE", "LICENSE.txt", "NOTICE",
        "llm_config.json", "vit_config.json",
    }
)  # fmt: skip
"""What trainers write into a checkpoint's own folder; other JSON files there (trainer state and so on) stay behind."""

ASSET_PATTERN = re.compile(r".*\.(jinja|tiktoken|spm)")
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".h5", ".msgpack", ".gguf", ".onnx", ".npz"})
PART = re.compile(r".+-[0-9]+-of-[0-9]+\.safetensors", re.ASCII)
TOKENIZER_FILES = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"})


@dataclass(frozen=True, slots=True)
class Assets:
    """Asset files by name, where each comes from, and the parsed config (empty if there is none)."""

    files: Mapping[str, Path]
    config: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        return sorted(self.files)

    @property
    def lacking(self) -> list[str]:
        """What a usable model folder still needs."""
        lacks = [] if CONFIG in self.files else [CONFIG]
        if not TOKENIZER_FILES & set(self.files) and not any(name.endswith(".tiktoken") for name in self.files):
            lacks.append("a tokenizer")
        return lacks


def find_assets(homes: Sequence[Path], base: Path | None = None, *, code: bool = True) -> Assets:
    """The assets of a component: from the ``huggingface`` folder in each home or the home itself, then from ``base``.

    The first folder with a config.json decides for the run; ``base`` only adds names that the run lacks. Of a base,
    everything is an asset but weights and its README, which speaks of another model. ``code``: in a checkpoint's own folder
    Python files are its custom code; beside a single file anything may lie, so there only those that a config mentions.
    """
    files: dict[str, Path] = {}
    folders = [(folder, is_hub) for home in homes for folder, is_hub in ((home / HUB_FOLDER, True), (home, False))]
    for folder, is_hub in folders:
        found = _listed(folder, everything=is_hub, code=code)
        if CONFIG in found:
            files = found
            break
        for name, path in found.items():
            files.setdefault(name, path)
    if base is not None:
        for name, path in _listed(base, everything=True, code=True).items():
            if not name.startswith("README"):
                files.setdefault(name, path)
    config = read_config(files[CONFIG]) if CONFIG in files else {}
    return Assets(files, config)


def auxiliary_weights(base: Path, model_files: Sequence[Path]) -> dict[str, Path]:
    """Weights of a base that are not the trained model, such as the ``ae.safetensors`` of an image decoder."""
    own = {path.name for path in model_files} | {"model.safetensors", "ema.safetensors"}
    return {
        path.name: path
        for path in files_in(base)
        if path.suffix == ".safetensors" and path.name not in own and not PART.fullmatch(path.name)
    }


def read_config(path: Path) -> Mapping[str, Any]:
    """A config.json as a dict. Raises CorruptFile."""
    with reading(path):
        config = parse_json(read_small(path), "the config")
        if not isinstance(config, dict):
            raise CorruptFile("the config is not a JSON object")
    return config


def resolve_base(base: str) -> Path:
    """The folder of ``--base``: a path, or a Hub ID whose snapshot is in the local Hub cache. Nothing is downloaded."""
    folder = Path(base)
    if os.path.isdir(folder):
        return folder.resolve() if ".." in folder.parts else folder
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and ".." not in base:
        # As huggingface_hub finds it: variables may begin with ~, which nothing expands in a Dockerfile or a unit file.
        home = os.environ.get("HF_HOME") or os.path.join("~", ".cache", "huggingface")
        cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
        repository = Path(os.path.expanduser(cache)) / f"models--{base.replace('/', '--')}"
        try:
            commit = (repository / "refs" / "main").read_text().strip()
        except OSError:
            commit = ""
        if re.fullmatch(r"[0-9a-f]{40}", commit) and os.path.isdir(repository / "snapshots" / commit):
            return repository / "snapshots" / commit
    raise NotFound(
        "no such base model", path=base, expected="a folder, or a Hub ID in the local Hub cache", hint="download it first; ckpt never does"
    )


def config_with(content: bytes | Path, changes: Mapping[str, Any]) -> bytes:
    """A config.json with other entries."""
    text = read_small(content) if isinstance(content, Path) else content
    return (json.dumps({**json.loads(text.decode("utf-8-sig")), **changes}, indent=2, ensure_ascii=False) + "\n").encode()


def config_with_dtype(path: Path, dtype: str) -> bytes | Path:
    """config.json with its dtype set to what was written (torch's name); the untouched path if it says so already.

    Only these words of the text change. Sub-configs of multimodal models that repeat the old dtype follow.
    """
    text = read_small(path).decode("utf-8-sig")
    config = json.loads(text)
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    old = {config[key] for key in keys if isinstance(config[key], str)}
    if keys and old == {dtype} and all(isinstance(config[key], str) for key in keys):
        return path
    if not old:
        return text.replace("{", f'{{\n  "{_dtype_key(config)}": "{dtype}",', 1).encode() if not keys else path
    words = "|".join(re.escape(json.dumps(word)) for word in old)
    return re.sub(rf'("(?:torch_)?dtype"\s*:\s*)(?:{words})', rf'\g<1>"{dtype}"', text).encode()


def _dtype_key(config: Mapping[str, Any]) -> str:
    """The key that the config's transformers version knows: "dtype" since 4.56, "torch_dtype" before."""
    version = str(config.get("transformers_version", "0")).split(".")
    numbers = [int(part) for part in version[:2] if part.isascii() and part.isdecimal()]
    return "dtype" if numbers >= [4, 56] else "torch_dtype"


def _listed(folder: Path, *, everything: bool, code: bool) -> dict[str, Path]:
    """Asset files of a folder: by name, or ``everything`` that is no weights; ``code``: Python files even if no config mentions them."""
    found = {}
    modules = []
    for path in files_in(folder):
        name = path.name
        weights = path.suffix in WEIGHT_SUFFIXES or name.endswith(".index.json") or name == MANIFEST
        if path.suffix == ".py" and not code:
            modules.append(path)
        elif (
            path.suffix == ".py"
            or name in ASSET_NAMES
            or ASSET_PATTERN.fullmatch(name)
            or (everything and not weights and not name.startswith("."))
        ):
            found[name] = path
    return found | _custom_code(modules, [path for path in found.values() if path.suffix == ".json"])


def _custom_code(modules: Sequence[Path], configs: Sequence[Path]) -> dict[str, Path]:
    """Python modules that a config mentions (``auto_map``), and those that these mention: nothing else that lies around."""
    chosen: dict[str, Path] = {}
    if not modules:
        return chosen
    texts = [read_small(path) for path in configs]
    while True:
        more = [
            m for m in modules if m.name not in chosen and any(re.search(rb"\b" + re.escape(m.stem.encode()) + rb"\b", t) for t in texts)
        ]
        if not more:
            return chosen
        chosen |= {module.name: module for module in more}
        texts = [read_small(module) for module in more]


def _mentions(text: bytes, word: str) -> bool:
    return re.search(rb"\b" + re.escape(os.fsencode(word)) + rb"\b", text) is not None


# -- what the config says about the weights --------------------------------------------------------------------------

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")


def tied_pair(names: Sequence[str]) -> tuple[str, str] | None:
    """(head, embedding) among tensor names, if there is exactly one of each."""
    heads = [name for name in names if _last_two(name) in HEADS]
    embeddings = [name for name in names if _last_two(name) in EMBEDDINGS]
    return (heads[0], embeddings[0]) if len(heads) == len(embeddings) == 1 else None


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def config_notes(config: Mapping[str, Any], shapes: Mapping[str, Shape], dtypes: set[str]) -> list[Note]:
    """Where the config contradicts the weights (by name) in a way that makes loading go wrong silently, and what was done about it."""
    notes = []
    architectures = config.get("architectures") or []
    value_heads = [name for name in shapes if name.split(".")[0] in ("score", "v_head")]
    repaired = repaired_class(config, shapes)
    if repaired:
        text = f"config.json says {architectures[0]}, but the weights have {value_heads[0]}: it says {repaired['architectures'][0]} now"
        notes.append(Note("info", "class-repaired", text))
    elif value_heads and any(isinstance(a, str) and a.endswith(("ForCausalLM", "ForConditionalGeneration")) for a in architectures):
        text = f"config.json says {architectures[0]}, but the weights have {value_heads[0]}: load them with the class that trained them"
        notes.append(Note("warning", "value-head", text))
    wanted = config.get("dtype", config.get("torch_dtype"))
    if wanted == "bfloat16" and dtypes == {"F32"}:
        notes.append(Note("info", "fp32-masters", "these are float32 masters of a bfloat16 model: --dtype bf16 halves the output"))
    return notes
