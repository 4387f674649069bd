"""The trainers whose checkpoints are known: one row each, and everything that is known of their folders by name.

The rows are the only place for such names. Step folders, the folders of weights, optimizers and states, trackers, marks and the nesting of
keys in DCP are collected from them; docs/formats.md has them as a table; `trainer_of` names the trainer of a checkpoint.

In the forms of names, N is a number (the step, or which of several models), NNN one of exactly so many digits, E the epoch that the
step is of, and B a number that is of no interest. A folder that no row has is found too if it is the only one with weights:
`discover/between.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache
from pathlib import Path

from ckpt_cli.files.folders import is_folder, is_there
from ckpt_cli.formats.base import Match

ROLES = ("actor", "policy", "critic", "reward", "value")
"""Folders of a checkpoint that hold one trained model each; the first one present is the main component."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer: where it puts what, and how its checkpoints are told from others.

    - ``steps``: the names of its step folders; ``runs``: the folder of its output in which these lie;
    - ``weights``: where weights lie, below a step or a role folder (none: right in it); ``certain``: nothing else is called like that;
    - ``optimizers``, ``states``: folders beside the weights with an optimizer that is saved like a model, and with training state;
    - ``trackers``: files or links beside the steps that name the last one; ``unfinished``: a file that is in a step while it is being
      saved; ``partial``: what the name of a step begins with until it is whole; ``finished``: a file that is written last, beside the
      folders of weights;
    - ``config``: where config and tokenizer lie, as seen from the folder of the weights, besides that folder and the step's, or in the run;
    - ``keys``: the keys above the model's tensors in its DCP folders; ``wrapper``: what else all its names begin with.

    All given signs must be present: ``by`` says whether the name of the step, or of the folder of weights, is one. ``run``, ``role`` and
    ``evidence`` are expressions for names and for what the format reports; ``beside``, ``inside`` and ``in_run`` are files in the step,
    beside the data, and in the run. Of ``own`` one is enough, in any of these: where the name of the step is one that others use too.
    """

    name: str
    formats: tuple[str, ...]
    _: KW_ONLY
    steps: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    certain: bool = False
    runs: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    trackers: tuple[str, ...] = ()
    unfinished: str = ""
    partial: str = ""
    finished: str = ""
    config: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    wrapper: str = ""
    run: str = ""
    role: str = ""
    evidence: str = ""
    beside: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    in_run: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


RANKS, DCP, ITEMS, SHARDS = ("rank-shards",), ("dcp",), ("torch-checkpointing",), ("hub-shards",)
ZERO, MEGATRON = ("deepspeed",), ("megatron-dist", "megatron-legacy")
HUB, FILE, SELF = ("safetensors",), ("torch-file",), ("self-describing",)
STEP, FOLDER, STEP_AND_FOLDER = ("step",), ("folder",), ("step", "folder")
OF_VERL = ("global_step_N", "global_steps_N")
OF_TAGS = ("epochE_stepN", "epochE-stepN", "epoch_E-step_N", "epoch=E_step=N", "eE_sN")
"""How people call the tags of DeepSpeed, which are free text, where these name the epoch too."""
OF_LOOPS = (
    *("checkpoint-epoch-N", "checkpoint_epoch_N", "checkpoint-epochN", "checkpoint_epochN", "checkpoint-epoch_N", "epoch-N"),
    *("ckpt-epoch-N", "ckpt_epoch_N", "ckpt_epochN", "model-epoch-N", "model_epoch_N", "model_epochN"),
    *("checkpoint-step-N", "checkpoint_step_N", "checkpoint-stepN", "checkpoint_stepN", "ckpt_step_N", "ckpt_stepN"),
    *("model-step-N", "model_step_N", "model_stepN"),
)
"""How people call the epochs and steps that loops of their own save; ``checkpoint_stepN`` is from torch's recipe of asynchronous saves."""
FSDP, EMA_FSDP = "pytorch_model_fsdp_N", "pytorch_ema_model_fsdp_N"
LAST_ITERATION, LATEST, TRAINER_STATE = "latest_checkpointed_iteration.txt", ("latest",), ("trainer_state.json",)
HUGGING_FACE = "huggingface"
THE_RUN = "the run"
"""The folder of the steps, where Hugging Face's Trainer and axolotl leave config and tokenizer."""

