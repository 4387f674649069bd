"""Legacy steps of Megatron: the files of all ranks are joined by the arguments in them, or refused."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent, MissingShard, Unsupported
from tests.conftest import Copy
from tests.megatron import arguments, write_legacy
from tests.tensors import Tensors, differences, load

CASES = ("legacy-qwen2-te-tp2", "legacy-qwen3moe-ep2")
LAYERS = 4


def model(layers: int = LAYERS, **tops: torch.Tensor) -> Tensors:
    """A Llama under Megatron's names, as local layers have them."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weights = {"embedding.word_embeddings.weight": normal(64, 24)}
    for layer in range(layers):
        prefix = f"decoder.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": normal(24),
            f"{prefix}self_attention.linear_qkv.weight": normal(64, 24),
            f"{prefix}self_attention.linear_proj.weight": normal(24, 32),
            f"{prefix}pre_mlp_layernorm.weight": normal(24),
            f"{prefix}mlp.linear_fc1.weight": normal(40, 24),
            f"{prefix}mlp.linear_fc2.weight": normal(24, 20),
        }
    return {**weights, "decoder.final_layernorm.weight": normal(24), "output_layer.weight": normal(64, 24), **tops}


def with_experts(layers: int, experts: int) -> Tensors:
    generator = torch.Generator().manual_seed(12)
    weights = {name: tensor for name, tensor in model(layers).items() if ".mlp." not in name}
    for layer in range(layers):
        prefix = f"decoder.layers.{layer}.mlp."
        weights[f"{prefix}router.weight"] = torch.randn(experts, 24, generator=generator)
        for expert in range(experts):
            inner = f"{prefix}experts.local_experts.{expert}."
            weights[f"{inner}linear_fc1.weight"] = torch.randn(24, 24, generator=generator)
            weights[f"{inner}linear_fc2.weight"] = torch.randn(24, 12, generator=generator)
    return weights


class TestMegatronsOwn:
    @pytest.mark.parametrize("case", CASES)
    def test_names_are_those_of_one_rank_that_holds_all(self, case: str, data: Path, tmp_path: Path) -> None:
        folder = data / "megatron" / case
        ckpt_cli.merge(folder / "checkpoint", tmp_path / "out", names="native")
        assert differences(load(tmp_path / "out"), load(folder / "expected_native.safetensors")) == []
        assert ckpt_cli.verify(tmp_path / "out", full=True, against=folder / "checkpoint").against[0].identical

    @pytest.mark.parametrize("inside", ["", "mp_rank_01", "mp_rank_00/model_optim_rng.pt"])
    def test_one_rank_means_its_step(self, inside: str, data: Path, tmp_path: Path) -> None:
        folder = data / "megatron" / CASES[0]
        ckpt_cli.merge(folder / "checkpoint" / "iter_0000005" / inside, tmp_path / "out", names="native")
        assert differences(load(tmp_path / "out"), load(folder / "expected_native.safetensors")) == []

    def test_what_is_said_of_it(self, data: Path) -> None:
        found = ckpt_cli.inspect(data / "megatron" / CASES[1] / "checkpoint").checkpoint
        (component,) = found.components
        assert (found.framework, found.step, component.mesh) == ("Megatron-LM", 5, "tp=1 x pp=1 x ep=2 x dp=2")


