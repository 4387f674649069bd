"""The files of a legacy step: one per rank of tensor, pipeline and expert parallelism, and what they say of themselves.

``mp_rank_TT[_PPP][_EEE]``: the pipeline stage is named only if there are several, and so is the expert rank (Megatron-LM,
``get_checkpoint_name``), so that only the arguments tell what ``_001`` is. Context and data parallelism leave no trace.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, Inconsistent, MissingShard, Unsupported, reading
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import StoredTensor, TorchFile
from ckpt_cli.formats.megatron.common import ITERATION, SCHEDULER, Common, entries_of, read_common, unused_in
from ckpt_cli.formats.rank_files.dtensor import LocalReader
from ckpt_cli.formats.torch_files.state_dict import read_state
from ckpt_cli.formats.unused.search import Unused
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Leaf

RANK_FOLDER = re.compile(r"mp_rank_(?P<numbers>[0-9]{2,}(_[0-9]{3,})*)", re.ASCII)
FILE = "model_optim_rng.pt"
VERSION = "checkpoint_version"
FIRST_VERSION = 2
"""Before that, rows of queries, keys and values were in other orders (Megatron-LM, ``fix_query_key_value_ordering``)."""

CHUNK = re.compile(r"model(?P<number>[0-9]{1,4})?", re.ASCII)
MAX_CHUNKS = 1 << 10


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ranks cut the model: tensors, pipeline stages, chunks of layers per stage, experts."""

    tp: int
    pp: int
    vpp: int
    ep: int


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's file: its coordinates, per chunk of layers the tensors and the entries that are none, and what is beside the chunks."""

    number: int
    path: Path
    tp: int
    pp: int
    ep: int
    common: Common
    chunks: tuple[Mapping[str, StoredTensor], ...]
    leaves: tuple[Leaf, ...]
    unused: Unused


def sizes_of(common: Common, path: Path) -> Sizes:
    """The sizes that the arguments of a file say. Raises Unsupported without arguments, and for experts that are cut otherwise."""
    tp, pp = common.size("tp"), common.size("pp")
    if tp is None or pp is None:
        raise Unsupported(
            "the file holds no arguments of Megatron, without which nothing tells what its ranks are",
            path=path,
            expected="args with tensor_model_parallel_size and pipeline_model_parallel_size",
        )
    ep, etp = common.size("ep") or 1, common.size("etp")
    extended = common.arguments.get("moe_extended_tp") is True and ep > 1
    if common.arguments.get("num_experts") is not None and (extended or (etp is not None and etp != tp)):
        raise Unsupported(
            f"experts were cut by {tp * ep if extended else etp} ranks and other tensors by {tp}, which legacy files do not show",
            path=path,
            expected="expert_tensor_parallel_size = tensor_model_parallel_size",
            hint="load it with Megatron and save it in the format torch_dist",
        )
    return Sizes(tp, pp, common.size("vpp") or 1, ep)


def read_ranks(paths: Sequence[Path], files: Files) -> tuple[Sizes, list[RankFile]]:
    """The files of all ranks, proved to be all of one save. Raises MissingShard, Inconsistent, Unsupported, CorruptFile."""
    first = _common_of(files.parsed(paths[0], TorchFile), paths[0])
    sizes = sizes_of(first, paths[0])
    coordinates = _coordinates(sizes, paths)
    ranks: list[RankFile] = []
    for number, path in enumerate(paths):
        file = files.parsed(path, TorchFile)
        common = first if number == 0 else _common_of(file, path)
        _check_alike(common, sizes, first, path, paths[0])
        tp, pp, ep = coordinates[path]
        chunks, leaves = _chunks(file, path, sizes, number)
        ranks.append(RankFile(number, path, tp, pp, ep, common, chunks, leaves, _unused(file)))
    return sizes, ranks


def _common_of(file: TorchFile, path: Path) -> Common:
    with reading(path):
        return read_common(file, lambda key: key in (ITERATION, SCHEDULER, VERSION))


