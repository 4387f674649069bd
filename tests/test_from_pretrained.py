"""The result is usable: models that four processes trained with FSDP2 load with transformers, complete and bit for bit."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

import ckpt_cli
from tests.ranks import run_ranks
from tests.tensors import Tensors, cast_floats, differences, load

pytestmark = pytest.mark.slow

RANKS = 4
MODELS = ("qwen2", "qwen2-tied", "llama", "llama-tied")
TOKENS = torch.arange(24).reshape(2, 12) % 37


def config_of(name: str) -> PretrainedConfig:
    family, tied = name.split("-")[0], name.endswith("-tied")
    # 37, 20 and 22 do not divide by the number of ranks; Qwen2 has biases.
    sizes = {"vocab_size": 37, "hidden_size": 20, "intermediate_size": 22, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    return Qwen2Config(**sizes, **heads) if family == "qwen2" else LlamaConfig(**sizes, **heads)


def train_and_save(rank: int, port: int, folder: Path) -> None:
    """What one rank of a trainer such as verl does: shard, take a step, save its own part; rank 0 saves the configs."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    for name in MODELS:
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        state = model.state_dict()
        actor = folder / name / "global_step_1" / "actor"
        (actor / "huggingface").mkdir(parents=True, exist_ok=True)
        torch.save(state, actor / f"model_world_size_{RANKS}_rank_{rank}.pt")
        whole = {key: (value.full_tensor() if isinstance(value, DTensor) else value).detach() for key, value in state.items()}
        if rank == 0:
            model.config.save_pretrained(actor / "huggingface")
            GenerationConfig.from_model_config(model.config).save_pretrained(actor / "huggingface")
            torch.save(whole, folder / f"{name}.pt")
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run per model, and `<model>.pt`, the whole weights as torch gathered them."""
    folder = tmp_path_factory.mktemp("trained")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run_ranks(train_and_save, port, folder, ranks=RANKS)
    return folder


def original(trained: Path, name: str) -> PreTrainedModel:
    """The model as one process has it, without sharding."""
    model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
    model.load_state_dict(torch.load(trained / f"{name}.pt"))
    return model.eval()


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    result: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return result


def from_pretrained(folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return model, {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}


NOTHING: dict[str, list[str]] = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}


@pytest.mark.parametrize("name", MODELS)
class TestTheMergedModel:
    def test_loads_with_the_same_logits_and_no_key_to_spare(self, trained: Path, tmp_path: Path, name: str) -> None:
        ckpt_cli.merge(trained / name, tmp_path / "out")
        model, keys = from_pretrained(tmp_path / "out")
        assert keys == NOTHING
        assert model.dtype == torch.float32
        assert torch.equal(logits(model), logits(original(trained, name)))

    def test_is_the_trained_one_and_not_a_new_one(self, trained: Path, tmp_path: Path, name: str) -> None:
        torch.manual_seed(7)
        untrained = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
        ckpt_cli.merge(trained / name, tmp_path / "out")
        assert not torch.equal(logits(from_pretrained(tmp_path / "out")[0]), logits(untrained))

    def test_has_the_tensors_that_save_pretrained_writes(self, trained: Path, tmp_path: Path, name: str) -> None:
        ckpt_cli.merge(trained / name, tmp_path / "out")
        original(trained, name).save_pretrained(tmp_path / "saved")
        assert differences(load(tmp_path / "out"), load(tmp_path / "saved")) == []

    def test_loads_in_bf16_with_the_weights_rounded(self, trained: Path, tmp_path: Path, name: str) -> None:
        ckpt_cli.merge(trained / name, tmp_path / "out", dtype="bf16")
        model, keys = from_pretrained(tmp_path / "out")
        assert keys == NOTHING
        assert model.dtype == torch.bfloat16
        whole: Tensors = torch.load(trained / f"{name}.pt")
        assert differences(dict(model.state_dict()), cast_floats(whole, torch.bfloat16)) == []

    def test_loads_from_several_files(self, trained: Path, tmp_path: Path, name: str) -> None:
        result = ckpt_cli.merge(trained / name, tmp_path / "out", max_shard_size=6000)
        assert len(result.outputs[0].files) > 2
        model, keys = from_pretrained(tmp_path / "out")
        assert keys == NOTHING
        assert torch.equal(logits(model), logits(original(trained, name)))

    def test_drops_the_head_only_where_it_is_tied(self, trained: Path, tmp_path: Path, name: str) -> None:
        result = ckpt_cli.merge(trained / name, tmp_path / "out")
        assert list(result.outputs[0].dropped) == (["lm_head.weight"] if name.endswith("-tied") else [])


def test_the_example_says_what_its_page_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of Python in examples/README.md, run as they are on what its first command writes."""
    from tests.cli import ROOT

    page = (ROOT / "examples" / "README.md").read_text()
    code = "\n".join(line.strip() for line in page[page.index("    from transformers") :].splitlines() if line.startswith("    "))
    ckpt_cli.merge(ROOT / "examples" / "tiny-run", tmp_path, type="both", overwrite=True)
    exec(code.replace("/tmp/merged", str(tmp_path)), {})
    assert "A checkpoint is a set of named tensors, and a tensor is a list of pieces." in capsys.readouterr().out
