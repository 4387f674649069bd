"""The catalogue: every input in a few lines, and whether it is refused or read as what it is.

Letters of names: Z zip containers, T tensors, P pickles, S safetensors and its index, J JSON beside the weights, F files and folders.
A payload makes the folder ``marker`` beside the checkpoint.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from tests.payloads import calling, pickled, repacked, short, text, torch_file

NAME = "model_world_size_1_rank_0.pt"
EVIL = calling("posix", "mkdir", "marker")
WEIGHTS = {"model.embed.weight": torch.arange(12.0).reshape(3, 4), "model.norm.weight": torch.ones(4)}
HONEST = torch_file(WEIGHTS)


@dataclass(frozen=True)
class Case:
    """``build`` fills the folder of a checkpoint; ``right`` are the tensors that a merge must give, None if it must be refused."""

    build: Callable[[Path], None]
    right: dict[str, Any] | None = None


CASES: dict[str, Case] = {}


def shard(name: str, data: bytes, right: dict[str, Any] | None = None) -> None:
    """A case of one rank file with these bytes."""
    CASES[name] = Case(lambda folder: void((folder / NAME).write_bytes(data)), right)


def void(_: object) -> None:
    """For lambdas that return nothing."""


def member(name: str, change: Callable[[bytes], bytes | None], **options: Any) -> bytes:
    """The honest file with one member changed."""
    return repacked(HONEST, lambda each, old: change(old) if each.endswith(f"/{name}") else old, **options)


def with_pickle(content: bytes) -> bytes:
    return member("data.pkl", lambda _: content)


def extended(*values: bytes) -> bytes:
    """The honest pickle with more entries."""
    with zipfile.ZipFile(io.BytesIO(HONEST)) as archive:
        original = archive.read("archive/data.pkl")
    return with_pickle(original[:-1] + b"".join(text(f"extra {i}") + value + b"s" for i, value in enumerate(values)) + b".")


def tensor(
    key: bytes = text("0"),
    count: bytes = b"K\x0c",
    offset: bytes = b"K\x00",
    size: bytes = b"K\x03K\x04\x86",
    stride: bytes = b"K\x04K\x01\x86",
    location: bytes = text("cpu"),
) -> bytes:
    """A file of one tensor, written by hand."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + key + location + count + b"tQ"
    return with_pickle(pickled(b"}" + text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + size + stride + b"\x89}tRs"))


def patched(offset: int, value: bytes, mark: bytes, data: bytes = HONEST) -> bytes:
    """Bytes at an offset from the last ``mark`` changed."""
    at = data.rfind(mark) + offset
    return data[:at] + value + data[at + len(value) :]


def _bomb_of_names(count: int) -> bytes:
    entry = struct.pack("<4s4x2H4x3I3H8xI", b"PK\x01\x02", 0, 0, 0, 0, 0, 0, 0, 0, 0)
    directory = entry * count
    return (
        b"PK\x03\x04"
        + bytes(26)
        + directory
        + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count & 0xFFFF, count & 0xFFFF, len(directory), 30, 0)
    )


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("../../marker")
        entry.type = tarfile.DIRTYPE
        archive.addfile(entry)
    return buffer.getvalue()


def _with_member(name: str) -> bytes:
    buffer = io.BytesIO(HONEST)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(name, b"x")
    return buffer.getvalue()


# -- Z: zip containers -----------------------------------------------------------------------------------------------

