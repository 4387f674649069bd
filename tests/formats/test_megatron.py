"""Steps of Megatron: every key becomes the tensors of its layers and experts, under Megatron's names with global numbers."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, Gap, Inconsistent, MissingShard, Unsupported
from ckpt_cli.formats.base import Format
from ckpt_cli.formats.megatron.reader import TorchDist
from tests.conftest import Copy
from tests.formats.conformance import Example, FormatConformance
from tests.megatron import arguments, write_legacy
from tests.tensors import Tensors, cast_floats, differences, load

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

    def test_without_arguments_random_states_tell_the_ranks(self, data: Path) -> None:
        """verl saves no arguments."""
        found = ckpt_cli.inspect(data / "megatron" / "verl2-qwen3-tp2-pp2" / "checkpoint").checkpoint
        assert (found.framework, found.components[0].mesh) == ("verl (Megatron)", "tp=2 x pp=2")

    def test_verl_s_first_layout(self, data: Path, tmp_path: Path) -> None:
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

    @pytest.mark.parametrize("case", ["qwen3-tp2-dp2-fullypar", "legacy-qwen2-te-tp2"])
    def test_nodes_keep_files_of_their_own(self, case: str, data: Path, tmp_path: Path) -> None:
        folder = data / "megatron" / case
        for number, lacking in enumerate(
            (("__2_*", "__3_*", "mp_rank_01"), ("__0_*", "__1_*", "*.json", ".metadata", "common.pt", "mp_rank_00"))
        ):
            shutil.copytree(folder / "checkpoint", tmp_path / "nodes" / f"node{number}", ignore=shutil.ignore_patterns(*lacking))
        first, second = (tmp_path / "nodes" / f"node{number}" for number in (0, 1))
        with pytest.raises(MissingShard):
            ckpt_cli.merge(first, tmp_path / "out", names="native")
        ckpt_cli.merge(first, tmp_path / "one", also=second, names="native")
        ckpt_cli.merge(second, tmp_path / "two", also=first, names="native")
        ckpt_cli.merge(tmp_path / "nodes", tmp_path / "three", names="native")
        for name in ("one", "two", "three"):
            assert differences(load(tmp_path / name), load(folder / "expected_native.safetensors")) == [], name

    def test_verl_may_save_the_weights_as_a_hub_folder(self, data: Path, tmp_path: Path) -> None:
        """With mbridge ``dist_ckpt`` holds only optimizer and random states, or is not there at all."""
        case = data / "megatron" / "verl2-qwen3-tp2-pp2"
        extra = case / "checkpoint" / "global_step_5" / "actor" / "extra" / "dist_ckpt"
        hub = tmp_path / "global_step_5" / "actor" / "huggingface"
        hub.mkdir(parents=True)
        shutil.copy(case / "expected_hf.safetensors", hub / "model.safetensors")
        shutil.copy(case / "config.json", hub)
        ckpt_cli.merge(tmp_path, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(case / "expected_hf.safetensors")) == []
        shutil.copytree(extra, hub.parent / "dist_ckpt")
        with pytest.raises(CorruptFile) as caught:
            ckpt_cli.merge(hub.parent, tmp_path / "again")
        assert caught.value.hint == f"pass {hub}, which holds weights"
        ckpt_cli.merge(hub, tmp_path / "again")

    def test_nemo_keeps_weights_beside_its_context(self, data: Path, tmp_path: Path) -> None:
        shutil.copytree(data / "megatron" / "llama-tp1" / "checkpoint" / "iter_0000030", tmp_path / "model" / "weights")
        (tmp_path / "model" / "context").mkdir()
        found = ckpt_cli.detect(tmp_path / "model").checkpoint
        assert (found.framework, found.complete) == ("NeMo", True)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
class TestMegatronFsdp:
    """`fsdp_dtensor`: an ordinary DCP folder with Megatron's names, gate and up apart."""

    def test_it_is_read_by_its_arguments(self, data: Path, tmp_path: Path) -> None:
        case = data / "megatron" / "llama-tp2"
        weights = {f"module.{name}": tensor for name, tensor in load(case / "expected_native.safetensors").items()}
        for name in [name for name in weights if name.endswith("linear_fc1.weight")]:
            weights |= dict(zip((f"{name}_w", f"{name}_v"), weights.pop(name).chunk(2), strict=True))
        args = arguments(num_layers=3)
        state = {"model": weights, "args": args, "checkpoint_version": 3.0, "iteration": 8}
        dcp.save(state, checkpoint_id=str(tmp_path / "run" / "iter_0000008"), no_dist=True)
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(case / "expected_hf.safetensors")) == []
        assert (result.checkpoint.framework, result.checkpoint.architecture) == ("Megatron-FSDP", "LlamaForCausalLM")


