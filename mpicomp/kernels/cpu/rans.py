"""Interleaved rANS, the loops of `mpicomp.codecs.rans`: several small symbols as one, frequencies, states and words.

rANS (Duda: *Asymmetric numeral systems*, arXiv 1311.2540) keeps the coded symbols in one integer, the state. A symbol
of frequency f out of 2^bits multiplies it by about 2^bits / f. Before it would reach 2^31 its low 16 bits leave as a
word, so a state always lies in [2^15, 2^31). Symbols are decoded in the opposite order, so the encoder begins at the
end. Several states may take turns, since each step of a state depends on the step before. Their words lie in one
stream, in the order in which the decoder reads them.

The encoder divides by f with a multiplication by its reciprocal, rounded up, which is exact below 2^31 (Alverson:
*Integer division using reciprocals*, ARITH 1991).
"""

from __future__ import annotations

import numpy as np
from numba import uint8, uint64

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.simd import LANES, load, store

MOST_BITS = 14  # of frequencies; fewer than the bits of the lowest state
LOWEST = 1 << 15
CERTAIN = 1 << 30  # a probability of 1
_WORD_BITS = 16
# columns of the encoder's table: state at which a word leaves, reciprocal of the frequency, shift after it, the number
# added once, and the number added for each time that the frequency goes into the state
_LIMIT, _RECIPROCAL, _SHIFT, _ONCE, _EACH = range(5)
ENCODER_COLUMNS = 8  # a power of two


@kernel
def group(symbols, places, packed, counts):
    """Make every `len(places)` symbols one super-symbol, and count these; return the largest symbol.

    symbols : uint8[n]. places : tuple of int, place value of each digit. packed : uint8[n // len(places)], overwritten.
    counts : int64[4, 256], added to; four tables, since an addition would wait for the one before to the same count.
    """
    largest, width = uint8(0), len(places)
    for i in range(packed.size):
        code = 0
        for j in range(width):
            digit = symbols[width * i + j]
            largest = max(largest, digit)
            code += places[j] * digit
        packed[i] = code
        counts[i & 3, code & 255] += 1
    return largest


@kernel
def ungroup(packed, digits, width, symbols):
    """Split super-symbols into symbols: the inverse of `group`.

    digits : uint8[256 * 16], the symbols of each super-symbol. symbols : uint8[n], overwritten; n is at most
    width * packed.size, and further symbols of the last super-symbol are dropped.
    """
    n, i = symbols.size, 0
    while width * i + LANES <= n and i < packed.size:
        store(symbols, width * i, load(digits, LANES * packed[i]))
        i += 1
    for rest in range(i, packed.size):
        for j in range(min(width, n - width * rest)):
            symbols[width * rest + j] = digits[LANES * packed[rest] + j]