shard("Z00 honest", HONEST, WEIGHTS)
shard("Z01 empty", b"")
for part in (1, 30, 100, len(HONEST) // 2, len(HONEST) - 22, len(HONEST) - 1):
    shard(f"Z02 cut at {part}", HONEST[:part])
shard("Z03 cut and padded", HONEST[: len(HONEST) // 2] + bytes(len(HONEST) - len(HONEST) // 2))
shard("Z06 deflated", repacked(HONEST, lambda _, old: old, compression=8))
shard("Z07 deflate bomb", member("data.pkl", lambda _: bytes(1 << 26), compression=8))
shard("Z09 members that lead out", _with_member("../../marker"))
shard("Z09 absolute member", _with_member("/marker"))
shard("Z10 two top folders", HONEST.replace(b"archive/version", b"brchive/version"))
shard("Z11 local name", HONEST.replace(b"archive/data/0", b"archive/data/9", 1))
shard("Z12 aliased members", patched(42, struct.pack("<I", 0), b"PK\x01\x02"))
shard(
    "Z13 shifted data",
    HONEST.replace(b"PK\x03\x04", b"PK\x03\x04", 1)[:28] + struct.pack("<H", struct.unpack("<H", HONEST[28:30])[0] + 4) + HONEST[30:],
)
for flag in (0x01, 0x20, 0x40):
    shard(f"Z14 flag {flag}", patched(8, struct.pack("<H", 0x808 | flag), b"PK\x01\x02"))
shard("Z15 offset beyond the file", patched(42, b"\xf0\xff\xff\x7f", b"PK\x01\x02"))
shard("Z15 size beyond the file", patched(20, b"\xf0\xff\xff\x7f" * 2, b"PK\x01\x02"))
shard("Z15 unknown method", patched(10 - 46, b"\x63\x00", b"archive/data/0"))
shard("Z16 directory of a million", _bomb_of_names(1_000_000))
shard("Z17 long names", repacked(HONEST, lambda _, old: old).replace(b"archive/data/1", b"a" * 14))
shard("Z18 count that lies", patched(8, b"\x01\x00\x01\x00", b"PK\x05\x06"))
shard("Z18 bytes behind", HONEST + b"\n")
shard("Z18 archive behind an archive", HONEST + HONEST)
shard("Z18 bytes in front", b"\x7fELF" + HONEST)
shard("Z21 no data.pkl", member("data.pkl", lambda _: None))
shard("Z21 no version", member("version", lambda _: None), WEIGHTS)
shard("Z21 no byte order", member("byteorder", lambda _: None), WEIGHTS)
shard("Z22 byte order of neither kind", member("byteorder", lambda _: b"middle"))
shard("Z23 huge version", member("version", lambda _: b"9" * 1_000_000), WEIGHTS)
shard("Z24 TorchScript", member("version", lambda old: old).replace(b"archive/version", b"archive/code/x."))
shard("Z25 legacy", torch_file(WEIGHTS, _use_new_zipfile_serialization=False), WEIGHTS)
shard("Z25 legacy, cut", torch_file(WEIGHTS, _use_new_zipfile_serialization=False)[:-5])
shard("Z26 tar", _tar())
for kind, content in {
    "pickle": pickle.dumps({"w": 1}),
    "gzip": gzip.compress(HONEST),
    "7z": b"7z\xbc\xaf\x27\x1c" + bytes(99),
    "safetensors": save(WEIGHTS),
    "HTML": b"<!DOCTYPE html><html>404",
    "zeros": bytes(9_999),
    "text": b"hello\n" * 99,
}.items():
    shard(f"Z27 {kind}", content)
for kind, change in {
    "shorter": lambda old: old[:-1],
    "longer": lambda old: old + b"x",
    "empty": lambda _: b"",
    "gone": lambda _: None,
}.items():
    shard(f"Z28 storage {kind}", member("data/0", change))  # type: ignore[arg-type]
for kind, key in {
    "traversal": text("../data.pkl"),
    "absent": text("77"),
    "long": text("7" * 100_000),
    "number": b"K\x00",
    "none": b"N",
}.items():
    shard(f"Z29 key {kind}", tensor(key=key))

# -- T: tensors ------------------------------------------------------------------------------------------------------

shard("T00 by hand", tensor(), {"w": WEIGHTS["model.embed.weight"]})
for kind, count in {
    "2^40": b"\x8a\x06\0\0\0\0\0\x01",
    "2^62": b"\x8a\x08\0\0\0\0\0\0\0\x40",
    "negative": b"J\xff\xff\xff\xff",
    "true": b"\x88",
    "none": b"N",
}.items():
    shard(f"T01 numel {kind}", tensor(count=count))
shard("T02 size too large", tensor(size=b"K\x04K\x04\x86"))
shard("T02 offset too large", tensor(offset=b"K\x01"))
shard("T02 stride too large", tensor(stride=b"K\x05K\x01\x86"))
shard("T03 negative stride", tensor(stride=b"J\xff\xff\xff\xffK\x01\x86"))
shard("T03 negative size", tensor(size=b"J\xff\xff\xff\xffK\x04\x86"))
shard("T03 negative offset", tensor(offset=b"J\xff\xff\xff\xff"))
shard("T03 ranks that differ", tensor(size=b"K\x0c\x85"))
shard("T04 expand bomb", tensor(size=b"J\x00\x00\x00\x40K\x04\x86", stride=b"K\x00K\x01\x86"))
shard("T05 overlapping view", tensor(size=b"K\x02K\x03\x86", stride=b"K\x01K\x01\x86"), {"w": torch.tensor([[0.0, 1, 2], [1, 2, 3]])})
shard("T06 product that overflows", tensor(size=b"\x8a\x05\0\0\0\0\x02" * 2 + b"\x86"))
shard("T07 a thousand dimensions", tensor(size=b"(" + b"K\x01" * 1_000 + b"t", stride=b"(" + b"K\x01" * 1_000 + b"t"))
shard("T09 transposed", torch_file({"w": WEIGHTS["model.embed.weight"].t()}), {"w": WEIGHTS["model.embed.weight"].t()})
shard("T09 every second", torch_file({"w": torch.arange(9.0)[::2]}), {"w": torch.arange(9.0)[::2]})
shard("T11 conjugated", torch_file({"w": torch.tensor([1 - 2j]).conj()}), {"w": torch.tensor([1 + 2j])})
shard(
    "T12 not finite",
    torch_file({"w": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])}),
    {"w": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])},
)
shard("T14 complex128", torch_file({"w": torch.ones(2, dtype=torch.complex128)}))
shard("T15 float8", torch_file({"w": torch.ones(4).to(torch.float8_e5m2)}), {"w": torch.ones(4).to(torch.float8_e5m2)})
shard("T16 sparse", torch_file({"w": torch.eye(3).to_sparse()}))
shard("T18 meta", torch_file({"w": torch.empty(3, device="meta")}))
shard("T20 unknown storage", with_pickle(tensor().replace(b"", b"")[:0] + pickled(b"}" + text("w") + b"ctorch\nFooStorage\ns")))
shard("T22 parameter", torch_file({"w": torch.nn.Parameter(torch.ones(3))}), {"w": torch.ones(3)})

