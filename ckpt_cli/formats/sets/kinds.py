"""How programs name the files of a set: which number is a rank, a shard or a part, and who writes such names."""

from __future__ import annotations

import re
from dataclasses import dataclass

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".th", ".ckpt", ".pth.tar")
"""Endings of files of weights."""

MAX_DIGITS = 12
MAX_PARTS = 1 << 20
SHOWN = 5
OF_ALL = -1
"""In place of the number of a rank: the file of what all of them share."""

AFTER_SUFFIX = re.compile(r".+\.(pt|pth|bin|ckpt)\.(rank(?P<part>\d+)|global)", re.ASCII)
"""Tutel's files: the experts of each rank and what all ranks share, ``ckpt.pth.rank0`` and ``ckpt.pth.global``."""

SMALL = 8
"""Numbers below this are ranks even without a neighbour: other kinds of rank (of a decomposition) are mostly larger."""


@dataclass(frozen=True, slots=True)
class SetKind:
    """A naming scheme for the files of a set: ``part`` is a number in the expression, ``parts`` how many there are, if names say it.

    ``content_decides``: part 0 without siblings may be the whole model, which `sets.contents` finds out.
    """

    regex: re.Pattern[str]
    writer: str
    unit: str
    content_decides: bool = False


def set_kind(expression: str, writer: str, unit: str = "rank", content_decides: bool = False) -> SetKind:
    return SetKind(re.compile(expression, re.ASCII | re.IGNORECASE), writer, unit, content_decides)


VLLM, FAIRSEQ = "vLLM's sharded_state", "fairseq"
WAYS = {
    VLLM: "use the model folder that it was made from, or load it in vLLM with load_format='sharded_state'",
    FAIRSEQ: "put the shards together where metaseq is installed: metaseq/scripts/consolidate_fsdp_shards.py",
}
"""What to do with the set of a program that has a way of its own."""

TUTEL = SetKind(AFTER_SUFFIX, "a model with Tutel's experts", "rank")
TUTEL_SHARED = SetKind(AFTER_SUFFIX, "a model with Tutel's experts", "shared")
WHOLE_NAMES = (
    set_kind(r"consolidated\.(?P<part>\d+)\.(pth|pt|safetensors)", "Meta's format", "part", content_decides=True),
    set_kind(r"(model|weights)\.(?P<part>\d{2})\.safetensors", "MLX", "part", content_decides=True),
    set_kind(r"model-rank-(?P<part>\d+)-part-\d+\.safetensors", VLLM),
    set_kind(r"checkpoint[\w.-]*?-shard(?P<part>\d+)\.pt", FAIRSEQ, "shard"),
    set_kind(r"model(?P<part>\d+)-mp(?P<parts>\d+)\.safetensors", "DeepSeek's inference code", "part"),
    set_kind(r"model_[a-z_]+_pp-rank-(?P<part>\d+)-of-\d+_tp-rank-\d+-of-\d+\.safetensors", "a Nanotron checkpoint", "parameter"),
    set_kind(r"(pytorch_)?model-(?P<part>\d{5})\.(bin|safetensors)", "a model in parts", "part"),
)

OF = set_kind(r"(?<!\d)(?P<part>\d+)[-_. ]?of[-_. ]?(?P<parts>\d+)(?!\d)", "a model in parts", "part")
COUNTER = re.compile(
    r"(?<![a-z])(epochs?|steps?|folds?|seeds?|runs?|iter(ation)?s?|rounds?|checkpoints?|ckpts?|trials?|best|top)[-_. ]?", re.IGNORECASE
)
"""Words before "N of M" that make it a count of complete files (epochs, runs), not of parts."""

NUMBERED = re.compile(r"-\d{5}-of-\d{5}(?!\d)", re.ASCII)
"""How transformers and accelerate number parts, whatever comes before."""

