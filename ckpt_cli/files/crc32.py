"""CRC-32 of tensors from those of their parts, so that a checksum costs no pass of its own over the bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from ckpt_cli.files.source import Files, Source

POLYNOMIAL = 0xEDB88320
ONE = 1 << 31
"""The polynomial 1: coefficients stand in reversed order."""

BLOCK = 1 << 20

Parts = dict[str, list[tuple[int, int, int]]]
"""By the name of a tensor, of each part that was counted: its position, CRC-32 and length in bytes; in any order."""


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of a concatenation, from (CRC-32, length in bytes) of each part in order.

    Appending n bytes multiplies a CRC by x^(8n) modulo the polynomial of IEEE 802.3 (Mark Adler, ``crc32_combine`` of zlib).
    """
    total = 0
    for crc, length in parts:
        total = (_product(_power(8 * length), total) if total else 0) ^ crc
    return total


def combined_parts(parts: Parts) -> dict[str, int]:
    """The CRC-32 of each tensor."""
    return {name: combined((crc, length) for _, crc, length in sorted(each)) for name, each in parts.items()}


def crc_of(source: Source, offset: int, length: int, each_block: Callable[[], None] = lambda: None) -> int:
    """The CRC-32 of a range of bytes of a source, read through a small buffer; ``each_block`` may end it by raising."""
    crc, buffer = 0, memoryview(bytearray(min(BLOCK, length)))
    for start in range(0, length, BLOCK):
        part = buffer[: min(BLOCK, length - start)]
        source.read_at(offset + start, part)
        crc = zlib.crc32(part, crc)
        each_block()
    return crc


def crc_of_content(content: bytes | Path, files: Files) -> int:
    """The CRC-32 of a file, or of what is to be written as one."""
    if isinstance(content, bytes):
        return zlib.crc32(content)
    source = files.source(content)
    return crc_of(source, 0, source.size)


def _product(first: int, second: int) -> int:
    """Product of two polynomials over GF(2), modulo the CRC polynomial."""
    result = 0
    while first:
        if first & ONE:
            result ^= second
        first = (first << 1) & 0xFFFFFFFF
        second = (second >> 1) ^ (POLYNOMIAL if second & 1 else 0)
    return result


@cache
def _square(exponent: int) -> int:
    """x^(2^exponent)."""
    if exponent == 0:
        return ONE >> 1
    half = _square(exponent - 1)
    return _product(half, half)


def _power(exponent: int) -> int:
    """x^exponent."""
    result, place = ONE, 0
    while exponent:
        if exponent & 1:
            result = _product(_square(place), result)
        exponent >>= 1
        place += 1
    return result