# -- P: pickles ------------------------------------------------------------------------------------------------------

for name, args in {
    "posix.mkdir": ("marker",),
    "builtins.eval": ("__import__('os').mkdir('marker')",),
    "os.system": ("mkdir marker",),
}.items():
    module, _, function = name.rpartition(".")
    shard(f"P01 {name} as the root", with_pickle(pickled(calling(module, function, *args))))
    shard(f"P01 {name} beside weights", extended(calling(module, function, *args)), WEIGHTS)
shard("P02 payload, then nonsense", with_pickle(b"\x80\x02" + EVIL + b"\xff\xff"))
shard("P02 payload, then nothing", with_pickle(b"\x80\x02" + EVIL))
shard("P03 dotted name", extended(short("pathlib") + short("os.mkdir") + b"\x93" + short("marker") + b"\x85R"), WEIGHTS)
shard("P04 name of numbers", extended(b"K\x01K\x02\x93"))
shard("P05 inst", extended(b"(" + text("marker") + b"iposix\nmkdir\n"), WEIGHTS)
shard("P05 obj", extended(b"(cposix\nmkdir\n" + text("marker") + b"o"), WEIGHTS)
shard("P05 newobj", extended(b"cposix\nmkdir\n" + text("marker") + b"\x85\x81"), WEIGHTS)
shard("P06 extension", extended(b"\x82\x01"))
shard("P08 build on a name", extended(b"ctorch\nload\nN}" + text("evil") + b"K\x01s\x86b"))
shard("P10 append to a name", extended(b"cposix\nmkdir\n" + text("marker") + b"a"))
shard("P11 memo bomb", extended(b"Nr\xff\xff\xff\x7f"))
for code in (b"\x8e", b"\x8d", b"\x96", b"\x95"):
    shard(f"P12 length of 0x{code.hex()}", extended(code + b"\xff\xff\xff\xff\xff\xff\xff\x7f"))