class TestLayouts:
    """`write_legacy` cuts the tensors as Megatron's modules do."""

    @pytest.mark.parametrize("tp", [1, 2])
    @pytest.mark.parametrize("stages", [[[4]], [[2], [2]], [[1], [2], [1]], [[1, 1], [1, 1]], [[2, 1], [1, 0]]])
    def test_stages_and_chunks(self, tp: int, stages: list[list[int]], tmp_path: Path) -> None:
        args = arguments(tensor_model_parallel_size=tp, num_layers=LAYERS)
        write_legacy(tmp_path / "run", model(), args, stages)
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", names="native")
        assert differences(load(tmp_path / "out"), model()) == []

    def test_the_last_stage_s_copy_of_a_tied_embedding(self, tmp_path: Path) -> None:
        weights = {name: tensor for name, tensor in model().items() if name != "output_layer.weight"}
        args = arguments(num_layers=LAYERS, tensor_model_parallel_size=2, untie_embeddings_and_output_weights=False)
        step = write_legacy(tmp_path / "run", weights, args, [[2], [2]])
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", names="native")
        assert differences(load(tmp_path / "out"), weights) == []
        path = step / "mp_rank_01_001" / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        content["model"]["output_layer.weight"][0, 0] += 1
        torch.save(content, path)
        with pytest.raises(Inconsistent, match="different values"):
            ckpt_cli.merge(tmp_path / "run", tmp_path / "again", names="native")

    @pytest.mark.parametrize(("tp", "ep", "stages"), [(1, 2, [[2]]), (2, 1, [[1], [1]]), (2, 2, [[1], [1]])])
    @pytest.mark.parametrize("grouped", [False, True])
    def test_experts(self, tp: int, ep: int, stages: list[list[int]], grouped: bool, tmp_path: Path) -> None:
        weights = with_experts(2, 4)
        args = arguments(tensor_model_parallel_size=tp, expert_model_parallel_size=ep, num_experts=4, moe_ffn_hidden_size=12)
        write_legacy(tmp_path / "run", weights, args, stages, grouped=grouped)
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", names="native")
        # GroupedMLP has no names of single experts: theirs are those of torch_dist.
        want = {name.replace("local_experts", "experts") if grouped else name: tensor for name, tensor in weights.items()}
        assert differences(load(tmp_path / "out"), want) == []

    def test_pipeline_stages_and_expert_ranks_have_one_kind_of_name(self, tmp_path: Path) -> None:
        """What ``mp_rank_00_001`` is, only the arguments tell."""
        write_legacy(tmp_path / "stages", model(), arguments(num_layers=LAYERS), [[2], [2]])
        write_legacy(tmp_path / "experts", with_experts(2, 4), arguments(expert_model_parallel_size=2, num_experts=4), [[2]])
        for run in ("stages", "experts"):
            assert {path.name for path in (tmp_path / run / "iter_0000007").iterdir()} == {"mp_rank_00_000", "mp_rank_00_001"}
            ckpt_cli.merge(tmp_path / run, tmp_path / f"{run}-out", names="native")
        assert differences(load(tmp_path / "stages-out"), model()) == []


