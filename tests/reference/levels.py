"""Nearest of a few levels times a scale for each bucket, in plain NumPy: decoded values and bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]
Words = NDArray[np.uint64]

# positive levels of a Gaussian with deviation 1, by Lloyd and Max, and the thresholds between them
MAGNITUDES: dict[int, tuple[float, ...]] = {
    2: (0.7979,),
    3: (1.2240,),
    4: (0.4528, 1.5104),
    8: (0.2451, 0.7560, 1.3439, 2.1520),
    16: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0691, 2.7327),
}
THRESHOLDS: dict[int, tuple[float, ...]] = {
    2: (),
    3: (0.6120,),
    4: (0.9816,),
    8: (0.5006, 1.0500, 1.7480),
    16: (0.25825, 0.52245, 0.7996, 1.0993, 1.43715, 1.8436, 2.4009),
}
STEPS = 127  # of 256 levels, on either side of zero
LEAST = np.float32(1e-36)  # with 256 levels a bucket below it is zero
NAN = 0x7FC0
EVEN = {3: (1.45, 7), 4: (1.13, 7), 8: (0.61, 15), 16: (0.32, 31)}
"""With entropy coding: the step over the deviation, and the largest number of steps, for each number of levels."""


def bfloat16(numbers: Values) -> NDArray[np.uint32]:
    """Return the bits of numbers that are rounded to float32 and then to bfloat16; those of NaN beyond its range."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = np.asarray(numbers, np.float64).astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
    return np.where(bits < 0x7F80, bits, NAN).astype(np.uint32)


