"""Which files of a checkpoint hold training state, by their names: schedulers, random states, counters, dataloaders.

=======================================  =================================================  =====================================
trainer                                  read                                               copied untouched
=======================================  =================================================  =====================================
verl, EasyR1, SkyRL                      extra_state_world_size_W_rank_R.pt, trainer_state  data.pt, data_R.pt, dataloader.pt
lmms-engine                              extra_state/extra_state_world_size_W_rank_R.pt     dataloader_state/*.pt
Hugging Face Trainer                     scheduler.pt, rng_state_R.pth, trainer_state.json  training_args.bin
accelerate                               scheduler_K.bin, random_states_R.pkl, scaler.pt    custom_checkpoint_K.pkl,
                                                                                            sampler_K.bin, dl_state_dict_K.bin
Lightning                                meta.pt
OLMo-core                                train/rankR.pt
VeOmni                                   extra_state/extra_state_rank_R.pt
prime-rl                                                                                    dataloader/rank_R.pt
BAGEL                                    scheduler.pt, metadata.json                        data_status.pt
lerobot                                  training_state/training_step.json
=======================================  =================================================  =====================================

R is the rank that saved a file, W how many there were, K which of several objects of one kind it holds (none means 0).
What DCP folders hold besides tensors of the model is read by `ckpt_cli.formats.dcp.state`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpt_cli.errors import Inconsistent, MixedWorldSizes
from ckpt_cli.files.folders import entries_in, files_in, is_file
from ckpt_cli.formats.base import MAX_RANKS
from ckpt_cli.formats.trainers import STATES
from ckpt_cli.formats.training_state_names import is_state_file
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

Kind = Literal["extra", "random", "scheduler", "scaler", "json", "copied"]
"""``extra``: a dict of several states; ``random``: random states of one rank; ``copied``: passed on as it is."""

FOLDERS = ("", *STATES)
"""Where the files are, below the folder of a component and that of the checkpoint."""

RANK = r"(?P<rank>[0-9]+)"
OBJECT = re.compile(r"(?P<kind>scheduler|scaler|sampler|dl_state_dict|custom_checkpoint)(_[0-9]{1,9})?\.(?P<ending>pt|bin|pkl)", re.ASCII)
"""Which of several schedulers, dataloaders or registered objects a file holds: no rank, and never another one of the step before."""

PATTERNS: dict[str, Kind] = {
    rf"(extra_state/)?extra_state_world_size_(?P<world>[0-9]+)_rank_{RANK}\.pt": "extra",
    rf"(extra_state/)?extra_state_rank_{RANK}\.pt": "extra",
    rf"train/rank{RANK}\.pt": "extra",
    r"meta\.pt|trainer_state\.pt": "extra",
    rf"rng_state_{RANK}\.pth|rng_state\.pth": "random",
    rf"random_states_{RANK}\.pkl": "random",
    r"scheduler(_(?P<number>[0-9]{1,9}))?\.(pt|bin)": "scheduler",
    r"scaler(_(?P<number>[0-9]{1,9}))?\.(pt|bin)": "scaler",
    r"(trainer_state|metadata|training_state/training_step)\.json": "json",
    r"data\.pt|dataloader\.pt|data_status\.pt|training_args\.bin": "copied",
    r"custom_checkpoint_(?P<number>[0-9]{1,9})\.pkl": "copied",
    r"(sampler|dl_state_dict)(_(?P<number>[0-9]{1,9}))?\.bin": "copied",
    r"data_(?P<group>[0-9]+)\.pt": "copied",
    rf"(dataloader_state/)?dataloader_state_world_size_(?P<world>[0-9]+)_rank_{RANK}\.pt": "copied",
    rf"dataloader/rank_{RANK}\.pt": "copied",
}
"""Names below a folder, as expressions for whole paths. A ``group`` of data parallel ranks shares a file: there may be fewer than ranks."""


PICKLES = (".pt", ".pth", ".th", ".bin", ".ckpt", ".pkl")
OPTIMIZERS = re.compile(r"(distrib_)?optim", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file with training state; ``rank`` is None for files that are one for all ranks.

    ``family`` is the name with an R for the rank, None without one; ``grouped``: the number is that of a group of ranks. ``number``
    is which of several objects of one kind in one save it is (`of_objects`), 0 where there is one only.
    """

    path: Path
    kind: Kind
    rank: int | None = None
    world_size: int | None = None
    family: str | None = None
    grouped: bool = False
    number: int = 0

    @property
    def of_objects(self) -> str | None:
        """The name with a K for the number of its object, as ``scheduler_K.bin``; None for files that are not numbered so."""
        name = OBJECT.fullmatch(self.path.name) if self.rank is None else None
        return f"{name['kind']}_K.{name['ending']}" if name is not None else None

    @property
    def copy_name(self) -> str:
        """Its name in an output folder, which has no folders below."""
        return self.path.name if not self.path.name.startswith("rank_") else f"{self.path.parent.name}_{self.path.name}"


