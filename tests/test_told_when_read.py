"""What a merge says of values is said where they are read: by `open`, `load_state_dict`, `load_into`, `diff` and `verify`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from tests import tiny
from tests.architectures import MODELS, build

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")]


def warnings(notes: Iterable[Any]) -> dict[str, str]:
    return {note.code: note.text for note in notes if note.level == "warning"}


class TestAdaptersThatAreFused:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        torch.manual_seed(0)
        base = build(*MODELS["llama"])
        base.save_pretrained(tmp_path / "base")
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2, lora_alpha=4))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(1.0)
        model.save_pretrained(tmp_path / "adapter")
        return tmp_path

    def told(self, folder: Path) -> list[dict[str, str]]:
        adapter, base = folder / "adapter", folder / "base"
        (merged,) = ckpt_cli.merge(adapter, folder / "out", base=base, dry_run=True).outputs
        with ckpt_cli.open(adapter, base=base) as opened:
            read = opened.notes
        live: Any = build(*MODELS["llama"])
        return [warnings(notes) for notes in (merged.notes, read, ckpt_cli.load_into(live, adapter, base=base).notes)]

    def test_healthy_ones_are_silent(self, folder: Path) -> None:
        _, *reading = self.told(folder)
        assert reading == [{}, {}]

    def test_a_setting_that_is_not_known(self, folder: Path) -> None:
        path = folder / "adapter" / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "use_what_comes_next": True}))
        merged, *reading = self.told(folder)
        assert reading == [{"unknown-setting": merged["unknown-setting"]}] * 2
        assert [item.code for item in ckpt_cli.verify(folder / "adapter").findings if item.severity == "warning"] == ["unknown-setting"]

    def test_that_change_nothing(self, folder: Path) -> None:
        path = folder / "adapter" / "adapter_model.safetensors"
        save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}, path)
        merged, *reading = self.told(folder)
        assert reading == [{"untrained-adapter": merged["untrained-adapter"]}] * 2


class TestAdaptersBesideTheirBase:
    """One state dict of a PeftModel: `verify` looks at the fused weights, as a merge writes them."""

    @pytest.mark.parametrize("settings", [{}, {"use_what_comes_next": True}])
    def test_are_judged_alike_by_merge_and_verify(self, settings: dict[str, Any], tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = peft.get_peft_model(build(*MODELS["llama"]), peft.LoraConfig(target_modules=["q_proj"], r=2, lora_alpha=4))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(1.0)
        model.peft_config["default"].save_pretrained(tmp_path / "run")
        path = tmp_path / "run" / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        torch.save(model.state_dict(), tmp_path / "run" / "pytorch_model.bin")
        (merged,) = ckpt_cli.merge(tmp_path / "run", tmp_path / "out").outputs
        wanted = {"unknown-setting"} if settings else set()
        assert warnings(merged.notes).keys() & {"unknown-setting"} == wanted
        assert warnings(ckpt_cli.verify(tmp_path / "run").notes).keys() & {"unknown-setting"} == wanted
        told = warnings(ckpt_cli.diff(tmp_path / "run", tmp_path / "out").notes)
        assert told.keys() & {"unknown-setting"} == wanted


class TestTensorsThatAreMissing:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        build(*MODELS["llama"]).save_pretrained(tmp_path / "model")
        path = tmp_path / "model" / "model.safetensors"
        tensors = {name: tensor for name, tensor in load_file(path).items() if "layers.1.mlp" not in name}
        save_file(tensors, path, metadata={"format": "pt"})
        return tmp_path / "model"

    def test_are_told_with_a_state_dict(self, folder: Path) -> None:
        with ckpt_cli.open(folder) as opened:
            told = warnings(opened.notes)
        assert told.keys() == {"missing-tensors"}
        assert "model.layers.1.mlp" in told["missing-tensors"]
        with pytest.raises(ckpt_cli.CkptError):
            ckpt_cli.merge(folder, folder.parent / "out")

    def test_are_no_news_where_they_were_left_out(self, folder: Path) -> None:
        with ckpt_cli.open(folder, include="*layers.0*") as opened:
            assert warnings(opened.notes) == {}


def test_layers_that_lack_what_others_have_where_no_class_is_known(tmp_path: Path) -> None:
    stored = {name: tensor for name, tensor in tiny.weights(layers=4).items() if "layers.2.mlp" not in name}
    with ckpt_cli.open(tiny.folder(tmp_path / "model", stored, tiny.classless(num_hidden_layers=4))) as opened:
        assert "model.layers.2 lacks" in warnings(opened.notes)["uneven-layers"]
    with ckpt_cli.open(tmp_path / "model", exclude=["*.layers.1.mlp.*"]) as opened:
        assert "uneven-layers" not in warnings(opened.notes)
