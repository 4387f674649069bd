"""Values out of pickles without running them: what `torch.load` gives, or a name in the list of what was not represented."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import io
import json
import math
import pathlib
import pickle
import random
import time
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_cli.errors import CkptError, CorruptFile
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.state.torch_writer import torch_bytes
from ckpt_cli.state.training_state import without_unrepresented
from ckpt_cli.tensors.plain_values import ValueReader, equal, to_json, unrepresented

SLOW = 20.0
"""Seconds after which a small file has taken too long."""

Read = Callable[[object], Any]


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


Point = namedtuple("Point", "x y")  # noqa: PYI024


def value_of(path: Path) -> Any:
    with Files() as files:
        file = TorchFile(files.source(path))
        return ValueReader(file).read(file.root)


def loaded(value: Any) -> Any:
    """What a user gets who loads the written file, without any option."""
    return torch.load(io.BytesIO(torch_bytes(without_unrepresented(value))))


@pytest.fixture(params=[2, 4], ids=["protocol 2", "protocol 4"])
def read(request: pytest.FixtureRequest, tmp_path: Path) -> Read:
    """Saves a thing with torch.save and reads it back as a plain value. Protocol 2 is what torch writes if nothing else is asked for."""

    def make(content: object) -> Any:
        torch.save(content, tmp_path / "file.pt", pickle_protocol=request.param)
        return value_of(tmp_path / "file.pt")

    return make


def plain(thing: Any) -> Any:
    """What is promised for a thing: the oracle works on the thing itself, never on a file."""
    if isinstance(thing, np.ndarray):
        return plain(torch.from_numpy(np.ascontiguousarray(thing.astype(thing.dtype.newbyteorder("="))).reshape(thing.shape)))
    if isinstance(thing, np.generic):
        return thing.item()
    if isinstance(thing, torch.Tensor):
        wider = {torch.uint16: torch.int32, torch.uint32: torch.int64}
        return thing.detach().clone(memory_format=torch.contiguous_format).to(wider.get(thing.dtype, thing.dtype))
    if isinstance(thing, dict):
        return {key: plain(item) for key, item in thing.items()}
    if isinstance(thing, (set, frozenset, deque)):
        return [plain(item) for item in thing]
    if isinstance(thing, (list, tuple)):
        return (list if isinstance(thing, list) else tuple)(plain(item) for item in thing)
    return str(thing) if isinstance(thing, (torch.device, pathlib.PurePath)) else thing


def same(found: Any, wanted: Any) -> bool:
    """Equal in type and value, NaN equal to NaN, tensors bit for bit."""
    if wanted == b"":
        # No bytes at all cannot be loaded with weights_only; the same in a bytearray can.
        return found in (b"", bytearray())
    if type(found) is not type(wanted):
        return False
    if isinstance(found, torch.Tensor):
        alike = (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        return alike and torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
    if isinstance(found, dict):
        return list(map(repr, found)) == list(map(repr, wanted)) and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(found, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted) or (isinstance(found, float) and math.isnan(found) and math.isnan(wanted))


ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    **{code: np.arange(6).astype(code).reshape(2, 3) for code in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u2", "u1")},
    "u4 above the range of i4": np.array([0, 2**31, 2**32 - 1], "u4"),
    "u8 above the range of i8": np.array([2**63, 2**64 - 1], "u8"),
    "bool": np.array([[True, False], [False, False]]),
    "big-endian": np.arange(5, dtype=">i4"),
    "big-endian halves": np.arange(5).astype(">f2"),
    "Fortran order": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "Fortran order, three dimensions": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "Fortran order, big-endian": np.asfortranarray(np.arange(6.0).reshape(3, 2).astype(">f8")),
    "Fortran order, one dimension": np.asfortranarray(np.arange(4)),
    "Fortran order, a size of one": np.asfortranarray(np.arange(5).reshape(1, 5)),
    "no dimension": np.array(3.5),
    "no element": np.zeros((0, 3)),
    "every other element": np.arange(10)[::2],
    "backwards": np.arange(4)[::-1],
    "transposed": np.arange(6).reshape(2, 3).T,
    "NaN and infinity": np.array([np.nan, -np.inf, -0.0]),
}

SCALARS: dict[str, np.generic] = {
    **{code: np.dtype(code).type(7) for code in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1")},
    "bool": np.bool_(True),
    "float": np.float32(0.1),
    "negative": np.int64(-5),
}

TENSORS: dict[str, torch.Tensor] = {
    **{str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)},
    **{str(dtype): torch.arange(3).to(dtype) for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)},
    "uint16": torch.tensor([0, 65535], dtype=torch.uint16),
    "uint32": torch.tensor([0, 2**32 - 1], dtype=torch.uint32),
    "uint64": torch.tensor([0, 2**64 - 1], dtype=torch.uint64),
    "float8": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
    "complex64": torch.tensor([1 + 2j]),
    "no dimension": torch.tensor(0.25),
    "no element": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "a view into the middle": torch.arange(20.0)[7:13:2],
    "a part of a larger one": torch.arange(12).reshape(3, 4)[1:, 1:3],
    "repeated": torch.ones(1).expand(5),
    "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "NaN with a payload": torch.tensor([0x7FC01234], dtype=torch.int32).view(torch.float32),
}

THINGS: dict[str, Any] = {
    "None": None,
    "bools and numbers": [True, False, 0, -1, 2**31, -(2**63), 10**100, -(10**40), 0.1, -0.0, math.inf, math.nan],
    "text": ["", "a", "\u00e9\U0001f600", "\x00\x1b[31m", "x" * 300],
    "bytes": [b"a", b"\x00\xff", bytes(range(256)) * 2],
    "no bytes": [b"", {"a": b""}],
    "nested tuples": ((1, (2, [3, {"a": (4, ())}])), [], {}, ()),
    "OrderedDict": OrderedDict(b=1, a=OrderedDict()),
    "defaultdict": defaultdict(list, {"a": [1]}),
    "defaultdict of dicts": defaultdict(dict, {3: {"a": 1}}),
    "Counter": Counter("aab"),
    "an empty Counter": Counter(),
    "set": {1},
    "an empty set": set(),
    "frozenset": frozenset(["a"]),
    "deque": deque([1, 2, (3,)]),
    "deque with a limit": deque([1, 2], maxlen=5),
    "an empty deque": deque(),
    "an empty deque with a limit": deque(maxlen=5),
    "torch.Size": torch.Size([2, 3]),
    "an empty torch.Size": torch.Size([]),
    "devices": [torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")],
    "dtypes": [torch.bfloat16, torch.float32, torch.int64, torch.bool],
    "paths": [pathlib.PurePosixPath("a/b.pt"), pathlib.PosixPath("a")],
    "absolute paths": [pathlib.PosixPath("/a/b.pt"), pathlib.PurePosixPath("/")],
    "the path of here": pathlib.PosixPath(),
    "keys of several types": {"a": 1, 2: "b", None: 3, b"k": 4, -1: 5},
    "keys that are only alike as text": {1: "number", "1": "text"},
    "a random state of numpy": np.random.RandomState(3).get_state(),
    "a random state of a generator": np.random.default_rng(3).bit_generator.state,
    "tensors among other things": {"a": [torch.ones(2), (torch.zeros(1, dtype=torch.uint8), "x")]},
}


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from([torch.arange(3.0), torch.tensor(2), torch.float16, torch.device("cpu"), torch.Size([2])])
)
KEYS = st.text(st.characters(codec="utf-8"), max_size=4) | st.integers(-(2**40), 2**40) | st.none()
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3).map(deque)
    ),
    max_leaves=8,
)


class TestWhatIsRepresented:
    """Written with torch.save, read inertly, written by us and loaded by torch with weights_only: the same."""

    @pytest.mark.parametrize("name", ARRAYS)
    def test_arrays_of_numpy_are_tensors(self, read: Read, name: str) -> None:
        assert same(loaded(read(ARRAYS[name])), plain(ARRAYS[name]))

    @pytest.mark.parametrize("name", SCALARS)
    def test_scalars_of_numpy_are_numbers(self, read: Read, name: str) -> None:
        assert same(loaded(read(SCALARS[name])), plain(SCALARS[name]))

    @pytest.mark.parametrize("name", TENSORS)
    def test_tensors_keep_dtype_shape_and_bits(self, read: Read, name: str) -> None:
        assert same(loaded(read(TENSORS[name])), plain(TENSORS[name]))

    @pytest.mark.parametrize("name", THINGS)
    def test_plain_things_are_what_they_are(self, read: Read, name: str) -> None:
        value = read(THINGS[name])
        assert list(unrepresented(value)) == []
        assert same(loaded(value), plain(THINGS[name]))

    def test_files_of_old_versions_of_torch_are_read_as_well(self, tmp_path: Path) -> None:
        thing = {"a": torch.arange(3.0), "b": np.arange(3), "c": (1, [b"x"])}
        torch.save(thing, tmp_path / "file.pt", _use_new_zipfile_serialization=False)
        assert same(loaded(value_of(tmp_path / "file.pt")), plain(thing))

    @pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
    def test_arrays_of_numpy_1_and_2_are_the_same(self, module: str, tmp_path: Path) -> None:
        array = np.arange(3, dtype="u4")
        data = pickle.dumps(array, 2)
        renamed = data.replace(b"numpy.core.multiarray", module.encode()).replace(b"numpy._core.multiarray", module.encode())
        (tmp_path / "file.pt").write_bytes(with_pickle(renamed))
        assert same(loaded(value_of(tmp_path / "file.pt")), plain(array))

    @pytest.mark.parametrize("name", ARRAYS)
    def test_arrays_in_protocol_5_are_right_or_listed(self, name: str, tmp_path: Path) -> None:
        torch.save({"a": ARRAYS[name], "b": 1}, tmp_path / "file.pt", pickle_protocol=5)
        value = value_of(tmp_path / "file.pt")
        found = loaded(value)
        if list(unrepresented(value)):
            assert found == {"b": 1}
        else:
            assert same(found, {"a": plain(ARRAYS[name]), "b": 1})

    @settings(max_examples=150, deadline=None)
    @given(thing=ANYTHING, protocol=st.sampled_from((2, 3, 4, 5)))
    def test_anything_that_is_built_of_them(self, thing: Any, protocol: int, tmp_path_factory: pytest.TempPathFactory) -> None:
        path = tmp_path_factory.getbasetemp() / "anything.pt"
        torch.save(thing, path, pickle_protocol=protocol)
        value = value_of(path)
        assert list(unrepresented(value)) == []
        assert same(loaded(value), plain(torch.load(path, weights_only=False)))
        json.loads(json.dumps(to_json(value), allow_nan=False))


OTHERS: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace(lr=1e-4),
    "a member of an enum": Colour.RED,
    "a member of an IntEnum": Level.HIGH,
    "a function": json.dumps,
    "a class": Path,
    "a builtin": print,
    "a named tuple": Point(1, 2),
    "a date": datetime.datetime(2024, 2, 29),
    "a decimal": decimal.Decimal("1.5"),
    "a slice": slice(1, 2),
    "an array of objects": np.array([{}, None], dtype=object),
    "an array of text": np.array(["a"]),
    "an array of records": np.zeros(2, dtype=[("a", "i4")]),
    "an array of dates": np.array(["2024-01-01"], dtype="M8[D]"),
    "a scalar of text": np.str_("a"),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a tensor without storage": torch.empty(3, device="meta"),
    "a generator of numpy": np.random.RandomState(1),
    "a module": torch.nn.Linear(1, 1),
}


class TestWhatIsNot:
    """Objects that only their own classes could rebuild are named, and nothing else is lost with them."""

    @pytest.mark.parametrize("name", OTHERS)
    def test_is_listed_where_it_lies(self, read: Read, name: str) -> None:
        value = read({"a": 1, "b": {"c": [0, OTHERS[name], 2]}, "d": OTHERS[name], "e": (OTHERS[name], "f")})
        assert [where for where, _ in unrepresented(value)] == ["b.c[1]", "d", "e[0]"]
        assert all(what and len(what) < 200 for _, what in unrepresented(value))

    @pytest.mark.parametrize("name", OTHERS)
    def test_is_left_out_of_dicts_and_none_in_lists(self, read: Read, name: str) -> None:
        value = read({"a": 1, "b": {"c": [0, OTHERS[name], 2]}, "d": OTHERS[name], "e": (OTHERS[name], "f")})
        assert loaded(value) == {"a": 1, "b": {"c": [0, None, 2]}, "e": (None, "f")}

    def test_is_named_by_what_the_pickle_wanted_to_build(self, read: Read) -> None:
        named = dict(unrepresented(read({"args": argparse.Namespace(a=1), "function": json.dumps})))
        assert named == {"args": "object(argparse.Namespace)", "function": "reference(json.dumps)"}

    def test_may_be_the_whole_file(self, read: Read) -> None:
        assert [where for where, _ in unrepresented(read(argparse.Namespace(a=1)))] == [""]

    def test_may_be_a_key(self, read: Read) -> None:
        value = read({"a": {(1, 2): "lost", "b": "kept"}})
        assert [where for where, _ in unrepresented(value)] == ["a, a key"]
        assert loaded(value) == {"a": {"b": "kept"}}

    def test_says_in_json_that_it_is_not_there(self, read: Read) -> None:
        assert to_json(read([argparse.Namespace(a=1)])) == [{"not represented": "object(argparse.Namespace)"}]

    def test_fractions_as_keys_do_not_make_a_file_damaged(self, read: Read) -> None:
        """Some trainers keep tables by quantile. Such an entry may be left out and listed, but the rest must be there."""
        value = read({"quantiles": {0.5: 1}, "step": 3})
        assert loaded(value)["step"] == 3

    def test_tensors_of_more_memory_than_a_state_needs_are_listed(self, tmp_path: Path) -> None:
        """A view of four bytes can be of any size."""
        torch.save({"a": torch.ones(1).expand(1 << 40), "b": 2}, tmp_path / "file.pt")
        value = value_of(tmp_path / "file.pt")
        assert [where for where, _ in unrepresented(value)] == ["a"]
        assert loaded(value) == {"b": 2}

    def test_tensors_that_together_are_too_large_are_listed(self, tmp_path: Path) -> None:
        torch.save({str(i): torch.ones(1 << 20).expand(16, 1 << 20) for i in range(6)}, tmp_path / "file.pt")
        value = value_of(tmp_path / "file.pt")
        assert len(list(unrepresented(value))) >= 2


def with_pickle(content: bytes) -> bytes:
    """A file of torch.save with another pickle inside."""
    original = io.BytesIO()
    torch.save({"a": 1}, original)
    changed = io.BytesIO()
    with zipfile.ZipFile(original) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith("data.pkl") else old.read(name))
    return changed.getvalue()


def put(number: int) -> bytes:
    return b"r" + (500 + number).to_bytes(4, "little")


def get(number: int) -> bytes:
    return b"j" + (500 + number).to_bytes(4, "little")


ORDERED = b"ccollections\nOrderedDict\n)R"
TRAPS = {
    "lists that double": b"]" + b"".join(put(i) + b"0](" + get(i) * 2 + b"e" for i in range(40)),
    "tuples that double": b")" + b"".join(put(i) + b"0" + get(i) * 2 + b"\x86" for i in range(40)),
    "ordered dicts that double": ORDERED
    + b"".join(put(i) + b"0" + ORDERED + b"(K\x01" + get(i) + b"K\x02" + get(i) + b"u" for i in range(40)),
    "lists in lists": b"]" * 200_000 + b"a" * 199_999,
    "tuples in tuples": b")" + b"\x85" * 200_000,
    "dicts in dicts": b"}" + b"K\x01}" * 200_000 + b"s" * 200_000,
    "a list of itself": b"]" + put(0) + get(0) + b"a",
    "a dict of itself": b"}" + put(0) + b"K\x01" + get(0) + b"s",
    "an ordered dict of itself": ORDERED + put(0) + b"K\x01" + get(0) + b"s",
    "a list of a dict of it": b"]" + put(0) + b"}K\x01" + get(0) + b"sa",
    "a set of a list of itself": b"cbuiltins\nset\n(](" + put(0) + get(0) + b"etR",
}


class TestTraps:
    """A few bytes that unfold to anything end quickly, as damage."""

    @pytest.mark.parametrize("name", TRAPS)
    def test_are_refused(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "file.pt").write_bytes(with_pickle(b"\x80\x02}X\x04\0\0\0trap" + TRAPS[name] + b"s."))
        start = time.process_time()
        with pytest.raises(CorruptFile) as caught:
            value_of(tmp_path / "file.pt")
        assert time.process_time() - start < SLOW
        assert len(caught.value.message) < 200

    @pytest.mark.parametrize("state", [b"(K\x01K\x02t", b"(K\x01)cnumpy\ndtype\n(U\x02f8K\0K\x01tR\x89Nt", b"}", b"N", b"K\x01"])
    def test_an_array_with_a_state_that_is_none_is_listed(self, state: bytes, tmp_path: Path) -> None:
        array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85U\x01btR" + state + b"b"
        (tmp_path / "file.pt").write_bytes(with_pickle(b"\x80\x02}X\x01\0\0\0a" + array + b"s."))
        assert [where for where, _ in unrepresented(value_of(tmp_path / "file.pt"))] == ["a"]

    @pytest.mark.parametrize("shape", [b"J\xff\xff\xff\xff", b"K\x05", b"\x8a\x05\0\0\0\0\x01", b"N"])
    def test_an_array_whose_shape_is_a_lie_is_refused_or_listed(self, shape: bytes, tmp_path: Path) -> None:
        state = b"(K\x01" + shape + b"\x85cnumpy\ndtype\n(U\x02i8K\0K\x01tR(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89U\x08"
        array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85U\x01btR" + state + b"\x01" + bytes(7) + b"tb"
        (tmp_path / "file.pt").write_bytes(with_pickle(b"\x80\x02}X\x01\0\0\0a" + array + b"s."))
        try:
            value = value_of(tmp_path / "file.pt")
        except CorruptFile:
            return
        assert [where for where, _ in unrepresented(value)] == ["a"]

    def test_thousands_of_mutants_raise_nothing_but_errors_of_ours(self, tmp_path: Path) -> None:
        source = random.Random(5)
        thing = {"a": np.arange(4), "b": deque([1], maxlen=2), "c": {1, 2}, "d": (torch.ones(2), b"x", Path("a")), "e": Counter("ab")}
        buffer = io.BytesIO()
        torch.save(thing, buffer)
        with zipfile.ZipFile(buffer) as archive:
            original = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        outcomes: Counter[str] = Counter()
        for _ in range(400):
            changed = bytearray(original)
            for _ in range(source.choice((1, 1, 2, 4))):
                changed[source.randrange(len(changed))] = source.choice((source.randrange(256), *b"(.02NtRbQqhK}]"))
            (tmp_path / "file.pt").write_bytes(repacked(buffer.getvalue(), bytes(changed)))
            try:
                value = value_of(tmp_path / "file.pt")
                loaded(value)
                json.dumps(to_json(value))
                outcomes["read"] += 1
            except CkptError:
                outcomes["refused"] += 1
        assert min(outcomes["read"], outcomes["refused"]) > 50


def repacked(data: bytes, content: bytes) -> bytes:
    """A file of torch.save with its pickle replaced and everything else as it was."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith("data.pkl") else old.read(name))
    return changed.getvalue()


