"""Parameters of classes of their own: filled where they hold a plain weight, otherwise refused by name, also inside of DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import ckpt_cli
from ckpt_cli.errors import Unsupported

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "DeprecationWarning")]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save({"a": torch.ones(4, 2)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def of(values: Any) -> nn.Module:
    model = nn.Module()
    model.register_parameter("a", nn.Parameter(values, requires_grad=False))
    return model


def two() -> TwoTensor:
    return TwoTensor(torch.zeros(4, 2), torch.zeros(4, 2))


def test_a_class_of_its_own_is_refused_by_name(path: Path) -> None:
    with pytest.raises(Unsupported, match="a TwoTensor cannot be filled") as raised:
        ckpt_cli.load_into(of(two()), path)
    assert raised.value.tensor == "a"


def test_inside_of_a_dtensor_too(path: Path, mesh: DeviceMesh) -> None:
    with pytest.raises(Unsupported, match="a TwoTensor inside of a DTensor cannot be filled") as raised:
        ckpt_cli.load_into(of(DTensor.from_local(two(), mesh, [Shard(0)], run_check=False)), path)
    assert raised.value.tensor == "a"


def test_a_dtensor_whose_collective_has_not_been_waited_for_is_filled(path: Path, mesh: DeviceMesh) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    waiting = AsyncCollectiveTensor(torch.zeros(4, 2))
    model = of(DTensor.from_local(waiting, mesh, [Shard(0)], run_check=False))
    ckpt_cli.load_into(model, path)
    assert torch.equal(model.a.full_tensor(), torch.ones(4, 2))


@pytest.mark.parametrize("distributed", [False, True])
def test_weights_of_float8_training_are_filled(distributed: bool, path: Path, mesh: DeviceMesh) -> None:
    """As torchao gives FSDP2 a weight that it casts when it is gathered; a scale beside it would stay that of the weight before."""
    utils = pytest.importorskip("torchao.float8.fsdp_utils")
    wrapped = utils.WeightWithDynamicFloat8CastTensor(torch.zeros(4, 2), None, torch.float8_e4m3fn)
    model = of(DTensor.from_local(wrapped, mesh, [Shard(0)], run_check=False) if distributed else wrapped)
    ckpt_cli.load_into(model, path)
    inner = model.a._local_tensor if distributed else model.a
    assert type(inner).__name__ == "WeightWithDynamicFloat8CastTensor"
    assert torch.equal(inner._tensor, torch.ones(4, 2))
    inner._precomputed_scale = torch.tensor(2.0)
    with pytest.raises(Unsupported, match="it holds _tensor, _precomputed_scale"):
        ckpt_cli.load_into(model, path)