class TestDamage:
    def step(self, tmp_path: Path, **more: Any) -> Path:
        args = arguments(tensor_model_parallel_size=2, num_layers=LAYERS, **more)
        return write_legacy(tmp_path / "run", model(), args, [[2], [2]])

    def changed(self, path: Path, **more: Any) -> None:
        torch.save({**torch.load(path, weights_only=False), **more}, path)

    def refused(self, step: Path, kind: type[CkptError], *words: str) -> None:
        with pytest.raises(kind) as caught:
            ckpt_cli.merge(step, step.parent.parent / "out", names="native")
        said = f"{caught.value.message} {caught.value.path} {caught.value.expected} {caught.value.tensor}"
        assert all(word in said for word in words), said
        assert not (step.parent.parent / "out").exists()

    def test_a_lost_rank(self, tmp_path: Path) -> None:
        step = self.step(tmp_path)
        shutil.rmtree(step / "mp_rank_01_000")
        self.refused(step, MissingShard, "1 of 4 ranks", "mp_rank_01_000")

    def test_a_lost_stage(self, tmp_path: Path) -> None:
        step = self.step(tmp_path)
        for rank in (0, 1):
            shutil.rmtree(step / f"mp_rank_0{rank}_001")
        self.refused(step, MissingShard, "mp_rank_00_001", "PP 2")

    def test_layers_that_are_in_no_file(self, tmp_path: Path) -> None:
        step = write_legacy(tmp_path / "run", model(), arguments(num_layers=5), [[2], [2]])
        self.refused(step, MissingShard, "4 of 5 layers")

    def test_ranks_of_another_iteration(self, tmp_path: Path) -> None:
        step = self.step(tmp_path)
        self.changed(step / "mp_rank_01_001" / "model_optim_rng.pt", iteration=6)
        self.refused(step, Inconsistent, "iteration 6", "mp_rank_01_001")

    def test_a_folder_of_another_iteration(self, tmp_path: Path) -> None:
        step = self.step(tmp_path)
        self.refused(step.rename(step.with_name("iter_0000099")), Inconsistent, "99")

    def test_ranks_of_another_run(self, tmp_path: Path) -> None:
        step = self.step(tmp_path)
        self.changed(step / "mp_rank_00_001" / "model_optim_rng.pt", args=arguments(tensor_model_parallel_size=4))
        self.refused(step, Inconsistent, "other numbers of ranks")

    def test_ranks_left_over(self, tmp_path: Path) -> None:
        step = self.step(tmp_path)
        shutil.copytree(step / "mp_rank_00_000", step / "mp_rank_02_000")
        self.refused(step, Inconsistent, "mp_rank_02_000")

    def test_replicas_that_differ(self, tmp_path: Path) -> None:
        step = self.step(tmp_path)
        path = step / "mp_rank_01_000" / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        content["model"]["decoder.layers.0.input_layernorm.weight"] += 1
        torch.save(content, path)
        self.refused(step, Inconsistent, "different values", "decoder.layers.0.input_layernorm.weight")

    @pytest.mark.parametrize("version", [0, 1.0, None])
    def test_the_old_order_of_queries_keys_and_values(self, version: Any, tmp_path: Path) -> None:
        step = self.step(tmp_path)
        self.changed(step / "mp_rank_00_000" / "model_optim_rng.pt", checkpoint_version=version)
        self.refused(step, Unsupported, "checkpoint_version")

    def test_experts_that_are_cut_otherwise(self, tmp_path: Path) -> None:
        args = arguments(tensor_model_parallel_size=2, num_experts=4, expert_tensor_parallel_size=1)
        self.refused(write_legacy(tmp_path / "run", with_experts(2, 4), args, [[2]]), Unsupported, "experts")

    def test_a_tensor_of_unknown_cut(self, tmp_path: Path) -> None:
        weights = model(decoder_memory=torch.ones(4, 4))
        step = write_legacy(tmp_path / "run", weights, arguments(tensor_model_parallel_size=2, num_layers=LAYERS), [[4]])
        self.refused(step, Unsupported, "decoder_memory")

    def test_no_arguments(self, tmp_path: Path) -> None:
        step = self.step(tmp_path)
        for path in step.rglob("*.pt"):
            self.changed(path, args=None)
        self.refused(step, Unsupported, "arguments")

    def test_chunks_that_the_arguments_do_not_count(self, tmp_path: Path) -> None:
        step = self.step(tmp_path)
        for path in step.rglob("*.pt"):
            content = torch.load(path, weights_only=False)
            content["model1"] = content.pop("model")
            torch.save(content, path)
        self.refused(step, CorruptFile, "model1")

    @pytest.mark.parametrize("sizes", [{"tensor_model_parallel_size": 1 << 60}, {"pipeline_model_parallel_size": -1}])
    def test_impossible_sizes(self, sizes: dict[str, int], tmp_path: Path) -> None:
        step = self.step(tmp_path)
        for path in step.rglob("*.pt"):
            self.changed(path, args=argparse.Namespace(**{**vars(arguments()), **sizes}))
        self.refused(step, CkptError)

    def test_a_truncated_file(self, copy: Copy) -> None:
        step = copy("megatron", CASES[0], "checkpoint") / "iter_0000005"
        path = step / "mp_rank_01" / "model_optim_rng.pt"
        path.write_bytes(path.read_bytes()[:-1])
        self.refused(step, CorruptFile, "mp_rank_01")
