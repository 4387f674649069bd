"""Facts about a LoRA adapter besides its tensors: alpha and the variant, from the files of trainers and PEFT's own config."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent, Undecidable, Unsupported, UsageError, reading
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.adapters.other_kinds import LOADED, PROMPTS
from ckpt_cli.hub.config import Config, architecture, model_types
from ckpt_cli.hub.entries.wrapped import wrapping_rank
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG, adapter_config
from ckpt_cli.lora.alphas.in_header import HeaderConfig, header_config
from ckpt_cli.lora.alphas.near_config import near_configs, near_text
from ckpt_cli.lora.on_base.trained_class import other_class
from ckpt_cli.lora.settings import REFUSED, unknown_settings
from ckpt_cli.lora.targets import ends
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

META = "lora_train_meta.json"
"""What verl (>= 0.7.1) leaves: r, lora_alpha, task_type."""

CONFIG = ADAPTER_CONFIG
FLAG = "--lora-alpha"
OF_MODEL = "config.json"
"""That of a model whose class adds adapters says their rank, of which its alpha is twice that."""

LARGEST = 1e30
"""No alpha is larger; also no NaN, no infinity, and no integer that a float cannot hold."""
PATTERN = re.compile(r"[\w.|^$\\*\-]{1,300}", re.ASCII)
"""Expressions without groups, which match in no time."""

LAYOUT, UNSLOTH = "lora_B_layout", "unsloth_fused_expert_lora"
RANK_MAJOR, BY_EXPERT = "rank_major", "grouped_by_expert"
"""What Unsloth writes about adapters of fused experts (unsloth_zoo, ``temporary_patches/moe_utils.py``, since September 2026).

The columns of lora_B [out, r E] go over experts first, as PEFT has it, or over ranks first, as Unsloth trained before.
"""


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Alpha (None: unknown) and where it comes from; ``config`` is the run's own adapter_config.json, empty without one."""

    alpha: float | None
    origin: str
    rank: int | None
    task_type: str | None
    config: Mapping[str, Any] = field(default_factory=dict)
    looked_in: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    model_types: frozenset[str] = frozenset()
    unusable: str = ""
    """What a file says in place of an alpha."""
    rank_origin: str = ""
    lead: str = ""
    """What a header puts in front of the names of all modules: that of the model in a pipeline, with its dot."""

    def scale(self, module: str, rank: int) -> float:
        """The factor of the product: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA.

        (Kalajdzievski, "A rank stabilization scaling factor for fine-tuning with LoRA", 2023.) Raises Undecidable without alpha.
        """
        alpha = self.alpha_of(module)
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") is True else alpha / rank

    def alpha_of(self, module: str) -> float:
        """The alpha of one module; patterns of the config go before the common one (peft, ``get_pattern_key``).

        As in PEFT that of a pattern may be 0: who names modules means it.
        """
        patterns = self.config.get("alpha_pattern") if self.origin != FLAG else None
        for pattern, value in (patterns if isinstance(patterns, Mapping) else {}).items():
            if _matches(pattern, module):
                if not _is_number(value):
                    what, hint = f"{CONFIG} says {_said(value)} as the alpha of {pattern}", "correct it there, or pass --lora-alpha"
                    raise Undecidable(what, tensor=module, expected="a number", hint=hint)
                return float(value)
        if self.alpha is None:
            raise Undecidable(
                "the alpha of these LoRA adapters is unknown" + (f": {self.unusable}" if self.unusable else ""),
                expected=f"lora_alpha in {META} or {CONFIG}; looked in {', '.join(self.looked_in) or 'no file'}",
                hint="pass --lora-alpha with the value of the training"
                + ("" if self.looked_in else ", times sqrt(r) if it used rank stabilisation (use_rslora)"),
            )
        return self.alpha

    def unused_patterns(self, keys: Collection[str]) -> dict[str, list[str]]:
        """Patterns of ranks and alphas that mean none of these modules and parameters, by setting: they have no effect, in PEFT neither."""
        ended = {end for key in keys for end in ends(key)}
        unused: dict[str, list[str]] = {}
        for setting in ("rank_pattern", "alpha_pattern"):
            patterns = self.config.get(setting)
            for pattern in patterns if isinstance(patterns, Mapping) else ():
                with contextlib.suppress(CkptError):
                    if pattern not in ended and not any(_matches(pattern, key) for key in keys):
                        unused.setdefault(setting, []).append(pattern)
        return unused

    @property
    def names_unsloth(self) -> bool:
        """Whether the config was written by Unsloth, or for a model that it published."""
        return "unsloth" in json.dumps(self.config).lower()

    def expert_layout(self, parameter: str | None) -> str | None:
        """How lora_B of a fused-expert adapter is laid out, by Unsloth's marker: `RANK_MAJOR` (PEFT's own), `BY_EXPERT`, None unmarked.

        ``parameter`` is the name of the weight, None if it is not known. Raises Unsupported for a layout that is not known.
        """
        detail = self.config.get(UNSLOTH)
        detail = detail if isinstance(detail, Mapping) else {}
        entries = detail.get("parameters")
        entries = entries if isinstance(entries, Mapping) else {}
        own = [entry for name, entry in entries.items() if parameter is not None and f".{parameter}".endswith(f".{name}")]
        said = [entry.get(LAYOUT) for entry in own if isinstance(entry, Mapping)] or [self.config.get(LAYOUT)]
        for name, value, known in (
            (LAYOUT, said[0], (None, RANK_MAJOR, BY_EXPERT)),
            ("lora_A_layout", detail.get("lora_A_layout"), (None, BY_EXPERT)),
        ):
            if value not in known:
                raise Unsupported(
                    f"{CONFIG} says {name} {value}",
                    tensor=parameter,
                    expected=" or ".join(each for each in known if each is not None),
                    hint="pass --lora export or keep, and fuse it with the program that trained it",
                )
        return said[0]

    def check_rank(self, module: str, rank: int) -> None:
        """Raise Inconsistent if the files name another rank than the factors have."""
        patterns = self.config.get("rank_pattern")
        for pattern, value in (patterns if isinstance(patterns, Mapping) else {}).items():
            if _matches(pattern, module):
                origin, differs, expected = CONFIG, value != rank, value
                break
        else:
            origin, differs, expected = self.rank_origin, self.rank not in (None, rank), self.rank
        if differs:
            hint = "the adapter's files may be from two runs"
            raise Inconsistent(f"the factors have rank {rank}, but {origin} says {_said(expected)}", tensor=module, hint=hint)


