"""Scales and codes of rows in a payload: the scales, then ceil(bits columns / 8) bytes of codes a row.

Codes of 8 bits are bytes. Of fewer bits, 64 codes are `bits` words of 64 bits: bit i of word j is bit j of code i. The
last codes of a row, less than 64, are written one behind the other, the lowest bit first.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint8, uint16, uint32, uint64

from mpicomp.kernels.cpu.lanes import to_bits, to_byte_mask, to_integers
from mpicomp.kernels.cpu.simd import load_bytes, select, splat_byte, store
from mpicomp.kernels.cpu.sixteen_bits import _from_float16, _to_float16

LEAST_16, LEAST_32 = np.float32(2.0**-24), np.float32(2.0**-100)  # the smallest scales
INFINITY_16 = np.uint32(0x7C00)


@njit(nogil=True)
def scale_code(size, sixteen, stochastic, up):
    """Return the bits of the scale for a row of this size; those of infinity if it is too large for float16."""
    least = LEAST_16 if sixteen else LEAST_32
    scale = np.float32(size)
    if scale < least:
        kept = scale > np.float32(0) if stochastic else scale >= least * np.float32(0.5)
        scale = least if kept else np.float32(0)
    if not sixteen:
        return uint32(to_integers(scale))
    code = uint32(_to_float16(scale))
    if up and code < INFINITY_16 and _from_float16(uint16(code)) < scale:
        code = uint32(code + uint32(1))
    return code


@njit(nogil=True, inline="always")
def put_scale(code, row, sixteen, payload):
    """Write the bits of a scale, byte by byte, as a payload may begin at any address."""
    width = 2 if sixteen else 4
    for k in range(width):
        payload[width * row + k] = uint8((code >> uint32(8 * k)) & uint32(255))


@njit(nogil=True)
def get_scale(row, sixteen, payload):
    """Return a scale; 0 if damage made it NaN or infinite."""
    width = 2 if sixteen else 4
    code = uint32(0)
    for k in range(width):
        code = uint32(code | uint32(payload[width * row + k]) << uint32(8 * k))
    scale = _from_float16(uint16(code)) if sixteen else np.uint32(code).view(np.float32)
    return scale if np.isfinite(scale) else np.float32(0)


@njit(nogil=True)
def pack(codes, n, bits, words, payload, at):
    """Write n codes of less than 8 bits to the payload from byte `at` on."""
    blocks = n // 64
    for w in range(blocks):
        low, high = load_bytes(codes, 64 * w), load_bytes(codes, 64 * w + 32)
        for j in range(bits):
            power = splat_byte(uint8(1 << j))
            word = to_bits((low & power) == power) | to_bits((high & power) == power) << uint64(32)
            words[bits * w + j] = word
    packed = words.view(np.uint8)
    size = 8 * bits * blocks
    for k in range(size):
        payload[at + k] = packed[k]
    at += size
    held, filled = uint32(0), 0
    for i in range(64 * blocks, n):
        held = uint32(held | uint32(codes[i]) << uint32(filled))
        filled += bits
        while filled >= 8:
            payload[at] = uint8(held & uint32(255))
            held, filled, at = uint32(held >> uint32(8)), filled - 8, at + 1
    if filled:
        payload[at] = uint8(held)


@njit(nogil=True)
def unpack(payload, at, n, bits, words, codes):
    """Read n codes from byte `at` of the payload: the inverse of `pack`, and for 8 bits too."""
    if bits == 8:
        for i in range(n):
            codes[i] = payload[at + i]
        return
    blocks = n // 64
    packed = words.view(np.uint8)
    size = 8 * bits * blocks
    for k in range(size):
        packed[k] = payload[at + k]
    none = splat_byte(uint8(0))
    for w in range(blocks):
        low, high = none, none
        for j in range(bits):
            power, word = splat_byte(uint8(1 << j)), words[bits * w + j]
            low = low | select(to_byte_mask(word, 0), power, none)
            high = high | select(to_byte_mask(word, 32), power, none)
        store(codes, 64 * w, low)
        store(codes, 64 * w + 32, high)
    at += size
    held, filled, most = uint32(0), 0, uint32((1 << bits) - 1)
    for i in range(64 * blocks, n):
        if filled < bits:
            held = uint32(held | uint32(payload[at]) << uint32(filled))
            filled, at = filled + 8, at + 1
        codes[i] = uint8(held & most)
        held, filled = uint32(held >> uint32(bits)), filled - bits