shard("P13 huge integer", extended(b"\x8b" + struct.pack("<I", 3_000) + b"\x7f" * 3_000))
shard("P14 long digits", extended(b"I" + b"9" * 100_000 + b"\n"))
shard("P14 no float", extended(b"Fx\n"))
shard(
    "P15 keys that collide",
    extended(b"}(" + b"".join(b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(1, 20_000)) + b"u"),
)
shard("P16 nested tuple as a key", extended(b"})" + b"\x85" * 300_000 + b"Ns"))
shard("P17 deep lists", extended(b"]" * 300_000 + b"a" * 299_999), WEIGHTS)
laughs = b"".join(b"r" + struct.pack("<I", 500 + i) + b"0](" + (b"j" + struct.pack("<I", 500 + i)) * 10 + b"e" for i in range(30))
shard("P18 laughs", extended(b"]" + laughs), WEIGHTS)
shard("P19 list of itself", extended(b"]r\xf4\x01\0\0j\xf4\x01\0\0a"), None)
shard("P20 marks", extended(b"(" * 1_000_000))
shard("P21 underflow", with_pickle(b"\x80\x020."))
shard("P21 dup of nothing", with_pickle(b"\x80\x022."))
shard("P22 unknown memo", extended(b"h\xfe"))
shard("P22 protocol 200", with_pickle(b"\x80\xc8}."))
shard("P22 unknown opcode", extended(b"\xff"))
shard("P22 no stop", with_pickle(b"\x80\x02}"))
shard("P22 bytes behind", with_pickle(pickled(b"}") + b"x"))
shard("P23 line without an end", with_pickle(b"\x80\x02cposix\nmkdir"))
shard("P24 surrogates in a name", torch_file({"bad \ud800": torch.ones(2)}))
shard(
    "P24 control characters in a name",
    torch_file({"\x1b[31mred\x1b]0;x\x07\r": torch.ones(2)}),
    {"\x1b[31mred\x1b]0;x\x07\r": torch.ones(2)},
)
shard("P25 key twice", torch_file({"a.w": torch.ones(2), "b.w": torch.ones(2)}).replace(b"b.w", b"a.w"))
for key in (1.5, None, ("a", 1), b"w"):
    shard(f"P26 key {key!r}", torch_file({key: torch.ones(2), **WEIGHTS}))
for kind, pid in {"text": text("x"), "empty": b")", "module": b"(" + text("module") + b"NNNNt", "dict": b"}"}.items():
    shard(f"P27 persistent id {kind}", extended(b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"QK\x00))\x89}tR"))
for protocol in (2, 3, 4, 5):
    shard(f"P28 protocol {protocol}", torch_file(WEIGHTS, pickle_protocol=protocol), WEIGHTS)
shard("P29 frame that ends in an opcode", extended(b"\x95\x02\0\0\0\0\0\0\0" + text("xxxx")))
for call in ("bytearray", "range", "complex"):
    shard(f"P30 {call}", extended(f"cbuiltins\n{call}\n".encode() + b"\x8a\x05\0\0\0\0\x01\x85R"), WEIGHTS)

# -- F: files and folders --------------------------------------------------------------------------------------------


def place(name: str, *builds: Callable[[Path], object], right: dict[str, Any] | None = None) -> None:
    """A case of a folder."""
    CASES[name] = Case(lambda folder: [void(build(folder)) for build in builds] and None, right)


def file(name: str, data: bytes = HONEST) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


