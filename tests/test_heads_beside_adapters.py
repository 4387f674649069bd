"""A head alone under the name of a model, as TRL (up to 0.11) and trlx leave it beside an adapter, is not taken for the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests import tiny

HEAD = {"v_head.summary.weight": torch.rand(1, 16), "v_head.summary.bias": torch.zeros(1)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An adapter, its base and the head that was trained with it."""
    base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.classless())
    folder = tiny.adapter(tmp_path / "saved", tiny.factors(), base)
    torch.save(HEAD, folder / "pytorch_model.bin")
    return folder


class TestHeadBesideAnAdapter:
    def test_is_left_out_and_the_adapter_is_fused(self, saved: Path, tmp_path: Path) -> None:
        merged = ckpt_cli.merge(saved, tmp_path / "out", base=tmp_path / "base")
        assert merged.outputs[0].lora is not None
        assert any("pytorch_model.bin" in note.text and note.level == "warning" for note in merged.checkpoint.notes)
        assert not {note.code for note in merged.checkpoint.notes} & {"other-model"}

    def test_is_no_rival_of_it(self, saved: Path) -> None:
        checked = ckpt_cli.verify(saved)
        assert checked.exit_code == 0
        assert not {"other-model", "adapter-on-top"} & {item.code for item in checked.findings}

    def test_that_is_passed_itself_is_read_and_told_from_a_model(self, saved: Path, tmp_path: Path) -> None:
        assert set(ckpt_cli.load_state_dict(saved / "pytorch_model.bin")) == set(HEAD)
        with pytest.raises(Inconsistent, match="head alone") as refused:
            ckpt_cli.merge(saved / "pytorch_model.bin", tmp_path / "out", base=tmp_path / "base")
        assert "adapter" in str(refused.value.hint)

    def test_is_none_where_the_file_holds_a_model(self, saved: Path) -> None:
        torch.save({**HEAD, "model.norm.weight": torch.ones(16)}, saved / "pytorch_model.bin")
        with pytest.warns(UserWarning, match="adapter_model"):
            assert "model.norm.weight" in ckpt_cli.load_state_dict(saved)

    def test_without_an_adapter_is_what_there_is(self, tmp_path: Path) -> None:
        torch.save(HEAD, tmp_path / "pytorch_model.bin")
        assert set(ckpt_cli.load_state_dict(tmp_path)) == set(HEAD)