def adapter_facts(homes: Sequence[Path], given: float | None, model: Config | None = None) -> AdapterFacts:
    """Read the files in ``homes`` (component folder, checkpoint): META first, then CONFIG, or what a header has instead.

    ``given`` is ``--lora-alpha``, which wins.

    ``model`` is the config of the model. An alpha of 0 counts as unknown, and a rank of 0 in META: some trainers write that whatever was
    trained. Raises CorruptFile, UsageError.
    """
    if given is not None and not (math.isfinite(given) and given > 0):
        raise UsageError("--lora-alpha is out of range", expected="a number above 0")
    meta_path = _first(homes, META)
    config_path = adapter_config(homes)
    meta = _object(meta_path) if meta_path is not None else {}
    config = _object(config_path) if config_path is not None else {}
    header = header_config(homes) if config_path is None else HeaderConfig()
    of_config = f"the header of {header.name}" if header.config else CONFIG
    config = dict(header.config) or config
    _check_kind(config, config_path)
    known = [(float(said["lora_alpha"]), name) for said, name in ((meta, META), (config, of_config)) if _is_alpha(said.get("lora_alpha"))]
    unusable = [f"{name} says {_said(said['lora_alpha'])}" for said, name in ((meta, META), (config, of_config)) if "lora_alpha" in said]
    if {said.get("lora_alpha") == 0 for said in (meta, config) if "lora_alpha" in said} == {True}:
        unusable[-1] += ", which some trainers write whatever was trained"
    looked_in = tuple(name for said, name in ((meta, META), (config, of_config)) if said)
    near = near_configs(homes) if config_path is None and not config else []
    notes = [Note("warning", "near-name", near_text(near))] if near else []
    if given is not None:
        notes += [
            Note("warning", "lora-alpha", f"{name} says alpha {alpha:g}; --lora-alpha {given:g} was used")
            for alpha, name in known
            if alpha != given
        ]
        if header.models:
            text = f"{header.unusable}; --lora-alpha {given:g} was used for all of them, which diffusers alone loads together"
            notes.append(Note("warning", "lora-alpha", text))
        known = [(given, FLAG)]
    elif len({alpha for alpha, _ in known}) > 1:
        text = f"{META} says alpha {known[0][0]:g}, which was used; {of_config} says {known[1][0]:g}"
        notes.append(Note("warning", "lora-alpha", text))
    if given is not None and config.get("alpha_pattern"):
        notes.append(
            Note("warning", "lora-alpha", f"alpha_pattern of {of_config} is passed over: --lora-alpha {given:g} was used for all modules")
        )
    if unknown := unknown_settings(config):
        text = (
            f"{of_config} has {'a setting' if len(unknown) == 1 else 'settings'} that ckpt does not know, and which may change the result"
        )
        notes.append(Note("warning", "unknown-setting", f"{text}: {few(unknown)}"))
    if model and (trained := other_class(config, model)):
        text = f"{of_config} says that the adapters were trained on {trained}, and config.json {architecture(model)}: what that class"
        notes.append(Note("warning", "trained-class", f"{text} computes otherwise, the weights do not say; load the output with it"))
    ranks = [(said["r"], name) for said, name in ((meta, META), (config, of_config)) if type(said.get("r")) is int]
    rank, rank_origin = next(((rank, name) for rank, name in ranks if rank > 0 or name == of_config), (None, ""))
    task = next((said["task_type"] for said in (meta, config) if isinstance(said.get("task_type"), str)), None)
    of_class = wrapping_rank(model or {})
    if of_class is not None and not known and not unusable and not header.unusable:
        known, rank, rank_origin = [(2.0 * of_class, OF_MODEL)], of_class, OF_MODEL
    alpha, origin = known[0] if known else (None, looked_in[0] if looked_in else "nothing")
    return AdapterFacts(
        alpha,
        origin,
        rank,
        task,
        config,
        looked_in,
        tuple(notes),
        frozenset(model_types(model or {})),
        " and ".join(unusable) or header.unusable or (near_text(near) if near else ""),
        rank_origin,
        header.lead,
    )