PART_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{1,60})-of-(?P<parts>\d{1,60})(?P<suffix>\.safetensors|\.bin)", re.ASCII)
RANK = set_kind(r"(?<![a-z])([a-z]{1,9}[-_])?rank[-_. ]?(?P<part>\d+)(?!\d)", "one rank each")
SHARD = set_kind(r"(?<![a-z])shard[-_. ]?(?P<part>\d+)(?!\d)", "shards", "shard")
OF_WORLD = set_kind(r"rank_world_size=(?P<part>\d+)_(?P<parts>(?!0*1(?!\d))\d+)", "Picotron")
"""It says of each kind of parallelism rank and size: ``weights_tp_rank_world_size=0_2_pp_rank_world_size=0_1.pth``."""

MARKS = (
    OF_WORLD,
    RANK,
    SHARD,
    set_kind(r"(?<![a-z])part(ition)?[-_. ]?(?P<part>\d+)(?!\d)", "a model in parts", "part"),
    set_kind(r"(?<![a-z])(tp|pp|wp|sdp|(pp|pipe(line)?)[-_]?stage|[a-z]{1,9}[-_]parallel)[-_. ]?(?P<part>\d+)(?!\d)", "model parallelism"),
)
"""Marks anywhere in a name; ``wp`` is InternEvo's weight parallelism, ``sdp`` fairseq2's sharded data parallelism."""

WEAK = set_kind(
    r"(?<![a-z])(mp|dp|worker|node|host|proc(ess)?|device|gpu|chunk|split|slice|piece|fragment|consolidated|layers?|block|experts?)"
    r"[-_. ]?(?P<part>\d+)(?!\d)",
    "files that differ in a number",
    "part",
)
"""Marks that count only beside a sibling with a neighbouring number, or number 0."""

TORCHTUNE = set_kind(r"hf_model_(?P<part>\d{4})_\d+\.(pt|bin|safetensors)", "torchtune", "part")
"""Part and epoch, as torchtune named them before it wrote "N of M". Number 1 alone may be all of a small model."""

RANK_FOLDER = re.compile(r"(?=.*rank)((mp|tp|pp|ep|etp|dp)_rank_\d+_?|_?\d+)+", re.ASCII)
"""``mp_rank_00_001``, ``tp_rank_00_pp_rank_000``: where Megatron and NeMo put the file of one rank."""

OUTSIDE = SetKind(re.compile(r"non[-_]tp\.(pt|pth|bin|safetensors)"), "a DeepSpeed checkpoint for inference", "rest")
"""What is not in the layers that DeepSpeed cuts among ranks: ``non-tp.pt`` beside ``tp_00_00.pt``, also of one rank."""

SHARED = SetKind(re.compile(r"(?P<stem>.+[-_.])(shared|non[-_]?experts?)(?P<suffix>\.[a-z.]+)"), "what ranks share", "shared")
"""What all ranks have alike, beside the experts of each (fairseq): ``checkpoint_2-shared.pt`` beside ``checkpoint_2-rank-0.pt``."""

BY_CONTENT = frozenset({"model_optim_rng.pt"})
"""Names of files whose content is enough, so their folder is not considered."""

UNIVERSAL = re.compile(r"(fp32|exp_avg|exp_avg_sq|step)\.pt", re.ASCII)
"""What a DeepSpeed universal checkpoint has per parameter: ``zero/<parameter>/fp32.pt``."""


ONE_WRITER = re.compile(r"world[-_]?size[-_]?0*1(?!\d)", re.ASCII | re.IGNORECASE)
OF_PROCESSES = re.compile(r"(?<![a-z])(tp|pp|dp|ep|cp|sp|mp|ddp|fsdp|zero|local|global|world)[-_]rank[-_. ]?$", re.IGNORECASE)
"""Ranks of parallelism, not of a decomposition."""

ADAPTERS = re.compile(r"lora|dora|locon|lokr|loha|adapter", re.IGNORECASE)
"""In names of adapters, "rank32" is mostly the rank of the factors."""


ITEM = re.compile(r"(?P<item>model|ema|policy|actor|critic)_(?P<rank>[0-9]{1,7})\.(?P<suffix>pt|safetensors)", re.ASCII)
"""What torch_checkpointing calls a rank's file of an item that holds weights, and others that of an epoch: content tells."""
