"""The one table of dtypes: safetensors code, bits, kind, and the names that torch, pickles and numpy use.

Codes are those of the safetensors format; dtypes that safetensors cannot store have a code of our own and
``storable=False``. Storage names are the classes that ``torch.save`` writes; dtypes younger than torch 1.6 have none:
they are written by ``_rebuild_tensor_v3`` as bytes plus a dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy

Kind = Literal["float", "int", "bool", "complex", "opaque"]


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type. ``bits`` is the size of an element; ``kind`` decides what may be cast ("float" only)."""

    code: str
    bits: int
    kind: Kind
    torch: str
    storage: str | None = None
    numpy: str | None = None
    storable: bool = True
    values: int = 1
    """Values in an element: torch's are whole bytes, where safetensors counts each value of the last dimension."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element as it is stored (sub-byte elements are packed by torch into whole bytes)."""
        return self.bits // 8 or 1

    def __str__(self) -> str:
        return self.code


TABLE: tuple[Dtype, ...] = (
    Dtype("F64", 64, "float", "float64", "DoubleStorage", "float64"),
    Dtype("F32", 32, "float", "float32", "FloatStorage", "float32"),
    Dtype("F16", 16, "float", "float16", "HalfStorage", "float16"),
    Dtype("BF16", 16, "float", "bfloat16", "BFloat16Storage", "bfloat16"),
    Dtype("F8_E4M3", 8, "opaque", "float8_e4m3fn", None, "float8_e4m3fn"),
    Dtype("F8_E5M2", 8, "opaque", "float8_e5m2", None, "float8_e5m2"),
    Dtype("F8_E4M3FNUZ", 8, "opaque", "float8_e4m3fnuz", None, "float8_e4m3fnuz"),
    Dtype("F8_E5M2FNUZ", 8, "opaque", "float8_e5m2fnuz", None, "float8_e5m2fnuz"),
    Dtype("F8_E8M0", 8, "opaque", "float8_e8m0fnu", None, "float8_e8m0fnu"),
    Dtype("F4", 8, "opaque", "float4_e2m1fn_x2", None, "uint8", values=2),
    Dtype("I64", 64, "int", "int64", "LongStorage", "int64"),
    Dtype("I32", 32, "int", "int32", "IntStorage", "int32"),
    Dtype("I16", 16, "int", "int16", "ShortStorage", "int16"),
    Dtype("I8", 8, "int", "int8", "CharStorage", "int8"),
    Dtype("U64", 64, "int", "uint64", None, "uint64"),
    Dtype("U32", 32, "int", "uint32", None, "uint32"),
    Dtype("U16", 16, "int", "uint16", None, "uint16"),
    Dtype("U8", 8, "int", "uint8", "ByteStorage", "uint8"),
    Dtype("BOOL", 8, "bool", "bool", "BoolStorage", "bool"),
    Dtype("C64", 64, "complex", "complex64", "ComplexFloatStorage", "complex64"),
    Dtype("C128", 128, "complex", "complex128", "ComplexDoubleStorage", "complex128", storable=False),
    Dtype("C32", 32, "complex", "complex32", None, None, storable=False),
    Dtype("QINT8", 8, "opaque", "qint8", "QInt8Storage", None, storable=False),
    Dtype("QUINT8", 8, "opaque", "quint8", "QUInt8Storage", None, storable=False),
    Dtype("QINT32", 32, "opaque", "qint32", "QInt32Storage", None, storable=False),
)

BROKEN = ("F6_E2M3", "F6_E3M2")
"""Codes of safetensors for values that share bytes with others in a way that no dtype of torch or numpy has."""

BY_CODE = {dtype.code: dtype for dtype in TABLE}
BY_TORCH = {dtype.torch: dtype for dtype in TABLE} | {
    alias: next(dtype for dtype in TABLE if dtype.torch == name)
    for alias, name in {"float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32"}.items()
}
BY_STORAGE = {dtype.storage: dtype for dtype in TABLE if dtype.storage}

BASE = "base"
"""The word for ``--dtype`` that gives every tensor the dtype which it has in the base."""

CAST_NAMES: dict[str, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""What ``--dtype`` accepts besides "keep" and "base"."""

HALVES = ("bf16", "fp16")
"""Those of them in which transformers keeps some tensors of some classes in fp32."""

CAST_SYNONYMS: dict[str, str] = {
    synonym: name
    for name, synonyms in {
        "fp32": ("float32", "float", "f32", "single"),
        "bf16": ("bfloat16", "bfloat"),
        "fp16": ("float16", "half", "f16"),
        "keep": ("auto", "none", "same"),
    }.items()
    for synonym in synonyms
}
"""Other words for them: those of torch, numpy, safetensors and configs."""


def cast_name(text: str) -> str:
    """The word for a dtype that ``--dtype`` has, from those of other libraries and in any case; others unchanged.

    >>> cast_name("torch.bfloat16"), cast_name("F32"), cast_name("half"), cast_name("int8")
    ('bf16', 'fp32', 'fp16', 'int8')
    """
    name = text.strip().lower().removeprefix("torch.").removeprefix("numpy.").removeprefix("jnp.")
    return CAST_SYNONYMS.get(name, name)


def numpy_dtype(dtype: Dtype) -> numpy.dtype[Any]:
    """The numpy dtype of a storable dtype; bfloat16 and the 8-bit floats come from ml_dtypes.

    Raises KeyError for a dtype that has no numpy counterpart (quantised types, complex32).
    """
    import numpy

    if dtype.numpy is None:
        raise KeyError(dtype.code)
    if dtype.numpy.startswith(("bfloat", "float8")):
        import ml_dtypes

        scalar: type = getattr(ml_dtypes, dtype.numpy)
        return numpy.dtype(scalar)
    return numpy.dtype(dtype.numpy)


def overflow_hint(dtypes: Iterable[Dtype]) -> str:
    """What helps against finite values that are too large for their dtypes: of 16 bits there are wider ones."""
    wider = "use a wider --dtype such as fp32, or " if all(dtype.bits <= 16 for dtype in dtypes) else ""
    return f"{wider}pass --allow-overflow to write infinities"
