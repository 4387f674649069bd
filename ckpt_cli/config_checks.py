"""Header level of `verify`: whether config.json, tokenizer and weights belong together. Names, shapes and dtypes only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.assets import CONFIG, EMBEDDINGS, read_config
from ckpt_cli.dtypes import BY_TORCH
from ckpt_cli.errors import CkptError
from ckpt_cli.expected_tensors import Expected, expected_tensors
from ckpt_cli.files import is_file, read_small
from ckpt_cli.findings import finding, shape_text, unread
from ckpt_cli.geometry import Shape
from ckpt_cli.hub_names import renamed_for_hub
from ckpt_cli.hub_rules import rules_for
from ckpt_cli.model import Tensor
from ckpt_cli.model_config import Config
from ckpt_cli.patterns import pattern_of
from ckpt_cli.report import Finding
from ckpt_cli.safetensors_file import parse_json

TRL = "pretrained_model."
"""What TRL's models with a value head put in front of the names of the model inside."""

WORDS = {"gamma": "weight", "beta": "bias"}
"""TensorFlow's words for a norm's parameters, in files of BERT's time."""

VALUE_HEAD = re.compile(r"v_head\..*")


@dataclass(frozen=True, slots=True)
class ConfigCheck:
    """``expected`` is how many tensors the model class has (None: not known), ``naming`` with whose names they were compared."""

    config: Config
    findings: tuple[Finding, ...]
    expected: int | None = None
    naming: str | None = None


def check_config(folder: Path, tensors: Mapping[str, Tensor], *, written: bool) -> ConfigCheck:
    """Compare tensors with the config.json and the tokenizer in a folder.

    ``written``: they are files for a loader, so that the dtype in the config counts; trainers keep float32 masters of a
    bfloat16 model.
    """
    path = folder / CONFIG
    if not is_file(path):
        return ConfigCheck({}, (finding("no-config", "names and shapes were not compared"),))
    try:
        config = read_config(path)
    except CkptError as error:
        return ConfigCheck({}, (unread("damaged-config", error, CONFIG),))
    found = [*_dtype(config, tensors)] if written else []
    found += _vocabulary(folder, tensors)
    if "quantization_config" in config:
        why = "the config says that weights are quantised: names and shapes are those of the method"
        return ConfigCheck(config, (*found, finding("not-compared", why)))
    expected = expected_tensors(config)
    if isinstance(expected, str):
        return ConfigCheck(config, (*found, finding("not-compared", expected)))
    naming, different = _compared({name: tensor.shape for name, tensor in tensors.items()}, expected, config)
    return ConfigCheck(config, (*found, *different), len(expected.hub), naming)