def find_state_files(homes: Sequence[Path]) -> list[StateFile]:
    """The state files in folders, ordered by kind and rank; of a name that is in several folders the first counts.

    Raises MixedWorldSizes if the files of ranks are of saves by different numbers of ranks, Inconsistent for a rank twice.
    """
    found: dict[str, StateFile] = {}
    for home in dict.fromkeys(homes):
        for folder in FOLDERS:
            named = [(path, f"{folder}/{path.name}" if folder else path.name) for path in entries_in(home / folder)]
            for file in (file for path, name in named if (file := _recognised(path, name)) is not None and is_file(path)):
                found.setdefault(file.copy_name, file)
    files = sorted(found.values(), key=lambda file: (file.kind, file.rank or 0, file.path.name))
    _check_ranks([file for file in files if file.kind in ("extra", "random") and file.rank is not None])
    return files


def unknown_notes(homes: Sequence[Path], weights: Container[Path]) -> list[Note]:
    """A warning about files called like training state, and not as any trainer that is known calls it. Optimizers are no part of it.

    ``weights`` are the files that were taken for those.
    """
    named = [path for home in dict.fromkeys(homes) for path in files_in(home, _may_be_state) if path not in weights]
    unknown = list(dict.fromkeys(path.name for path in named if _recognised(path, path.name) is None))
    text = f"{few(unknown)}: called like training state, and not as any known trainer calls it: neither read nor passed on"
    return [Note("warning", "unknown-state", text)] if unknown else []


def _may_be_state(name: str) -> bool:
    return name.endswith(PICKLES) and is_state_file(name) and OPTIMIZERS.match(name) is None


def _recognised(path: Path, name: str) -> StateFile | None:
    for pattern, kind in PATTERNS.items():
        fields = re.fullmatch(pattern, name)
        if fields:
            numbers = {key: int(value) for key, value in fields.groupdict().items() if value is not None}
            group = next((key for key in ("rank", "group") if key in numbers), None)
            if group is None:
                return StateFile(path, kind, number=numbers.get("number", 0))
            family = f"{name[: fields.start(group)]}R{name[fields.end(group) :]}"
            family = family if path.name.startswith("rank_") else family.rpartition("/")[2]
            return StateFile(path, kind, numbers[group], numbers.get("world"), family, group == "group")
    return None


def _check_ranks(files: Sequence[StateFile]) -> None:
    sizes = sorted({file.world_size for file in files if file.world_size is not None})
    if len(sizes) > 1:
        raise MixedWorldSizes(
            f"states of several world sizes are in one folder: {' and '.join(map(str, sizes))}",
            path=files[0].path.parent,
            expected="files of one save",
            hint="move the files of the older save to another folder",
        )
    highest = max((file.rank or 0 for file in files), default=0)
    if highest >= MAX_RANKS or any(not highest < size <= MAX_RANKS for size in sizes):
        raise MixedWorldSizes(
            f"rank {str(highest)[:20]} cannot be one of {str(sizes[0])[:20] if sizes else 'the'} ranks",
            path=files[0].path.parent,
            expected="files of one save",
            hint="the file may have been renamed or come from another save",
        )
    seen: dict[tuple[Kind, int | None], StateFile] = {}
    for file in files:
        other = seen.setdefault((file.kind, file.rank), file)
        if other is not file:
            text = f"two files claim to be the same rank: {other.path.name} and {file.path.name}"
            raise Inconsistent(text, path=file.path.parent, hint="move away the one that does not belong to this save")