class TestState:
    @pytest.mark.parametrize(("case", "slot"), [("qwen2-0.12-dist", "fp32_param"), ("qwen3-tp2-dp2-fullypar", "param")])
    def test_an_optimizer_by_name(self, case: str, slot: str, data: Path, tmp_path: Path) -> None:
        folder = data / "megatron" / case
        result = ckpt_cli.extract_state(folder / "checkpoint", tmp_path / "out", optimizer=True)
        want: Tensors = {}
        for name, stored in load(folder / "expected_native.safetensors").items():
            value = stored.float()
            want |= {f"state.{name}.exp_avg": 0.1 * value, f"state.{name}.exp_avg_sq": 0.001 * value * value}
            want[f"state.{name}.{slot}"] = value * (1 + 2**-12)
        found = load(tmp_path / "out" / "optimizer.safetensors")
        assert found.keys() == want.keys()
        assert all(torch.allclose(found[name], want[name], rtol=1e-6, atol=0) for name in want)
        assert result.optimizer is not None
        groups = json.loads((tmp_path / "out" / "optimizer.json").read_text())["param_groups"]
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]

    @pytest.mark.parametrize("case", ["llama-tp2", "llama-main-tp2"])
    def test_buckets_are_refused(self, case: str, data: Path, tmp_path: Path) -> None:
        with pytest.raises(Unsupported, match="buckets"):
            ckpt_cli.extract_state(data / "megatron" / case / "checkpoint", tmp_path / "out", optimizer=True)

    @pytest.mark.parametrize(
        ("case", "ranks", "scheduler"),
        [("llama-main-tp2", 2, True), ("mixtral-ep2", 2, False), ("legacy-qwen3moe-ep2", 2, False), ("verl2-qwen3-tp2-pp2", 4, False)],
    )
    def test_random_states_scheduler_and_arguments(self, case: str, ranks: int, scheduler: bool, data: Path, tmp_path: Path) -> None:
        result = ckpt_cli.extract_state(data / "megatron" / case / "checkpoint", tmp_path / "out")
        assert (result.ranks, result.random) == (ranks, ("cpu", "numpy", "random", "cuda"))
        extra = torch.load(tmp_path / "out" / "extra_state_merged.pt", weights_only=True)
        states = [extra[f"rng_rank_{rank}"]["torch_rng_state"] for rank in range(ranks)]
        assert all(state.dtype == torch.uint8 for state in states)
        assert len({tuple(extra[f"rng_rank_{rank}"]["random_rng_state"][1]) for rank in range(ranks)}) == ranks
        assert (tmp_path / "out" / "lr_scheduler_state.json").exists() == scheduler
        if not case.startswith("verl"):
            args = json.loads((tmp_path / "out" / "args.json").read_text())
            assert args["num_layers"] == 2
            assert args["attention_backend"] == {"not represented": "object(megatron.core.transformer.enums.AttnBackend)"}
            assert result.training["counters"]["iteration"] == 5

    def test_a_legacy_optimizer_is_refused(self, tmp_path: Path) -> None:
        weights = {"embedding.word_embeddings.weight": torch.ones(64, 24)}
        write_legacy(tmp_path / "run", weights, arguments(num_layers=0), [[0]], extra={"optimizer": {"state": {}}})
        with pytest.raises(Unsupported, match="numbered"):
            ckpt_cli.extract_state(tmp_path / "run", tmp_path / "out", optimizer=True)


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