def _dtype(config: Config, tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """The dtype that a config names must be the one that most weights have. Of quantised models it means something else."""
    if "quantization_config" in config or any(tensor.dtype.kind == "opaque" for tensor in tensors.values()):
        return
    text = config.get("text_config")
    levels = (config, text) if isinstance(text, Mapping) else (config,)
    named = next((level[key] for level in levels for key in ("dtype", "torch_dtype") if isinstance(level.get(key), str)), None)
    elements: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype.kind == "float":
            elements[tensor.dtype.code] += tensor.numel
    if named is None or not elements:
        return
    code, count = elements.most_common(1)[0]
    if named.removeprefix("torch.") not in BY_TORCH:
        yield finding("config-dtype", f"config.json says {named}, which is no dtype", file=CONFIG)
    elif BY_TORCH[named.removeprefix("torch.")].code != code:
        message = f"config.json says {named}, but {count} of {sum(elements.values())} elements are {code}"
        yield finding("config-dtype", message, file=CONFIG, elements=count, of=sum(elements.values()))


# -- names and shapes ------------------------------------------------------------------------------------------------


def _compared(shapes: Mapping[str, Shape], expected: Expected, config: Config) -> tuple[str, list[Finding]]:
    """Differences to the tensors of the model class, under those of its names that fit best: of the hub, as in memory, or older ones."""
    inner = {name.removeprefix(TRL): shape for name, shape in shapes.items()}
    heads = [name for name in shapes if VALUE_HEAD.fullmatch(name)]
    if heads and any(name.startswith(TRL) for name in shapes):
        shapes = {name: shape for name, shape in inner.items() if name not in heads}
    else:
        heads = []
    rules = rules_for(config)
    older = shapes if rules is None else renamed_for_hub(shapes, rules)
    choices: list[tuple[str, Mapping[str, Shape], Mapping[str, Shape]]] = [
        ("those of the hub", shapes, expected.hub),
        ("as trained", shapes, expected.native),
        *(("those of an older version", held, expected.hub) for held in _older_forms(older, expected.prefix)),
    ]
    compared = [(naming, held, *_differences(held, wanted, expected)) for naming, held, wanted in choices]
    naming, held, missing, reshaped, extra = min(compared, key=lambda item: len(item[2]) + len(item[3]) + len(item[4]))
    found = []
    for name, shape in missing.items():
        found.append(finding("missing-tensor", f"the class has it with shape {shape_text(shape)} ({expected.origin})", tensor=name))
    for name, (wanted, stored) in reshaped.items():
        found.append(
            finding("wrong-shape", f"{shape_text(stored)}, and the class has {shape_text(wanted)} ({expected.origin})", tensor=name)
        )
    patterns = {pattern_of(name)[0] for name in expected.hub} | {pattern_of(name)[0] for name in expected.native}
    for name in extra:
        code = "extra-layer" if pattern_of(name)[0] in patterns else "extra-tensor"
        found.append(finding(code, f"the class has none of this name (shape {shape_text(held[name])})", tensor=name))
    found += [finding("extra-tensor", "a value head of TRL beside the model", tensor=name) for name in heads]
    tied = [name for name in shapes if name in expected.tied and name not in expected.hub] if naming != "as trained" else []
    found += [
        finding("tied-stored", f"the config ties it to {expected.tied[name]}", tensor=name, partner=expected.tied[name]) for name in tied
    ]
    return naming, found


def _older_forms(shapes: Mapping[str, Shape], prefix: str) -> Iterator[Mapping[str, Shape]]:
    """The same under other names that loaders understand: with or without the prefix of the base model, and TensorFlow's words."""
    words = {name: re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{WORDS[m[1]]}", name) for name in shapes}
    for renamed in (
        words,
        {name: f"{prefix}.{new}" for name, new in words.items()},
        {name: new.removeprefix(f"{prefix}.") for name, new in words.items()},
    ):
        if len(set(renamed.values())) == len(shapes):
            yield {renamed[name]: shape for name, shape in shapes.items()}


def _differences(
    held: Mapping[str, Shape], wanted: Mapping[str, Shape], expected: Expected
) -> tuple[dict[str, Shape], dict[str, tuple[Shape, Shape]], list[str]]:
    """What is missing, what has another shape (wanted, held), and what is there without being wanted."""
    partners = {**expected.tied, **{source: name for name, source in expected.tied.items()}}
    missing = {
        name: shape
        for name, shape in wanted.items()
        if name not in held and partners.get(name) not in held and not _matches(expected.optional, name)
    }
    reshaped = {name: (shape, held[name]) for name, shape in wanted.items() if name in held and held[name] != shape}
    known = {*wanted, *expected.tied}
    return missing, reshaped, [name for name in held if name not in known and not _matches(expected.ignored, name)]


def _matches(expressions: tuple[str, ...], name: str) -> bool:
    return any(re.search(expression, name) for expression in expressions)


# -- tokenizer -------------------------------------------------------------------------------------------------------


def _vocabulary(folder: Path, tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Every id that the tokenizer makes needs a row of the embedding; some models leave added tokens without one."""
    embedding = next((t for name, t in tensors.items() if ".".join(name.split(".")[-2:]) in EMBEDDINGS and len(t.shape) == 2), None)
    if embedding is None:
        return
    rows = embedding.shape[0]
    for name, ids in _tokens(folder):
        if ids and max(ids) >= rows:
            code = "added-tokens" if name == "added tokens" else "vocabulary"
            beyond = sum(token >= rows for token in ids)
            message = f"{beyond} of {len(ids)} {name} have ids of {rows} and above, and the embedding has {rows} rows"
            yield finding(code, message, tensor=embedding.name, file="tokenizer.json", largest=max(ids), rows=rows)


def _tokens(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Ids of a tokenizer.json: those of its model, and of tokens that were added. What is wrong with the file is found elsewhere."""
    path = folder / "tokenizer.json"
    try:
        content: Any = parse_json(read_small(path)) if is_file(path) else {}
    except CkptError:
        return
    model = content.get("model") if isinstance(content, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield "tokens", [token for token in vocabulary.values() if type(token) is int]
    elif isinstance(vocabulary, list):
        yield "tokens", list(range(len(vocabulary)))
    added = content.get("added_tokens") if isinstance(content, dict) else None
    if isinstance(added, list):
        own = set(vocabulary) if isinstance(vocabulary, dict) else set()
        entries = [token for token in added if isinstance(token, dict) and isinstance(token.get("content"), str)]
        entries = [token for token in entries if token["content"] not in own]
        yield "added tokens", [token["id"] for token in entries if type(token.get("id")) is int]
