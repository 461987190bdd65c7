"""Elias codes of counts: bits from the lowest on, in words of 32 bits.

A number x of 1 or more with z + 1 binary digits has the gamma code: z zeros, a one, the z digits below the leading
one. Its delta code: the gamma code of z + 1, the z digits. No code here is longer than 31 bits.
"""

from __future__ import annotations

import numpy as np
from numba import uint32, uint64
from numba.cpython.unsafe.numbers import trailing_zeros

from mpicomp.kernels.cpu.kernel import kernel

LOW, ONE = np.uint64(0xFFFFFFFF), np.uint64(1)
MOST_DIGITS = 15  # below a leading one


@kernel
def coded_bits(counts, gamma_lengths, delta_lengths):
    """Return the total length of all codes in bits, as gamma and as delta codes.

    counts : uint8, uint16 or uint32[n]. gamma_lengths, delta_lengths : uint64, of each value that a count can have.
    """
    gamma, delta = uint64(0), uint64(0)
    for i in range(counts.size):
        gamma += gamma_lengths[counts[i]]
        delta += delta_lengths[counts[i]]
    return gamma, delta


@kernel
def write_codes(counts, codes, lengths, out):
    """Write counts as a stream of codes.

    counts : uint8, uint16 or uint32[n]. codes, lengths : uint64, of each value that a count can have. out : uint32,
    long enough for the codes; overwritten, with zeros behind them.
    """
    held, bits, at = uint64(0), uint64(0), 0
    for i in range(counts.size):
        held |= codes[counts[i]] << bits
        bits += lengths[counts[i]]
        if bits >= uint64(32):
            out[at] = uint32(held & LOW)
            held >>= uint64(32)
            bits -= uint64(32)
            at += 1
    if bits > uint64(0):
        out[at] = uint32(held)
        at += 1
    out[at:] = uint32(0)


@kernel
def read_codes(words, delta, values, counts):
    """Read the counts that `write_codes` wrote. The words may be damaged.

    words : uint32[any]. delta : whether they are delta codes. values : uint32; entry x is the count of number x.
    counts : uint8, uint16 or uint32[n], overwritten.

    Returns
    -------
    bool
        Whether the words hold a code for every count, of numbers within `values`. If not, `counts` is invalid.
    """
    held, bits, at = uint64(0), uint64(0), 0
    for i in range(counts.size):
        if bits < uint64(32):
            if at < words.size:
                held |= uint64(words[at]) << bits
            at += 1  # behind the end there are zeros, which no code consists of
            bits += uint64(32)
        digits = uint64(trailing_zeros(held))
        if digits > uint64(MOST_DIGITS):
            return False
        length = uint64(2) * digits + ONE
        number = (ONE << digits) | ((held >> (digits + ONE)) & ((ONE << digits) - ONE))
        if delta:
            digits = number - ONE
            if digits > uint64(MOST_DIGITS):
                return False
            number = (ONE << digits) | ((held >> length) & ((ONE << digits) - ONE))
            length += digits
        if number >= uint64(values.size):
            return False
        counts[i] = values[number]
        held >>= length
        bits -= length
    return at <= words.size or uint64(32 * (at - words.size)) <= bits