place("F01 pipe", lambda folder: os.mkfifo(folder / NAME))
place("F02 folder", lambda folder: (folder / NAME).mkdir())
place("F02 device", lambda folder: (folder / NAME).symlink_to("/dev/zero"))
place("F02 kernel file", lambda folder: (folder / NAME).symlink_to("/proc/self/maps"))
place("F03 link to itself", lambda folder: (folder / NAME).symlink_to(NAME))
place("F03 links in a circle", lambda folder: (folder / NAME).symlink_to("b"), lambda folder: (folder / "b").symlink_to(NAME))
place("F03 link to nowhere", lambda folder: (folder / NAME).symlink_to("nowhere"))
place("F04 link to the parent", file(NAME), lambda folder: (folder / "up").symlink_to(".."), right=WEIGHTS)
place("F06 name that is no UTF-8", file(NAME), lambda folder: open(os.fsencode(folder) + b"/bad\xff.pt", "wb").close(), right=WEIGHTS)
place("F07 names with controls", file(NAME), file("a\x1b[2Jb\n.json", b"{}"), file("-rf", b""), right=WEIGHTS)
place("F08 missing rank", *(file(f"model_world_size_4_rank_{rank}.pt") for rank in (0, 1, 3)))
place("F09 two world sizes", *(file(f"model_world_size_{size}_rank_{rank}.pt") for size in (2, 3) for rank in range(size)))
place("F11 rank twice", file("model_world_size_2_rank_0.pt"), file("model_world_size_2_rank_1.pt"), file("model_world_size_2_rank_01.pt"))
place("F11 impossible rank", file("model_world_size_1_rank_" + "9" * 100 + ".pt"))
place("F11 other digits", file("model_world_size_\u0661_rank_\u0660.pt"))
place("F20 nothing at all")
place("F21 Git LFS", file(NAME, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"))
place("F23 holes", lambda folder: (folder / NAME).touch(), lambda folder: os.truncate(folder / NAME, 1 << 40))
place("F19 deep", file(NAME), lambda folder: os.makedirs(folder / "/".join("d" * 400)), right=WEIGHTS)

# -- S: safetensors and its index ------------------------------------------------------------------------------------

TENSORS = save(WEIGHTS)
HEADER = json.loads(TENSORS[8 : 8 + int.from_bytes(TENSORS[:8], "little")])
DATA = TENSORS[8 + int.from_bytes(TENSORS[:8], "little") :]


def header(content: object, data: bytes = DATA) -> bytes:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(**fields: object) -> dict[str, Any]:
    """The header with other fields for one tensor."""
    return {**HEADER, "model.norm.weight": {**HEADER["model.norm.weight"], **fields}}


def single(name: str, data: bytes, right: dict[str, Any] | None = None) -> None:
    place(name, file("model.safetensors", data), right=right)


single("S00 honest", TENSORS, WEIGHTS)
for length in (0, 1, 2**63, 100_000_001, len(TENSORS)):
    single(f"S01 header of {length} bytes", struct.pack("<Q", length) + TENSORS[8:])
single("S01 seven bytes", TENSORS[:7])
for kind, raw in {
    "no JSON": b"{x}",
    "array": b"[]",
    "bad UTF-8": b'{"\xff": 1}',
    "BOM": b"\xef\xbb\xbf{}",
    "deep": b'{"a":' + b"[" * 200_000,
    "digits": b'{"a": ' + b"9" * 5_000 + b"}",
}.items():
    single(f"S02 {kind}", header(raw))
single("S03 cut", TENSORS[:-1])
single("S03 bytes behind", TENSORS + b"x")
single("S04 overlap", header(entry(data_offsets=[0, 16])))
single("S04 hole", header(entry(data_offsets=[52, 68]), DATA + b"xxxx"))
for kind, fields in {
    "shape": {"shape": [5]},
    "overflow": {"shape": [2**32, 2**32]},
    "negative": {"shape": [-4]},
    "float": {"shape": [4.0]},
    "true": {"shape": [True]},
    "huge and empty": {"shape": [2**63, 0]},
    "text": {"shape": "4"},
    "offsets reversed": {"data_offsets": [64, 48]},
}.items():
    single(f"S05 {kind}", header(entry(**fields)))
single("S07 unknown dtype", header(entry(dtype="Q7")))
single(
    "S08 name twice",
    header(json.dumps(HEADER).encode()[:-1] + b', "model.norm.weight": ' + json.dumps(HEADER["model.norm.weight"]).encode() + b"}"),
)
single("S09 metadata of numbers", header({"__metadata__": {"a": 1}, **HEADER}))
single("S10 surrogate", header({"\ud800": HEADER["model.norm.weight"], "model.embed.weight": HEADER["model.embed.weight"]}))
single("S12 many empty tensors", header({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(200_000)}, b""))
single("S13 unknown fields", header({name: {**fields, "more": 1} for name, fields in HEADER.items()}), WEIGHTS)


def indexed(name: str, content: object, right: dict[str, Any] | None = None) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    place(name, file("model-00001-of-00001.safetensors", TENSORS), file("model.safetensors.index.json", raw), right=right)


FILE = "model-00001-of-00001.safetensors"
indexed("S14 honest", {"metadata": {}, "weight_map": dict.fromkeys(WEIGHTS, FILE)}, WEIGHTS)
for kind, target in {
    "parent": f"../{FILE}",
    "absolute": "/etc/passwd",
    "drive": "C:x.safetensors",
    "other kind": "x.bin",
    "absent": "y.safetensors",
    "NUL": "a\0.safetensors",
    "number": 3,
    "empty": "",
}.items():
    indexed(f"S14 {kind}", {"metadata": {}, "weight_map": dict.fromkeys(WEIGHTS, target)})
indexed("S14 list", {"weight_map": [FILE]})
indexed("S14 cut", b'{"weight_map": {')
indexed("S15 tensor that the file lacks", {"metadata": {}, "weight_map": {**dict.fromkeys(WEIGHTS, FILE), "more": FILE}})

# -- J: JSON beside the weights --------------------------------------------------------------------------------------

for kind, raw in {
    "malformed": b"{",
    "empty": b"",
    "blank": b"  \n",
    "deep": b'{"a":' * 100_000,
    "digits": b'{"a": ' + b"9" * 5_000 + b"}",
    "array": b"[1]",
    "bad UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
}.items():
    place(f"J01 config {kind}", file(NAME), file("config.json", raw))
for kind, value in {"text": "8", "float": 8.0, "true": True, "negative": -1, "huge": 10**18, "list": [8]}.items():
    place(
        f"J07 world size {kind}",
        file(NAME),
        file("fsdp_config.json", json.dumps({"FSDP_version": 2, "world_size": value}).encode()),
        right=WEIGHTS,
    )
