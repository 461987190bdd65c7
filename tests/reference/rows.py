"""Rows of few bits in plain NumPy: scales, codes, bytes and what they decode to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs import Draw, LevelRows, RowQuantizer
from tests.reference import levels
from tests.reference.compressors import total
from tests.reference.philox import draw as draw_words

Row = NDArray[np.float32]


def uniforms(draw: Draw, row_key: int, columns: int) -> NDArray[np.uint16]:
    """16 bits for each column: word e mod 32 of draw e div 32 of a group of 512."""
    groups = -(-columns // 512)
    at = row_key * groups, groups
    drawn = [
        draw_words(draw.stream.key(), *at, number, draw.step & 0xFFFFFFFF, int(draw.source)).view(np.uint16)
        for number in range(16)
    ]
    return np.stack([words.reshape(groups, 32) for words in drawn], axis=1).reshape(-1)[:columns]


def scale_of(codec: RowQuantizer, row: Row) -> np.float32:
    """The scale that is sent."""
    size = np.abs(row).max() if codec.bits > 1 else np.float32(total(np.abs(row.astype(np.float64))) / row.size)
    least = np.float32(2.0**-24 if codec.scale == "float16" else 2.0**-100)
    if size < least:
        kept = size > 0 if codec.rounding == "stochastic" else size >= least / 2
        size = least if kept else np.float32(0)
    if codec.scale == "float32":
        return np.float32(size)
    half = np.float16(size)
    if codec.bits > 1 and half < size:
        half = np.nextafter(half, np.float16(np.inf))
    return np.float32(half)


def codes_of(codec: RowQuantizer, row: Row, scale: np.float32, drawn: NDArray[np.uint16]) -> NDArray[np.int64]:
    """0 .. 2^bits - 1."""
    most = 2**codec.bits - 1
    if codec.bits == 1:
        return (row >= 0).astype(np.int64)
    if codec.rounding == "nearest":
        half = np.float32(2 ** (codec.bits - 1))
        ratio = np.float32(float(half) / float(scale)) if scale else np.float32(0)
        return np.minimum(np.floor(np.maximum(row * ratio + half, 0)), most).astype(np.int64)
    half = np.float32(most / 2 * 65536)
    ratio = np.float32(float(half) / float(scale)) if scale else np.float32(0)
    place = np.trunc(row * ratio + np.float32(half + 0.5)).astype(np.int64)
    return np.minimum((place + drawn) >> 16, most)


def packed(codes: NDArray[np.int64], bits: int) -> bytes:
    """64 codes as words of one bit each; the rest one behind the other."""
    if bits == 8:
        return codes.astype(np.uint8).tobytes()
    whole = codes.size // 64 * 64
    found = b""
    for start in range(0, whole, 64):
        for j in range(bits):
            found += np.packbits(codes[start : start + 64] >> j & 1, bitorder="little").tobytes()
    rest = (codes[whole:, None] >> np.arange(bits)) & 1
    return found + np.packbits(rest.reshape(-1), bitorder="little").tobytes()


def values_of(codec: RowQuantizer, codes: NDArray[np.int64], scale: np.float32) -> Row:
    """float32 arithmetic throughout."""
    most = 2**codec.bits - 1
    ends = codec.rounding == "stochastic" or codec.bits == 1
    unit = np.float32(1 / most) if ends else np.float32(2.0**-codec.bits)
    if scale == 0:
        return np.zeros(codes.size, np.float32)
    return (2 * codes - most).astype(np.float32) * unit * scale


def encoded(
    codec: RowQuantizer, values: NDArray[Any], draw: Draw, row_keys: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The payload, and its decoded values."""
    kind, scales, bodies, found = np.dtype(codec.scale), b"", b"", np.empty_like(values)
    for r, row in enumerate(values):
        scale = scale_of(codec, row)
        codes = codes_of(codec, row, scale, uniforms(draw, int(row_keys[r]), row.size))
        scales += kind.type(scale).tobytes()
        bodies += packed(codes, codec.bits)
        found[r] = values_of(codec, codes, scale)
    return np.frombuffer(scales + bodies, np.uint8), found


def encoded_in_levels(codec: LevelRows, values: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The payload of rows whose buckets begin again with each of them, and its decoded values."""
    scales, bodies, found = [], [np.empty(0, np.uint8)], np.empty_like(values)
    for r, row in enumerate(values):
        for start in range(0, row.size, codec.bucket):
            part = slice(start, start + codec.bucket)
            bits, numbers, found[r, part] = levels.coded(row[part], codec.levels)
            scales.append(bits)
            bodies.append(levels.packed(numbers, codec.levels))
    body = np.concatenate(bodies)
    body = np.pad(body, (0, body.size % 2))
    return np.concatenate([body, np.array(scales, np.uint16).view(np.uint8)]), found
