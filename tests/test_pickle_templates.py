"""Pickles of one save are compared with one that was read: what comes out is what the machine makes of each, or its error."""

from __future__ import annotations

import collections
import io
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_cli.errors import CorruptFile
from ckpt_cli.files.pickle_nodes import Call, Global, Persistent
from ckpt_cli.files.pickle_reader import load_pickle
from ckpt_cli.files.pickle_template import FEW, MAX_TEMPLATES, Template, Templates
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile

ALL = 1 << 30


def same(a: object, b: object, seen: dict[int, object] | None = None) -> bool:
    """Whether two values are equal, of the same types, and share their objects in the same places."""
    seen = {} if seen is None else seen
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, dict, Call, Persistent)) or (isinstance(a, tuple) and a):
        if id(a) in seen:
            return seen[id(a)] is b
        seen[id(a)] = b
    if isinstance(a, Call) and isinstance(b, Call):
        return all(same(getattr(a, name), getattr(b, name), seen) for name in ("target", "args", "kwargs", "state", "items", "pairs"))
    if isinstance(a, Persistent) and isinstance(b, Persistent):
        return same(a.pid, b.pid, seen)
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(same(x, y, seen) for x, y in zip([*a, *a.values()], [*b, *b.values()], strict=True))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, seen) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


def expected(data: bytes) -> Any:
    """The value of a pickle, or the text of the error that reading it raises."""
    try:
        return load_pickle(data)[0]
    except CorruptFile as error:
        return str(error)


def given_by(templates: Templates, data: bytes) -> Any:
    try:
        return templates.load(data)[0]
    except CorruptFile as error:
        return str(error)


def state_dict(rank: int, tensors: int = 12, width: int = 64) -> bytes:
    """A pickle as torch.save writes it in the file of one rank: other sizes, other devices, the same names."""
    rows = [width + (rank if i % 3 == 0 else 0) for i in range(tensors)]
    state = collections.OrderedDict((f"layers.{i}.weight", torch.zeros(rows[i], 2)) for i in range(tensors))
    stream = io.BytesIO()
    torch.save({"model": state, "rank": rank, "where": f"cuda:{rank}", "loss": 0.5 + rank}, stream)
    stream.seek(0)
    return torch._C.PyTorchFileReader(stream).get_record("data.pkl")


class TestWhatATemplateGives:
    @pytest.mark.parametrize("rank", [0, 1, 7, 200, 300, 70_000])
    def test_another_rank_of_the_same_save(self, rank: int) -> None:
        filled = Template(state_dict(3)).filled(state_dict(rank), ALL)
        assert same(filled, load_pickle(state_dict(rank))[0])

    def test_its_own_pickle(self) -> None:
        template = Template(state_dict(3))
        assert same(template.root, load_pickle(state_dict(3))[0])
        assert template.filled(state_dict(3), 0) is template.root

    def test_filling_in_leaves_the_template_and_earlier_values_as_they_were(self) -> None:
        template = Template(state_dict(3))
        fifth = template.filled(state_dict(5), ALL)
        for rank in range(40):
            template.filled(state_dict(rank), ALL)
        assert same(template.root, load_pickle(state_dict(3))[0])
        assert same(fifth, load_pickle(state_dict(5))[0])

    def test_what_does_not_depend_on_the_differences_is_shared(self) -> None:
        template = Template(state_dict(3))
        first, second = template.root["model"].pairs, template.filled(state_dict(9), ALL)["model"].pairs
        assert first["layers.1.weight"] is second["layers.1.weight"]
        assert first["layers.0.weight"] is not second["layers.0.weight"]

    def test_no_more_differences_than_asked_for(self) -> None:
        template = Template(state_dict(3))
        assert template.filled(state_dict(4), 3) is None
        assert template.filled(state_dict(4), 30) is not None

    @pytest.mark.parametrize("other", [state_dict(3, tensors=13), state_dict(3, tensors=11), state_dict(3)[:-40], state_dict(3) + b"."])
    def test_other_opcodes_fit_no_template(self, other: bytes) -> None:
        assert Template(state_dict(3)).filled(other, ALL) is None

    @pytest.mark.parametrize(("mine", "theirs"), [(1, True), (1, None), (1, 1.0), ("a", 1), ("a", b"a"), ((), []), (1, (1,)), ({}, {1: 2})])
    def test_values_of_other_types_fit_no_template(self, mine: object, theirs: object) -> None:
        assert Template(pickle.dumps([mine, "x"], 2)).filled(pickle.dumps([theirs, "x"], 2), ALL) is None

    def test_a_name_that_differs_fits_no_template(self) -> None:
        """What is called is never a value that may differ."""
        assert Template(pickle.dumps([torch.float16], 2)).filled(pickle.dumps([torch.float32], 2), ALL) is None

    def test_keys_that_become_equal_are_refused_as_by_the_machine(self) -> None:
        first, twice = (
            pickle.dumps({"a": 1, "b": 2}, 2),
            pickle.dumps({"a": 1, "b": 2}, 2).replace(b"\x01\x00\x00\x00b", b"\x01\x00\x00\x00a"),
        )
        assert "same key twice" in expected(twice)
        templates = Templates(least=0)
        assert [given_by(templates, data) for data in (first, first, twice)][2] == expected(twice)

    def test_cycles_and_shared_objects(self) -> None:
        def looped(number: int) -> bytes:
            inner: list[Any] = [number]
            outer: dict[str, Any] = {"inner": inner, "again": inner, "fixed": [1, 2]}
            inner.append(outer)
            return pickle.dumps(outer, 2)

        filled = Template(looped(1)).filled(looped(1000), ALL)
        assert filled is not None
        assert filled["inner"] is filled["again"]
        assert filled["inner"][1] is filled
        assert same(filled, load_pickle(looped(1000))[0])


