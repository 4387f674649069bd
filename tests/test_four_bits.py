"""float4: two values share a byte. torch counts bytes, safetensors counts values; the bytes are copied, never cast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

import ckpt_cli
from ckpt_cli.errors import CkptError, Unsupported
from tests.cli import ckpt_fork as ckpt

BYTES = torch.arange(24, dtype=torch.uint8).reshape(3, 8)
float4 = getattr(torch, "float4_e2m1fn_x2", None)

pytestmark = pytest.mark.skipif(float4 is None, reason="this version of torch has no float4")


def raw(folder: Path, shape: list[int], code: str = "F4", data: bytes = bytes(range(12))) -> Path:
    """A file with one tensor, written by hand."""
    header = json.dumps({"w": {"dtype": code, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder


def held(folder: Path) -> tuple[str, list[int], bytes]:
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    (entry,) = (value for name, value in json.loads(content[8 : 8 + length]).items() if name != "__metadata__")
    return entry["dtype"], entry["shape"], content[8 + length :]


def test_a_file_of_the_library_is_written_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").write_bytes(save({"w": BYTES.view(float4)}))
    ckpt_cli.merge(tmp_path / "m", tmp_path / "out")
    assert held(tmp_path / "out") == held(tmp_path / "m") == ("F4", [3, 16], bytes(range(24)))
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert file.get_slice("w").get_shape() == [3, 16]


def test_of_a_pickle_it_is_what_the_library_would_write(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    torch.save({"w": BYTES.view(float4), "v": torch.ones(2)}, tmp_path / "m" / "pytorch_model.bin")
    ckpt_cli.merge(tmp_path / "m", tmp_path / "out", exclude="v")
    assert held(tmp_path / "out") == ("F4", [3, 16], bytes(range(24)))


def test_it_is_verified_and_compared(tmp_path: Path) -> None:
    ckpt_cli.merge(raw(tmp_path / "m", [2, 12]), tmp_path / "out")
    assert ckpt_cli.verify(tmp_path / "out", against=tmp_path / "m", full=True).exit_code == 0
    assert ckpt_cli.diff(tmp_path / "m", tmp_path / "out").identical
    other = raw(tmp_path / "other", [2, 12], data=bytes(range(1, 13)))
    assert not ckpt_cli.diff(other, tmp_path / "out").identical
    for command in ("detect", "inspect"):
        assert ckpt(command, tmp_path / "out").code == 0


def test_it_is_not_cast(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="F4 values are meaningless without their scales"):
        ckpt_cli.merge(raw(tmp_path / "m", [2, 12]), tmp_path / "out", dtype="bf16")


def test_it_is_not_averaged(tmp_path: Path) -> None:
    with pytest.raises(CkptError):
        ckpt_cli.average([raw(tmp_path / "a", [2, 12]), raw(tmp_path / "b", [2, 12], data=bytes(12))], tmp_path / "out")


@pytest.mark.parametrize(("shape", "data"), [([8, 3], bytes(12)), ([], bytes(1)), ([1], bytes(1))])
def test_half_a_byte_is_refused(tmp_path: Path, shape: list[int], data: bytes) -> None:
    with pytest.raises(Unsupported, match="F4 is only read in whole bytes"):
        ckpt_cli.merge(raw(tmp_path / "m", shape, data=data), tmp_path / "out")


@pytest.mark.parametrize("code", ["F6_E2M3", "F6_E3M2"])
def test_six_bits_are_refused_with_the_reason(tmp_path: Path, code: str) -> None:
    with pytest.raises(Unsupported, match=f"dtype {code} is not read: its values are not whole bytes"):
        ckpt_cli.merge(raw(tmp_path / "m", [4, 4], code), tmp_path / "out")


@pytest.mark.parametrize(("code", "shape"), [("F8_E8M0", [3, 4]), ("C64", [1]), ("F8_E4M3FNUZ", [12])])
def test_other_codes_of_the_library_are_copied(tmp_path: Path, code: str, shape: list[int]) -> None:
    data = bytes(range(8 if code == "C64" else 12))
    ckpt_cli.merge(raw(tmp_path / "m", shape, code, data), tmp_path / "out")
    assert held(tmp_path / "out") == (code, shape, data)
