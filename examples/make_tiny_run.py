"""Writes examples/tiny-run: a tiny Qwen3 that FSDP2 trains on four ranks, saved as lmms-engine does. Run it with torch 2.13.

python examples/make_tiny_run.py examples/tiny-run
"""

from __future__ import annotations

import copy
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

RANKS, STEPS, DECAY = 4, (100, 200), 0.99
TEXT = [
    "A checkpoint is a set of named tensors, and a tensor is a list of pieces.",
    "A piece says: these bytes of this file are this box of the tensor.",
    "Every format is read into that description, and every command works on it.",
    "Right or refused, bit for bit; nothing in a file is ever executed.",
]
CONFIG = Qwen3Config(
    vocab_size=320, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, pad_token_id=0,
)  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=CONFIG.vocab_size, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def train(rank: int, folder: Path, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    torch.manual_seed(7)
    model = Qwen3ForCausalLM(CONFIG)
    ema = copy.deepcopy(model)
    for each in (model, ema):
        for layer in each.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) / (1 + step / 50))
    words = tokenizer()
    batch = words([TEXT[rank] + "<end>"], return_tensors="pt").input_ids
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    for step in range(1, STEPS[-1] + 1):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for averaged, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                averaged.lerp_(parameter, 1 - DECAY)
        if step in STEPS:
            save(rank, folder / f"checkpoint-{step}", model, ema, optimizer, scheduler, words, last=step == STEPS[-1])
    dist.destroy_process_group()


def save(rank, folder, model, ema, optimizer, scheduler, words, *, last) -> None:  # type: ignore[no-untyped-def]
    def put(content: object, kind: str, name: str) -> None:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / kind / f"{name}_world_size_{RANKS}_rank_{rank}.pt")

    put(model.state_dict(), "pytorch_model_fsdp_0", "model")
    put(ema.state_dict(), "pytorch_ema_model_fsdp_0", "model")
    if last:
        put(optimizer.state_dict(), "optimizer", "optimizer")
        states = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
        put({"lr_scheduler_state": scheduler.state_dict(), "rng": states}, "extra_state", "extra_state")
        put({"epoch": STEPS[-1], "samples_seen": STEPS[-1] * RANKS}, "dataloader_state", "dataloader_state")
    if rank == 0:
        Qwen3Config.from_dict({**CONFIG.to_dict(), "architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}).save_pretrained(folder)
        words.save_pretrained(folder)
    dist.barrier()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    meeting = target.with_name(".meeting").absolute()
    meeting.unlink(missing_ok=True)
    torch.multiprocessing.spawn(train, (target, str(meeting)), nprocs=RANKS)
    meeting.unlink(missing_ok=True)
