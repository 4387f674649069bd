"""BAGEL end to end: a fork's checkpoint and the published base become the folder that BAGEL's loader and training read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests.cli import ckpt_fork as ckpt
from tests.tensors import differences, load


@pytest.fixture
def fork(layouts: Path) -> Path:
    return layouts / "bagel-runs" / "fork_dcp"


@pytest.fixture
def base(layouts: Path) -> Path:
    return layouts / "bagel-runs" / "base"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


class TestBothAgainstTheBase:
    def test_names_shapes_and_dtypes_are_those_of_the_base_and_its_files_stay(self, fork: Path, base: Path, tmp_path: Path) -> None:
        before = digests(base)
        ckpt_cli.merge(fork, tmp_path / "out", type="both", base=base, match_base=True)
        assert digests(base) == before
        wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in load_file(base / "ema.safetensors").items()}
        for file in ("model.safetensors", "ema.safetensors"):
            tensors = load_file(tmp_path / "out" / file)
            assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == wanted
        copied = digests(tmp_path / "out")
        for name in (
            "ae.safetensors",
            "llm_config.json",
            "vit_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ):
            assert copied[name] == before[name]

    def test_values_are_those_of_the_training_rounded_once(self, fork: Path, base: Path, layouts: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(fork, tmp_path / "out", type="both", base=base, match_base=True)
        for kind, file in (("model", "model.safetensors"), ("ema", "ema.safetensors")):
            expected = load(layouts / "bagel-runs" / f"expected-fork_dcp-{kind}-as-base.safetensors")
            got = load_file(tmp_path / "out" / file)
            rounded = {name: tensor.to(torch.bfloat16) for name, tensor in expected.items()}
            assert differences(got, rounded) == []

    def test_the_index_leads_to_the_file_that_the_loader_reads(self, fork: Path, base: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(fork, tmp_path / "out", type="both", base=base, match_base=True)
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {"ema.safetensors"}
        assert list(index["weight_map"]) == list(ckpt_cli.inspect(base).groups) or len(index["weight_map"]) == 54

    def test_one_component_alone_is_called_as_the_loader_wants_it(self, fork: Path, base: Path, tmp_path: Path) -> None:
        for kind in ("model", "ema"):
            result = ckpt_cli.merge(fork, tmp_path / kind, type=kind, base=base, match_base=True)
            assert [file.name for file in result.outputs[0].files] == ["ema.safetensors", "model.safetensors.index.json"]

    def test_never_split_unless_asked(self, fork: Path, base: Path, tmp_path: Path) -> None:
        result = ckpt_cli.merge(fork, tmp_path / "out", type="ema", base=base, max_shard_size=8000)
        assert len(result.outputs[0].files) > 2


class TestWhatTheRunLacks:
    def test_an_ema_from_the_model_only_on_request(self, layouts: Path, tmp_path: Path) -> None:
        run = Path(shutil.copytree(layouts / "bagel-runs" / "fork_dcp", tmp_path / "run"))
        shutil.rmtree(run / "0000006" / "ema_sharded")
        with pytest.raises(ckpt_cli.CkptError, match="no component ema"):
            ckpt_cli.merge(run, tmp_path / "out", type="ema")
        ckpt_cli.merge(run, tmp_path / "out", type="both", ema_from_model=True)
        assert differences(load_file(tmp_path / "out" / "ema.safetensors"), load_file(tmp_path / "out" / "model.safetensors")) == []

    def test_a_tensor_that_the_base_has_is_missed_and_filled_only_on_request(self, fork: Path, base: Path, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        larger = Path(shutil.copytree(base, tmp_path / "base"))
        os.chmod(larger / "ema.safetensors", 0o644)
        tensors = load_file(base / "ema.safetensors") | {"more.weight": torch.ones(3, dtype=torch.bfloat16)}
        save_file(tensors, larger / "ema.safetensors", metadata={"format": "pt"})
        (larger / "model.safetensors.index.json").unlink()
        with pytest.raises(Inconsistent, match=r"lacks 1 of the base's 55 tensors: more\.weight"):
            ckpt_cli.merge(fork, tmp_path / "out", base=larger, match_base=True)
        result = ckpt_cli.merge(fork, tmp_path / "out", base=larger, match_base=True, fill_missing_from_base=True)
        assert "filled" in [note.code for note in result.outputs[0].notes]
        assert torch.equal(load_file(tmp_path / "out" / "ema.safetensors")["more.weight"], torch.ones(3, dtype=torch.bfloat16))


class TestComparison:
    def test_numbers_are_those_of_numpy(self, fork: Path, base: Path, tmp_path: Path) -> None:
        result = ckpt_cli.merge(fork, tmp_path / "out", type="ema", base=base, match_base=True, compare=True)
        comparison = result.outputs[0].comparison
        assert comparison is not None
        mine, theirs = load_file(tmp_path / "out" / "ema.safetensors"), load_file(base / "ema.safetensors")
        drifts = {drift.name: drift for drift in comparison.drifts}
        for name, tensor in mine.items():
            delta = (tensor.double() - theirs[name].double()).abs()
            if delta.max() == 0:
                assert name not in drifts
            else:
                assert drifts[name].changed == int((delta != 0).sum())
                assert drifts[name].max_abs == pytest.approx(float(delta.max()), rel=1e-12)
                assert drifts[name].mean_abs == pytest.approx(float(delta.mean()), rel=1e-12)
        assert comparison.unchanged == len(mine) - len(drifts)


def test_its_own_output_is_not_taken_for_a_newer_save(layouts: Path, tmp_path: Path) -> None:
    """The output has an index beside its file, and lies beside the steps."""
    run = Path(shutil.copytree(layouts / "bagel-runs" / "official", tmp_path / "run"))
    ckpt_cli.merge(run, type="ema", base=layouts / "bagel-runs" / "base")
    (output,) = run.glob("*_merged_ema")
    assert (output / "model.safetensors.index.json").exists()
    told = [note.text for note in ckpt_cli.detect(run).checkpoint.notes if note.level == "warning" and output.name in note.text]
    assert told == []


def test_the_output_of_one_component_does_not_take_the_name_of_another(layouts: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(layouts / "bagel-runs" / "official", tmp_path / "run"))
    ckpt_cli.merge(run, type="ema", base=layouts / "bagel-runs" / "base")
    assert f"next: ckpt merge {run} --dry-run" in ckpt("detect", run).err
    assert f"-o {run}/0000006_merged_2 --dry-run" in ckpt("detect", run, "--type", "ema").err
