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


def bfloat16(number: float) -> int:
    """Return the bits of a number that is rounded to float32 and then to bfloat16; those of NaN beyond its range."""
    bits = int(np.float32(number).view(np.uint32))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return bits if bits < 0x7F80 else NAN


def scale_of(bits: int) -> np.float32:
    """Return the float32 of bits of bfloat16."""
    return np.uint32(bits << 16).view(np.float32)


def lane_sum(terms: Values) -> np.float32:
    """Sum in float32, in the kernels' order: in 2 x 16 lanes, which are added up halves first."""
    padded = np.pad(terms, (0, -terms.size % 64)).astype(np.float32).reshape(-1, 32)
    lanes = np.zeros(32, np.float32)
    for row in padded:
        lanes = lanes + row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return np.float32(lanes[0])


def coded_evenly(v: Values, levels: int) -> tuple[int, NDArray[np.int64], Values]:
    """Do as `coded` for entropy coding: equidistant levels with a wide zero."""
    v, (step, most) = v.astype(np.float32), EVEN[levels]
    wide = v.astype(np.float64)
    deviation = np.sqrt(np.add.accumulate(wide**2)[-1] / v.size)
    steps = np.minimum(np.floor(np.abs(wide) * (1 / (step * deviation) if deviation else 0) + 0.4), most)
    below = float(steps @ steps)
    bits = bfloat16(float(np.add.accumulate(np.abs(wide) * steps)[-1]) / below if below else 0.0)
    numbers = np.where(v < 0, -steps, steps).astype(np.int64)
    return bits, numbers, scale_of(bits) * numbers.astype(np.float32)


def coded(v: Values, levels: int, coding: str = "fixed") -> tuple[int, NDArray[np.int64], Values]:
    """Return the scale's bits, the signed numbers of the levels and the decoded values of one bucket.

    Magnitudes are numbered from 1 on; 0 is the level zero, which only 3 and 256 levels and entropy coding have.
    """
    v = v.astype(np.float32)
    if not np.isfinite(v).all():
        return NAN, np.zeros(v.size, np.int64), np.full(v.size, np.nan, np.float32)
    if coding == "entropy":
        return coded_evenly(v, levels)
    sizes, signs = np.abs(v), np.where(v < 0, -1, 1)
    if levels == 2 * STEPS + 2:
        largest = sizes.max()
        if largest <= LEAST:
            return 0, np.zeros(v.size, np.int64), np.zeros(v.size, np.float32)
        bits = bfloat16(float(largest) / STEPS)
        ratio = np.float32(STEPS / float(largest))
        numbers = signs * np.floor(sizes * ratio + np.float32(0.5)).astype(np.int64)
        return bits, numbers, numbers.astype(np.float32) * scale_of(bits)
    magnitudes = np.array((0.0, *MAGNITUDES[levels]), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        sigma = np.sqrt(np.float64(lane_sum(v * v)) / v.size)
    numbers = np.full(v.size, int(levels != 3))
    for threshold in THRESHOLDS[levels]:
        numbers += sizes > np.float32(float(np.float32(threshold)) * sigma)
    with np.errstate(over="ignore"):
        top = float(lane_sum(sizes * magnitudes[numbers]))
    below = sum(float(one) ** 2 * np.count_nonzero(numbers == k) for k, one in enumerate(magnitudes))
    bits = bfloat16(top / (below or 1.0))
    if levels == 3 and not np.isfinite(sigma):
        bits = NAN  # magnitudes whose squares overflow are all below the thresholds, and 3 levels have only zero there
    return bits, signs * numbers, signs.astype(np.float32) * (scale_of(bits) * magnitudes)[numbers]


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