TRAINERS = (
    Trainer(
        "Hugging Face Trainer with DeepSpeed",
        ZERO,
        steps=("checkpoint-N",),
        beside=TRAINER_STATE,
        trackers=LATEST,
        unfinished="checkpoint-is-incomplete.txt",  # of saves on SIGTERM (transformers, trainer_jit_checkpoint.py)
        config=(THE_RUN,),
    ),
    Trainer(
        "accelerate with DeepSpeed",
        ZERO,
        steps=("checkpoint_N",),
        weights=("pytorch_model", "pytorch_model_N"),
        by=FOLDER,
        runs=("checkpoints",),
        trackers=LATEST,
    ),
    Trainer(
        "mmengine with DeepSpeed",  # its tags are called like files (mmengine, DeepSpeedStrategy.save_checkpoint); XTuner 0.1
        ZERO,
        steps=("iter_N.pth", "epoch_N.pth"),
        by=STEP,
        trackers=("last_checkpoint",),
        config=(THE_RUN,),
    ),
    Trainer("DeepSpeed", ZERO, steps=("global_stepN", *OF_TAGS), trackers=LATEST, config=(THE_RUN,)),
    Trainer("BAGEL fork", RANKS, steps=("NNNNNNN",), evidence="BAGEL fork"),
    Trainer("BAGEL fork", DCP, steps=("NNNNNNN",), weights=("model_sharded", "ema_sharded"), by=FOLDER, certain=True),
    Trainer("BAGEL", HUB, steps=("NNNNNNN",), by=STEP, inside=("ema.safetensors",)),
    Trainer("BAGEL", HUB, inside=("ema.safetensors", "llm_config.json")),
    Trainer(
        "lmms-engine",
        RANKS,
        steps=("checkpoint-N",),
        weights=(FSDP, EMA_FSDP),
        by=FOLDER,
        certain=True,
        states=("extra_state", "dataloader_state"),
    ),
    Trainer("SkyRL", RANKS, steps=OF_VERL, trackers=("latest_ckpt_global_step.txt",), in_run=("latest_ckpt_global_step.txt",)),
    Trainer("SkyRL", RANKS, steps=OF_VERL, role="policy"),
    Trainer(
        "EasyR1", RANKS, steps=OF_VERL, trackers=("checkpoint_tracker.json", "latest_global_step.txt"), in_run=("checkpoint_tracker.json",)
    ),
    Trainer("verl", RANKS, steps=OF_VERL, by=STEP, trackers=(LAST_ITERATION,), config=(HUGGING_FACE,), evidence="verl family"),
    Trainer("verl family", RANKS, config=(HUGGING_FACE,), evidence="verl family"),
    Trainer(
        "lerobot",
        (*DCP, *HUB),
        steps=("NNNNNN",),
        weights=(f"pretrained_model/{FSDP}", "pretrained_model"),
        by=STEP_AND_FOLDER,
        runs=("checkpoints",),
        states=("training_state",),
        trackers=("last",),
    ),
    Trainer("Hugging Face Trainer", DCP, steps=("checkpoint-N",), weights=(FSDP,), by=FOLDER, beside=TRAINER_STATE, config=(THE_RUN,)),
    Trainer("Hugging Face Trainer", (*RANKS, *FILE), steps=("checkpoint-N",), by=STEP, beside=TRAINER_STATE, config=(THE_RUN,)),
    Trainer("accelerate", DCP, steps=("checkpoint-N",), weights=(FSDP,), by=FOLDER, optimizers=("optimizer_N",), keys=("model",)),
    Trainer("accelerate", RANKS, evidence="accelerate"),
    Trainer("accelerate", FILE, evidence=r"pytorch_model_fsdp.*\.bin"),
    Trainer(
        "Lightning",
        DCP,
        steps=("epoch=E-step=N", "epoch=E-step=N.ckpt", "step-N.ckpt", "step_N.ckpt", "stepN.ckpt"),
        inside=("meta.pt",),
        keys=("state_dict", "model"),
    ),
    Trainer("composer", DCP, steps=("epE-baN",), by=STEP, keys=("state.model",), wrapper="model."),
    Trainer("OLMo-core", DCP, steps=("stepN",), weights=("model_and_optim",), by=FOLDER, certain=True, states=("train",), keys=("model",)),
    Trainer("OLMo", SELF, steps=("stepN",), weights=("model",), by=FOLDER, optimizers=("optim",), states=("train",)),
    Trainer("prime-rl", DCP, steps=("step_N",), weights=("trainer",), by=FOLDER, certain=True, states=("dataloader",), keys=("app.model",)),
    Trainer("torchtitan", (*DCP, *ITEMS), steps=("step-N",), by=STEP, runs=("checkpoint",), run="checkpoint"),
    Trainer(
        "NeMo AutoModel",
        (*DCP, *SHARDS, *HUB),
        steps=("epoch_E_step_N",),
        weights=("model",),
        by=STEP,
        optimizers=("optim",),
        trackers=("LATEST", "LATEST.txt"),
        unfinished=".incomplete",
        config=(".hf_metadata",),
        own=("step_scheduler.pt", "losses.json", ".hf_metadata", "LATEST", "LATEST.txt"),
    ),
    Trainer(
        "NeMo RL",
        (*DCP, *SHARDS, *HUB),
        steps=("step_N",),
        weights=("weights/model", "weights"),
        by=FOLDER,
        optimizers=("optimizer",),
        partial="tmp_",
        config=(".hf_metadata", "../tokenizer", "../../tokenizer", "../.hf_metadata"),
        role="policy|value",
    ),
    Trainer(
        "verl (Megatron)",
        ("megatron-dist", *HUB),
        steps=OF_VERL,
        weights=("model/dist_ckpt", "model/huggingface"),
        by=FOLDER,
        optimizers=("optimizer/dist_ckpt",),
        states=("extra/dist_ckpt",),
        trackers=(LAST_ITERATION,),
        finished="ckpt_contents.json",
        config=("../huggingface",),
    ),
    Trainer("verl (Megatron)", MEGATRON[:1], steps=OF_VERL, weights=("dist_ckpt",), by=FOLDER, certain=True, config=("../huggingface",)),
    Trainer(
        "xtuner",
        (*DCP, *SHARDS),
        steps=("ckpt-step-N", "epoch-E-step-N"),
        weights=("weights",),
        by=STEP_AND_FOLDER,
        runs=("checkpoints",),
        optimizers=("optimizer",),
    ),
    Trainer("RLinf", DCP, steps=OF_VERL, weights=("dcp_checkpoint",), by=FOLDER, keys=("fsdp_checkpoint.model",)),
    Trainer("RLinf", (*SELF, *FILE), steps=OF_VERL, weights=("local_shard_checkpoint", "model_state_dict"), by=FOLDER),
    Trainer("AReaL", DCP, steps=("epochEepochstepEglobalstepN",), weights=("recover_checkpoint",), by=FOLDER),
    Trainer("AReaL", HUB, steps=("epochEepochstepEglobalstepN",), by=STEP),
    Trainer(
        "ByteCheckpoint", DCP, steps=OF_VERL, weights=("model",), by=STEP_AND_FOLDER, optimizers=("optimizer",), states=("extra_state",)
    ),
    Trainer(
        "VeOmni",
        DCP,
        steps=OF_VERL,
        by=STEP,
        states=("extra_state",),
        config=(f"{THE_RUN}/model_assets",),
        keys=("model",),
        own=("extra_state", "model_assets"),
    ),
    Trainer(
        "slime",
        DCP,
        steps=("iter_NNNNNNN",),
        weights=("model",),
        by=STEP_AND_FOLDER,
        optimizers=("optimizer",),
        states=("lr_scheduler",),
        trackers=(LAST_ITERATION,),
    ),
    Trainer("meta lingua", DCP, steps=("NNNNNNNNNN",), by=STEP, runs=("checkpoints",), inside=("params.json",), keys=("model",)),
    Trainer("ColossalAI", (*FILE, *HUB), steps=("epochN", "epoch-E_step-N"), weights=("modeling",), by=FOLDER, optimizers=("optimizer",)),
    Trainer(
        "Open-Sora",
        (*FILE, *HUB),
        steps=("epochE-global_stepN",),
        weights=("model",),
        by=STEP,
        optimizers=("optimizer",),
        states=("lr_scheduler",),
    ),
    Trainer("litgpt", FILE, steps=("step-N",), inside=("lit_model.pth",), evidence=r"lit_model\.pth", keys=("model",)),
    Trainer("litgpt", DCP, steps=("step-N",), weights=("lit_model.pth",), by=FOLDER, keys=("model",)),
    Trainer("mmengine", FILE, steps=("iter_N.pth", "epoch_N.pth"), by=STEP, in_run=("last_checkpoint",)),
    Trainer(
        "torchtune", (*HUB, *FILE), steps=("epoch_N",), by=STEP, states=("recipe_state",), own=("recipe_state", "torchtune_config.yaml")
    ),
    Trainer("torchtune", DCP, steps=("epoch_N", "step_N"), by=STEP, beside=("recipe_state",)),
    Trainer("NeMo (Megatron-Bridge)", MEGATRON[:1], steps=("iter_NNNNNNN",), inside=("run_config.yaml",), trackers=(LAST_ITERATION,)),
    Trainer("NeMo", MEGATRON[:1], weights=("weights",), by=FOLDER),
    Trainer("Megatron-LM", MEGATRON, steps=("iter_NNNNNNN",), trackers=(LAST_ITERATION, "latest"), runs=("ckpt",)),
    Trainer("Megatron-FSDP", DCP, steps=("iter_NNNNNNN",), by=STEP, trackers=(LAST_ITERATION,)),
    Trainer("torch_checkpointing", ITEMS, steps=("step-N", "step_N"), partial="tmp_"),
    Trainer("torch DCP", DCP, steps=("checkpoint_stepN",)),
    Trainer("torch DCP, Hugging Face storage", SHARDS),
    Trainer("loops with save_pretrained", (*HUB, *FILE), steps=OF_LOOPS, by=STEP),
    Trainer("Hugging Face Hub cache", (*HUB, *FILE), run="snapshots"),
    Trainer("Hugging Face", HUB),
    Trainer("Hugging Face", FILE, evidence=r"(index )?pytorch_model\.bin.*"),
    Trainer("torch.save", FILE),
    Trainer("files of ranks", SELF),
)


