"""What NVIDIA's ModelOpt keeps beside weights: how it changed the modules of a model, which nothing in the weights or config.json says.

``modelopt_state.pth`` lies in each checkpoint of transformers (``mto.enable_huggingface_checkpointing``), ``modelopt_state_train.pt`` in
the folder of a run with quantisation, and a folder ``modelopt_state`` in checkpoints of Megatron. ModelOpt builds quantisers, pruned
modules or draft heads from it when it loads the folder. It is a pickle, so it is neither read nor passed on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ckpt_cli.files.folders import files_in, folders_in
from ckpt_cli.tensors.component import Note

STATE = re.compile(r"modelopt_state(_\w+)?\.(pth?|bin)", re.ASCII)
FOLDER = "modelopt_state"


def modelopt_notes(homes: Sequence[Path], name: str) -> list[Note]:
    """A warning if ModelOpt changed the model of a component, which has its ``name`` and side files in ``homes``. Raises Unreadable."""
    for home in homes:
        for path in (*files_in(home, STATE.fullmatch), *folders_in(home, FOLDER.__eq__)):
            text = f"{path.name} says that ModelOpt changed the modules of {name} (quantisers, pruning or the like), and is a pickle, which"
            cure = "is left out: without it the output is loaded as a plain model, and ModelOpt loads it with that file beside"
            return [Note("warning", "modelopt", f"{text} {cure}")]
    return []
