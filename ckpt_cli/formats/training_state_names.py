"""Names that training state has: of files, and of keys in files and DCP folders, where models are looked for.

Names only say where not to look for a model first. A dict that holds a matrix is always reported, unless it is an optimizer's or a
dataloader's.
"""

from __future__ import annotations

import re

FILE = re.compile(
    r"(distrib_)?optim.*|extra_state.*|(lr_?)?sched.*|rng.*|random_(states?|rng|generators?).*|training_args.*|(grad_?)?scaler.*|"
    r"data([._-].*|[0-9]*\.[a-z]+|_?loaders?.*|sets?[._-].*)?|"
    r"(lr|loss(es)?|metrics?|stats|logs?|train|trainer|training(?=_state)|samplers?)"
    r"([_-]?[0-9]*(\.[a-z]+)*|[_-]([0-9]+[_-]of|states?|history|values|world|rank|shard|node|[tdpem]p)[._-].*)",
    re.ASCII | re.IGNORECASE,
)
OPTIMIZER = re.compile(
    r"((distrib_)?optim(izer)?s?([._-]?([0-9]|rank|world|states?|shards?|shape).*?)?|.*_optim_states)"
    r"(\.(pt|pth|th|bin|ckpt|safetensors|pkl|distcp))?",
    re.ASCII,
)
"""Files and folders of optimizers, which are no models of that name."""

STATE = re.compile(
    r".*optimi[sz]er.*|(.*[._-])?optims?([._-].*|[a-z0-9])?|(.*[._-])?opts?([._-]?states?([._-].*)?|[._-][a-z0-9]|(?-i:[A-Z0-9]))?|"
    r"(.*[._-])?lr_?sched.*|sched(ulers?)?([._-].*)?|(.*[._-])?rngs?([._-].*|states?)?|"
    r"(.*[._-])?random([._-]?(states?|rngs?|generators?|seeds?)([._-].*)?)?|(.*[._-])?data_?loaders?([._-].*)?",
    re.IGNORECASE,
)
TRAINER = re.compile(r"callbacks|loops|extra_state|train(er)?_state", re.IGNORECASE)
RECORD = re.compile(
    r".*scaler.*|.*sched.*|.*rng.*|.*random.*|train.*|args|meta(_?data)?|config|hyper_parameters|data.*|loss.*|step|global_step|epoch|iteration|best.*",
    re.IGNORECASE,
)

WORD = (
    "means?|stds?|stdev|var|variance|mu|sigma|scales?|shift|norm|normali[sz]ation|rms|stats|statistics|temperature|meanstd|runningmeanstd"
)
STATISTICS = re.compile(
    rf"((\w*[._-])?({WORD})|.*(normali[sz]er|standardi[sz]er|preprocessor|(?<!grad_)(?<!grad)(?<!amp_)scaler)s?)([._-]\w+)?",
    re.ASCII | re.IGNORECASE,
)
"""Keys of what is applied to the inputs or outputs of a model, and is as much a part of it as its weights."""

RESULTS = re.compile(
    r".*(loss|metric|accurac|perplexit|histor|elapsed|learning_rate)\w*|train.*|best.*"
    r"|(\w+[._-])?(acc|score|reward|return|result|time|log|iter|idx|index|indice|split)s?|lrs?|(\w+_)?time\w*|message_hub"
    r"|(\w+_)?(np|numpy|python|torch|cuda|cpu|generator|sampler)([._-]?state)?",
    re.ASCII | re.IGNORECASE,
)
"""Keys of what a training reports, or keeps of its data and random generators."""


def is_state_file(name: str) -> bool:
    """Whether a file's name is that of training state.

    >>> is_state_file("lr_scheduler.pt"), is_state_file("loss_0.31.pt"), is_state_file("trainable_params.bin")
    (True, False, False)
    """
    return FILE.fullmatch(name) is not None


def is_optimizer_name(name: str) -> bool:
    """Whether a file or folder is an optimizer's by its name.

    >>> [is_optimizer_name(name) for name in ("optimizer_0", "optim_world_size_4_rank_2.pt", "optimizer.pt", "optimizer_of_worlds")]
    [True, True, True, False]
    """
    return OPTIMIZER.fullmatch(name) is not None


def is_state_key(key: object) -> bool:
    """Whether something is an optimizer, a scheduler, random states or a dataloader by its key: never weights, whatever is in it.

    >>> is_state_key("generator_optimizer"), is_state_key("optimal_model")
    (True, False)
    """
    return isinstance(key, str) and STATE.fullmatch(key) is not None


def is_trainer_key(key: object) -> bool:
    """Whether trainers keep counters, and sometimes an average, under this key."""
    return isinstance(key, str) and TRAINER.fullmatch(key) is not None


def is_record_key(key: object) -> bool:
    """Whether a key usually holds numbers: a dict there is a state dict only if it holds a matrix."""
    return isinstance(key, str) and (is_trainer_key(key) or RECORD.fullmatch(key) is not None)


def is_statistics_key(key: object) -> bool:
    """Whether a key is that of what is applied to a model's inputs or outputs.

    >>> [is_statistics_key(key) for key in ("obs_rms", "target_scaler", "y_mean", "grad_scaler", "optimizer", "muon")]
    [True, True, True, False, False, False]
    """
    return isinstance(key, str) and STATISTICS.fullmatch(key) is not None


def is_result_key(key: object) -> bool:
    """Whether a key is that of what a training reports.

    >>> [is_result_key(key) for key in ("best_acc1", "val_losses", "mean_loss", "history", "priors")]
    [True, True, True, True, False]
    """
    return isinstance(key, str) and RESULTS.fullmatch(key) is not None


def is_of_training(key: object) -> bool:
    """Whether a key is that of the state, the settings or the results of a training, and so of nothing that belongs to weights."""
    return is_state_key(key) or is_record_key(key) or is_result_key(key)
