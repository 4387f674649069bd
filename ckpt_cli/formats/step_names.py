"""How folder names give a step: by the forms that trainers use (`formats.trainers`)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import PurePath

from ckpt_cli.formats.trainers import STEPS, has_form, number_in, words_of
from ckpt_cli.formats.trainers import form as form_of

OF_SAVES = ("checkpoint_N",)
"""accelerate's own names (``automatic_checkpoint_naming``): N is how many saves there were before."""

DEPTH = 4
"""How many levels above a file the folder of its step is looked for."""

LAST = ("last", "latest", "final", "newest", "end", "resume")
"""What the last save of a training is called, where that is no number."""


def step_of(folder: PurePath) -> int | None:
    """The step in the name of a folder (or the epoch, of trainers that count these); None for other names.

    >>> step_of(PurePath("global_step_20")), step_of(PurePath("epoch_3")), step_of(PurePath("step_final"))
    (20, 3, None)
    """
    form = _form_of(folder.name)
    return number_in(folder.name, (form,)) if form is not None else None


def numbered_path(path: PurePath) -> PurePath:
    """The part of a path that gives it a number: itself by its own name, or a step folder a few levels above; itself where none does.

    >>> [str(numbered_path(PurePath(path))) for path in ("run/step_7", "run/step_7/actor/model.pt", "run/model.pt")]
    ['run/step_7', 'run/step_7', 'run/model.pt']
    """
    return next((each for each in (path, *itertools.islice(path.parents, DEPTH)) if step_of(each) is not None), path)


def nearest_step(path: PurePath) -> int | None:
    """The step in a path: in its own name, or in that of the nearest folder above."""
    return next((step for each in (path, *path.parents) if (step := step_of(each)) is not None), None)


def is_like_step(name: str) -> bool:
    """Whether a name is made of the words of step folders, or says that this is the last save, whatever else is in it.

    >>> [is_like_step(name) for name in ("step_9k", "checkpoint-40 copy", "final_model", "0000020.bak", "merged", "base", "7b-instruct")]
    [True, True, True, True, False, False, False]
    """
    return _like_step().search(name) is not None


@cache
def _like_step() -> re.Pattern[str]:
    """Long words count as parts of others too (``lastcheckpoint``), short ones (``ep``, ``end``) and numbers only for themselves.

    That a folder holds a model says nothing of a step, though ``model_step_N`` is one.
    """
    words = {*LAST, *(word.lower() for form in STEPS for word in words_of(form))} - {"model"}
    parts = [word if len(word) > 3 else rf"(?<![a-z]){word}(?![a-z])" for word in sorted(words)]
    return re.compile("|".join((*parts, r"^[0-9]{2,}(?![0-9a-z])")), re.IGNORECASE)


def counter_of(folder: PurePath) -> str | None:
    """What the number in the name of a step folder counts: epochs, or steps of any kind; None for other names.

    >>> counter_of(PurePath("epoch_3")), counter_of(PurePath("epoch_3_step_70")), counter_of(PurePath("step_final"))
    ('epochs', 'steps', None)
    """
    form = _form_of(folder.name)
    if form is None:
        return None
    return "epochs" if words_of(form)[-1:] == ["epoch"] else "steps"


@lru_cache(maxsize=4096)
def _form_of(name: str) -> str | None:
    """The form of step folders that a name has. Names are looked at again and again: for the step, for what it counts, for the epoch."""
    return next((form for form in STEPS if has_form(name, (form,))), None)


def epoch_of(folder: PurePath) -> int | None:
    """The epoch that a step is of, which its own name or that of the folder above says; None where neither does.

    >>> [epoch_of(PurePath(path)) for path in ("epoch_3_step_70", "epoch_3/step_70", "run/step_70", "epoch_3")]
    [3, 3, None, None]
    """
    form = _form_of(folder.name)
    if form is None or counter_of(folder) != "steps":
        return None
    if "epoch" in form_of(form).groupindex:
        return number_in(folder.name, (form,), "epoch")
    return step_of(folder.parent) if counter_of(folder.parent) == "epochs" else None


def numbered(folder: PurePath, number: int | None) -> dict[str, int | None]:
    """What the number of a step folder says, for manifests: the ``step`` of the training, or what else it counts.

    >>> numbered(PurePath("step_3"), 3), numbered(PurePath("checkpoint_0"), 0)
    ({'step': 3}, {'step': None, 'saves': 0})
    """
    counter = counts_other(folder)
    return {"step": number} if counter is None or number is None else {"step": None, counter: number}


def number_in_manifest(facts: Mapping[str, object]) -> int | None:
    """The number of the step folder of which a manifest has the facts, whatever it counts."""
    said = (facts.get(name) for name in ("step", "epochs", "saves"))
    return next((number for number in said if isinstance(number, int) and not isinstance(number, bool)), None)


def counts_other(folder: PurePath) -> str | None:
    """What the number of a folder counts if that is not steps: epochs or saves, so that no step can contradict it.

    >>> [counts_other(PurePath(name)) for name in ("epoch_3", "checkpoint_3", "checkpoint-3")]
    ['epochs', 'saves', None]
    """
    counter = "saves" if number_in(folder.name, OF_SAVES) is not None else counter_of(folder)
    return None if counter == "steps" else counter