@kernel
def normalise(counts, bits, frequencies):
    """Scale counts to frequencies that add up to 2^bits and are at least 1 where a count is not 0.

    counts : int64[m], at most 2^bits of them not 0. frequencies : int64[m], overwritten.
    """
    total, missing = counts.sum(), 1 << bits
    for s in range(counts.size):
        frequencies[s] = 0
        if counts[s]:
            frequencies[s] = max(1, int(counts[s] * (1 << bits) / total + 0.5))
        missing -= frequencies[s]
    while missing:
        # where the message grows least, or shrinks most
        best, chosen, change = -1e300, 0, 0
        for s in range(counts.size):
            by = max(1, abs(missing) // 8)
            if missing < 0:
                by = -min(by, frequencies[s] - 1)
            if counts[s] and by:
                gain = counts[s] / (frequencies[s] + by / 2)
                if missing < 0:
                    gain = -gain
                if gain > best:
                    best, chosen, change = gain, s, by
        frequencies[chosen] += change
        missing -= change


@kernel
def count_symbols(counts, width, found):
    """Count the symbols in super-symbols of `width`.

    counts : int64[levels^width], of super-symbols. found : int64[levels], added to.
    """
    for code in range(counts.size):
        rest = code
        for _ in range(width):
            found[rest % found.size] += counts[code]
            rest //= found.size


@kernel
def expect(symbols, width, bits, total, expected):
    """Compute probabilities of super-symbols of independent symbols, out of 2^30.

    They are products of the symbols' frequencies from the last symbol to the first, rounded down each time.

    symbols : int64[levels], frequencies out of 2^bits. total : super-symbols of the message; one that is expected less
    than a quarter of a time in the message gets probability 0. expected : int64[levels^width], overwritten.
    """
    for code in range(expected.size):
        p, rest = CERTAIN, code
        for _ in range(width):
            p = (p * symbols[rest % symbols.size]) >> bits
            rest //= symbols.size
        expected[code] = p if 4 * p * total >= CERTAIN else 0


@kernel
def coded_bits(counts, frequencies, bits):
    """Return the length in bits of super-symbols with these counts, coded by these frequencies out of 2^bits.

    It is infinite if a super-symbol that occurs has frequency 0. counts, frequencies : int64[m].
    """
    found = 0.0
    for s in range(counts.size):
        if counts[s]:
            found += counts[s] * (bits - np.log2(frequencies[s]))
    return found


@kernel
def write_frequencies(frequencies, out):
    """Write Elias gamma codes of frequency + 1, lowest bits first; return their bytes.

    A code is as many zeros as the number has bits after its highest, a one, and those bits. The code of a frequency 0
    is followed by the code of the run's length; a run at the end is left out. out : uint8, long enough.
    """
    held, n_held, at, s, stop = uint64(0), 0, 0, 0, frequencies.size
    while stop and not frequencies[stop - 1]:
        stop -= 1
    while s < stop:
        number, length, zeros = frequencies[s] + 1, 0, 0
        while not frequencies[s + zeros]:
            zeros += 1
        if zeros:
            held |= uint64(1) << uint64(n_held)
            n_held += 1
            number = zeros
        s += max(zeros, 1)
        while number >> (length + 1):
            length += 1
        code = uint64(1 << length) | (uint64(number - (1 << length)) << uint64(length + 1))
        held |= code << uint64(n_held)
        n_held += 2 * length + 1
        while n_held > 0:
            out[at] = held & uint64(255)
            if n_held < 8:
                break
            held >>= uint64(8)
            n_held -= 8
            at += 1
    return at + (n_held > 0)


@kernel
def read_frequencies(payload, start, bits, frequencies):
    """Read the codes of `write_frequencies` from byte `start`; return their end, or -1 if they are damaged."""
    at, missing, s = 8 * start, 1 << bits, 0
    frequencies[:] = 0
    while missing > 0 and s < frequencies.size:
        number, at = _read_gamma(payload, at)
        if number > 1:
            frequencies[s] = number - 1
            missing -= number - 1
            s += 1
        elif number == 1:
            number, at = _read_gamma(payload, at)
            s += number
        if not number:
            return -1
    return -1 if missing else (at + 7) >> 3


@kernel
def _read_gamma(payload, at):
    """Return the number coded from bit `at` on, and the end of its code; 0 if it is not below 2^(MOST_BITS + 1)."""
    end, length = 8 * payload.size, 0
    while at < end and not (payload[at >> 3] >> (at & 7)) & 1:
        length += 1
        at += 1
    at += 1
    if length > MOST_BITS or at + length > end:
        return 0, at
    number = 1 << length
    for j in range(length):
        number |= ((payload[at >> 3] >> (at & 7)) & 1) << j
        at += 1
    return number, at


@kernel
def make_encoder(frequencies, bits, table):
    """Make the table of super-symbols for `push`. table : uint32[at least m, ENCODER_COLUMNS], overwritten."""
    start = 0
    for s in range(frequencies.size):
        f = frequencies[s]
        table[s, _LIMIT] = f << (31 - bits)
        table[s, _EACH] = (1 << bits) - f
        if f > 1:
            shift = 1
            while 1 << shift < f:
                shift += 1
            table[s, _RECIPROCAL] = ((1 << (shift + 31)) + f - 1) // f
            table[s, _SHIFT], table[s, _ONCE] = shift + 31, start
        else:  # 1 has no reciprocal below 2^32: the quotient comes out one too small
            table[s, _RECIPROCAL] = (1 << 32) - 1
            table[s, _SHIFT], table[s, _ONCE] = 32, start + (1 << bits) - 1
        start += f


@kernel
def push(packed, table, low, payload, states):
    """Code super-symbols, from the last to the first.

    Words are written from the payload's end downwards. Returns the position of the first word, or -1 if it would lie
    below `low`. states : uint64, of a power of two, overwritten; super-symbol i goes into state i modulo that.
    """
    at, turn = payload.size, uint64(states.size - 1)
    states[:] = LOWEST
    for i in range(packed.size - 1, -1, -1):
        symbol, state = packed[i], states[uint64(i) & turn]
        if state >= table[symbol, _LIMIT]:
            at -= 2
            if at < low:
                return -1
            payload[at] = state & uint64(255)
            payload[at + 1] = (state >> uint64(8)) & uint64(255)
            state >>= uint64(_WORD_BITS)
        times = (state * table[symbol, _RECIPROCAL]) >> uint64(table[symbol, _SHIFT])
        states[uint64(i) & turn] = state + table[symbol, _ONCE] + times * table[symbol, _EACH]
    return at


@kernel
def make_decoder(frequencies, slots, ranges):
    """Make the tables for `pull`: each slot's super-symbol, and each super-symbol's frequency and first slot.

    slots : uint8[2^bits], ranges : uint32[at least m, 2], overwritten.
    """
    start = 0
    for s in range(frequencies.size):
        ranges[s, 0], ranges[s, 1] = frequencies[s], start
        for slot in range(start, start + frequencies[s]):
            slots[slot] = s
        start += frequencies[s]


@kernel
def pull(payload, at, states, slots, ranges, bits, packed):
    """Decode super-symbols; return the end of their words, which lies beyond a damaged payload.

    states : uint64, of a power of two, each below 2^32; overwritten with the final states, all `LOWEST` unless the
    payload is damaged. packed : uint8, overwritten.
    """
    shift, turn = uint64(bits), uint64(states.size - 1)
    for i in range(packed.size):
        state = states[uint64(i) & turn]
        slot = state & uint64(slots.size - 1)
        symbol = slots[slot]
        packed[i] = symbol
        state = ranges[symbol, 0] * (state >> shift) + slot - ranges[symbol, 1]
        if state < uint64(LOWEST):
            if at + 1 < payload.size:
                state = state << uint64(_WORD_BITS) | uint64(payload[at]) | uint64(payload[at + 1]) << uint64(8)
            at += 2  # also past the end, so that the caller detects damage
        states[uint64(i) & turn] = state
    return at