def _check_alike(common: Common, sizes: Sizes, first: Common, path: Path, other: Path) -> None:
    version = common.values.get(VERSION)
    if not isinstance(version, (int, float)) or version < FIRST_VERSION:
        text = f"its checkpoint_version is {str(version)[:20]}: the rows of queries, keys and values are in another order"
        raise Unsupported(text, path=path, expected=f"{FIRST_VERSION} or more", hint="load it with Megatron and save it again")
    if sizes_of(common, path) != sizes:
        raise Inconsistent(f"{other.parent.name} is of a run with other numbers of ranks", path=path, expected="files of one save")
    if common.iteration != first.iteration:
        raise Inconsistent(
            f"it is of iteration {common.iteration}, {other.parent.name} of {first.iteration}: files of two saves are mixed",
            path=path,
            expected=f"iteration {first.iteration} in all files",
        )


def _coordinates(sizes: Sizes, paths: Sequence[Path]) -> dict[Path, tuple[int, int, int]]:
    """The ranks of tensors, stages and experts of every file, by the names of their folders."""
    wanted = math.prod((sizes.tp, sizes.pp, sizes.ep))
    named = {path.parent.name: path for path in paths}
    found: dict[Path, tuple[int, int, int]] = {}
    lacking: list[str] = []
    # One more than there are files is enough to see that some are missing.
    grid = itertools.islice(itertools.product(range(sizes.tp), range(sizes.pp), range(sizes.ep)), len(paths) + 12)
    for tp, pp, ep in grid:
        name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if sizes.pp > 1 else "") + (f"_{ep:03d}" if sizes.ep > 1 else "")
        if name in named:
            found[named[name]] = tp, pp, ep
        else:
            lacking.append(name)
    if lacking:
        said = f"TP {sizes.tp}, PP {sizes.pp}, EP {sizes.ep}"
        raise MissingShard(
            f"{wanted - len(found)} of {wanted} ranks are missing ({said}): {few(lacking)}",
            path=paths[0].parent.parent,
            expected=str(paths[0].parent.parent / lacking[0] / FILE),
            hint="copy them from the nodes that wrote them, or pass their folders with --also",
        )
    unknown = [path.parent.name for path in paths if path not in found]
    if unknown:
        text = f"{few(unknown)} are of no rank of this run (TP {sizes.tp}, PP {sizes.pp}, EP {sizes.ep}): left over from another save"
        raise Inconsistent(text, path=paths[0].parent.parent, expected=f"{wanted} folders", hint="move them away")
    return found


def _unused(file: TorchFile) -> Unused:
    return unused_in({key: node for key, node in entries_of(file).items() if not (isinstance(key, str) and CHUNK.fullmatch(key))})


def _chunks(file: TorchFile, path: Path, sizes: Sizes, number: int) -> tuple[tuple[Mapping[str, StoredTensor], ...], tuple[Leaf, ...]]:
    """The state dicts of the chunks of layers of one rank: ``model``, or ``model0``, ``model1``, ... with a virtual pipeline."""
    entries = as_dict(file.root) or {}
    held: dict[int, Any] = {}
    for key, node in entries.items():
        fields = CHUNK.fullmatch(key) if isinstance(key, str) else None
        if fields is not None:
            if int(fields["number"] or 0) in held:
                raise CorruptFile("it holds both model and model0", path=path, expected="one of them")
            held[int(fields["number"] or 0)] = node
    if sorted(held) != [*range(min(sizes.vpp, MAX_CHUNKS))]:
        expected = "model" if sizes.vpp == 1 else f"model0 to model{sizes.vpp - 1}"
        raise CorruptFile(f"it holds {few([f'model{n}' for n in sorted(held)]) or 'no model'}", path=path, expected=expected)
    chunks: list[Mapping[str, StoredTensor]] = []
    leaves: list[Leaf] = []
    for chunk in range(len(held)):
        named = as_dict(held[chunk])
        if named is None:
            raise CorruptFile("its model is no state dict", path=path, expected="a dict of tensors")
        locals_, others = read_state(named, LocalReader(file, number), path)
        foreign = next((name for name, local in locals_.items() if not isinstance(local, StoredTensor)), None)
        if foreign is not None:
            raise Unsupported("it is a distributed tensor in a file of Megatron's own ranks", path=path, tensor=foreign)
        chunks.append({name: local for name, local in locals_.items() if isinstance(local, StoredTensor)})
        leaves += others
    return tuple(chunks), tuple(leaves)