class TestPlanted:
    """Calls in pickles are names, wherever they are."""

    @pytest.mark.parametrize("place", ["args", "iteration", "an argument"])
    def test_a_call_in_common_pt_runs_nothing(self, place: str, copy: Copy, tmp_path: Path) -> None:
        case = copy("megatron", "llama-tp2")
        path = case / "checkpoint" / "iter_0000020" / "common.pt"
        bomb = Bomb(tmp_path / "marker")
        args = arguments(num_layers=3, exit_signal=bomb)
        torch.save({"args": args, "iteration": 20, **({place: bomb} if place != "an argument" else {})}, path)
        ckpt_cli.merge(case / "checkpoint", tmp_path / "out", names="native")
        ckpt_cli.extract_state(case / "checkpoint", tmp_path / "state")
        ckpt_cli.inspect(case / "checkpoint")
        assert differences(load(tmp_path / "out"), load(case / "expected_native.safetensors")) == []
        assert not (tmp_path / "marker").exists()

    def test_a_call_in_place_of_the_state(self, copy: Copy, tmp_path: Path) -> None:
        path = copy("megatron", "llama-tp2", "checkpoint") / "iter_0000020" / "common.pt"
        torch.save(Bomb(tmp_path / "marker"), path)
        with pytest.raises(CorruptFile) as caught:
            ckpt_cli.merge(path.parent, tmp_path / "out")
        assert str(caught.value.path) == str(path)
        assert not (tmp_path / "marker").exists()

    @pytest.mark.parametrize("key", ["model", "args"])
    def test_a_call_in_a_legacy_file(self, key: str, tmp_path: Path) -> None:
        weights = {"embedding.word_embeddings.weight": torch.ones(64, 24)}
        step = write_legacy(tmp_path / "run", weights, arguments(num_layers=0), [[0]], extra={"rng_state": Bomb(tmp_path / "marker")})
        ckpt_cli.extract_state(step, tmp_path / "state")
        path = step / "mp_rank_00" / "model_optim_rng.pt"
        content = {"args": arguments(), "checkpoint_version": 3.0, "iteration": 7, "model": weights}
        torch.save({**content, key: Bomb(tmp_path / "marker")}, path)
        with pytest.raises(CkptError) as caught:
            ckpt_cli.merge(step, tmp_path / "out")
        assert str(caught.value.path) == str(path)
        assert not (tmp_path / "marker").exists()


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

    def test_a_lost_stage(self, step: Path) -> None:
        """Metadata that lists no chunk of the last layer: sizes are global, so that it shows."""
        key = "decoder.layers.mlp.linear_fc2.weight"
        metadata = pickle.loads((step / ".metadata").read_bytes())
        entry = metadata.state_dict_metadata[key]
        entry.chunks = [chunk for chunk in entry.chunks if chunk.offsets[0] != entry.size[0] - 1]
        (step / ".metadata").write_bytes(pickle.dumps(metadata))
        self.refused(step, Gap, key)

    def test_a_save_that_did_not_finish(self, step: Path) -> None:
        (step / "metadata.json").unlink()
        self.refused(step, MissingShard, "metadata.json", "written last")

    def test_another_backend(self, step: Path) -> None:
        (step / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
        self.refused(step, Unsupported, "zarr")
        for path in step.iterdir():
            path.unlink()
        (step / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
        (step / "decoder.final_layernorm.weight").mkdir()
        self.refused(step, Unsupported, "zarr")
        assert ckpt_cli.detect(step.parent).problem

    def test_the_state_of_another_iteration(self, step: Path) -> None:
        self.refused(step.rename(step.with_name("iter_0000010")), Inconsistent, "iteration 10", "20")

    def test_without_metadata_json_and_common_pt_keys_tell(self, copy: Copy) -> None:
        step = copy("megatron", "llama-main-tp2", "checkpoint") / "iter_0000005"
        (step / "metadata.json").unlink()
        self.refused(step, MissingShard, "Megatron torch_dist", "written last")
