"""The files of one DeepSpeed save (a *tag* folder), by their names.

========================  ====================================================================================================
save                      files
========================  ====================================================================================================
stage 0                   ``mp_rank_00_model_states.pt``
stage 1, 2                the same, and ``[bf16_]zero_pp_rank_D_mp_rank_00_optim_states.pt`` for every rank D
stage 3                   ``zero_pp_rank_D_mp_rank_00_model_states.pt`` and ``[bf16_]zero_pp_rank_D_mp_rank_00_optim_states.pt``
pipeline                  ``mp_rank_S_...`` for every stage S, and ``layer_LL-model_states.pt`` for every layer with weights
tensor parallelism        ``mp_rank_T_...`` for every rank T
experts                   ``layer_L_expert_E_mp_rank_00_model_states.pt``; at stage 0 ``expp_rank_E_mp_rank_00_optim_states.pt``
universal                 ``zero/<parameter>/fp32.pt``, beside the model_states of the save that it was made from
========================  ====================================================================================================

Source: DeepSpeed 0.14 to 0.19, ``runtime/engine.py`` and ``runtime/pipe/module.py``. ``pp_rank`` is the data parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_cli.errors import CkptError, Inconsistent, MixedWorldSizes, Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.base import MAX_RANKS

NUMBER = r"[0-9]{1,7}"
MODEL = re.compile(rf"(zero_pp_rank_(?P<dp>{NUMBER})_)?mp_rank_(?P<mp>{NUMBER})_model_states\.pt", re.ASCII)
OPTIMIZER = re.compile(rf"(bf16_|fp16_)?zero_pp_rank_(?P<dp>{NUMBER})_mp_rank_(?P<mp>{NUMBER})_optim_states\.pt", re.ASCII)
LAYER = re.compile(rf"layer_(?P<layer>{NUMBER})(-model_(?P<tp>{NUMBER}))?-model_states\.pt", re.ASCII)
EXPERT_FILE = re.compile(rf"layer_(?P<layer>{NUMBER})_expert_(?P<expert>{NUMBER})_mp_rank_(?P<mp>{NUMBER})_model_states\.pt", re.ASCII)
EXPERT_OPTIMIZER = re.compile(rf"expp_rank_(?P<rank>{NUMBER})_mp_rank_(?P<mp>{NUMBER})_optim_states\.pt", re.ASCII)
UNIVERSAL = "zero"
SUFFIX = "_states.pt"


@dataclass(frozen=True, slots=True)
class SaveFiles:
    """The files of a save.

    ``model`` and ``optimizer``: model parallel rank -> data parallel rank -> file, where the model states of stages 0 to 2 have no data
    parallel rank (-1). ``experts`` by (number of the MoE layer, global expert). ``parameters`` are the folders of a universal save.
    ``trouble``: names that cannot be of one save.
    """

    model: Mapping[int, Mapping[int, Path]]
    optimizer: Mapping[int, Mapping[int, Path]]
    layers: Mapping[int, Path] = field(default_factory=dict)
    experts: Mapping[tuple[int, int], Path] = field(default_factory=dict)
    expert_optimizer: Mapping[int, Path] = field(default_factory=dict)
    parameters: tuple[Path, ...] = ()
    trouble: CkptError | None = None

    @property
    def optimizer_ranks(self) -> Mapping[int, Path]:
        """The data parallel ranks whose optimizer states are there, if there is one model parallel rank."""
        return next(iter(self.optimizer.values())) if len(self.optimizer) == 1 else {}

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file, the model states first; of a universal save without those of the parameters."""
        by_rank = (path for held in (self.model, self.optimizer) for ranks in held.values() for path in ranks.values())
        return (*by_rank, *self.layers.values(), *self.experts.values(), *self.expert_optimizer.values())


def is_deepspeed_name(name: str) -> bool:
    """Whether a file is called as DeepSpeed calls the files of a save."""
    return any(regex.fullmatch(name) for regex in (MODEL, OPTIMIZER, LAYER, EXPERT_FILE, EXPERT_OPTIMIZER))


