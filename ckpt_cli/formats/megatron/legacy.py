"""Megatron's legacy steps: one file of ``torch.save`` per rank, joined by what the arguments in them say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_cli.errors import Inconsistent, MissingShard, reading
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.ages import age_notes
from ckpt_cli.formats.base import Format, Match, ReadOptions
from ckpt_cli.formats.megatron.common import Common
from ckpt_cli.formats.megatron.joining import joined, local_tensors, with_copies
from ckpt_cli.formats.megatron.native import in_order
from ckpt_cli.formats.megatron.one_save import read_save
from ckpt_cli.formats.megatron.ranks import FILE, RANK_FOLDER, RankFile, Sizes
from ckpt_cli.formats.megatron.reader import argument_leaves, check_iteration, iteration_of, step_note
from ckpt_cli.formats.megatron.training import of_ranks, refuse_numbered
from ckpt_cli.formats.optimizer_state import NamedState
from ckpt_cli.formats.sets.recorded import HINT
from ckpt_cli.formats.torch_files.state_dict import left_out_notes
from ckpt_cli.formats.unused.search import Unused
from ckpt_cli.names import check_name, plural
from ckpt_cli.tensors.component import Component, Mesh, Note
from ckpt_cli.tensors.tensor import Tensor

FORMAT = "megatron-legacy"
LAYERS = "decoder.layers."
FINAL_NORM = "decoder.final_layernorm.weight"
GATED = ("swiglu", "quick_geglu", "geglu", "gated_linear_unit")
"""Arguments with which ``linear_fc1`` holds a gate, whatever its activation is."""

FIRST_LINEAR = re.compile(r"(?P<before>.*\.)linear_fc1\.(weight|bias)(?P<expert>[0-9]*)", re.ASCII)
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

Ranks = Mapping[tuple[int, int], Tensor]
"""One tensor as the ranks of tensor and expert parallelism hold it."""


class Legacy(Format):
    """Reader of ``mp_rank_*/model_optim_rng.pt``."""

    name = FORMAT
    display = "Megatron legacy files"

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        inner = path.parent if path.name == FILE else path
        if RANK_FOLDER.fullmatch(inner.name) and there.is_file(inner / FILE):
            path = inner.parent
        if not there.is_folder(path):
            return []
        found = [folder / FILE for folder in there.folders(path, RANK_FOLDER.fullmatch) if there.is_file(folder / FILE)]
        return [Match(FORMAT, "model", path, tuple(found), self.display)] if found else []

    def part_name(self, file: Path) -> str:
        return file.parent.name

    def complements(self, first: Match, second: Match) -> bool:
        names = [{path.parent.name for path in match.files} for match in (first, second)]
        return not names[0] & names[1]

    def training_state(self, match: Match, files: Files) -> tuple[dict[str, Any], Path]:
        return of_ranks(match.files, files), match.root

    def doubts(self, match: Match, files: Files) -> list[Note]:
        return [*read_save(match.files, files)[2], *age_notes([files.source(path) for path in match.files])]

    def optimizer(self, match: Match, files: Files) -> NamedState | None:
        refuse_numbered(match.files, files)
        return None

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        sizes, ranks, notes = read_save(match.files, files)
        common = ranks[0].common
        check_iteration(common, match.root, iteration_of(match.root))
        with reading(match.root):
            tensors = in_order(_tensors(sizes, ranks))
        leaves = [leaf for rank in ranks for leaf in rank.leaves]
        notes += [*left_out_notes(leaves), *age_notes([files.source(path) for path in match.files])]
        notes += sum((rank.unused for rank in ranks), Unused()).notes
        notes.append(step_note(common, plural(len(ranks), "file of a rank", "files of ranks")))
        world = common.arguments.get("world_size")
        return Component(
            name=match.component,
            format=FORMAT,
            root=match.root,
            tensors=tensors,
            files=match.files,
            world_size=world if type(world) is int and world > 0 else None,
            mesh=_mesh(sizes, common),
            leaves=(*leaves, *argument_leaves(common)),
            notes=tuple(notes),
            writer=self.display,
            arguments=common.arguments,
        )


def _mesh(sizes: Sizes, common: Common) -> Mesh:
    held = {"tp": sizes.tp, "pp": sizes.pp, "vpp": sizes.vpp, "ep": sizes.ep, "dp": common.size("dp") or 1}
    shown = {name: size for name, size in held.items() if size > 1 or name in ("tp", "pp")}
    return Mesh(tuple(shown), tuple(shown.values()))


def _tensors(sizes: Sizes, ranks: Sequence[RankFile]) -> dict[str, Tensor]:
    arguments = ranks[0].common.arguments
    said = any(arguments.get(name) is True for name in GATED) if any(name in arguments for name in GATED) else None
    tied = arguments.get("untie_embeddings_and_output_weights") is False
    found: dict[str, list[Tensor]] = {}
    layers = 0
    # Layers are numbered anew in every chunk: chunk 0 of all stages comes first.
    for chunk in range(sizes.vpp):
        for stage in range(sizes.pp):
            held = _gathered([rank for rank in ranks if rank.pp == stage], chunk, _experts_of(sizes, arguments, ranks[0]))
            numbers = _numbers(held, ranks, stage)
            if (numbers and FINAL_NORM in found) or (EMBEDDING in held and layers and EMBEDDING not in found):
                text = f"pipeline stage {stage} belongs before the stages whose files count before it"
                path = next(rank.path for rank in ranks if rank.pp == stage)
                raise Inconsistent(text, path=path, expected="embedding first, final norm last", hint=HINT)
            for name, by_rank in held.items():
                new = _renumbered(name, layers)
                if tied and new == OUTPUT:
                    new = EMBEDDING
                with reading(tensor=new):
                    gated = sizes.tp > 1 and _is_gated(name, held, said)
                    found.setdefault(check_name(new), []).append(_whole(new, by_rank, sizes, gated=gated))
            layers += numbers
    expected = arguments.get("num_layers")
    if type(expected) is int and layers != expected:
        raise MissingShard(f"the files hold {layers} of {expected} layers", path=ranks[0].path, expected=f"{expected} layers")
    twice = next((name for name, held in found.items() if len(held) > 1 and name != EMBEDDING), None)
    if twice is not None:
        raise Inconsistent("two pipeline stages hold this tensor", tensor=twice, hint="files from two saves may be mixed")
    return {name: replace(with_copies(held), name=name) for name, held in found.items()}


def _experts_of(sizes: Sizes, arguments: Mapping[str, Any], first: RankFile) -> int | None:
    """How many experts one rank holds; None without experts."""
    count = arguments.get("num_experts")
    if type(count) is not int or count < 1:
        return None
    if count % sizes.ep:
        raise Inconsistent(f"{count} experts are no multiple of {sizes.ep} expert ranks", path=first.path)
    return count // sizes.ep


def _gathered(ranks: Sequence[RankFile], chunk: int, experts: int | None) -> dict[str, dict[tuple[int, int], Tensor]]:
    """The tensors of one chunk of one stage, by the names that they have there."""
    held: dict[str, dict[tuple[int, int], Tensor]] = {}
    for rank in ranks:
        with reading(rank.path):
            own = local_tensors(rank.chunks[chunk], rank.number, experts, (experts or 0) * rank.ep)
        for name, tensor in own.items():
            held.setdefault(name, {})[rank.tp, rank.ep] = tensor
    return held


def _numbers(held: Mapping[str, object], ranks: Sequence[RankFile], stage: int) -> int:
    """How many layers a chunk holds. Raises Inconsistent unless they are numbered from 0 on."""
    numbers = {int(part) for name in held if name.startswith(LAYERS) and (part := name.split(".")[2]).isdecimal()}
    if numbers and max(numbers) != len(numbers) - 1:
        text = f"pipeline stage {stage} holds layers {min(numbers)} to {max(numbers)}, {len(numbers)} in all"
        raise Inconsistent(text, path=next(rank.path for rank in ranks if rank.pp == stage), expected="layers numbered from 0 on")
    return len(numbers)


def _renumbered(name: str, layers: int) -> str:
    if not name.startswith(LAYERS):
        return name
    number, _, rest = name.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{int(number) + layers}.{rest}" if number.isdecimal() else name


def _is_gated(name: str, held: Mapping[str, Ranks], said: bool | None) -> bool:
    """Whether a ``linear_fc1`` holds a gate too: then it has twice the rows that ``linear_fc2`` has columns. ``said``: by the arguments.

    Raises Inconsistent if arguments and shapes contradict each other, or if neither tells.
    """
    module = FIRST_LINEAR.fullmatch(name)
    if module is None:
        return False
    up, down = (held.get(f"{module['before']}linear_fc{number}.weight{module['expert']}") for number in (1, 2))
    rows, columns = (next(iter(part.values())).shape if part else () for part in (up, down))
    shown = len(rows) == len(columns) == 2 and rows[0] in (columns[1], 2 * columns[1])
    found = rows[0] == 2 * columns[1] if shown else said
    if found is None or (said is not None and found is not said):
        shapes = f"shapes {list(rows)} of linear_fc1 and {list(columns)} of linear_fc2"
        text = f"the arguments say that it holds {'a gate' if said else 'no gate'}, and {shapes} say otherwise"
        raise Inconsistent(text if said is not None else f"neither the arguments nor {shapes} tell whether it holds a gate", tensor=name)
    return found


def _whole(name: str, held: Ranks, sizes: Sizes, *, gated: bool) -> Tensor:
    """A tensor of one stage from those of its ranks: of expert ranks replicas, unless only one holds the expert."""
    parts: list[Tensor] = []
    for tp in range(sizes.tp):
        own = [held[tp, ep] for ep in range(sizes.ep) if (tp, ep) in held]
        single = len({ep for _, ep in held}) == 1
        if not own or (len(own) < sizes.ep and not (single and ".experts." in name)):
            lacking = next((tp, ep) for ep in range(sizes.ep) if (tp, ep) not in held)
            text = f"rank {lacking[0]} of tensor and {lacking[1]} of expert parallelism lacks this tensor, others have it"
            raise Inconsistent(text, tensor=name, hint="files from two saves may be mixed")
        parts.append(with_copies(own))
    return joined(name, parts, gated=gated)