def peft_config(
    facts: AdapterFacts,
    ranks: Mapping[str, int],
    saved: Sequence[str],
    *,
    base: str | None,
    dora: bool,
    transposed: bool,
    bias: bool = False,
) -> bytes:
    """An adapter_config.json for adapters of these modules (name -> rank), with which PEFT loads them.

    Modules are named in full, since names such as "q_proj" would also match in a vision tower.
    """
    common = max(set(ranks.values()), key=list(ranks.values()).count, default=facts.rank or 8)
    alphas = {module: facts.alpha_of(module) for module in ranks}
    usual = max(set(alphas.values()), key=list(alphas.values()).count, default=8.0)
    alpha = facts.alpha if facts.alpha is not None else usual
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": facts.task_type,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "use_rslora": False,
        "lora_dropout": 0.0,
        **facts.config,
        "inference_mode": True,
        "r": common,
        "lora_alpha": _whole(alpha),
        "rank_pattern": {module: rank for module, rank in ranks.items() if rank != common},
        "alpha_pattern": {module: _whole(value) for module, value in alphas.items() if value != alpha},
        "use_dora": dora,
        **({"lora_bias": True} if bias else {}),
    }
    content["base_model_name_or_path"] = content["base_model_name_or_path"] or base
    if facts.config.get("target_parameters"):
        # PEFT looks such patterns up by the names of parameters: what the run has is right.
        kept = {key: facts.config[key] for key in ("r", "rank_pattern", "alpha_pattern") if facts.config.get(key)}
        content |= {"rank_pattern": {}, "alpha_pattern": {}, **kept}
    else:
        content["target_modules"] = sorted(ranks)
    if not content.get("modules_to_save"):
        # A bias alone is no module: one that was trained as a whole has its weight too.
        content["modules_to_save"] = sorted({name.rpartition(".")[0] for name in saved if not name.endswith(".bias")}) or None
    return (json.dumps(content, indent=2) + "\n").encode()


def _check_kind(config: Mapping[str, Any], path: Path | None) -> None:
    kind = config.get("peft_type", "LORA")
    others = [key for key in REFUSED if config.get(key)]
    if kind != "LORA" or others:
        what = f"an adapter of PEFT's {kind}" if kind != "LORA" else f"LoRA with {others[0]}"
        way = LOADED if kind in PROMPTS else "merge it with PEFT"
        raise Unsupported(f"this is {what}", path=path, expected="LoRA or DoRA", hint=f"{way}, or pass --lora keep")


def _first(homes: Sequence[Path], name: str) -> Path | None:
    return next((home / name for home in homes if is_file(home / name)), None)


def _object(path: Path) -> dict[str, Any]:
    with reading(path):
        content = parse_json(read_small(path))
        if not isinstance(content, dict):
            raise CorruptFile("the file is not a JSON object")
    return content


def _is_alpha(value: object) -> bool:
    """A usable alpha, which may be below 0; 0 is none, as some trainers write that whatever was trained."""
    return _is_number(value) and value != 0


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def _said(value: object) -> str:
    """A value as the file has it."""
    return json.dumps(value)[:40]


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern of the config means a module. Expressions that could take forever are refused, not tried."""
    if not PATTERN.fullmatch(pattern) or pattern.count("*") > 3:
        hint = "merge it with PEFT, or pass --lora keep"
        raise Undecidable("a pattern of the adapter's config is not a simple expression", tensor=pattern[:100], hint=hint)
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error:
        raise CorruptFile("a pattern of the adapter's config is not an expression", tensor=pattern) from None


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