def is_model_states(name: str) -> bool:
    """Whether a file is called as the model states of a rank are."""
    return MODEL.fullmatch(name) is not None


def files_in_save(folder: Path, there: Folders) -> list[Path]:
    """The files of a folder that are called like DeepSpeed's."""
    return there.files(folder, lambda name: name.endswith(SUFFIX) and is_deepspeed_name(name))


def save_files(paths: Iterable[Path]) -> SaveFiles:
    """The files of a save by their names, without the folders of a universal one."""
    found = _Names()
    for path in paths:
        found.add(path)
    return SaveFiles(
        {mp: dict(sorted(ranks.items())) for mp, ranks in sorted(found.model.items())},
        {mp: dict(sorted(ranks.items())) for mp, ranks in sorted(found.optimizer.items())},
        dict(sorted(found.layers.items())),
        dict(sorted(found.experts.items())),
        dict(sorted(found.expert_optimizer.items())),
        trouble=found.trouble or found.two_stages(),
    )


def cut_layers(path: Path) -> Unsupported:
    """The error for a pipeline with tensor parallelism, as Megatron-DeepSpeed trains: each layer has a file per rank of that.

    The tool is the same in BigScience's and in Microsoft's Megatron-DeepSpeed. DeepSpeed itself does not put tensors together.
    """
    return Unsupported(
        "a pipeline whose layers are also cut by tensor parallelism is not read",
        path=path,
        hint="Megatron-DeepSpeed puts the parts together: tools/convert_checkpoint/deepspeed_to_megatron.py with target_tp 1, target_pp 1",
    )


class _Names:
    def __init__(self) -> None:
        self.model: dict[int, dict[int, Path]] = {}
        self.optimizer: dict[int, dict[int, Path]] = {}
        self.layers: dict[int, Path] = {}
        self.experts: dict[tuple[int, int], Path] = {}
        self.expert_optimizer: dict[int, Path] = {}
        self.trouble: CkptError | None = None

    def add(self, path: Path) -> None:
        name = path.name
        if (fields := MODEL.fullmatch(name)) is not None:
            ranks = self.model.setdefault(int(fields["mp"]), {})
            self._put(ranks, int(fields["dp"]) if fields["dp"] is not None else -1, path)
        elif (fields := OPTIMIZER.fullmatch(name)) is not None:
            self._put(self.optimizer.setdefault(int(fields["mp"]), {}), int(fields["dp"]), path)
        elif (fields := EXPERT_FILE.fullmatch(name)) is not None:
            self._put(self.experts, (int(fields["layer"]), int(fields["expert"])), path)
        elif (fields := EXPERT_OPTIMIZER.fullmatch(name)) is not None:
            self._put(self.expert_optimizer, int(fields["rank"]), path)
        elif (fields := LAYER.fullmatch(name)) is not None:
            if int(fields["tp"] or 0):
                self.trouble = self.trouble or cut_layers(path)
            else:
                self._put(self.layers, int(fields["layer"]), path)

    def _put(self, held: dict, key: object, path: Path) -> None:  # type: ignore[type-arg]
        other = held.setdefault(key, path)
        if other is not path and self.trouble is None:
            text = f"{other.name} and {path.name} claim to be the same part of the save"
            self.trouble = Inconsistent(text, path=path.parent, hint="move away the one that is not of this save")
        highest = max(key) if isinstance(key, tuple) else key
        if isinstance(highest, int) and highest >= MAX_RANKS and self.trouble is None:
            self.trouble = MixedWorldSizes(f"{highest} cannot be the number of a rank", path=path, hint="the file may have been renamed")

    def two_stages(self) -> CkptError | None:
        for ranks in self.model.values():
            if -1 in ranks and len(ranks) > 1:
                both = f"{ranks[-1].name} and {next(path for rank, path in ranks.items() if rank >= 0).name}"
                text = f"{both} are of different saves: only ZeRO stage 3 has model states of every rank"
                hint = "move the files of the older save to another folder"
                return Inconsistent(text, path=ranks[-1].parent, expected="files of one save", hint=hint)
        return None
