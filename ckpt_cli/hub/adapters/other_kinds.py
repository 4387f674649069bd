"""Adapters of other kinds than PEFT's LoRA: known by how their factors are called, or by shapes that only factors have.

Names as these write them: minimind (``model/model_lora.py``), mlx-lm (``tuner/lora.py``), kohya's sd-scripts (``networks/lora.py``),
diffusers before PEFT, LyCORIS, torchtune (``modules/peft/lora.py``), NeMo and Megatron-Bridge (``peft/utils.py`` and
``canonical_lora.py``), ms-swift on Megatron (grouped layers of Transformer Engine), and PEFT's other methods (``mapping.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.adapters.parametrized import outside, parametrized_factors, without_originals
from ckpt_cli.names import few, plural


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the tensors of one kind of adapter are called; ``way`` is what can be done with them elsewhere."""

    kind: str
    way: str
    regex: re.Pattern[str]


def _spelling(kind: str, program: str, expression: str) -> Spelling:
    return Spelling(kind, f"merge them with {program}", re.compile(expression, re.ASCII))


PEFT_PARTS = {
    "ADALORA": "lora_E|ranknum", "ADAMSS": "adamss_", "ADAPTION_PROMPT": "adaption_", "BEFT": "beft_", "BOFT": "boft_", "C3A": "c3a_",
    "DEFT": "deft_", "DELORA": "delora_", "FOURIERFT": "fourierft_", "FROD": "frod_", "GLORA": "glora_", "GRALORA": "gralora_",
    "HIRA": "hira_", "HRA": "hra_", "IA3": "ia3_", "LILY": "lily_", "LN_TUNING": "ln_tuning_", "LOHA": "hada_", "LOKR": "lokr_",
    "MISS": "miss_|bone_", "OFT": "oft_", "SHIRA": "shira_", "OSF": "osf_", "PEANUT": "peanut_", "POLY": "poly_", "PSOFT": "psoft_",
    "PVERA": "pvera_lambda_", "RANDLORA": "randlora_", "ROAD": "road_", "SHADOW": "shadow_", "SUPERTUNING": "supertuning_",
    "TINYLORA": "tinylora_", "TRAINABLE_TOKENS": "trainable_tokens_", "UNILORA": "unilora_", "VBLORA": "vblora_",
    "VERA": "vera_", "WAVEFT": "waveft_", "XLORA": "xlora_|internal_xlora_",
}  # fmt: skip
"""How the parts of names begin that PEFT's methods put into a model, by ``peft_type``; methods without any are in `PROMPTS`."""

PROMPTS = frozenset({"CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"})
"""Methods of PEFT that train tokens before the text, whose tensors lie beside the model."""

LOADED = "load them with PEFT: they cannot be merged into weights"

CANONICAL = r"(adapter_\w+\.)?"
"""Part of Megatron-Bridge's canonical LoRA, with an adapter for each of the matrices that Megatron stores as one (q, k, v; gate, up)."""

UNDER_PEFT = r"(.*\.)?base_model\.(.*\.)?"
SPELLINGS = (
    *(_spelling(f"PEFT's {kind}", "PEFT", rf"{UNDER_PEFT}({parts})\w*(\..*)?") for kind, parts in PEFT_PARTS.items() if kind != "ADALORA"),
    _spelling("PEFT's AdaLoRA", "PEFT", r"(.*\.)?(lora_E|ranknum)(\..*)?"),
    Spelling(
        "PEFT's prompt tuning",
        LOADED,
        re.compile(r"prompt_embeddings|prompt_encoder\.[^.]+\.(embedding\.weight|(mlp_head|lstm_head|transform)\..*)", re.ASCII),
    ),
    _spelling("LoHa", "LyCORIS or PEFT", r"(.*[._])?hada_(w[12]|t[12])(_[ab])?([._].*)?"),
    _spelling("LoKr", "LyCORIS or PEFT", r"(.*[._])?lokr_(w[12]|t2)(_[ab])?([._].*)?"),
    _spelling("LoRA by kohya's scripts or diffusers", "the program that made them", r"(.*[._])?lora_(up|down|mid)([._].*)?"),
    _spelling("LoRA by diffusers", "diffusers", r"(.*[._])?lora\.(up|down)([._].*)?"),
    _spelling("LoRA as minimind has it", "the program that made them", r"(.*\.)?lora\.[AB]\.weight"),
    _spelling("LoRA by mlx-lm", "mlx-lm (mlx_lm.fuse)", r"(.*\.)?lora_[ab]"),
    _spelling("LoRA by torchtune", "torchtune", r"(.*\.)?lora_[ab]\.weight"),
    _spelling("LoRA of grouped layers", "the program that made them", r"(.*\.)?lora_[AB](\.[^.]+)?\.(weight|bias)[0-9]+"),
    _spelling(
        "LoRA by NeMo or Megatron-Bridge",
        "NeMo or Megatron-Bridge",
        rf"(.*\.)?(\w+_)?adapter\.{CANONICAL}(linear_(in|out)\.weight|weight_magnitude)",
    ),
)
PARAMETRIZED = Spelling("LoRA in parametrizations of torch", "merge them with the program that made them", re.compile("(?!)"))
"""Known by what is not beside them: see `parametrized_factors`."""

HINTS = re.compile("|".join((r"base_model\.", "lora", "ranknum", "hada_", "lokr_", "prompt_e", r"adapter\.(adapter_|linear_|weight_m)")))
"""One of these is in every such name, and looking for it is many times as fast."""

