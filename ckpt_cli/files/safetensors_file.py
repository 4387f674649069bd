"""The safetensors format: reading a header strictly, building one, and nothing about weights.

The rules are those of the safetensors library (safetensors/src/tensor.rs, ``Metadata::validate``): 8-byte little-endian
header length of at most 100 MB, a UTF-8 JSON object, tensors that begin at 0, follow each other without gap or overlap
and end with the file, and sizes that agree with shape and dtype.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from ckpt_cli.boxes import Shape
from ckpt_cli.dtypes import BROKEN, BY_CODE, Dtype
from ckpt_cli.errors import INTERRUPTED, CorruptFile, Unsupported, reading
from ckpt_cli.files.source import Source, Window

MAX_HEADER = 100_000_000
MAX_NUMEL = 1 << 62
MAX_DIMENSIONS = 32
"""As many as every version of numpy can have."""
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: ``offset`` in bytes from the start of the *file*."""

    name: str
    dtype: Dtype
    shape: Shape
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]


OF_TORCH = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")
"""How files of torch.save begin: zip archives, and before torch 1.6 a pickle of a large number."""


def read_header(source: Source, start: int = 0) -> Header:
    """The validated header of a file, or of a blob that begins at ``start`` and ends with the file.

    Raises CorruptFile, or Unsupported for a dtype that ckpt does not know.
    """
    window = Window(source, start, source.size - start)
    with reading(source.path):
        if window.size < 8:
            raise CorruptFile(
                f"the file has only {window.size} bytes",
                expected="a safetensors file",
                hint=INTERRUPTED,
            )
        begins = window.read(0, 8)
        if begins.startswith(OF_TORCH):
            raise CorruptFile(
                "this is a file of torch.save", expected="a safetensors file", hint="give it a name that ends with .pt or .bin"
            )
        length = int.from_bytes(begins, "little")
        if length > MAX_HEADER or 8 + length > window.size:
            raise CorruptFile(f"the header would be {length} bytes long", expected=f"at most {min(MAX_HEADER, window.size - 8)}")
        return _validated(_parse(window.read(8, length)), start + 8 + length, source.size)


def build_header(entries: Iterable[tuple[str, Dtype, Shape]], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """The bytes of a header, and the offset of each tensor from the start of the file.

    Tensors stand in the given order; the header is padded with spaces so that data begin at a multiple of 8 bytes.
    """
    written = bytearray(8) + b"{" + (f'"__metadata__":{_json(dict(metadata))},'.encode() if metadata else b"")
    position, starts = 0, []
    for name, dtype, shape in entries:
        stop = position + math.prod(shape) * dtype.itemsize
        sizes = ",".join(map(str, _counted(name, dtype, shape)))
        written += f'{_json(name)}:{{"dtype":"{dtype.code}","shape":[{sizes}],"data_offsets":[{position},{stop}]}},'.encode()
        starts.append(position)
        position = stop
    if written.endswith(b","):
        written.pop()
    written += b"}"
    written += b" " * (-len(written) % ALIGNMENT)
    length = len(written) - 8
    if length > MAX_HEADER:
        raise Unsupported(f"the header would need {length} bytes", expected=f"at most {MAX_HEADER}", hint="use a smaller --max-shard-size")
    written[:8] = length.to_bytes(8, "little")
    return bytes(written), [len(written) + start for start in starts]


def _counted(name: str, dtype: Dtype, shape: Shape) -> Shape:
    """A shape as safetensors counts it: every value, also where an element holds several."""
    if dtype.values == 1:
        return shape
    if not shape:
        hint = "leave it out with --exclude"
        raise Unsupported(f"a single element of {dtype} holds {dtype.values} values, which no shape says", tensor=name, hint=hint)
    return (*shape[:-1], shape[-1] * dtype.values)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def parse_json(raw: bytes, what: str = "the file") -> Any:
    """JSON with every failure as CorruptFile, and without duplicate keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise CorruptFile(f"{what} names the same key twice")
        return result

    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=unique)
    except UnicodeDecodeError:
        raise CorruptFile(f"{what} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise CorruptFile(f"{what} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except (ValueError, RecursionError):
        raise CorruptFile(f"{what} is not valid JSON") from None


def _parse(raw: bytes) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise CorruptFile("the header is not a JSON object", expected="a safetensors file")
    header = parse_json(raw, "the header")
    if not isinstance(header, dict):
        raise CorruptFile("the header is not a JSON object")
    return header


def _validated(header: dict[str, Any], begin: int, file_size: int) -> Header:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptFile("__metadata__ of the header is not a map of strings")
    spans: list[tuple[int, int, Entry]] = []
    for name in list(header):
        fields = header.pop(name)  # what is validated is not kept twice
        if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
            raise CorruptFile("a tensor name is not valid Unicode", tensor=name)
        with reading(tensor=name):
            spans.append(_entry(name, fields, begin))
    spans.sort(key=lambda span: span[:2])
    position = 0
    for start, stop, entry in spans:
        if start != position:
            raise CorruptFile(f"its bytes begin at {start}", tensor=entry.name, expected=f"{position}, where the tensor before it ends")
        position = stop
    if begin + position != file_size:
        raise CorruptFile(
            f"the file has {file_size} bytes",
            expected=f"{begin + position} bytes, as its header says",
            hint=INTERRUPTED,
        )
    return Header(tuple(entry for _, _, entry in spans), metadata)


def _entry(name: str, fields: object, begin: int) -> tuple[int, int, Entry]:
    if not isinstance(fields, dict):
        raise CorruptFile("the header entry is not an object")
    code, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if isinstance(shape, list) and len(shape) > MAX_DIMENSIONS:
        raise Unsupported(f"the tensor has {len(shape)} dimensions", expected=f"at most {MAX_DIMENSIONS}")
    if not _naturals(shape) or not _naturals(span) or len(span) != 2 or not isinstance(code, str):
        raise CorruptFile("the header entry has no valid dtype, shape and data_offsets")
    dtype = BY_CODE.get(code)
    if dtype is None or not dtype.storable:
        raise Unsupported(f"dtype {code} is not read: its values are not whole bytes" if code in BROKEN else f"dtype {code} is not known")
    if dtype.values > 1:
        if not shape or shape[-1] % dtype.values:
            raise Unsupported(
                f"{dtype} is only read in whole bytes, not in shape {shape}",
                expected=f"a last dimension that {dtype.values} divides, not shape {shape}",
            )
        shape = [*shape[:-1], shape[-1] // dtype.values]
    numel = math.prod(shape)
    if numel > MAX_NUMEL or span[1] - span[0] != numel * dtype.itemsize:
        raise CorruptFile(f"shape {shape} of {code} does not fill its {span[1] - span[0]} bytes")
    return span[0], span[1], Entry(name, dtype, tuple(shape), begin + span[0])


def _naturals(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list):
        return False
    for n in value:  # noqa: SIM110 - a generator takes twice the time, and there may be half a million
        if type(n) is not int or not 0 <= n <= MAX_NUMEL:
            return False
    return True
