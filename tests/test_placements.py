"""Every placement that torch can save: cut by an independent rule, saved as real DTensors, merged, compared byte by byte."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_cli import merge
from ckpt_cli.errors import Inconsistent, MissingShard, Unsupported
from ckpt_cli.formats.placeholders import placeholders

Shape = tuple[int, ...]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.complex64,
]

STORAGES = ["contiguous", "padded rows", "padded columns", "transposed"]


@dataclass(frozen=True)
class Mesh:
    """Sizes and names of the dimensions, and the ranks in C order (torch allows any order)."""

    shape: Shape
    ranks: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return ("ddp", "fsdp", "tp")[-len(self.shape) :]

    def coordinate(self, rank: int) -> Shape:
        return tuple(int(i) for i in np.unravel_index(self.ranks.index(rank), self.shape))


def plain_mesh(*shape: int) -> Mesh:
    return Mesh(shape, tuple(range(math.prod(shape))))


@dataclass(frozen=True)
class Laid:
    """A tensor, its placements (None: a plain tensor on every rank), and how ranks happen to store their part of it."""

    values: torch.Tensor
    placements: tuple[Placement, ...] | None
    storage: str = "contiguous"


# -- the oracle: which rows, columns, ... a rank holds ---------------------------------------------------------------


def cuts_of(axis: int, mesh: Mesh, placements: Sequence[Placement]) -> list[int]:
    """The mesh dimensions that cut an axis, first cut first.

    Left to right; but FSDP2 cuts what tensor parallelism has cut already, which is what _StridedShard records.
    """
    cutting = [i for i, p in enumerate(placements) if isinstance(p, (Shard, _StridedShard)) and p.dim == axis]
    return sorted(cutting, key=lambda i: (isinstance(placements[i], _StridedShard), i))


def local_indices(length: int, axis: int, mesh: Mesh, placements: Sequence[Placement], coordinate: Shape) -> Any:
    held = np.arange(length)
    for i in cuts_of(axis, mesh, placements):
        size = -(-len(held) // mesh.shape[i])
        held = held[coordinate[i] * size : (coordinate[i] + 1) * size]
    return held


def local_part(laid: Laid, mesh: Mesh, rank: int) -> torch.Tensor:
    assert laid.placements is not None
    part = laid.values
    for axis, length in enumerate(laid.values.shape):
        held = local_indices(length, axis, mesh, laid.placements, mesh.coordinate(rank))
        part = _take(part, axis, held)
    return part


def _take(tensor: torch.Tensor, axis: int, held: Any) -> torch.Tensor:
    """``index_select``, which torch lacks for some dtype."""
    raw = tensor.contiguous().view(torch.uint8).reshape(*tensor.shape, tensor.element_size())
    return raw.index_select(axis, torch.from_numpy(held)).view(tensor.dtype).squeeze(-1)


# -- writing what a trainer would write ------------------------------------------------------------------------------


def stored(part: torch.Tensor, storage: str) -> torch.Tensor:
    """The same values, laid out in memory in another way."""
    part = part.clone()
    if storage == "contiguous" or part.dim() == 0:
        return part
    if storage == "transposed":
        return part.movedim(0, -1).contiguous().movedim(-1, 0)
    sizes = list(part.shape)
    axis = 0 if storage == "padded rows" else len(sizes) - 1
    sizes[axis] += 3
    # torch cannot save a DTensor whose part begins behind the start of its storage.
    start = 2 if storage == "shifted columns" else 0
    view = torch.empty(sizes, dtype=part.dtype).narrow(axis, start, part.shape[axis])
    view.copy_(part)
    return view


def contiguous_stride(shape: Shape) -> Shape:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def save_ranks(
    folder: Path,
    mesh: Mesh,
    tensors: Mapping[str, Laid],
    change: Callable[[int, str, torch.Tensor], torch.Tensor] = lambda _rank, _name, part: part,
) -> None:
    """One torch.save file per rank; a fake process group plays the ranks in turn. ``change`` spoils parts."""
    folder.mkdir(exist_ok=True)
    world = len(mesh.ranks)
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            device_mesh = DeviceMesh("cpu", torch.tensor(mesh.ranks).reshape(mesh.shape), mesh_dim_names=mesh.names)
            state: dict[str, torch.Tensor] = {}
            for name, laid in tensors.items():
                if laid.placements is None:
                    state[name] = stored(change(rank, name, laid.values), laid.storage)
                    continue
                shape = tuple(laid.values.shape)
                state[name] = DTensor.from_local(
                    stored(change(rank, name, local_part(laid, mesh, rank)), laid.storage),
                    device_mesh,
                    laid.placements,
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=contiguous_stride(shape),
                )
            torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


def rank_file(folder: Path, world: int, rank: int) -> Path:
    return folder / f"model_world_size_{world}_rank_{rank}.pt"


def assert_merges_to(folder: Path, expected: Mapping[str, torch.Tensor], **options: Any) -> None:
    output = folder.with_name(f"{folder.name}_merged")
    merge(folder, output, overwrite=True, **options)
    found = load_file(output / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), name
        assert torch.equal(raw(found[name]), raw(values)), name


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def random_tensor(shape: Shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    flat = torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).reshape(shape)


# -- what may be drawn -----------------------------------------------------------------------------------------------


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple).filter(lambda shape: math.prod(shape) <= 12))
    ranks = list(range(math.prod(shape)))
    return Mesh(shape, tuple(draw(st.permutations(ranks)) if draw(st.booleans()) else ranks))


@st.composite
def placements_on(draw: st.DrawFn, mesh: Mesh, rank: int) -> tuple[Placement, ...]:
    choices: list[Placement] = [Replicate(), *(Shard(d) for d in range(rank))]
    chosen = [draw(st.sampled_from(choices)) for _ in mesh.shape]
    if rank and len(mesh.shape) > 1 and draw(st.booleans()):
        # FSDP2 over tensor parallelism on one axis; whatever else the mesh has leaves this axis alone.
        fsdp, tp = sorted(draw(st.permutations(range(len(mesh.shape))))[:2])
        axis = draw(st.integers(0, rank - 1))
        chosen = [Replicate() if isinstance(p, Shard) and p.dim == axis else p for p in chosen]
        # torch writes a plain Shard where there is nothing to stride over.
        chosen[fsdp] = _StridedShard(axis, split_factor=mesh.shape[tp]) if mesh.shape[tp] > 1 else Shard(axis)
        chosen[tp] = Shard(axis)
    return tuple(chosen)


@st.composite
def tensors_on(draw: st.DrawFn, mesh: Mesh) -> dict[str, Laid]:
    tensors = {}
    for i in range(draw(st.integers(3, 8))):
        shape = draw(st.lists(st.integers(0, 13), max_size=3).map(tuple))
        values = random_tensor(shape, draw(st.sampled_from(DTYPES)), i)
        placements = draw(st.none() | placements_on(mesh, len(shape)))
        storage = draw(st.sampled_from([*STORAGES, "shifted columns"] if placements is None else STORAGES))
        tensors[f"layers.{i}.weight"] = Laid(values, placements, storage)
    return tensors


class TestAnyPlacement:
    @given(data=st.data())
    @settings(deadline=None, derandomize=True, max_examples=150)
    def test_merges_to_the_bytes_from_before_the_sharding(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        mesh = data.draw(meshes())
        tensors = data.draw(tensors_on(mesh))
        assume(not placeholders({name: tuple(laid.values.shape) for name, laid in tensors.items()}))
        folder = tmp_path_factory.mktemp("example") / "run"
        save_ranks(folder, mesh, tensors)
        assert_merges_to(folder, {name: laid.values for name, laid in tensors.items()})

    @pytest.mark.parametrize("length", range(14))
    def test_fsdp_over_tensor_parallelism_of_every_length(self, length: int, tmp_path: Path) -> None:
        mesh = plain_mesh(3, 4)
        nested = [(_StridedShard(axis, split_factor=4), Shard(axis)) for axis in (0, 1)]
        tensors = {
            "rows": Laid(random_tensor((length, 2), torch.float32, 0), nested[0]),
            "columns": Laid(random_tensor((2, length), torch.float32, 1), nested[1]),
            "whole": Laid(torch.ones(1), None),
        }
        save_ranks(tmp_path / "run", mesh, tensors)
        assert_merges_to(tmp_path / "run", {name: laid.values for name, laid in tensors.items()})

    @pytest.mark.parametrize("length", range(14))
    def test_two_plain_cuts_of_one_axis_go_from_left_to_right(self, length: int, tmp_path: Path) -> None:
        mesh = Mesh((3, 4), tuple(reversed(range(12))))
        tensors = {"w": Laid(random_tensor((length, 3), torch.bfloat16, 1), (Shard(0), Shard(0))), "whole": Laid(torch.ones(1), None)}
        save_ranks(tmp_path / "run", mesh, tensors)
        assert_merges_to(tmp_path / "run", {name: laid.values for name, laid in tensors.items()})

    def test_a_tensor_in_many_scattered_storages_is_cast_like_a_whole_one(self, tmp_path: Path) -> None:
        mesh = plain_mesh(2, 3)
        values = torch.randn(37, 29, generator=torch.Generator().manual_seed(0))
        placements = [(Shard(0), Shard(1)), (Shard(1), Shard(1)), (_StridedShard(0, split_factor=3), Shard(0)), (Replicate(), Shard(1))]
        tensors = {f"{i}.{storage}": Laid(values, p, storage) for i, p in enumerate(placements) for storage in STORAGES}
        save_ranks(tmp_path / "run", mesh, tensors)
        assert_merges_to(tmp_path / "run", dict.fromkeys(tensors, values.bfloat16()), dtype="bf16")


class TestValuesDecideNothing:
    def test_equal_shards_are_not_replicas(self, tmp_path: Path) -> None:
        save_ranks(
            tmp_path / "run", plain_mesh(4), {"norm.weight": Laid(torch.ones(10), (Shard(0),)), "bias": Laid(torch.zeros(8), (Shard(0),))}
        )
        assert_merges_to(tmp_path / "run", {"norm.weight": torch.ones(10), "bias": torch.zeros(8)})

    def test_replicas_of_a_distributed_tensor_are_taken_from_the_lowest_rank(self, tmp_path: Path) -> None:
        # Rank 0 sits at the end of the mesh; which copy counts must not depend on that.
        values = torch.arange(6.0)
        save_ranks(
            tmp_path / "run", Mesh((3,), (2, 1, 0)), {"w": Laid(values, (Replicate(),))}, change=lambda rank, _, part: part + 100 * rank
        )
        with pytest.raises(Inconsistent, match="different values of what should be replicas"):
            merge(tmp_path / "run", tmp_path / "run_merged")
        assert_merges_to(tmp_path / "run", {"w": values}, allow_unequal_replicas=True)

    def test_plain_tensors_that_differ_are_refused_unless_allowed(self, tmp_path: Path) -> None:
        values = torch.arange(6.0)
        tensors = {"buffer": Laid(values, None), "w": Laid(values, (Shard(0),))}
        save_ranks(tmp_path / "run", plain_mesh(2), tensors, change=lambda rank, name, part: part + rank if name == "buffer" else part)
        with pytest.raises(Inconsistent) as caught:
            merge(tmp_path / "run", tmp_path / "run_merged")
        assert caught.value.tensor == "buffer"
        assert not (tmp_path / "run_merged").exists()
        assert_merges_to(tmp_path / "run", {"buffer": values, "w": values}, allow_unequal_replicas=True)

    def test_plain_tensors_may_be_stored_differently(self, tmp_path: Path) -> None:
        values = torch.arange(6.0).reshape(2, 3)

        def lay_out(rank: int, name: str, part: torch.Tensor) -> torch.Tensor:
            return part.t().contiguous().t() if rank else part

        save_ranks(tmp_path / "run", plain_mesh(2), {"buffer": Laid(values, None)}, change=lay_out)
        assert_merges_to(tmp_path / "run", {"buffer": values})


@dataclass(frozen=True)
class Saved:
    folder: Path
    expected: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def hsdp(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("hsdp") / "run"
    tensors = {
        "w": Laid(random_tensor((7, 3), torch.float32, 0), (Replicate(), Shard(0))),
        "v": Laid(random_tensor((2, 9), torch.bfloat16, 1), (Replicate(), Shard(1))),
        "buffer": Laid(random_tensor((4,), torch.int64, 2), None),
    }
    save_ranks(folder, plain_mesh(2, 3), tensors)
    return Saved(folder, {name: laid.values for name, laid in tensors.items()})


class TestMissingRanks:
    """Two replica rows of three shards each: ranks 0 1 2 and 3 4 5."""

    @pytest.mark.parametrize("count", range(1, 7))
    def test_merge_where_every_shard_is_still_there_and_are_refused_otherwise(self, count: int, hsdp: Saved, tmp_path: Path) -> None:
        for kept in itertools.combinations(range(6), count):
            folder = tmp_path / f"ranks {kept}"
            folder.mkdir()
            for rank in kept:
                rank_file(folder, 6, rank).hardlink_to(rank_file(hsdp.folder, 6, rank))
            if {rank % 3 for rank in kept} == {0, 1, 2}:
                assert_merges_to(folder, hsdp.expected)
                continue
            with pytest.raises(MissingShard) as caught:
                merge(folder, tmp_path / "out")
            missing = [rank for rank in range(6) if rank not in kept]
            assert ", ".join(map(str, missing)) in caught.value.message
            assert caught.value.expected == str(rank_file(folder, 6, missing[0]))
            assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("lost", range(4))
    def test_of_a_fully_sharded_checkpoint_are_never_made_up_for(self, lost: int, tmp_path: Path) -> None:
        save_ranks(tmp_path / "run", plain_mesh(4), {"w": Laid(torch.ones(8), (Shard(0),)), "buffer": Laid(torch.ones(2), None)})
        rank_file(tmp_path / "run", 4, lost).unlink()
        with pytest.raises(MissingShard, match=rf"rank {lost}\b.* missing"):
            merge(tmp_path / "run", tmp_path / "out")

    def test_that_hold_nothing_are_missed_all_the_same_or_not_needed(self, tmp_path: Path) -> None:
        # Three rows over five ranks: ranks 3 and 4 hold no element, so all elements are there without them.
        values = random_tensor((3, 2), torch.float32, 0)
        save_ranks(tmp_path / "run", plain_mesh(5), {"w": Laid(values, (Shard(0),))})
        rank_file(tmp_path / "run", 5, 4).unlink()
        assert_merges_to(tmp_path / "run", {"w": values})


class TestWhatIsRefused:
    @pytest.mark.parametrize("placement", [Partial(), Partial("avg"), Partial("max")], ids=str)
    def test_summands_that_were_never_reduced(self, placement: Placement, tmp_path: Path) -> None:
        tensors = {"fine": Laid(torch.ones(4), (Shard(0),)), "grad": Laid(torch.ones(4), (placement,))}
        save_ranks(tmp_path / "run", plain_mesh(2), tensors)
        with pytest.raises(Unsupported, match="Partial") as caught:
            merge(tmp_path / "run", tmp_path / "out")
        assert caught.value.tensor == "grad"
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("rank", [0, 2])
    def test_a_part_of_another_size_than_its_placement_says(self, rank: int, tmp_path: Path) -> None:
        save_ranks(
            tmp_path / "run",
            plain_mesh(3),
            {"w": Laid(torch.arange(9.0), (Shard(0),))},
            change=lambda r, _, part: part[:2] if r == rank else part,
        )
        with pytest.raises(Inconsistent) as caught:
            merge(tmp_path / "run", tmp_path / "out")
        assert caught.value.tensor == "w"
        assert f"rank {rank}" in caught.value.message

    def test_ranks_that_disagree_about_the_dtype(self, tmp_path: Path) -> None:
        save_ranks(
            tmp_path / "run",
            plain_mesh(2),
            {"w": Laid(torch.arange(8.0), (Shard(0),))},
            change=lambda rank, _, part: part.bfloat16() if rank else part,
        )
        with pytest.raises(Inconsistent, match="dtype"):
            merge(tmp_path / "run", tmp_path / "out")

    @pytest.mark.parametrize("other", ["shape", "placement", "names"])
    def test_files_of_two_runs_in_one_folder(self, other: str, tmp_path: Path) -> None:
        save_ranks(tmp_path / "run", plain_mesh(2), {"w": Laid(torch.ones(4, 4), (Shard(0),))})
        second = {
            "shape": {"w": Laid(torch.ones(4, 6), (Shard(0),))},
            "placement": {"w": Laid(torch.ones(4, 4), (Shard(1),))},
            "names": {"v": Laid(torch.ones(4, 4), (Shard(0),))},
        }[other]
        save_ranks(tmp_path / "other", plain_mesh(2), second)
        rank_file(tmp_path / "other", 2, 1).replace(rank_file(tmp_path / "run", 2, 1))
        with pytest.raises(Inconsistent):
            merge(tmp_path / "run", tmp_path / "out")

    @pytest.mark.parametrize("what", ["renamed", "copied"])
    def test_a_file_under_the_name_of_another_rank(self, what: str, tmp_path: Path) -> None:
        save_ranks(tmp_path / "run", plain_mesh(2), {"w": Laid(torch.arange(4.0), (Shard(0),))})
        first, second = (rank_file(tmp_path / "run", 2, rank) for rank in (0, 1))
        if what == "renamed":
            first.rename(tmp_path / "swap")
            second.rename(first)
            (tmp_path / "swap").rename(second)
        else:
            second.write_bytes(first.read_bytes())
        with pytest.raises(Inconsistent):
            merge(tmp_path / "run", tmp_path / "out")


class TestLazyTensors:
    """torch saves the bytes from before a conjugation or a negation, and a flag."""

    @pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4)], ids=str)
    def test_are_written_as_what_they_are(self, shape: Shape, tmp_path: Path) -> None:
        values = random_tensor((*shape, 2), torch.int64, 0).double() % 1000
        z = torch.view_as_complex(values).to(torch.complex64)
        state = {"plain": z, "conj": z.clone().conj(), "neg": z.clone().conj().imag, "real": z.clone().real}
        assert state["conj"].is_conj()
        assert state["neg"].is_neg()
        folder = tmp_path / "run"
        folder.mkdir()
        torch.save(state, rank_file(folder, 1, 0))
        expected = {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in state.items()}
        assert_merges_to(folder, expected)
