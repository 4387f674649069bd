"""Indexes of variants, as ``save_pretrained(variant="ema")`` of transformers and diffusers names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_cli
from ckpt_cli.errors import CkptError
from tests.architectures import MODELS, build

VARIANTS = ["ema", "fp16"]


def saved(folder: Path, variant: str | None) -> Any:
    torch.manual_seed(0)
    model = build(*MODELS["llama"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder, variant=variant, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


@pytest.mark.parametrize("variant", VARIANTS)
class TestAVariantAlone:
    def test_is_merged(self, variant: str, tmp_path: Path) -> None:
        model = saved(tmp_path / "run", variant)
        assert (tmp_path / "run" / f"model.safetensors.index.{variant}.json").is_file()
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        loaded = type(model).from_pretrained(tmp_path / "out").state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())

    def test_is_verified_and_opened_by_its_index(self, variant: str, tmp_path: Path) -> None:
        saved(tmp_path / "run", variant)
        index = tmp_path / "run" / f"model.safetensors.index.{variant}.json"
        assert {item.code for item in ckpt_cli.verify(tmp_path / "run").findings} == {"unloaded-name"}
        with ckpt_cli.open(index) as opened:
            assert "lm_head.weight" in opened

    def test_that_lost_a_part_is_refused(self, variant: str, tmp_path: Path) -> None:
        saved(tmp_path / "run", variant)
        max((tmp_path / "run").glob("*.safetensors")).unlink()
        with pytest.raises(CkptError) as caught:
            ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert caught.value.exit_code == 4

    def test_a_part_of_it_is_no_model(self, variant: str, tmp_path: Path) -> None:
        saved(tmp_path / "run", variant)
        with pytest.raises(CkptError) as caught:
            ckpt_cli.merge(min((tmp_path / "run").glob("*.safetensors")), tmp_path / "out")
        assert caught.value.code == "part-of-set"


@pytest.mark.parametrize("variant", VARIANTS)
def test_beside_the_model_it_is_named_and_not_mixed_with_it(variant: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "run", None)
    before = {path.name for path in (tmp_path / "run").iterdir()}
    saved(tmp_path / "run", variant)
    assert {path.name for path in (tmp_path / "run").iterdir()} > before
    result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    assert f"model.safetensors.index.{variant}.json" in " ".join(note.text for note in result.checkpoint.notes)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in model.state_dict().items() if name in written)