OF_FACTORS = re.compile(
    r"(.*\.)?(alpha|scale|scalar|dora_scale|m|magnitude|bias|lora_(A|B|embedding_[AB]|magnitude_vector)(\..*)?)", re.ASCII
)
"""What lies beside factors and is none itself."""

WRAPPED = ("base", "base_layer", "frozen", "linear", "org_module", "orig", "original", "to_wrap", "wrapped")
"""What wrappers call the module that they adapt."""

LEAST_RATIO = 8
"""How many times a matrix is at least as wide as the rank, where only shapes tell that it is a factor."""


@dataclass(frozen=True, slots=True)
class OtherAdapters:
    """The tensors of adapters of one kind; ``alone``: a component holds nothing else."""

    spelling: Spelling
    names: tuple[str, ...]
    alone: bool

    @property
    def text(self) -> str:
        """What they are."""
        if self.alone:
            return f"these are adapters, not a model: {plural(len(self.names), 'tensor')} of {self.spelling.kind}"
        return f"beside the weights are adapters: {plural(len(self.names), 'tensor')} of {self.spelling.kind}"

    @property
    def cure(self) -> str:
        return f"{self.spelling.way}, or pass --lora keep to write the tensors as they are"


def other_kind(name: str) -> Spelling | None:
    """The kind of adapter that a tensor is a factor of, by its name; None for weights and for PEFT's LoRA.

    >>> [kind.kind if (kind := other_kind(name)) else None for name in ("q.lora_a", "base_model.model.q.oft_R.weight", "q.lora_A.weight")]
    ['LoRA by mlx-lm', "PEFT's OFT", None]
    """
    if HINTS.search(outside(name)) is None:
        return None
    return next((spelling for spelling in SPELLINGS if spelling.regex.fullmatch(outside(name))), None)


def other_adapters(names: Iterable[str]) -> OtherAdapters | None:
    """The adapters of another kind among tensors, by their names; of several kinds those of the first."""
    listed = list(names)
    found = dict.fromkeys(without_originals(parametrized_factors(listed), listed), PARAMETRIZED)
    others = []
    for name in listed:
        if name in found:
            continue
        if (spelling := other_kind(name)) is not None:
            found[name] = spelling
        else:
            others.append(name)
    if not found:
        return None
    first = next(iter(found.values()))
    own = tuple(name for name, spelling in found.items() if spelling is first)
    return OtherAdapters(first, own, all(OF_FACTORS.fullmatch(name) for name in others))


def like_factors(shapes: Mapping[str, Shape]) -> list[str]:
    """Tensors that are factors of low rank by their shapes, whatever they are called: two whose product is as the weight around them."""
    below: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        if len(shape) == 2:
            parts = name.removesuffix(".weight").split(".")
            for count in (len(parts) - 1, len(parts) - 2):
                if count > 0:
                    below.setdefault(".".join(parts[:count]), []).append(name)
    found: list[str] = []
    for module, held in below.items():
        weight = next((each for each in _weights_of(module) if len(shapes.get(each, ())) == 2), None)
        inner = [name for name in held if name != weight and name.removesuffix(".weight").rpartition(".")[2] not in WRAPPED]
        if weight is not None and len(inner) == 2 and _multiply(shapes[inner[0]], shapes[inner[1]], shapes[weight]):
            found += inner
    return found


def factors_alone(shapes: Mapping[str, Shape]) -> int | None:
    """The rank of factors by their shapes alone where nothing else is there: pairs of matrices in modules of their own, all of one rank.

    None for anything else, and for a single pair, which may be a model of two layers. That experts are wider inside is no low rank.
    """
    pairs: dict[str, list[Shape]] = {}
    for name, shape in shapes.items():
        pairs.setdefault(name.removesuffix(".weight").rpartition(".")[0], []).append(shape)
    ranks: set[int] = set()
    for pair in pairs.values():
        if len(pair) != 2 or any(len(shape) != 2 for shape in pair):
            return None
        (a, b), (c, d) = pair
        inner = {side for side, other in ((a, d), (b, c)) if side == other}
        found = {rank for rank in inner if LEAST_RATIO * rank <= min({a, b, c, d} - {rank}, default=0)}
        ranks = found if not ranks else ranks & found
        if not ranks:
            return None
    return min(ranks) if len(pairs) > 1 else None


def factors_alone_text(count: int, rank: int) -> str:
    """What is said of them."""
    return (
        f"all {count} tensors are pairs of matrices of rank {rank}, as factors of adapters are: if they are adapters, this is no model, "
        "and the program that made them has to merge them"
    )


def like_factors_text(names: Iterable[str]) -> str:
    """What is said of tensors that are factors by their shapes alone."""
    told = list(names)
    pairs = plural(len(told) // 2, "pair")
    return (
        f"{few(told, 2)}: by their shapes {pairs} of factors around weights, as adapters have; they are not fused, "
        "and what loads the model without the code of its training leaves them out"
    )


def _weights_of(module: str) -> Iterator[str]:
    yield f"{module}.weight"
    yield from (f"{module}.{word}.weight" for word in WRAPPED)


def _multiply(first: Shape, second: Shape, weight: Shape) -> bool:
    """Whether two matrices of low rank give one of a weight's shape."""
    rows, columns = weight
    for a, b in ((first, second), (second, first)):
        for inner, outer in ((a, b), (a[::-1], b[::-1])):
            if inner[1] == columns and outer[0] == rows and inner[0] == outer[1] and inner[0] * 2 <= min(rows, columns):
                return True
    return False