class TestJson:
    """For people and for programs without torch."""

    @pytest.mark.parametrize(
        ("thing", "text"),
        [
            (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
            (torch.tensor(0.5), 0.5),
            (torch.tensor([0.1], dtype=torch.bfloat16), [0.10009765625]),
            (torch.empty(2, 0), [[], []]),
            (torch.tensor([math.nan, math.inf]), ["nan", "inf"]),
            (torch.tensor([True]), [True]),
            ([math.nan, -math.inf, 1.0], ["nan", "-inf", 1.0]),
            ((1, (2, 3)), [1, [2, 3]]),
            (b"\x00\xff", {"base64": "AP8="}),
            ({1: "a", None: "b"}, {"1": "a", "None": "b"}),
            (torch.bfloat16, "torch.bfloat16"),
            (torch.device("cuda", 1), "cuda:1"),
            (torch.Size([2]), [2]),
            (torch.tensor([0.5]).to(torch.float8_e4m3fn), {"dtype": "float8_e4m3fn", "shape": [1], "base64": "MA=="}),
            (10**30, 10**30),
        ],
        ids=repr,
    )
    def test_says_what_a_value_is(self, read: Read, thing: object, text: object) -> None:
        assert json.loads(json.dumps(to_json(read(thing)), allow_nan=False)) == text


class TestEquality:
    """Decides whether ranks agree."""

    @pytest.mark.parametrize("name", THINGS)
    def test_a_thing_is_equal_to_itself_in_another_file(self, read: Read, name: str) -> None:
        assert equal(read(THINGS[name]), read(THINGS[name]))

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (1, 1.0),
            (1, True),
            ([1], (1,)),
            ({"a": 1}, {"a": 1, "b": 2}),
            ({"a": 1}, {"b": 1}),
            ([1, 2], [1]),
            (math.nan, 0.0),
            (torch.ones(2), torch.ones(2, dtype=torch.float64)),
            (torch.ones(2), torch.ones(1, 2)),
            (torch.zeros(2), torch.tensor([0.0, 1e-45])),
            (b"a", "a"),
            ({"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": 3}]}}),
        ],
        ids=repr,
    )
    def test_other_things_are_not(self, read: Read, first: object, second: object) -> None:
        assert not equal(read(first), read(second))

    def test_tensors_that_hold_nan_are_equal_if_their_bits_are(self, read: Read) -> None:
        assert equal(read(torch.tensor([math.nan])), read(torch.tensor([math.nan])))