LEAVES = st.integers(-(1 << 70), 1 << 70) | st.text(max_size=6) | st.floats() | st.sampled_from([None, True, False])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


def varied(value: Any, draw: random.Random) -> Any:
    """The same structure with other numbers and texts, here and there."""
    if isinstance(value, (list, tuple)):
        return type(value)(varied(item, draw) for item in value)
    if isinstance(value, dict):
        return type(value)((key, varied(item, draw)) for key, item in value.items())
    if draw.random() < 0.5 or isinstance(value, bool) or value is None:
        return value
    return draw.randrange(1 << 40) if isinstance(value, int) else draw.random() if isinstance(value, float) else f"text {draw.random()}"


class TestOnAnyPickles:
    @settings(max_examples=300, deadline=None)
    @given(value=VALUES, seed=st.integers(0, 1 << 30), protocol=st.integers(0, 5))
    def test_values_of_the_same_structure(self, value: Any, seed: int, protocol: int) -> None:
        draw, templates = random.Random(seed), Templates(least=0)
        for each in [value, value, *(varied(value, draw) for _ in range(4))]:
            data = pickle.dumps(each, protocol)
            assert same(given_by(templates, data), expected(data))

    @settings(max_examples=60, deadline=None)
    @given(seed=st.integers(0, 1 << 30))
    def test_damaged_pickles_give_what_the_machine_gives(self, seed: int) -> None:
        draw, templates = random.Random(seed), Templates(least=0)
        for rank in range(3):
            templates.load(state_dict(rank, tensors=3))
        for _ in range(20):
            data = bytearray(state_dict(draw.randrange(5), tensors=3))
            for _ in range(draw.randrange(1, 3)):
                place = draw.randrange(len(data))
                if draw.random() < 0.3:
                    del data[place : place + draw.randrange(4)]
                else:
                    data[place] = draw.choice((draw.randrange(256), *b"KMJX(tRbqh}].0"))
            assert same(given_by(templates, bytes(data)), expected(bytes(data)))


class TestManyFiles:
    def test_a_template_is_made_of_the_second_pickle_and_serves_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, plain = [], []
        monkeypatch.setattr("ckpt_cli.files.pickle_template.Template", lambda data: made.append(data) or Template(data))
        monkeypatch.setattr("ckpt_cli.files.pickle_template.load_pickle", lambda data: plain.append(data) or load_pickle(data))
        templates = Templates(least=0)
        for rank in range(8):
            assert same(templates.load(state_dict(rank))[0], load_pickle(state_dict(rank))[0])
        assert (made, plain) == ([state_dict(1)], [state_dict(0)])

    def test_pickles_that_differ_in_many_values_become_templates_of_their_own(self) -> None:
        wide = [
            pickle.dumps(["numbers of all kinds", *([number] * 4), *range(start, start + 2 * FEW)], 2)
            for start in (300, 9_000, 20_000)
            for number in range(5)
        ]
        templates = Templates(least=0)
        for data in wide:
            assert same(templates.load(data)[0], load_pickle(data)[0])
        assert 1 < len(templates._templates) <= MAX_TEMPLATES

    def test_no_more_templates_than_are_kept(self) -> None:
        templates = Templates(least=0)
        for tensors in range(3, 20):
            for rank in range(3):
                data = state_dict(rank, tensors)
                assert same(templates.load(data)[0], load_pickle(data)[0])
        assert len(templates._templates) == MAX_TEMPLATES

    def test_readers_of_files_share_what_they_make_of_nodes(self, tmp_path: Path) -> None:
        for rank in range(4):
            torch.save({"w": torch.full((8, 8), float(rank)), "names": [f"name {i}" for i in range(300)]}, tmp_path / f"{rank}.pt")
        with Files() as files:
            read = [TorchFile(files.source(tmp_path / f"{rank}.pt")) for rank in range(4)]
            nodes = [file.root["w"] for file in read]
            assert nodes[1] is nodes[2] is nodes[3]
            tensors = [file.tensor(node) for file, node in zip(read, nodes, strict=True)]
        assert [tensor.storage.source.path[-4:] for tensor in tensors if tensor] == ["0.pt", "1.pt", "2.pt", "3.pt"]

    def test_nothing_is_run(self) -> None:
        class Planted:
            def __reduce__(self) -> Any:
                return print, ("run",)

        templates = Templates(least=0)
        data = [pickle.dumps([Planted(), number], 2) for number in range(4)]
        for each in data:
            root, _ = templates.load(each)
            assert isinstance(root[0], Call)
            assert root[0].target in (Global("__builtin__", "print"), Global("builtins", "print"))