def scale_of(bits: NDArray[np.uint32]) -> Values:
    """Return the float32 of bits of bfloat16."""
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def lane_sums(terms: Values) -> Values:
    """Sum each row in float32, in the kernels' order: in 2 x 16 lanes, which are added up halves first."""
    padded = np.pad(terms, ((0, 0), (0, -terms.shape[1] % 64))).astype(np.float32).reshape(len(terms), -1, 32)
    lanes = np.zeros((len(terms), 32), np.float32)
    for column in range(padded.shape[1]):
        lanes = lanes + padded[:, column]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _evenly(v: Values, levels: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return bits of scales and numbers of levels for entropy coding: equidistant levels with a wide zero."""
    (step, most), wide = EVEN[levels], v.astype(np.float64)
    deviation = np.sqrt(np.add.accumulate(wide**2, 1)[:, -1] / v.shape[1])
    over = np.array([1 / (step * one) if one else 0.0 for one in deviation])
    steps = np.minimum(np.floor(np.abs(wide) * over[:, None] + 0.4), most)
    below = np.array([float(one @ one) for one in steps])
    top = np.add.accumulate(np.abs(wide) * steps, 1)[:, -1]
    bits = bfloat16(np.divide(top, below, out=np.zeros(len(v)), where=below > 0))
    return bits, np.where(v < 0, -steps, steps).astype(np.int64)


def _by_largest(v: Values) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return bits of scales and numbers of levels, of 256."""
    sizes, signs = np.abs(v), np.where(v < 0, -1, 1)
    largest = sizes.max(1).astype(np.float64)
    is_zero = largest <= LEAST
    bits = np.where(is_zero, 0, bfloat16(largest / STEPS)).astype(np.uint32)
    ratio = np.divide(STEPS, largest, out=np.zeros(len(v)), where=~is_zero).astype(np.float32)
    return bits, signs * np.floor(sizes * ratio[:, None] + np.float32(0.5)).astype(np.int64)


def _by_deviation(v: Values, levels: int) -> tuple[NDArray[np.uint32], NDArray[np.int64], Values]:
    """Return bits of scales, magnitudes' numbers with signs, and decoded values, of 2 to 16 levels."""
    sizes, signs = np.abs(v), np.where(v < 0, -1, 1)
    magnitudes = np.array((0.0, *MAGNITUDES[levels]), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        sigma = np.sqrt(lane_sums(v * v).astype(np.float64) / v.shape[1])
        numbers = np.full(v.shape, int(levels != 3))
        for threshold in THRESHOLDS[levels]:
            numbers += sizes > (float(np.float32(threshold)) * sigma).astype(np.float32)[:, None]
        top = lane_sums(sizes * magnitudes[numbers]).astype(np.float64)
    below = sum(float(one) ** 2 * np.count_nonzero(numbers == k, axis=1) for k, one in enumerate(magnitudes))
    bits = bfloat16(top / np.where(below == 0, 1.0, below))
    if levels == 3:  # magnitudes whose squares overflow are all below the thresholds, and 3 levels have only zero there
        bits = np.where(np.isfinite(sigma), bits, NAN).astype(np.uint32)
    scaled = scale_of(bits)[:, None] * magnitudes
    return bits, signs * numbers, signs.astype(np.float32) * np.take_along_axis(scaled, numbers, 1)


def coded_rows(
    rows: Values, levels: int, coding: str = "fixed"
) -> tuple[NDArray[np.uint32], NDArray[np.int64], Values]:
    """Return the scales' bits, the signed numbers of the levels and the decoded values of buckets, one a row.

    Magnitudes are numbered from 1 on; 0 is the level zero, which only 3 and 256 levels and entropy coding have.
    """
    v = rows.astype(np.float32)
    finite = np.isfinite(v).all(1)
    bits, numbers = np.full(len(v), NAN, np.uint32), np.zeros(v.shape, np.int64)
    decoded, some = np.full(v.shape, np.nan, np.float32), v[finite]
    if not len(some):
        return bits, numbers, decoded
    if coding == "entropy" or levels == 2 * STEPS + 2:
        bits[finite], numbers[finite] = _evenly(some, levels) if coding == "entropy" else _by_largest(some)
        decoded[finite] = numbers[finite].astype(np.float32) * scale_of(bits[finite])[:, None]
    else:
        bits[finite], numbers[finite], decoded[finite] = _by_deviation(some, levels)
    return bits, numbers, decoded


def coded(v: Values, levels: int, coding: str = "fixed") -> tuple[int, NDArray[np.int64], Values]:
    """Do as `coded_rows` for one bucket."""
    bits, numbers, decoded = coded_rows(v[None], levels, coding)
    return int(bits[0]), numbers[0], decoded[0]


def in_levels(values: Values, levels: int, bucket: int, coding: str = "fixed") -> Values:
    """Return the decoded values of a vector, in its type."""
    out = np.empty(values.size, np.float32)
    for start in range(0, values.size, bucket):
        part = slice(start, start + bucket)
        out[part] = coded(values[part], levels, coding)[2]
    return out.astype(values.dtype)


def payload(values: Values, levels: int, bucket: int) -> NDArray[np.uint8]:
    """Return the bytes of a vector: the codes of all buckets, a zero byte where their number is odd, the scales."""
    codes, scales = [], []
    for start in range(0, values.size, bucket):
        bits, numbers, _ = coded(values[start : start + bucket], levels)
        scales.append(bits)
        codes.append(packed(numbers, levels))
    body = np.concatenate([np.empty(0, np.uint8), *codes])
    return np.concatenate([body, np.zeros(body.size % 2, np.uint8), np.array(scales, np.uint16).view(np.uint8)])


def packed(numbers: NDArray[np.int64], levels: int) -> NDArray[np.uint8]:
    """Return the bytes of a bucket's codes."""
    if levels == 2 * STEPS + 2:
        return (numbers + STEPS).astype(np.uint8)
    if levels == 3:
        n_bytes = -(-numbers.size // 5)
        digits = np.ones(5 * n_bytes, np.int64)  # places that are left over hold the level zero
        digits[: numbers.size] = numbers + 1
        whole = np.zeros(n_bytes, np.int64)
        for group in digits.reshape(5, n_bytes):
            whole = 3 * whole + group
        return whole.astype(np.uint8)
    planes = [numbers < 0, *((np.abs(numbers) - 1) >> k & 1 for k in range(levels.bit_length() - 2))]
    size = -(-numbers.size // 64) * 64
    return np.concatenate([np.packbits(np.pad(plane, (0, size - plane.size)), bitorder="little") for plane in planes])
