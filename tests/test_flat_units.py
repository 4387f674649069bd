"""FSDP1's flat parameters are divided as torch did, or not at all. Judges are torch's own wrapping and all ways to wrap a small model."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_cli.state.fsdp1_units import find_units, unproved

RANKS = range(1, 9)
LAYERS = 24
SLOW = 2.0
"""Seconds after which a search has taken too long."""

Units = list[list[int]]


@dataclass(frozen=True)
class Model:
    """Parameters in the order of their modules, and the names of all modules but the root, each before those inside of it."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    modules: tuple[str, ...]

    def units(self, wrapped: Sequence[str]) -> Units:
        """The parameters of each unit: the root first, then the wrapped modules; a parameter belongs to the innermost one."""
        owners = [max(("", *(w for w in wrapped if name.startswith(f"{w}."))), key=len) for name in self.names]
        held = [[index for index, owner in enumerate(owners) if owner == unit] for unit in ("", *wrapped)]
        return [unit for unit in held if unit]

    def lengths(self, units: Units, parts: int) -> list[int]:
        """Elements of one rank's part: flat parameters are padded to a multiple of the ranks."""
        return [-(-sum(self.sizes[index] for index in unit) // parts) for unit in units]

    def found(self, units: Units, parts: int) -> Units | None:
        return find_units(self.names, self.sizes, self.lengths(units, parts), parts)


# -- torch itself ----------------------------------------------------------------------------------------------------


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """A process group of ``ranks`` ranks of which only this one exists."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 3 * width, bias=False), torch.nn.Linear(3 * width, width))
        self.norm = torch.nn.LayerNorm(width)


class Ends(torch.nn.Module):
    """What comes before or after the layers, as a module of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(31, width))


class FinalNorm(torch.nn.LayerNorm):
    """A class of its own, so that it can be wrapped without those of the layers."""


class Transformer(torch.nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = Ends(width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.norm = FinalNorm(width)
        self.head = Ends(width)


def wrapped_by_torch(model: torch.nn.Module, **options: object) -> tuple[list[list[str]], list[int]]:
    """The names in each flat parameter, and how many elements of each this rank has, in the order of the optimizer."""
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)  # type: ignore[arg-type]
    units = []
    for prefix, module in wrapped.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            inside = [part for part in prefix.split(".") if part not in ("", "_fsdp_wrapped_module")]
            units.append([".".join([*inside, name]) for name in module._handle.flat_param._fqns])
    return units, [parameter.numel() for parameter in wrapped.parameters()]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
class TestWhatTorchWraps:
    """`FullyShardedDataParallel` wraps a model for any number of ranks; sizes alone say how."""

    def check(self, model: torch.nn.Module, ranks: int, **options: object) -> None:
        shapes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        with fake_group(ranks):
            units, lengths = wrapped_by_torch(model, **options)
        found = find_units(list(shapes), list(shapes.values()), lengths, ranks)
        assert found is not None
        assert [[list(shapes)[index] for index in unit] for unit in found] == units

    @pytest.mark.parametrize("ranks", RANKS)
    def test_layers_and_a_root_with_the_rest(self, ranks: int) -> None:
        self.check(Transformer(), ranks, auto_wrap_policy=ModuleWrapPolicy({Layer}))

    @pytest.mark.parametrize("ranks", RANKS)
    def test_layers_and_ends_and_a_root_with_a_norm(self, ranks: int) -> None:
        self.check(Transformer(), ranks, auto_wrap_policy=ModuleWrapPolicy({Layer, Ends}))

    @pytest.mark.parametrize("ranks", RANKS)
    def test_a_root_without_parameters_of_its_own(self, ranks: int) -> None:
        self.check(Transformer(), ranks, auto_wrap_policy=ModuleWrapPolicy({Layer, Ends, FinalNorm}))

    @pytest.mark.parametrize("ranks", RANKS)
    def test_nothing_but_the_root(self, ranks: int) -> None:
        self.check(Transformer(), ranks)

    @pytest.mark.parametrize("ranks", RANKS)
    @pytest.mark.parametrize("policy", [{Layer, torch.nn.Linear}, {Layer, torch.nn.Sequential}], ids=["linears", "mlps"])
    def test_units_inside_of_units_are_found_or_nothing_is(self, ranks: int, policy: set[type[torch.nn.Module]]) -> None:
        model = Transformer()
        shapes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        with fake_group(ranks):
            units, lengths = wrapped_by_torch(model, auto_wrap_policy=ModuleWrapPolicy(policy))
        found = find_units(list(shapes), list(shapes.values()), lengths, ranks)
        assert found is None or [[list(shapes)[index] for index in unit] for unit in found] == units

    @pytest.mark.parametrize("smallest", [50, 100, 200, 400, 1000])
    def test_wrapping_by_size_is_found_or_nothing_is(self, smallest: int) -> None:
        def policy(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=smallest)

        model = Transformer()
        shapes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        with fake_group(4):
            units, lengths = wrapped_by_torch(model, auto_wrap_policy=policy)
        found = find_units(list(shapes), list(shapes.values()), lengths, 4)
        assert found is None or [[list(shapes)[index] for index in unit] for unit in found] == units


# -- any model -------------------------------------------------------------------------------------------------------


def grown(source: random.Random, sizes: Sequence[int], prefix: str = "", depth: int = 0, mark: str = "m") -> Model:
    """A random tree of modules, with parameters at every level; without a ``mark`` modules have numbers as in a ModuleList."""
    own = [f"{prefix}p{i}" for i in range(source.choice((0, 0, 1, 2) if depth < 2 else (1, 2)))]
    names, elements, modules = list(own), [source.choice(sizes) for _ in own], []
    for i in range(source.choice((0, 1, 2, 3)) if depth < 3 else 0):
        inner = grown(source, sizes, f"{prefix}{mark}{i}.", depth + 1, mark)
        names += inner.names
        elements += inner.sizes
        modules += [f"{prefix}{mark}{i}", *inner.modules]
    return Model(tuple(names), tuple(elements), tuple(modules))


def some(source: random.Random, modules: Sequence[str], nested: bool) -> list[str]:
    """Modules to wrap, each with something inside; ``nested``: also inside of each other."""
    chosen = [module for module in modules if source.random() < 0.4]
    return chosen if nested else [m for m in chosen if not any(m.startswith(f"{other}.") for other in chosen)]


def of_some_classes(source: random.Random, model: Model) -> list[str]:
    """Modules to wrap by their class: those that have the same parameters are of one class."""
    classes: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for module in model.modules:
        held = [(n.removeprefix(module), size) for n, size in zip(model.names, model.sizes, strict=True) if n.startswith(f"{module}.")]
        classes.setdefault(tuple(held), []).append(module)
    chosen = {module for members in classes.values() if source.random() < 0.4 for module in members}
    return [module for module in model.modules if module in chosen]


SIZES = {"tiny": (1, 2, 3), "a few": (1, 5, 7, 12, 30), "many": tuple(range(1, 400))}


@pytest.mark.parametrize("sizes", SIZES)
class TestAnyModel:
    def outcomes(self, sizes: str, nested: bool, number: int = 2_000) -> Counter[str]:
        source = random.Random(f"{sizes} {nested}")
        counted: Counter[str] = Counter()
        for _ in range(number):
            model = grown(source, SIZES[sizes])
            units = model.units(some(source, model.modules, nested))
            if units:
                found = model.found(units, source.randint(1, 8))
                counted["none" if found is None else "right" if found == units else "wrong"] += 1
        return counted

    def test_wrapped_anywhere_is_never_divided_wrongly(self, sizes: str) -> None:
        counted = self.outcomes(sizes, nested=False)
        assert counted["wrong"] == 0
        assert counted["right"] > counted["none"]

    def test_wrapped_inside_of_wrapped_modules_is_never_divided_wrongly(self, sizes: str) -> None:
        assert self.outcomes(sizes, nested=True)["wrong"] == 0

    def test_wrapped_by_class_in_numbered_lists_is_never_divided_wrongly(self, sizes: str) -> None:
        source = random.Random(f"{sizes} classes")
        found_right = 0
        for _ in range(2_000):
            model = grown(source, SIZES[sizes], mark="")
            units = model.units(of_some_classes(source, model))
            if units:
                found = model.found(units, source.randint(1, 8))
                assert found in (None, units)
                found_right += found == units
        assert found_right > 500

    def test_is_divided_where_only_one_way_of_wrapping_fits(self, sizes: str) -> None:
        """All ways to wrap a small model are tried, units inside of units as well."""
        source = random.Random(sizes)
        only_one = 0
        for _ in range(300):
            model = grown(source, SIZES[sizes])
            units = model.units(some(source, model.modules, nested=False))
            if not units or len(model.modules) > 7:
                continue
            parts = source.randint(1, 8)
            lengths = model.lengths(units, parts)
            subsets = itertools.chain.from_iterable(itertools.combinations(model.modules, n) for n in range(len(model.modules) + 1))
            ways = {repr(way) for subset in subsets if model.lengths(way := model.units(subset), parts) == lengths}
            if len(ways) == 1:
                only_one += 1
                assert model.found(units, parts) == units
        assert only_one > 50


class TestSeveralWays:
    """Where two divisions have the same sizes, neither is taken."""

    def test_of_two_like_modules_one_is_wrapped(self) -> None:
        assert find_units(["root", "a.w", "b.w"], [4, 6, 6], [10, 6], 1) is None

    def test_of_two_modules_that_are_alike_only_when_padded(self) -> None:
        assert find_units(["a.w", "b.w", "c"], [5, 6, 4], [5, 3], 2) is None
        assert find_units(["a.w", "b.w", "c"], [5, 6, 4], [9, 6], 1) == [[0, 2], [1]]

    def test_a_module_and_the_only_module_inside_of_it_are_one_way(self) -> None:
        assert find_units(["root", "a.inner.w"], [4, 6], [4, 6], 1) == [[0], [1]]

    def test_more_ways_than_are_tried_are_none(self) -> None:
        """With a root there are more ways than anybody counts, without one there is exactly one: that proves nothing."""
        model = Model(CROWDED, CROWDED_SIZES, ())
        units = model.units(["m0.m1", "m0.m2.m0", "m0.m2.m2", "m1.m1"])
        assert model.found(units, 6) in (None, units)

    @pytest.mark.parametrize("wrapped", [1, 10, 20, 39])
    def test_of_many_like_modules_are_given_up_quickly(self, wrapped: int) -> None:
        names = [f"layers.{i}.{part}.w" for i in range(40) for part in "ab"]
        start = time.process_time()
        assert find_units(names, [3] * 80, [240 - 6 * wrapped, *[6] * wrapped], 1) is None
        assert time.process_time() - start < SLOW


CROWDED = (
    *("m0.m0.p0", "m0.m1.p0", "m0.m1.m0.p0", "m0.m1.m1.p0", "m0.m1.m1.p1", "m0.m1.m2.p0", "m0.m2.p0", "m0.m2.m0.p0"),
    *("m0.m2.m1.p0", "m0.m2.m2.p0", "m0.m2.m2.p1", "m1.m0.p0", "m1.m0.p1", "m1.m0.m0.p0", "m1.m0.m1.p0", "m1.m0.m1.p1"),
    *("m1.m1.p0", "m2.m0.p0", "m2.m0.p1", "m2.m1.p0"),
)
CROWDED_SIZES = (1, 3, 2, 2, 3, 2, 3, 3, 2, 1, 1, 1, 3, 3, 1, 2, 3, 3, 2, 3)


class TestSizesOfSomethingElse:
    """An optimizer that does not hold all parameters, or other ones, fits no division."""

    NAMES = ("embed.w", "layers.0.w", "layers.0.b", "layers.1.w", "layers.1.b", "head.w")
    SIZES = (40, 30, 5, 30, 5, 42)

    @pytest.mark.parametrize(
        "lengths",
        [[82], [82, 35], [35, 35], [82, 35, 34], [82, 35, 35, 35], [82, 36, 35], [81, 35, 35], [35, 82, 35], [0, 82, 35, 35]],
        ids=repr,
    )
    def test_is_not_divided(self, lengths: list[int]) -> None:
        assert find_units(self.NAMES, self.SIZES, [82, 35, 35], 1) == [[0, 5], [1, 2], [3, 4]]
        assert find_units(self.NAMES, self.SIZES, lengths, 1) is None

    def test_a_frozen_layer_is_in_no_flat_parameter_of_the_optimizer(self) -> None:
        assert find_units(self.NAMES, self.SIZES, [82, 35], 1) is None

    def test_a_buffer_among_the_parameters_is_too_much(self) -> None:
        assert find_units((*self.NAMES, "inv_freq"), (*self.SIZES, 8), [82, 35, 35], 1) is None


class TestWhatPaddingCouldHide:
    """Sizes are padded to a multiple of the ranks: what is smaller than that may be there or not."""

    def test_is_a_small_module_beside_the_units(self) -> None:
        names, sizes = ["emb.w", "fz.s", "l.w"], [13, 2, 40]
        units = find_units(names, sizes, [4, 10], 4)
        assert units == [[0, 1], [2]]
        assert unproved(names, sizes, units, [4, 10], 4, buffers=False) == "fz"

    def test_is_a_buffer_where_nothing_tells_it_from_parameters(self) -> None:
        names, sizes = ["z", "a.mean", "a.w"], [8, 1, 14]
        units = [[0], [1, 2]]
        assert unproved(names, sizes, units, [2, 4], 4, buffers=False) is None
        assert unproved(names, sizes, units, [2, 4], 4, buffers=True) == "a.mean"

    def test_is_nothing_where_every_size_counts(self) -> None:
        assert unproved(["emb.w", "norm.w", "l.w"], [16, 8, 40], [[0, 1], [2]], [6, 10], 4, buffers=True) is None

    def test_many_units_are_found_in_time(self) -> None:
        names = ["embed.w", *(f"layers.{i}.{part}.w" for i in range(120) for part in "ab")]
        start = time.process_time()
        units = find_units(names, [500, *[30, 40] * 120], [250, *[35] * 120], 2)
        assert units is not None
        assert units[1:] == [[2 * i + 1, 2 * i + 2] for i in range(120)]
        assert time.process_time() - start < SLOW