def trainer_of(match: Match, checkpoint: Path, run: Path | None) -> str:
    """The name of the trainer, by the main component of a checkpoint."""
    run = run or checkpoint.parent
    inside = match.root if is_folder(match.root) else match.root.parent
    role, below = place_below(inside, checkpoint)
    for trainer in TRAINERS:
        fits = (
            match.format in trainer.formats
            and ("step" not in trainer.by or has_form(checkpoint.name, trainer.steps))
            and ("folder" not in trainer.by or has_form(below, trainer.weights))
            and (not trainer.role or re.fullmatch(trainer.role, role) is not None)
            and (not trainer.run or re.fullmatch(trainer.run, run.name) is not None)
            and all(is_there(checkpoint / name) for name in trainer.beside)
            and all(is_there(inside / name) for name in trainer.inside)
            and all(is_there(run / name) for name in trainer.in_run)
            and (not trainer.own or any(is_there(folder / name) for name in trainer.own for folder in (checkpoint, inside, run)))
            and (not trainer.evidence or re.fullmatch(trainer.evidence, match.evidence) is not None)
        )
        if fits:
            return trainer.name
    return match.evidence


def place_below(folder: Path, checkpoint: Path) -> tuple[str, str]:
    """The role folder of a checkpoint in which a folder lies, and the path below that; empty where there is none."""
    parts = folder.relative_to(checkpoint).parts if folder.is_relative_to(checkpoint) else (folder.name,)
    role = parts[0] if parts and parts[0] in ROLES else ""
    return role, "/".join(parts[1:] if role else parts)


