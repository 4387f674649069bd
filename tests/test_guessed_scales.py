"""Adapters without adapter_config.json: --lora-alpha says neither how alpha was used nor for which modules, so what is taken is told."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import Undecidable
from tests.cli import ckpt_fork
from tests.tensors import load

RSLORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "use_rslora": True}


def trained(folder: Path, *ranks: int, **files: dict[str, Any]) -> Path:
    """A checkpoint of linear layers with adapters of these ranks, and JSON files beside it by their stems."""
    folder.mkdir()
    held = {}
    for number, rank in enumerate(ranks):
        held[f"m{number}.base_layer.weight"] = torch.ones(4, 6)
        held |= {f"m{number}.lora_A.default.weight": torch.ones(rank, 6), f"m{number}.lora_B.default.weight": torch.ones(4, rank)}
    save_file({f"base_model.model.{name}": tensor for name, tensor in held.items()}, folder / "model.safetensors")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def warned(notes: Any) -> dict[str, str]:
    return {note.code: note.text for note in notes if note.code.startswith("lora-") and note.level == "warning"}


class TestRankStabilisation:
    @pytest.mark.parametrize("lora", [None, "export"])
    def test_both_scales_are_told_where_no_config_says_which(self, tmp_path: Path, lora: Any) -> None:
        run = trained(tmp_path / "run", 4)
        text = warned(ckpt_cli.merge(run, tmp_path / "out", lora_alpha=16, lora=lora).outputs[0].notes)["lora-plain"]
        assert "alpha / r = 4" in text
        assert "alpha / sqrt(r) = 8" in text
        assert "pass --lora-alpha 32 " in text

    def test_what_it_says_to_pass_gives_the_other_scale(self, tmp_path: Path) -> None:
        for rank in (2, 8):
            run = trained(tmp_path / f"run{rank}", rank)
            text = warned(ckpt_cli.merge(run, tmp_path / "a", overwrite=True, lora_alpha=16).outputs[0].notes)["lora-plain"]
            alpha = float(text.partition("--lora-alpha ")[2].split()[0])
            ckpt_cli.merge(run, tmp_path / "b", overwrite=True, lora_alpha=alpha)
            ckpt_cli.merge(trained(tmp_path / f"said{rank}", rank, adapter_config=RSLORA | {"r": rank}), tmp_path / "c", overwrite=True)
            assert torch.allclose(load(tmp_path / "b")["m0.weight"], load(tmp_path / "c")["m0.weight"], rtol=1e-7)

    def test_of_several_ranks_no_one_number_would_do(self, tmp_path: Path) -> None:
        run = trained(tmp_path / "run", 4, 2)
        text = warned(ckpt_cli.merge(run, tmp_path / "out", lora_alpha=16).outputs[0].notes)["lora-plain"]
        assert "--lora-alpha" not in text
        assert "copy that file of the training into the checkpoint" in text
        (run / "adapter_config.json").write_text(json.dumps(RSLORA | {"rank_pattern": {"m1": 2}}))
        done = ckpt_cli.merge(run, tmp_path / "then").outputs[0]
        assert not warned(done.notes)
        assert done.lora is not None
        assert done.lora.scales[0] == 8

    @pytest.mark.parametrize(
        ("ranks", "files"),
        [
            ((1, 1), {}),
            ((4,), {"adapter_config": {"peft_type": "LORA", "r": 4}}),
            ((4,), {"adapter_config": {"peft_type": "LORA", "r": 4, "use_rslora": False}}),
            ((4,), {"lora_train_meta": {"r": 4, "lora_alpha": 0}}),
        ],
    )
    def test_nothing_is_told_where_it_is_known(self, tmp_path: Path, ranks: tuple[int, ...], files: Any) -> None:
        done = ckpt_cli.merge(trained(tmp_path / "run", *ranks, **files), tmp_path / "out", lora_alpha=16)
        assert not warned(done.outputs[0].notes)

    def test_the_hint_says_it_too(self, tmp_path: Path) -> None:
        with pytest.raises(Undecidable) as raised:
            ckpt_cli.merge(trained(tmp_path / "run", 4), tmp_path / "out")
        assert "times sqrt(r) if it used rank stabilisation" in str(raised.value.hint)
        with pytest.raises(Undecidable) as raised:
            ckpt_cli.merge(trained(tmp_path / "said", 4, adapter_config={"peft_type": "LORA", "use_rslora": True}), tmp_path / "out")
        assert "sqrt" not in str(raised.value.hint)

    def test_whoever_reads_is_told(self, tmp_path: Path) -> None:
        run = trained(tmp_path / "run", 4)
        with ckpt_cli.open(run, lora_alpha=16) as opened:
            assert "lora-plain" in warned(opened.notes)
        with pytest.warns(UserWarning, match="pass --lora-alpha 32") as told:
            ckpt_cli.load_state_dict(run, lora_alpha=16)
        assert told[0].filename == __file__
        model = torch.nn.ModuleDict({"m0": torch.nn.Linear(6, 4, bias=False)})
        assert "lora-plain" in warned(ckpt_cli.load_into(model, run, lora_alpha=16).notes)
        ckpt_cli.merge(run, tmp_path / "out", lora_alpha=16)
        assert "lora-plain" in warned(ckpt_cli.verify(tmp_path / "out", against=run, lora_alpha=16).notes)
        (run / "adapter_config.json").write_text(json.dumps(RSLORA))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckpt_cli.load_state_dict(run)


class TestAlphas:
    @pytest.mark.parametrize("lora", [None, "export"])
    def test_one_alpha_for_ranks_that_differ_is_told(self, tmp_path: Path, lora: Any) -> None:
        run = trained(tmp_path / "run", 4, 4, 8)
        text = warned(ckpt_cli.merge(run, tmp_path / "out", lora_alpha=16, lora=lora).outputs[0].notes)["lora-alpha"]
        assert "(r 4, 8)" in text
        assert "alpha 16 (--lora-alpha) is taken for all" in text

    def test_a_config_without_patterns_of_alpha_says_that_there_is_one(self, tmp_path: Path) -> None:
        run = trained(tmp_path / "run", 4, 8, adapter_config={"peft_type": "LORA", "r": 4, "lora_alpha": 16, "rank_pattern": {"m1": 8}})
        assert not warned(ckpt_cli.merge(run, tmp_path / "out").outputs[0].notes)

    def test_patterns_that_an_option_overrules_are_named(self, tmp_path: Path) -> None:
        said = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "alpha_pattern": {"m1": 4}}
        done = ckpt_cli.merge(trained(tmp_path / "run", 4, 4, adapter_config=said), tmp_path / "out", lora_alpha=16)
        assert "alpha_pattern of adapter_config.json is passed over" in warned(done.outputs[0].notes)["lora-alpha"]

    def test_the_screen_has_all_alphas(self, tmp_path: Path) -> None:
        said = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "alpha_pattern": {"m1": 4}}
        run = trained(tmp_path / "run", 4, 4, adapter_config=said)
        assert "alpha 4-16 (adapter_config.json), scale 1-4" in ckpt_fork("merge", run, "-o", tmp_path / "out").out
        assert "alpha 4-16 (adapter_config.json)" in ckpt_fork("verify", tmp_path / "out", "--against", run).out
