"""What Megatron saves beside its tensors: arguments, iteration, scheduler; from ``common.pt``, ``common_state`` or a legacy file.

Everything is read as plain values. ``args`` is an ``argparse.Namespace`` with 380 (core 0.10) to 650 entries, some of them enums
of Megatron's own, which stay what they are: names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_cli.errors import CorruptFile
from ckpt_cli.files.pickle_nodes import Call, as_dict, attributes
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.unused.search import DataSearch, Unused
from ckpt_cli.tensors.plain_values import ValueReader

ARGS = "args"
ITERATION = "iteration"
SCHEDULER = "opt_param_scheduler"
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
}
"""What Megatron's arguments call the numbers of ranks (of chunks per rank: vpp) among which a model is cut."""

SHOWN = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "vocab_size",
    "padded_vocab_size", "num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq", "swiglu", "add_qkv_bias",
    "qk_layernorm", "multi_latent_attention", "normalization", "rotary_base", "untie_embeddings_and_output_weights", "transformer_impl",
    "use_distributed_optimizer", "ckpt_format", "world_size", "iteration", "consumed_train_samples",
)  # fmt: skip
"""Arguments that say what the weights are."""


@dataclass(frozen=True, slots=True)
class Common:
    """``values``: everything but the arguments, ``arguments``: theirs, by name; empty where there are none, as of verl."""

    values: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def iteration(self) -> int | None:
        """The iteration of the save; None if it does not say it."""
        found = self.values.get(ITERATION)
        return found if type(found) is int else None

    def size(self, name: str) -> int | None:
        """One of `SIZES`, None if the arguments do not say it."""
        found = self.arguments.get(SIZES[name])
        return found if type(found) is int and found > 0 else None


def read_common(file: TorchFile, wanted: Callable[[str], object] = lambda _: True) -> Common:
    """The dict of a file; an item of DCP holds it as the only one of a list. ``wanted`` says which keys are read. Raises CorruptFile."""
    entries = entries_of(file)
    reader = ValueReader(file)
    kept = {str(key): node for key, node in entries.items() if key != ARGS and wanted(str(key))}
    return Common({key: reader.read(node) for key, node in kept.items()}, read_arguments(entries.get(ARGS), reader))


def entries_of(file: TorchFile) -> Mapping[Any, Any]:
    """The dict of such a file, whose values are nodes. Raises CorruptFile."""
    root = file.root[0] if isinstance(file.root, list) and len(file.root) == 1 else file.root
    entries = as_dict(root)
    if entries is None:
        raise CorruptFile("it holds no dict of Megatron's state", expected="a dict with args and iteration")
    return entries


def unused_in(entries: Mapping[Any, Any]) -> Unused:
    """What of such a dict may be needed with the weights: nothing of Megatron's own."""
    return DataSearch().unused({key: node for key, node in entries.items() if key != ARGS})


def read_arguments(node: Any, reader: ValueReader) -> dict[str, Any]:
    """The arguments of a run: a Namespace, or a dict of them."""
    fields: Mapping[Any, Any] | None = as_dict(node)
    if isinstance(node, Call) and node.is_("argparse", "Namespace"):
        fields = attributes(node.state) if node.state is not None else {}
    return {str(name): reader.read(value) for name, value in (fields or {}).items()}
