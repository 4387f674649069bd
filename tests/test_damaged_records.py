"""A record of a torch file that is read whole is compared with its CRC-32, by whatever reads it; `open` and its like do so if asked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_cli
from ckpt_cli.errors import CorruptFile
from tests import tiny
from tests.cli import ckpt_fork as ckpt

SAID = "not those that were saved"
LARGE = "b.weight"
"""A tensor of more than one tile; `c.weight` is stored transposed."""


def damaged(file: Path, tensor: torch.Tensor) -> None:
    """One bit of a tensor in the file is another one than was saved."""
    stored = tensor.untyped_storage()
    raw = bytes(stored.tolist()) if stored.nbytes() < 1 << 16 else tensor.contiguous().numpy().tobytes()
    content = file.read_bytes()
    at = content.index(raw) + len(raw) // 2
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.randn(6, 4), LARGE: torch.randn(1 << 11, 1 << 10), "c.weight": torch.randn(5, 7).T}


@pytest.fixture(params=["a.weight", LARGE, "c.weight"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def file(name: str, tensors: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    torch.save(tensors, tmp_path / "sound.pt")
    shutil.copy(tmp_path / "sound.pt", tmp_path / "model.pt")
    damaged(tmp_path / "model.pt", tensors[name])
    return tmp_path / "model.pt"


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in (("a", (6, 4)), ("b", (1 << 11, 1 << 10)), ("c", (7, 5))):
            layer = nn.Module()
            layer.register_parameter("weight", nn.Parameter(torch.zeros(shape, dtype=dtype)))
            self.add_module(name, layer)


OPENED: list[Callable[..., Any]] = [
    lambda file, name, **how: ckpt_cli.open(file, **how)[name].numpy(),
    lambda file, name, **how: ckpt_cli.open(file, **how)[name].to("bf16").torch(),
    lambda file, name, **how: ckpt_cli.open(file, **how)[name][:].numpy(),
    lambda file, name, **how: ckpt_cli.load_state_dict(file, **how),
    lambda file, name, **how: ckpt_cli.load_state_dict(file, dtype="fp16", **how),
    lambda file, name, **how: ckpt_cli.load_into(Net(), file, **how),
    lambda file, name, **how: ckpt_cli.load_into(Net(torch.bfloat16), file, **how),
]


class TestValuesInPython:
    @pytest.mark.parametrize("number", range(len(OPENED)))
    def test_are_those_that_were_saved_if_that_is_asked(self, number: int, name: str, file: Path) -> None:
        with pytest.raises(CorruptFile, match=SAID) as caught:
            OPENED[number](file, name, checksum=True)
        assert (caught.value.tensor, caught.value.path) == (name, str(file))
        OPENED[number](file, name)
        OPENED[number](file.with_name("sound.pt"), name, checksum=True)

    def test_are_not_compared_where_a_part_is_read(self, name: str, file: Path, tensors: dict[str, torch.Tensor]) -> None:
        part = ckpt_cli.open(file, checksum=True)[name][:2, :3].torch()
        assert torch.equal(part, tensors[name][:2, :3])


class TestNumbersAboutValues:
    def test_are_of_those_that_were_saved(self, name: str, file: Path) -> None:
        sound = file.with_name("sound.pt")
        for call in (
            lambda path: ckpt_cli.inspect(path, stats=True),
            lambda path: ckpt_cli.diff(path, sound),
            lambda path: ckpt_cli.diff(sound, path),
        ):
            with pytest.raises(CorruptFile, match=SAID) as caught:
                call(file)
            assert caught.value.tensor == name

    def test_of_a_tensor_that_is_shown_whole(self, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
        torch.save(tensors, tmp_path / "model.pt")
        damaged(tmp_path / "model.pt", tensors["a.weight"])
        done = ckpt("show", tmp_path / "model.pt", "a.weight")
        assert (done.code, done.out) == (3, "")
        assert SAID in done.err
        assert ckpt_cli.show(tmp_path / "model.pt", "a.weight", part=":2").shown == (2, 4)

    def test_are_a_finding_of_verify(self, name: str, file: Path) -> None:
        sound = file.with_name("sound.pt")
        for path, base in ((file, sound), (sound, file)):
            result = ckpt_cli.verify(path, base=base)
            assert ("wrong-checksum", "error", name) in {(item.code, item.severity, item.tensor) for item in result.findings}
            assert result.comparison is None
        assert {item.tensor for item in ckpt_cli.verify(file, base=sound, full=True).findings if item.code == "wrong-checksum"} == {name}


@pytest.mark.parametrize("where", ["base", "adapter"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_what_an_adapter_is_fused_from(where: str, dtype: str | None, tmp_path: Path) -> None:
    """Neither the weights of the base nor the factors pass through the writer as they are."""
    weights, factors = tiny.weights(1), tiny.factors()
    base = tiny.folder(tmp_path / "base", None, tiny.unknown())
    torch.save(weights, base / "pytorch_model.bin")
    adapter = tiny.adapter(tmp_path / "adapter", factors, base)
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(factors, adapter / "adapter_model.bin")
    ckpt_cli.merge(adapter, tmp_path / "sound", base=base, dtype=dtype)
    if where == "base":
        damaged(base / "pytorch_model.bin", weights["model.layers.0.self_attn.q_proj.weight"])
    else:
        damaged(adapter / "adapter_model.bin", factors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"])
    with pytest.raises(CorruptFile, match=SAID):
        ckpt_cli.merge(adapter, tmp_path / "out", base=base, dtype=dtype)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CorruptFile, match=SAID):
        ckpt_cli.load_state_dict(adapter, base=base, checksum=True)
