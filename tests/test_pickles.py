"""The inert pickle reader: plain data as CPython reads it, everything else as nodes, and nothing ever runs."""

from __future__ import annotations

import collections
import contextlib
import gc
import io
import json
import pickle
import pickletools
import random
import struct
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_cli.errors import CkptError, CorruptFile
from ckpt_cli.files.pickle_nodes import Call, Global, Persistent, as_dict, describe
from ckpt_cli.files.pickle_reader import load_pickle

PROTOCOLS = range(6)
QUICK = 2.0
"""Seconds that a hostile pickle of at most a few megabytes may take, on a slow and busy machine."""


def read(data: bytes) -> Any:
    """The value of a pickle that fills ``data``."""
    value, end = load_pickle(data)
    assert end == len(data)
    return value


def plain(value: object) -> object:
    """Undo how protocols 0 to 2, which have no opcode for bytes, spell them."""
    if isinstance(value, Call):
        if value.is_("_codecs", "encode"):
            return value.args[0].encode(value.args[1])
        assert value.is_("__builtin__", "bytes")
        assert value.args == ()
        return b""
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def refused(data: bytes, match: str = "damaged pickle") -> None:
    """The pickle is refused with CorruptFile, no other exception, and quickly."""
    start = time.process_time()
    with pytest.raises(CorruptFile, match=match):
        load_pickle(data)
    assert time.process_time() - start < QUICK


def unicode4(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 500), 1 << 500)
    | st.floats()
    | st.binary(max_size=300)
    | st.text(st.characters(), max_size=300)
)
keys = st.text(st.characters(), max_size=20) | st.integers(-(1 << 60) + 1, (1 << 60) - 1)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(keys, inner, max_size=6) | st.lists(inner, max_size=6).map(tuple),
    max_leaves=30,
)


class TestPlainDataIsReadAsCPythonReadsIt:
    @settings(deadline=None, max_examples=400, derandomize=True, database=None)
    @given(value=values, protocol=st.sampled_from(PROTOCOLS))
    def test_whatever_the_nesting_and_the_protocol(self, value: object, protocol: int) -> None:
        # repr tells 1 from True, 0.0 from -0.0 and list from tuple, and it finds NaN equal to NaN.
        assert repr(plain(read(pickle.dumps(value, protocol)))) == repr(value)

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_containers_longer_than_the_batches_in_which_pickle_writes_them(self, protocol: int) -> None:
        value = {f"layer.{i}": list(range(i % 7)) for i in range(3_500)}
        assert read(pickle.dumps(value, protocol)) == value

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_text_and_bytes_of_every_length_class(self, protocol: int) -> None:
        value = [text * length for length in (1, 255, 256, 70_000) for text in ("a", "\u00e9", "\U0001f600")]
        assert read(pickle.dumps(value, protocol)) == value
        raw = [b"\xff" * length for length in (1, 255, 256, 70_000)]
        assert plain(read(pickle.dumps(raw, protocol))) == raw

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    @pytest.mark.parametrize("value", [0, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**63, -(2**63), 2**500])
    def test_integers_at_the_borders_of_the_opcodes(self, value: int, protocol: int) -> None:
        assert read(pickle.dumps([value], protocol)) == [value]

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_an_object_that_is_there_twice_stays_one_object(self, protocol: int) -> None:
        shared = ["weights"]
        first, second = read(pickle.dumps([shared, shared], protocol))
        assert first is second

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_a_list_that_contains_itself_is_no_endless_loop(self, protocol: int) -> None:
        loop: list[Any] = []
        loop.append(loop)
        value = read(pickle.dumps(loop, protocol))
        assert value[0] is value
        assert describe(value) == "list of 1"

    def test_bytearrays_of_protocol_5(self) -> None:
        assert read(pickle.dumps(bytearray(b"abc"), 5)) == b"abc"

    def test_strings_of_python_2(self) -> None:
        value = read(b"(dp0\nS'a\\n\\x41'\np1\nI01\nsT\x02\x00\x00\x00\xe9bU\x01cs.")
        assert value == {"a\nA": True, "\u00e9b": "c"}

    def test_a_string_with_an_unknown_escape_is_read_or_refused_without_a_warning(self) -> None:
        # codecs.escape_decode warns about those, and this suite turns warnings into errors.
        raw = b"S'a\\q'\n."
        with contextlib.suppress(CorruptFile):
            assert read(raw) == "a\\q"

    def test_several_pickles_one_after_the_other(self) -> None:
        data = b"".join(pickle.dumps(value, 2) for value in (1, "two", [3]))
        first, position = load_pickle(data)
        second, position = load_pickle(data, position)
        third, position = load_pickle(memoryview(data), position)
        assert (first, second, third, position) == (1, "two", [3], len(data))

    def test_garbage_collection_is_on_again_afterwards_also_after_an_error(self) -> None:
        assert gc.isenabled()
        read(pickle.dumps([1]))
        refused(b"\x80\x02")
        assert gc.isenabled()


