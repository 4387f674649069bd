"""Numbers of an optimizer become names where exactly one assignment fits: all assignments are tried as the judge."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config
from transformers.trainer import Trainer

from ckpt_cli.boxes import Shape
from ckpt_cli.state.parameter_order import name_parameters

Known = Mapping[int, Shape]

SLOW = 5.0
"""Seconds after which a search has taken too long."""

SHAPES: tuple[Shape, ...] = ((2,), (3,), (2, 2), ())


def assignments(shapes: Mapping[str, Shape], numbers: list[int], known: Known) -> list[dict[int, str]]:
    """All ways to give numbers names in the order of the model, with the shapes that are known."""
    return [
        dict(zip(numbers, names, strict=True))
        for names in itertools.combinations(shapes, len(numbers))
        if all(known.get(number) in (None, shapes[name]) for number, name in zip(numbers, names, strict=True))
    ]


class TestOneGroup:
    def test_is_named_where_exactly_one_assignment_fits(self) -> None:
        source = random.Random(1)
        counted: Counter[bool] = Counter()
        for _ in range(3_000):
            shapes = {f"w{i}": source.choice(SHAPES[: source.randint(1, 4)]) for i in range(source.randint(1, 8))}
            trained = sorted(source.sample(range(len(shapes)), source.randint(0, len(shapes))))
            numbers = source.sample(range(20), len(trained))
            truth = dict(zip(numbers, (list(shapes)[index] for index in trained), strict=True))
            known = {number: shapes[name] for number, name in truth.items() if source.random() < 0.8}
            fitting = assignments(shapes, numbers, known)
            assert truth in fitting
            assert name_parameters(shapes, [numbers], known) == (truth if len(fitting) == 1 else None)
            counted[len(fitting) == 1] += 1
        assert min(counted.values()) > 500

    def test_of_all_parameters_needs_no_shape(self) -> None:
        assert name_parameters({"a": (2,), "b": (2,)}, [[0, 1]], {}) == {0: "a", 1: "b"}

    def test_may_have_buffers_beside_it(self) -> None:
        shapes: dict[str, Shape] = {"embed": (5, 2), "inv_freq": (3,), "w": (2, 2), "count": (), "head": (5, 2)}
        known: dict[int, Shape] = {0: (5, 2), 1: (2, 2), 2: (5, 2)}
        assert name_parameters(shapes, [[0, 1, 2]], known) == {0: "embed", 1: "w", 2: "head"}

    def test_with_a_buffer_of_the_shape_of_a_neighbour_is_not_named(self) -> None:
        assert name_parameters({"norm": (3,), "inv_freq": (3,), "w": (2, 2)}, [[0, 1]], {0: (3,), 1: (2, 2)}) is None

    def test_may_lack_frozen_parameters_that_no_other_could_be(self) -> None:
        shapes: dict[str, Shape] = {"vision": (7, 7), "a": (2, 2), "b": (2, 3)}
        assert name_parameters(shapes, [[0, 1]], {0: (2, 2), 1: (2, 3)}) == {0: "a", 1: "b"}

    def test_of_layers_of_which_one_is_frozen_is_not_named(self) -> None:
        shapes: dict[str, Shape] = {f"layers.{i}.w": (2, 2) for i in range(3)}
        assert name_parameters(shapes, [[0, 1]], {0: (2, 2), 1: (2, 2)}) is None

    @pytest.mark.parametrize("known", [{0: (9,)}, {0: (2, 2), 1: (2,)}, {1: (2, 2)}], ids=repr)
    def test_with_other_shapes_is_not_named(self, known: Known) -> None:
        assert name_parameters({"a": (2,), "b": (3,)}, [[0, 1]], known) is None

    def test_with_more_numbers_than_parameters_is_not_named(self) -> None:
        assert name_parameters({"a": (2,)}, [[0, 1]], {0: (2,)}) is None

    def test_without_numbers_names_nothing(self) -> None:
        assert name_parameters({"a": (2,)}, [[]], {}) == {}


class TestSeveralGroups:
    """Each group is in the order of the model: all ways to deal the parameters out to groups are tried."""

    def ways(self, shapes: Mapping[str, Shape], groups: list[list[int]], known: Known) -> list[dict[int, str]]:
        found = []
        for owners in itertools.product([None, *range(len(groups))], repeat=len(shapes)):
            held = [[name for name, owner in zip(shapes, owners, strict=True) if owner == group] for group in range(len(groups))]
            if all(len(names) == len(numbers) for names, numbers in zip(held, groups, strict=True)):
                way = {n: name for names, numbers in zip(held, groups, strict=True) for n, name in zip(numbers, names, strict=True)}
                if all(known.get(number) in (None, shapes[name]) for number, name in way.items()):
                    found.append(way)
        return found

    @pytest.mark.parametrize("groups", [2, 3])
    def test_are_never_named_in_one_way_of_several(self, groups: int) -> None:
        source = random.Random(groups)
        counted: Counter[str] = Counter()
        for _ in range(400):
            shapes = {f"w{i}": source.choice(SHAPES[: source.randint(1, 4)]) for i in range(source.randint(2, 6))}
            owners = [source.choice([None, *range(groups), *range(groups), *range(groups)]) for _ in shapes]
            held = [[name for name, owner in zip(shapes, owners, strict=True) if owner == group] for group in range(groups)]
            if not all(held):
                continue
            numbers = iter(range(len(shapes)))
            truth = {next(numbers): name for names in held for name in names}
            numbered = [[number for number, name in truth.items() if name in names] for names in held]
            known = {number: shapes[name] for number, name in truth.items() if source.random() < 0.9}
            ways = self.ways(shapes, numbered, known)
            assert truth in ways
            found = name_parameters(shapes, numbered, known)
            assert found in (None, truth)
            if found is not None:
                assert len(ways) == 1
            counted["none" if found is None else "named"] += 1
        assert min(counted.values()) > 10


WORDS = ("weight", "bias", "norm.weight")


def decayed(rule: str, name: str, shape: Shape) -> bool:
    """Trainers exempt vectors from weight decay, or what is called a bias or a norm."""
    return len(shape) >= 2 if rule == "vectors" else not any(word in name for word in ("bias", "norm"))


@pytest.mark.parametrize("rule", ["vectors", "names"])
class TestTwoGroups:
    @pytest.mark.parametrize("frozen", [0.0, 0.2], ids=["all are trained", "some are frozen"])
    @pytest.mark.parametrize("stateless", [0.0, 0.1], ids=["all have a state", "some have none"])
    def test_are_never_named_wrongly(self, rule: str, frozen: float, stateless: float) -> None:
        source = random.Random(f"{rule} {frozen} {stateless}")
        counted: Counter[str] = Counter()
        for _ in range(4_000):
            shapes: dict[str, Shape] = {}
            for index in range(source.randint(2, 7)):
                shapes[f"m{index}.{source.choice(WORDS)}"] = source.choice(((2,), (3,), (2, 2), (3, 3)))
            trained = [name for name in shapes if source.random() >= frozen]
            first = [name for name in trained if decayed(rule, name, shapes[name])]
            second = [name for name in trained if name not in first]
            if source.random() < 0.5:
                first, second = second, first
            if first and second:
                truth = dict(enumerate([*first, *second]))
                known = {number: shapes[name] for number, name in truth.items() if source.random() >= stateless}
                groups = [list(range(len(first))), list(range(len(first), len(truth)))]
                found = name_parameters(shapes, groups, known)
                counted["none" if found is None else "right" if found == truth else "wrong"] += 1
        assert counted["wrong"] == 0
        assert counted["right"] > 500


def test_the_groups_of_a_large_model_are_named_quickly() -> None:
    """Eighty layers with biases, and a buffer that no optimizer has."""
    layer: dict[str, Shape] = {"q.weight": (8, 8), "q.bias": (8,), "k.weight": (4, 8), "k.bias": (4,), "o.weight": (8, 8)}
    layer |= {"gate.weight": (12, 8), "up.weight": (12, 8), "down.weight": (8, 12), "norm.weight": (8,), "post_norm.weight": (8,)}
    parameters = {"embed.weight": (50, 8)} | {f"layers.{i}.{name}": shape for i in range(80) for name, shape in layer.items()}
    decay = [name for name, shape in parameters.items() if len(shape) == 2]
    truth = dict(enumerate([*decay, *(name for name in parameters if name not in decay)]))
    groups = [list(range(len(decay))), list(range(len(decay), len(truth)))]
    start = time.process_time()
    found = name_parameters({**parameters, "inv_freq": (3,)}, groups, {number: parameters[name] for number, name in truth.items()})
    assert time.process_time() - start < SLOW
    assert found == truth


class TestTwoGroupsThatCannotBeTold:
    def test_by_one_rule_are_not_named_by_another(self) -> None:
        """Vectors are exempt and `w` is frozen, or norms are exempt and nothing is: both give one vector and one matrix."""
        shapes: dict[str, Shape] = {"m0.bias": (2,), "m1.norm": (2, 2), "m2.w": (2, 2)}
        assert name_parameters(shapes, [[0], [1]], {0: (2,), 1: (2, 2)}) is None

    def test_because_they_follow_no_rule_are_not_named(self) -> None:
        shapes: dict[str, Shape] = {"a.weight": (2, 2), "a.bias": (2,), "b.weight": (2, 2), "b.bias": (2,)}
        assert name_parameters(shapes, [[0, 1], [2, 3]], {0: (2, 2), 1: (2,), 2: (2, 2), 3: (2,)}) is None

    def test_may_be_three_if_shapes_tell_them_apart(self) -> None:
        shapes: dict[str, Shape] = {"a": (2, 2), "b": (2,), "c": (3, 3)}
        assert name_parameters(shapes, [[2], [1], [0]], {0: (2, 2), 1: (2,), 2: (3, 3)}) == {0: "a", 1: "b", 2: "c"}
        assert name_parameters(shapes, [[2], [1], [0]], {0: (2, 2), 1: (2,), 2: (2, 2)}) is None


SIZES = {"vocab_size": 13, "num_hidden_layers": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1, **SIZES),  # type: ignore[arg-type]
    "qwen2": Qwen2Config(hidden_size=8, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1, **SIZES),  # type: ignore[arg-type]
    "gpt2": GPT2Config(n_embd=8, n_head=2, n_positions=16, n_layer=2, vocab_size=13),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_groups_of_hugging_face_trainer_are_named(name: str) -> None:
    """GPT-2 calls its norms ln, Qwen2 has biases; two of its groups hold every parameter."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name])  # type: ignore[no-untyped-call]
    parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
    # A tied head has a name of its own there, but is no parameter of its own.
    decay = parameters.keys() & set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    truth = [*(key for key in parameters if key in decay), *(key for key in parameters if key not in decay)]
    assert 0 < len(decay) < len(parameters)
    groups = [list(range(len(decay))), list(range(len(decay), len(truth)))]
    known = {number: tuple(parameters[key].shape) for number, key in enumerate(truth)}
    assert name_parameters({key: tuple(p.shape) for key, p in parameters.items()}, groups, known) == dict(enumerate(truth))
