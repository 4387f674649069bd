"""Every argument that a run of Megatron-LM records is compared, read elsewhere, shown by tensors, or without effect on what weights are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Unsupported
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.megatron.common import read_common
from ckpt_cli.formats.megatron.step import Step
from ckpt_cli.hub.megatron.settings import SETTINGS
from tests.megatron import arguments, write_legacy
from tests.megatron_arguments import BY_ANOTHER, READ_ELSEWHERE, SHOWN_BY_TENSORS, WITHOUT_EFFECT
from tests.tensors import Tensors, load

GROUPS = (READ_ELSEWHERE, SHOWN_BY_TENSORS, BY_ANOTHER, WITHOUT_EFFECT)


def recorded(folder: Path) -> set[str]:
    """The names of the arguments in the steps of a folder."""
    found: set[str] = set()
    files = Files()
    for path in folder.rglob("*"):
        if path.name == "model_optim_rng.pt":
            found |= read_common(TorchFile(files.source(path)), lambda _: False).arguments.keys()
        elif path.name == ".metadata":
            found |= Step.opened((path.parent,), files).common.arguments.keys()
    return found


def test_every_argument_of_a_run_has_one_place(data: Path) -> None:
    rows = {row.name for row in SETTINGS}
    assert len(rows) == len(SETTINGS)
    names = recorded(data / "megatron")
    assert len(names) > 800
    places = {
        name: (name in rows) + sum(any(re.fullmatch(pattern, name) for pattern in group.split()) for group in GROUPS) for name in names
    }
    assert {name: count for name, count in places.items() if count != 1} == {}


def interleaved(fused: torch.Tensor, size: int) -> torch.Tensor:
    """Gate and up in alternating blocks of rows, as a training with ``moe_mlp_glu_interleave_size`` holds them."""
    half = fused.shape[0] // 2
    rows = [part + first for first in range(0, half, size) for part in (0, half)]
    order = np.concatenate([np.arange(row, row + size) for row in rows])
    return fused[torch.from_numpy(order)].contiguous()


@pytest.mark.parametrize("name", ["moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"])
@pytest.mark.parametrize("with_base", [True, False])
def test_interleaved_rows_are_not_cut_in_halves(name: str, with_base: bool, data: Path, tmp_path: Path) -> None:
    case = data / "megatron" / "legacy-qwen3moe-ep2"
    weights: Tensors = {
        key: interleaved(tensor, 2) if "local_experts" in key and "linear_fc1" in key else tensor
        for key, tensor in load(case / "expected_native.safetensors").items()
    }
    args = arguments(
        num_experts=4,
        moe_ffn_hidden_size=12,
        moe_router_topk=2,
        qk_layernorm=True,
        layernorm_epsilon=1e-6,
        moe_router_pre_softmax=json.loads((case / "config.json").read_text()).get("norm_topk_prob") is not True,
        **{name: 2},
    )
    write_legacy(tmp_path / "run", weights, args, [[2]])
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text((case / "config.json").read_text())
    with pytest.raises(Unsupported, match=name):
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=tmp_path / "base" if with_base else None)
    ckpt_cli.merge(tmp_path / "run", tmp_path / "native", names="native")
    written = load(tmp_path / "native")
    assert all(torch.equal(written[key], tensor) for key, tensor in weights.items())
