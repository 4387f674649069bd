"""Steps of Megatron: every key becomes the tensors of its layers and experts, under Megatron's names with global numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, Inconsistent, MissingShard, Unsupported
from ckpt_cli.formats.base import Format
from ckpt_cli.formats.megatron.reader import TorchDist
from tests.conftest import Copy
from tests.formats.conformance import Example, FormatConformance
from tests.tensors import cast_floats, differences, load

STEPS = {
    "llama-tp1": "iter_0000030",
    "llama-tp2": "iter_0000020",
    "llama-main-tp2": "iter_0000005",
    "mixtral-ep2": "iter_0000005",
    "qwen2-0.12-dist": "iter_0000005",
    "qwen3-tp2-dp2-fullypar": "iter_0000005",
    "qwen3moe-first-dense": "iter_0000005",
    "verl2-qwen3-tp2-pp2": "global_step_5",
}
"""The steps of torch_dist; in `data/megatron`, beside the tensors that they hold."""


class TestTorchDist(FormatConformance):
    reader: Format = TorchDist()

    def example(self, data: Path) -> Example:
        case = data / "megatron" / "llama-tp2"
        return Example(case / "checkpoint" / "iter_0000020", case / "expected_native.safetensors")

    def test_merging_gives_the_tensors_of_the_training(self, original: Example, folder: Path, tmp_path: Path) -> None:
        """Under Megatron's names; by default they get those of the hub."""
        ckpt_cli.merge(folder, tmp_path / "out", names="native")
        assert differences(load(tmp_path / "out"), load(original.expected)) == []


