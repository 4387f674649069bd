"""Which trainer wrote a checkpoint, judged by folder and file names. One row per trainer; the first match wins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.files.folders import is_folder, is_there
from ckpt_cli.formats.base import Match


@dataclass(frozen=True, slots=True)
class Framework:
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


RANKS, DCP = ("rank-shards",), ("dcp",)
FRAMEWORKS = (
    Framework("BAGEL fork", RANKS, evidence="BAGEL fork"),
    Framework("BAGEL fork", DCP, root="model_sharded|ema_sharded"),
    Framework("BAGEL", ("safetensors",), folder="[0-9]{7}", inside=("ema.safetensors",)),
    Framework("BAGEL", ("safetensors",), inside=("ema.safetensors", "llm_config.json")),
    Framework("lmms-engine", RANKS, root="pytorch_(ema_)?model_fsdp_[0-9]+"),
    Framework("SkyRL", RANKS, in_run=("latest_ckpt_global_step.txt",)),
    Framework("SkyRL", RANKS, root="policy"),
    Framework("EasyR1", RANKS, in_run=("checkpoint_tracker.json",)),
    Framework("verl", RANKS, folder="global_steps?_[0-9]+", evidence="verl family"),
    Framework("verl family", RANKS, evidence="verl family"),
    Framework("Hugging Face Trainer", DCP, root="pytorch_model_fsdp_[0-9]+", beside=("trainer_state.json",)),
    Framework("Hugging Face Trainer", (*RANKS, "torch-file"), folder="checkpoint-[0-9]+", beside=("trainer_state.json",)),
    Framework("accelerate", DCP, root="pytorch_model_fsdp_[0-9]+"),
    Framework("accelerate", RANKS, evidence="accelerate"),
    Framework("accelerate", ("torch-file",), evidence=r"pytorch_model_fsdp.*\.bin"),
    Framework("Lightning", DCP, inside=("meta.pt",)),
    Framework("composer", DCP, folder="ep[0-9]+-ba[0-9]+"),
    Framework("OLMo-core", DCP, root="model_and_optim"),
    Framework("prime-rl", DCP, root="trainer"),
    Framework("torchtitan", DCP, folder="step-[0-9]+", run="checkpoint"),
    Framework("verl (Megatron)", DCP, root="dist_ckpt"),
    Framework("VeOmni", DCP, folder="global_step_[0-9]+"),
    Framework("NeMo AutoModel", (*DCP, "hub-shards"), folder="epoch_[0-9]+_step_[0-9]+"),
    Framework("Megatron-LM", DCP, folder="iter_[0-9]{7}"),
    Framework("torch DCP", DCP),
    Framework("torch DCP, Hugging Face storage", ("hub-shards",)),
    Framework("Hugging Face", ("safetensors",)),
    Framework("Hugging Face", ("torch-file",), evidence=r"(index )?pytorch_model\.bin.*"),
    Framework("torch.save", ("torch-file",)),
)


def framework_of(match: Match, checkpoint: Path, run: Path | None) -> str:
    """The name of the trainer, by the main component of a checkpoint."""
    run = run or checkpoint.parent
    inside = match.root if is_folder(match.root) else match.root.parent
    for framework in FRAMEWORKS:
        fits = (
            match.format in framework.formats
            and _named(framework.root, inside)
            and _named(framework.folder, checkpoint)
            and _named(framework.run, run)
            and all(is_there(checkpoint / name) for name in framework.beside)
            and all(is_there(inside / name) for name in framework.inside)
            and all(is_there(run / name) for name in framework.in_run)
            and (not framework.evidence or re.fullmatch(framework.evidence, match.evidence) is not None)
        )
        if fits:
            return framework.name
    return match.evidence


def _named(pattern: str, folder: Path) -> bool:
    return not pattern or re.fullmatch(pattern, folder.name) is not None