class Plain:
    """An object with attributes, pickled by way of copyreg (protocols 0 and 1) or NEWOBJ (2 and later)."""

    def __init__(self) -> None:
        self.answer = 42


class TestEverythingElseBecomesANode:
    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_an_ordered_dict_is_a_call_that_as_dict_understands(self, protocol: int) -> None:
        value = collections.OrderedDict([("b", 1), ("a", [2])])
        node = read(pickle.dumps(value, protocol))
        assert isinstance(node, Call)
        assert node.target == Global("collections", "OrderedDict")
        pairs = as_dict(node)
        assert pairs is not None
        assert list(pairs.items()) == [("b", 1), ("a", [2])]

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_a_default_dict_keeps_its_pairs_and_its_factory_stays_a_name(self, protocol: int) -> None:
        value: dict[str, Any] = collections.defaultdict(list, {"a": 1})
        node = read(pickle.dumps(value, protocol))
        assert as_dict(node) == {"a": 1}
        assert isinstance(node.args[0], Global)
        assert node.args[0].name == "list"

    def test_an_ordered_dict_of_python_2_takes_its_pairs_as_an_argument(self) -> None:
        node = read(b"ccollections\nOrderedDict\n((lp0\n(lp1\nS'a'\naI1\naatR.")
        assert as_dict(node) == {"a": 1}

    def test_an_ordered_dict_of_python_2_with_one_key_twice_is_not_silently_cut(self) -> None:
        node = read(b"ccollections\nOrderedDict\n((lp0\n(lp1\nS'a'\naI1\naa(lp2\nS'a'\naI2\naatR.")
        with pytest.raises(CorruptFile):
            as_dict(node)

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_sets_keep_their_elements_as_items_or_arguments(self, protocol: int) -> None:
        for value in ({"x"}, frozenset({"x"})):
            node = read(pickle.dumps(value, protocol))
            assert isinstance(node, Call)
            assert "x" in [*(node.items or ()), *(node.args[0] if node.args else ())]
            assert as_dict(node) is None

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_an_object_keeps_its_class_as_a_name_and_its_attributes_as_state(self, protocol: int) -> None:
        node = read(pickle.dumps(Plain(), protocol))
        assert isinstance(node, Call)
        assert node.state == {"answer": 42}
        # Protocols 0 and 1 call copyreg._reconstructor(cls, object, None), the others the class itself.
        named = node.target if protocol >= 2 else node.args[0]
        assert named == Global(Plain.__module__, "Plain")

    def test_a_persistent_id_is_kept_as_it_is(self) -> None:
        node = read(b"\x80\x02(X\x07\x00\x00\x00storageK\x01tQ.")
        assert isinstance(node, Persistent)
        assert node.pid == ("storage", 1)
        assert read(b"P17\n.").pid == "17"

    def test_a_dotted_name_stays_one_name(self) -> None:
        assert read(b"\x8c\x07pathlib\x8c\tos.system\x93.") == Global("pathlib", "os.system")

    def test_a_name_put_together_from_the_memo_stays_a_name(self) -> None:
        assert read(b"\x8c\x05posix\x940\x8c\x06system\x940h\x00h\x01\x93.") == Global("posix", "system")

    def test_the_state_of_an_ordered_dict_cannot_replace_its_methods(self) -> None:
        node = read(b"\x80\x02ccollections\nOrderedDict\n)RX\x01\x00\x00\x00aK\x01s}X\x05\x00\x00\x00itemsK\x02sb.")
        pairs = as_dict(node)
        assert pairs is not None
        assert list(pairs.items()) == [("a", 1)]

    @pytest.mark.parametrize(
        "call",
        [
            b"cbuiltins\nbytearray\n(\x8a\x05\x00\x00\x00\x00\x01tR.",
            b"ctorch\nSize\n(](J\xff\xff\xff\x7fJ\xff\xff\xff\x7fetR.",
            b"ccollections\nCounter\n(X\x03\x00\x00\x00abctR.",
            b"cbuiltins\nset\n(cbuiltins\nrange\n(J\xff\xff\xff\x7ftRtR.",
        ],
        ids=["bytearray of 4 GiB", "torch.Size", "Counter", "set of range"],
    )
    def test_harmless_looking_callables_are_not_called_either(self, call: bytes) -> None:
        assert isinstance(read(call), Call)

    @pytest.mark.parametrize(
        "build",
        [b"(ifoo\nBar\n.", b"(cfoo\nBar\no.", b"cfoo\nBar\n)\x81.", b"cfoo\nBar\n)}\x92.", b"cfoo\nBar\n)R."],
        ids=["INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE"],
    )
    def test_every_way_to_make_an_object_makes_the_same_node(self, build: bytes) -> None:
        node = read(build)
        assert isinstance(node, Call)
        assert (node.target, node.args) == (Global("foo", "Bar"), ())

    def test_equal_names_are_equal_and_calls_are_not(self) -> None:
        first, second = read(b"(cos\nsystem\ncos\nsystem\nt.")
        assert first == second
        first, second = read(b"(cos\nsystem\n)Rcos\nsystem\n)Rt.")
        assert first != second

    def test_a_node_may_be_a_dict_key_as_dcp_metadata_has_it(self) -> None:
        node = read(b"}cdcp\nMetadataIndex\n)RK\x01s.")
        assert [type(key) for key in node] == [Call]