class TestNativeNames:
    @pytest.mark.parametrize("case", STEPS)
    def test_tensors_are_those_of_one_rank_that_holds_all(self, case: str, data: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(data / "megatron" / case / "checkpoint", tmp_path / "out", names="native")
        assert differences(load(tmp_path / "out"), load(data / "megatron" / case / "expected_native.safetensors")) == []
        assert ckpt_cli.verify(tmp_path / "out", full=True, against=data / "megatron" / case / "checkpoint").against[0].identical

    def test_a_cast_is_torch_s(self, data: Path, tmp_path: Path) -> None:
        case = data / "megatron" / "qwen3-tp2-dp2-fullypar"
        ckpt_cli.merge(case / "checkpoint", tmp_path / "out", type="master", names="native", dtype="bf16")
        masters = {name: (value.float() * (1 + 2**-12)) for name, value in load(case / "expected_native.safetensors").items()}
        assert differences(load(tmp_path / "out"), cast_floats(masters, torch.bfloat16)) == []

    def test_any_file_of_a_step_means_the_step(self, data: Path, tmp_path: Path) -> None:
        case = data / "megatron" / "llama-tp1"
        for number, name in enumerate(("__0_0.distcp", "common.pt", ".metadata")):
            ckpt_cli.merge(case / "checkpoint" / "iter_0000030" / name, tmp_path / f"out{number}", names="native")
            assert differences(load(tmp_path / f"out{number}"), load(case / "expected_native.safetensors")) == []

    @pytest.mark.parametrize("case", ["qwen2-0.12-dist", "qwen3-tp2-dp2-fullypar"])
    def test_masters_are_a_component(self, case: str, data: Path, tmp_path: Path) -> None:
        folder = data / "megatron" / case
        ckpt_cli.merge(folder / "checkpoint", tmp_path / "out", type="master", names="native")
        want = {name: value.float() * (1 + 2**-12) for name, value in load(folder / "expected_native.safetensors").items()}
        assert differences(load(tmp_path / "out"), want) == []

    def test_buckets_hold_no_masters_by_name(self, data: Path, tmp_path: Path) -> None:
        with pytest.raises(CkptError, match="no component master"):
            ckpt_cli.merge(data / "megatron" / "llama-tp2" / "checkpoint", tmp_path / "out", type="master")


class TestFolders:
    def test_what_is_said_of_a_step(self, data: Path) -> None:
        found = ckpt_cli.inspect(data / "megatron" / "llama-main-tp2" / "checkpoint").checkpoint
        (model,) = found.components
        assert (found.framework, found.step, model.mesh, model.world_size) == ("Megatron-LM", 5, "tp=2 x pp=1", 2)
        said = {leaf.name: leaf.text for leaf in model.leaves}
        assert (said["args.num_layers"], said["args.num_query_groups"], said["args.padded_vocab_size"]) == ("2", "2", "64")
        (note,) = [note.text for note in found.notes if note.code == "megatron"]
        assert "iteration 5" in note
        assert "dp_reshardable" in note

    def test_without_arguments_random_states_tell_the_ranks(self, data: Path, tmp_path: Path) -> None:
        """verl saves no arguments; its first layout has weights and random states in one folder."""
        actor = tmp_path / "global_step_5" / "actor"
        shutil.copytree(data / "megatron" / "verl2-qwen3-tp2-pp2" / "checkpoint" / "global_step_5" / "actor" / "model", actor)
        found = ckpt_cli.inspect(actor.parent).checkpoint
        assert (found.framework, found.architecture) == ("verl (Megatron)", "Qwen3ForCausalLM")
        ckpt_cli.merge(actor.parent, tmp_path / "out", names="native")
        want = load(data / "megatron" / "verl2-qwen3-tp2-pp2" / "expected_native.safetensors")
        assert differences(load(tmp_path / "out"), want) == []

    def test_the_step_of_a_converted_model_is_a_run_s_only_without_others(self, data: Path, tmp_path: Path) -> None:
        case = data / "megatron" / "llama-tp1" / "checkpoint"
        shutil.copytree(case / "iter_0000030", tmp_path / "run" / "release")
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("release")
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", names="native")
        assert ckpt_cli.detect(tmp_path / "run").checkpoint.step is None
        shutil.copytree(case / "iter_0000030", tmp_path / "run" / "iter_0000030")
        assert ckpt_cli.detect(tmp_path / "run").checkpoint.step == 30

    def test_nemo_keeps_weights_beside_its_context(self, data: Path, tmp_path: Path) -> None:
        shutil.copytree(data / "megatron" / "llama-tp1" / "checkpoint" / "iter_0000030", tmp_path / "model" / "weights")
        (tmp_path / "model" / "context").mkdir()
        found = ckpt_cli.detect(tmp_path / "model").checkpoint
        assert (found.framework, found.complete) == ("NeMo", True)


class TestDamage:
    @pytest.fixture
    def step(self, copy: Copy) -> Path:
        return copy("megatron", "llama-tp2", "checkpoint") / "iter_0000020"

    def refused(self, step: Path, kind: type[CkptError], *words: str) -> None:
        with pytest.raises(kind) as caught:
            ckpt_cli.merge(step, step.parent.parent / "out", names="native")
        said = f"{caught.value.message} {caught.value.expected} {caught.value.hint} {caught.value.tensor}"
        assert all(word in said for word in words), said
        assert not (step.parent.parent / "out").exists()

    def test_a_missing_file_of_a_rank(self, step: Path) -> None:
        lost = next(path for path in sorted(step.glob("__1_*.distcp")) if path.stat().st_size)
        lost.unlink()
        self.refused(step, MissingShard, lost.name)

    def test_a_save_that_did_not_finish(self, step: Path) -> None:
        (step / "metadata.json").unlink()
        self.refused(step, MissingShard, "metadata.json", "written last")

    def test_another_backend(self, step: Path) -> None:
        (step / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
        self.refused(step, Unsupported, "zarr")

    def test_the_state_of_another_iteration(self, step: Path) -> None:
        self.refused(step.rename(step.with_name("iter_0000010")), Inconsistent, "iteration 10", "20")

    def test_without_metadata_json_and_common_pt_keys_tell(self, copy: Copy) -> None:
        step = copy("megatron", "llama-main-tp2", "checkpoint") / "iter_0000005"
        (step / "metadata.json").unlink()
        self.refused(step, MissingShard, "Megatron torch_dist", "written last")