# -- forms of names ------------------------------------------------------------------------------------------------


PLACES = re.compile(r"(?<![A-Z])(N+|E|B)(?![A-Z])")
"""The numbers in a form."""

SUFFIX = re.compile(r"\.[a-z]+\Z")
"""What names of files end in, and those of some folders too."""


@cache
def form(text: str) -> re.Pattern[str]:
    """The expression for a form of names; its groups are ``number`` and ``epoch``.

    >>> form("epoch_E_step_N").fullmatch("epoch_3_step_70")["number"], form("iter_NNN").fullmatch("iter_7")
    ('70', None)
    """
    words = PLACES.split(text)
    first_epoch = words.index("E") if "E" in words else None
    parts = [re.escape(word) if index % 2 == 0 else _digits(word, index == first_epoch) for index, word in enumerate(words)]
    return re.compile("".join(parts), re.ASCII)


def words_of(text: str) -> list[str]:
    """The words in a form, in their order, without a suffix.

    >>> words_of("epoch_E_step_N"), words_of("NNNNNNN"), words_of("epoch_N.pth")
    (['epoch', 'step'], [], ['epoch'])
    """
    return re.findall(r"[A-Za-z]{2,}", PLACES.sub(" ", SUFFIX.sub("", text)))


def _digits(letters: str, is_epoch: bool) -> str:
    count = "{1,18}" if len(letters) == 1 else f"{{{len(letters)}}}"
    name = "?P<number>" if letters[0] == "N" else "?P<epoch>" if is_epoch else "?:"
    return f"({name}[0-9]{count})"


