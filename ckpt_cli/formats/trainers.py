"""Which trainer wrote a checkpoint, judged by folder and file names. One row per trainer; the first match wins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.files.folders import is_folder, is_there
from ckpt_cli.formats.base import Match


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer and its signs; all given signs must be present.

    ``root``, ``folder`` and ``run`` are expressions for the names of the folder with the data, of the checkpoint and of the
    run; ``beside``, ``inside`` and ``in_run`` are files (or folders) in the checkpoint, beside the data, and in the run;
    ``evidence`` is what the format reports about the file names.
    """

    name: str
    formats: tuple[str, ...]
    root: str = ""
    folder: str = ""
    run: str = ""
    beside: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    in_run: tuple[str, ...] = ()
    evidence: str = ""


RANKS, DCP, DEEPSPEED, MEGATRON = ("rank-shards",), ("dcp",), ("deepspeed",), ("megatron-dist", "megatron-legacy")
TRAINERS = (
    Trainer("Hugging Face Trainer with DeepSpeed", DEEPSPEED, beside=("trainer_state.json",)),
    Trainer("accelerate with DeepSpeed", DEEPSPEED, root="pytorch_model(_[0-9]+)?"),
    Trainer("DeepSpeed", DEEPSPEED),
    Trainer("BAGEL fork", RANKS, evidence="BAGEL fork"),
    Trainer("BAGEL fork", DCP, root="model_sharded|ema_sharded"),
    Trainer("BAGEL", ("safetensors",), folder="[0-9]{7}", inside=("ema.safetensors",)),
    Trainer("BAGEL", ("safetensors",), inside=("ema.safetensors", "llm_config.json")),
    Trainer("lmms-engine", RANKS, root="pytorch_(ema_)?model_fsdp_[0-9]+"),
    Trainer("SkyRL", RANKS, in_run=("latest_ckpt_global_step.txt",)),
    Trainer("SkyRL", RANKS, root="policy"),
    Trainer("EasyR1", RANKS, in_run=("checkpoint_tracker.json",)),
    Trainer("verl", RANKS, folder="global_steps?_[0-9]+", evidence="verl family"),
    Trainer("verl family", RANKS, evidence="verl family"),
    Trainer("Hugging Face Trainer", DCP, root="pytorch_model_fsdp_[0-9]+", beside=("trainer_state.json",)),
    Trainer("Hugging Face Trainer", (*RANKS, "torch-file"), folder="checkpoint-[0-9]+", beside=("trainer_state.json",)),
    Trainer("accelerate", DCP, root="pytorch_model_fsdp_[0-9]+"),
    Trainer("accelerate", RANKS, evidence="accelerate"),
    Trainer("accelerate", ("torch-file",), evidence=r"pytorch_model_fsdp.*\.bin"),
    Trainer("Lightning", DCP, inside=("meta.pt",)),
    Trainer("composer", DCP, folder="ep[0-9]+-ba[0-9]+"),
    Trainer("OLMo-core", DCP, root="model_and_optim"),
    Trainer("prime-rl", DCP, root="trainer"),
    Trainer("torchtitan", DCP, folder="step-[0-9]+", run="checkpoint"),
    Trainer("VeOmni", DCP, folder="global_step_[0-9]+"),
    Trainer("NeMo AutoModel", (*DCP, "hub-shards"), folder="epoch_[0-9]+_step_[0-9]+"),
    Trainer("verl (Megatron)", MEGATRON, root="dist_ckpt"),
    Trainer("NeMo (Megatron-Bridge)", MEGATRON, inside=("run_config.yaml",)),
    Trainer("NeMo", MEGATRON, root="weights"),
    Trainer("Megatron-LM", MEGATRON),
    Trainer("Megatron-FSDP", DCP, folder="iter_[0-9]{7}"),
    Trainer("torch DCP", DCP),
    Trainer("torch DCP, Hugging Face storage", ("hub-shards",)),
    Trainer("Hugging Face", ("safetensors",)),
    Trainer("Hugging Face", ("torch-file",), evidence=r"(index )?pytorch_model\.bin.*"),
    Trainer("torch.save", ("torch-file",)),
)


def trainer_of(match: Match, checkpoint: Path, run: Path | None) -> str:
    """The name of the trainer, by the main component of a checkpoint."""
    run = run or checkpoint.parent
    inside = match.root if is_folder(match.root) else match.root.parent
    for trainer in TRAINERS:
        fits = (
            match.format in trainer.formats
            and _named(trainer.root, inside)
            and _named(trainer.folder, checkpoint)
            and _named(trainer.run, run)
            and all(is_there(checkpoint / name) for name in trainer.beside)
            and all(is_there(inside / name) for name in trainer.inside)
            and all(is_there(run / name) for name in trainer.in_run)
            and (not trainer.evidence or re.fullmatch(trainer.evidence, match.evidence) is not None)
        )
        if fits:
            return trainer.name
    return match.evidence


def _named(pattern: str, folder: Path) -> bool:
    return not pattern or re.fullmatch(pattern, folder.name) is not None
