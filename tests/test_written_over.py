"""Weights that were saved into an output of ckpt, and manifests that were copied into the folder of other weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import OutputExists
from ckpt_cli.files.manifest import NAME
from tests.cli import ckpt_fork as ckpt
from tests.tensors import Tensors, load
from tests.tiny import config, folder, verl, weights

WEIGHTS = "model.safetensors"


def saved(path: Path, tensors: Tensors, *, later: float = 60) -> None:
    """Weights as a training saves them, some time after what lies there."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / WEIGHTS, metadata={"format": "pt"})
    newest = (path / NAME).stat().st_mtime + later if (path / NAME).exists() else None
    if newest is not None:
        os.utime(path / WEIGHTS, (newest, newest))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folder(tmp_path / "sft" / "checkpoint-7", weights(), config())


@pytest.fixture
def output(source: Path, tmp_path: Path) -> Path:
    ckpt_cli.merge(source, tmp_path / "merged")
    return tmp_path / "merged"


TRAINED = {
    "in another dtype": {name: tensor.bfloat16() for name, tensor in weights(5).items()},
    "in the same dtype": weights(5),
    "with other names": {name.replace("model.", "net."): tensor for name, tensor in weights(5).items()},
    "but for frozen matrices": {name: weights(5 if "norm" in name or "self_attn" in name else 0)[name] for name in weights()},
}


class TestWeightsThatWereTrainedInAnOutput:
    @pytest.mark.parametrize("how", TRAINED)
    def test_are_not_replaced(self, source: Path, output: Path, how: str) -> None:
        saved(output, TRAINED[how])
        with pytest.raises(OutputExists, match="saved again since"):
            ckpt_cli.merge(source, output, overwrite=True)
        held = load(output)
        assert held.keys() == TRAINED[how].keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in TRAINED[how].items())

    @pytest.mark.parametrize("how", TRAINED)
    def test_are_not_removed_by_watch(self, tmp_path: Path, how: str) -> None:
        for step in (1, 2):
            verl(tmp_path / "run", weights(step), config(), step=step)
        ckpt_cli.watch(tmp_path / "run", tmp_path / "out", once=True, settle=0)
        (first, *_) = sorted((tmp_path / "out").glob("*1"))
        saved(first, TRAINED[how])
        verl(tmp_path / "run", weights(3), config(), step=3)
        ckpt_cli.watch(tmp_path / "run", tmp_path / "out", once=True, settle=0, keep=1)
        assert first.is_dir()

    def test_are_no_output_for_verify_to_write_again(self, output: Path) -> None:
        saved(output, TRAINED["in another dtype"])
        shown = ckpt("verify", output)
        assert shown.code == 1
        assert "--overwrite" not in shown.out + shown.err
        assert "remove ckpt-manifest.json" in (shown.out + shown.err).splitlines()[-1]
        # What the hint says is true.
        (output / NAME).unlink()
        (output / "config.json").write_text(json.dumps(config(torch_dtype="bfloat16")))
        assert ckpt_cli.verify(output).ok


class TestWhatCkptWrote:
    def test_is_replaced(self, source: Path, output: Path) -> None:
        assert ckpt_cli.merge(source, output, overwrite=True).outputs[0].replaced

    @pytest.mark.parametrize("later", [-60, 60])
    def test_is_replaced_where_it_was_copied(self, source: Path, output: Path, later: float) -> None:
        copy = Path(shutil.copytree(output, output.with_name("copy")))
        newest = (copy / NAME).stat().st_mtime + later
        os.utime(copy / WEIGHTS, (newest, newest))
        assert ckpt_cli.merge(source, copy, overwrite=True).outputs[0].replaced

    @pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
    def test_is_replaced_where_it_is_damaged(self, source: Path, output: Path, damage: str) -> None:
        raw = bytearray((output / WEIGHTS).read_bytes())
        if damage == "flipped":
            raw[-9] ^= 0x40
        (output / WEIGHTS).write_bytes(raw if damage == "flipped" else raw[: len(raw) // 2 if damage == "cut" else 0])
        shown = ckpt("verify", output, "--full")
        assert shown.code == 1
        assert (shown.out + shown.err).splitlines()[-1].endswith("--overwrite --verify")
        assert ckpt_cli.merge(source, output, overwrite=True).outputs[0].replaced
        assert ckpt_cli.verify(output, full=True)


class TestTheManifestOfAnotherFolder:
    """torchtune copies all side files of its base into every epoch, and so do people with `cp base/*.json`."""

    def test_says_nothing_of_parts(self, output: Path, tmp_path: Path) -> None:
        step = folder(tmp_path / "epoch_0", None)
        held, parts = weights(5), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        names = list(held)
        for part, own in zip(parts, (names[:9], names[9:]), strict=True):
            save_file({name: held[name] for name in own}, step / part, metadata={"format": "pt"})
        listed = ", ".join(f'"{name}": "{parts[at >= 9]}"' for at, name in enumerate(names))
        (step / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {' + listed + "}}")
        shutil.copy(output / NAME, step)
        result = ckpt_cli.verify(step)
        assert result.ok
        assert [item.code for item in result.findings if item.severity == "warning"] == ["other-manifest"]
        assert ckpt_cli.merge(step, tmp_path / "out").outputs[0].tensors == len(held)

    def test_says_nothing_of_files_of_ranks(self, output: Path, tmp_path: Path) -> None:
        home = verl(tmp_path / "run", weights(5), config())
        shutil.copy(output / NAME, home)
        assert ckpt_cli.verify(home).ok
        assert ckpt_cli.verify(home).tensors == len(weights())
        os.unlink(home / "model_world_size_1_rank_0.pt")
        shutil.copytree(output, tmp_path / "lost")
        (tmp_path / "lost" / WEIGHTS).unlink()
        # Of lost weights it still tells.
        assert "missing-file" in {item.code for item in ckpt_cli.verify(tmp_path / "lost").findings}

    def test_says_nothing_of_a_step_of_the_same_name(self, output: Path, tmp_path: Path) -> None:
        step = folder(tmp_path / "run" / "checkpoint-200", {name: tensor.bfloat16() for name, tensor in weights(5).items()})
        older = folder(tmp_path / "run" / "checkpoint-100", weights(4))
        assert older.is_dir()
        shutil.copy(output / NAME, step)
        assert ckpt_cli.detect(tmp_path / "run").checkpoint.step == 200
        with pytest.raises(OutputExists):
            ckpt_cli.merge(output, step, overwrite=True)
        shown = ckpt("verify", step)
        assert "--overwrite" not in shown.out + shown.err


def test_the_command_itself_says_so(source: Path, output: Path) -> None:
    saved(output, TRAINED["in another dtype"])
    done = ckpt("merge", source, "-o", output, "--overwrite")
    assert done.code not in (0, 1)
    assert "move the folder away" in done.err