def has_form(name: str, forms: Iterable[str]) -> bool:
    return number_in(name, forms) is not None


def number_in(name: str, forms: Iterable[str], group: str = "number") -> int | None:
    """The number in a name of one of these forms, or its ``epoch``; 0 if the form has none, None for other names."""
    fields = next((found for each in forms if (found := form(each).fullmatch(name)) is not None), None)
    return int(fields.groupdict().get(group) or 0) if fields is not None else None


def _all(of: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in of for name in names))


STEPS = _all(trainer.steps for trainer in TRAINERS)
RUNS = _all(trainer.runs for trainer in TRAINERS)
WEIGHTS = _all(trainer.weights for trainer in TRAINERS)
"""Where weights lie below a step or a role folder."""

CERTAIN: Mapping[str, str] = {
    name: "ema" if "ema" in name else "model" for trainer in TRAINERS if trainer.certain for name in trainer.weights
}
"""Folders that nothing but weights are called, wherever they lie, and the component in them."""

OPTIMIZERS = _all(trainer.optimizers for trainer in TRAINERS)
STATES = _all(trainer.states for trainer in TRAINERS)
TRACKERS = _all(trainer.trackers for trainer in TRAINERS)
UNFINISHED = _all((trainer.unfinished,) for trainer in TRAINERS if trainer.unfinished)
UNFINISHED_BESIDE = "-unfinished"
"""What NeMo adds to the name of a checkpoint for a file beside it that is there while it is being written."""

PARTIAL = _all(tuple(f"{trainer.partial}{step}" for step in trainer.steps) for trainer in TRAINERS if trainer.partial)
"""Step folders of saves that are not whole yet."""

CONFIGS = _all(trainer.config for trainer in TRAINERS)
