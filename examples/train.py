"""A tiny Qwen3 that FSDP2 trains on two CPU processes, saved with torch.distributed.checkpoint: python examples/train.py FOLDER"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

RANKS, STEPS, EVERY = 2, 160, 80
START = "fork" if sys.platform == "linux" else "spawn"
TEXT = ["A checkpoint is a set of named tensors.", "A tensor is a list of pieces."]
CONFIG = Qwen3Config(
    vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, architectures=["Qwen3ForCausalLM"],
)  # fmt: skip


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for every byte."""
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def train(rank: int, run: Path, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}/ranks", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model, mesh = Qwen3ForCausalLM(CONFIG), init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = letters()([TEXT[rank] + "<end>"], return_tensors="pt").input_ids
    for step in range(1, STEPS + 1):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=run / f"step-{step}")
            print(f"rank {rank}, step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    CONFIG.save_pretrained(folder)
    letters().save_pretrained(folder)
    with tempfile.TemporaryDirectory() as meeting:
        torch.multiprocessing.start_processes(train, (folder, meeting), nprocs=RANKS, start_method=START)