class TestShortDescriptions:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (None, "None"),
            (True, "True"),
            (3, "3"),
            ("x" * 100, "x" * 57 + "..."),
            (b"abc", "3 bytes"),
            ({"a": 1}, "dict of 1"),
            ([1, 2], "list of 2"),
            ((), "tuple of 0"),
            (Call(Global("argparse", "Namespace"), ()), "object(argparse.Namespace)"),
            (Call(Global("collections", "OrderedDict"), ()), "dict of 0"),
            (Call(Call(Global("a", "b"), ()), ()), "object"),
            (Global("os", "system"), "reference(os.system)"),
            (Persistent(("storage",)), "object"),
        ],
    )
    def test_of_all_kinds_of_values(self, value: object, text: str) -> None:
        assert describe(value) == text

    def test_never_look_inside(self) -> None:
        laughs: list[Any] = []
        for _ in range(100):
            laughs = [laughs] * 10
        assert describe(laughs) == "list of 10"

    def test_stay_short_for_a_name_of_a_megabyte(self) -> None:
        node = read(b"cfoo\n" + b"x" * 1_000_000 + b"\n)R.")
        assert len(describe(node)) < 1_000


HOSTILE: dict[str, bytes] = {
    # Memory bombs: a few bytes that announce gigabytes.
    "LONG_BINPUT to a huge memo index": b"Nr\xff\xff\xff\x7f.",
    "PUT to a memo index of 10^12": b"Np1000000000000\n.",
    "PUT to a negative memo index": b"Np-1\n.",
    "BINBYTES8 of 2^40 bytes": b"\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "BINBYTES8 of 2^63 bytes": b"\x8e" + struct.pack("<Q", 1 << 63) + b"x.",
    "BINUNICODE8 of 2^40 bytes": b"\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
    "BYTEARRAY8 of 2^32 bytes": b"\x96" + struct.pack("<Q", 1 << 32) + b"x.",
    "BINBYTES of 2^32 - 1 bytes": b"B\xff\xff\xff\xffx.",
    "BINUNICODE of 2^32 - 1 bytes": b"X\xff\xff\xff\xffx.",
    "BINSTRING of 2^31 - 1 bytes": b"T\xff\xff\xff\x7fx.",
    "LONG4 of 2^31 - 1 bytes": b"\x8b\xff\xff\xff\x7fx.",
    "FRAME of 2^63 bytes": b"\x80\x04\x95" + struct.pack("<Q", 1 << 63) + b"N.",
    # Integers that cost quadratic time or fail when they are printed.
    "LONG1 of 255 bytes": b"\x8a\xff" + b"\x7f" * 255 + b".",
    "LONG4 of 3000 bytes": b"\x8b" + struct.pack("<I", 3000) + b"\x7f" * 3000 + b".",
    "INT of 100,000 digits": b"I" + b"9" * 100_000 + b"\n.",
    "LONG of 100,000 digits": b"L" + b"9" * 100_000 + b"L\n.",
    "GET with 100,000 digits": b"g" + b"9" * 100_000 + b"\n.",
    "INT that is no number": b"Iabc\n.",
    "FLOAT that is no number": b"Fabc\n.",
    "FLOAT of 100,000 digits": b"F" + b"9" * 100_000 + b"\n.",
    # Keys.
    "a deeply nested tuple as key": b"})" + b"\x85" * 200_000 + b"Ns.",
    "a nested tuple as key": b"}))\x86Ns.",
    "a tuple of nine as key": b"}(" + b"K\x01" * 9 + b"tNs.",
    "a list as key": b"}]Ns.",
    "a dict as key": b"}}Ns.",
    "NaN as key": b"}G" + struct.pack(">d", float("nan")) + b"Ns.",
    "integer keys that all have the same hash": b"}("
    + b"".join(b"\x8a\x0a" + (k * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for k in range(1, 20_000))
    + b"u.",
    "one key twice in one SETITEMS": b"}(U\x01aK\x01U\x01aK\x02u.",
    "one key twice in two SETITEMs": b"}U\x01aK\x01sU\x01aK\x02s.",
    "1 and True as keys": b"}(K\x01N\x88Nu.",
    "one key twice in DICT": b"(U\x01aK\x01U\x01aK\x02d.",
    "one key twice in an OrderedDict": b"ccollections\nOrderedDict\n)R(U\x01aK\x01U\x01aK\x02u.",
    "a key without a value": b"}(U\x01au.",
    # Marks and the stack.
    "ten million marks": b"(" * 10_000_000,
    "1,001 marks": b"(" * 1_001 + b"1" * 1_001 + b"N.",
    "POP of nothing": b"0.",
    "DUP of nothing": b"2.",
    "DUP of a mark": b"(2.",
    "POP_MARK without a mark": b"1.",
    "TUPLE without a mark": b"Nt.",
    "TUPLE2 of one": b"N\x86.",
    "TUPLE1 across a mark": b"N(\x85t.",
    "STOP with nothing": b".",
    "STOP with two values": b"NN.",
    "STOP with an open mark": b"(N.",
    "STOP on a mark": b"(.",
    "memoizing a mark": b"(\x94.",
    "memoizing nothing": b"\x94.",
    "BINPUT of nothing": b"q\x00.",
    # The memo.
    "BINGET of an unknown index": b"h\x05.",
    "LONG_BINGET of an unknown index": b"j\x05\x00\x00\x00.",
    "GET of an unknown index": b"g5\n.",
    # Opcodes that are not for us.
    "EXT1": b"\x82\x01.",
    "EXT2": b"\x83\x01\x00.",
    "EXT4": b"\x84\x01\x00\x00\x00.",
    "NEXT_BUFFER": b"\x97.",
    "READONLY_BUFFER": b"N\x98.",
    "an unknown opcode": b"\xff.",
    "protocol 200": b"\x80\xc8N.",
    "protocol 6": b"\x80\x06N.",
    # Operations on the wrong things.
    "APPEND to None": b"NNa.",
    "APPENDS to a tuple": b")(Ne.",
    "SETITEM on a list": b"]NNs.",
    "SETITEM on a name": b"cfoo\nbar\nNNs.",
    "APPEND to a name": b"cfoo\nbar\nNa.",
    "ADDITEMS to a list": b"](N\x90.",
    "BUILD on a name": b"cfoo\nbar\n(N}U\x04evilK\x01std.",
    "BUILD on a name with slots": b"cfoo\nbar\nN}U\x04evilK\x01s\x86b.",
    "BUILD on a dict": b"}}b.",
    "BUILD on None": b"N}b.",
    "BUILD on a persistent id": b"NQ}b.",
    "REDUCE of a string": b"U\x06system)R.",
    "REDUCE of a persistent id": b"NQ)R.",
    "REDUCE with a list of arguments": b"cos\nsystem\n]R.",
    "NEWOBJ of None": b"N)\x81.",
    "NEWOBJ_EX without a dict": b"cfoo\nbar\n)]\x92.",
    "OBJ of nothing": b"(o.",
    "OBJ of an integer": b"(K\x01o.",
    "STACK_GLOBAL of integers": b"K\x01K\x02\x93.",
    "STACK_GLOBAL of bytes": b"C\x02osC\x06system\x93.",
    # Text.
    "GLOBAL without a newline": b"cos",
    "GLOBAL with one newline": b"cos\nsystem",
    "INST without a newline": b"(ios",
    "PERSID without a newline": b"P1",
    "INT without a newline": b"I1",
    "STRING without a newline": b"S'a'",
    "UNICODE without a newline": b"Vabc",
    "PUT without a newline": b"Np1",
    "STRING without quotes": b"Sabc\n.",
    "STRING with one quote": b"S'\n.",
    "STRING with two kinds of quotes": b"S'a\"\n.",
    "STRING with a broken escape": b"S'\\x4'\n.",
    "text that is not UTF-8": unicode4(b"\xff\xfe") + b".",
    "a name that is not UTF-8": b"c\xff\nx\n.",
    "a persistent id that is not ASCII": b"P\xff\n.",
    "UNICODE with a broken escape": b"V\\u12\n.",
    # Ends.
    "nothing": b"",
    "only PROTO": b"\x80\x02",
    "PROTO without a number": b"\x80",
    "no STOP": b"\x80\x02N",
    "BININT1 without its byte": b"K",
    "BINPUT without its byte": b"Nq",
    "BINFLOAT cut short": b"G\x00\x00",
}


class TestHostilePickles:
    @pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
    def test_are_refused_quickly(self, data: bytes) -> None:
        refused(data)

    def test_the_message_names_the_place(self) -> None:
        with pytest.raises(CorruptFile, match="at byte 3"):
            load_pickle(b"\x80\x02N\x82\x01.")

    def test_keys_that_are_tuples_with_one_hash_do_not_take_quadratic_time(self) -> None:
        # The hash of a tuple of integers is not seeded, so anyone can compute thousands of different keys with one hash.
        colliding = tuples_with_one_hash(20_000)
        assert len({hash(key) for key in colliding}) == 1
        data = (
            b"}("
            + b"".join(b"\x8a\x08" + struct.pack("<q", a) + b"\x8a\x08" + struct.pack("<q", b) + b"\x86N" for a, b in colliding)
            + b"u."
        )
        start = time.process_time()
        with contextlib.suppress(CorruptFile):
            load_pickle(data)
        assert time.process_time() - start < QUICK

    @pytest.mark.parametrize(
        "data",
        [
            b"]" * 500_000 + b"a" * 499_999 + b".",
            b")" + b"\x85" * 500_000 + b".",
            b"N" + b"Q" * 500_000 + b".",
            b"cfoo\nbar\n" + b")R" * 500_000 + b".",
            b"cfoo\nbar\n)R" * 100_000 + b"b" * 99_999 + b".",
        ],
        ids=["lists", "tuples", "persistent ids", "calls", "states"],
    )
    def test_values_nested_deeper_than_any_recursion_are_read_or_refused_and_thrown_away_safely(self, data: bytes) -> None:
        with contextlib.suppress(CorruptFile):
            assert len(describe(read(data))) < 100

    def test_a_billion_laughs_take_no_more_room_than_their_bytes(self) -> None:
        data = b"]" + b"".join(b"q" + bytes([i]) + b"0](" + (b"h" + bytes([i])) * 10 + b"e" for i in range(60)) + b"."
        start = time.process_time()
        value = read(data)
        assert describe(value) == "list of 10"
        assert time.process_time() - start < QUICK

    def test_a_frame_that_ends_inside_an_opcode_is_refused(self) -> None:
        # C, Python and third-party readers disagree about such frames, which is how payloads hide from scanners.
        body = b"\x8c\x05hello."
        assert read(b"\x80\x04\x95" + struct.pack("<Q", len(body)) + body) == "hello"
        refused(b"\x80\x04\x95" + struct.pack("<Q", 3) + body)

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_a_pickle_cut_at_any_byte_is_refused(self, protocol: int) -> None:
        data = pickle.dumps(sample(), protocol)
        for length in range(len(data)):
            with pytest.raises(CorruptFile):
                load_pickle(data[:length])

    def test_bytes_after_the_stop_are_not_read(self) -> None:
        assert load_pickle(b"N.garbage") == (None, 2)


def tuples_with_one_hash(count: int) -> list[tuple[int, int]]:
    """Pairs of small positive integers whose tuple hash (xxHash of CPython's Objects/tupleobject.c) is the same."""
    one, two, five, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1

    def after(accumulated: int, lane: int) -> int:
        accumulated = (accumulated + lane * two) & mask
        return ((accumulated << 31 | accumulated >> 33) & mask) * one & mask

    inverse = pow(two, -1, 1 << 64)
    target = (after(five, 1) + two) & mask
    pairs: list[tuple[int, int]] = []
    first = 0
    while len(pairs) < count:
        first += 1
        second = (target - after(five, first)) * inverse & mask
        if second < 1 << 60:
            pairs.append((first, second))
    return pairs


def sample() -> dict[Any, Any]:
    """A small value that uses most opcodes of every protocol."""
    return {
        "text": ["a", "\u00e9\n", "x" * 300],
        "numbers": (1, 300, 70_000, -1, 2**40, 2**100, 1.5, True, None),
        "raw": [b"", b"\x00\xff", b"y" * 300],
        "object": Plain(),
        "ordered": collections.OrderedDict(a=1),
        "set": {1, 2},
        "frozen": frozenset({3}),
        3: ((), (1,), (1, 2), (1, 2, 3)),
    }


def data_pkl(state: object) -> bytes:
    """The pickle inside of a file of torch.save."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


class TestDamagedPickles:
    """Whatever bytes are changed, nothing but an error of ours comes out."""

    def seeds(self) -> list[bytes]:
        model = torch.nn.Linear(3, 2)
        state = {"weight": torch.nn.Parameter(torch.ones(2, 3)), "half": torch.ones(4).half(), "step": 3}
        return [data_pkl(model.state_dict()), data_pkl(state), *(pickle.dumps(sample(), protocol) for protocol in PROTOCOLS)]

    def test_the_seeds_themselves_are_read(self) -> None:
        for seed in self.seeds():
            read(seed)

    def test_five_thousand_mutants_raise_nothing_but_errors_of_ours(self) -> None:
        source = random.Random(20240607)
        seeds = self.seeds()
        opcodes = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
        outcomes: collections.Counter[bool] = collections.Counter()
        for number in range(5_000):
            data = bytearray(seeds[number % len(seeds)])
            for _ in range(source.choice((1, 1, 2, 4, 8))):
                place = source.randrange(len(data))
                action = source.randrange(5)
                if action == 0:
                    data[place] = source.randrange(256)
                elif action == 1:
                    data[place : place + 1] = source.choice(opcodes)
                elif action == 2:
                    del data[place : place + source.randrange(1, 9)]
                elif action == 3:
                    data[place:place] = data[source.randrange(len(data)) :][: source.randrange(1, 20)]
                else:
                    data[place : place + 4] = source.choice((b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f"))
                data = data or bytearray(b"N")
            try:
                value, _ = load_pickle(bytes(data))
                describe(value)
                as_dict(value)
                outcomes[True] += 1
            except CkptError:
                outcomes[False] += 1
        # Mutants that all fail at the first byte, or all pass, would prove nothing.
        assert min(outcomes[True], outcomes[False]) > 100


OBSERVER = """
import json, os, pickle, sys
from ckpt_cli.errors import CkptError
from ckpt_cli.files.pickle_nodes import as_dict, describe
from ckpt_cli.files.pickle_reader import load_pickle

# Codecs are imported on first use; use them before the file has its chance.
load_pickle(b"(V\\\\u0041\\nS'a'\\nU\\x01aX\\x01\\x00\\x00\\x00aP1\\nt.")
events = []
sys.addaudithook(lambda event, args: events.append([event, str(args[0]) if args else ""]))

def harmful():
    watched = ("pickle.find_class", "import", "exec", "compile", "open", "os.system", "os.mkdir", "os.exec", "os.posix_spawn",
               "subprocess.Popen", "socket.connect", "object.__setattr__", "function.__new__", "code.__new__")
    found = [event for event in events if event[0] in watched]
    events.clear()
    return found

results = {}
for name, payload in json.loads(sys.stdin.read()).items():
    data = bytes.fromhex(payload)
    events.clear()
    try:
        value, _ = load_pickle(data)
        as_dict(value), describe(value)
        outcome = "read"
    except CkptError:
        outcome = "refused"
    results[name] = [outcome, harmful()]
events.clear()
# The same hook sees what CPython's own pickle does: this proves that it would have seen it above.
pickle.loads(bytes.fromhex(sys.argv[1]))
print(json.dumps({"results": results, "control": harmful()}))
"""


class TestNothingRuns:
    def payloads(self, folder: Path) -> dict[str, bytes]:
        marker = unicode4(str(folder / "marker").encode())
        run = b"cposix\nmkdir\n(" + marker + b"tR"
        return {
            "REDUCE": b"\x80\x02" + run + b".",
            "REDUCE of os.system": b"\x80\x02cos\nsystem\n(" + unicode4(f"mkdir {folder}/marker".encode()) + b"tR.",
            "REDUCE of eval": b"cbuiltins\neval\n(" + unicode4(f"__import__('os').mkdir({str(folder / 'marker')!r})".encode()) + b"tR.",
            "REDUCE of Popen": b"csubprocess\nPopen\n(](" + unicode4(b"mkdir") + marker + b"etR.",
            "REDUCE of pip": b"cpip\nmain\n(](" + unicode4(b"download") + unicode4(b"x") + b"etR.",
            "NEWOBJ": b"\x80\x02cposix\nmkdir\n" + marker + b"\x85\x81.",
            "NEWOBJ_EX": b"\x80\x04cposix\nmkdir\n)}" + unicode4(b"path") + marker + b"s\x92.",
            "INST": b"(" + marker + b"iposix\nmkdir\n.",
            "OBJ": b"(cposix\nmkdir\n" + marker + b"o.",
            "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93" + marker + b"\x85R.",
            "STACK_GLOBAL of a dotted name": b"\x80\x04\x8c\x07pathlib\x8c\x08os.mkdir\x93" + marker + b"\x85R.",
            "result thrown away": b"\x80\x02" + run + b"0N.",
            "in a list, dropped by its mark": b"\x80\x02(" + run + b"1N.",
            "as a dict key": b"}" + run + b"Ns.",
            "then garbage": b"\x80\x02" + run + b"\xff\xff\xff",
            "then nothing": b"\x80\x02" + run,
            "getattr": b"cbuiltins\ngetattr\n(cos\n__name__\n" + unicode4(b"mkdir") + b"tR" + marker + b"\x85R.",
            "import of a module that lies beside": b"cevil_module\nanything\n.",
            "import by STACK_GLOBAL": b"\x8c\x0bevil_module\x8c\x08anything\x93)R.",
            "BUILD with a state that sets attributes": b"cevil_module\nThing\n)R(N}" + unicode4(b"__class__") + b"cos\nsystem\nstb.",
            "EXT1": b"\x82\x01.",
            "persistent id": b"(" + run + b"tQ.",
        }

    def test_no_import_no_lookup_no_call_and_no_file(self, tmp_path: Path) -> None:
        (tmp_path / "evil_module.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'marker')!r})\nanything = Thing = print\n")
        payloads = {name: data.hex() for name, data in self.payloads(tmp_path).items()}
        control = b"\x80\x02cposix\nmkdir\n" + unicode4(str(tmp_path / "control").encode()) + b"\x85R."
        root = Path(sys.modules["ckpt_cli"].__path__[0]).parent
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(OBSERVER), control.hex()],
            input=json.dumps(payloads),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PYTHONPATH": f"{root}:{tmp_path}", "PATH": ""},
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert {name: events for name, (_, events) in seen["results"].items() if events} == {}
        assert not (tmp_path / "marker").exists()
        # The harmless part of the corpus is read, not refused: it becomes nodes.
        assert seen["results"]["REDUCE"][0] == "read"
        assert seen["results"]["then nothing"][0] == "refused"
        # And the observer is not blind.
        assert {event for event, _ in seen["control"]} >= {"pickle.find_class", "os.mkdir"}
        assert (tmp_path / "control").exists()

    def test_torch_is_not_imported_by_reading_a_pickle_of_torch(self) -> None:
        data = data_pkl({"weight": torch.ones(2)})
        code = f"import sys; from ckpt_cli.files.pickle_reader import load_pickle; load_pickle({data!r}); print('torch' in sys.modules)"
        root = Path(sys.modules["ckpt_cli"].__path__[0]).parent
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(root)}, timeout=60)
        assert done.stdout == "False\n", done.stderr
