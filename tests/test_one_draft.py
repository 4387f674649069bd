"""What `merge` and `average` check alike: whatever one of them refuses or tells of an output, the other does too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

import ckpt_cli
from ckpt_cli.errors import Inconsistent, OutputInsideSource, UsageError, Warned
from tests import tiny
from tests.test_completeness import save_ranks
from tests.test_torn import model, tear

NORM = "model.norm.weight"

Write = Callable[..., Any]


def merged(sources: list[Path], output: Path, **options: Any) -> Any:
    """The newest of the checkpoints, merged."""
    return ckpt_cli.merge(sources[-1], output, **options)


both = pytest.mark.parametrize("write", [merged, ckpt_cli.average], ids=["merge", "average"])


def notes(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes}


def without_norm(tmp_path: Path) -> list[Path]:
    """Two models that lack their last norm."""
    held = [{name: tensor for name, tensor in tiny.weights(seed).items() if name != NORM} for seed in (1, 2)]
    return [tiny.folder(tmp_path / f"{seed}", tensors) for seed, tensors in enumerate(held, 1)]


@both
class TestTensorsOfTheBase:
    def test_whose_replicas_differ_are_refused(self, write: Write, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", None)
        for rank in (0, 1):
            own = {NORM: tiny.weights()[NORM] + rank}
            torch.save({**tiny.weights(), **own}, base / f"model_world_size_2_rank_{rank}.pt")
        options: dict[str, Any] = {"base": base, "carry_from_base": NORM}
        with pytest.raises(Inconsistent, match="different values of what should be replicas") as caught:
            write(without_norm(tmp_path), tmp_path / "out", **options)
        assert caught.value.tensor == NORM
        assert not (tmp_path / "out").exists()
        allowed = write(without_norm(tmp_path), tmp_path / "out", allow_unequal_replicas=True, **options)
        assert "those of rank 0 were used" in notes(allowed)["replicas-differ"]

    @pytest.mark.parametrize("hole", [False, True], ids=["zeros", "hole"])
    def test_of_a_file_whose_copy_did_not_end_are_told(self, write: Write, hole: bool, tmp_path: Path) -> None:
        sources = [model(tmp_path / name) for name in ("a", "b")]
        base = model(tmp_path / "base", **{"layers.3.proj.weight": torch.randn(600, 1000)})
        tear(base / "model.safetensors", 0.5 if hole else 0.9, hole=hole)
        result = write(sources, tmp_path / "out", base=base, carry_from_base="layers.3.*")
        assert ("unwritten-weights" if hole else "zero-tail") in notes(result)
        with pytest.raises(Warned):
            write(sources, tmp_path / "strict", base=base, carry_from_base="layers.3.*", strict=True)

    def test_bring_the_adapters_that_are_in_them(self, write: Write, tmp_path: Path) -> None:
        """An output with weights of a base that an adapter was fused into holds that adapter too."""
        plain = tiny.folder(tmp_path / "plain", tiny.weights())
        adapter = tiny.adapter(tmp_path / "adapter", tiny.factors(), plain)
        ckpt_cli.merge(adapter, tmp_path / "base", base=plain)
        write(without_norm(tmp_path), tmp_path / "out", base=tmp_path / "base", carry_from_base=NORM)
        fused = [
            json.loads((folder / "ckpt-manifest.json").read_text())["fused_adapters"] for folder in (tmp_path / "base", tmp_path / "out")
        ]
        assert len(fused[0]) == 1
        assert fused[0] == fused[1]
        with pytest.raises(Inconsistent, match="already holds this adapter"):
            ckpt_cli.merge(adapter, tmp_path / "twice", base=tmp_path / "out")


@both
def test_an_adapter_file_without_factors_is_refused(write: Write, tmp_path: Path) -> None:
    adapters = [tiny.adapter(tmp_path / name, {"base_model.model.score.weight": torch.ones(2, 4)}, "x") for name in ("a", "b")]
    with pytest.raises(Inconsistent, match="no LoRA factors"):
        write(adapters, tmp_path / "out")


@both
def test_a_side_file_never_replaces_the_weights(write: Write, tmp_path: Path) -> None:
    """BAGEL's image decoder is passed on as it is, so that weights cannot have its name."""
    sources = [tiny.folder(tmp_path / name, tiny.weights(seed)) for seed, name in enumerate(("a", "b"))]
    for source in sources:
        (source / "llm_config.json").write_text("{}")
        save_file({"decoder.weight": torch.ones(2)}, source / "ae.safetensors")
    with pytest.raises(UsageError, match=r"ae\.safetensors means something else"):
        write(sources, tmp_path / "out", weights_name="ae.safetensors")
    result = write(sources, tmp_path / "out")
    assert "ae.safetensors" in result.outputs[0].assets
    manifest = json.loads((tmp_path / "out/ckpt-manifest.json").read_text())
    assert "ae.safetensors" not in manifest["outputs"]
    assert "ae.safetensors" in manifest["side_files"]


@both
def test_a_file_that_a_loader_reads_under_its_own_name_is_told(write: Write, tmp_path: Path) -> None:
    sources = [tiny.folder(tmp_path / name, tiny.weights(seed), files={"llm_config.json": {}}) for seed, name in enumerate(("a", "b"))]
    assert "the file that BAGEL's loader reads" in notes(write(sources, tmp_path / "out"))["weights-name"]


@both
@pytest.mark.parametrize("inside", ["", "actor", "actor/huggingface"])
def test_the_output_never_lies_in_a_folder_of_another_node(write: Write, inside: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_ranks(run / "global_step_7/actor", 2, {"w": ([0, 1], [Shard(0)], torch.ones(2, 3))})
    shutil.copytree(run / "global_step_7", run / "global_step_8")
    other = tmp_path / "other"
    for step in (7, 8):
        home = other / f"global_step_{step}" / "actor"
        (home / "huggingface").mkdir(parents=True)
        shutil.move(run / f"global_step_{step}/actor/model_world_size_2_rank_1.pt", home)
    options: dict[str, Any] = {"everything": True} if write is ckpt_cli.average else {"step": 8}
    with pytest.raises(OutputInsideSource):
        write([run], other / "global_step_8" / inside / "out", also=other, **options)
