"""More of the catalogue: what is rare but valid, and its neighbours.

The other letters of the catalogue are in tests of their own: D, DCP folders, in tests/formats/test_dcp.py; O, outputs, in
tests/test_publishing.py and tests/test_staging.py.
"""

from __future__ import annotations

import json
import os
import warnings
import zipfile
from io import BytesIO

import numpy
import torch
from safetensors.torch import save

from tests.hostile.cases import (
    FILE,
    HEADER,
    HONEST,
    NAME,
    TENSORS,
    WEIGHTS,
    extended,
    file,
    header,
    indexed,
    member,
    place,
    shard,
    single,
    tensor,
)
from tests.payloads import calling, pickled, repacked, text, torch_file

WEIGHT = WEIGHTS["model.embed.weight"]

# -- Z: zip containers -----------------------------------------------------------------------------------------------


def _with_more(*members: tuple[str, bytes]) -> bytes:
    buffer = BytesIO(HONEST)
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "a") as archive:
        warnings.simplefilter("ignore")
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


def _without_checksums() -> bytes:
    torch.serialization.set_crc32_options(False)
    try:
        return torch_file(WEIGHTS)
    finally:
        torch.serialization.set_crc32_options(True)


def _with_large_fields() -> bytes:
    """The honest file with the fields of 64 bits that large files need."""
    buffer = BytesIO()
    with zipfile.ZipFile(BytesIO(HONEST)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as target:
                target.write(old.read(name))
    return buffer.getvalue()


shard("Z05 no checksums", _without_checksums(), WEIGHTS)
shard("Z08 storage twice", _with_more(("archive/data/0", bytes(48))))
shard("Z10 pickle twice", _with_more(("archive/data.pkl", pickled(b"}"))))
shard("Z17 names of 60,000 bytes", _with_more(*((f"archive/{number:060000}", b"") for number in range(300))))
shard("Z19 fields of 64 bits", _with_large_fields(), WEIGHTS)
SWAPPED = {name: torch.from_numpy(each.numpy().byteswap()) for name, each in WEIGHTS.items()}
shard("Z22 big endian", member("byteorder", lambda _: b"big"), SWAPPED)
shard("Z23 format version", member(".format_version", lambda _: b"x" * 100_000), WEIGHTS)

# -- T: tensors ------------------------------------------------------------------------------------------------------


def _with_bytes(dtype: torch.dtype, raw: bytes) -> bytes:
    """A file of one tensor with bytes that torch itself does not write for this dtype."""
    honest = torch_file({"w": torch.zeros(len(raw) // dtype.itemsize, dtype=dtype)})
    return repacked(honest, lambda name, old: raw if name.endswith("/data/0") else old)


SHAPES = {
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 5),
    "one": torch.ones(1),
    "strides of nothing": torch.arange(4.0).as_strided((1, 4, 1), (9, 1, 7)),
}
shard("T08 little in them", torch_file({**SHAPES, **WEIGHTS}), {**SHAPES, **WEIGHTS})
shard("T10 one storage, two names", torch_file({"a.w": WEIGHT, "b.w": WEIGHT[1:]}), {"a.w": WEIGHT, "b.w": WEIGHT[1:]})
BOOLS = numpy.array([0, 1, 2, 255], numpy.uint8)
shard("T13 bytes of bool", _with_bytes(torch.bool, BOOLS.tobytes()), {"w": torch.from_numpy(BOOLS).view(torch.bool)})
for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.complex64):
    integers = torch.arange(4).to(dtype)
    shard(f"T15 {str(dtype).removeprefix('torch.')}", torch_file({"w": integers}), {"w": integers})
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    shard("T14 complex32", torch_file({"w": torch.ones(2, dtype=torch.complex32)}))
    shard("T16 sparse rows", torch_file({"w": torch.eye(3).to_sparse_csr()}))
    shard("T17 quantised", torch_file({"w": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)}))
for kind, where in {"of another machine": text("cuda:99"), "meta": text("meta"), "long": text("x" * 1_000_000), "number": b"K\0"}.items():
    shard(f"T19 location {kind}", tensor(location=where), {"w": WEIGHT})

RANKS = "model_world_size_2_rank_{}.pt"
for kind, other in {"dtypes": WEIGHT.half(), "shapes": WEIGHT.t().contiguous()}.items():
    place(f"T21 {kind} of two ranks", file(RANKS.format(0), torch_file({"w": WEIGHT})), file(RANKS.format(1), torch_file({"w": other})))
place(
    "F12 one file as two ranks",
    file(RANKS.format(0)),
    lambda folder: os.link(folder / RANKS.format(0), folder / RANKS.format(1)),
    right=WEIGHTS,
)


def _labelled(values: torch.Tensor) -> torch.Tensor:
    values.label = "x"  # type: ignore[attr-defined]
    return values


shard(
    "T22 attributes",
    torch_file({"w": torch.nn.Parameter(_labelled(torch.ones(3))), "b": _labelled(torch.ones(2))}),
    {"w": torch.ones(3), "b": torch.ones(2)},
)
shard("T22 buffer", torch_file({"w": torch.nn.Buffer(torch.ones(3))}), {"w": torch.ones(3)})
shard("T23 numpy beside weights", torch_file({"model": WEIGHTS, "rng": numpy.random.get_state()[1], "loss": numpy.float64(0.5)}), WEIGHTS)

# -- P: pickles ------------------------------------------------------------------------------------------------------

shard(
    "P07 getattr",
    extended(b"c__builtin__\ngetattr\n" + b"cposix\nmkdir\n" + text("__call__") + b"\x86R" + text("marker") + b"\x85R"),
    WEIGHTS,
)
shard("P07 reconstructor", extended(calling("copy_reg", "_reconstructor", "marker")), WEIGHTS)
shard("P09 state of an ordered dict", extended(b"ccollections\nOrderedDict\n)R}" + text("items") + b"K\x01sb"), WEIGHTS)
for name, args in {"builtins.bytes": "\u00ff", "collections.Counter": "x" * 9, "torch.Size": "1"}.items():
    module, _, function = name.rpartition(".")
    shard(f"P30 {name}", extended(calling(module, function, args)), WEIGHTS)

# -- S: safetensors and its index ------------------------------------------------------------------------------------

NORM = HEADER["model.norm.weight"]
single("S08 field twice", header(json.dumps(HEADER).encode().replace(b'"shape": [4]', b'"shape": [2], "shape": [4]')))
single("S08 metadata twice", header(b'{"__metadata__": {"a": "1", "a": "2"}, ' + json.dumps(HEADER).encode()[1:]))
single("S09 a tensor called metadata", header({"__metadata__": NORM, "model.embed.weight": HEADER["model.embed.weight"]}))
for name in ("", "a\0b", "../../marker", "=cmd()", "[red]w[/red]"):
    single(f"S11 name {name[:12]!r}", save({name: WEIGHT}), {name: WEIGHT})
single("S11 name of 100,000 characters", save({"x" * 100_000: WEIGHT}))
single("S11 name of controls", save({"\x1b]8;;x\x07w\u202e": WEIGHT}), {"\x1b]8;;x\x07w\u202e": WEIGHT})
single("S14 HTML", b"<!DOCTYPE html><html>404")
weights = dict.fromkeys(WEIGHTS, FILE)
for total in (1, "many", -1, 1e300):
    indexed(f"S14 total size {total}", {"metadata": {"total_size": total}, "weight_map": weights}, WEIGHTS)
indexed("S15 tensor that the index lacks", {"metadata": {}, "weight_map": {"model.norm.weight": FILE}})
place(
    "S16 links of a cache",
    lambda folder: (folder / "blob").write_bytes(TENSORS),
    lambda folder: (folder / "model.safetensors").symlink_to("blob"),
    right=WEIGHTS,
)

# -- J and F: what lies beside ---------------------------------------------------------------------------------------

for kind, raw in {"NaN": b'{"a": NaN}', "infinity": b'{"time_step_limit": [0.0, Infinity]}', "BOM": b"\xef\xbb\xbf{}"}.items():
    place(f"J04 config {kind}", file(NAME), file("config.json", raw), right=WEIGHTS)
place("J05 config key twice", file(NAME), file("config.json", b'{"a": 1, "a": 2}'))
for kind, raw in {"parent": b"../../other", "absolute": b"/etc", "control": b"a\n\x1b[2Jb", "long": b"9" * 1_000_000}.items():
    place(f"J09 latest {kind}", file(NAME), file("latest", raw), right=WEIGHTS)
place(
    "J08 huge config",
    file(NAME),
    lambda folder: (folder / "config.json").touch(),
    lambda folder: os.truncate(folder / "config.json", 1 << 31),
)
place("F22 HTML", file(NAME, b"<html>"))
